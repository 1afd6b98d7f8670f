"""Check what this machine has and lacks for training: `cupynet doctor [key=value ...]`.

Prints a line for each thing that training needs: `ok`, `note` (training works without it, or not as expected) or
`problem` (training fails), with the remedy. key=value: settings of `cupynet train`; that run is then checked. The exit
code is 0 if training would work here, otherwise the one with which it would end.

Nothing is downloaded, and no file is left behind.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet.core.checks import amount, one_line, one_of
from cupynet.core.errors import ConfigError, CupynetError, DataError, OutputError, exit_code
from cupynet.core.exits import Arguments, leave_after, out_of_memory
from cupynet.core.mpiexec import find_mpiexec, started
from cupynet.core.terminal import printable

if TYPE_CHECKING:
    from cupynet.config.experiment import Experiment

LIMIT_S = 60.0  # timeout of another program
ROOM = 1 << 30  # bytes, of disk or memory, enough for a run: a checkpoint of LeNet has 5 MB
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES")
MODULES = {"hydra-core": "hydra", "pyyaml": "yaml"}  # package -> its module, if the names differ


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        part: of the machine.
        state: `ok`, `note` or `problem`.
        text: the finding itself.
        remedy: what to do about it; "" if there is nothing to do.
        code: exit code of training; 0 unless it is a problem.
    """

    part: str
    state: str
    text: str
    remedy: str = ""
    code: int = 0

    def __str__(self) -> str:
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


Check = Callable[[list[str]], Iterator[Finding]]  # the settings of the run -> findings


def main() -> None:
    """Run the command."""
    parser = Arguments(
        "cupynet doctor",
        "Check what this machine has and lacks for training.",
        f"json=true prints JSON; one check alone: check={'|'.join(CHECKS)}",
    )
    of_run = "settings of cupynet train for the run to check, such as backend=cupy"
    parser.add_argument("settings", nargs="*", metavar="key=value", help=of_run)
    leave_after(lambda: diagnose(parser.parse_args().settings))


def diagnose(arguments: Sequence[str]) -> int:
    """Run the checks and print their findings, line by line or as JSON. Return the exit code."""
    if started() is not None:
        raise ConfigError("doctor checks one machine, in one process: start it without mpiexec")
    own = dict(each.split("=", 1) for each in arguments if each.startswith(("json=", "check=")))
    settings = [each for each in arguments if not each.startswith(("json=", "check="))]
    as_json = one_of("json", own.get("json", "false"), ("true", "false")) == "true"
    found: list[Finding] = []
    for name in [one_of("check", own["check"], CHECKS)] if "check" in own else CHECKS:
        for finding in examine(name, settings):
            found.append(finding)
            if not as_json:
                print(printable(f"{finding.state:<9}{finding.part:<10}{finding}"), flush=True)
    code = next((finding.code for finding in found if finding.code), 0)
    if as_json:
        print(json.dumps({"exit_code": code, "findings": [asdict(finding) for finding in found]}, indent=2))
    elif "check" not in own:
        print(f"training would end with exit code {code}: see the first problem" if code else "training works here")
    return code


def examine(name: str, settings: list[str]) -> list[Finding]:
    """Return the findings of a check. An error becomes a finding: a problem if it would end training, else a note."""
    found: list[Finding] = []
    try:
        with redirect_stdout(sys.stderr):  # libraries may print
            found += CHECKS[name](settings)
    except Exception as error:
        text = one_line(error) if isinstance(error, CupynetError) else f"{type(error).__name__}: {one_line(error)}"
        if name in ("data", "training"):
            remedy = "lower batch_size or workers" if out_of_memory(error) else ""
            found.append(Finding(name, "problem", text, remedy, exit_code(error)))
        else:
            found.append(Finding(name, "note", f"could not be checked: {text}"))
    return found


# the machine ----------------------------------------------------------------------------------------------------------


def check_packages(settings: list[str]) -> Iterator[Finding]:
    """Check that the required packages are installed in the required versions and can be imported."""
    yield Finding("python", "ok", f"{platform.python_version()} in {sys.prefix}, {platform.platform()}")
    good = []
    for requirement in requirements():
        name, fault = requirement.name, unusable(requirement)
        remedy = f"pip install '{name}{requirement.specifier}'"
        if fault is None:
            good.append(f"{name} {metadata.version(name)}")
        elif name == "numba":
            yield Finding(name, "note", f"{fault}, and NumPy alone is slower", remedy)
        else:
            yield Finding(name, "problem", fault, remedy, 1)
    if good:
        yield Finding("packages", "ok", ", ".join(good))
    else:
        yield Finding("packages", "note", "cupynet is not installed: its requirements are unknown", "pip install .")


def requirements() -> list[Any]:
    """Return the requirements of the installed package without extras; an empty list if it is not installed."""
    from packaging.requirements import Requirement

    with suppress(metadata.PackageNotFoundError):
        required = map(Requirement, metadata.requires("cupynet") or ())
        return [each for each in required if each.marker is None]
    return []


