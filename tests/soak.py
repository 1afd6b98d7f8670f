"""Trains, kills, goes on and compares, for an hour: `make soak`, or `make soak MINUTES=5`.

Each point is a run of the whole command in a process of its own, forked from this one so that nothing has to be
imported again. It is killed (SIGKILL) at a random moment or at a place of the save path; as often as it takes, another
goes on with `resume=latest`; what is left in the end must be what a run that nobody disturbed left: weights, optimizer
state, synchronizer state and counters of every worker, the history but for its times, which checkpoints there are, and
no temporary file. The places are reached by replacing what `os`, `shutil` and `Path` offer, in the process that is to
die: the product has no hook for this. Beside it one process trains all the time, and its memory, threads, file
descriptors and buffers are watched. Exit code 0 where all was as it must be.

The file is long because one command, of which tests/test_soak.py runs a small sample, is in it.
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
M_ARENA_MAX = -8  # of glibc's malloc.h
SETTLES_S, JUDGED_S = 120, 300  # of the memory that is watched

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
# The places, and what each does; "moment" is any.
PLACES = {
    "temporary file open": "a file of a checkpoint is open, and empty",
    "mid-write": "half of a file is written",
    "before fsync": "a file is written, and not flushed",
    "before rename": "the folder is flushed, and still has its temporary name",
    "after rename": "the folder has its name",
    "before the parent's fsync": "the folder above is not flushed",
    "mid-replacement": "one of the same iteration was moved away, and nothing has its name",
    "mid-prune": "half of an old checkpoint is removed",
    "mid-removal": "what a killed process left is half removed by the next",
    "mid-results": "half of the final weights, or of the summary, is written",
    "mid-settings": "going on, half of the settings in .hydra/ is written",
}
MOMENTS = 6
KINDS = [*PLACES, *["moment"] * MOMENTS]
TIMES = re.compile(r"_s$|^bytes")  # bytes: of traffic, which those who go on have more of, and of the file of history
STRAY = re.compile(r"\.tmp-\d|\.old-\d|\.part$")


@dataclass
class Point:
    """What became of one point; `fault` says what was not as it must be, "" if nothing."""

    number: int
    mode: str
    kind: str
    kills: list[str]
    seconds: float
    fault: str


# a run, in a process of its own ---------------------------------------------------------------------------------------


def begun(arguments: Sequence[str], output: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """The process of `cupynet train ARGUMENTS`, which prints into a file; `prepare` is called in it before."""
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
    """How a process ended: its exit code, -9 where it was killed; "hung" where it had to be."""
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
    """Whether a process has ended, which `ended` is still to be told."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # it may take a moment until all threads are gone


def die_at(place: str, number: int) -> Callable[[], None]:
    """What replaces, in the process that calls it, what the save path calls, so that it dies there the nth time."""
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
        replaced = ".old-" in str(target) and any(Path(target).parent.glob("*.tmp-*"))
        if place == "mid-replacement" and replaced and now():
            die()
        if place == "after rename" and of_checkpoint and now():
            die()

    def removing(path: Any, *rest: Any, **named: Any) -> None:
        mark = {"mid-prune": ".old-", "mid-removal": ".tmp-"}.get(place, "\0")
        if mark in str(path) and os.path.isdir(path) and now():
            os.unlink(next(Path(path).iterdir()))
            die()
        real_rmtree(path, *rest, **named)

    def replace() -> None:
        Path.open = opening  # type: ignore[method-assign, assignment]
        os.fsync, os.rename = flushing, renaming  # type: ignore[assignment]
        shutil.rmtree = removing  # type: ignore[assignment]

    return replace


# what a run left ------------------------------------------------------------------------------------------------------


def timeless(value: Any) -> Any:
    """Without what no two runs have alike: times, and what follows from them."""
    if isinstance(value, dict):
        return {name: timeless(each) for name, each in value.items() if not TIMES.search(name)}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def left_by(folder: Path) -> dict[str, Any]:
    """What a finished run left, of all that two equal runs have alike: by name, as text or digests."""
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
    """Temporary files and folders that nobody will remove."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if STRAY.search(path.name))


def differences(folder: Path, wanted: dict[str, Any]) -> str:
    """What is not as the undisturbed run left it; "" where all is.

    A run that is killed in its last save has no other that would remove the checkpoint that this one was to replace.
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
    """An undisturbed run: what it left, how long it took, its saves, and its epochs, which each replace one."""

    left: dict[str, Any]
    seconds: float
    saves: int
    epochs: int


