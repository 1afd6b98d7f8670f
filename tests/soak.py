"""Train, kill, resume and compare, for an hour: `make soak`, or `make soak MINUTES=5`.

Each point is a run of `cupynet train` in a forked process. It is killed (SIGKILL) at a random moment, or at a place of
the save path, and resumed with `resume=latest`, possibly several times. The result must equal that of an undisturbed
run: weights, optimizer and synchronizer state, the counters of every worker, the history except its times, and the list
of checkpoints. No temporary file may be left. The places are reached by patching `os`, `shutil` and `Path` in the
process that dies. Meanwhile another process trains all the time, and its memory, threads, file descriptors and buffers
are watched. The exit code is 0 if there was no fault.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HANG_S = 120  # a run takes a second or two
M_ARENA_MAX = -8  # from glibc's malloc.h
SETTLES_S, JUDGED_S = 120, 300  # memory is compared after the first, for at least the second

RUN = [
    "data=synthetic",
    "data.test=64",
    "epochs=3",
    "batch_size=16",
    "report_every_iterations=5",
    "callbacks.progress.style=none",
    "callbacks.checkpoint.every_iterations=5",
    "callbacks.checkpoint.keep_every=4",
    "model.layers.conv1.filters=4",
    "model.layers.conv2.filters=6",
    "model.layers.dense1.units=16",
]
MODES = {
    "averaging, 1 worker": ["workers=1", "parallel.averaging_frequency=5"],
    "averaging, 4 workers": ["workers=4", "parallel.averaging_frequency=5"],
    "gradients, 1 worker": ["workers=1", "parallel=gradients"],
    "gradients, 4 workers": ["workers=4", "parallel=gradients"],
}
# The places to kill a run; "moment" is a random moment.
PLACES = {
    "temporary file open": "a file of a checkpoint is open, and empty",
    "mid-write": "half of a file is written",
    "before fsync": "a file is written, and not flushed",
    "before rename": "the folder is flushed, and still has its temporary name",
    "after rename": "the folder has its name",
    "before the parent's fsync": "the parent folder is not flushed",
    "mid-prune": "half of an old checkpoint is removed",
    "mid-removal": "the next process has half removed the files of a killed one",
    "mid-results": "half of the final weights, or of the summary, is written",
    "mid-settings": "a resumed run has written half of the settings in .hydra/",
}
MOMENTS = 7
KINDS = [*PLACES, *["moment"] * MOMENTS]
# times; bytes of traffic (a resumed run sends more) and of the history file; the random identity of a run
VARIES = re.compile(r"_s$|^bytes|^identity$")
STRAY = re.compile(r"\.tmp-\d|\.old-\d|\.part$")


@dataclass
class Point:
    """The result of one point. `fault` is "" if the run resumed correctly."""

    number: int
    mode: str
    kind: str
    kills: list[str]
    seconds: float
    fault: str


# a run in a forked process ---------------------------------------------------------------------------------------


def begun(arguments: Sequence[str], output: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Fork a process that calls `prepare`, then runs `cupynet train` with its output in a file. Return its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        from cupynet.commands import train

        sys.argv = ["cupynet", *arguments]
        prepare()
        train.main()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int, kill_after_s: float | None = None) -> int | str:
    """Wait for a process. Return its exit code, -9 if it was killed, or "hung" if it did not end in time."""
    began, limit_s = time.monotonic(), HANG_S if kill_after_s is None else kill_after_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() - began > limit_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hung" if kill_after_s is None else -9
        time.sleep(0.002)


def exited(pid: int) -> bool:
    """Return True if a process has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # until all threads are gone


