"""What a GPU would have punished with a hang or a wrong number, or worse, forgiven: here it is an exception.

Where CuPy itself raises, its type is among the bases, so that a program that handles it does so here too.
"""

from __future__ import annotations


class CUDARuntimeError(RuntimeError):
    """What the runtime refuses: no misuse, but CuPy's own."""


class Misuse(Exception):
    """A mistake in the use of CuPy. `Machine.misuses` keeps it, too: it cannot be swallowed."""


class Unordered(Misuse):
    """Two operations touch the same memory, on two streams, and nothing says which comes first."""


class WrongDevice(Misuse, ValueError):
    """An array or a stream of another device than the one that works."""


class Unwritten(Misuse):
    """Unwritten memory is read."""


class Freed(Misuse):
    """Memory is used that was given back."""


class Overrun(Misuse):
    """Something was read or written outside of the memory that was meant."""


class Foreign(Misuse, TypeError):
    """Something that is no array of CuPy's, and is not converted silently."""


class InCapture(Misuse, RuntimeError):
    """What cannot be recorded while a stream captures."""


class NoGemmInCapture(InCapture, NotImplementedError):
    """cuBLAS while a stream captures, which CuPy refuses."""


class Deadlock(Misuse):
    """Threads or devices that would wait for each other for ever."""


class Disagreement(Misuse):
    """Ranks that take part in one collective operation with different calls."""


class BadLaunch(Misuse):
    """A kernel is given what it does not take."""
