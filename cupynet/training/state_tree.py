"""States of workers as trees: split into numbers and arrays, gathered on rank 0, sent to others, joined again.

A state is what `Trainer.state` returns: numbers and arrays on the host, by name, in dictionaries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from cupynet.parallel import Communicator

Tree: TypeAlias = "dict[str, Any]"  # numbers and arrays by name, in dictionaries
Arrays: TypeAlias = "dict[str, Any]"  # by path, with / between names

MOST_COUNTED = 2**53  # no count or time of a training exceeds it


def gathered(world: Communicator, state: Tree) -> tuple[list[Tree], Arrays] | None:
    """Return every worker's state, on rank 0; None on the others.

    Returns:
        of each worker its numbers, and the name of each of its arrays among the arrays. An array that is equal on all
        workers that have it is there once, else as `name@rank`.
    """
    traffic, sent = world.traffic, world.traffic.bytes_sent
    numbers, arrays = apart(state)
    text = json.dumps({"numbers": numbers, "arrays": {name: _digest(array) for name, array in arrays.items()}}).encode()
    described = [json.loads(each.tobytes()) for each in world.all_gather(np.frombuffer(text, np.uint8))]
    owners: dict[str, dict[str, int]] = {}  # name -> digest of each different array, and the lowest rank that has it
    for rank, each in enumerate(described):
        for name, digest in each["arrays"].items():
            owners.setdefault(name, {}).setdefault(digest, rank)

    def stored_as(name: str, digest: str) -> str:
        return name if len(owners[name]) == 1 else f"{name}@{owners[name][digest]}"

    for name, ranks in owners.items():
        for digest, rank in ranks.items():
            if world.rank == rank != 0:
                world.send(arrays[name], 0)
            elif world.rank == 0 != rank:
                kind, shape, _ = json.loads(digest)
                array = np.empty(shape, kind)
                world.recv(array, rank)
                arrays[stored_as(name, digest)] = array
            elif world.rank == 0 and len(ranks) > 1:
                arrays[stored_as(name, digest)] = arrays.pop(name)
    traffic.bytes_sent = sent  # this figure counts only what training sends
    if world.rank != 0:
        return None
    for each in described:
        each["arrays"] = {name: stored_as(name, digest) for name, digest in each["arrays"].items()}
    return described, arrays


def send(world: Communicator, state: Tree, rank: int) -> None:
    """Send a state to another worker, which calls `received`."""
    numbers, arrays = apart(state)
    forms = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    text = json.dumps({"numbers": numbers, "arrays": forms}).encode()
    world.send(np.array([len(text)]), rank)
    world.send(np.frombuffer(text, np.uint8), rank)
    for array in arrays.values():
        world.send(array, rank)


def received(world: Communicator) -> Tree:
    """Receive a state from rank 0."""
    length = np.zeros(1, np.int64)
    world.recv(length, 0)
    text = np.zeros(int(length[0]), np.uint8)
    world.recv(text, 0)
    message, own = json.loads(text.tobytes()), {}
    for name, (kind, shape) in message["arrays"].items():
        own[name] = np.empty(shape, kind)
        world.recv(own[name], 0)
    return together(message["numbers"], own)


def filled(state: Any, defaults: Mapping[str, Any]) -> Tree:
    """Return a state with its missing entries taken from `defaults`. TypeError."""
    if not isinstance(state, dict):
        raise TypeError(f"expected names and values, found {state!r:.80}")
    found = dict(state)
    for name, value in defaults.items():
        found[name] = filled(found.get(name, {}), value) if isinstance(value, Mapping) else found.get(name, value)
    return found


def check_like(own: Tree, state: Tree) -> None:
    """Refuse a stored state that the trainer with the state `own` cannot restore. TypeError, LookupError, ValueError.

    Counts and times must be valid, and arrays must have the same shapes. (`Trainer.restore` refuses the weights of
    another network.)
    """
    for name in own:
        if not isinstance(state[name], dict):
            raise TypeError(f"{name}: expected names and values, found {state[name]!r:.80}")
    for name in ("trainer", "clock", "epoch_start"):
        for key, value in own[name].items():
            _check_count(f"{name}.{key}", value, state[name][key])
    if _shapes(own["replica"]["weights"]) == _shapes(state["replica"]["weights"]):
        for name in ("replica", "synchronizer"):
            found = _shapes(state[name])
            for path, shape in _shapes(own[name]).items():
                if found.get(path, shape) != shape:
                    raise ValueError(f"{name}/{path}: expected an array of shape {shape}, found {found[path]}")


def _check_count(name: str, own: Any, found: Any) -> None:
    """Refuse a count or a time of another type than `own`, or out of range. TypeError, ValueError."""
    if isinstance(own, np.ndarray):
        if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype != own.dtype:
            raise TypeError(f"{name}: expected integers, found {found!r:.80}")
        return
    kinds = (int,) if isinstance(own, int) else (int, float)
    least = -MOST_COUNTED if name == "trainer.span_start" else 0  # other workers may count from before the beginning
    if type(found) not in kinds or not least <= found < MOST_COUNTED:
        raise ValueError(f"{name}: expected a number of at least 0, found {found!r:.80}")


def _shapes(tree: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in apart(tree)[1].items()}


def _digest(array: Any) -> str:
    """Return dtype, shape and a digest of the bytes of an array on the host, as JSON."""
    content = np.ascontiguousarray(array)
    digest = hashlib.blake2b(content.tobytes(), digest_size=16).hexdigest()
    return json.dumps([content.dtype.str, content.shape, digest])


def apart(tree: Mapping[str, Any], above: str = "") -> tuple[Tree, Arrays]:
    """Return the numbers of a tree, with its structure, and its arrays."""
    numbers: Tree = {}
    arrays: Arrays = {}
    for name, value in tree.items():
        here = above + name.replace("%", "%25").replace("/", "%2F")
        if isinstance(value, Mapping):
            numbers[name], below = apart(value, f"{here}/")
            arrays |= below
        elif isinstance(value, np.ndarray):
            arrays[here] = value
        else:
            numbers[name] = value
    return numbers, arrays


def together(numbers: Tree, arrays: Arrays) -> Tree:
    """Put the arrays back into `numbers`, and return it."""
    for path, array in arrays.items():
        *above, name = (part.replace("%2F", "/").replace("%25", "%") for part in path.split("/"))
        node: Any = numbers
        for each in above:
            node = node.get(each)
            if not isinstance(node, dict):
                raise LookupError(f"no place for the array {path!r:.80}")
        node[name] = array
    return numbers
