"""Measures what the README quotes, and writes it to outputs/records: `make records`, or `make records ARGS="speedrun"`.

Each record is made by commands that stand in it, at a commit that stands in it, and by nothing else on the machine: a
tree with changes is refused, as is a run that was made at another commit. On two cores all of them take over two
hours; `bench` takes PyTorch beside it where the interpreter has it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "outputs" / "records"
TRAIN = "cupynet train"
# what a user's machine does not set, and what decides which kernels of BLAS are taken
OWN = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}

FOUR = "epochs=5 seed=SEED workers=4 batch_size=32"  # 300,000 images, as all modes
SLOWER = "optimizer.learning_rate.peak=0.1"  # replicas that meet seldom need it
MODES = {
    "one": "epochs=5 seed=SEED workers=1",
    "k1": f"{FOUR} parallel.averaging_frequency=1",
    "k3": FOUR,
    "k10": f"{FOUR} parallel.averaging_frequency=10 {SLOWER}",
    "k50": f"{FOUR} parallel.averaging_frequency=50 {SLOWER}",
    "gradients": f"{FOUR} parallel=gradients",
    "threshold": f"{FOUR} parallel=threshold",
    "diloco": f"{FOUR} parallel=diloco {SLOWER} parallel.synchronizer.outer.learning_rate=1.0 "
    "parallel.synchronizer.outer.momentum=0.3",
    "hybrid": "epochs=5 seed=SEED workers=2 batch_size=64 parallel=hybrid",
}
PIPELINES = {
    "lenet": (5, "parallel=pipeline workers=1 epochs=1"),
    "twin_convolutions": (
        7,
        "parallel=pipeline workers=1 model=twin_convolutions batch_size=512 parallel.pipeline.micro_batches=16 "
        "epochs=1 data.limit=30000",
    ),
}
BENCHES = {
    "bench-cpu": "peers=torch repeats=3",
    "bench-cpu-keras_cnn": "model=keras_cnn optimizer=adam peers=torch images=30000 data.train=30000 repeats=3",
    "bench-cpu-resnet8": "model=resnet8 optimizer=adam peers=torch images=12800 data.train=12800 repeats=3",
}


class Done(NamedTuple):
    """One command that came to its end: what it left, and the most memory it held at once, in MB."""

    folder: Path
    held_mb: float

    def json(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_text("utf-8"))
        return found


class Maker:
    """Makes records at one commit, in a folder for what the commands leave.

    Args:
        folder: for the runs. target: for the records. extra: settings that every training is given besides.
    """

    def __init__(self, folder: Path, target: Path = RECORDS, extra: Sequence[str] = ()) -> None:
        self.folder, self.target, self.extra = folder, target, tuple(extra)
        self.commit, self._environment, self._count = commit(), {}, 0  # type: tuple[str, dict[str, Any], int]

    def run(self, name: str, *arguments: str) -> Done:
        """One command in a process of its own; SystemExit with what it said where it fails."""
        self._count += 1
        folder = self.folder / f"{self._count:04}"
        command = [sys.executable, "-m", "cupynet", name, *arguments, f"hydra.run.dir={folder}"]
        began = time.perf_counter()
        with (self.folder / "said").open("w+") as said:
            process = subprocess.Popen(command, cwd=ROOT, env=OWN, stdout=said, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            said.seek(0)
            if process.returncode:
                raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{said.read()[-2000:]}")
        print(f"{time.perf_counter() - began:7.1f} s  {' '.join(arguments)}", flush=True)
        return Done(folder, used.ru_maxrss / 1000)

    def train(self, settings: str, **values: object) -> tuple[dict[str, Any], float]:
        """The summary of one run, and the memory it held; settings with names in capitals, which values replace."""
        for name, value in values.items():
            settings = settings.replace(name.upper(), str(value))
        done = self.run("train", *settings.split(), "callbacks.progress.style=none", *self.extra)
        summary = done.json("summary.json")
        if summary["commit"] != self.commit:
            raise SystemExit(f"{done.folder}: was made at {summary['commit']}, not at {self.commit}")
        self._environment = summary["environment"]
        return summary, done.held_mb

    def save(self, name: str, record: dict[str, Any]) -> None:
        """Write a record, with commit and machine. They stand last, as what was measured is what is looked for."""
        whole = {**record, "commit": self.commit, "environment": record.get("environment", self._environment)}
        (self.target / f"{name}.json").write_text(json.dumps(whole, indent=2) + "\n", "utf-8")


def commit() -> str:
    """What is measured; SystemExit where files differ from it, but for records that were just made."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    status = ["git", "status", "--porcelain", "--", ".", ":!outputs/records"]
    changed = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if changed:
        raise SystemExit(f"a record names a commit, and these files differ from it:\n{changed}commit them first")
    return found.stdout.strip()


