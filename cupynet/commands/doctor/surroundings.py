"""Checks of the surroundings of a run: MPI, data and disk, and a short training."""

from __future__ import annotations

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


def check_mpi(asked: list[str]) -> Iterator[Finding]:
    """Check that two processes find each other."""
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
    ranks = [each[:11] for each in lines]
    if ranks == ["rank 0 of 1"] * 2:
        text = f"{mpiexec} starts processes that do not see each other: it is not of the MPI of mpi4py"
        yield Finding("mpi", "note", text, way_out)
    elif done.returncode or ranks != ["rank 0 of 2", "rank 1 of 2"]:
        output = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        reason = one_line(output)[:160] or f"exit code {done.returncode}"
        yield Finding("mpi", "note", f"{mpiexec} -n 2 fails ({reason})", way_out)
    else:
        yield Finding("mpi", "ok", f"two ranks meet: {one_line(lines[0][12:])}, by {mpiexec}")


def check_data(asked: list[str]) -> Iterator[Finding]:
    """Check that the data of the run are there and whole, byte by byte."""
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
    text = f"{folder} lacks {', '.join(missing)}"
    way_out = f"bring the files there, or name the folder that holds {source.name}/ in CUPYNET_DATA"
    if not offline():
        yield Finding("data", "note", f"{text}, which a run would download", way_out)
    elif source.may_stand_in:
        yield Finding("data", "note", f"{text}: offline, synthetic digits would be used", way_out)
    else:
        yield Finding("data", "problem", f"{text}, and CUPYNET_OFFLINE forbids downloads", way_out, DataError.exit_code)


def check_disk(asked: list[str]) -> Iterator[Finding]:
    """Check that a run's folder can be written and has room."""
    from cupynet.core.files import write_whole

    place = Path("outputs") if Path("outputs").is_dir() else Path()
    here = place.resolve()
    try:
        with tempfile.TemporaryDirectory(prefix=".cupynet-doctor-", dir=place) as folder:
            began = time.perf_counter()
            write_whole(Path(folder) / "file", bytes(1 << 20))
            seconds = time.perf_counter() - began
    except (OSError, OutputError) as error:
        text = f"{here}: runs cannot be written there ({one_line(error)})"
        way_out = "start in another folder, or name one in hydra.run.dir"
        yield Finding("disk", "problem", text, way_out, OutputError.exit_code)
        return
    free = shutil.disk_usage(here).free
    text, small = f"{here}: {free / 1e9:.1f} GB free, a file takes {1e3 * seconds:.1f} ms", free < ROOM
    yield Finding("disk", "note" if small else "ok", text, "make room" if small else "")


def check_training(asked: list[str]) -> Iterator[Finding]:
    """Launch every kernel of the run once, on all its workers and with its batches."""
    try:
        found = experiment(asked)
        with found.wrapper(callbacks=()) as wrapper:
            seconds = wrapper.warm_up(found.settings.batch_size)
    except CupynetError as error:
        yield Finding("training", "problem", one_line(error), "", error.exit_code)
        return
    except Exception as error:
        way_out = "lower batch_size or workers" if out_of_memory(error) else "the lines above may say why"
        yield Finding("training", "problem", f"{type(error).__name__}: {one_line(error)}", way_out, 1)
        return
    places = ", ".join(dict.fromkeys(found.placement.names()))
    text = f"backend {found.backend_name}, workers={found.placement.workers} on {places}: a batch goes through"
    yield Finding("training", "ok", f"{text} ({seconds:.1f} s)")


def experiment(asked: list[str]) -> Experiment:
    """Return the run with the given settings. ConfigError."""
    from cupynet import config
    from cupynet.commands.train import prepare

    return prepare(config.compose(asked))
