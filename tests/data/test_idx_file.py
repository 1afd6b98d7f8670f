"""Every way in which a file can be wrong is told in one line, and the file is left alone."""

from __future__ import annotations

import errno
import gzip
import io
import os
import socket
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.core.errors import DataError
from cupynet.data import MNIST
from cupynet.data import idx_file as idx
from cupynet.data.idx_file import IdxFile

IMAGES, LABELS, TEST_IMAGES = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz"


def spec(tiny: Any, name: str) -> IdxFile:
    found: IdxFile = next(file for file in tiny.files if file.name == name)
    return found


def refused(tiny: Any, name: str, contents: bytes) -> str:
    """The message with which `contents` under `name` are refused; checks what all such messages share."""
    path = tiny.replace(name, contents)
    with pytest.raises(DataError) as caught:
        read_idx(path, spec(tiny, name), tiny.files)
    message = str(caught.value)
    assert message.startswith(f"{path}: expected ") and "\n" not in message
    assert message.endswith(
        f"delete it to download it again, or name a folder with a good mnist/{name} in CUPYNET_DATA or data.folder "
        "(in Python folder)"
    )
    assert path.read_bytes() == contents
    assert caught.value.exit_code == 65
    return message.removeprefix(f"{path}: ").split("; delete")[0]


def header(*axes: int, kind: int = 8, zeros: int = 0, count: int | None = None) -> bytes:
    start = zeros.to_bytes(2, "big") + bytes([kind, len(axes) if count is None else count])
    return start + b"".join(axis.to_bytes(4, "big") for axis in axes)


def read_idx(path: Path, file: IdxFile, siblings: Sequence[IdxFile] = ()) -> Any:
    """The unpacked bytes of a file of a set, or a DataError that says what to do."""
    source = MNIST()
    source.files = tuple(siblings) or (file,)
    assert path.name == file.name
    return source.check_file(path.parent, file)


def test_header_is_that_of_the_format() -> None:
    assert IdxFile("x", (60_000, 28, 28), "").header.hex() == "00000803" + "0000ea60" + "0000001c" + "0000001c"
    assert IdxFile("x", (60_000, 28, 28), "").size == 47_040_016
    assert IdxFile("x", (10_000,), "").size == 10_008


@pytest.mark.parametrize("level", [0, 1, 9])
def test_a_file_that_was_packed_again_is_good(tiny: Any, level: int) -> None:
    path = tiny.replace(IMAGES, gzip.compress(tiny.raw[IMAGES], level))
    assert read_idx(path, spec(tiny, IMAGES)) == tiny.raw[IMAGES]


def test_truncated_gzip(tiny: Any) -> None:
    for length in (30, len(tiny.packed[IMAGES]) // 2, len(tiny.packed[IMAGES]) - 1):
        message = refused(tiny, IMAGES, tiny.packed[IMAGES][:length])
        assert message == "expected 23536 unpacked bytes, but the gzip data end early (a cut download?)"


def test_damaged_gzip(tiny: Any) -> None:
    packed = bytearray(tiny.packed[IMAGES])
    packed[-6] ^= 1  # of the checksum
    assert "expected gzip data, found damaged ones (incorrect data check)" in refused(tiny, IMAGES, bytes(packed))
    assert "found damaged ones" in refused(tiny, LABELS, tiny.packed[LABELS][:10] + b"\xff" * 40)
    assert "found other bytes after them" in refused(tiny, LABELS, tiny.packed[LABELS] + b"tail")


@pytest.mark.parametrize(
    ("contents", "found"),
    [
        (b"", "an empty file"),
        (b"\n <!DOCTYPE html>\n<html>", "a web page ('<!DOCTYPE html>'...)"),
        (b"<", "a web page ('<'...)"),
        (b"\0\0\x08\x03" + bytes(40), "an unpacked IDX file (gzip it, or take the .gz one)"),
        (b"PK\x03\x04 zip", "bytes 0x504b0304..."),
    ],
)
def test_not_gzip(tiny: Any, contents: bytes, found: str) -> None:
    assert refused(tiny, IMAGES, contents) == f"expected gzip data, found {found}"


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (header(30, 28, 28, zeros=0x4D4D), "found magic number 0x4d4d0803, which is not one of IDX"),
        (b"\1\2", "found magic number 0x0102, which is not one of IDX"),
        (header(30, 28, 28, kind=0x0D), "found data type 0x0d (unsigned bytes are 0x08)"),
        (header(30, 28, 28, 1), "found 4 axes"),
        (header(count=0) + bytes(100), "found 0 axes"),
        (header(count=255) + b"\xff" * 100, "found 255 axes"),
        (header(2**32 - 1, 2**32 - 1, 2**32 - 1), "found 4294967295 x 4294967295 x 4294967295"),
        (header(30, 28, 29) + bytes(30 * 28 * 29), "found 30 x 28 x 29"),
    ],
)
def test_wrong_header(tiny: Any, raw: bytes, found: str) -> None:
    expected = "expected an IDX header of unsigned bytes 30 x 28 x 28, "
    assert refused(tiny, IMAGES, gzip.compress(raw)) == expected + found


