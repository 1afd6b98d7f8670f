"""Files of data sets: every kind of damage is reported in one line, and the file is left alone."""

from __future__ import annotations

import errno
import gzip
import io
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.core.errors import DataError
from cupynet.data import MNIST
from cupynet.data.files import KnownFile, read_idx

IMAGES, LABELS, TEST_IMAGES = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz"


def spec(tiny: Any, name: str) -> KnownFile:
    found: KnownFile = next(file for file in tiny.files if file.name == name)
    return found


def refused(tiny: Any, name: str, contents: bytes) -> str:
    """Return the reason why `contents` under `name` are refused; checks the common parts of the message."""
    path = tiny.replace(name, contents)
    with pytest.raises(DataError) as caught:
        contents_of(tiny, name)
    message = str(caught.value)
    assert message.startswith(f"{path}: expected ") and "\n" not in message
    assert message.endswith(
        "; delete it to download it again, or name another folder in data.folder (in Python folder)"
    )
    assert path.read_bytes() == contents
    assert caught.value.exit_code == 65
    return message.removeprefix(f"{path}: ").split("; delete")[0]


def header(*axes: int, kind: int = 8, zeros: int = 0, count: int | None = None) -> bytes:
    start = zeros.to_bytes(2, "big") + bytes([kind, len(axes) if count is None else count])
    return start + b"".join(axis.to_bytes(4, "big") for axis in axes)


def contents_of(tiny: Any, name: str) -> Any:
    """Return the unpacked bytes of a file, or raise a DataError."""
    return MNIST(tiny.root).read(spec(tiny, name))


@pytest.mark.parametrize("level", [0, 9])
def test_a_file_compressed_again_is_accepted(tiny: Any, level: int) -> None:
    path = tiny.replace(IMAGES, gzip.compress(tiny.raw[IMAGES], level))
    assert contents_of(tiny, IMAGES) == tiny.raw[IMAGES] and path.read_bytes() != tiny.packed[IMAGES]


