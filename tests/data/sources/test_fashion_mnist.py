"""Fashion-MNIST and KMNIST, which are checked by the digests of their gzip files."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any

import pytest

from cupynet.data import KMNIST, FashionMNIST
from cupynet.data.files import KnownFile
from tests.support.data_errors import data_error
from tests.support.mirrors import NAMES, Mirror, TinyMNIST

both = pytest.mark.parametrize("kind", [FashionMNIST, KMNIST])


@pytest.fixture
def placed(tiny: TinyMNIST, monkeypatch: pytest.MonkeyPatch) -> TinyMNIST:
    """The files of a small set like these, in the folders of both."""
    files = tuple(KnownFile(name, hashlib.sha256(tiny.packed[name]).hexdigest(), 90_000) for name in NAMES)
    for kind in (FashionMNIST, KMNIST):
        monkeypatch.setattr(kind, "files", files)
        folder = tiny.root / kind.name
        folder.mkdir(parents=True)
        for name in NAMES:
            (folder / name).write_bytes(tiny.packed[name])
    return tiny


@both
def test_each_data_set_has_its_own_folder(kind: Any, placed: TinyMNIST) -> None:
    source = kind(placed.root)
    data = source.load()
    assert (data.name, data.fallback, len(source.class_names)) == (kind.name, False, 10)
    assert (data.train.images[..., 0] == placed.arrays[0]).all()


@both
def test_a_file_compressed_again_has_another_digest(kind: Any, placed: TinyMNIST) -> None:
    path = placed.root / kind.name / NAMES[1]
    path.write_bytes(gzip.compress(placed.raw[NAMES[1]], 9))
    with data_error(path):
        kind(placed.root).load()


@both
def test_fashion_and_kmnist_have_no_fallback(kind: Any, tmp_path: Path) -> None:
    with data_error(tmp_path / kind.name):
        kind(tmp_path).load()


def test_the_size_of_a_download_is_limited(placed: TinyMNIST, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KMNIST, "mirrors", (mirror.url,))
    (placed.root / "kmnist" / NAMES[0]).unlink()
    mirror.offer({NAMES[0]: bytes(90_001)})
    with data_error(NAMES[0], 90_000):
        KMNIST(placed.root).load()
