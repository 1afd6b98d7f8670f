"""The first lines of a run's log."""

from __future__ import annotations

import logging

from cupynet.backend import available_cores, blas
from cupynet.backend.cuda.gpus import NOT_INSTALLED, has_driver
from cupynet.config.experiment import Experiment
from cupynet.core.wording import counted
from cupynet.parallel import GradientSharing

log = logging.getLogger(__name__)


def announce(experiment: Experiment) -> None:
    """Log the backend, the workers, and warnings about the configuration."""
    settings, placement, job = experiment.settings, experiment.placement, experiment.job
    devices = ", ".join(dict.fromkeys(placement.names()))
    stages = f" of {placement.stages} stages" if placement.stages > 1 else ""
    workers = f"{counted(placement.workers, 'worker')}{stages}"
    log.info("backend %s, dtype %s, %s on %s", experiment.backend_name, settings.dtype, workers, devices)
    if reason := _worth_knowing(experiment.backend_reason or ""):
        log.info("%s", reason)
    if job is not None and job.size > 1:
        log.info("%d ranks, %d of them on this machine", job.size, job.on_machine)
    elif job is not None:
        log.warning("parallel.launcher=mpi: there is only one rank. Use mpiexec -n RANKS cupynet train ...")
    _warn(experiment)
    if placement.devices:
        return
    log.info("BLAS %s", blas.description())
    sharing = placement.ranks if job is None else job.sharing
    if sharing > available_cores():
        log.warning("%d workers or stages share %d cores. Training is faster with fewer", sharing, available_cores())
    if settings.dtype == "bfloat16" and experiment.backend_name == "numba" and _has_amx():
        log.info("bfloat16: AMX is used for dense layers, and for 3x3 convolutions without max pooling")
    elif settings.dtype in ("half", "bfloat16"):
        log.warning(
            "dtype=%s: this CPU computes in 32 bits, so small networks train no faster than in float", settings.dtype
        )


def _has_amx() -> bool:
    from cupynet.backend.cpu.kernels import amx  # imports numba, as the backend already has

    return amx.available()


def _warn(experiment: Experiment) -> None:
    settings, pipeline = experiment.settings, experiment.options.pipeline
    last, applied = experiment.network.output_activation, experiment.loss.applies
    if applied is not None and last != "identity":
        log.warning(
            "model: the last layer has activation %s, but the loss applies %s itself. Use activation identity",
            *(last, applied),
        )
    if pipeline is not None and pipeline.micro_batches > settings.batch_size:
        counts = pipeline.micro_batches, settings.batch_size
        log.warning("parallel.pipeline.micro_batches=%d exceeds the batch size, %d. Use fewer", *counts)
    every = settings.parallel.averaging_frequency
    if every is not None and isinstance(experiment.synchronizer, GradientSharing):
        log.warning(
            "parallel.averaging_frequency=%s has no effect, because gradients are shared in every iteration", every
        )


def _worth_knowing(reasons: str) -> str:
    """Filter the reasons why preferred backends are not used. A missing CuPy matters only if there is a GPU driver."""
    return "; ".join(each for each in reasons.split("; ") if has_driver() or not each.startswith(NOT_INSTALLED))
