"""Check that this machine can train: `cupynet doctor [key=value ...]`. Nothing is downloaded or left behind.

Each check prints lines marked `ok`, `note` (training works without it) or `problem` (training fails),
with a remedy if one is known. The exit code is 0 if training would work, otherwise the exit code of training.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from cupynet.commands.arguments import Arguments
from cupynet.core.errors import ConfigError, OutputError, described, exit_code
from cupynet.core.exits import run_and_exit
from cupynet.core.mpiexec import find_mpiexec, started
from cupynet.core.terminal import printable
from cupynet.core.wording import amount, one_line

MPI_TIMEOUT_S = 60.0


class Finding(NamedTuple):
    """A line of the report. `state` is ok, note or problem; `code` is the exit code of a failing training run, or 0."""

    part: str
    state: str
    text: str
    code: int = 0


def main() -> None:
    parser = Arguments("cupynet doctor", "Check that this machine can train.", "")
    of_run = "settings of the run to check, such as backend=cupy"
    parser.add_argument("settings", nargs="*", metavar="key=value", help=of_run)
    run_and_exit(lambda: diagnose(parser.parse_args().settings))


def diagnose(settings: Sequence[str]) -> int:
    """Run the checks and print their findings. Return the exit code of training with these settings."""
    if started() is not None:
        raise ConfigError("doctor runs in a single process. Start it without mpiexec")
    code = 0
    for name in CHECKS:
        for found in examine(name, settings):
            print(printable(f"{found.state:<9}{found.part:<10}{found.text}"), flush=True)
            code = code or found.code
    print(f"training would fail with exit code {code}: see the first problem" if code else "training works here")
    return code


def examine(name: str, settings: Sequence[str]) -> list[Finding]:
    """Run a check and return its findings. An exception becomes a problem in the training check, otherwise a note."""
    found: list[Finding] = []
    try:
        with redirect_stdout(sys.stderr):  # libraries may print
            found += CHECKS[name](settings)
    except Exception as error:
        state, code = ("problem", exit_code(error)) if name == "training" else ("note", 0)
        found.append(Finding(name, state, described(error), code))
    return found


def check_packages(settings: Sequence[str]) -> Iterator[Finding]:
    from cupynet.backend import environment

    found = environment()
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    yield Finding("python", "ok", f"{found['python']} in {sys.prefix}, {found['system']}")
    yield Finding("packages", "ok", versions)


def check_cpu(settings: Sequence[str]) -> Iterator[Finding]:
    from cupynet.backend import available_cores, blas, cpu_model, memory

    yield Finding("cpu", "ok", f"{available_cores()} of {os.cpu_count()} cores of {cpu_model()}")
    found = memory()
    if found is not None:
        yield Finding("memory", "ok", f"{found[1]} {amount(found[0])}")
    yield Finding("blas", "ok", f"{blas.description()}, threads: {blas.threads_now()}")


def check_gpu(settings: Sequence[str]) -> Iterator[Finding]:
    from cupynet.backend.cuda import gpus

    fault = gpus.probe()
    if fault is not None:
        remedy = ": pip install 'cupynet[cuda12x]' or 'cupynet[cuda13x]', for the CUDA version that nvidia-smi shows"
        yield Finding(
            "gpu", "note", fault + (remedy if shutil.which("nvidia-smi") else ", and nvidia-smi was not found")
        )
        return
    found = gpus.inventory()
    nccl = found["nccl"] or "not available: replicas are averaged on the first GPU or on the host"
    yield Finding("cupy", "ok", f"{found['cupy']}, CUDA {found['runtime']}, driver for CUDA {found['driver']}")
    yield Finding("nccl", "ok" if found["nccl"] else "note", nccl)
    for number, device in enumerate(found["devices"]):
        text = f"{device['name']}, compute capability {device['capability']}, {amount(device['free'])} free"
        yield Finding(f"gpu {number}", "ok", f"{text} of {amount(device['memory'])}")


def check_mpi(settings: Sequence[str]) -> Iterator[Finding]:
    """Check that mpiexec starts two processes that can communicate."""
    remedy = "pip install 'cupynet[mpi]'"
    if find_spec("mpi4py") is None:
        yield Finding("mpi", "note", f"mpi4py is not installed, so workers can only be threads. For MPI, {remedy}")
        return
    command = [find_mpiexec(), "-n", "2", sys.executable, "-m", "mpi4py.bench", "helloworld"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=MPI_TIMEOUT_S
    )
    if done.returncode == 0 and "0 of 2" in done.stdout and "1 of 2" in done.stdout:
        yield Finding("mpi", "ok", f"two ranks started by {command[0]}")
    else:
        output = (done.stderr or done.stdout).strip()
        lines = [line for line in output.splitlines() if line.strip("- ")] or ["no output"]
        reason = one_line(lines[0 if output.startswith("--") else -1])  # Open MPI encloses messages in dashes
        yield Finding("mpi", "note", f"{command[0]} -n 2 does not start two ranks ({reason}). Try {remedy}")


def check_disk(settings: Sequence[str]) -> Iterator[Finding]:
    place = Path("outputs" if os.path.exists("outputs") else ".").resolve()
    try:
        with tempfile.NamedTemporaryFile(prefix=".cupynet-doctor-", dir=place, buffering=0) as file:
            file.write(b"x")  # a full disk has room for an empty file
            free = shutil.disk_usage(place).free
    except OSError as error:
        text = f"{place}: cannot be written ({error.strerror}). Start in another folder, or set hydra.run.dir"
        yield Finding("disk", "problem", text, OutputError.exit_code)
    else:
        yield Finding("disk", "ok", f"{place}: {amount(free)} free")


def check_training(settings: Sequence[str]) -> Iterator[Finding]:
    """Load the data unless it must be downloaded, and train a dummy batch on every worker."""
    from cupynet import config
    from cupynet.commands.train import prepare
    from cupynet.data.sources.downloaded import Downloaded, offline

    run = prepare(config.compose([*settings]))
    source = run.source
    if isinstance(source, Downloaded) and source.missing and not offline():
        yield Finding("data", "note", f"{source.name} would be downloaded to {source.place}")
    else:
        data = run.load()
        text = f"{source.name} is missing, so {data.name} is used" if data.fallback else data.name
        yield Finding("data", "note" if data.fallback else "ok", text)
    with run.wrapper(callbacks=()) as wrapper:
        seconds = wrapper.warm_up(run.settings.batch_size)
    devices = ", ".join(dict.fromkeys(run.placement.names()))
    text = f"backend {run.backend_name}, workers={run.placement.workers} on {devices}: one batch in {seconds:.1f} s"
    yield Finding("training", "ok", text)


CHECKS: dict[str, Callable[[Sequence[str]], Iterator[Finding]]] = {
    "packages": check_packages,
    "cpu": check_cpu,
    "gpu": check_gpu,
    "mpi": check_mpi,
    "disk": check_disk,
    "training": check_training,
}