def die_at(place: str, number: int) -> Callable[[], None]:
    """Return a function that patches this process so that it dies when it reaches `place` for the nth time."""
    seen = [0]

    def now() -> bool:
        seen[0] += 1
        return seen[0] == number

    real_open, real_fsync, real_rename, real_rmtree = Path.open, os.fsync, os.rename, shutil.rmtree

    def half_written(file: Any) -> Any:
        real_write = file.write

        class Half:
            def __enter__(self) -> Half:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def write(self, content: Any) -> int:
                real_write(content[: len(content) // 2])
                file.flush()
                die()
                return 0

        return Half()

    def opening(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        file = real_open(path, mode, *rest, **named)
        if not path.name.endswith(".part") or mode[0] not in "wx":
            return file
        if ".tmp-" in path.parent.name:
            written = {"temporary file open", "mid-write"}
        else:
            written = {"mid-settings" if path.parent.name == ".hydra" else "mid-results"}
        if place in written and now():
            if place == "temporary file open":
                die()
            return half_written(file)
        return file

    def flushing(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if place == "before fsync" and ".tmp-" in name and not os.path.isdir(name) and now():
            die()
        if place == "before the parent's fsync" and name.endswith("/checkpoints") and now():
            die()
        real_fsync(descriptor)

    def renaming(source: Any, target: Any, **named: Any) -> None:
        of_checkpoint = ".tmp-" in str(source)
        if place == "before rename" and of_checkpoint and now():
            die()
        real_rename(source, target, **named)
        if place == "after rename" and of_checkpoint and now():
            die()

    def removing(path: Any, *rest: Any, **named: Any) -> None:
        own = str(path).endswith(f".tmp-{os.getpid()}")
        removed = place == ("mid-prune" if own else "mid-removal") and ".tmp-" in str(path)
        if removed and os.path.isdir(path) and now():
            os.unlink(next(Path(path).iterdir()))
            die()
        real_rmtree(path, *rest, **named)

    def replace() -> None:
        Path.open = opening  # type: ignore[method-assign, assignment]
        os.fsync, os.rename = flushing, renaming  # type: ignore[assignment]
        shutil.rmtree = removing  # type: ignore[assignment]

    return replace


# results of a run ----------------------------------------------------------------------------------------------------


def timeless(value: Any) -> Any:
    """Remove what differs between equal runs."""
    if isinstance(value, dict):
        history = {name: json.loads(each) for name, each in value.items() if name == "rows"}  # of `Rows`, as text
        return {name: timeless(each) for name, each in (value | history).items() if not VARIES.search(name)}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def left_by(folder: Path) -> dict[str, Any]:
    """Return everything that two equal runs have in common, by name, as text or digests."""
    from cupynet.core.files import digest
    from cupynet.runs.checkpoints import Checkpoints

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


def stray(folder: Path) -> list[str]:
    """Return the temporary files and folders that are left."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if STRAY.search(path.name))


def differences(folder: Path, wanted: dict[str, Any]) -> str:
    """Return how a run differs from the undisturbed one; "" if it does not.

    A run killed in its last save may keep the checkpoint that this save would have removed.
    """
    try:
        found = left_by(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    more = sorted(set(found["checkpoints"]) - set(wanted["checkpoints"]))
    if len(more) == 1 and more[0] < wanted["checkpoints"][-1]:
        found["checkpoints"].remove(more[0])
    other = [name for name in wanted if found[name] != wanted[name]]
    temporary = stray(folder)
    parts = [f"other {', '.join(other)}"] if other else []
    return "; ".join([*parts, *([f"left over: {', '.join(temporary)}"] if temporary else [])])


# points ---------------------------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """An undisturbed run: its results, its duration, its number of saves, and its number of epochs."""

    left: dict[str, Any]
    seconds: float
    saves: int
    epochs: int


class Soak:
    """One soak.

    Args:
        folder: holds the runs; failed ones stay there.
        images: size of the training set of each run.
        seed: of the random choice of moments and places.
        say: prints a line.
    """

    def __init__(self, folder: Path, images: int, seed: int, say: Callable[[str], None]) -> None:
        self.folder, self.images, self.seed, self.say = folder, images, seed, say
        self.references: dict[str, Reference] = {}

    def begin(self, name: str, mode: str, *more: str, at: Callable[[], None] = lambda: None) -> int:
        """Start a run in the folder `name`, which resumes if there is a checkpoint. Return its pid."""
        folder = f"hydra.run.dir={self.folder / name}"
        arguments = [*RUN, f"data.train={self.images}", *MODES[mode], *more, "resume=latest", folder]
        return begun(arguments, self.folder / f"{name}.txt", at)

    def refer(self, mode: str) -> str:
        """Make the undisturbed run. Return what is wrong with it; "" if nothing is."""
        name, began = mode.replace(", ", "-").replace(" ", "-"), time.monotonic()
        code = ended(self.begin(name, mode))
        if code != 0:
            return f"an undisturbed run ended with {code}: {self.folder / name}.txt"
        left, seconds = left_by(self.folder / name), time.monotonic() - began
        saves = json.loads(left["counters"])["workers"][0]["numbers"]["callbacks"]["Checkpoint"]["written"]
        self.references[mode] = Reference(left, seconds, int(saves), int(left["summary"][0]))
        temporary = stray(self.folder / name)
        return f"left over: {temporary}" if temporary else ""

    def point(self, number: int, mode: str, kind: str) -> Point:
        """Kill a run, resume it, and compare."""
        began, rng, name = time.monotonic(), random.Random(f"{self.seed} {number}"), f"point-{number:04d}"
        folder, reference, kills = self.folder / name, self.references[mode], []

        def killed(place: str, most: int) -> bool:
            """Run until it dies at this place, at a random one of `most` visits. Return False if it did not."""
            at = rng.randrange(most) + 1
            kills.append(f"{place} {at}")
            return ended(self.begin(name, mode, at=die_at(place, at))) == -9

        def killed_at_once_or_later() -> bool:
            """Kill a run at a random moment, two in three after their first save. Retry if the run was faster."""
            for _ in range(9):
                pid, trained = self.begin(name, mode), rng.random() < 0.67
                while trained and not (folder / "checkpoints").exists() and not exited(pid):
                    time.sleep(0.002)
                after_s = rng.uniform(0, reference.seconds * (0.6 if trained else 1))
                if ended(pid, after_s) == -9:
                    kills.append(f"{after_s:.3f} s after {'its first save' if trained else 'its start'}")
                    return True
                shutil.rmtree(folder)
                kills.clear()
            return False

        if kind == "moment":
            there = killed_at_once_or_later() and (rng.random() < 0.5 or killed_at_once_or_later())
        elif kind in ("mid-removal", "mid-settings"):
            left = "after rename" if kind == "mid-settings" else "before rename"  # something to resume, or to remove
            there = killed(left, reference.saves) and killed(kind, 2 if kind == "mid-settings" else 1)
        else:
            often = {"mid-results": 2, "mid-prune": reference.saves // 2}
            files = 4 if kind in ("temporary file open", "mid-write", "before fsync") else 1
            there = killed(kind, often.get(kind, files * reference.saves))
        if not there:
            fault = "was not killed"
        else:
            code = ended(self.begin(name, mode))
            fault = differences(folder, reference.left) if code == 0 else f"resuming ended with {code}"
        if fault:
            fault += f" (see {folder} and {name}.txt)"
        else:
            shutil.rmtree(folder)
            (self.folder / f"{name}.txt").unlink()
        return Point(number, mode, kind, kills, round(time.monotonic() - began, 2), fault)

    def points(self, count: int, lanes: int, until: float) -> list[Point]:
        """Run `count` points, or as many as there is time for, in `lanes` processes."""
        pids = []
        for lane in range(lanes):
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                self._lane(range(lane, count, lanes), self.folder / f"lane-{lane}.jsonl", until)
            pids.append(pid)
        failed = [pid for pid in pids if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
        lines = [
            line for lane in range(lanes) for line in (self.folder / f"lane-{lane}.jsonl").read_text().splitlines()
        ]
        found = sorted((Point(**json.loads(line)) for line in lines), key=lambda point: point.number)
        return [*found, *(Point(-1, "", "lane", [], 0, f"process {pid} failed") for pid in failed)]

    def _lane(self, numbers: range, path: Path, until: float) -> None:
        """Run points in a forked process, and exit."""
        code = 1
        try:
            with path.open("w", buffering=1) as file:
                for number in numbers:
                    if time.monotonic() > until:
                        break
                    mode, kind = case(number)
                    point = self.point(number, mode, kind)
                    file.write(json.dumps(asdict(point)) + "\n")
                    result = "agrees" if not point.fault else f"FAILED: {point.fault}"
                    kills = ", then ".join(point.kills)
                    self.say(f"{number + 1:5d}  {mode:21}  {kills:58}  {result}  {point.seconds:.1f} s")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def repeats(self, count: int) -> int:
        """Return the number of different outcomes of `count` equal runs."""
        mode, seen = "averaging, 4 workers", set()
        for number in range(count):
            name = f"repeat-{number}"
            code = ended(self.begin(name, mode))
            seen.add(json.dumps(left_by(self.folder / name)) if code == 0 else f"{code} of {number}")
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return len(seen)

    def apart(self) -> float:
        """Return the greatest relative difference between weights trained with NumPy and numba, in double."""
        import numpy as np

        from cupynet.core.files import load_weights

        found = []
        for backend in ("numpy", "numba"):
            more = (f"backend={backend}", "dtype=double", "epochs=1")
            code = ended(self.begin(backend, "averaging, 4 workers", *more))
            if code != 0:
                return float("inf")
            found.append(load_weights(self.folder / backend / "weights.safetensors"))
        one, other = found
        return max(float(np.abs(one[name] - other[name]).max() / np.abs(one[name]).max()) for name in one)


def case(number: int) -> tuple[str, str]:
    """Return mode and kind of a point: 4 x 17 points combine each mode with each kind, and 12 reach all places."""
    return list(MODES)[number % len(MODES)], KINDS[number % len(KINDS)]


# drift ----------------------------------------------------------------------------------------------------------------


def watched(path: Path, until: float) -> int:
    """Fork a process that trains, evaluates and saves until a time, and samples its memory, threads and files."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _train_and_sample(path, until)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _train_and_sample(path: Path, until: float) -> None:
    import ctypes
    import logging

    import numpy as np

    from cupynet import Image, Model, create_backend
    from cupynet.data import Dataset, Loader
    from cupynet.optim import Nesterov
    from cupynet.training import Checkpoint, History, ParallelWrapper
    from tests.support.workspaces import workspaces

    # glibc keeps an arena for each of many threads: with a single arena, growth means a leak
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    logging.disable()
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 4, 640)
    images = rng.integers(0, 256, (640, 12, 12, 1)).astype(np.uint8)
    data = Dataset("noise", images, labels, 4)
    model = Model(network(), Image(12, 12, 1), create_backend("auto"), 1)
    run = path.with_suffix("")
    run.mkdir()
    callbacks = [Checkpoint(every_iterations=5), History()]
    wrapper = ParallelWrapper(model, 4, 5, optimizer=Nesterov(0.001), callbacks=callbacks, report_every=5, run=run)
    loader, held_out = Loader(data, 16), Loader(data, 16, shuffle=False)
    with wrapper, path.open("w", buffering=1) as file:
        began, fits, page = time.monotonic(), 0, os.sysconf("SC_PAGE_SIZE")
        while time.monotonic() < until:
            wrapper.fit(loader, 2, evaluate_on=held_out, split="validation")
            fits += 1
            if fits % 10 == 0:
                sample = {
                    "s": round(time.monotonic() - began, 1),
                    "fits": fits,
                    "rss_mb": int(Path("/proc/self/statm").read_text().split()[1]) * page / 1e6,
                    "threads": len(os.listdir("/proc/self/task")),
                    "python_threads": threading.active_count(),
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "pool_bytes": sum(each.allocated_bytes for each in workspaces(wrapper)),
                }
                file.write(json.dumps(sample) + "\n")


def network() -> Any:
    """Return a small network with the layers of LeNet."""
    from cupynet.nn import Conv2D, Dense, MaxPool2D, Sequential

    layers = {"conv": Conv2D(4, 3), "pool": MaxPool2D(2), "dense": Dense(16, "relu"), "output": Dense(4)}
    return Sequential(layers)


def drift(path: Path) -> dict[str, Any]:
    """Compare the first and the last samples after a warm-up. `fault` is "" if nothing grew.

    Memory counts only if it was watched for five minutes after the warm-up of two: the allocator grows at first.
    """
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    if len(samples) < 3:
        return {"samples": len(samples), "fault": "too few samples to tell"}
    long_enough = samples[-1]["s"] >= SETTLES_S + JUDGED_S
    begins_s = max(SETTLES_S, samples[-1]["s"] / 5) if long_enough else samples[-1]["s"] / 2
    settled = [each for each in samples if each["s"] >= begins_s]
    tenth = max(1, len(settled) // 10)
    first, last = (median(each["rss_mb"] for each in some) for some in (settled[:tenth], settled[-tenth:]))
    ranges = {
        name: [min(each[name] for each in settled), max(each[name] for each in settled)]
        for name in ("threads", "python_threads", "descriptors", "pool_bytes")
    }
    growth = last / first - 1
    faults = [f"{name} from {low} to {high}" for name, (low, high) in ranges.items() if low != high]
    faults += [f"memory grew by {growth:.2%}"] if long_enough and growth >= 0.01 else []
    return {
        "samples": len(samples),
        "fits": samples[-1]["fits"],
        "seconds": samples[-1]["s"],
        "rss_mb": [round(first, 2), round(last, 2)],
        "rss_growth": round(growth, 5),
        "rss_judged": long_enough,
        **ranges,
        "fault": "; ".join(faults),
    }


# the command ----------------------------------------------------------------------------------------------------------


def table(points: Sequence[Point]) -> list[str]:
    """Return a table of the points by kind and mode."""
    count, failed = Counter((point.kind, point.mode) for point in points), Counter()
    failed.update((point.kind, point.mode) for point in points if point.fault)
    lines = [f"{'killed at':28}" + "".join(f"{mode:>23}" for mode in MODES)]
    for kind in dict.fromkeys(KINDS):
        cells = [f"{count[kind, mode] - failed[kind, mode]} of {count[kind, mode]}" for mode in MODES]
        lines.append(f"{kind:28}" + "".join(f"{cell:>23}" for cell in cells))
    return lines


def warm() -> None:
    """Import the packages of a run and load its kernels, for the forked processes. Starts no thread."""
    import cupynet.commands.train  # noqa: F401
    from cupynet import Image, Model, create_backend
    from cupynet.optim import Nesterov
    from cupynet.training import Replica
    from cupynet.training.warm_up import warm_up
    from tests.support.warm import import_all

    import_all()
    warm_up(Replica(Model(network(), Image(28, 28, 1), create_backend("auto"), 1), Nesterov(0.01)), 16)


def main(given: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="duration; no point starts after it")
    parser.add_argument("--points", type=int, default=100_000, help="greatest number of points")
    parser.add_argument("--repeats", type=int, default=20, help="number of equal runs to compare")
    parser.add_argument("--lanes", type=int, default=1, help="points at a time")
    parser.add_argument("--images", type=int, default=1600, help="size of the training set of a run")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random moments and places")
    parser.add_argument("--no-drift", action="store_true", help="do not watch a process for leaks")
    parser.add_argument("--folder", type=Path, help="holds the runs and soak.json; by default in outputs/soak/")
    options = parser.parse_args(given)
    began = time.monotonic()
    until = began + 60 * options.minutes
    folder = options.folder or ROOT / "outputs" / "soak" / datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["CUPYNET_OFFLINE"] = "1"
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # OpenBLAS may be forked
    warm()

    def say(line: str) -> None:
        print(line, flush=True)

    with tempfile.TemporaryDirectory() as elsewhere:
        os.chdir(elsewhere)  # nothing should be written here
        soak = Soak(folder.resolve(), options.images, options.seed, say)
        watch = None if options.no_drift else watched(folder.resolve() / "drift.jsonl", until)
        different = soak.repeats(options.repeats)
        say(f"{options.repeats} repeats of one run: {different} outcome{'s' * (different > 1)}")
        distance = soak.apart()
        say(f"NumPy and numba in double: {distance:.1e} apart")
        faults = [f"{mode}: {fault}" for mode in MODES if (fault := soak.refer(mode))]
        faults += [f"{different} outcomes of equal runs"] if different > 1 else []
        faults += [f"NumPy and numba are {distance} apart"] if not distance < 1e-9 else []
        points = soak.points(options.points, options.lanes, until) if not faults else []
        faults += [f"point {point.number + 1}: {point.fault}" for point in points if point.fault]
        drifted: dict[str, Any] = {}
        if watch is not None:
            code = ended(watch, max(0.0, until - time.monotonic()) + HANG_S)
            drifted = drift(folder / "drift.jsonl") if code == 0 else {"fault": f"ended with {code}"}
            faults += [f"drift: {drifted['fault']}"] if drifted["fault"] else []
        faults += [f"written into the working folder: {found}" for found in os.listdir(elsewhere)]
        os.chdir(ROOT)
    for line in table(points):
        say(line)
    if drifted:
        say(f"drift: {json.dumps(drifted)}")
    record(folder / "soak.json", options, points, different, distance, drifted, faults, time.monotonic() - began)
    for fault in faults:
        say(f"FAILED: {fault}")
    if not faults:  # otherwise keep the failed runs
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in ("soak.json", "drift.jsonl"):
                path.unlink()
    say(f"{len(points)} points, {len(faults)} faults: {folder / 'soak.json'}")
    return 1 if faults or not points else 0


def record(
    path: Path,
    options: argparse.Namespace,
    points: Sequence[Point],
    different: int,
    distance: float,
    drifted: dict[str, Any],
    faults: Sequence[str],
    seconds: float,
) -> None:
    """Write the record of a soak."""
    from cupynet.backend.environment import commit, environment
    from cupynet.core.files import write_json

    by_kind: dict[str, dict[str, int]] = {}
    for point in points:
        by_kind.setdefault(point.mode, {}).setdefault(point.kind, 0)
        by_kind[point.mode][point.kind] += 1
    found = {
        "what": "killed and resumed runs, compared bit for bit with undisturbed ones",
        "command": f"python -m tests.soak --minutes {options.minutes:g} --seed {options.seed}",
        "commit": commit(),
        "seconds": round(seconds, 1),
        "points": len(points),
        "kills": sum(len(point.kills) for point in points),
        "agreed": sum(not point.fault for point in points),
        "points_by_mode_and_kind": by_kind,
        "repeats": {"runs": options.repeats, "outcomes": different},
        "numpy_and_numba_apart_in_double": distance,
        "drift": drifted,
        "faults": list(faults),
        "environment": environment(),
    }
    write_json(path, found)


if __name__ == "__main__":
    sys.exit(main())
