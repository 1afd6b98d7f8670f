"""The package uses the network in one module, for listed mirrors, and checks a digest of every file."""

from __future__ import annotations

import ast
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cupynet.data import MNIST
from tests.support.data_errors import data_error
from tests.support.sources import SOURCES, dotted, imported

MIRRORS, FILES = MNIST.mirrors, MNIST.files  # before the fixtures put others in their place
NETWORK = {"urllib", "http", "socket", "ssl", "ftplib", "socketserver", "asyncio", "xmlrpc", "smtplib"}


def uses_network(module: str) -> bool:
    return module.split(".")[0] in NETWORK and module != "urllib.parse"


def test_one_module_uses_the_network() -> None:
    using = {source.path for source in SOURCES if any(uses_network(module) for module, _ in imported(source))}
    assert using == {"data/download.py"}


def test_only_the_parser_of_the_mnist_package_is_used() -> None:
    """Its downloader has no time-out and no digest."""
    names = {dotted(node) for source in SOURCES for node in source.nodes if isinstance(node, ast.Attribute)}
    assert {name for name in names if name.startswith("mnist.")} == {"mnist.parse_idx"}


def test_every_file_has_a_digest_and_mirrors_use_https() -> None:
    assert MIRRORS and all(mirror.startswith("https://") and mirror.endswith("/") for mirror in MIRRORS)
    assert len(FILES) == 4 and all(len(bytes.fromhex(file.digest)) == 32 for file in FILES)


def test_only_listed_files_of_listed_mirrors_are_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def refuses(_: Any, request: urllib.request.Request, *__: Any, **___: Any) -> None:
        opened.append(request.full_url)
        raise urllib.error.URLError("unavailable")

    monkeypatch.setattr(MNIST, "mirrors", MIRRORS)
    monkeypatch.delenv("CUPYNET_OFFLINE")
    monkeypatch.setattr(urllib.request.OpenerDirector, "open", refuses)
    with data_error(MIRRORS[-1]):
        MNIST(tmp_path, fallback=None).load()
    assert sorted(opened) == sorted(mirror + FILES[0].name for mirror in MIRRORS)
