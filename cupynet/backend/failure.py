"""Why a device cannot go on, as backends tell it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """What became of a device.

    Attributes:
        text: in words, for people; names the device, and the way out where that is the same for all.
        of_memory: it has none left, and can do whatever needs less.
        limited_by: what set the limit of its memory pool, in words; "" where there is none.
    """

    text: str
    of_memory: bool
    limited_by: str = ""
