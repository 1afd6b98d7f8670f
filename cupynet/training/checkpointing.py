"""Saving and restoring the state of a training run: gathered from all workers, and handed back to them.

A checkpoint holds every worker's `Trainer.state()`: weights, the vectors of the optimizer and the synchronizer, the
position, and the state of callbacks. Arrays that several workers have in common are stored once. Saving causes no
average. A state is compared with the trainer before it is used: digests do not prove who wrote it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynet.backend.environment import environment
from cupynet.core.checks import setting
from cupynet.core.errors import ConfigError, CupynetError, DataError
from cupynet.nn import Model
from cupynet.parallel import Synchronizer
from cupynet.runs.checkpoints import MANIFEST, STATE, Checkpoints, Stored, read
from cupynet.training.clock import Losses
from cupynet.training.resize import filled, mean, regrouped, shares, trained_again
from cupynet.training.state_tree import Arrays, Tree, check_like, gathered, received, send, together
from cupynet.training.trainer_view import TrainerView

if TYPE_CHECKING:
    from cupynet.training.trainer import Trainer

WEIGHTS = "replica/weights/"

log = logging.getLogger(__name__)


def save(store: Checkpoints, trainer: TrainerView, made: Tree | None = None) -> None:
    """Save the state of all workers. Each calls it, after the same round. OutputError, on rank 0.

    made: the result of `made_by`, if known.
    """
    found = gathered(trainer.world, trainer.state())
    if found is not None:
        workers, arrays = found
        state = {
            "iteration": trainer.iteration,
            "epoch": trainer.epoch,
            "made_by": made_by(trainer),
            "model": seen_by(trainer.whole),
            "workers": workers,
        }
        weights = {name.removeprefix(WEIGHTS): each for name, each in arrays.items() if name.startswith(WEIGHTS)}
        others = {name: each for name, each in arrays.items() if not name.startswith(WEIGHTS)}
        store.save(trainer.iteration, state, {"weights": weights, "state": others})


def found(path: str | Path, *, warn: bool = True) -> Stored:
    """Return the checkpoint at `path`, or the newest whole one in that folder.

    Raises:
        ConfigError: there is none.
        DataError: it is damaged, or all of them are.
    """
    path = Path(path)
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        return read(path)
    newest = Checkpoints(path).newest(warn=warn)
    if newest is None:
        raise ConfigError(f"{path}: there is no checkpoint")
    return newest


def stages_of(stored: Stored) -> int:
    """Return the number of stages of each replica: the rank of the first worker with the same weights as rank 0."""
    workers, _ = _content(stored)
    names = [[name for name in each["arrays"] if name.startswith(WEIGHTS)] for each in workers]
    return next((rank for rank in range(1, len(names)) if names[rank] == names[0]), len(names))


def check_stages(stored: Stored, stages: int) -> None:
    """Refuse a checkpoint whose replicas were cut into other stages. ConfigError, DataError."""
    then = stages_of(stored)
    if then != stages:
        remedy = setting("parallel", "pipeline.stages", then, python=f"Pipeline(stages={then})")
        raise ConfigError(f"{stored.path}: its replicas have stages={then}, not {stages}: use {remedy}")


def resumed(trainer: Trainer, stored: Stored | None) -> None:
    """Restore a checkpoint that rank 0 has read. Each worker calls it, the others with None.

    It is restored exactly by as many workers as have written it; else see resize.py. Rank 0 logs which.

    Raises:
        ConfigError: it is of another network, optimizer or synchronizer, or its replicas had other stages.
        DataError: it is not a checkpoint of a training run.
    """
    traffic, sent = trainer.world.traffic, trainer.world.traffic.bytes_sent
    try:
        state, regroup = dealt(trainer, stored)
        traffic.bytes_sent = sent  # that figure is of what training sends
        if regroup:
            state["synchronizer"] = filled(state["synchronizer"], trainer.synchronizer.state())
        check_like(trainer.state(), state)
        trainer.restore(state)
    except CupynetError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"  # verified, but of another version or forged
        place = "" if stored is None else f"{stored.path / STATE}: "
        raise DataError(f"{place}workers[{trainer.rank}]: is not the state of a training run ({what})") from error


def dealt(trainer: Trainer, stored: Stored | None) -> tuple[Tree, bool]:
    """Return this worker's state, and True if the checkpoint is of another number of workers."""
    world = trainer.world
    if world.rank == 0:
        assert stored is not None
        states, regroup = _for_workers(trainer, stored)
        for rank in range(1, world.size):
            send(world, states[rank], rank)
        world.broadcast(np.array([regroup], np.int64))
        return states[0], regroup
    state, flag = received(world), np.zeros(1, np.int64)
    world.broadcast(flag)
    return state, bool(flag[0])


