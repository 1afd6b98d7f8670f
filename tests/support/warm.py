"""Run commands in forked processes, which need not import anything: most of a command's time is its imports.

A server process has imported everything and loaded the compiled kernels. It forks for each command, and the fork does
what `python -m` would do. It is not a new interpreter: a test of what an interpreter reads when it starts (variables
such as PYTHON..., the place of kernels, the number of BLAS threads) starts one.

    python -m tests.support.warm      # reads a line of JSON for each command, answers with its exit code
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
READ_AT_THE_START = ("PYTHON", "NUMBA", "OPENBLAS", "OMP", "MKL", "LD_", "LC_", "LANG", "HOME", "XDG", "TMP")

IMPORTED = (
    *("hydra.main", "cupynet.commands.train_job", "cupynet.commands.evaluate", "cupynet.training.callbacks.progress"),
    *("jinja2", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "cupynet.commands.tune.search"),
)


class Done(NamedTuple):
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


_server: subprocess.Popen[str] | None = None


def command(
    module: str,
    arguments: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    timeout: float,
    *,
    stdout: str | None = None,
    **more: str,
) -> Done:
    """Run `python -m MODULE ARGUMENTS` in a folder.

    Args:
        stdout: a terminal or a named pipe that receives the output instead of the result.
        more: the variables of `env` that this process does not have.
    """
    if not hasattr(os, "fork") or any(name.startswith(READ_AT_THE_START) for name in more):
        line = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
        return Done(done.returncode, done.stdout, done.stderr)
    global _server
    if _server is None or _server.poll() is not None:
        _server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm"],
            cwd=ROOT,
            env={**env, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(_end, _server)
    assert _server.stdin is not None and _server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        printed, files = Path(folder, "stdout"), [stdout or f"{folder}/stdout", f"{folder}/stderr"]
        printed.touch()
        request = {"module": module, "arguments": [*arguments], "cwd": str(cwd), "env": dict(env), "files": files}
        _server.stdin.write(json.dumps({**request, "timeout": timeout}) + "\n")
        _server.stdin.flush()
        answer = _server.stdout.readline()
        texts = [file.read_bytes().decode(errors="replace") for file in (printed, Path(files[1]))]
    code = int(answer or "1")
    if code == -signal.SIGALRM:
        raise subprocess.TimeoutExpired([module, *arguments], timeout, *texts)
    return Done(code, *texts)


def _end(server: subprocess.Popen[str]) -> None:
    with server:
        assert server.stdin is not None
        server.stdin.close()


def main() -> None:
    """Fork for each line of stdin, and print the exit code."""
    import_all()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        number = os.fork()
        if not number:
            _become(request)
        print(_ended(number, request["timeout"]), flush=True)


def import_all() -> None:
    """Import the packages of all commands, and fill the caches that a first run fills.

    These are the kernels of LeNet, and the parsers of Hydra and OmegaConf.
    """
    from hydra.core.plugins import Plugins

    from cupynet import Image, Model, config, create_backend
    from cupynet.config.experiment import Experiment
    from cupynet.training import Replica
    from cupynet.training.warm_up import warm_up

    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # not all are installed everywhere
            importlib.import_module(name)
    Plugins.instance()
    experiment = Experiment(config.compose(["data=synthetic", "workers=1", "hydra.run.dir=run"]))
    model = Model(experiment.network, Image(28, 28, 1), create_backend("auto"), 1)
    warm_up(Replica(model, experiment.optimizer), 4)


def _become(request: dict[str, Any]) -> None:
    """Run the command in this process, and exit."""
    code: object = 1
    try:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            signal.signal(getattr(signal, name), signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        for descriptor, file in enumerate([os.devnull, *request["files"]]):
            opened = os.open(file, os.O_WRONLY | os.O_CREAT if descriptor else os.O_RDONLY, 0o600)
            os.dup2(opened, descriptor)
            os.close(opened)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
        sys.argv = [request["module"], *request["arguments"]]
        sys.path[0] = request["cwd"]
        try:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as left:
            code = left.code
            if code is not None and not isinstance(code, int):
                print(code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code if isinstance(code, int) else int(code is not None))


def _ended(number: int, timeout: float) -> int:
    """Wait for a process. Return its exit code, as subprocess does; that of SIGALRM after the timeout."""
    until = time.monotonic() + timeout
    pause = 0.001
    while True:
        found, status = os.waitpid(number, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(number, signal.SIGALRM)
            os.waitpid(number, 0)
            return -signal.SIGALRM
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


if __name__ == "__main__":
    main()
