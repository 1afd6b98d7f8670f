"""MNIST: found, downloaded, replaced by synthetic digits with a warning, or refused."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest

from cupynet.core.errors import ConfigError, DataError
from cupynet.data import MNIST, Data

NAMES = [file.name for file in MNIST.files]
REAL = os.environ.get("CUPYNET_DATA", "")  # before the fixture hides it


def assert_is(data: Data, tiny: Any) -> None:
    train_images, train_labels, test_images, test_labels = tiny.arrays
    assert (data.name, data.fallback, data.validation) == ("mnist", False, None)
    np.testing.assert_array_equal(data.train.images[..., 0], train_images)
    np.testing.assert_array_equal(data.train.labels, train_labels)
    np.testing.assert_array_equal(data.test.images[..., 0], test_images)
    np.testing.assert_array_equal(data.test.labels, test_labels)


def test_existing_files_are_read(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    tiny.write()
    assert_is(MNIST(tiny.root).load(), tiny)
    assert not caplog.records


def test_the_folder_of_the_data(tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert MNIST().place == platformdirs.user_cache_path("cupynet") / "mnist"
    monkeypatch.setenv("CUPYNET_DATA", "")
    assert MNIST().place == platformdirs.user_cache_path("cupynet") / "mnist"
    monkeypatch.setenv("CUPYNET_DATA", str(tiny.root))
    assert MNIST().place == tiny.root / "mnist"
    assert MNIST(tmp_path / "given").place == tmp_path / "given" / "mnist"
    assert MNIST("~/x").place == Path.home() / "x" / "mnist"
    tiny.write()
    assert_is(MNIST().load(), tiny)


def test_validation_and_limit(tiny: Any) -> None:
    tiny.write()
    data = MNIST(tiny.root, validation=10, limit=5).load()
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (5, 10, 5)
    with pytest.raises(ConfigError, match="validation=30: must be below the 30 training images"):
        MNIST(tiny.root, validation=30).load()


def test_download(tiny: Any, mirror: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MNIST, "mirrors", (mirror.url,))
    mirror.offer(tiny.packed)
    assert_is(MNIST(tiny.root, fallback=None).load(), tiny)
    assert sorted(mirror.requests) == sorted("/" + name for name in NAMES)
    assert_is(MNIST(tiny.root, fallback=None).load(), tiny)
    assert len(mirror.requests) == 4


def test_only_missing_files_are_downloaded(tiny: Any, mirror: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MNIST, "mirrors", (mirror.url,))
    mirror.offer(tiny.packed)
    tiny.write(*NAMES[:3])
    assert_is(MNIST(tiny.root).load(), tiny)
    assert mirror.requests == ["/" + NAMES[3]]


def test_a_mirror_that_serves_another_data_set_is_rejected(
    tiny: Any, mirror: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MNIST, "mirrors", (mirror.url,))
    mirror.offer(tiny.packed | {NAMES[1]: tiny.packed[NAMES[3]]})
    with pytest.raises(DataError, match="part: expected contents of sha256"):
        MNIST(tiny.root, fallback=None).load()
    assert not (tiny.folder / NAMES[1]).exists()
    shutil.rmtree(tiny.folder)
    for name in NAMES:  # right shape, right gzip data, one bit
        other = bytearray(tiny.raw[name])
        other[-1] ^= 1
        mirror.offer(tiny.packed | {name: gzip.compress(bytes(other))})
        with pytest.raises(DataError, match="part: expected contents of sha256"):
            MNIST(tiny.root, fallback=None).load()
        assert not (tiny.folder / name).exists()
        tiny.write(name)


def warning(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "cupynet.data.sources.downloaded")
    assert "\n" not in record.getMessage()
    return record.getMessage()


@pytest.fixture
def home(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder, the user's cache, replaced by that of the tiny MNIST."""
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: tiny.root)
    folder: Path = tiny.folder
    return folder


