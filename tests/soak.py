"""Train, kill, resume and compare, for an hour: `make soak`, or `make soak MINUTES=5`.

Each point is a run of `cupynet train` in a forked process. It is killed (SIGKILL) at a random moment, or at some step
of a save, and resumed with `resume=latest`, possibly several times. The result must equal an undisturbed run's:
weights, optimizer and synchronizer state, every worker's counters, the history except its times, and the list of
checkpoints. No temporary file may be left. Meanwhile, another process trains without interruption, and its memory,
threads and file descriptors are monitored. The exit code is 0 if there was no fault.
"""

import argparse
import ctypes
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cupynet import Image, Model, create_backend
from cupynet.backend.environment import commit, environment
from cupynet.commands import train
from cupynet.core.files import digest, write_json
from cupynet.data import Loader
from cupynet.optim import Nesterov
from cupynet.runs.checkpoints import Checkpoints
from cupynet.training import Checkpoint, HistoryWriter, ParallelWrapper
from tests.support.commands import ROOT
from tests.support.training import stripes, stripes_network
from tests.support.warm import import_all

FORK = multiprocessing.get_context("fork") if sys.platform == "linux" else multiprocessing.get_context()
HANG_S = 120  # a normal run takes a second or two
SETTLES_S, JUDGED_S = 120, 300  # memory is compared after SETTLES_S, over at least JUDGED_S

RUN = """
    data=synthetic data.test=64 epochs=3 batch_size=16 log_every=5 callbacks.progress.style=none
    callbacks.checkpoint.every_iterations=5 callbacks.checkpoint.keep_every=4
    model.layers.conv1.filters=4 model.layers.conv2.filters=6 model.layers.dense1.units=16
"""
MODES = {
    "averaging, 1 worker": "workers=1 parallel.averaging_frequency=5",
    "averaging, 4 workers": "workers=4 parallel.averaging_frequency=5",
    "gradients, 1 worker": "workers=1 parallel=gradients",
    "gradients, 4 workers": "workers=4 parallel=gradients",
}
# times, traffic (a resumed run sends more), the history file's size, and a run's random identity
VARIES = re.compile(r"_s$|^bytes|^identity$|^crc$")
STRAY = re.compile(r"\.tmp-\d|\.old-\d|\.part$")


class Place(NamedTuple):
    """A step of a save at which to kill a run."""

    step: str  # the run's operation, see `die_at`
    path: str  # a pattern of the file or folder; {pid} is the process
    per_save: float = 1  # how often each save gets there
    in_total: int = 0  # how often a run gets there, if not in each save
    after: str = ""  # an earlier kill, which leaves something to remove or to resume


PLACES = {
    "temporary file open": Place("open", r"\.tmp-\d+/.+\.part$", per_save=4),
    "mid-write": Place("write", r"\.tmp-\d+/.+\.part$", per_save=4),
    "before fsync": Place("fsync", r"\.tmp-\d+/.+", per_save=4),
    "before rename": Place("rename", r"\.tmp-\d+$"),
    "after rename": Place("renamed", r"\.tmp-\d+$"),
    "before the parent's fsync": Place("fsync", r"/checkpoints$"),
    "mid-prune": Place("remove", r"\.tmp-{pid}$", per_save=0.5),
    "mid-removal": Place("remove", r"\.tmp-(?!{pid}$)\d+$", in_total=1, after="before rename"),
    "mid-results": Place("write", r"^(?!.*(\.tmp-|/\.hydra/)).*\.part$", in_total=2),
    "mid-settings": Place("write", r"/\.hydra/.*\.part$", in_total=2, after="after rename"),
}
KINDS = [*PLACES, *["moment"] * 7]


def case(number: int) -> tuple[str, str]:
    """Return a point's mode and kind: 4 x 17 points combine each mode with each kind, and 12 reach all places."""
    return list(MODES)[number % len(MODES)], KINDS[number % len(KINDS)]


def train_until(place: Place | None, visit: int, arguments: Sequence[str], output: Path) -> None:
    """Become `cupynet train` with its output in a file. Die at `place` if it is given."""
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if place is not None:
        die_at(place, visit)
    sys.argv = ["cupynet", *arguments]
    train.main()


