"""MNIST: found, downloaded, replaced by synthetic digits with a warning, or refused."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest

from cupynet.data import MNIST, Data, Dataset
from tests.support.data_errors import data_error
from tests.support.mirrors import Mirror, TinyMNIST
from tests.support.refusals import refused

NAMES = [file.name for file in MNIST.files]
REAL = os.environ.get("CUPYNET_DATA", "")  # before the fixture hides it


def check_is(data: Data, tiny: TinyMNIST) -> None:
    train_images, train_labels, test_images, test_labels = tiny.arrays
    assert (data.name, data.fallback, data.validation) == ("mnist", False, None)
    np.testing.assert_array_equal(data.train.images[..., 0], train_images)
    np.testing.assert_array_equal(data.train.labels, train_labels)
    np.testing.assert_array_equal(data.test.images[..., 0], test_images)
    np.testing.assert_array_equal(data.test.labels, test_labels)


def test_existing_files_are_read(tiny: TinyMNIST, caplog: pytest.LogCaptureFixture) -> None:
    tiny.write()
    check_is(MNIST(tiny.root).load(), tiny)
    assert not caplog.records


def test_the_folder_of_the_data(tiny: TinyMNIST, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert MNIST().place == platformdirs.user_cache_path("cupynet") / "mnist"
    monkeypatch.setenv("CUPYNET_DATA", "")
    assert MNIST().place == platformdirs.user_cache_path("cupynet") / "mnist"
    monkeypatch.setenv("CUPYNET_DATA", str(tiny.root))
    assert MNIST().place == tiny.root / "mnist"
    assert MNIST(tmp_path / "given").place == tmp_path / "given" / "mnist"
    assert MNIST("~/x").place == Path.home() / "x" / "mnist"
    tiny.write()
    check_is(MNIST().load(), tiny)


def test_validation_and_limit(tiny: TinyMNIST) -> None:
    tiny.write()
    data = MNIST(tiny.root, validation=10, limit=5).load()
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (5, 10, 5)
    with refused("validation", "30"):
        MNIST(tiny.root, validation=30).load()


def test_download(tiny: TinyMNIST, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MNIST, "mirrors", (mirror.url,))
    mirror.offer(tiny.packed)
    check_is(MNIST(tiny.root, fallback=None).load(), tiny)
    assert sorted(mirror.requests) == sorted("/" + name for name in NAMES)
    check_is(MNIST(tiny.root, fallback=None).load(), tiny)
    assert len(mirror.requests) == 4


def test_only_missing_files_are_downloaded(tiny: TinyMNIST, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MNIST, "mirrors", (mirror.url,))
    mirror.offer(tiny.packed)
    tiny.write(*NAMES[:3])
    check_is(MNIST(tiny.root).load(), tiny)
    assert mirror.requests == ["/" + NAMES[3]]


@pytest.mark.parametrize("name", NAMES)
def test_a_mirror_that_serves_other_data_is_rejected(
    tiny: TinyMNIST, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of the right shape, and right gzip data: another set, or one bit."""
    monkeypatch.setattr(MNIST, "mirrors", (mirror.url,))
    bit = bytearray(tiny.raw[name])
    bit[-1] ^= 1
    for other in (tiny.packed[NAMES[NAMES.index(name) ^ 1]], gzip.compress(bytes(bit))):
        mirror.offer(tiny.packed | {name: other})
        with data_error(mirror.url + name):
            MNIST(tiny.root, fallback=None).load()
        assert not (tiny.folder / name).exists()
        shutil.rmtree(tiny.folder)


def warning(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "cupynet.data.sources.downloaded")
    assert "\n" not in record.getMessage()
    return record.getMessage()


@pytest.fixture
def home(tiny: TinyMNIST, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder, the user's cache, replaced by that of the tiny MNIST."""
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: tiny.root)
    folder: Path = tiny.folder
    return folder