def spread(values: Sequence[float]) -> dict[str, float]:
    """The mean, to the sixth digit, and the ends."""
    return {"mean": round(fmean(values), 6), "lowest": min(values), "highest": max(values)}


def figures(summary: dict[str, Any], *names: str) -> dict[str, Any]:
    """What a record keeps of a run."""
    return {name: summary[name] for name in ("seed", "workers", "test_accuracy", "test_loss", *names)}


def accuracy(maker: Maker, seeds: Sequence[int] = range(1, 6)) -> None:
    """What the defaults come to, with one, two and four workers: 15 runs of 45 to 90 s."""
    runs = [figures(maker.train(f"seed={s} workers={w}")[0], "epochs", "images") for w in (2, 4, 1) for s in seeds]
    by = {str(w): spread([run["test_accuracy"] for run in runs if run["workers"] == w]) for w in (2, 4, 1)}
    what = "default settings: test accuracy after the last epoch"
    command = f"{TRAIN} seed=SEED workers=WORKERS"
    maker.save("accuracy", {"what": what, "command": command, "test_accuracy_by_workers": by, "runs": runs})


def precision(maker: Maker, seeds: Sequence[int] = range(1, 6)) -> None:
    """What 16 bits cost: five runs of float, half and bfloat16 each, 15 runs of a minute."""
    found: dict[str, Any] = {}
    for dtype in ("float", "half", "bfloat16"):
        kept = ("images", "skipped_steps")
        runs = [figures(maker.train(f"seed={s} workers=2 dtype={dtype}")[0], *kept) for s in seeds]
        reached = spread([run["test_accuracy"] for run in runs])
        found[dtype] = {"test_accuracy_of_five_seeds": reached, "runs": runs}
        below = found["float"]["test_accuracy_of_five_seeds"]["mean"] - reached["mean"]
        found[dtype]["points_below_float"] = round(100 * below, 4)
    what = "default settings, two workers: test accuracy after the last epoch; steps left out by loss scaling"
    command = f"{TRAIN} seed=SEED workers=2 dtype=DTYPE"
    maker.save("precision", {"what": what, "command": command, "dtypes": found})


def modes(maker: Maker, seeds: Sequence[int] = range(1, 6)) -> None:
    """Every way to train in parallel beside one worker: five runs of each."""
    found: dict[str, Any] = {}
    for name, settings in MODES.items():
        summaries = [maker.train(settings, seed=seed)[0] for seed in seeds]
        runs = [figures(summary, "bytes_sent") for summary in summaries]
        reached = spread([run["test_accuracy"] for run in runs])
        found[name] = {
            "command": f"{TRAIN} {settings}",
            "synchronizer": summaries[0]["synchronizer"],
            "test_accuracy_of_five_seeds": reached,
            "bytes_sent": runs[0]["bytes_sent"],
            "runs": runs,
        }
        below = found["one"]["test_accuracy_of_five_seeds"]["mean"] - reached["mean"]
        found[name]["points_below_one_worker"] = round(100 * below, 4)
    what = "five epochs whatever the mode: test accuracy after the last; bytes sent by all workers to each other"
    maker.save("modes", {"what": what, "modes": found})


def keras_cnn(maker: Maker, seeds: Sequence[int] = range(1, 4)) -> None:
    """Keras' tutorial network: three runs of 80 s."""
    kept = ("epochs", "train_s", "images_per_s", "dtype", "backend")
    runs = [figures(maker.train(f"experiment=keras_cnn seed={seed}")[0], *kept) for seed in seeds]
    reached = spread([run["test_accuracy"] for run in runs])
    what = "experiment=keras_cnn on MNIST: test accuracy after the last epoch"
    command = f"{TRAIN} experiment=keras_cnn seed=SEED"
    maker.save("keras_cnn", {"what": what, "command": command, "test_accuracy": reached, "runs": runs})