def test_truncated_gzip(tiny: Any) -> None:
    for length in (30, len(tiny.packed[IMAGES]) // 2, len(tiny.packed[IMAGES]) - 1):
        message = refused(tiny, IMAGES, tiny.packed[IMAGES][:length])
        assert "truncated" in message


def test_damaged_gzip(tiny: Any) -> None:
    packed = bytearray(tiny.packed[IMAGES])
    packed[-6] ^= 1  # of the checksum
    assert "found damaged data" in refused(tiny, IMAGES, bytes(packed))
    assert "found damaged data" in refused(tiny, LABELS, tiny.packed[LABELS][:10] + b"\xff" * 40)
    assert "found more bytes after it" in refused(tiny, LABELS, tiny.packed[LABELS] + b"tail")


@pytest.mark.parametrize(
    ("contents", "found"),
    [
        (b"", "b''"),
        (b"\n <!DOCTYPE html>\n<html>", r"b'\n <!DOCTYPE html'"),
        (b"PK\x03\x04 zip", r"b'PK\x03\x04 zip'"),
    ],
)
def test_not_gzip(tiny: Any, contents: bytes, found: str) -> None:
    assert refused(tiny, IMAGES, contents).endswith(f"..., found other contents, {found}")


@pytest.mark.parametrize(
    "raw",
    [
        header(30, 28, 28, zeros=0x4D4D),
        b"\1\2",
        header(30, 28, 28, kind=0x0D),
        header(30, 28, 28, 1),
        header(count=0) + bytes(100),
        header(count=255) + b"\xff" * 100,
        header(2**32 - 1, 2**32 - 1, 2**32 - 1),
        header(30, 28, 29) + bytes(30 * 28 * 28),
    ],
)
def test_wrong_header(tiny: Any, raw: bytes) -> None:
    assert "found other contents" in refused(tiny, IMAGES, gzip.compress(raw))
    path = tiny.replace(IMAGES, gzip.compress(raw))
    with pytest.raises(DataError, match=f"{IMAGES}: expected ") as caught:  # a user's file, whose digest is not known
        read_idx(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [-1, +1, -23_536 + 9])
@pytest.mark.parametrize("packed", [False, True])
def test_wrong_length(tiny: Any, change: int, packed: bool) -> None:
    raw = tiny.raw[IMAGES][: len(tiny.raw[IMAGES]) + min(change, 0)] + b"\0" * max(change, 0)
    contents = gzip.compress(raw) if packed else raw
    assert "found other contents" in refused(tiny, IMAGES, contents)
    with pytest.raises(DataError, match=f"{IMAGES}: expected an IDX file"):
        read_idx(tiny.replace(IMAGES, contents))


def test_wrong_contents(tiny: Any) -> None:
    raw = bytearray(tiny.raw[IMAGES])
    raw[-1] ^= 1
    digest = spec(tiny, IMAGES).digest
    message = refused(tiny, IMAGES, gzip.compress(bytes(raw)))
    assert message.startswith(f"expected contents of sha256 {digest[:16]}..., found other contents, ")


def test_a_decompression_bomb_is_not_inflated(tiny: Any) -> None:
    good = header(30, 28, 28)
    bombs = {
        "expected at most 90000 unpacked bytes, found more": gzip.compress(good + bytes(20_000_000)),
        "expected at most 90000 bytes, found 1": gzip.compress(good + bytes(25_000_000), 1),
    }
    np.zeros(1)
    tracemalloc.start()
    try:
        for message, bomb in bombs.items():
            assert refused(tiny, IMAGES, bomb).startswith(message)
            with pytest.raises(DataError, match=f"{IMAGES}: expected at most 89119 "):
                read_idx(tiny.replace(IMAGES, bomb))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_padding_around_gzip_data_is_cheap(tiny: Any) -> None:
    """Read byte by byte, as the gzip module does, the zeros took a minute and the name half of one."""
    packed = tiny.packed[IMAGES]
    path = tiny.replace(IMAGES, packed)
    os.truncate(path, 5_000_000_000)  # a sparse file of zeros behind the data
    with pytest.raises(DataError, match="expected at most 90000 bytes, found 5000000000"):
        contents_of(tiny, IMAGES)
    named = packed[:3] + b"\x08" + packed[4:10] + b"n" * 1_000_000 + b"\0" + packed[10:]
    message = refused(tiny, IMAGES, named)
    assert message == f"expected at most 90000 bytes, found {len(named)}"
    path.write_bytes(packed[:3] + b"\x08" + packed[4:10] + b"a name\0" + packed[10:] + bytes(1000))
    assert contents_of(tiny, IMAGES) == tiny.raw[IMAGES]


def bind(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(name)


def test_folders_pipes_devices_and_sockets_are_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with pytest.raises(
            DataError, match=rf"{IMAGES}: cannot be read .*it is a folder, a pipe or a device\); delete it"
        ):
            contents_of(tiny, IMAGES)
        if kind == "a folder":
            path.rmdir()
            path.touch()


def test_unreadable_files(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write()
    path = tiny.folder / IMAGES
    for number in (errno.EACCES, errno.EIO, errno.ESTALE):

        def fails(*_: Any, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        for method in ("stat", "open"):
            with monkeypatch.context() as patch, pytest.raises(DataError) as caught:
                patch.setattr(Path, method, fails)
                contents_of(tiny, IMAGES)
            assert f"cannot be read ({os.strerror(number)})" in str(caught.value)
    path.unlink()
    os.symlink(tmp_path / "nowhere", path)
    with pytest.raises(DataError, match=r"cannot be read \(No such file or directory\)"):
        contents_of(tiny, IMAGES)


def test_a_disk_that_fails_in_the_middle(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    tiny.write()
    monkeypatch.setattr(Path, "open", lambda *_: Failing(tiny.packed[IMAGES]))
    with pytest.raises(DataError, match=r"cannot be read \(Input/output error\)"):
        contents_of(tiny, IMAGES)
