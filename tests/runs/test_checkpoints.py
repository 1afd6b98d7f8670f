"""Checkpoints on disk: they are complete or missing, and no part of a damaged one is ever used."""

import errno
import itertools
import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from cupynet.core.errors import DataError, OutputError
from cupynet.runs.checkpoints import MANIFEST, Checkpoints, _manifest, read
from cupynet.runs.layout import checkpoints

ARRAYS = {"weights": {"a.weight": np.arange(12.0).reshape(3, 4), "a.bias": np.ones(3, np.float32)}, "state": {}}
FILES = ("state.json", "weights.safetensors", "state.safetensors", MANIFEST)


def saved(folder: Path, *steps: int) -> Checkpoints:
    store = Checkpoints(folder)
    for step in steps:
        store.save(step, {"step": step, "loss": 0.1 + step}, ARRAYS)
    return store


def newest_step(store: Checkpoints) -> int:
    newest = store.newest()
    assert newest is not None
    step: int = newest.state["step"]
    return step


def leftovers(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if not entry.name.startswith("step-") or "." in entry.name]


def test_a_checkpoint_round_trips_and_equal_states_make_equal_files(tmp_path: Path) -> None:
    store, other = (saved(tmp_path / name, 7, 12, 123456789) for name in ("one", "other"))
    assert store.steps() == [7, 12, 123456789] and leftovers(store.folder) == []
    newest = store.newest()
    assert newest is not None and newest.state == {"step": 123456789, "loss": 123456789.1}
    for file, tensors in ARRAYS.items():
        assert newest.arrays[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(newest.arrays[file][name], tensor)
            assert newest.arrays[file][name].dtype == tensor.dtype
    for name in FILES:
        assert (store.path(7) / name).read_bytes() == (other.path(7) / name).read_bytes()


def test_saving_a_checkpoint_does_not_recreate_a_run_folder_that_was_moved(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        saved(tmp_path / "moved" / "checkpoints", 7)
    assert not list(tmp_path.iterdir())


def test_checkpoints_are_kept_or_removed_by_their_step(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "none yet")
    assert store.newest() is None and store.steps() == []
    store = saved(tmp_path, 1, 2, 3, 4)
    store.keep({2, 4, 99})
    assert store.steps() == [2, 4] and leftovers(tmp_path) == []


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_detected_and_the_previous_checkpoint_is_used(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, rng = saved(tmp_path, 1, 2), random.Random(name)
    path = store.path(2) / name
    whole = path.read_bytes()
    for _ in range(25):
        bit = rng.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=name):
            read(store.path(2))
        caplog.clear()
        assert newest_step(store) == 1
        assert len(caplog.records) == 1 and "step-00000002" in caplog.text


def swap_files(step: Path) -> None:
    for name in ("state.json", "weights.safetensors"):
        shutil.copy(step.with_name("step-00000001") / name, step / name)


def link(path: Path) -> None:
    path.symlink_to(path.rename(path.parents[1] / "elsewhere"))


def pipe(step: Path) -> None:
    (step / "state.json").unlink()
    os.mkfifo(step / "state.json")


def forged(step: Path, **changes: object) -> None:
    """Change a manifest, and give it the right digest."""
    content = json.loads((step / MANIFEST).read_text())
    del content["sha256"]
    (step / MANIFEST).write_bytes(_manifest(content | changes))


HARMS: dict[str, Callable[[Path], object]] = {
    "a missing file": lambda step: (step / "state.json").unlink(),
    "an empty file": lambda step: os.truncate(step / "state.json", 0),
    "half a file": lambda step: os.truncate(step / "weights.safetensors", 50),
    "half a manifest": lambda step: os.truncate(step / MANIFEST, 50),
    "files of another": swap_files,
    "a link": lambda step: link(step / "weights.safetensors"),
    "a link to a folder": lambda step: link(step),
    "a pipe": pipe,
    "one file more": lambda step: (step / "more.pkl").write_bytes(b"cos\nsystem\n"),
    "another format": lambda step: forged(step, format=2),
    "no files": lambda step: forged(step, files={}),
    "a file elsewhere": lambda step: forged(step, files={"../1/state.json": {}}),
    "a list of files": lambda step: forged(step, files=[]),
    "a deep manifest": lambda step: (step / MANIFEST).write_text("[" * 100000),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_or_forged_checkpoint_is_refused_and_the_previous_one_is_used(harm: str, tmp_path: Path) -> None:
    store = saved(tmp_path / "run", 1, 2)
    HARMS[harm](store.path(2))
    with pytest.raises(DataError, match="step-00000002"):
        read(store.path(2))
    assert newest_step(store) == 1


def test_a_folder_with_only_damaged_checkpoints_is_refused_and_the_newest_is_named(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2)
    for step in (1, 2):
        (store.path(step) / "state.json").unlink()
    with pytest.raises(DataError, match="step-00000002"):
        store.newest()


def test_a_checkpoint_replaces_one_of_the_same_iteration(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    store.save(3, {"step": 3, "loss": 9.0}, ARRAYS)
    assert read(store.path(3)).state["loss"] == 9.0 and leftovers(tmp_path) == []


def test_an_interrupted_replacement_of_a_checkpoint_is_undone(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    store.path(3).rename(tmp_path / "step-00000003.old-1")
    store.save(4, {"step": 4}, ARRAYS)
    assert store.steps() == [3, 4] and read(store.path(3)).state["step"] == 3 and leftovers(tmp_path) == []


def test_a_checkpoint_under_replacement_is_found_unless_it_is_damaged(tmp_path: Path) -> None:
    store = saved(tmp_path, 2, 3)
    old = store.path(3).rename(tmp_path / "step-00000003.old-1")
    assert store.steps() == [2, 3] and newest_step(store) == 3
    (old / MANIFEST).unlink()
    assert newest_step(store) == 2
    assert old.is_dir()  # reading does not change the folder


def test_a_new_checkpoint_goes_before_the_one_that_it_replaces(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    for number in range(9):  # several, because a file system may list them in any order
        (tmp_path / f"step-00000003.old-{number}").mkdir()
    assert checkpoints(tmp_path) == {3: store.path(3)} and newest_step(store) == 3


def on_folders(number: int) -> Callable[[int], bool]:
    """Return a condition that is true for the nth fsync of a folder."""
    folders: list[int] = []

    def when(descriptor: int) -> bool:
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            return False
        folders.append(descriptor)
        return len(folders) == number

    return when


# step of a save -> owner and name of the function it calls, and whether this call ends the process
POINTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "mkdir": (Path, "mkdir", lambda *_: True),
    "write": (os, "fsync", lambda _: True),
    "replace": (os, "replace", lambda *_: True),
    "flush folder": (os, "fsync", on_folders(1)),
    "rename": (os, "rename", lambda *_: True),
    "flush parent": (os, "fsync", on_folders(2)),
    "prune": (shutil, "rmtree", lambda path, *_: ".tmp-" in str(path) and path.exists()),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_during_a_save_keeps_the_previous_checkpoints(point: str, tmp_path: Path) -> None:
    """A child process saves, and exits immediately at this point."""
    store = saved(tmp_path, 1, 2)
    child = os.fork()
    if child == 0:
        die_at(*POINTS[point])
        try:
            store.save(3, {"step": 3, "loss": 0.0}, ARRAYS)
            store.keep({3})
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert newest_step(store) == (3 if point in ("flush parent", "prune") else 2)
    store.save(4, {"step": 4, "loss": 0.0}, ARRAYS)
    assert newest_step(store) == 4 and leftovers(tmp_path) == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_crash_while_a_checkpoint_is_replaced_keeps_one_of_the_two(number: int, tmp_path: Path) -> None:
    """The first rename moves the old checkpoint aside, and the second puts the new one in its place."""
    store, renames = saved(tmp_path, 3), itertools.count(1)
    child = os.fork()
    if child == 0:
        die_at(os, "rename", lambda *_: next(renames) == number)
        try:
            store.save(3, {"step": 3}, ARRAYS)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert newest_step(store) == 3


def die_at(owner: Any, name: str, when: Callable[..., bool]) -> None:
    real = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            os._exit(9)
        return real(*arguments, **named)

    setattr(owner, name, call)


@pytest.mark.parametrize("limit", [100, 1000, 90_000], ids=["state", "weights", "second file of arrays"])
def test_a_checkpoint_over_the_file_size_limit_exits_with_74_and_keeps_older_ones(limit: int, tmp_path: Path) -> None:
    """A child process saves with RLIMIT_FSIZE set."""
    store = saved(tmp_path, 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            arrays = {"weights": {"a": np.zeros(5000)}, "state": {"b": np.zeros(12_000)}}
            store.save(2, {"step": 2, "text": "x" * 500}, arrays)
        except OutputError as error:
            code = error.exit_code if "step-00000002" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 74
    assert newest_step(store) == 1 and leftovers(tmp_path) == []


def test_a_checkpoint_that_cannot_be_removed_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps a file that is open elsewhere. The checkpoint counts as removed, and the file is removed later."""
    store = saved(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")))
        store.keep({2})
    assert store.steps() == [2] and leftovers(tmp_path)
    store.clean()
    assert os.listdir(tmp_path) == ["step-00000002"]
