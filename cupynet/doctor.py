"""What a machine has, and what it lacks: `python -m cupynet.doctor [key=value ...]`.

A line for each thing that training rests on: `ok`, `note` (training works without it, or differently than one may
think) or `problem` (it does not), each with the way out. key=value: settings of `cupynet.train`, whose run is then the
one that is asked about. It ends with 0 where that would train here, else with the code that training would end with.

Nothing is taken for granted: this process uses the standard library alone, and each check runs in a process of its own
that may die or hang. Nothing is downloaded, and no file is left behind. (Over 300 lines: one check after the other.)
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet.checks import number, one_line, one_of
from cupynet.errors import ConfigError, CupynetError, DataError, OutputError
from cupynet.exits import out_of_memory, steady_streams, tell
from cupynet.mpiexec import find_mpiexec, started

if TYPE_CHECKING:
    from cupynet.experiment import Experiment

LIMIT_S = 120.0  # of one check, by default: compiling all kernels takes seconds, on a busy machine many
ROOM = 1 << 30  # bytes of disk below which a run may come to its end: checkpoints of LeNet have 5 MB
NETWORK = ("nfs", "cifs", "smb", "fuse", "lustre", "gpfs", "beegfs", "9p", "ceph", "afs")
THREADS = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
)
MODULES = {"hydra-core": "hydra"}  # what a package is imported as, where that is not its name
HELLO = "import os; from cupynet.parallel.mpi import library as l; m = l(); w = m.COMM_WORLD; w.Barrier(); "
HELLO += "v = m.Get_library_version().splitlines()[0][:60]; "
HELLO += "os.write(1, f'rank {w.Get_rank()} of {w.Get_size()} {v}\\n'.encode())"  # at once: the other writes too


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        part: of the machine.
        state: `ok`, `note` or `problem`.
        text: what was found.
        way_out: what to do about it; "" where nothing needs to be done.
        code: what training would end with; 0 unless it is a problem.
    """

    part: str
    state: str
    text: str
    way_out: str = ""
    code: int = 0

    def __str__(self) -> str:
        return f"{self.text}: {self.way_out}" if self.way_out else self.text


Check = Callable[[list[str]], Iterator[Finding]]


# the command ----------------------------------------------------------------------------------------------------------


def main() -> None:
    """The command."""
    steady_streams()
    parser = argparse.ArgumentParser(
        prog="python -m cupynet.doctor",
        description="Say what this machine has and lacks for training.",
        epilog="key=value: settings of cupynet.train, such as backend=cupy; of this command: json=true prints JSON, "
        f"check={'|'.join(CHECKS)} makes one check alone, timeout_s={LIMIT_S:.0f} is the limit of each",
    )
    parser.add_argument("settings", nargs="*", metavar="key=value")
    given = parser.parse_args().settings
    try:
        if started() is not None:
            raise ConfigError("doctor looks at one machine, in one process: start it without mpiexec")
        own, asked = divided(given)
        as_json = one_of("json", own.get("json", "false").lower(), ("true", "false")) == "true"
        names = [one_of("check", own["check"], tuple(CHECKS))] if "check" in own else list(CHECKS)
        code = report(names, asked, limit(own.get("timeout_s", str(LIMIT_S))), as_json)
    except BaseException as error:
        raise SystemExit(tell(error)) from None
    raise SystemExit(code)


def divided(given: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """What is meant for this command, and the settings of a run. ConfigError."""
    own: dict[str, str] = {}
    asked = []
    for argument in given:
        key, equals, value = argument.partition("=")
        if not equals and not argument.startswith("~"):
            raise ConfigError(f"{argument}: is not written as key=value")
        if key in ("json", "check", "timeout_s"):
            own[key] = value
        else:
            asked.append(argument)
    return own, asked


def limit(text: str) -> float:
    """Seconds. ConfigError."""
    try:
        return number("timeout_s", float(text), above=0, unit="seconds")
    except ValueError as error:
        raise ConfigError(f"timeout_s={text}: must be a number of seconds above 0") from error


def report(names: Sequence[str], asked: list[str], limit_s: float, as_json: bool) -> int:
    """Make these checks and print what they find, line by line or as JSON; the exit code."""
    found: list[Finding] = []
    for name in names:
        for finding in examined(name, asked, limit_s):
            found.append(finding)
            if not as_json:
                print(line(finding), flush=True)
    code = next((finding.code for finding in found if finding.code), 0)
    if as_json:
        print(json.dumps({"exit_code": code, "findings": [asdict(finding) for finding in found]}, indent=2))
    elif len(names) == len(CHECKS):
        notes = sum(finding.state == "note" for finding in found)
        said = (
            "training works here" if code == 0 else f"training would end with exit code {code}: see the first problem"
        )
        print(f"{said}{f' ({notes} notes)' if notes > 1 else ''}")
    return code


def line(finding: Finding) -> str:
    """A finding as it is printed; on a terminal in as many lines as it needs there."""
    head, text = f"{finding.state:<9}{finding.part:<10}", str(finding)
    if not sys.stdout.isatty():
        return head + text
    width = max(shutil.get_terminal_size().columns, 60)
    return textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False)


