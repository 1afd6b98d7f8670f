from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cupynet.backend import available_cores, device_count
from cupynet.core import shared_options
from cupynet.core.checks import integer
from cupynet.core.errors import ConfigError

MAX_CPU_WORKERS = 4  # by default, because more replicas change the training dynamics


@dataclass(frozen=True)
class Placement:
    """The replicas of a run, their pipeline stages and their devices.

    Attributes:
        devices: GPU indices; empty on a CPU. The worker with local rank r uses devices[r % len(devices)].
        stages: pipeline stages per replica; 1 without a pipeline.
        seats: the local rank of each MPI rank; empty if workers are threads.
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
        """Create a placement, choosing values for arguments that are None.

        Args:
            workers: number of replicas. By default, the number of MPI ranks, devices or CPU cores, divided by `stages`,
                but at most 4 on a CPU.
            devices: GPU indices; by default all, with `first` in front.
            stages: stages per replica. With None, one for each device or core of a replica, but at most `most_stages`;
                if `workers` is also None, there is one replica.
            seats: the local rank of each MPI rank; None if workers are threads.

        Raises:
            ConfigError: a count is below 1; a device is missing, repeated, or given for a CPU backend; or the number of
                started ranks is not replicas times stages.
        """
        gpus = _devices(backend_name, devices, first)
        stages = None if stages is None else integer("stages", stages, 1)
        started = None if seats is None else len(seats)
        available = started or len(gpus) or available_cores()
        if workers is None and started and stages and started % stages:
            reason = f"does not divide the number of ranks, {started}. Start a multiple of {stages} with mpiexec -n"
            raise ConfigError(reason, "pipeline.stages", str(stages))
        if workers is None:
            max_workers = available if gpus or started else MAX_CPU_WORKERS
            workers = 1 if stages is None else min(max(available // stages, 1), max_workers)
        workers = shared_options.workers("workers", workers)
        if stages is None:
            stages = min(max(available // workers, 1), most_stages)
        if started is not None and workers * stages != started:
            per_replica = f" of {stages} stages" if stages > 1 else ""
            reason = f"{workers} replicas{per_replica} need {workers * stages} ranks, but {started} were started"
            raise ConfigError(f"{reason}. Use mpiexec -n {workers * stages}, or omit workers", "workers", str(workers))
        return cls(workers, tuple(gpus), stages, tuple(seats or ()))

    @property
    def ranks(self) -> int:
        """Number of ranks: replicas times stages."""
        return self.workers * self.stages

    def device(self, rank: int) -> int:
        """Return the device index of a rank; 0 on a CPU."""
        seat = self.seats[rank] if self.seats else rank
        return self.devices[seat % len(self.devices)] if self.devices else 0

    def of_process(self, rank: int | None) -> list[int]:
        """Return the GPUs of a process, empty on a CPU. `rank` is None if all ranks are threads of this process."""
        return list(self.devices) if rank is None or not self.devices else [self.device(rank)]

    def names(self) -> list[str]:
        """Return the device name of each rank: `cuda:0`, or `cpu`."""
        return [f"cuda:{self.device(rank)}" if self.devices else "cpu" for rank in range(self.ranks)]


def _devices(backend_name: str, devices: Sequence[int] | None, first: int) -> list[int]:
    """Return the requested GPUs, by default all with `first` in front; empty on a CPU."""
    available = device_count(backend_name)
    if devices is None:
        return sorted(range(available), key=lambda device: (device != first, device))
    shown = str(list(devices))
    if not available:
        reason = f"backend {backend_name} runs on the CPU. Remove this setting"
        raise ConfigError(reason, "devices", shown)
    requested = [integer("devices", device, 0) for device in devices]
    if not requested or len(set(requested)) < len(requested) or max(requested) >= available:
        reason = f"must list at least one of the devices 0 to {available - 1}, without duplicates"
        raise ConfigError(reason, "devices", shown)
    return requested
