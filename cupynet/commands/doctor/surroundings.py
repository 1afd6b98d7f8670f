"""Checks of the surroundings of a run: MPI, data, disk and clock, and a short training."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cupynet.commands.doctor.finding import ROOM, Finding
from cupynet.core.checks import one_line
from cupynet.core.errors import ConfigError, CupynetError, DataError, OutputError
from cupynet.core.exits import out_of_memory
from cupynet.core.mpiexec import find_mpiexec

if TYPE_CHECKING:
    from cupynet.config.experiment import Experiment

NETWORK = ("nfs", "cifs", "smb", "fuse", "lustre", "gpfs", "beegfs", "9p", "ceph", "afs")
HELLO = "import os; from cupynet.parallel.communicators.mpi import library as l; "
HELLO += "m = l(); w = m.COMM_WORLD; w.Barrier(); "
HELLO += "v = m.Get_library_version().splitlines()[0][:60]; "
HELLO += "os.write(1, f'rank {w.Get_rank()} of {w.Get_size()} {v}\\n'.encode())"  # at once: the other writes too


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
        output = [each for each in (done.stderr or done.stdout).splitlines() if each.strip()]
        yield Finding(
            "mpi",
            "note",
            f"{mpiexec} -n 2 fails ({one_line(output[-1])[:160] if output else done.returncode})",
            way_out,
        )
    else:
        place = "" if own else ", which is not of this Python's environment"
        yield Finding("mpi", "ok", f"two ranks meet: {one_line(lines[0][12:])}, by {mpiexec}{place}")


def check_data(asked: list[str]) -> Iterator[Finding]:
    """Whether the data of the run are there and whole, byte by byte."""
    from cupynet.data import MNIST
    from cupynet.data.sources.downloaded import Downloaded, data_folder, offline

    try:
        source = experiment(asked).source
    except CupynetError:
        source = MNIST()  # check_training says what is wrong with the settings
    if not isinstance(source, Downloaded):
        yield Finding("data", "ok", f"{type(source).__name__}: not looked at")
        return
    folder = data_folder(source.folder) / source.name
    missing = [file.name for file in source.files if not os.path.lexists(folder / file.name)]
    try:
        for file in source.files:
            if file.name not in missing:
                source.check_file(folder, file)
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
    """Return the type of the file system of a folder; `a disk` if the system does not name it."""
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
    from cupynet.commands.train import prepare

    return prepare(config.compose(asked))