def ended(process: BaseProcess, kill_after_s: float | None = None) -> int | str | None:
    """Wait for a process. Return its exit code, -9 if it was killed, or "hung" if it did not end in time."""
    process.join(HANG_S if kill_after_s is None else kill_after_s)
    hung = kill_after_s is None and process.is_alive()
    process.kill()
    process.join()
    return "hung" if hung else process.exitcode


def die_at(place: Place, visit: int) -> None:
    """Patch `os`, `shutil` and `Path` so that this process dies when it reaches a place for the nth time."""
    real_open, real_fsync, real_rename, real_rmtree = Path.open, os.fsync, os.rename, shutil.rmtree
    pattern, visits = re.compile(place.path.format(pid=os.getpid())), itertools.count(1)

    def here(step: str, path: object) -> bool:
        return step == place.step and pattern.search(str(path)) is not None and next(visits) == visit

    def opening(path: Path, *mode: Any, **named: Any) -> Any:
        file: Any = real_open(path, *mode, **named)
        real_write = file.write

        def write_half(content: bytes) -> None:
            real_write(content[: len(content) // 2])
            file.flush()
            die()

        if here("open", path):
            die()
        if here("write", path):
            file.write = write_half
        return file

    def flushing(descriptor: int) -> None:
        if here("fsync", os.readlink(f"/proc/self/fd/{descriptor}")):
            die()
        real_fsync(descriptor)

    def renaming(source: Any, target: Any) -> None:
        if here("rename", source):
            die()
        real_rename(source, target)
        if here("renamed", source):
            die()

    def removing(path: Any, **named: Any) -> None:
        if os.path.isdir(path) and here("remove", path):
            os.unlink(next(Path(path).iterdir()))
            die()
        real_rmtree(path, **named)

    Path.open = opening  # type: ignore[method-assign, assignment]
    os.fsync, os.rename = flushing, renaming  # type: ignore[assignment]
    shutil.rmtree = removing  # type: ignore[assignment]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # until the whole process is gone


def timeless(value: Any) -> Any:
    if isinstance(value, list):
        return [timeless(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "rows" in value:  # the history in a checkpoint, as text
        value = {**value, "rows": json.loads(value["rows"])}
    return {name: timeless(each) for name, each in value.items() if not VARIES.search(name)}


def left_by(folder: Path) -> dict[str, Any]:
    store = Checkpoints(folder / "checkpoints")
    newest = store.newest()
    assert newest is not None
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "final weights": hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest(),
        "history": timeless([json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]),
        "checkpoints": store.steps(),
        "weights of the last checkpoint": digest(newest.arrays["weights"]),
        "optimizer and synchronizer": digest(newest.arrays["state"]),
        "counters": json.dumps(timeless(newest.state)),
        "summary": [summary[name] for name in ("epochs", "iterations", "images", "test_loss", "test_accuracy")],
    }


def differences(folder: Path, wanted: dict[str, Any]) -> list[str]:
    """Return the results of a run that differ from the undisturbed run's, and the remaining temporary files.

    A run killed in its last save may keep the checkpoint that this save would have removed.
    """
    try:
        found = left_by(folder)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    more = sorted(set(found["checkpoints"]) - set(wanted["checkpoints"]))
    if len(more) == 1 and more[0] < wanted["checkpoints"][-1]:
        found["checkpoints"].remove(more[0])
    stray = [str(path.relative_to(folder)) for path in folder.rglob("*") if STRAY.search(path.name)]
    return [name for name in wanted if found[name] != wanted[name]] + sorted(stray)


@dataclass
class Point:
    """The result of one point. `faults` is empty if the run resumed correctly."""

    number: int
    mode: str
    kind: str
    kills: list[str]
    faults: list[str]

    def __str__(self) -> str:
        result = f"FAILED: {', '.join(self.faults)}" if self.faults else "agrees"
        return f"{self.number + 1:5d}  {self.mode:21}  {', then '.join(self.kills):58}  {result}"


class Reference(NamedTuple):
    left: dict[str, Any]
    seconds: float
    saves: int


class Soak:
    """Runs on `images` images in a folder, where failed ones are kept. No point starts after the time `until`."""

    def __init__(self, folder: Path, images: int, seed: int, until: float) -> None:
        self.folder, self.images, self.seed, self.until = folder, images, seed, until
        self.references: dict[str, Reference] = {}

    def begin(self, name: str, mode: str, place: Place | None = None, visit: int = 1) -> BaseProcess:
        settings = f"{RUN} {MODES[mode]} data.train={self.images} resume=latest".split()
        arguments = [*settings, f"hydra.run.dir={self.folder / name}"]
        process = FORK.Process(target=train_until, args=(place, visit, arguments, self.folder / f"{name}.txt"))
        process.start()
        return process

    def undisturbed(self, mode: str) -> Reference:
        name, began = mode.replace(", ", "-").replace(" ", "-"), time.monotonic()
        code = ended(self.begin(name, mode))
        seconds = time.monotonic() - began
        if code != 0:
            raise SystemExit(f"an undisturbed run ended with {code}: {self.folder / name}.txt")
        left = left_by(self.folder / name)
        if wrong := differences(self.folder / name, left):
            raise SystemExit(f"an undisturbed run left {wrong} in {self.folder / name}")
        worker = json.loads(left["counters"])["workers"][0]
        return Reference(left, seconds, worker["numbers"]["callbacks"]["Checkpoint"]["written"])

    def point(self, number: int) -> Point | None:
        """Kill a run, resume it, and compare. Return None if time is up."""
        if time.monotonic() > self.until:
            return None
        mode, kind = case(number)
        name, rng = f"point-{number:04d}", random.Random(f"{self.seed} {number}")
        kills = self.at_moments(name, mode, rng) if kind == "moment" else self.at_places(name, mode, kind, rng)
        code = ended(self.begin(name, mode)) if kills else "no kill"
        faults = differences(self.folder / name, self.references[mode].left) if code == 0 else [f"ended with {code}"]
        if not faults:
            shutil.rmtree(self.folder / name)
            (self.folder / f"{name}.txt").unlink()
        return Point(number, mode, kind, kills, faults)

    def at_places(self, name: str, mode: str, kind: str, rng: random.Random) -> list[str]:
        """Kill a run at a random visit to a place. Return an empty list if it did not die."""
        kills = []
        for which in filter(None, (PLACES[kind].after, kind)):
            place = PLACES[which]
            visit = rng.randint(1, place.in_total or int(place.per_save * self.references[mode].saves))
            if ended(self.begin(name, mode, place=place, visit=visit)) != -9:
                return []
            kills.append(f"{which} {visit}")
        return kills

    def at_moments(self, name: str, mode: str, rng: random.Random) -> list[str]:
        """Kill a run at one or two random moments, two thirds of them after the first save. Retry if it was faster."""
        kills: list[str] = []
        wanted = rng.choice((1, 2))
        for _ in range(9):
            process, saved = self.begin(name, mode), rng.random() < 0.67
            while saved and process.is_alive() and not (self.folder / name / "checkpoints").exists():
                time.sleep(0.002)
            after_s = rng.uniform(0, self.references[mode].seconds * (0.6 if saved else 1))
            if ended(process, after_s) == -9:
                kills.append(f"{after_s:.3f} s after {'its first save' if saved else 'its start'}")
            else:
                shutil.rmtree(self.folder / name)
                kills.clear()
            if len(kills) == wanted:
                break
        return kills


def train_and_sample(path: Path, until: float) -> None:
    """Train, evaluate and save until a given time, and sample this process's memory, threads and files."""
    arena_max = -8  # glibc keeps arenas per thread; with a single arena, growth means a leak
    ctypes.CDLL(None).mallopt(arena_max, 1)
    logging.disable()
    model = Model(stripes_network(), Image(8, 8, 1), create_backend("auto"), 1)
    run, loader, began = path.parent / "runs" / "drift", Loader(stripes(640), 16), time.monotonic()
    run.mkdir()
    callbacks = [Checkpoint(every_iterations=5), HistoryWriter()]
    wrapper = ParallelWrapper(model, 4, 5, optimizer=Nesterov(0.001), callbacks=callbacks, log_every=5, run=run)
    with wrapper, path.open("w", buffering=1) as file:
        for fits in itertools.count(10, 10):
            for _ in range(10):
                wrapper.fit(loader, epochs=2, validation_data=loader)
            sample = {
                "s": round(time.monotonic() - began, 1),
                "fits": fits,
                "rss_mb": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6,
                "threads": len(os.listdir("/proc/self/task")),
                "descriptors": len(os.listdir("/proc/self/fd")),
            }
            file.write(json.dumps(sample) + "\n")
            if time.monotonic() > until:
                break


def drift(samples: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Compare the two halves of the samples after a warm-up. Faults are the figures that grew.

    Memory counts only after five minutes beyond the warm-up of two, because the allocator grows at first.
    """
    end_s = samples[-1]["s"]
    judged = end_s >= SETTLES_S + JUDGED_S
    settled = [each for each in samples if each["s"] >= (SETTLES_S if judged else end_s / 2)]
    halves = settled[: len(settled) // 2 + 1], settled[len(settled) // 2 :]
    memory = [round(median(each["rss_mb"] for each in half), 2) for half in halves]
    least = {name: [min(each[name] for each in half) for half in halves] for name in ("threads", "descriptors")}
    faults = [name for name, (before, after) in least.items() if after > before]
    faults += ["rss_mb"] if judged and memory[1] > 1.005 * memory[0] else []
    figures = {"rss_mb": memory, "rss_judged": judged, **least}
    return {"samples": len(samples), "fits": samples[-1]["fits"], "seconds": end_s, **figures, "faults": faults}


def soaked(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    until = time.monotonic() + 60 * options.minutes
    (folder / "runs").mkdir()
    watch = FORK.Process(target=train_and_sample, args=(folder / "drift.jsonl", until), daemon=True)
    if options.drift:
        watch.start()
    soak = Soak(folder / "runs", options.images, options.seed, until)
    soak.references = {mode: soak.undisturbed(mode) for mode in MODES}
    points = []
    with ProcessPoolExecutor(options.lanes, FORK) as lanes:
        for point in filter(None, lanes.map(soak.point, range(options.points))):
            print(point, flush=True)
            points.append(point)
    faults = [str(point) for point in points if point.faults]
    drifted: dict[str, Any] = {}
    if options.drift:
        code = ended(watch, max(0.0, until - time.monotonic()) + HANG_S)
        drifted = drift([json.loads(line) for line in (folder / "drift.jsonl").read_text().splitlines()])
        faults += [f"drift: {fault}" for fault in drifted["faults"]] + ([f"drift: ended with {code}"] if code else [])
    by_mode = {mode: dict(Counter(point.kind for point in points if point.mode == mode)) for mode in MODES}
    return {
        "what": "killed and resumed runs, compared bit for bit with undisturbed ones",
        "command": f"python -m tests.soak --minutes {options.minutes:g} --seed {options.seed}",
        "commit": commit(),
        "points": len(points),
        "kills": sum(len(point.kills) for point in points),
        "agreed": sum(not point.faults for point in points),
        "points_by_mode_and_kind": by_mode,
        "drift": drifted,
        "faults": faults if points else [*faults, "no points"],
        "environment": environment(),
    }


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="duration; no point starts after it")
    parser.add_argument("--points", type=int, default=10_000, help="greatest number of points")
    parser.add_argument("--lanes", type=int, default=1, help="points at a time")
    parser.add_argument("--images", type=int, default=1600, help="size of the training set of a run")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random moments and places")
    parser.add_argument("--no-drift", action="store_false", dest="drift", help="do not watch a process for leaks")
    parser.add_argument("--folder", type=Path, help="holds the runs and soak.json; by default in outputs/soak/")
    options = parser.parse_args(given)
    began = time.monotonic()
    folder = options.folder or ROOT / "outputs" / "soak" / datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    os.environ["CUPYNET_OFFLINE"] = "1"
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # OpenBLAS may be forked
    import_all()
    with tempfile.TemporaryDirectory() as elsewhere:
        os.chdir(elsewhere)  # nothing should be written to the working folder
        found = soaked(options, folder)
        found["faults"] += [f"written into the working folder: {path}" for path in os.listdir(elsewhere)]
        os.chdir(ROOT)
    write_json(folder / "soak.json", {**found, "seconds": round(time.monotonic() - began, 1)})
    if not found["faults"]:
        shutil.rmtree(folder / "runs")
    print(*found["faults"], f"{found['points']} points: {folder / 'soak.json'}", sep="\n")
    return int(bool(found["faults"]))


if __name__ == "__main__":
    sys.exit(main())
