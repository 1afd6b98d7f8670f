"""What of the machine each of several processes gets that work side by side: cores, or devices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cupynet.backend import available_cores, blas, usable_cores

MOST_ON_CPU = 4  # jobs at once by default
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Share:
    """One of several equal parts of the machine.

    Attributes:
        cores: which, by the system's numbers; empty where a process cannot be held to some of them (macOS).
        threads: BLAS threads, where there are no cores to hold it to.
        devices: which of those that this process sees; empty on a CPU.
    """

    cores: tuple[int, ...] = ()
    threads: int | None = None
    devices: tuple[int, ...] = ()

    def __str__(self) -> str:
        count = len(self.cores) or self.threads or 0
        parts = [f"{len(each)} {name}{'s' * (len(each) != 1)}" for name, each in (("device", self.devices),) if each]
        return " and ".join([*parts, *([f"{count} core{'s' * (count != 1)}"] if count else [])])

    def environment(self, devices: bool = True) -> dict[str, str]:
        """What a process in this share is told by its environment. devices: whether of these."""
        found = {}
        if devices and self.devices:
            seen = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
            names = [seen[device] if device < len(seen) else str(device) for device in self.devices]
            found[VISIBLE] = ",".join(names)
        if self.threads is not None:
            found |= {name: str(self.threads) for name in blas.THREADS_VARIABLES if name not in os.environ}
        return found

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A process that is started in here by this thread has these cores alone, from its first moment."""
        if not self.cores:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)  # of this thread
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def shares(at_once: int | None, jobs: int, devices: Sequence[int]) -> list[Share]:
    """The machine in as many parts as there are jobs at once, which is at most the number of jobs.

    More than there are cores or devices share them.

    Args:
        at_once: jobs; None for one per device, or on a CPU one per core up to 4.
        devices: those to share out; none on a CPU.
    """
    cores = sorted(usable_cores())[: available_cores()]
    if at_once is None:
        at_once = len(devices) or min(len(cores), MOST_ON_CPU)
    count = max(min(at_once, jobs), 1)
    held = hasattr(os, "sched_setaffinity")
    return [
        Share(
            tuple(_part(cores, place, count)) if held else (),
            None if held else max(len(cores) // count, 1),
            tuple(_part(devices, place, count)),
        )
        for place in range(count)
    ]


def _part(things: Sequence[int], place: int, count: int) -> Sequence[int]:
    """The things of one of `count` places, next to each other; one for each where there are fewer than places."""
    if len(things) < count:
        return things[place % len(things) :][:1] if things else ()
    return things[place * len(things) // count : (place + 1) * len(things) // count]
