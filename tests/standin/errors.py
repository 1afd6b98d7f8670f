"""Mistakes that a GPU punishes with a hang or a wrong number, or forgives. Here each is an exception.

If CuPy itself raises an exception for a mistake, its type is among the bases, so that programs can handle it.
"""


class CUDARuntimeError(RuntimeError):
    """An error of the CUDA runtime: no misuse."""


class Misuse(Exception):
    """A mistake in the use of CuPy. `Machine.misuses` keeps it: it cannot be swallowed."""


class Unordered(Misuse):
    """Two streams use the same memory, and nothing orders them."""


class WrongDevice(Misuse, ValueError):
    """An array or a stream is used on another device."""


class Unwritten(Misuse):
    """Unwritten memory is read."""


class Freed(Misuse):
    """Memory is used after it was freed."""


class Overrun(Misuse):
    """Something outside the intended memory is read or written."""


class Foreign(Misuse, TypeError):
    """A value that CuPy does not take, or would convert silently."""


class InCapture(Misuse, RuntimeError):
    """A call that cannot be captured, while a stream captures."""


class Deadlock(Misuse):
    """Threads or devices that would wait for each other forever."""


class Disagreement(Misuse):
    """Ranks that make different calls in one collective operation."""


class BadLaunch(Misuse):
    """A call by address, or of a kernel, with arguments that it does not take."""