# a check, in a process of its own -------------------------------------------------------------------------------------


def examined(name: str, asked: list[str], limit_s: float) -> list[Finding]:
    """What a check finds. Where its process dies or hangs, that."""
    command = [sys.executable, "-c", "from cupynet.doctor import alone; alone()", name, *asked]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=limit_s)
        return [Finding(**each) for each in json.loads(out)]
    except subprocess.TimeoutExpired:
        return [unfinished(name, f"no answer within {limit_s:g} s")]
    except (ValueError, TypeError):
        ended = f"ended with exit code {process.returncode}"
        if process.returncode < 0:
            ended = f"was killed by {signal.Signals(-process.returncode).name}"
        last = one_line(err.decode(errors="replace").strip().rpartition("\n")[2])
        return [unfinished(name, f"its process {ended}{f' ({last})' if last else ''}")]
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5)


def unfinished(name: str, why: str) -> Finding:
    """A check that came to no end: a problem where it did what training does."""
    if name == "training":
        return Finding(name, "problem", why, "the lines above may say why", 1)
    return Finding(name, "note", f"could not be checked: {why}")


def alone() -> None:
    """This process does one check: its name and settings are the arguments, what it finds goes to stdout as JSON.

    What is warned of meanwhile becomes a note.
    """
    steady_streams()
    name, *asked = sys.argv[1:]
    answer = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not stand among the findings
    heard = _Heard()
    logging.getLogger("cupynet").addHandler(heard)
    found: list[Finding] = []
    try:
        found += CHECKS[name](asked)
    except Exception as error:
        found.append(unfinished(name, f"{type(error).__name__}: {one_line(error)}"))
    found += [Finding(name, "note", text) for text in dict.fromkeys(heard.texts)]
    with os.fdopen(answer, "w", encoding="utf-8") as file:
        json.dump([asdict(finding) for finding in found], file)


