from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cupynet.backend import FRACTIONS, PixelScale
from cupynet.backend.environment import environment
from cupynet.core.described import stable
from cupynet.core.errors import ConfigError, CupynetError, DataError
from cupynet.core.files import require_folder
from cupynet.core.wording import setting, shown
from cupynet.data import Source
from cupynet.nn import Model
from cupynet.parallel import Synchronizer
from cupynet.runs.checkpoints import MANIFEST, STATE, Checkpoints, Stored, read
from cupynet.runs.history import present
from cupynet.runs.layout import CHECKPOINTS, STEP
from cupynet.training.agreement import Refused, agreed
from cupynet.training.callback_list import by_class_name
from cupynet.training.clock import Statistics
from cupynet.training.resize import mean, resized, shares, trained_again
from cupynet.training.state_tree import (
    Arrays,
    Tree,
    check_numbers,
    check_position,
    filled,
    gathered,
    received,
    send,
    together,
)
from cupynet.training.trainer import Trainer

WEIGHTS = "replica/weights/"
RENAMED = {"History": "HistoryWriter"}  # callback names of earlier versions -> current names

log = logging.getLogger(__name__)


def save(store: Checkpoints, trainer: Trainer) -> None:
    """Save the state of all workers, which must all call this after the same iteration."""
    _write(store, trainer, _gathered(trainer))


def _gathered(trainer: Trainer) -> tuple[list[Tree], Arrays] | None:
    with trainer.world.traffic.uncounted():
        return gathered(trainer.world, trainer.state())


def _write(store: Checkpoints, trainer: Trainer, states: tuple[list[Tree], Arrays] | None) -> None:
    if states is not None:
        workers, arrays = states
        state = {
            "iteration": trainer.iteration,
            "epoch": trainer.epoch,
            "made_by": made_by(trainer),
            "model": seen_by(trainer.replica.whole),
            "data": None if trainer.data is None else list(trainer.data),
            "stages": trainer.groups.stages.size,
            "workers": workers,
        }
        weights = {name.removeprefix(WEIGHTS): each for name, each in arrays.items() if name.startswith(WEIGHTS)}
        others = {name: each for name, each in arrays.items() if not name.startswith(WEIGHTS)}
        store.save(trainer.iteration, state, {"weights": weights, "state": others})


def save_between_fits(store: Checkpoints, trainer: Trainer) -> None:
    """Save as in `save`, after copying the model to all replicas, because the user may have changed its weights.

    If the checkpoint cannot be written, the workers remain usable (see `agreed`).
    """
    trainer.replica.begin()
    trainer.synchronizer.begin(trainer.replica)
    states = _gathered(trainer)
    with agreed(trainer.world):
        if trainer.rank == 0:
            require_folder(store.folder)
        _write(store, trainer, states)
    if trainer.rank == 0 and store.steps()[-1] > trainer.iteration:
        log.warning("%s: also contains later checkpoints. To restore this one, give its path", store.folder)


def found(path: str | Path, *, warn: bool = True) -> Stored:
    """Return the checkpoint at `path`, or the newest undamaged one if `path` is a folder of checkpoints."""
    if not isinstance(path, str | Path):
        raise ConfigError("must be the path of a checkpoint, or of a folder of checkpoints", "path", shown(path))
    path = Path(path)
    if (path / MANIFEST).exists() or STEP.fullmatch(path.name):
        return read(path)
    newest = Checkpoints(path).newest(warn=warn)
    if newest is None:
        inside = path / CHECKPOINTS
        remedy = (
            f"Use {inside}"
            if inside.is_dir()
            else "Start a new run, or copy the checkpoints here if they are elsewhere"
        )
        if path.is_file():
            remedy = "It is a file; to load weights, use model.load_weights or cupynet.load"
        raise ConfigError(f"{path}: no checkpoint found. {remedy}")
    return newest


def resume(trainer: Trainer, path: str | Path) -> None:
    """Restore the checkpoint that rank 0 finds at `path`. Every worker must call this.

    If the number of workers is unchanged, the state is restored exactly; otherwise see resize.py. If an error is
    raised, the workers do not change and remain usable (see `agreed`).

    Raises:
        ConfigError: there is no checkpoint, or its state does not fit this network, optimizer, schedule, synchronizer
            or number of stages.
        DataError: the checkpoint is damaged, or does not belong to a training run.
    """
    world, samples, labels = trainer.world, 0, 0
    states: list[Tree] = []
    with agreed(world):
        if world.rank == 0:
            stored = found(path)
            with _malformed(f"{stored.path / STATE}, workers[0]"):
                about = {"model": stored.state.get("model", {})}  # not saved by version 0.1.0
                states = [{**each, **about} for each in _for_workers(trainer, stored)]
                samples, labels = map(int, stored.state.get("data") or (0, 0))  # not saved by version 0.1.0
    for rank, other in enumerate(states[1:], 1):
        send(world, other, rank)
    state = states[0] if states else together(*received(world, 0))
    samples, labels = world.gather_numbers(samples, labels)[0].astype(np.int64).tolist()
    own, whole, place = trainer.state(), trainer.replica.whole, f"{path}, workers[{world.rank}]"
    described = whole.pixels, whole.class_names, whole.trained_on
    try:
        with agreed(world), _malformed(place):
            if state.pop("resized", 0):  # a single worker saves fewer entries
                state["synchronizer"] = filled(state["synchronizer"], own["synchronizer"])
            check_position(state["trainer"])
            check_numbers({name: each for name, each in own.items() if name != "callbacks"}, state)
            trainer.replica.check_state(state["replica"])
            trainer.restore(state)
            _restore_metadata(whole, state["model"])
    except Refused:
        trainer.restore(own)
        whole.pixels, whole.class_names, whole.trained_on = described
        raise
    if trainer.replica.scaler is not None:
        trainer.replica.scaler.restored()
    trainer.replica.assemble()
    trainer.data = (samples, labels) if samples else None


