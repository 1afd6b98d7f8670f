"""A tiny MNIST, and a local HTTP mirror of it that can misbehave."""

import gzip
import hashlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from cupynet.data import MNIST
from cupynet.data.files import KnownFile
from tests.support.user_files import idx_bytes

NAMES = [file.name for file in MNIST.files]
SHAPES = [(30, 28, 28), (30,), (12, 28, 28), (12,)]
MOST = 90_000  # the largest file in bytes
Reply = Callable[[BaseHTTPRequestHandler], None]


class TinyMNIST:
    """Four files like MNIST's, but with few images: their contents, raw and compressed, and their folder."""

    def __init__(self, root: Path) -> None:
        rng = np.random.default_rng(5)
        self.root, self.folder = root, root / "mnist"
        self.arrays = [rng.integers(0, 10 if len(shape) == 1 else 256, shape, np.uint8) for shape in SHAPES]
        self.raw = {name: idx_bytes(array) for name, array in zip(NAMES, self.arrays, strict=True)}
        self.packed = {name: gzip.compress(raw, 1) for name, raw in self.raw.items()}
        self.files = tuple(KnownFile(name, hashlib.sha256(raw).hexdigest(), MOST) for name, raw in self.raw.items())

    def write(self, *names: str) -> None:
        """Write the named files into the folder; all of them by default."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in names or NAMES:
            (self.folder / name).write_bytes(self.packed[name])

    def replace(self, name: str, contents: bytes) -> Path:
        """Write all files, one of them with different contents."""
        self.write()
        (self.folder / name).write_bytes(contents)
        return self.folder / name


class Mirror:
    """An HTTP server on 127.0.0.1. `replies` maps a path to its reply; `requests` lists the paths requested."""

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}
        self.requests: list[str] = []
        self.released = threading.Event()  # lets hanging replies end
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.requests.append(self.path)
                mirror.replies.get(self.path, mirror.status(404))(self)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:  # a client has disconnected
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def offer(self, contents: dict[str, bytes]) -> None:
        self.replies |= {f"/{name}": self.body(data) for name, data in contents.items()}

    def body(self, data: bytes, promised: int | None = None) -> Reply:
        def reply(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(data) if promised is None else promised))
            handler.end_headers()
            handler.wfile.write(data)

        return reply

    def status(self, code: int) -> Reply:
        return lambda handler: handler.send_error(code)

    def hang(self, first: bytes = b"") -> Reply:
        """Send `first` of 1000 promised bytes, or nothing at all, then stay silent."""

        def reply(handler: BaseHTTPRequestHandler) -> None:
            if first:
                self.body(first, promised=1000)(handler)
            self.released.wait(20)

        return reply
