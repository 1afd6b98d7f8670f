"""Small real digits in the formats of users' data: IDX files, .npz, image folders."""

import errno
import gzip
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupynet.data import Source
from cupynet.data.sources.idx import IDX_NAMES

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "digits.npz"


class Parts(NamedTuple):
    """Images (S, H, W) or (S, H, W, C) uint8 and labels (S,), for training and for testing."""

    train_images: Any
    train_labels: Any
    test_images: Any
    test_labels: Any


COLORS = Parts(
    np.random.default_rng(1).integers(0, 256, (12, 5, 7, 3), np.uint8),
    np.arange(12, dtype=np.uint8) // 4,
    np.random.default_rng(2).integers(0, 256, (6, 5, 7, 3), np.uint8),
    np.arange(6, dtype=np.uint8) // 2,
)


def deny(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid access to the files in a folder, as without its execute permission, also for root."""
    real = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | Path) and Path(path).parent == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(Path, "stat", lambda path, **options: stat(path, **options))  # for Python 3.10


def checked(source: Source) -> Any:
    """Load the data as a run does."""
    data = source.load()
    data.check(source.image_shape, source.classes)
    return data


def digits(train: int = 1500, test: int = 297) -> Parts:
    """Return digits of 8 x 8 pixels, sorted by class like image folders, so that all formats have the same order."""
    with np.load(GOLDEN, allow_pickle=False) as file:
        images, labels = (file["x"] * np.float32(255 / 16)).astype(np.uint8), file["y"]
    first, second = slice(train), slice(train, train + test)
    orders = [np.argsort(labels[some], kind="stable") for some in (first, second)]
    return Parts(
        images[first][orders[0]], labels[first][orders[0]], images[second][orders[1]], labels[second][orders[1]]
    )


def idx_header(*axes: int, kind: int = 8) -> bytes:
    """Return the header of an IDX file: two zero bytes, the type, the number of axes, and their sizes as 32 bits."""
    return bytes([0, 0, kind, len(axes)]) + b"".join(axis.to_bytes(4, "big") for axis in axes)


def idx_bytes(array: Any) -> bytes:
    return idx_header(*array.shape) + np.ascontiguousarray(array, np.uint8).tobytes()


def write_idx(folder: Path, parts: Parts, packed: bool = True) -> Path:
    folder.mkdir(parents=True)
    for name, array in parts._asdict().items():
        raw = idx_bytes(array)
        path = folder / (IDX_NAMES[name] + ".gz" * packed)
        path.write_bytes(gzip.compress(raw, 1) if packed else raw)
    return folder


def write_npz(path: Path, parts: Parts) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    images, labels, test_images, test_labels = parts
    np.savez_compressed(path, x_train=images, y_train=labels, x_test=test_images, y_test=test_labels)
    return path


def write_pictures(folder: Path, parts: Parts, ending: str = "png") -> Path:
    from PIL import Image

    for part, images, labels in (("train", *parts[:2]), ("test", *parts[2:])):
        for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
            into = folder / part / f"class-{label}"
            into.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(into / f"{number:05}.{ending}")
    return folder