class _Heard(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(one_line(record.getMessage()))


# the checks -----------------------------------------------------------------------------------------------------------


def check_packages(asked: list[str]) -> Iterator[Finding]:
    """Python and what must be installed, in the versions that are asked for, and importable."""
    here, wanted = platform.python_version(), requirements()
    python = next((each for each in wanted if each.name == "python"), None)
    if python is not None and here not in python.specifier:
        yield Finding(
            "python", "problem", f"{here}, needed is {python.specifier}", "make an environment with another", 1
        )
    else:
        yield Finding("python", "ok", f"{here} in {sys.prefix}, {platform.platform()}")
    if not wanted:
        yield Finding("packages", "note", "what is required is not known here", "pip install it, or see pyproject.toml")
    good = []
    for each in wanted:
        if each.name == "python" or each.marker is not None:
            continue
        fault = unusable(each)
        optional = each.name == "numba"
        if fault is None:
            good.append(f"{each.name} {importlib.metadata.version(each.name)}")
        elif optional:
            yield Finding(each.name, "note", f"{fault}, and NumPy alone is slower", f"pip install '{plain(each)}'")
        else:
            yield Finding(each.name, "problem", fault, f"pip install '{plain(each)}'", 1)
    if good:
        yield Finding("packages", "ok", ", ".join(good))


def requirements() -> list[Any]:
    """What the installed package requires, and `python` with it; empty where neither says so."""
    try:
        from packaging.requirements import Requirement

        stated = importlib.metadata.metadata("cupynet")
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return []
    return [Requirement(f"python{stated['Requires-Python']}"), *map(Requirement, stated.get_all("Requires-Dist") or [])]


def plain(requirement: Any) -> str:
    """As pip takes it."""
    return f"{requirement.name}{requirement.specifier}"


def unusable(requirement: Any) -> str | None:
    """Why a package cannot be used, or None."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{version} is installed, needed is {requirement.specifier}"
    try:
        importlib.import_module(MODULES.get(requirement.name, requirement.name))
    except Exception as error:  # built for another Python, a library that does not load
        return f"{version} cannot be imported ({type(error).__name__}: {one_line(error)})"
    return None


def check_cpu(asked: list[str]) -> Iterator[Finding]:
    """Cores and memory that this process may use."""
    from cupynet.backend import available_cores, cpu_model, usable_cores

    cores, there = available_cores(), os.cpu_count() or 1
    text = f"{cores} core{'s' * (cores > 1)} of {cpu_model()}"
    if cores < len(usable_cores()):
        text += f": a container's quota, of {there}"
    elif cores < there:
        text += f": this process may not use the others of {there}"
    yield Finding("cpu", "ok", text)
    with suppress(OSError):
        busy = os.getloadavg()[0]
        if busy > 1.5 * cores:
            text = f"{busy:.1f} processes want {cores} core{'s' * (cores > 1)} at this moment: times say little"
            yield Finding("cpu", "note", text, "end other programs")
    free, total = memory()
    if total:
        text = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f} GB"
        small = free < ROOM
        way_out = "end other programs, or take fewer workers and smaller batches" if small else ""
        yield Finding("memory", "note" if small else "ok", text, way_out)


def memory() -> tuple[int, int]:
    """Bytes that are free and that there are, for this process and its container; 0, 0 where that is not told."""
    try:
        lines = dict(each.split(":", 1) for each in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    except (OSError, ValueError, KeyError):
        return 0, 0
    for most, now in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            allowed = int(Path("/sys/fs/cgroup", most).read_text())
            used = int(Path("/sys/fs/cgroup", now).read_text())
            free, total = min(free, max(allowed - used, 0)), min(total, allowed)
    return free, total


def check_blas(asked: list[str]) -> Iterator[Finding]:
    """What NumPy multiplies with, and what binds it."""
    import numpy as np

    from cupynet.backend import available_cores, blas

    ones = np.ones((64, 64), np.float32)
    if (ones @ ones != 64).any():
        yield Finding("blas", "problem", f"{blas.description()} multiplies wrongly", "install another NumPy", 1)
        return
    threads, cores = blas.threads_now(), available_cores()
    yield Finding("blas", "ok", f"{blas.description()}, {threads} thread{'s' * (threads > 1)}")
    if threads > cores:
        yield Finding("blas", "note", f"{threads} threads for {cores} cores", f"set OPENBLAS_NUM_THREADS={cores}")
    bound = [f"{name}={os.environ[name]}" for name in THREADS if name in os.environ]
    if bound:
        yield Finding(
            "blas", "note", f"{', '.join(bound)} decide how its threads run", "unset them, unless that is meant"
        )
    below = blas.held_below()
    if below:
        yield Finding("blas", "note", below)


def check_numba(asked: list[str]) -> Iterator[Finding]:
    """Whether kernels are compiled, in several threads at once, and kept."""
    if importlib.util.find_spec("numba") is None:
        return  # check_packages says it
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from cupynet.backend.kernels import loops

    def work(of: int) -> bool:
        """Another type for each, so that both compile."""
        vector = np.full(8, 2, (np.float32, np.float64)[of % 2])
        loops.sgd_update(vector, np.ones_like(vector), *map(vector.dtype.type, (0.5, 0, 1)))
        return bool((vector == 1.5).all() and loops.squared_norm(vector) == 18)

    began = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        right = all(pool.map(work, range(8)))
    version = importlib.metadata.version("numba")
    if not right:
        yield Finding("numba", "problem", f"{version} computes wrongly", "take backend=numpy, or another numba", 1)
        return
    seconds, cache = time.perf_counter() - began, loops.squared_norm._cache  # type: ignore[attr-defined]
    where = "compiled kernels are not kept" if cache.trouble else f"kernels are kept in {cache.cache_path}"
    yield Finding("numba", "ok", f"{version} compiles in threads ({seconds:.1f} s), {where}")


def check_gpu(asked: list[str]) -> Iterator[Finding]:
    """The driver, CuPy, each GPU, and what would connect several."""
    driver = drivers()
    if driver:
        yield Finding("driver", "ok", driver)
    if importlib.util.find_spec("cupy") is None:
        missing = "there is no CuPy" if driver else "there is no NVIDIA driver and no CuPy: the processor computes"
        yield Finding(
            "gpu", "note", missing, "pip install 'cupynet[cuda12x]', or cuda13x, by its CUDA" if driver else ""
        )
        return
    from cupynet.backend import cuda

    fault = cuda.probe()
    if fault is not None:
        way_out = "pip install the CuPy of its CUDA, see nvidia-smi" if driver else "install NVIDIA's driver"
        yield Finding("gpu", "note", f"{fault}: the processor computes", way_out)
        return
    found = cuda.inventory()
    yield Finding(
        "cupy", "ok", f"{found['cupy']} for CUDA {found['runtime']}; the driver takes up to {found['driver']}"
    )
    if release(found["runtime"]) > release(found["driver"]):
        yield Finding("cupy", "note", "it is newer than the driver", "install a newer driver, or the CuPy of its CUDA")
    for count, each in enumerate(found["devices"]):
        free, total = each["free"] / 1e9, each["memory"] / 1e9
        text = f"{each['name']}, compute capability {each['capability']}, {free:.1f} GB free of {total:.1f} GB"
        yield Finding(f"gpu {count}", "ok", text)
    yield Finding("nccl", "ok" if found["nccl"] else "note", nccl_said(found["nccl"]))


def release(version: str) -> tuple[int, ...]:
    """A version as numbers: 12.10 is later than 12.9."""
    return tuple(map(int, version.split(".")))


def nccl_said(version: str | None) -> str:
    """What NCCL is good for at present."""
    here = f"{version} is there" if version else "is not there"
    return f"{here}; averages of several GPUs are made in the host's memory in any case"


def drivers() -> str:
    """What nvidia-smi says of the driver and its GPUs; "" where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    lines = [each for each in done.stdout.splitlines() if each.strip()]
    if done.returncode or not lines:
        return f"nvidia-smi fails ({one_line(done.stdout + done.stderr)[:80]})"
    return f"NVIDIA {lines[0].split(',')[0]}, {len(lines)} GPU{'s' * (len(lines) > 1)}"


def check_mpi(asked: list[str]) -> Iterator[Finding]:
    """Whether two processes meet."""
    way_out = "pip install 'cupynet[mpi]'"
    if importlib.util.find_spec("mpi4py") is None:
        yield Finding("mpi", "note", "mpi4py is not installed: workers are threads", way_out)
        return
    try:
        mpiexec = find_mpiexec()
    except ConfigError as error:
        yield Finding("mpi", "note", one_line(error))
        return
    hello = [mpiexec, "-n", "2", sys.executable, "-c", HELLO]
    done = subprocess.run(hello, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    lines = sorted(each for each in done.stdout.splitlines() if each.startswith("rank "))
    own = Path(mpiexec).parent == Path(sys.executable).parent
    if [each.split()[3] for each in lines] == ["1", "1"]:
        other = "it is of another MPI than mpi4py" if not own else "mpi4py is of another MPI"
        yield Finding("mpi", "note", f"{mpiexec} starts processes that do not see each other: {other}", way_out)
    elif done.returncode or [each[:11] for each in lines] != ["rank 0 of 2", "rank 1 of 2"]:
        told = [each for each in (done.stderr or done.stdout).splitlines() if each.strip()]
        yield Finding(
            "mpi", "note", f"{mpiexec} -n 2 fails ({one_line(told[-1])[:160] if told else done.returncode})", way_out
        )
    else:
        place = "" if own else ", which is not of this Python's environment"
        yield Finding("mpi", "ok", f"two ranks meet: {one_line(lines[0][12:])}, by {mpiexec}{place}")


def check_data(asked: list[str]) -> Iterator[Finding]:
    """Whether the data of the run are there and whole, byte by byte."""
    from cupynet.data import MNIST
    from cupynet.data.idx import read_idx
    from cupynet.data.mnist import data_folder, offline

    try:
        source = experiment(asked).source
    except CupynetError:
        source = MNIST()  # check_training says what is wrong with the settings
    if not isinstance(source, MNIST) or source.storage != "shared":
        yield Finding("data", "ok", f"{type(source).__name__}: {source.storage}, not looked at")
        return
    folder = data_folder(source.folder) / source.name
    missing = [file.name for file in source.files if not os.path.lexists(folder / file.name)]
    try:
        for file in source.files:
            if file.name not in missing:
                read_idx(folder / file.name, file, source.files)
    except DataError as error:
        yield Finding("data", "problem", one_line(error), "", error.exit_code)
        return
    if not missing:
        yield Finding("data", "ok", f"{source.name} is whole in {folder}")
        return
    there = f"{folder} lacks {', '.join(missing)}"
    way_out = f"bring the files there, or name the folder that holds {source.name}/ in CUPYNET_DATA"
    if not offline():
        yield Finding(
            "data", "note", f"{there}: a run would download what is missing", "" if source.may_stand_in else way_out
        )
    elif not source.may_stand_in:
        text = f"{there}, and CUPYNET_OFFLINE forbids downloads"
        yield Finding("data", "problem", text, way_out, DataError.exit_code)
    else:
        text = f"{there}, and CUPYNET_OFFLINE forbids downloads: synthetic digits would be used"
        yield Finding("data", "note", text, way_out)


def check_disk(asked: list[str]) -> Iterator[Finding]:
    """Whether a run's folder can be written, flushed and renamed, and what it lies on."""
    place = Path("outputs") if Path("outputs").is_dir() else Path()
    here = place.resolve()
    try:
        with tempfile.TemporaryDirectory(prefix=".cupynet-doctor-", dir=place) as folder:
            flush_s, behind_s = written(Path(folder))
    except OSError as error:
        text = f"{here}: runs cannot be written there ({error.strerror or error})"
        yield Finding(
            "disk", "problem", text, "start in another folder, or name one in hydra.run.dir", OutputError.exit_code
        )
        return
    free, system = shutil.disk_usage(here).free, file_system(here)
    text = f"{here} on {system}: {free / 1e9:.1f} GB free, a flush takes {1e3 * flush_s:.1f} ms, renaming replaces"
    small = free < ROOM
    yield Finding("disk", "note" if small else "ok", text, "make room" if small else "")
    if system.startswith(NETWORK):
        text = f"{system} is a network's: what is flushed is as safe as its server makes it"
        yield Finding("disk", "note", text, "name a local folder in hydra.run.dir, if there is one")
    yield from check_clock(behind_s)


def written(folder: Path) -> tuple[float, float]:
    """Write as results are written. The seconds that took, and by how many the disk's clock is behind ours. OSError."""
    part, whole = folder / "part", folder / "whole"
    whole.write_bytes(b"before")
    began = time.perf_counter()
    with part.open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, whole)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    seconds = time.perf_counter() - began
    found = whole.stat()
    if found.st_size != 1 << 20 or part.exists():
        raise OSError("what was written is not what is there")
    return seconds, time.time() - found.st_mtime


def file_system(folder: Path) -> str:
    """The kind of file system that a folder lies on, as the system names it; `a disk` where it does not."""
    try:
        mounts = [each.split() for each in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "a disk"
    above = {str(each) for each in (folder, *folder.parents)}
    found = [(len(each[1]), number, each[2]) for number, each in enumerate(mounts) if each[1] in above]
    return max(found)[2] if found else "a disk"


def check_clock(behind_s: float) -> Iterator[Finding]:
    """Runs are named by the time, and the newest is gone on with."""
    newest = Path(__file__).stat().st_mtime
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if time.time() < newest - 86400:
        yield Finding("clock", "note", f"it is {now}, before this program was installed", "set the clock")
    elif abs(behind_s) > 5:
        text = f"it is {now}, and on the disk {abs(behind_s):.0f} s {'earlier' if behind_s > 0 else 'later'}"
        yield Finding("clock", "note", text, "set the clocks of this machine and of its file server")
    else:
        yield Finding("clock", "ok", now)


def check_training(asked: list[str]) -> Iterator[Finding]:
    """Every kernel of the run that is asked about, once, on all its workers and with its batches."""
    try:
        found = experiment(asked)
        placement = found.placement
        with found.wrapper(callbacks=()) as wrapper:
            seconds = wrapper.warm_up(found.settings.batch_size)
    except CupynetError as error:
        yield Finding("training", "problem", one_line(error), "", error.exit_code)
        return
    except Exception as error:
        way_out = "lower batch_size or workers" if out_of_memory(error) else "the lines above may say why"
        yield Finding("training", "problem", f"{type(error).__name__}: {one_line(error)}", way_out, 1)
        return
    workers = (
        f"{placement.workers} worker{'s' * (placement.workers > 1)} on {', '.join(dict.fromkeys(placement.names()))}"
    )
    yield Finding("training", "ok", f"backend {found.backend_name}, {workers}: a batch goes through ({seconds:.1f} s)")


def experiment(asked: list[str]) -> Experiment:
    """The run that is asked about. ConfigError."""
    from cupynet import config
    from cupynet.train import prepare

    return prepare(config.compose(asked))


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

if __name__ == "__main__":
    main()
