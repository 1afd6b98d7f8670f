"""Measure the figures quoted in the README into outputs/records: `make records`, or `make records ARGS="speedrun"`.

Each record names its commands and its commit. Trees with changes and runs of other commits are rejected. On an idle
machine with two cores, all records take over two hours.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any, NamedTuple

from cupynet.backend.environment import commit

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "outputs" / "records"
# without the variables that select BLAS kernels
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}

FOUR = "epochs=5 seed=SEED workers=4 batch_size=32"  # 300,000 images, as in all modes
SLOWER = "optimizer.learning_rate.peak=0.1"  # for replicas that are rarely averaged
OUTER = "parallel.synchronizer.outer_optimizer.learning_rate=1.0 parallel.synchronizer.outer_optimizer.momentum=0.3"
MODES = {
    "one": "epochs=5 seed=SEED workers=1",
    "k1": f"{FOUR} parallel.averaging_frequency=1",
    "k3": FOUR,
    "k10": f"{FOUR} parallel.averaging_frequency=10 {SLOWER}",
    "k50": f"{FOUR} parallel.averaging_frequency=50 {SLOWER}",
    "gradients": f"{FOUR} parallel=gradients",
    "threshold": f"{FOUR} parallel=threshold",
    "diloco": f"{FOUR} parallel=diloco {SLOWER} {OUTER}",
    "hybrid": "epochs=5 seed=SEED workers=2 batch_size=64 parallel=hybrid",
}
TWIN = "model=twin_convolutions batch_size=512 parallel.pipeline.micro_batches=16 data.limit=30000"
PIPELINES = {  # name -> number of runs, settings
    "lenet": (5, "parallel=pipeline workers=1 epochs=1"),
    "twin_convolutions": (7, f"parallel=pipeline workers=1 epochs=1 {TWIN}"),
}
MEASUREMENTS = {
    "plan": "plan check=true link=10gbe",
    "bench-cpu": "bench peers=torch repeats=3",
    "bench-cpu-keras_cnn": "bench model=keras_cnn optimizer=adam peers=torch images=30000 data.train=30000 repeats=3",
    "bench-cpu-resnet8": "bench model=resnet8 optimizer=adam peers=torch images=12800 data.train=12800 repeats=3",
    "bench-cpu-bfloat16": "bench dtype=bfloat16 peers=torch repeats=3",
    "bench-cpu-resnet8-bfloat16": "bench model=resnet8 dtype=bfloat16 optimizer=adam peers=torch images=12800 "
    "data.train=12800 repeats=3",
}
FIGURES = (
    *("seed", "workers", "epochs", "images", "batch_size", "dtype", "backend", "synchronizer"),
    *("test_accuracy", "test_loss", "train_s", "compile_s", "images_per_s", "bytes_sent", "skipped_steps"),
)


class Comparison(NamedTuple):
    """Settings to train with each seed."""

    what: str
    variants: dict[str, str]  # name -> settings, with SEED for the seed; the first is the reference
    seeds: Sequence[int] = range(1, 6)


COMPARISONS = {
    "speedrun": Comparison(
        "experiment=mnist_speedrun: test accuracy and seconds of training (kernels compiled before, evaluation "
        "excluded); its settings were chosen on 10,000 held-out training images",
        {"speedrun": "experiment=mnist_speedrun seed=SEED"},
        (123, *range(1, 11)),
    ),
    "keras_cnn": Comparison(
        "experiment=keras_cnn on MNIST: test accuracy after the last epoch",
        {"keras_cnn": "experiment=keras_cnn seed=SEED"},
        range(1, 4),
    ),
    "accuracy": Comparison(
        "default settings: test accuracy after the last epoch",
        {f"{workers} workers": f"seed=SEED workers={workers}" for workers in (2, 4, 1)},
    ),
    "precision": Comparison(
        "default settings, two workers: test accuracy after the last epoch; steps left out by loss scaling",
        {dtype: f"seed=SEED workers=2 dtype={dtype}" for dtype in ("float", "half", "bfloat16")},
    ),
    "modes": Comparison(
        "five epochs whatever the mode: test accuracy after the last; bytes sent by all workers to each other", MODES
    ),
}


class Maker:
    """Makes records at one commit in `target`, from runs in `folder`. extra: settings for every training run."""

    def __init__(self, folder: Path, target: Path = RECORDS, extra: Sequence[str] = ()) -> None:
        self.folder, self.target, self.extra, self.commit = folder, target, tuple(extra), commit()
        self.environment: dict[str, Any] = {}
        self.runs = 0

    def run(self, name: str, *arguments: str) -> tuple[Path, float]:
        """Run one command in a new process. Return its folder and its peak memory in MB."""
        self.runs += 1
        folder = self.folder / f"{self.runs:04}"
        command = [sys.executable, "-m", "cupynet", name, *arguments, f"hydra.run.dir={folder}"]
        process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
        return folder, used.ru_maxrss / 1000

    def train(self, settings: str, **values: object) -> tuple[dict[str, Any], float]:
        """Return a run's summary and its peak memory. `values` replace names in capitals in its settings."""
        for name, value in values.items():
            settings = settings.replace(name.upper(), str(value))
        folder, held_mb = self.run("train", *settings.split(), "callbacks.progress.style=none", *self.extra)
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
        if summary["commit"] != self.commit:
            raise SystemExit(f"{folder}: was made at {summary['commit']}, not at {self.commit}")
        self.environment = summary["environment"]
        return summary, held_mb

    def save(self, name: str, record: dict[str, Any]) -> None:
        whole = {**record, "commit": self.commit, "environment": record.get("environment", self.environment)}
        (self.target / f"{name}.json").write_text(json.dumps(whole, indent=2) + "\n", "utf-8")


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": round(fmean(values), 6), "lowest": min(values), "highest": max(values)}