def test_swapped_files_are_named(tiny: Any) -> None:
    assert refused(tiny, IMAGES, tiny.packed[TEST_IMAGES]).endswith(f"found 12 x 28 x 28, as {TEST_IMAGES} has")
    assert refused(tiny, IMAGES, tiny.packed[LABELS]).endswith(f"found 1 axis, as {LABELS} has")
    assert refused(tiny, LABELS, tiny.packed[IMAGES]).endswith(f"found 3 axes, as {IMAGES} has")


@pytest.mark.parametrize(("change", "found"), [(-1, "23535"), (+1, "more than 23536"), (-23_536 + 9, "9")])
def test_wrong_length(tiny: Any, change: int, found: str) -> None:
    raw = tiny.raw[IMAGES][: len(tiny.raw[IMAGES]) + min(change, 0)] + b"\0" * max(change, 0)
    assert refused(tiny, IMAGES, gzip.compress(raw)) == f"expected 23536 unpacked bytes, found {found}"


def test_wrong_contents(tiny: Any) -> None:
    raw = bytearray(tiny.raw[IMAGES])
    raw[-1] ^= 1
    digest = spec(tiny, IMAGES).sha256
    message = refused(tiny, IMAGES, gzip.compress(bytes(raw)))
    assert message.startswith(f"expected SHA-256 {digest[:16]}... (unpacked), found ")
    assert message.endswith("...: right shape, wrong contents") and message.count(digest[:16]) == 1


def test_a_bomb_is_not_inflated(tiny: Any) -> None:
    good = header(30, 28, 28)
    bombs = {
        "expected 23536 unpacked bytes, found more than 23536": gzip.compress(good + bytes(50_000_000)),
        "expected at most 89119 bytes of gzip data, found 9": gzip.compress(good + bytes(100_000_000)),
    }
    np.zeros(1)
    tracemalloc.start()
    try:
        for message, bomb in bombs.items():
            assert refused(tiny, IMAGES, bomb).startswith(message)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_what_is_around_gzip_data_costs_nothing(tiny: Any) -> None:
    """Read byte by byte, as the gzip module does, the zeros took a minute and the name half of one."""
    packed = tiny.packed[IMAGES]
    path = tiny.replace(IMAGES, packed)
    os.truncate(path, 5_000_000_000)  # a sparse file of zeros behind the data
    with pytest.raises(DataError, match="expected at most 89119 bytes of gzip data, found 5000000000"):
        read_idx(path, spec(tiny, IMAGES), tiny.files)
    named = packed[:3] + b"\x08" + packed[4:10] + b"n" * 1_000_000 + b"\0" + packed[10:]
    message = refused(tiny, IMAGES, named)
    assert message == f"expected at most 89119 bytes of gzip data, found {len(named)}"
    path.write_bytes(packed[:3] + b"\x08" + packed[4:10] + b"a name\0" + packed[10:] + bytes(1000))
    assert read_idx(path, spec(tiny, IMAGES)) == tiny.raw[IMAGES]