def unusable(requirement: Any) -> str | None:
    """Return why a package cannot be used, or None."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{version} is installed, {requirement.specifier} is required"
    try:
        importlib.import_module(MODULES.get(requirement.name, requirement.name))
    except Exception as error:  # built for another Python, a library that does not load
        return f"{version} cannot be imported ({type(error).__name__}: {one_line(error)})"
    return None


def check_cpu(settings: list[str]) -> Iterator[Finding]:
    """Check the cores and the memory that this process may use."""
    from cupynet.backend.environment import available_cores, cpu_model, memory

    cores, total, load = available_cores(), os.cpu_count() or 1, os.getloadavg()[0]
    share = f"{cores}" if cores == total else f"{cores} of {total} (by affinity or a container's quota)"
    yield Finding("cpu", "ok", f"{share} cores of {cpu_model()}")
    if load > 1.5 * cores:
        yield Finding("cpu", "note", f"{load:.1f} processes compete for them: times mean little", "end other programs")
    if (found := memory()) is not None:
        size, owner = found
        text = f"{owner} {amount(size)}"
        if size < ROOM:
            yield Finding("memory", "note", text, "lower workers and batch_size")
        else:
            yield Finding("memory", "ok", text)


def check_blas(settings: list[str]) -> Iterator[Finding]:
    """Check the library that multiplies matrices, and the settings of its threads."""
    import numpy as np

    from cupynet.backend import available_cores, blas

    ones = np.ones((64, 64), np.float32)
    if (ones @ ones != 64).any():
        yield Finding("blas", "problem", f"{blas.description()} computes wrong products", "install another NumPy", 1)
        return
    threads, cores = blas.threads_now(), available_cores()
    yield Finding("blas", "ok", f"{blas.description()}, threads: {threads}")
    if threads > cores:
        yield Finding("blas", "note", f"{threads} threads for {cores} cores", f"set OPENBLAS_NUM_THREADS={cores}")
    if variables := [f"{name}={os.environ[name]}" for name in THREADS if name in os.environ]:
        yield Finding("blas", "note", f"{', '.join(variables)} control its threads", "unset them if unintended")


def check_numba(settings: list[str]) -> Iterator[Finding]:
    """Check that kernels are compiled, compute correctly and are cached."""
    if find_spec("numba") is None:
        return  # check_packages reports it
    import numpy as np

    from cupynet.backend.cpu.kernels import update as update_kernels
    from cupynet.backend.update_rules import Move

    began, vector = time.perf_counter(), np.full(8, 2, np.float32)
    update_kernels.sgd(vector, np.ones_like(vector), tuple(map(np.float32, Move(rate=0.5).in_order())))
    version = metadata.version("numba")
    if (vector != 1.5).any() or update_kernels.squared_norm(vector) != 18:
        yield Finding("numba", "problem", f"{version} computes wrong results", "use backend=numpy, or another numba", 1)
        return
    seconds, cache = time.perf_counter() - began, update_kernels.squared_norm._cache  # type: ignore[attr-defined]
    kept = f"kernels are kept in {cache.cache_path}" if cache.cache_path else "compiled kernels are not kept"
    yield Finding("numba", "ok", f"{version} compiles ({seconds:.1f} s), {kept}")


def check_gpu(settings: list[str]) -> Iterator[Finding]:
    """Check the driver, CuPy, each GPU, and NCCL."""
    smi = shutil.which("nvidia-smi")
    if smi:
        query = [smi, "--query-gpu=driver_version,name", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        lines = (done.stdout or done.stderr).splitlines()
        yield Finding("driver", "note" if done.returncode else "ok", f"nvidia-smi: {'; '.join(lines)}")
    if find_spec("cupy") is None:
        remedy = "pip install 'cupynet[cuda12x]', or cuda13x, by its CUDA" if smi else ""
        yield Finding("gpu", "note", f"there is no {'' if smi else 'NVIDIA driver and no '}CuPy", remedy)
        return
    from cupynet.backend import cuda

    fault = cuda.probe()
    if fault is not None:
        remedy = "pip install the CuPy of its CUDA, see nvidia-smi" if smi else "install NVIDIA's driver"
        yield Finding("gpu", "note", fault, remedy)
        return
    found = cuda.inventory()
    runtime, newest = (tuple(map(int, found[name].split("."))) for name in ("runtime", "driver"))
    text = f"{found['cupy']} for CUDA {found['runtime']}; the driver supports up to {found['driver']}"
    if runtime > newest:
        yield Finding("cupy", "note", text, "install a newer driver, or the CuPy of its CUDA")
    else:
        yield Finding("cupy", "ok", text)
    for count, each in enumerate(found["devices"]):
        free, total = each["free"] / 1e9, each["memory"] / 1e9
        text = f"{each['name']}, compute capability {each['capability']}, {free:.1f} GB free of {total:.1f} GB"
        yield Finding(f"gpu {count}", "ok", text)
    if found["nccl"]:
        yield Finding("nccl", "ok", found["nccl"])
    else:
        yield Finding("nccl", "note", "is missing: several GPUs are averaged on the first of them, or on the host")


# the surroundings of a run --------------------------------------------------------------------------------------------

# Each rank writes at once, so that their lines do not mix.
HELLO = """
import os
from cupynet.parallel.communicators.mpi import library
mpi = library()
world = mpi.COMM_WORLD
world.Barrier()
version = mpi.Get_library_version().splitlines()[0][:60]
os.write(1, f"rank {world.Get_rank()} of {world.Get_size()} {version}\\n".encode())
"""


def check_mpi(settings: list[str]) -> Iterator[Finding]:
    """Check that two MPI processes can communicate."""
    remedy = "pip install 'cupynet[mpi]'"
    if find_spec("mpi4py") is None:
        yield Finding("mpi", "note", "mpi4py is not installed: workers are threads", remedy)
        return
    mpiexec = find_mpiexec()
    command = [mpiexec, "-n", "2", sys.executable, "-c", HELLO]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    lines = sorted(each for each in done.stdout.splitlines() if each.startswith("rank "))
    ranks = [each[:11] for each in lines]
    if not done.returncode and ranks == ["rank 0 of 2", "rank 1 of 2"]:
        yield Finding("mpi", "ok", f"two ranks communicate: {one_line(lines[0][12:])}, by {mpiexec}")
    elif ranks == ["rank 0 of 1"] * 2:
        text = f"{mpiexec} starts processes that do not see each other: it is not of the MPI of mpi4py"
        yield Finding("mpi", "note", text, remedy)
    else:
        output = one_line((done.stderr or done.stdout).strip().rpartition("\n")[2])[:160]
        yield Finding("mpi", "note", f"{mpiexec} -n 2 fails ({output or f'exit code {done.returncode}'})", remedy)


def check_data(settings: list[str]) -> Iterator[Finding]:
    """Check that the data of the run are complete, byte by byte."""
    from cupynet.data import MNIST
    from cupynet.data.sources.downloaded import Downloaded, data_folder, offline

    try:
        source = experiment(settings).source
    except CupynetError:
        source = MNIST()  # check_training reports what is wrong with the settings
    if not isinstance(source, Downloaded):
        yield Finding("data", "ok", f"{type(source).__name__}: not checked")
        return
    folder = data_folder(source.folder) / source.name
    missing = [file.name for file in source.files if not os.path.lexists(folder / file.name)]
    for file in source.files:
        if file.name not in missing:
            source.read(folder, file)
    if not missing:
        yield Finding("data", "ok", f"{source.name} is whole in {folder}")
        return
    text = f"{folder} lacks {', '.join(missing)}"
    remedy = f"put the files there, or set CUPYNET_DATA to the folder that holds {source.name}/"
    if not offline():
        yield Finding("data", "note", f"{text}, which a run would download", remedy)
    elif source.may_stand_in:
        yield Finding("data", "note", f"{text}: offline, synthetic digits would be used", remedy)
    else:
        yield Finding("data", "problem", f"{text}, and CUPYNET_OFFLINE forbids downloads", remedy, DataError.exit_code)


def check_disk(settings: list[str]) -> Iterator[Finding]:
    """Check that a run's folder is writable and has enough space."""
    from cupynet.core.files import write_whole

    place = Path("outputs" if os.path.isdir("outputs") else ".").resolve()
    try:
        with tempfile.TemporaryDirectory(prefix=".cupynet-doctor-", dir=place) as folder:
            began = time.perf_counter()
            write_whole(Path(folder) / "file", bytes(1 << 20))
            seconds = time.perf_counter() - began
    except (OSError, OutputError) as error:
        text = f"{place}: runs cannot be written there ({one_line(error)})"
        remedy = "start in another folder, or name one in hydra.run.dir"
        yield Finding("disk", "problem", text, remedy, OutputError.exit_code)
        return
    free = shutil.disk_usage(place).free
    text = f"{place}: {free / 1e9:.1f} GB free, a file takes {1e3 * seconds:.1f} ms"
    yield Finding("disk", "note", text, "make room") if free < ROOM else Finding("disk", "ok", text)


def check_training(settings: list[str]) -> Iterator[Finding]:
    """Launch every kernel of the run once, on all its workers and with its batches."""
    run = experiment(settings)
    with run.wrapper(callbacks=()) as wrapper:
        seconds = wrapper.warm_up(run.settings.batch_size)
    devices = ", ".join(dict.fromkeys(run.placement.names()))
    text = f"backend {run.backend_name}, workers={run.placement.workers} on {devices}: one batch trained"
    yield Finding("training", "ok", f"{text} ({seconds:.1f} s)")


def experiment(overrides: list[str]) -> Experiment:
    """Return the run with the given settings. ConfigError."""
    from cupynet import config
    from cupynet.commands.train import prepare

    return prepare(config.compose(overrides))


CHECKS: dict[str, Check] = {
    "packages": check_packages,
    "cpu": check_cpu,
    "blas": check_blas,
    "numba": check_numba,
    "gpu": check_gpu,
    "mpi": check_mpi,
    "data": check_data,
    "disk": check_disk,
    "training": check_training,
}
