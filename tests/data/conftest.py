"""Fixtures for the data tests: no network, a tiny MNIST, a local mirror."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cupynet.data import MNIST
from tests.support.mirrors import Mirror, TinyMNIST


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests away from real mirrors and the user's cache, regardless of the environment."""
    monkeypatch.setattr(MNIST, "mirrors", ())
    monkeypatch.setenv("CUPYNET_OFFLINE", "1")
    monkeypatch.delenv("CUPYNET_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyMNIST:
    made = TinyMNIST(tmp_path / "cache")
    monkeypatch.setattr(MNIST, "files", made.files)
    return made


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.delenv("CUPYNET_OFFLINE")
    made = Mirror()
    yield made
    made.stop()
