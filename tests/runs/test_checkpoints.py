"""Checkpoints on disk: whole or not there, and nothing of a damaged one is ever used."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def test_a_checkpoint_round_trips(tmp_path: Path) -> None:
    store = saved(tmp_path / "a" / "checkpoints", 7, 12, 123456789)
    assert store.steps() == [7, 12, 123456789] and leftovers(store.folder) == []
    newest = store.newest()
    assert newest is not None and newest.state == {"step": 123456789, "loss": 123456789.1}
    for file, tensors in ARRAYS.items():
        assert newest.arrays[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(newest.arrays[file][name], tensor)
            assert newest.arrays[file][name].dtype == tensor.dtype


def test_equal_states_make_equal_files(tmp_path: Path) -> None:
    for name in FILES:
        one, other = (saved(tmp_path / each, 5).path(5) / name for each in ("one", "other"))
        assert one.read_bytes() == other.read_bytes()


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nothing").newest() is None and Checkpoints(tmp_path / "nothing").steps() == []


def test_a_checkpoint_replaces_one_of_the_same_iteration(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    store.save(3, {"step": 3, "loss": 9.0}, ARRAYS)
    newest = store.newest()
    assert newest is not None and newest.state["loss"] == 9.0 and leftovers(tmp_path) == []


def test_keep_last_and_keep_every(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, 4)
    store.keep({2, 4, 99})
    assert store.steps() == [2, 4] and leftovers(tmp_path) == []


@pytest.mark.parametrize("flips", [25, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_detected_and_the_previous_checkpoint_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, flips: int
) -> None:
    store, rng = saved(tmp_path, 1, 2), random.Random(name)
    path = store.path(2) / name
    whole = path.read_bytes()
    for _ in range(flips):
        bit = rng.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=name):
            read(store.path(2))
        caplog.clear()
        assert newest_step(store) == 1
        assert len(caplog.records) == 1 and "step-00000002" in caplog.text
    path.write_bytes(whole)
    assert newest_step(store) == 2


def header(name: str, whole: bytes) -> int:
    """Return where the header of a file ends."""
    return 8 + int.from_bytes(whole[:8], "little") if name.endswith(".safetensors") else whole.index(b"\n")


CUTS: dict[str, Callable[[str, bytes], bytes]] = {
    "nothing": lambda name, whole: b"",
    "one byte": lambda name, whole: whole[:1],
    "part of the header": lambda name, whole: whole[: header(name, whole) - 1],
    "the header": lambda name, whole: whole[: min(header(name, whole), len(whole) - 1)],
    "half": lambda name, whole: whole[: len(whole) // 2],
    "all but one": lambda name, whole: whole[:-1],
    "one more": lambda name, whole: whole + b"\0",
    "zeros": lambda name, whole: bytes(len(whole)),
}


@pytest.mark.parametrize("keep", CUTS)
@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_detected(tmp_path: Path, name: str, keep: str) -> None:
    store = saved(tmp_path, 1, 2)
    path = store.path(2) / name
    path.write_bytes(CUTS[keep](name, path.read_bytes()))
    with pytest.raises(DataError, match=name):
        read(store.path(2))
    assert newest_step(store) == 1


def swap_files(store: Checkpoints) -> None:
    for name in ("state.json", "weights.safetensors"):
        shutil.copy(store.path(1) / name, store.path(2) / name)


def link_inside(store: Checkpoints) -> None:
    path = store.path(2) / "weights.safetensors"
    shutil.move(path, store.folder / "elsewhere")
    path.symlink_to(store.folder / "elsewhere")


def link_to_folder(store: Checkpoints) -> None:
    shutil.move(store.path(2), store.folder / "elsewhere")
    store.path(2).symlink_to(store.folder / "elsewhere")


def pipe(store: Checkpoints) -> None:
    (store.path(2) / "state.json").unlink()
    os.mkfifo(store.path(2) / "state.json")


def one_file_more(store: Checkpoints) -> None:
    (store.path(2) / "more.pkl").write_bytes(b"cos\nsystem\n")


def forged(store: Checkpoints, **changes: object) -> None:
    """A manifest whose digest is right."""
    path = store.path(2) / MANIFEST
    content = json.loads(path.read_text())
    del content["sha256"]
    path.write_bytes(_manifest(content | changes))


HARMS: dict[str, Callable[[Checkpoints], object]] = {
    "a missing file": lambda store: (store.path(2) / "state.json").unlink(),
    "files of another": swap_files,
    "a link": link_inside,
    "a link to a folder": link_to_folder,
    "a pipe": pipe,
    "one file more": one_file_more,
    "another format": lambda store: forged(store, format=2),
    "no files": lambda store: forged(store, files={}),
    "a file elsewhere": lambda store: forged(store, files={"../1/state.json": {}}),
    "a list of files": lambda store: forged(store, files=[]),
    "a deep manifest": lambda store: (store.path(2) / MANIFEST).write_text("[" * 100000),
}


@pytest.mark.parametrize("harm", HARMS)
def test_damaged_checkpoints_are_refused(tmp_path: Path, harm: str) -> None:
    store = saved(tmp_path, 1, 2)
    HARMS[harm](store)
    with pytest.raises(DataError, match="step-00000002"):
        read(store.path(2))
    assert newest_step(store) == 1


def test_a_folder_of_damaged_checkpoints_is_refused(tmp_path: Path) -> None:
    """The newest is named, which is the one that somebody wants back."""
    store = saved(tmp_path, 1, 2)
    for step in (1, 2):
        (store.path(step) / "state.json").unlink()
    with pytest.raises(DataError, match="step-00000002"):
        store.newest()


POINTS = ("mkdir", "write", "fsync", "replace", "flush folder", "rename", "flush parent", "prune")


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_during_a_save_keeps_the_previous_checkpoints(tmp_path: Path, point: str) -> None:
    """In a process of its own that leaves at once at this point."""
    store = saved(tmp_path, 1, 2)
    child = os.fork()
    if child == 0:
        die_at(point)
        try:
            store.save(3, {"step": 3, "loss": 0.0}, ARRAYS)
            store.keep({3})
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert newest_step(store) == (3 if point in ("flush parent", "prune") else 2)
    store.save(4, {"step": 4, "loss": 0.0}, ARRAYS)
    assert newest_step(store) == 4 and leftovers(tmp_path) == []


def test_an_interrupted_replacement_is_undone(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    os.rename(store.path(3), tmp_path / "step-00000003.old-1")
    store.save(4, {"step": 4}, ARRAYS)
    assert store.steps() == [3, 4] and read(store.path(3)).state["step"] == 3 and leftovers(tmp_path) == []


def test_a_checkpoint_under_replacement_is_found(tmp_path: Path) -> None:
    """Reading changes nothing; a damaged one is not used."""
    store = saved(tmp_path, 2, 3)
    os.rename(store.path(3), tmp_path / "step-00000003.old-1")
    assert store.steps() == [2, 3] and newest_step(store) == 3
    (tmp_path / "step-00000003.old-1" / MANIFEST).unlink()
    assert newest_step(store) == 2
    assert (tmp_path / "step-00000003.old-1").is_dir()


def test_a_new_checkpoint_goes_before_the_one_that_it_replaces(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    for number in range(9):  # whichever a file system lists first
        (tmp_path / f"step-00000003.old-{number}").mkdir()
    assert checkpoints(tmp_path) == {3: store.path(3)} and newest_step(store) == 3


def die_at(point: str) -> None:
    """Replace what the save path calls, so that this process is gone at that point."""

    def dying(real: Any, when: Callable[..., bool]) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if when(*arguments):
                os._exit(9)
            return real(*arguments, **named)

        return call

    synced: list[int] = []

    def is_folder(descriptor: int) -> bool:
        return os.path.isdir(f"/proc/self/fd/{descriptor}")

    def nth_folder(number: int) -> Callable[[int], bool]:
        def when(descriptor: int) -> bool:
            synced.extend([1] * is_folder(descriptor))
            return len(synced) == number and is_folder(descriptor)

        return when

    if point == "mkdir":
        Path.mkdir = dying(Path.mkdir, lambda path, *_: True)  # type: ignore[method-assign]
    elif point == "write":
        os.fsync = dying(os.fsync, lambda _: True)
    elif point == "fsync":
        os.fsync = dying(os.fsync, lambda descriptor: not is_folder(descriptor))
    elif point == "replace":
        os.replace = dying(os.replace, lambda *_: True)
    elif point == "flush folder":
        os.fsync = dying(os.fsync, nth_folder(1))
    elif point == "rename":
        os.rename = dying(os.rename, lambda *_: True)
    elif point == "flush parent":
        os.fsync = dying(os.fsync, nth_folder(2))
    else:
        shutil.rmtree = dying(shutil.rmtree, lambda path, *_: ".tmp-" in str(path) and path.exists())


@pytest.mark.parametrize("limit", [100, 1000, 90_000])
def test_a_file_size_limit_keeps_the_previous_checkpoints(tmp_path: Path, limit: int) -> None:
    """RLIMIT_FSIZE, in a process of its own: the state, the weights, or the second file of arrays is too long."""
    store = saved(tmp_path, 1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
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
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_without_space_keeps_the_previous_checkpoints(small_disk: Path) -> None:
    store, big = saved(small_disk, 1, 2), {"weights": {"a": np.zeros(100_000)}, "state": {"b": np.zeros(100_000)}}
    for _ in range(3):
        with pytest.raises(OutputError, match="step-00000003"):
            store.save(3, {"step": 3}, big)
        assert newest_step(store) == 2 and store.steps() == [1, 2] and leftovers(small_disk) == []
    store.save(3, {"step": 3}, {"weights": {"a": np.zeros(50_000)}})
    assert newest_step(store) == 3


def test_a_checkpoint_that_cannot_be_removed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS leaves a file that somebody has open: the checkpoint is gone all the same, and the rest is removed later."""
    store = saved(tmp_path, 1, 2)
    real = os.rmdir

    def busy(path: Any, **more: Any) -> None:
        if ".tmp-" in str(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        real(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        store.keep({2})
    assert store.steps() == [2] and any(".tmp-" in path.name for path in tmp_path.iterdir())
    store.clean()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