def test_without_files_and_network_the_data_are_synthetic(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = MNIST(limit=20, seed=9).load()
    assert (data.name, data.fallback, len(data.train), len(data.test)) == ("synthetic", True, 20, 20)
    assert not np.array_equal(data.train.images, MNIST(limit=20, seed=10).load().train.images)
    caplog.records.pop()
    assert warning(caplog) == (
        f"MNIST IS NOT THERE: {home} lacks {NAMES[0]}, and downloading failed (CUPYNET_OFFLINE forbids downloads); "
        "USING SYNTHETIC DIGITS INSTEAD, whose results say nothing about MNIST. To end this, put its files there, or "
        "set CUPYNET_DATA to the folder that holds mnist/."
    )
    assert not home.exists()


def test_the_warning_has_the_reason(home: Path, tiny: Any, mirror: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(MNIST, "mirrors", (mirror.url,))
    tiny.write(*NAMES[1:])
    assert MNIST(limit=1).load().fallback
    assert (
        f"{home} lacks {NAMES[0]}, and downloading failed ({mirror.url}{NAMES[0]}: HTTP Error 404: Not Found);"
        in warning(caplog)
    )


def test_without_a_fallback(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError) as caught:
        MNIST(fallback=None).load()
    assert str(caught.value) == (
        f"MNIST IS NOT THERE: {home} lacks {NAMES[0]}, and downloading failed (CUPYNET_OFFLINE forbids downloads); put "
        "its files there, or set CUPYNET_DATA to the folder that holds mnist/"
    )
    assert not caplog.records


def typo(tiny: Any) -> tuple[Path, str]:
    return tiny.root / "typo", f"{tiny.root / 'typo' / 'mnist'} lacks {NAMES[0]}, and downloading failed"


def three_of_four(tiny: Any) -> tuple[Path, str]:
    tiny.write(*NAMES[:3])
    return tiny.root, f"{tiny.folder} lacks {NAMES[3]}, and downloading failed"


def no_folder(tiny: Any) -> tuple[Path, str]:
    tiny.root.mkdir()
    (tiny.root / "mnist").touch()
    return tiny.root, f"{tiny.folder} lacks {NAMES[0]}, and downloading failed"


def one_too_deep(tiny: Any) -> tuple[Path, str]:
    tiny.write()
    return tiny.folder, "set CUPYNET_DATA to the folder that holds mnist/"


@pytest.mark.parametrize("unusable", [typo, three_of_four, no_folder, one_too_deep])
@pytest.mark.parametrize("by", ["folder", "CUPYNET_DATA"])
def test_an_explicit_folder_has_no_fallback(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, by: str, unusable: Any
) -> None:
    """Training on something else would look like success. An explicit fallback is a wish, too."""
    named, reason = unusable(tiny)
    if by == "CUPYNET_DATA":
        monkeypatch.setenv(by, str(named))
    folder = named if by == "folder" else None
    for fallback in ("auto", None):
        with pytest.raises(DataError) as caught:
            MNIST(folder, fallback).load()
        assert str(caught.value).startswith("MNIST ") and str(named) in str(caught.value)
        assert reason in str(caught.value) and "\n" not in str(caught.value)
    assert not caplog.records
    assert MNIST(folder, "synthetic", limit=1).load().fallback
    assert reason in warning(caplog)


def test_an_unknown_home_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="~no-such-user/x: Could not determine home directory.: name another folder"):
        MNIST("~no-such-user/x").load()
    monkeypatch.setenv("CUPYNET_DATA", "~no-such-user")
    with pytest.raises(DataError, match="~no-such-user: Could not determine home directory.: name another folder"):
        MNIST().load()


@pytest.mark.parametrize("others", [NAMES, NAMES[:2]])
def test_a_damaged_file_never_falls_back(tiny: Any, others: list[str], caplog: pytest.LogCaptureFixture) -> None:
    tiny.write(*others)
    damaged = tiny.folder / NAMES[1]
    damaged.write_bytes(b"<html>")
    with pytest.raises(DataError, match=f"{NAMES[1]}: expected contents of sha256 .*, found other contents, b'<html>'"):
        MNIST(tiny.root).load()
    assert damaged.read_bytes() == b"<html>" and not caplog.records


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_offline_never_tries(tiny: Any, mirror: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(MNIST, "mirrors", (mirror.url,))
    monkeypatch.setenv("CUPYNET_OFFLINE", value)
    mirror.offer(tiny.packed)
    assert MNIST(tiny.root, "synthetic", limit=1).load().fallback and mirror.requests == []


@pytest.mark.parametrize("value", ["", "0", "false", " No "])
def test_offline_can_be_switched_off(tiny: Any, mirror: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(MNIST, "mirrors", (mirror.url,))
    monkeypatch.setenv("CUPYNET_OFFLINE", value)
    mirror.offer(tiny.packed)
    assert not MNIST(tiny.root).load().fallback


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"fallback": "cifar"}, "fallback='cifar': must be 'auto', 'synthetic', or null for an error instead"),
        ({"fallback": True}, "fallback=True: must be"),
        ({"folder": "a\0b"}, r"folder='a.x00b': must be a path"),
        ({"folder": 3}, "folder=3: must be a path, or null"),
        ({"timeout_s": 0}, "timeout_s=0: must be a number of seconds above 0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan: must be"),
        ({"timeout_s": "30"}, "timeout_s='30': must be"),
    ],
)
def test_arguments_are_refused_by_name(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MNIST(**setting)


def test_any_number_of_seconds() -> None:
    for seconds in (np.float32(2.5), np.int64(3), float("inf")):
        assert MNIST(timeout_s=seconds).timeout_s == seconds


@pytest.mark.skipif(not Path(REAL, "mnist", NAMES[0]).is_file() or not REAL, reason="CUPYNET_DATA has no mnist")
def test_the_real_files() -> None:
    data = MNIST(REAL, fallback=None).load()
    assert (data.train.images.shape, data.test.images.shape) == ((60_000, 28, 28, 1), (10_000, 28, 28, 1))
    assert data.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert np.bincount(data.train.labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert round(float(data.train.images.mean() / 255), 4) == 0.1307  # the number that every tutorial normalises by
    assert data.train.images.flags.c_contiguous


def test_importing_data_is_cheap() -> None:
    code = "import cupynet.data, sys; print(*{'numba', 'hydra', 'omegaconf', 'rich', 'cupy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
