"""Run commands in forked processes, to avoid the imports that take most of a command's time.

A server process has imported everything and loaded the compiled kernels. It forks for each command, and the fork does
the same as `python -m`. It is not a new interpreter: tests of settings that an interpreter reads when it starts
(variables such as PYTHON..., the kernel cache folder, the number of BLAS threads) must start a new one.

    python -m tests.support.warm      # reads one JSON line per command and answers with its exit code
"""

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
READ_AT_THE_START = ("PYTHON", "NUMBA", "OPENBLAS", "OMP", "MKL", "LD_", "LC_", "LANG", "HOME", "XDG", "TMP")
IMPORTED = (
    *("hydra.main", "cupynet.commands.train_job", "cupynet.commands.evaluate", "cupynet.training.callbacks.progress"),
    *("jinja2", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "cupynet.commands.tune.search"),
)
TIMED_OUT = "timed out"


class Done(NamedTuple):
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
    """Run `python -m MODULE ARGUMENTS` in a folder. `more`: the variables in `env` that this process does not have.

    `stdout`, a terminal or a named pipe, receives the output instead of the result.
    """
    if not hasattr(os, "fork") or any(name.startswith(READ_AT_THE_START) for name in more):
        line = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
        return Done(done.returncode, done.stdout, done.stderr)
    with tempfile.TemporaryDirectory() as folder:
        printed, errors = Path(folder, "stdout"), Path(folder, "stderr")
        printed.touch()
        request = {"module": module, "arguments": [*arguments], "cwd": str(cwd), "env": dict(env), "timeout": timeout}
        answer = _ask({**request, "files": [os.devnull, stdout or str(printed), str(errors)]}, env)
        texts = [file.read_bytes().decode(errors="replace") for file in (printed, errors)]
    if answer == TIMED_OUT:
        raise subprocess.TimeoutExpired([module, *arguments], timeout, *texts)
    return Done(int(answer or "1"), *texts)


def _ask(request: dict[str, Any], env: Mapping[str, str]) -> str:
    """Send a request to the server, which the first request starts, and return the answer."""
    global _server
    if _server is None or _server.poll() is not None:
        line, variables = [sys.executable, "-m", "tests.support.warm"], {**env, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        _server = subprocess.Popen(line, cwd=ROOT, env=variables, stdin=pipe, stdout=pipe, text=True)
        atexit.register(_server.communicate)
    assert _server.stdin is not None and _server.stdout is not None
    _server.stdin.write(json.dumps(request) + "\n")
    _server.stdin.flush()
    return _server.stdout.readline().strip()


def main() -> None:
    """Fork for each line of stdin, and print the exit code."""
    import_all()
    gc.collect()
    gc.freeze()
    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        request = json.loads(line)
        process = fork.Process(target=_become, args=(request,))
        process.start()
        process.join(request["timeout"])
        timed_out = process.is_alive()
        process.kill()
        process.join()
        print(TIMED_OUT if timed_out else process.exitcode, flush=True)


def import_all() -> None:
    """Import the packages of all commands, and fill caches: LeNet's kernels, Hydra's and OmegaConf's parsers."""
    from hydra.core.plugins import Plugins

    from cupynet import Image, Model, config, create_backend
    from cupynet.config.experiment import Experiment
    from cupynet.training.replica import Replica, warm_up

    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # some packages may be missing
            importlib.import_module(name)
    Plugins.instance()
    experiment = Experiment(config.compose(["data=synthetic", "workers=1", "hydra.run.dir=run"]))
    model = Model(experiment.network, Image(28, 28, 1), create_backend("auto"), 1)
    with FileLock(Path(tempfile.gettempdir(), f"cupynet-warm-{os.getuid()}.lock")):  # one compiles, the others wait
        warm_up(Replica(model, experiment.optimizer), 4)


def _become(request: dict[str, Any]) -> None:
    """Run the command in this process. Errors, including SystemExit, are handled by the caller, `multiprocessing`."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for descriptor, file in enumerate(request["files"]):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT if descriptor else os.O_RDONLY, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.argv = [request["module"], *request["arguments"]]
    sys.path[0] = request["cwd"]
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()


if __name__ == "__main__":
    main()