def _for_workers(trainer: Trainer, stored: Stored) -> list[Tree]:
    """Return each worker's state, with `resized` = 1 if all workers start from the mean (see resize.py)."""
    size, stages, states = trainer.world.size, trainer.groups.stages.size, _states(stored)
    check_stages(stored, stages)
    then, now = stored.state.get("made_by", {}), made_by(trainer)
    log.info("%s: %s", stored.path, differences(then, now) or "continues bit for bit")
    if len(states) != size:
        again, epoch = trained_again(states, size, stages), states[0]["trainer"]["epoch"] + 1
        log.info(
            "resuming with %d workers instead of %d: all start from the mean weights; batches of epoch %d repeated: %d",
            *(size, len(states), epoch, again),
        )
    elif _differ(states, stages, trainer.replica.whole.params.frozen):
        log.info("all workers start from the mean weights, because their frozen weights differ")
    else:
        return states
    callbacks, scaler = by_class_name(trainer.callbacks), trainer.replica.scaler
    joint = scaler is not None and scaler.joint
    made = resized(states, size, stages, trainer.synchronizer, callbacks, joint=joint)
    return [{**state, "resized": 1} for state in made]


def _differ(states: Sequence[Tree], stages: int, names: Sequence[str]) -> bool:
    """Return True if the replicas have different weights of these names. Frozen weights are never averaged."""
    replicas = [state["replica"]["weights"] for state in states]
    return any(
        not np.array_equal(replica[name], replicas[rank % stages][name])
        for rank, replica in enumerate(replicas)
        for name in replica.keys() & set(names)
    )


def _states(stored: Stored) -> list[Tree]:
    """Return each worker's saved state, converted from earlier versions."""
    arrays = {WEIGHTS + name: each for name, each in stored.arrays.get("weights", {}).items()}
    arrays |= stored.arrays.get("state", {})
    with _malformed(f"{stored.path / STATE}, workers"):
        states = [
            _converted(together(each["numbers"], {name: arrays[key] for name, key in each["arrays"].items()}))
            for each in stored.state["workers"]
        ]
        if not states:
            raise ValueError("the list is empty")
        return states


def _converted(state: Tree) -> Tree:
    """Rename entries of earlier versions, and add the statistics that they did not save."""
    callbacks = {RENAMED.get(name, name): each for name, each in state["callbacks"].items()}
    renamed = {name: present(state[name]) for name in ("since", "measured") if name in state}
    defaults = Statistics().state()
    for entry, name in (("since", "hits"), ("losses", "hits"), ("losses", "epoch_hits")):
        defaults[entry][name] = math.nan  # unknown, so the accuracy of a resumed epoch is unknown too
    return filled({**state, **renamed, "callbacks": callbacks}, defaults)


@contextmanager
def _malformed(place: str) -> Iterator[None]:
    """Convert errors caused by a malformed state to DataError."""
    try:
        yield
    except CupynetError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{place}: not a valid training state, or from an incompatible version ({type(error).__name__}: {error})"
        ) from error


