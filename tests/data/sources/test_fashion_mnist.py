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
from tests.support.mirrors import NAMES

both = pytest.mark.parametrize("kind", [FashionMNIST, KMNIST])


@pytest.fixture
def placed(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
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
def test_each_data_set_has_its_own_folder(kind: Any, placed: Any) -> None:
    data = kind(placed.root, limit=9).load()
    assert (data.name, data.fallback, len(data.train)) == (kind.name, False, 9)
    assert (data.train.images[..., 0] == placed.arrays[0][:9]).all()
    assert len(kind(placed.root).class_names) == 10


@both
def test_a_file_compressed_again_has_another_digest(kind: Any, placed: Any) -> None:
    path = placed.root / kind.name / NAMES[1]
    path.write_bytes(gzip.compress(placed.raw[NAMES[1]], 9))
    with data_error(path):
        kind(placed.root).load()


@both
def test_fashion_and_kmnist_have_no_fallback(kind: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CUPYNET_DATA", str(tmp_path))
    with data_error(tmp_path / kind.name):
        kind().load()


@both
def test_the_size_of_a_download_is_limited(kind: Any, placed: Any, mirror: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(kind, "mirrors", (mirror.url,))
    for name in NAMES:
        (placed.root / kind.name / name).unlink()
    mirror.offer(placed.packed)
    assert len(kind(placed.root).load().train) == 30
    mirror.offer({NAMES[0]: bytes(placed.files[0].most + 1)})
    (placed.root / kind.name / NAMES[0]).unlink()
    with data_error(NAMES[0], placed.files[0].most):
        kind(placed.root).load()
