"""Checkpoints of a training run: what all workers know, gathered on rank 0 and written there; and given back to them.

A checkpoint holds every worker's `Trainer.state()`: its weights, its optimizer's and its synchronizer's vectors, where
training is, and what its callbacks know. What several workers hold alike is stored once. Taking one causes no average
and changes no bit of what is trained.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from cupynet.checkpoints import MANIFEST, Checkpoints, Stored, read
from cupynet.checks import integer
from cupynet.errors import ConfigError, DataError
from cupynet.parallel import Communicator
from cupynet.runs import Run
from cupynet.training.callbacks import Callback
from cupynet.training.early_stopping import DIRECTIONS
from cupynet.training.records import EpochRecord, TrainerView

Tree: TypeAlias = "dict[str, Any]"  # numbers and arrays by name, in dictionaries
Arrays: TypeAlias = "dict[str, Any]"  # by the names that lead there, with / between them

WEIGHTS = "replica/weights/"


class Checkpoint(Callback):
    """Writes checkpoints, from which training goes on as if it had never ended, bit for bit, in mid-epoch too.

    One is also written when a stop ends a fit early, as training was before the average that a fit ends with.

    Args:
        every_epochs: complete epochs between checkpoints.
        every_iterations: iterations between further ones; None for none.
        keep_last: how many of the newest are kept.
        keep_every: of every so many that were written one is kept for good; None for none.
        best: the figure by which the best evaluated epoch's is kept too, such as `accuracy` or `loss`; None for none.
        path: of the folder; `checkpoints` in the run's folder by default.
    """

    every_rank = True
    last = True

    def __init__(
        self,
        every_epochs: int = 1,
        every_iterations: int | None = None,
        keep_last: int = 2,
        keep_every: int | None = None,
        best: str | None = None,
        path: str | Path | None = None,
    ) -> None:
        self.every_epochs = integer("every_epochs", every_epochs, 1)
        self.every_iterations = None if every_iterations is None else integer("every_iterations", every_iterations, 1)
        self.keep_last = integer("keep_last", keep_last, 1)
        self.keep_every = None if keep_every is None else integer("keep_every", keep_every, 1)
        if best is not None and best not in DIRECTIONS:
            raise ConfigError(f"best={best!r}: must be one of {', '.join(DIRECTIONS)}, or null")
        self.best = best
        self._path = None if path is None else Path(path)
        self._written = 0
        self._for_good: list[int] = []  # iterations
        self._best_step, self._best_score = -1, math.nan

    def start(self, trainer: TrainerView, run: Run | None) -> None:
        if self._path is None and run is None:
            raise ConfigError("Checkpoint needs a path where there is no run folder: Checkpoint(path='checkpoints')")
        self._store = Checkpoints(run.checkpoints_path if self._path is None and run is not None else self._path or "")

    def on_iteration_end(self, trainer: TrainerView) -> None:
        if self.every_iterations is not None and trainer.iteration % self.every_iterations == 0:
            self._save(trainer)

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        better = False
        if self.best is not None and record.evaluation is not None:
            score = float(getattr(record.evaluation, self.best))
            gain = score - self._best_score if DIRECTIONS[self.best] == "max" else self._best_score - score
            better = math.isfinite(score) and not gain <= 0
            if better:
                self._best_step, self._best_score = trainer.iteration, score
        if better or trainer.epoch % self.every_epochs == 0:
            self._save(trainer)

    def on_stop(self, trainer: TrainerView) -> None:
        self._save(trainer)

    def state(self) -> Tree:
        return {
            "written": self._written,
            "for_good": np.array(self._for_good, np.int64),
            "best_step": self._best_step,
            "best_score": self._best_score,
        }

    def restore(self, state: Tree) -> None:
        self._written, self._for_good = int(state["written"]), state["for_good"].tolist()
        self._best_step, self._best_score = int(state["best_step"]), float(state["best_score"])

    def _save(self, trainer: TrainerView) -> None:
        step = trainer.iteration
        self._written += 1
        if self.keep_every is not None and self._written % self.keep_every == 0 and step not in self._for_good:
            self._for_good.append(step)
        save(self._store, trainer)
        if trainer.rank == 0:
            newest = [each for each in self._store.steps() if each <= step][-self.keep_last :]
            self._store.keep({*newest, *self._for_good, self._best_step})


def save(store: Checkpoints, trainer: TrainerView) -> None:
    """Write down where all workers are; each calls it, after the same round. OutputError, on rank 0."""
    found = gathered(trainer.world, trainer.state())
    if found is not None:
        workers, arrays = found
        state = {"iteration": trainer.iteration, "epoch": trainer.epoch, "workers": workers}
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


def check_workers(stored: Stored, workers: int) -> None:
    """Refuse a checkpoint that so many workers (replicas x stages) did not make. ConfigError, DataError."""
    there = len(_content(stored)[0])
    if there != workers:
        raise ConfigError(f"{stored.path}: was made by {there} workers, and here are {workers}: let as many go on")


def gathered(world: Communicator, state: Tree) -> tuple[list[Tree], Arrays] | None:
    """Every worker's state, on rank 0; None on the others.

    Returns:
        of each worker its numbers, and under which name each of its arrays is found among
        the arrays: those that all who have one of that name hold alike once, the others as `name@rank`.
    """
    traffic, sent = world.traffic, world.traffic.bytes_sent
    numbers, arrays = _apart(state)
    digests = {name: _fingerprint(array) for name, array in arrays.items()}
    text = json.dumps({"numbers": numbers, "arrays": digests}).encode()
    told = [json.loads(each.tobytes()) for each in world.all_gather_ragged(np.frombuffer(text, np.uint8))]
    kinds: dict[str, dict[str, int]] = {}  # of each name the different arrays, and the lowest rank that has each
    for rank, each in enumerate(told):
        for name, digest in each["arrays"].items():
            kinds.setdefault(name, {}).setdefault(json.dumps(digest), rank)
    for name, owners in kinds.items():
        for digest, rank in owners.items():
            if world.rank == rank != 0:
                world.send(arrays[name], 0)
            elif world.rank == 0 != rank:
                kind, shape, _ = json.loads(digest)
                received = np.empty(shape, kind)
                world.recv(received, rank)
                arrays[_stored_as(name, rank, owners)] = received
            elif world.rank == 0 and len(owners) > 1:
                arrays[_stored_as(name, 0, owners)] = arrays.pop(name)
    traffic.bytes_sent = sent  # that figure is of what training sends
    if world.rank != 0:
        return None
    places = [
        {
            name: _stored_as(name, kinds[name][json.dumps(digest)], kinds[name])
            for name, digest in each["arrays"].items()
        }
        for each in told
    ]
    return [{"numbers": each["numbers"], "arrays": names} for each, names in zip(told, places, strict=True)], arrays


def _stored_as(name: str, rank: int, owners: Mapping[str, int]) -> str:
    return name if len(owners) == 1 else f"{name}@{rank}"


def dealt(world: Communicator, stored: Stored | None) -> Tree:
    """This worker's state, from the checkpoint that rank 0 has read; each calls it, the others with None.

    Raises:
        ConfigError: it is of another number of workers.
        DataError: it is not a checkpoint of a training run.
    """
    if world.rank == 0:
        if stored is None:
            raise ValueError("rank 0 needs what was read")
        check_workers(stored, world.size)
        workers, arrays = _content(stored)
        texts = [json.dumps(_told(each, arrays)).encode() for each in workers]
        for rank in range(1, world.size):
            world.send(np.array([len(texts[rank])]), rank)
            world.send(np.frombuffer(texts[rank], np.uint8), rank)
            for name in workers[rank]["arrays"].values():
                world.send(arrays[name], rank)
        return _together(workers[0]["numbers"], {name: arrays[at] for name, at in workers[0]["arrays"].items()})
    length = np.zeros(1, np.int64)
    world.recv(length, 0)
    text = np.zeros(int(length[0]), np.uint8)
    world.recv(text, 0)
    told, own = json.loads(text.tobytes()), {}
    for name, (kind, shape) in told["arrays"].items():
        own[name] = np.empty(shape, kind)
        world.recv(own[name], 0)
    return _together(told["numbers"], own)


def _content(stored: Stored) -> tuple[list[Tree], Arrays]:
    """What `save` gave away; DataError."""
    workers = stored.state.get("workers")
    arrays = {WEIGHTS + name: each for name, each in stored.arrays.get("weights", {}).items()}
    arrays |= stored.arrays.get("state", {})
    if not isinstance(workers, list) or not workers:
        raise DataError(f"{stored.path}: is not a checkpoint of a training run: it names no workers")
    for rank, each in enumerate(workers):
        lacking = sorted(set(each["arrays"].values()) - arrays.keys())
        if lacking:
            raise DataError(f"{stored.path}: lacks {', '.join(lacking)} of worker {rank}")
    return workers, arrays


def _told(worker: Tree, arrays: Arrays) -> Tree:
    """A worker's numbers, and of what kind and shape its arrays are, in the order in which they are sent."""
    forms = {name: (arrays[at].dtype.str, arrays[at].shape) for name, at in worker["arrays"].items()}
    return {"numbers": worker["numbers"], "arrays": forms}


def _fingerprint(array: Any) -> list[Any]:
    """[dtype, shape, digest of the bytes] of an array on the host."""
    content = np.ascontiguousarray(array)
    return [content.dtype.str, list(content.shape), hashlib.blake2b(content.tobytes(), digest_size=16).hexdigest()]


def _apart(tree: Mapping[str, Any], above: str = "") -> tuple[Tree, Arrays]:
    """The numbers of a tree, its shape kept; and its arrays."""
    numbers: Tree = {}
    arrays: Arrays = {}
    for name, value in tree.items():
        here = above + name.replace("%", "%25").replace("/", "%2F")
        if isinstance(value, Mapping):
            numbers[name], below = _apart(value, f"{here}/")
            arrays |= below
        elif isinstance(value, np.ndarray):
            arrays[here] = value
        else:
            numbers[name] = value
    return numbers, arrays


def _together(numbers: Tree, arrays: Arrays) -> Tree:
    """The tree that was taken apart; `numbers` is it afterwards."""
    for path, array in arrays.items():
        *above, name = (part.replace("%2F", "/").replace("%25", "%") for part in path.split("/"))
        node = numbers
        for each in above:
            node = node[each]
        node[name] = array
    return numbers