def stages_of(stored: Stored) -> int:
    """Return the number of pipeline stages.

    Earlier versions did not save it. It is then the lowest rank above 0 with the same weight names as rank 0.
    """
    states = _states(stored)
    with _malformed(f"{stored.path / STATE}, workers"):
        names = [sorted(state["replica"]["weights"]) for state in states]
        found = next((rank for rank in range(1, len(names)) if names[rank] == names[0]), len(names))
        stages = int(stored.state.get("stages", found))
        if stages < 1 or names != names[:stages] * (len(names) // stages):
            raise ValueError(f"{stages} stages for {len(names)} workers")
    return stages


def check_classes(stored: Stored, source: Source) -> None:
    """Raise DataError if the data, which may have moved, have other classes than the run of a checkpoint."""
    model = stored.state.get("model")
    then = model.get("class_names") if isinstance(model, dict) else None
    if then and source.class_names and [*then] != [*source.class_names]:
        found = f"{shown([*source.class_names])} instead of {shown([*then])}"
        raise DataError(f"the data have other classes than the run: {found}")


def check_stages(stored: Stored, stages: int) -> None:
    then = stages_of(stored)
    if then != stages:
        remedy = setting("parallel", "pipeline.stages", then, python=f"Pipeline(stages={then})")
        raise ConfigError(f"{stored.path}: saved with stages={then}, not {stages}. Use {remedy}")


def check_epochs(stored: Stored, epochs: int) -> None:
    """Raise ConfigError if the run of a checkpoint has already begun more than `epochs` epochs."""
    position = _states(stored)[0]["trainer"]
    with _malformed(f"{stored.path / STATE}, workers[0]"):
        check_position(position)
        begun = position["epoch"] + (position["round"] > 0)
    if begun > epochs:
        raise ConfigError(
            f"{stored.path} has already reached epoch {begun}. Use epochs={begun} or more, or resume from an earlier "
            "checkpoint",
            setting="epochs",
            value=str(epochs),
        )


def made_by(trainer: Trainer) -> dict[str, Any]:
    """Return everything, except layers and data, that affects results bit for bit. Compared on resume."""
    machine, backend, whole = environment(), trainer.backend, trainer.replica.whole
    blas = [f"{each['internal_api']} {each['version']} {each['architecture']}" for each in machine["blas"]]
    threads = sorted({each["num_threads"] for each in machine["blas"]})
    versions = {name: machine["versions"].get(name) for name in ("cupynet", "numpy", "numba")}
    return {
        "workers": trainer.world.size,
        "backend": backend.name,
        "dtype": backend.policy.name,
        "seed": trainer.model.seed,
        "loss": stable(whole.loss),
        "learning-rate factors": dict(whole.params.rates),
        "accumulation_steps": trainer.replica.accumulation_steps,
        "micro_batches": getattr(trainer.replica, "micro_batches", 1),
        "optimizer": stable(trainer.replica.optimizer),
        "synchronizer": str(trainer.synchronizer),
        "processor": machine["cpu"],
        "vector instructions": " ".join(machine["cpu_flags"]),
        "BLAS": ", ".join(sorted(set(blas))),
        "BLAS threads": ", ".join(map(str, threads)),
        **versions,
    }


def seen_by(model: Model) -> dict[str, Any]:
    """Return the input metadata that prediction needs, as stored in checkpoints and summary.json."""
    return {
        "image_shape": list(model.input.shape),
        "normalize": model.pixels.normalization(),
        "class_names": list(model.class_names) or None,
        "trained_on": model.trained_on,
    }


def _restore_metadata(model: Model, stored: Mapping[str, Any]) -> None:
    """Restore the result of `seen_by`."""
    if "normalize" in stored:  # not saved by version 0.1.0
        normalize = stored.get("normalize")
        if normalize is not None and "deviation" in normalize:  # the name in earlier versions
            normalize = {**normalize, "std": normalize["deviation"]}
        set_image_metadata(model, normalize, stored.get("class_names") or model.class_names)
    model.trained_on = str(stored.get("trained_on", "pixels"))


def set_image_metadata(model: Model, normalize: Any, class_names: Sequence[str]) -> None:
    """Set a model's pixel scale and class names. Raise ConfigError if they do not match the network."""
    pixels = FRACTIONS if normalize is None else PixelScale.of(normalize["mean"], normalize["std"])
    if len(pixels.scale) != len(pixels.shift) or len(pixels.scale) not in (1, model.input.shape[-1]):
        raise ConfigError("does not match the number of channels", "normalize")
    model.pixels, model.class_names = pixels, class_names


def save_model(model: Model, path: Path) -> None:
    """Write the file of a trained model. If its layers can no longer be described, log this instead of failing."""
    try:
        model.save(path)
    except ConfigError as error:
        log.warning("the model was not saved: %s", error)


def trained(stored: Stored, synchronizer: Synchronizer) -> Arrays:
    """Return the weights and buffers of a checkpoint, averaged if the replicas differ (see resize.py)."""
    states, stages = _states(stored), stages_of(stored)
    weights: Arrays = {}
    with _malformed(f"{stored.path / STATE}, workers"):
        for stage in range(stages):
            of_stage = states[stage::stages]
            replicas = [state["replica"]["weights"] for state in of_stage]
            first = replicas[0]
            equal = all(np.array_equal(replica[name], first[name]) for replica in replicas[1:] for name in first)
            weights |= first if equal else mean(replicas, shares(of_stage, synchronizer))
    return weights


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the differences that prevent bit-identical results, or return "". Ignore names that `then` lacks."""
    other = [f"{name} {now[name]} (was {then[name]})" for name in now if now[name] != then.get(name, now[name])]
    return f"continues, but not bit for bit: {'; '.join(other)}" if other else ""
