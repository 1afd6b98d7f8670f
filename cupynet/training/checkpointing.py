"""The state of a training run: gathered from all workers and saved on rank 0; read, and handed back to them.

A checkpoint holds every worker's `Trainer.state()`: weights, the vectors of the optimizer and the synchronizer, the
position, and the state of callbacks. What several workers hold alike is stored once. Saving causes no average. What is
read is compared with the trainer before it is used: digests prove that a checkpoint is whole, not who wrote it.
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
    """Write down where all workers are; each calls it, after the same round. OutputError, on rank 0.

    made: what `made_by` said, where that is known.
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
    """The checkpoint at `path`, or of a folder of them the newest that is whole.

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
    """Into how many stages each replica was cut: the workers before one that has the same weights again. DataError."""
    workers, _ = _content(stored)
    names = [[name for name in each["arrays"] if name.startswith(WEIGHTS)] for each in workers]
    return next((rank for rank in range(1, len(names)) if names[rank] == names[0]), len(names))


def check_stages(stored: Stored, stages: int) -> None:
    """Refuse a checkpoint whose replicas were cut into other stages. ConfigError, DataError."""
    then = stages_of(stored)
    if then != stages:
        raise ConfigError(
            f"{stored.path}: its replicas were cut into {_stages(then)}, and here into {_stages(stages)}: cut them as "
            f"then, {setting('parallel', 'pipeline.stages', then, python=f'Pipeline(stages={then})')}"
        )


def _stages(count: int) -> str:
    return f"{count} stage{'s' * (count != 1)}"


def resumed(trainer: Trainer, stored: Stored | None) -> None:
    """Let this worker go on from the checkpoint that rank 0 has read; each calls it, the others with None.

    By as many workers as it is of it is taken over exactly; with others see resize.py. Rank 0 says so in the log.

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
        # whole, with the right digests, and yet not as it was written here: the state of another version, or made up
        what = f"lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        place = "" if stored is None else f"{stored.path / STATE}: "
        raise DataError(f"{place}workers[{trainer.rank}]: is not the state of a training run ({what})") from error


def dealt(trainer: Trainer, stored: Stored | None) -> tuple[Tree, bool]:
    """This worker's state, from what rank 0 has read; and whether it is of another number of workers."""
    world = trainer.world
    if world.rank == 0:
        if stored is None:
            raise ValueError("rank 0 needs what was read")
        states, regroup = _for_workers(trainer, stored)
        for rank in range(1, world.size):
            send(world, states[rank], rank)
        world.broadcast(np.array([regroup], np.int64))
        return states[0], regroup
    state, told = received(world), np.zeros(1, np.int64)
    world.broadcast(told)
    return state, bool(told[0])


def _for_workers(trainer: Trainer, stored: Stored) -> tuple[list[Tree], bool]:
    """The state of every worker, and whether they had to be made anew."""
    world, stages = trainer.world, trainer.groups.stages.size
    workers, arrays = _content(stored)
    states = [together(each["numbers"], {name: arrays[at] for name, at in each["arrays"].items()}) for each in workers]
    check_stages(stored, stages)
    for state in states:  # one from before epochs had a training loss: that of this epoch is of what is left of it
        state.setdefault("losses", Losses().state())
    then, now = stored.state.get("made_by"), made_by(trainer)
    others = differences(then if isinstance(then, dict) else {}, now)
    log.info("%s: %s", stored.path, others or "goes on exactly: same workers, backend, dtype, processor and BLAS")
    if len(states) == world.size:
        return states, False
    again, epoch = trained_again(states, world.size, stages), states[0]["trainer"]["epoch"] + 1
    are = "batches of epoch %d are" if again > 1 else "batch of epoch %d is"
    more = f"; {again} {are % epoch} trained on once more" if again else ""
    log.info(
        "workers: %d go on from what %d left: all begin with the mean of their weights, by the samples that each had "
        "seen since they last met%s",
        world.size,
        len(states),
        more,
    )
    return regrouped(states, world.size, stages, trainer.synchronizer), True


def made_by(trainer: TrainerView) -> dict[str, Any]:
    """What the bits of a training follow from, besides its settings: told in a checkpoint, compared by who goes on."""
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
    """What a model needs besides its weights to predict, as a checkpoint and a summary.json have it."""
    return {
        "image_shape": list(model.input.shape),
        "normalize": model.pixels.normalization(),
        "class_names": list(model.class_names) or None,
    }


def trained(stored: Stored, synchronizer: Synchronizer) -> Arrays:
    """The weights and buffers that a checkpoint has come to: of replicas that differ the mean.

    Each counts what it would in their next average, see resize.py. DataError.
    """
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
    """What is other than it was, in a sentence; "" where the same bits come out."""
    other = [f"{name} {now[name]}, then {then[name]}" for name in now if name in then and now[name] != then[name]]
    unknown = [name for name in now if name not in then]
    if unknown:
        return f"goes on, maybe not bit for bit: it does not say with which {', '.join(unknown)} it was made"
    if not other:
        return ""
    if then["dtype"] != now["dtype"]:
        narrower = {"double": 2}.get(now["dtype"], 1) < {"double": 2}.get(then["dtype"], 1)
        kept = "weights and optimizer state are rounded to 32 bits" if narrower else "weights are taken over exactly"
        other.append(f"{kept}, what follows is computed otherwise")
    return f"goes on to rounding, not bit for bit: {'; '.join(other)}"


def _content(stored: Stored) -> tuple[list[Tree], Arrays]:
    """What `save` gave away; DataError."""
    workers = stored.state.get("workers")
    arrays = {WEIGHTS + name: each for name, each in stored.arrays.get("weights", {}).items()}
    arrays |= stored.arrays.get("state", {})
    where = stored.path / STATE
    if not isinstance(workers, list) or not workers:
        raise DataError(f"{stored.path}: is not a checkpoint of a training run: it names no workers")
    for rank, each in enumerate(workers):
        numbers, names = (each.get("numbers"), each.get("arrays")) if isinstance(each, dict) else (None, None)
        if not isinstance(numbers, dict) or not isinstance(names, dict) or not all(map(_is_text, names.values())):
            raise DataError(
                f"{where}: workers[{rank}]: expected numbers, and of each array its name, found {each!r:.80}"
            )
        lacking = sorted(set(each["arrays"].values()) - arrays.keys())
        if lacking:
            raise DataError(f"{stored.path}: lacks {', '.join(lacking)} of worker {rank}")
    return workers, arrays


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