def speedrun(maker: Maker, seeds: Sequence[int] = (123, *range(1, 11))) -> None:
    """Above 99 % in seconds: eleven runs of 12 s, and one before them that compiles."""
    maker.train("experiment=mnist_speedrun data.limit=1000 epochs=1")
    kept = ("epochs", "batch_size", "train_s", "compile_s", "images_per_s")
    runs = [figures(maker.train(f"experiment=mnist_speedrun seed={seed}")[0], *kept) for seed in seeds]
    record: dict[str, Any] = {
        "what": "experiment=mnist_speedrun: test accuracy and seconds of training (kernels compiled before, evaluation "
        "excluded); its settings were chosen on 10,000 held-out training images",
        "command": f"{TRAIN} experiment=mnist_speedrun seed=SEED",
        "test_accuracy": spread([run["test_accuracy"] for run in runs]),
        "train_s": spread([run["train_s"] for run in runs]),
    }
    maker.save("speedrun", {**record, "runs": runs})


def pipeline(maker: Maker) -> None:
    """Two stages on two cores, times one worker, and the bound of that."""
    what = (
        "two stages on two cores, one epoch: times one worker, and the bound (total work / slowest stage) x "
        "m / (m + s - 1), the work of each stage as measured before training"
    )
    record: dict[str, Any] = {"what": what}
    for name, (times, settings) in PIPELINES.items():
        found = [maker.train(settings)[0] for _ in range(times)]
        kept = ("speed_up", "bound", "work_s")
        runs = [{**{k: each["pipeline"][k] for k in kept}, "images_per_s": each["images_per_s"]} for each in found]
        record[name] = {
            "command": f"{TRAIN} {settings}",
            "runs": runs,
            "median_speed_up": round(median(run["speed_up"] for run in runs), 3),
            "median_speed_up_over_bound": round(median(run["speed_up"] / run["bound"] for run in runs), 3),
        }
    maker.save("pipeline", record)


def memory(maker: Maker, counts: Sequence[int] = (1, 2, 8, 16, 32)) -> None:
    """The most memory that a run held, by its workers: a line, as each has the same."""
    settings = "workers=WORKERS epochs=1 data.limit=16384"
    held = {workers: maker.train(settings, workers=workers)[1] for workers in counts}
    mean_w, mean_mb = fmean(held), fmean(held.values())
    each = sum((w - mean_w) * (mb - mean_mb) for w, mb in held.items()) / sum((w - mean_w) ** 2 for w in held)
    start = mean_mb - each * mean_w
    off = max(abs(start + each * w - mb) / mb for w, mb in held.items())
    line = {"mb": round(start, 1), "mb_per_worker": round(each, 2), "off_by": round(off, 3)}
    what = (
        "resident memory of a run at its peak, in MB, by workers; a line through them, and how far off that is at most"
    )
    maker.save("memory", {"what": what, "command": f"{TRAIN} {settings}", "mb": held, "line": line})


def plan(maker: Maker) -> None:
    """What was predicted beside what was measured."""
    made = maker.run("plan", "check=true", "link=10gbe").json("plan.json")
    maker.save("plan", {"command": "cupynet plan check=true link=10gbe", **made})


def bench(maker: Maker) -> None:
    """Operations, steps and loops, with PyTorch beside them."""
    for name, settings in BENCHES.items():
        made = maker.run("bench", *settings.split()).json("bench.json")
        maker.save(name, {"command": f"cupynet bench {settings}", **made})


MAKERS: dict[str, Callable[[Maker], None]] = {
    each.__name__: each for each in (speedrun, memory, pipeline, plan, bench, keras_cnn, accuracy, precision, modes)
}


def main(given: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="make records", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *MAKERS], metavar="RECORD", help=f"{', '.join(MAKERS)}; all")
    names = parser.parse_args(given).names or list(MAKERS)
    with tempfile.TemporaryDirectory() as folder:
        maker = Maker(Path(folder))
        for name in names:
            print(f"== {name}", flush=True)
            MAKERS[name](maker)


if __name__ == "__main__":
    main()