def test_without_files_and_network_the_data_are_synthetic(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = MNIST(limit=20, seed=9).load()
    assert (data.name, data.fallback, len(data.train), len(data.test)) == ("synthetic", True, 20, 20)
    text = warning(caplog)
    assert str(home) in text and NAMES[0] in text and "CUPYNET_OFFLINE" in text and not home.exists()


def test_the_seed_is_that_of_the_digits_that_stand_in(home: Path) -> None:
    one, other = (MNIST(limit=20, seed=seed).load().train for seed in (9, 10))
    assert isinstance(one, Dataset) and isinstance(other, Dataset)
    assert not np.array_equal(one.images, other.images)


def three_of_four(tiny: TinyMNIST) -> Path:
    tiny.write(*NAMES[:3])
    return tiny.root


def no_folder(tiny: TinyMNIST) -> Path:
    tiny.root.mkdir()
    (tiny.root / "mnist").touch()
    return tiny.root


def one_too_deep(tiny: TinyMNIST) -> Path:
    tiny.write()
    return tiny.folder


@pytest.mark.parametrize("unusable", [lambda tiny: tiny.root / "typo", three_of_four, no_folder, one_too_deep])
@pytest.mark.parametrize("by", ["folder", "CUPYNET_DATA"])
def test_an_explicit_folder_has_no_fallback(
    tiny: TinyMNIST, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, by: str, unusable: Any
) -> None:
    """Training on something else would look like success. An explicit fallback is a wish, too."""
    named = unusable(tiny)
    if by == "CUPYNET_DATA":
        monkeypatch.setenv(by, str(named))
    folder = named if by == "folder" else None
    for fallback in ("auto", None):
        with data_error(named / "mnist", "CUPYNET_DATA"):
            MNIST(folder, fallback).load()
    assert not caplog.records
    assert MNIST(folder, "synthetic", limit=1).load().fallback
    assert str(named) in warning(caplog)


def test_an_unknown_home_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with data_error("~no-such-user/x"):
        MNIST("~no-such-user/x").load()
    monkeypatch.setenv("CUPYNET_DATA", "~no-such-user")
    with data_error("~no-such-user"):
        MNIST().load()


@pytest.mark.parametrize("others", [NAMES, NAMES[:2]])
def test_a_damaged_file_never_falls_back(tiny: TinyMNIST, others: list[str], caplog: pytest.LogCaptureFixture) -> None:
    tiny.write(*others)
    damaged = tiny.folder / NAMES[1]
    damaged.write_bytes(b"<html>")
    with data_error(damaged):
        MNIST(tiny.root).load()
    assert damaged.read_bytes() == b"<html>" and not caplog.records


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_offline_never_tries(tiny: TinyMNIST, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(MNIST, "mirrors", (mirror.url,))
    monkeypatch.setenv("CUPYNET_OFFLINE", value)
    mirror.offer(tiny.packed)
    assert MNIST(tiny.root, "synthetic", limit=1).load().fallback and mirror.requests == []


@pytest.mark.parametrize("value", ["", "0", " No "])
def test_offline_can_be_switched_off(
    tiny: TinyMNIST, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr(MNIST, "mirrors", (mirror.url,))
    monkeypatch.setenv("CUPYNET_OFFLINE", value)
    mirror.offer(tiny.packed)
    assert not MNIST(tiny.root).load().fallback


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fallback", "cifar"),
        ("fallback", True),
        ("folder", "a\0b"),
        ("folder", 3),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
        ("timeout_s", "30"),
    ],
)
def test_arguments_are_refused_by_name(name: str, value: Any) -> None:
    with refused(name):
        MNIST(**{name: value})


@pytest.mark.skipif(not Path(REAL, "mnist", NAMES[0]).is_file() or not REAL, reason="CUPYNET_DATA has no mnist")
def test_the_real_files() -> None:
    data = MNIST(REAL, fallback=None).load()
    assert (data.train.images.shape, data.test.images.shape) == ((60_000, 28, 28, 1), (10_000, 28, 28, 1))
    assert data.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert np.bincount(data.train.labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert round(float(data.train.images.mean() / 255), 4) == 0.1307  # the number that every tutorial normalises by
    assert data.train.images.flags.c_contiguous