def compare(maker: Maker, name: str) -> None:
    what, variants, seeds = COMPARISONS[name]
    maker.train(f"{variants[next(iter(variants))]} data.limit=1000 epochs=1", seed=1)  # compiles the kernels
    found: dict[str, Any] = {}
    for variant, settings in variants.items():
        summaries = [maker.train(settings, seed=seed)[0] for seed in seeds]
        found[variant] = {
            "command": f"cupynet train {settings}",
            "test_accuracy": spread([each["test_accuracy"] for each in summaries]),
            "train_s": spread([each["train_s"] for each in summaries]),
            "runs": [{figure: each[figure] for figure in FIGURES} for each in summaries],
        }
        means = [each["test_accuracy"]["mean"] for each in found.values()]
        found[variant]["points_below_the_first"] = round(100 * (means[0] - means[-1]), 4)
    maker.save(name, {"what": what, "variants": found})


def pipeline(maker: Maker) -> None:
    """Compare two stages on two cores with the same stages run sequentially, and with the bound."""
    record: dict[str, Any] = {
        "what": "two stages on two cores, one epoch: speed relative to the same stages run sequentially, and the bound "
        "(total work / slowest stage) x m / (m + s - 1), the work of each stage as measured during training"
    }
    for name, (times, settings) in PIPELINES.items():
        found = [maker.train(settings)[0] for _ in range(times)]
        kept = ("speed_up", "bound", "work_s")
        runs = [{**{k: each["pipeline"][k] for k in kept}, "images_per_s": each["images_per_s"]} for each in found]
        record[name] = {
            "command": f"cupynet train {settings}",
            "runs": runs,
            "median_speed_up": round(median(run["speed_up"] for run in runs), 3),
            "median_speed_up_over_bound": round(median(run["speed_up"] / run["bound"] for run in runs), 3),
        }
    maker.save("pipeline", record)


def memory(maker: Maker, counts: Sequence[int] = (1, 2, 8, 16, 32)) -> None:
    """Measure peak memory by number of workers, and fit a line, since each worker needs the same."""
    settings = "workers=WORKERS epochs=1 data.limit=16384"
    held = {workers: maker.train(settings, workers=workers)[1] for workers in counts}
    each, start = linear_regression(list(held), list(held.values()))
    off = max(abs(start + each * workers - mb) / mb for workers, mb in held.items())
    record = {
        "what": "resident memory of a run at its peak, in MB, by workers; a line through them, and how far off that is "
        "at most",
        "command": f"cupynet train {settings}",
        "mb": held,
        "line": {"mb": round(start, 1), "mb_per_worker": round(each, 2), "off_by": round(off, 3)},
    }
    maker.save("memory", record)


def measure(maker: Maker, name: str) -> None:
    command = MEASUREMENTS[name]
    folder, _ = maker.run(*command.split())
    (result,) = folder.glob(f"{command.split()[0]}.json")
    maker.save(name, {"command": f"cupynet {command}", **json.loads(result.read_text("utf-8"))})


MAKERS: dict[str, Callable[[Maker], None]] = {
    "memory": memory,
    "pipeline": pipeline,
    **{name: partial(measure, name=name) for name in MEASUREMENTS},
    **{name: partial(compare, name=name) for name in COMPARISONS},
}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make records", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *MAKERS], metavar="RECORD", help=f"{', '.join(MAKERS)}; all")
    names = parser.parse_args(given).names or list(MAKERS)
    with tempfile.TemporaryDirectory() as folder:
        maker = Maker(Path(folder))
        if not str(maker.commit or "").isalnum():
            raise SystemExit(f"a record names a commit, and this is {maker.commit}: commit what has changed first")
        for name in names:
            print(f"== {name}", flush=True)
            MAKERS[name](maker)


if __name__ == "__main__":
    main()
