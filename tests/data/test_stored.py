"""Arrays in files: mapped as they were written, and refused when they are not what they were."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.data import Dataset, stored
from cupynet.data.idx import Damaged
from cupynet.data.stored import (
    MANIFEST,
    map_array,
    map_dataset,
    read_manifest,
    write_array,
    write_dataset,
    write_manifest,
)


def pixels(samples: int = 30) -> Any:
    return np.random.default_rng(samples).integers(0, 256, (samples, 4, 3, 2), np.uint8)


@pytest.mark.parametrize("block", [1, 50, 1 << 22])
@pytest.mark.parametrize("rows", [None, np.array([7, 2, 29]), np.arange(30)[::-1], np.zeros(0, np.int64)])
def test_what_is_written_is_what_numpy_writes_and_comes_back(
    rows: Any, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_BLOCK", block)
    for array in (pixels(), np.arange(30)):
        expected = array if rows is None else array[rows]
        entry = write_array(tmp_path / "a.npy", array, rows)
        np.save(tmp_path / "b.npy", expected)
        assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
        assert entry["sha256"] == hashlib.sha256((tmp_path / "a.npy").read_bytes()).hexdigest()
        found = map_array(tmp_path, json.loads(json.dumps(entry)))
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype and type(found) is np.ndarray


def test_what_is_mapped_cannot_be_written_to(tmp_path: Path) -> None:
    dataset = map_dataset(tmp_path, write_dataset(tmp_path, "test", Dataset("x", pixels(), np.arange(30) % 7, 7)))
    assert (dataset.name, dataset.classes, len(dataset)) == ("x", 7, 30)
    for array in (dataset.images, dataset.labels):
        base = array
        while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap), "a copy, not the file"
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (flip, "right size, wrong contents"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "expected .* bytes, found"),
        (lambda path: path.write_bytes(b""), "bytes, found 0"),
        (lambda path: path.unlink(), "is missing"),
        (lambda path: (path.unlink(), path.mkdir()), "expected a file, found a folder"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "expected a file, found a pipe"),
    ],
)
def test_a_file_that_is_not_what_it_was_is_refused(harm: Any, message: str, tmp_path: Path) -> None:
    entry = write_array(tmp_path / "a.npy", pixels())
    harm(tmp_path / "a.npy")
    with pytest.raises(Damaged, match=f"{tmp_path / 'a.npy'}: .*(?:{message})"):
        map_array(tmp_path, entry)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    content = (tmp_path / "a.npy").read_bytes()
    entry = {"file": "a.npy", "shape": [1], "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    with pytest.raises(Damaged, match="cannot be read"):
        map_array(tmp_path, entry)


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../a.npy"},
        {"file": "/etc/passwd"},
        {"file": "a.npy\0"},
        {"file": 5},
        {"shape": None},
        {"bytes": None},
        {"sha256": None},
        {"file": None},
    ],
)
def test_an_entry_names_a_file_of_its_folder_and_says_all_of_it(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    entry = write_array(tmp_path / "a.npy", pixels()) | change
    entry = {name: value for name, value in entry.items() if value is not None}
    write_array(tmp_path / "in" / "a.npy", pixels())
    for each in (entry, None, [], "a.npy"):
        with pytest.raises(Damaged, match=r"in/manifest.json: does not describe the files of a data set"):
            map_array(tmp_path / "in", each)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape", [[10**9, 4, 3, 2], [30, 10**9, 10**9, 2], [-1, 4, 3, 2], [30, 4, 6], [0, 10**30, 4, 3]]
)
def test_a_header_that_claims_another_shape_is_refused_before_anything_is_allocated(
    shape: list[int], tmp_path: Path
) -> None:
    entry = write_array(tmp_path / "a.npy", pixels())
    header = io.BytesIO()
    about = {"descr": "|u1", "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(header, about)
    content = header.getvalue() + pixels().tobytes()
    (tmp_path / "a.npy").write_bytes(content)
    claimed = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for said in (entry["shape"], [0]):
        tracemalloc.start()
        try:
            with pytest.raises(Damaged, match=r"a.npy: (cannot be read|expected \[.*\], found)"):
                map_array(tmp_path, entry | claimed | {"shape": said})
            assert tracemalloc.get_traced_memory()[1] < 5_000_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("entry", [{}, {"name": "x"}, {"images": {}}, {"images": None, "labels": None}, None])
def test_a_data_set_that_is_not_described(entry: Any, tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=r"manifest.json: does not describe the files of a data set"):
        map_dataset(tmp_path, entry)


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    about = {"format": "x 1", "counts": [3, 4], "none": None}
    write_manifest(tmp_path, about)
    assert read_manifest(tmp_path, "x 1") == about


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing"),
        (b"", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[1]", "expected a manifest of format 'x 1', found a list"),
        (b"{}", "expected a manifest of format 'x 1', found format None"),
        (b'{"format": "x 2"}', "found format 'x 2'"),
        (b'{"format": "x 1"}', "does not have the SHA-256 that it says"),
        (b'{"format": "x 1", "sha256": 5}', "does not have the SHA-256 that it says"),
    ],
)
def test_a_manifest_that_is_none(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(Damaged, match=f"{MANIFEST}: .*{message}"):
        read_manifest(tmp_path, "x 1")


def test_a_manifest_that_is_no_file_or_a_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(Damaged, match=r"manifest.json: expected a file, found a pipe"):
        read_manifest(tmp_path, "x 1")
    (tmp_path / MANIFEST).unlink()
    (tmp_path / MANIFEST).touch()
    os.truncate(tmp_path / MANIFEST, 10**12)
    with pytest.raises(Damaged, match=r"manifest.json: expected a manifest of at most 16777216 bytes, found 10+$"):
        read_manifest(tmp_path, "x 1")


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"format": "x 1", "counts": [3, 4]})
    path = tmp_path / MANIFEST
    path.write_text(path.read_text().replace("4", "5"))
    with pytest.raises(Damaged, match="it was changed, or is damaged"):
        read_manifest(tmp_path, "x 1")