class Soak:
    """One use of the command, in a folder of its own.

    folder: where the runs are; those that failed stay there. images: of each run's training set. seed: of what is
    killed when. say: prints a line.
    """

    def __init__(self, folder: Path, images: int, seed: int, say: Callable[[str], None]) -> None:
        self.folder, self.images, self.seed, self.say = folder, images, seed, say
        self.references: dict[str, Reference] = {}

    def begin(self, name: str, mode: str, *more: str, at: Callable[[], None] = lambda: None) -> int:
        """The process of a run into the folder `name`, which goes on with what is there."""
        folder = f"hydra.run.dir={self.folder / name}"
        arguments = [*RUN, f"data.train={self.images}", *MODES[mode], *more, "resume=latest", folder]
        return begun(arguments, self.folder / f"{name}.txt", at)

    def refer(self, mode: str) -> str:
        """Make the undisturbed run; what is wrong with it, "" if nothing."""
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
        """Kill a run, go on with it, and compare."""
        began, rng, name = time.monotonic(), random.Random(f"{self.seed} {number}"), f"point-{number:04d}"
        folder, reference, kills = self.folder / name, self.references[mode], []

        def killed(place: str, most: int) -> bool:
            """Whether a run died there, at one of so many times that it comes by."""
            at = rng.randrange(most) + 1
            kills.append(f"{place} {at}")
            return ended(self.begin(name, mode, at=die_at(place, at))) == -9

        def killed_at_once_or_later() -> bool:
            """Whether a run died at some time; two in three have trained before. One that was faster begins anew."""
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
            left = (
                "after rename" if kind == "mid-settings" else "before rename"
            )  # something to go on with, or to remove
            there = killed(left, reference.saves) and killed(kind, 2 if kind == "mid-settings" else 1)
        else:
            often = {"mid-results": 2, "mid-replacement": reference.epochs, "mid-prune": reference.saves // 2}
            files = 4 if kind in ("temporary file open", "mid-write", "before fsync") else 1
            there = killed(kind, often.get(kind, files * reference.saves))
        if not there:
            fault = "was not killed"
        else:
            code = ended(self.begin(name, mode))
            fault = differences(folder, reference.left) if code == 0 else f"going on ended with {code}"
        if fault:
            fault += f" (see {folder} and {name}.txt beside it)"
        else:
            shutil.rmtree(folder)
            (self.folder / f"{name}.txt").unlink()
        return Point(number, mode, kind, kills, round(time.monotonic() - began, 2), fault)

    def points(self, count: int, lanes: int, until: float) -> list[Point]:
        """`count` points, or as many as there is time for, each in one of so many processes at once."""
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
        """In a process of its own, which ends here."""
        code = 1
        try:
            with path.open("w", buffering=1) as file:
                for number in numbers:
                    if time.monotonic() > until:
                        break
                    mode, kind = what(number)
                    point = self.point(number, mode, kind)
                    file.write(json.dumps(asdict(point)) + "\n")
                    told = "agrees" if not point.fault else f"FAILED: {point.fault}"
                    self.say(
                        f"{number + 1:5d}  {mode:21}  {', then '.join(point.kills):58}  {told}  {point.seconds:.1f} s"
                    )
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def repeats(self, count: int) -> int:
        """How many different outcomes so many equal runs have."""
        mode, seen = "averaging, 4 workers", set()
        for number in range(count):
            name = f"repeat-{number}"
            code = ended(self.begin(name, mode))
            seen.add(json.dumps(left_by(self.folder / name)) if code == 0 else f"{code} of {number}")
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return len(seen)

    def apart(self) -> float:
        """The greatest relative distance between the weights that NumPy and numba train in double, in one epoch."""
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


def what(number: int) -> tuple[str, str]:
    """Mode and kind of a point: of any 4 x 17 after each other each mode has each kind once, and of 12 all places."""
    return list(MODES)[number % len(MODES)], KINDS[number % len(KINDS)]


# drift ----------------------------------------------------------------------------------------------------------------


def watched(path: Path, until: float) -> int:
    """The process that trains, evaluates and saves until then, and writes down now and then what it occupies."""
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

    # glibc keeps memory for each of the threads that come and go, for eight times as many as there are cores: with one
    # pool for all, what is seen to grow is what was not given back
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
    """A small network of the layers that LeNet has."""
    from cupynet.nn import Conv2D, Dense, MaxPool2D, Sequential

    layers = {"conv": Conv2D(4, 3), "pool": MaxPool2D(2), "dense": Dense(16, "relu"), "output": Dense(4)}
    return Sequential(layers)


def drift(path: Path) -> dict[str, Any]:
    """What changed after the first two minutes, or the first fifth; `fault` says what must not have, "" if nothing.

    For a minute the allocator still takes more for threads that come and go: memory is judged where it was watched for
    five more.
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
    """How many of each kind there were, and how many failed, by mode."""
    count, failed = Counter((point.kind, point.mode) for point in points), Counter()
    failed.update((point.kind, point.mode) for point in points if point.fault)
    lines = [f"{'killed at':28}" + "".join(f"{mode:>23}" for mode in MODES)]
    for kind in dict.fromkeys(KINDS):
        cells = [f"{count[kind, mode] - failed[kind, mode]} of {count[kind, mode]}" for mode in MODES]
        lines.append(f"{kind:28}" + "".join(f"{cell:>23}" for cell in cells))
    return lines


def warm() -> None:
    """Import what a run needs, and load its kernels, so that those that are forked have them. It starts no thread."""
    import cupynet.commands.train  # noqa: F401
    from cupynet import Image, Model, create_backend
    from cupynet.optim import Nesterov
    from cupynet.training import Replica
    from tests.support.warm import import_all

    import_all()
    Replica(Model(network(), Image(28, 28, 1), create_backend("auto"), 1), Nesterov(0.01)).warm_up(16)


def main(given: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long; points end when this is over")
    parser.add_argument("--points", type=int, default=100_000, help="at most so many kills")
    parser.add_argument("--repeats", type=int, default=20, help="equal runs, which must leave the same")
    parser.add_argument("--lanes", type=int, default=1, help="how many points at a time")
    parser.add_argument("--images", type=int, default=1600, help="of the training set of a run")
    parser.add_argument("--seed", type=int, default=1, help="of what is killed when")
    parser.add_argument("--no-drift", action="store_true", help="do without the process that is watched")
    parser.add_argument("--folder", type=Path, help="where to work and write soak.json; default: in outputs/soak/")
    asked = parser.parse_args(given)
    began = time.monotonic()
    until = began + 60 * asked.minutes
    folder = asked.folder or ROOT / "outputs" / "soak" / datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["CUPYNET_OFFLINE"] = "1"
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # OpenBLAS may be forked
    warm()

    def say(line: str) -> None:
        print(line, flush=True)

    with tempfile.TemporaryDirectory() as elsewhere:
        os.chdir(elsewhere)  # nothing is to be written here
        soak = Soak(folder.resolve(), asked.images, asked.seed, say)
        watch = None if asked.no_drift else watched(folder.resolve() / "drift.jsonl", until)
        different = soak.repeats(asked.repeats)
        say(f"{asked.repeats} repeats of one run: {different} outcome{'s' * (different > 1)}")
        distance = soak.apart()
        say(f"NumPy and numba in double: {distance:.1e} apart")
        faults = [f"{mode}: {fault}" for mode in MODES if (fault := soak.refer(mode))]
        faults += [f"{different} outcomes of equal runs"] if different > 1 else []
        faults += [f"NumPy and numba are {distance} apart"] if not distance < 1e-9 else []
        points = soak.points(asked.points, asked.lanes, until) if not faults else []
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
    record(folder / "soak.json", asked, points, different, distance, drifted, faults, time.monotonic() - began)
    for fault in faults:
        say(f"FAILED: {fault}")
    if not faults:  # else what failed is to be looked at
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in ("soak.json", "drift.jsonl"):
                path.unlink()
    say(f"{len(points)} points, {len(faults)} faults: {folder / 'soak.json'}")
    return 1 if faults or not points else 0


def record(
    path: Path,
    asked: argparse.Namespace,
    points: Sequence[Point],
    different: int,
    distance: float,
    drifted: dict[str, Any],
    faults: Sequence[str],
    seconds: float,
) -> None:
    """Write down what was done and what came of it."""
    from cupynet.backend.environment import commit, environment
    from cupynet.core.files import write_json

    by_kind: dict[str, dict[str, int]] = {}
    for point in points:
        by_kind.setdefault(point.mode, {}).setdefault(point.kind, 0)
        by_kind[point.mode][point.kind] += 1
    found = {
        "what": "runs that were killed and gone on with, compared bit for bit with undisturbed ones",
        "command": f"python -m tests.soak --minutes {asked.minutes:g} --seed {asked.seed}",
        "commit": commit(),
        "seconds": round(seconds, 1),
        "points": len(points),
        "kills": sum(len(point.kills) for point in points),
        "agreed": sum(not point.fault for point in points),
        "points_by_mode_and_kind": by_kind,
        "repeats": {"runs": asked.repeats, "outcomes": different},
        "numpy_and_numba_apart_in_double": distance,
        "drift": drifted,
        "faults": list(faults),
        "environment": environment(),
    }
    write_json(path, found)


if __name__ == "__main__":
    sys.exit(main())
