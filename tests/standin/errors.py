"""Mistakes that make a GPU hang or return wrong numbers, or that go unnoticed. Here each raises an exception.

If CuPy itself raises an exception for a mistake, its type is a base class, so that programs can handle it.
"""


class CUDARuntimeError(RuntimeError):
    """An error of the CUDA runtime, which is not a misuse."""


class Misuse(Exception):
    """A mistake in the use of CuPy. It is recorded in `Machine.misuses`, so it cannot be swallowed."""


class Unordered(Misuse):
    """Two streams use the same memory without synchronization."""


class WrongDevice(Misuse, ValueError):
    """An array or a stream is used on another device."""


class Unwritten(Misuse):
    """Unwritten memory is read."""


class Freed(Misuse):
    """Memory is used after it was freed."""


class Overrun(Misuse):
    """Memory outside the intended range is read or written."""


class Foreign(Misuse, TypeError):
    """A value that CuPy does not accept, or would convert silently."""


class InCapture(Misuse, RuntimeError):
    """A call that cannot be captured is made while a stream captures."""


class Deadlock(Misuse):
    """Threads or devices would wait for each other forever."""


class Disagreement(Misuse):
    """Ranks make different calls in one collective operation."""


class BadLaunch(Misuse):
    """A kernel or a function called by address gets invalid arguments."""
