"""MNIST and similar sets: found, downloaded, replaced by synthetic digits with a warning, or rejected."""

import gzip
import hashlib
import logging
import sys
import urllib.error
import urllib.request
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest

from cupynet.commands.download import download, main
from cupynet.core.errors import OutputError
from cupynet.data import CIFAR10, KMNIST, MNIST, Data, FashionMNIST
from cupynet.data.files import KnownFile
from tests.support.mirrors import NAMES, Mirror, TinyMNIST
from tests.support.refusals import data_error

MIRRORS, FILES = MNIST.mirrors, MNIST.files  # before fixtures replace them


@pytest.fixture
def offered(tiny: TinyMNIST, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> Mirror:
    """Return a mirror of the tiny MNIST, the only one in the list."""
    monkeypatch.setattr(MNIST, "mirrors", (mirror.url,))
    mirror.offer(tiny.packed)
    return mirror


def check_is(data: Data, tiny: TinyMNIST) -> None:
    train_images, train_labels, test_images, test_labels = tiny.arrays
    assert (data.name, data.fallback, data.validation) == ("mnist", False, None)
    train: Any = data.train
    np.testing.assert_array_equal(train.images[..., 0], train_images)
    np.testing.assert_array_equal(train.labels, train_labels)
    np.testing.assert_array_equal(data.test.images[..., 0], test_images)
    np.testing.assert_array_equal(data.test.labels, test_labels)


def test_the_data_folder_is_the_argument_or_cupynet_data_or_the_cache(
    tiny: TinyMNIST, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert MNIST().place == platformdirs.user_cache_path("cupynet") / "mnist"
    monkeypatch.setenv("CUPYNET_DATA", str(tiny.root))
    assert MNIST().place == tiny.root / "mnist"
    assert MNIST(tmp_path / "given").place == tmp_path / "given" / "mnist"
    assert MNIST("~/x").place == Path.home() / "x" / "mnist"
    tiny.write()
    check_is(MNIST().load(), tiny)


def test_missing_mnist_files_are_downloaded_once(tiny: TinyMNIST, offered: Mirror) -> None:
    tiny.write(NAMES[0])
    for _ in range(2):
        check_is(MNIST(tiny.root, fallback=None).load(), tiny)
    assert sorted(offered.requests) == sorted("/" + name for name in NAMES[1:])


def downloaded(to: Path) -> None:
    """Run `cupynet download mnist --to`."""
    download(Namespace(name="mnist", to=str(to)))


def test_download_fetches_files_once_and_verifies_them(tiny: TinyMNIST, offered: Mirror, tmp_path: Path) -> None:
    downloaded(tmp_path)
    offered.replies.clear()
    check_is(MNIST(tmp_path, fallback=None).load(), tiny)
    downloaded(tmp_path)
    (tmp_path / "mnist" / NAMES[1]).write_bytes(b"<html>")
    with data_error(tmp_path / "mnist" / NAMES[1]):
        downloaded(tmp_path)


def test_the_download_command_prints_the_command_that_trains_with_the_files(
    offered: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cupynet download", "mnist", "--to", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code and (tmp_path / "mnist" / NAMES[0]).is_file()
    assert capsys.readouterr().out.splitlines()[-1] == f"cupynet train data=mnist data.folder={tmp_path}"


def test_download_to_an_unwritable_folder_has_exit_code_74(offered: Mirror, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError) as caught:
        downloaded(tmp_path / "file")
    assert caught.value.exit_code == 74


def test_download_without_network_has_exit_code_65_and_creates_no_folder(tiny: TinyMNIST, tmp_path: Path) -> None:
    with data_error(tmp_path / "other"):
        downloaded(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_only_listed_mnist_files_are_requested_over_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def refuses(_: Any, request: urllib.request.Request, *__: Any, **___: Any) -> None:
        opened.append(request.full_url)
        raise urllib.error.URLError("unavailable")

    monkeypatch.setattr(MNIST, "mirrors", MIRRORS)
    monkeypatch.delenv("CUPYNET_OFFLINE")
    monkeypatch.setattr(urllib.request.OpenerDirector, "open", refuses)
    with data_error(MIRRORS[-1]):
        MNIST(tmp_path, fallback=None).load()
    assert sorted(opened) == sorted(mirror + FILES[0].name for mirror in MIRRORS) != []
    assert all(mirror.startswith("https://") and mirror.endswith("/") for mirror in MIRRORS)
    assert len(FILES) == 4 and all(len(bytes.fromhex(file.digest)) == 32 for file in FILES)


@pytest.mark.parametrize("dotted", [True, False])
def test_unpacked_mnist_files_are_read(tiny: TinyMNIST, offered: Mirror, dotted: bool) -> None:
    tiny.folder.mkdir(parents=True)
    for name, raw in tiny.raw.items():
        plain = name.removesuffix(".gz")
        (tiny.folder / (plain.replace("-idx", ".idx") if dotted else plain)).write_bytes(raw)
    check_is(MNIST(tiny.root, fallback=None).load(), tiny)
    assert offered.requests == []


def test_without_files_and_network_mnist_is_synthetic_with_a_warning(
    tiny: TinyMNIST, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: tiny.root)
    data, other = MNIST(limit=20, seed=9).load(), MNIST(limit=20, seed=10).load()
    assert (data.name, data.fallback, len(data.train), len(data.test)) == ("synthetic", True, 20, 20)
    assert not np.array_equal(data.test.images, other.test.images)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert str(tiny.folder) in caplog.records[0].getMessage() and not tiny.folder.exists()


@pytest.mark.parametrize("by", ["folder", "CUPYNET_DATA"])
def test_an_explicit_data_folder_without_mnist_is_refused_without_fallback(
    tiny: TinyMNIST, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    """Training on other data would look like success."""
    folder = tiny.root / "typo"
    if by == "CUPYNET_DATA":
        tiny.write(*NAMES[:3])
        folder = tiny.root
        monkeypatch.setenv(by, str(folder))
    for fallback in ("auto", None):
        with data_error(folder / "mnist", "CUPYNET_DATA"):
            MNIST(folder if by == "folder" else None, fallback).load()
    assert not caplog.records


@pytest.mark.parametrize("others", [NAMES, NAMES[:2]])
def test_a_damaged_mnist_file_is_refused_and_never_replaced_by_synthetic_images(
    tiny: TinyMNIST, others: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    tiny.write(*others)
    damaged = tiny.folder / NAMES[1]
    damaged.write_bytes(b"<html>")
    with data_error(damaged):
        MNIST(tiny.root).load()
    assert damaged.read_bytes() == b"<html>" and not caplog.records


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("true", True), ("", False), (" No ", False)])
def test_cupynet_offline_prevents_downloads(
    tiny: TinyMNIST, offered: Mirror, monkeypatch: pytest.MonkeyPatch, value: str, offline: bool
) -> None:
    monkeypatch.setenv("CUPYNET_OFFLINE", value)
    with data_error() if offline else nullcontext():
        MNIST(tiny.root, fallback=None).load()
    assert bool(offered.requests) is not offline


@pytest.mark.parametrize("kind", [FashionMNIST, KMNIST])
def test_fashion_and_kmnist_have_their_own_folders_and_digests(
    kind: Any, tiny: TinyMNIST, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tuple(KnownFile(name, hashlib.sha256(tiny.packed[name]).hexdigest(), 90_000) for name in NAMES)
    monkeypatch.setattr(kind, "files", files)
    tiny.folder = tiny.root / kind.name
    tiny.write()
    source = kind(tiny.root)
    data = source.load()
    assert (data.name, data.fallback, len(source.class_names)) == (kind.name, False, 10)
    assert (data.train.images[..., 0] == tiny.arrays[0]).all()
    path = tiny.replace(NAMES[1], gzip.compress(tiny.raw[NAMES[1]], 9))  # equal digits, but another file
    with data_error(path):
        kind(tiny.root).load()


@pytest.mark.parametrize("kind", [FashionMNIST, KMNIST, CIFAR10])
def test_sets_other_than_mnist_have_no_fallback(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: tmp_path)
    with data_error(tmp_path / kind.name, "CUPYNET_DATA"):
        kind().load()