def _for_workers(trainer: Trainer, stored: Stored) -> tuple[list[Tree], bool]:
    """Return the state of every worker, and True if they were computed for another number of workers."""
    world, stages = trainer.world, trainer.groups.stages.size
    workers, arrays = _content(stored)
    states = [together(each["numbers"], {name: arrays[at] for name, at in each["arrays"].items()}) for each in workers]
    check_stages(stored, stages)
    for state in states:  # older checkpoints have no training loss of the epoch
        state.setdefault("losses", Losses().state())
    then, now = stored.state.get("made_by", {}), made_by(trainer)
    log.info("%s: %s", stored.path, differences(then, now) or "continues bit for bit")
    if len(states) == world.size:
        return states, False
    again, epoch = trained_again(states, world.size, stages), states[0]["trainer"]["epoch"] + 1
    log.info(
        "%d workers continue from %d: all begin with the mean of the weights; batches of epoch %d trained on again: %d",
        *(world.size, len(states), epoch, again),
    )
    return regrouped(states, world.size, stages, trainer.synchronizer), True


def made_by(trainer: TrainerView) -> dict[str, Any]:
    """Return everything besides the settings that affects results bit for bit; saved, and compared on resume."""
    machine, backend = environment(), trainer.backend
    blas = [f"{each['internal_api']} {each['version']} {each['architecture']}" for each in machine["blas"]]
    threads = sorted({each["num_threads"] for each in machine["blas"]})
    versions = {name: machine["versions"].get(name) for name in ("cupynet", "numpy", "numba")}
    return {
        "workers": trainer.workers,
        "backend": backend.name,
        "dtype": backend.policy.name,
        "processor": machine["cpu"],
        "vector instructions": " ".join(machine["cpu_flags"]),
        "BLAS": ", ".join(sorted(set(blas))),
        "BLAS threads": ", ".join(map(str, threads)),
        **versions,
    }


def seen_by(model: Model) -> dict[str, Any]:
    """Return what a model needs besides its weights to predict, as in a checkpoint and a summary.json."""
    return {
        "image_shape": list(model.input.shape),
        "normalize": model.pixels.normalization(),
        "class_names": list(model.class_names) or None,
    }


def trained(stored: Stored, synchronizer: Synchronizer) -> Arrays:
    """Return the weights and buffers of a checkpoint: the mean if replicas differ, see resize.py. DataError."""
    workers, arrays = _content(stored)
    try:
        states = [
            together(each["numbers"], {name: arrays[at] for name, at in each["arrays"].items()}) for each in workers
        ]
        stages = stages_of(stored)
        weights: Arrays = {}
        for stage in range(stages):
            own = states[stage::stages]
            found = [state["replica"]["weights"] for state in own]
            alike = all(_same(found[0], each) for each in found[1:])
            weights |= found[0] if alike else mean(found, shares(own, synchronizer))
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(f"{stored.path / STATE}: is not the state of a training run ({error})") from error
    return weights


def _same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in a sentence what differs between two `made_by`; "" if the results are the same bit for bit."""
    other = [f"{name} {now[name]}, then {then.get(name, 'unknown')}" for name in now if now[name] != then.get(name)]
    return f"continues, but not bit for bit: {'; '.join(other)}" if other else ""


def _content(stored: Stored) -> tuple[list[Tree], Arrays]:
    """Return workers and arrays as `save` stored them. DataError."""
    workers = stored.state.get("workers")
    arrays = {WEIGHTS + name: each for name, each in stored.arrays.get("weights", {}).items()}
    arrays |= stored.arrays.get("state", {})
    where = stored.path / STATE
    if not isinstance(workers, list) or not workers:
        raise DataError(f"{stored.path}: is not a checkpoint of a training run: it names no workers")
    for rank, each in enumerate(workers):
        numbers, names = (each.get("numbers"), each.get("arrays")) if isinstance(each, dict) else (None, None)
        if not isinstance(numbers, dict) or not isinstance(names, dict):
            raise DataError(f"{where}: workers[{rank}]: expected numbers and names of arrays, found {each!r:.80}")
        lacking = [name for name in names.values() if not isinstance(name, str) or name not in arrays]
        if lacking:
            raise DataError(f"{stored.path}: lacks the arrays {lacking!r:.80} of worker {rank}")
    return workers, arrays
