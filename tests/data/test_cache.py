"""Data that processes share: what the source would have loaded, whatever state the cache is in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.data import MNIST, Data, Dataset, Synthetic, cache, load_mapped, write_shards
from cupynet.data.stored import MANIFEST, write_manifest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path / "decoded")
    return tmp_path / "decoded"


def assert_same(found: Data, expected: Data) -> None:
    assert (found.name, found.fallback) == (expected.name, expected.fallback)
    for mine, theirs in zip(parts(found), parts(expected), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert (mine.name, mine.classes) == (theirs.name, theirs.classes)
            np.testing.assert_array_equal(mine.images, theirs.images)
            np.testing.assert_array_equal(mine.labels, theirs.labels)


def parts(data: Data) -> list[Any]:
    return [data.train, data.validation, data.test]


def is_mapped(data: Data) -> bool:
    return not any(part.images.flags.writeable for part in parts(data) if part is not None)


def kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.is_dir())


@pytest.mark.parametrize("validation", [0, 6])
def test_it_is_loaded_once_and_then_mapped(
    validation: int, tiny: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write()
    for source in (MNIST(tiny.root, validation=validation), Synthetic(40, 10, validation=validation)):
        expected = source.load()
        first = load_mapped(source)
        owner = next(kind for kind in type(source).__mro__ if "load" in vars(kind))
        monkeypatch.setattr(owner, "load", None)  # nothing is loaded again
        for found in (first, load_mapped(source)):
            assert_same(found, expected)
            assert is_mapped(found)
    assert len(kept(folder)) == 2


def test_other_settings_are_other_data(folder: Path) -> None:
    sources = [Synthetic(40, 10), Synthetic(41, 10), Synthetic(40, 11), Synthetic(40, 10, seed=1)]
    sources += [Synthetic(40, 10, validation=1), Synthetic(40, 10, limit=5), Synthetic(40, 10, validation=2)]
    assert len({source.fingerprint() for source in sources}) == len(sources)
    assert MNIST(seed=1).fingerprint() == MNIST().fingerprint() != MNIST(limit=5).fingerprint()
    assert MNIST(seed=1, validation=5).fingerprint() != MNIST(validation=5).fingerprint()


def test_threads_need_none_of_this(folder: Path) -> None:
    Synthetic(40, 10).load()
    assert not folder.exists()


def test_what_stands_in_for_mnist_is_not_kept(tiny: Any, folder: Path, tmp_path: Path) -> None:
    assert load_mapped(MNIST(tmp_path / "none", "synthetic", limit=20)).fallback
    assert kept(folder) == []


def test_shards_and_sources_without_a_fingerprint_are_loaded_as_ever(folder: Path, tmp_path: Path) -> None:
    write_shards(Synthetic(20, 5).load(), tmp_path / "shards", 2)
    assert len(load_mapped(Synthetic(20, 5, storage="sharded", shards=tmp_path / "shards")).train) == 20

    class Own(Synthetic):
        def fingerprint(self) -> None:  # type: ignore[override]
            return None

    assert not is_mapped(load_mapped(Own(20, 5))) and not folder.exists()


def test_a_class_that_loads_otherwise_is_not_taken_for_the_one_it_is_derived_from(folder: Path) -> None:
    class Darker(Synthetic):
        def load(self) -> Data:
            data = super().load()
            assert isinstance(data.train, Dataset)
            data.train.images[...] //= 2
            return data

    class Named(Synthetic):
        name = "named"

    load_mapped(Synthetic(20, 5))
    for _ in range(2):
        assert_same(load_mapped(Darker(20, 5)), Darker(20, 5).load())
        assert_same(load_mapped(Named(20, 5)), Named(20, 5).load())
    assert len(kept(folder)) == 2, "the first and the last"


@pytest.mark.parametrize("about", [{}, {"name": "x", "train": {}, "validation": None, "test": {}}])
def test_a_manifest_of_something_else_is_written_again(
    about: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Synthetic(40, 10)
    load_mapped(source)
    write_manifest(kept(folder)[0], {"format": cache.FORMAT, **about})
    assert_same(load_mapped(source), source.load())
    assert "does not describe" in caplog.text and "; it is written again" in caplog.text


@pytest.mark.parametrize("file", ["images.npy", "test-labels.npy", MANIFEST])
@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_a_damaged_cache_is_told_and_mended(
    file: str, harm: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Synthetic(40, 10)
    load_mapped(source)
    path = kept(folder)[0] / file
    content = path.read_bytes()
    path.unlink()
    if harm != "gone":
        path.write_bytes(content[:-9] + (bytes([content[-9] ^ 1]) + content[-8:] if harm == "flip" else b""))
    for _ in range(2):
        found = load_mapped(source)
        assert_same(found, source.load())
        assert is_mapped(found)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert file in caplog.text and "it is written again" in caplog.text


def test_a_cache_that_cannot_be_written_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Synthetic(40, 10)
    folder.write_text("not a folder")
    assert_same(load_mapped(source), source.load())
    assert "held in memory by each process, and not kept in" in caplog.text
    folder.unlink()

    def full(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", str(self))

    caplog.clear()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", full)
        found = load_mapped(source)
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == 1 and "No space left" in warnings[0].getMessage()
        caplog.clear()
        load_mapped(source, first=False)
        assert not [record for record in caplog.records if record.levelname == "WARNING"]  # another process warns
    assert_same(found, source.load())
    assert kept(folder) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_is_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_mapped(Synthetic(40, 10))
    folder.chmod(0o500)
    assert is_mapped(load_mapped(Synthetic(40, 10))) and not caplog.records
    assert not is_mapped(load_mapped(Synthetic(41, 10))) and "not kept in" in caplog.text
    folder.chmod(0o700)


def test_a_lock_that_is_held_for_long_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(cache, "WAIT_S", 0.1)
    folder.mkdir()
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert_same(load_mapped(Synthetic(40, 10)), Synthetic(40, 10).load())
    assert "another process is still at work" in caplog.text


def test_those_used_last_are_kept_and_what_died_is_removed(folder: Path) -> None:
    folder.mkdir()
    (folder / ".0123.999999.part").mkdir()
    sources = [Synthetic(20 + more, 5) for more in range(cache.KEPT + 2)]
    for age, source in enumerate(sources[: cache.KEPT]):
        load_mapped(source)
        newest = max((each / MANIFEST for each in kept(folder)), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (1000 + age, 1000 + age))
    before = set(kept(folder))
    load_mapped(sources[0])  # used again: the second is now the oldest
    load_mapped(sources[cache.KEPT])
    assert len(kept(folder)) == cache.KEPT and not list(folder.glob(".*.part"))
    assert len(before - set(kept(folder))) == 1
    places = set(kept(folder))
    load_mapped(sources[0])
    assert set(kept(folder)) == places


def test_what_is_mapped_stays_when_it_is_forgotten(folder: Path) -> None:
    found = load_mapped(Synthetic(40, 10))
    shutil.rmtree(folder)
    assert_same(found, Synthetic(40, 10).load())


PROCESS = """
import sys
from pathlib import Path
from cupynet.data import Synthetic, cache, load_mapped

