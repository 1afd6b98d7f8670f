"""Placement of replicas and pipeline stages on devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cupynet.backend import available_cores, device_count
from cupynet.core.checks import integer
from cupynet.core.errors import ConfigError

MOST_CPU_WORKERS = 4  # default limit, because more replicas change the training dynamics


@dataclass(frozen=True)
class Placement:
    """The replicas of a run, their pipeline stages and their devices.

    Attributes:
        devices: GPU indices; empty on a CPU. Rank r uses devices[r % len(devices)]. With several machines, r is the
            local rank.
        stages: pipeline stages per replica; 1 without a pipeline.
        seats: the local rank of each rank; empty if all ranks run on this machine.
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
        """Choose values for the arguments that are None.

        Args:
            workers: None for one replica per device, or per CPU core (at most 4), or as many as the number of started
                ranks allows.
            devices: None for all devices, `first` before the others.
            stages: None for as many as there are devices or cores per replica, at most `most_stages`. If `workers` is
                None too, there is one replica.
            seats: the local rank of each started rank; None if no ranks were started.

        Raises:
            ConfigError: a count is below 1; a device is missing, repeated, or given for a CPU backend; or the number of
                started ranks is not replicas times stages.
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
            reason = f"{workers} replicas{each} need {workers * stages} ranks, but {started} were started"
            raise ConfigError(f"{reason}. Use mpiexec -n {workers * stages}, or omit workers", "workers", str(workers))
        return cls(workers, tuple(asked), stages, tuple(seats or ()))

    @property
    def ranks(self) -> int:
        """Number of workers: replicas times stages."""
        return self.workers * self.stages

    def device(self, rank: int) -> int:
        """Return the device index of a rank; 0 on a CPU."""
        seat = self.seats[rank] if self.seats else rank
        return self.devices[seat % len(self.devices)] if self.devices else 0

    def of_process(self, rank: int | None) -> list[int]:
        """Return the GPUs of a process; none on a CPU. rank: None if all ranks are threads of this process."""
        return list(self.devices) if rank is None or not self.devices else [self.device(rank)]

    def names(self) -> list[str]:
        """Return the device name of each rank: `cuda:0`, or `cpu`."""
        return [f"cuda:{self.device(rank)}" if self.devices else "cpu" for rank in range(self.ranks)]


def _devices(backend_name: str, devices: Sequence[int] | None, first: int) -> list[int]:
    """Return the requested GPUs, or all of them with `first` in front; none on a CPU."""
    there = device_count(backend_name)
    if devices is None:
        return sorted(range(there), key=lambda device: (device != first, device))
    shown = str(list(devices))
    if not there:
        reason = f"backend {backend_name} runs on the CPU. Remove this setting"
        raise ConfigError(reason, "devices", shown)
    asked = [integer("devices", device, 0) for device in devices]
    if not asked or len(set(asked)) < len(asked) or max(asked) >= there:
        reason = f"must list at least one of the devices 0 to {there - 1}, without duplicates"
        raise ConfigError(reason, "devices", shown)
    return asked
