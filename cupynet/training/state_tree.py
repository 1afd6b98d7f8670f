"""Worker states as nested dictionaries, and their exchange between workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from cupynet.core.errors import ConfigError
from cupynet.core.wording import shown
from cupynet.parallel import Communicator

Tree: TypeAlias = "dict[str, Any]"  # nested dictionaries of numbers and arrays
Arrays: TypeAlias = "dict[str, Any]"  # arrays by path, with "/" between names

MAX_COUNT = 2**53  # all counters must be smaller, and are then exact in double precision


def gathered(world: Communicator, state: Tree) -> tuple[list[Tree], Arrays] | None:
    """Gather all states on rank 0. Return the numbers and the array names of each worker, and all arrays by name.

    An array that is equal on all workers that have it is stored once under its name; otherwise each version is stored
    as `name@rank`, with the lowest rank that has it. Other ranks return None.
    """
    if world.rank != 0:
        send(world, state, 0)
        return None
    workers: list[Tree] = []
    owners: dict[str, dict[str, tuple[int, Any]]] = {}  # name -> digest -> (lowest rank, array)
    for rank in range(world.size):
        numbers, arrays = apart(state) if rank == 0 else received(world, rank)
        digests = {name: _digest(array) for name, array in arrays.items()}
        workers.append({"numbers": numbers, "arrays": digests})
        for name, digest in digests.items():
            owners.setdefault(name, {}).setdefault(digest, (rank, arrays[name]))
    names = {
        (name, digest): name if len(different) == 1 else f"{name}@{rank}"
        for name, different in owners.items()
        for digest, (rank, _) in different.items()
    }
    for worker in workers:
        worker["arrays"] = {name: names[name, digest] for name, digest in worker["arrays"].items()}
    return workers, {stored: owners[name][digest][1] for (name, digest), stored in names.items()}


def send(world: Communicator, state: Tree, rank: int) -> None:
    numbers, arrays = apart(state)
    forms = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    text = json.dumps({"numbers": numbers, "arrays": forms}).encode()
    world.send(np.array([len(text)]), rank)
    world.send(np.frombuffer(text, np.uint8), rank)
    for array in arrays.values():
        world.send(array, rank)


def received(world: Communicator, rank: int) -> tuple[Tree, Arrays]:
    length = np.zeros(1, np.int64)
    world.recv(length, rank)
    text = np.zeros(int(length[0]), np.uint8)
    world.recv(text, rank)
    message, arrays = json.loads(text.tobytes()), {}
    for name, (kind, shape) in message["arrays"].items():
        arrays[name] = np.empty(shape, kind)
        world.recv(arrays[name], rank)
    return message["numbers"], arrays


def check_position(position: Tree) -> None:
    """Raise ValueError if the position is invalid, because training might then never end."""
    for name in ("iteration", "epoch", "round"):
        if type(position[name]) is not int or not 0 <= position[name] < MAX_COUNT:
            raise ValueError(f"trainer.{name}: expected an integer from 0 to 2^53 - 1, found {position[name]!r:.80}")


def check_numbers(own: Mapping[str, Any], state: Any) -> None:
    """Raise ValueError if `state` has an invalid value where `own`, the trainer's state, has a number."""
    for name, value in own.items():
        found = state.get(name, value)
        if isinstance(value, Mapping):
            check_numbers(value, found)
        elif isinstance(value, int | float):
            any_float = isinstance(value, float) and isinstance(found, float)  # includes NaN and infinity
            if type(found) not in (bool, int, float) or not (any_float or abs(found) < MAX_COUNT):
                raise ValueError(f"{name}: expected a number of magnitude below 2^53, found {found!r:.80}")


def filled(state: Any, defaults: Mapping[str, Any]) -> Tree:
    if not isinstance(state, dict):
        raise TypeError(f"expected a dictionary, found {state!r:.80}")
    found = dict(state)
    for name, value in defaults.items():
        found[name] = filled(found.get(name, {}), value) if isinstance(value, Mapping) else found.get(name, value)
    return found


def _digest(array: Any) -> str:
    content = np.ascontiguousarray(array)
    digest = hashlib.blake2b(content.tobytes(), digest_size=16).hexdigest()
    return json.dumps([content.dtype.str, content.shape, digest])


def apart(tree: Mapping[str, Any], above: str = "") -> tuple[Tree, Arrays]:
    """Split a tree into a tree of numbers and a dictionary of arrays by path."""
    numbers: Tree = {}
    arrays: Arrays = {}
    for name, value in tree.items():
        here = above + str(name).replace("%", "%25").replace("/", "%2F")
        if isinstance(value, Mapping):
            numbers[name], below = apart(value, f"{here}/")
            arrays |= below
        elif isinstance(value, np.ndarray) and value.dtype.name == "bfloat16":  # unknown to NumPy
            arrays[here] = value.astype(np.float32)
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            arrays[here] = value
        else:
            numbers[name] = value = value.item() if isinstance(value, np.generic) else value
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                reason = f"must be a number, text or an array of numbers on the host, got {shown(value)}"
                raise ConfigError(f"state {here!r} {reason}") from error
    return numbers, arrays


def together(numbers: Tree, arrays: Arrays) -> Tree:
    """Insert the arrays into `numbers`, in place. The inverse of `apart`."""
    for path, array in arrays.items():
        *above, name = (part.replace("%2F", "/").replace("%25", "%") for part in path.split("/"))
        node: Any = numbers
        for each in above:
            node = node.get(each)
            if not isinstance(node, dict):
                raise LookupError(f"the state has no entry for the array {path!r:.80}")
        node[name] = array
    return numbers