cache.cache_folder = lambda: Path(sys.argv[1])
load = Synthetic.load

def noted(self):
    print("loaded")
    return load(self)

Synthetic.load = noted
data = load_mapped(Synthetic(3000, 10))
assert not data.train.images.flags.writeable
print(int(data.train.images.sum()))
"""


def test_several_processes_at_once_load_once(folder: Path) -> None:
    pytest.importorskip("fcntl")
    command = [sys.executable, "-W", "error", "-c", PROCESS, str(folder)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    said = [process.communicate(timeout=60) for process in processes]
    assert [stderr for _, stderr in said] == [""] * 3
    lines = [line for stdout, _ in said for line in stdout.split()]
    assert lines.count("loaded") == 1
    assert {line for line in lines if line != "loaded"} == {str(int(Synthetic(3000, 10).load().train.images.sum()))}


def test_without_locks_it_still_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupynet import lock

    monkeypatch.setattr(lock, "fcntl", None)
    source, other = Synthetic(40, 10), Synthetic(40, 10)
    load = Synthetic.load

    def raced(self: Synthetic) -> Data:
        monkeypatch.setattr(Synthetic, "load", load)
        load_mapped(other)  # another process, at the same time
        return load(self)

    monkeypatch.setattr(Synthetic, "load", raced)
    found = load_mapped(source)
    assert is_mapped(found) and len(kept(folder)) == 1
    assert_same(found, source.load())
