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
from tests.support.sources import SOURCES

MIRRORS, FILES = MNIST.mirrors, MNIST.files  # before the fixtures put others in their place
NETWORK = {"urllib", "http", "socket", "ssl", "ftplib", "socketserver", "asyncio", "xmlrpc", "smtplib"}


def test_one_module_uses_the_network_and_only_the_parser_of_mnist_is_used() -> None:
    """The downloader of the mnist package has no time-out and no digest."""
    network, used = set(), set()
    for source in SOURCES:
        for node in source.nodes:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if NETWORK & {name.split(".")[0] for name in names if name != "urllib.parse"}:
                network.add(source.path)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mnist":
                used.add(node.attr)
            assert not (isinstance(node, ast.ImportFrom) and node.module == "mnist")
    assert network == {"data/download.py"} and used == {"parse_idx"}


def test_every_file_has_a_digest_and_mirrors_use_https() -> None:
    assert MIRRORS and all(mirror.startswith("https://") and mirror.endswith("/") for mirror in MIRRORS)
    assert len(FILES) == 4 and all(len(bytes.fromhex(file.digest)) == 32 for file in FILES)


def test_only_listed_files_of_listed_mirrors_are_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def refuses(_: Any, request: urllib.request.Request, *__: Any, **___: Any) -> None:
        opened.append(request.full_url)
        raise urllib.error.HTTPError(request.full_url, 503, "Service Unavailable", None, None)  # type: ignore[arg-type]

    monkeypatch.setattr(MNIST, "mirrors", MIRRORS)
    monkeypatch.delenv("CUPYNET_OFFLINE")
    monkeypatch.setattr(urllib.request.OpenerDirector, "open", refuses)
    with data_error(503):
        MNIST(tmp_path, fallback=None).load()
    assert sorted(opened) == sorted(mirror + FILES[0].name for mirror in MIRRORS)
