"""The number of replicas of a run, and the device of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cupynet.backend import available_cores, device_count
from cupynet.core.checks import integer
from cupynet.core.errors import ConfigError

MOST_CPU_WORKERS = 4  # by default: more replicas than this change how a run learns


@dataclass(frozen=True)
class Placement:
    """Replicas, the stages of each, and their devices.

    Attributes:
        workers: the number of replicas.
        devices: the GPUs, rank r on devices[r % len(devices)]; empty on a CPU. With several machines these are the
            devices of each machine, and r is the rank's number on its machine.
        stages: the number of stages of each replica; 1 without a pipeline.
        seats: the number of each rank on its machine; empty if all ranks are on this machine.
    """

    workers: int
    devices: tuple[int, ...]
    stages: int = 1
    seats: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        backend_name: str,
        workers: int | None = None,
        devices: Sequence[int] | None = None,
        first: int = 0,
        stages: int | None = 1,
        most_stages: int = 1,
        seats: Sequence[int] | None = None,
    ) -> Placement:
        """Choose the values that are not set.

        Args:
            workers: None for one replica per device, or per core of a CPU, at most 4; or as many as the started ranks
                allow.
            devices: None for all, `first` before the others.
            stages: None for as many as there are devices or cores per replica, at most `most_stages`; with one replica
                if `workers` is None too.
            seats: the number of each started rank on its machine; None if no ranks were started.

        Raises:
            ConfigError: a count below 1, a device that does not exist or is named twice, devices for a CPU backend;
                more or fewer replicas and stages than ranks.
        """
        asked = _devices(backend_name, devices, first)
        started = None if seats is None else len(seats)
        at_hand = started or len(asked) or available_cores()
        if workers is None:
            most_workers = at_hand if asked or started else MOST_CPU_WORKERS
            workers = 1 if stages is None else min(max(at_hand // integer("stages", stages, 1), 1), most_workers)
        workers = integer("workers", workers, 1)
        if stages is None:
            stages = min(max(at_hand // workers, 1), most_stages)
        stages = integer("stages", stages, 1)
        if started is not None and workers * stages != started:
            each = f" of {stages} stages" if stages > 1 else ""
            reason = f"{workers} replicas{each} need {workers * stages} ranks, and {started} were started"
            raise ConfigError(f"{reason}: mpiexec -n {workers * stages}, or leave workers out", "workers", str(workers))
        return cls(workers, tuple(asked), stages, tuple(seats or ()))

    @property
    def ranks(self) -> int:
        """The number of workers: replicas times stages."""
        return self.workers * self.stages

    def device(self, rank: int) -> int:
        """Return the device of a rank on its machine; 0 on a CPU."""
        seat = self.seats[rank] if self.seats else rank
        return self.devices[seat % len(self.devices)] if self.devices else 0

    def of_process(self, rank: int | None) -> list[int]:
        """Return the GPUs that a process uses; none on a CPU. rank: None if all ranks are threads of this process."""
        return list(self.devices) if rank is None or not self.devices else [self.device(rank)]

    def names(self) -> list[str]:
        """Return the device of each rank, in order: `cuda:0`, or `cpu`."""
        return [f"cuda:{self.device(rank)}" if self.devices else "cpu" for rank in range(self.ranks)]


def _devices(backend_name: str, devices: Sequence[int] | None, first: int) -> list[int]:
    """Return the GPUs to use: the requested ones, or all, beginning with `first`; none on a CPU. ConfigError."""
    there = device_count(backend_name)
    if devices is None:
        return sorted(range(there), key=lambda device: (device != first, device))
    shown = str(list(devices))
    if not there:
        reason = f"backend {backend_name} runs on the CPU and has none; leave devices out"
        raise ConfigError(reason, "devices", shown)
    asked = [integer("devices", device, 0) for device in devices]
    if not asked or len(set(asked)) < len(asked) or max(asked) >= there:
        reason = f"name at least one of the devices 0 to {there - 1}, and no device twice"
        raise ConfigError(reason, "devices", shown)
    return asked
