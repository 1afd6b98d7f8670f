"""CIFAR-10's archive is read without unpacking, with its files in any order."""

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.data import CIFAR10
from cupynet.data.files import KnownFile
from cupynet.data.sources.cifar import MEMBERS
from tests.support.refusals import data_error

RNG = np.random.default_rng(3)
IMAGES = RNG.integers(0, 256, (6, 4, 32, 32, 3), np.uint8)  # four (H, W, C) images per file
LABELS = RNG.integers(0, 10, (6, 4), np.uint8)
(OFFICIAL,) = CIFAR10.files


def record(file: int) -> bytes:
    planes = IMAGES[file].transpose(0, 3, 1, 2).reshape(4, -1)
    return np.concatenate([LABELS[file][:, None], planes], axis=1).tobytes()


GOOD = {name: record(file) for file, name in enumerate(MEMBERS)}


def archive(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, raw in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            if raw.startswith(b"/"):
                info.type, info.linkname, info.size = tarfile.SYMTYPE, raw.decode(), 0
            tar.addfile(info, io.BytesIO(raw))
    return packed.getvalue()


def place(raw: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch, md5: str | None = None) -> Path:
    """Write an archive to its folder. Its digest is expected unless `md5` is given."""
    known = KnownFile(OFFICIAL.name, md5 or hashlib.md5(raw).hexdigest(), 1_000_000)
    monkeypatch.setattr(CIFAR10, "files", (known,))
    monkeypatch.setattr(CIFAR10, "samples", (20, 4))
    path = folder / "cifar10" / OFFICIAL.name
    path.parent.mkdir(parents=True)
    path.write_bytes(raw)
    return path


def test_a_cifar_archive_is_read_with_its_files_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backwards = dict(reversed(GOOD.items())) | {"cifar-10-batches-bin/readme.html": b"<html>"}
    place(archive(backwards), tmp_path, monkeypatch)
    source = CIFAR10(tmp_path)
    data: Any = source.load()
    data.check((32, 32, 3), 10)
    assert source.expected() == {"train": 20, "test": 4} and len(source.class_names) == 10
    np.testing.assert_array_equal(data.train.images, IMAGES[:5].reshape(20, 32, 32, 3))
    np.testing.assert_array_equal(data.train.labels, LABELS[:5].ravel())
    np.testing.assert_array_equal(data.test.images, IMAGES[5])


WRONG: dict[str, bytes] = {
    "too short": archive({**GOOD, MEMBERS[2]: b"short"}),
    "too long": archive({**GOOD, MEMBERS[2]: GOOD[MEMBERS[2]] + b"more"}),
    "a link": archive({**GOOD, MEMBERS[0]: b"/etc/passwd"}),
    "no test images": archive({name: raw for name, raw in GOOD.items() if "test" not in name}),
    "outside": archive({f"../{name}": raw for name, raw in GOOD.items()}),
    "cut": archive(GOOD)[:-2000],
    "too large": bytes(1_000_001),
    "another digest": archive(GOOD),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_cifar_archive_is_refused_and_kept(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MD5 can be forged, so a file with the right digest may still contain anything."""
    md5 = OFFICIAL.digest if kind == "another digest" else None
    path = place(WRONG[kind], tmp_path, monkeypatch, md5)
    with data_error(path):
        CIFAR10(tmp_path).load()
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path]
    assert path.read_bytes() == WRONG[kind]