def test_the_bytes_read_are_bounded(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the size that a good file may have there is room for a long name, and for members that hold nothing."""
    name = b"n" * 60_000 + b"\0"
    path = tiny.replace(LABELS, tiny.packed[LABELS][:3] + b"\x08" + tiny.packed[LABELS][4:10] + name)
    with pytest.raises(DataError, match="the gzip data end early"):
        read_idx(path, spec(tiny, LABELS))
    monkeypatch.setattr(idx, "_MEMBERS", 50)
    empty = gzip.compress(b"")
    assert refused(tiny, LABELS, empty * 60).endswith("found more than 50 members of them")
    path.write_bytes(empty * 49 + tiny.packed[LABELS])
    assert read_idx(path, spec(tiny, LABELS)) == tiny.raw[LABELS]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 16])
def test_members_one_after_the_other(tiny: Any, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """As bgzip and `cat` make them, wherever they are cut; zeros between them fill up a tape."""
    monkeypatch.setattr(idx, "_CHUNK", chunk)
    raw = tiny.raw[LABELS]
    parts = [raw[:3], raw[3:20], raw[20:]]
    path = tiny.replace(LABELS, bytes(9).join(map(gzip.compress, parts)) + bytes(99))
    assert read_idx(path, spec(tiny, LABELS)) == raw
    assert refused(tiny, LABELS, gzip.compress(raw) * 2) == "expected 38 unpacked bytes, found more than 38"
    assert refused(tiny, LABELS, gzip.compress(raw)[:-1]).startswith("expected 38 unpacked bytes, but the gzip")
    assert refused(tiny, LABELS, gzip.compress(raw[:-1])) == "expected 38 unpacked bytes, found 37"


def bind(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(name)


def test_what_is_no_file(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the other end of a pipe."""
    tiny.write()
    path = tiny.folder / IMAGES
    monkeypatch.chdir(tiny.folder)  # the name of a socket must be short
    makers: dict[str, Callable[[], object]] = {
        "a folder": path.mkdir,
        "a pipe": lambda: os.mkfifo(path),
        "a device": lambda: path.symlink_to("/dev/zero"),
        "a socket": lambda: bind(IMAGES),
    }
    for kind, make in makers.items():
        path.unlink()
        make()
        with pytest.raises(DataError, match=f"{IMAGES}: expected a file, found {kind}; delete it"):
            read_idx(path, spec(tiny, IMAGES))
        if kind == "a folder":
            path.rmdir()
            path.touch()


def test_what_cannot_be_read(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write()
    path = tiny.folder / IMAGES
    for number in (errno.EACCES, errno.EIO, errno.ESTALE):

        def fails(*_: Any, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        for method in ("stat", "open"):
            with monkeypatch.context() as patch, pytest.raises(DataError) as caught:
                patch.setattr(Path, method, fails)
                read_idx(path, spec(tiny, IMAGES))
            assert f"expected a file, but it cannot be read ({os.strerror(number)})" in str(caught.value)
    path.unlink()
    os.symlink(tmp_path / "nowhere", path)
    with pytest.raises(DataError, match=r"cannot be read \(No such file or directory\)"):
        read_idx(path, spec(tiny, IMAGES))


def test_a_disk_that_fails_in_the_middle(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 100:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(100)

    tiny.write()
    monkeypatch.setattr(Path, "open", lambda *_: Failing(tiny.packed[IMAGES]))
    with pytest.raises(DataError, match=r"cannot be read \(Input/output error\)"):
        read_idx(tiny.folder / IMAGES, spec(tiny, IMAGES))
