"""`fast_dev_run`: a few batches of everything, whose figures are never taken for results."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import config
from cupynet.commands import evaluate, find_rate, plan
from cupynet.config.schema import PlanSettings, RateSettings, Settings, read
from cupynet.data import Dataset, as_loader
from cupynet.runs.run import Run
from tests.support.commands import Call, run
from tests.support.refusals import refused
from tests.support.resumed_runs import trained
from tests.support.settings import MINIMAL
from tests.support.shards import write_shards
from tests.support.training import small_dataset

SMALL = ["data=synthetic", "data.train=600", "data.test=200", "data.validation=100", "batch_size=16", "model=mlp"]


def test_a_fast_dev_run_is_evaluated_on_its_own_images(tmp_path: Path, call: Call) -> None:
    trained(tmp_path, *SMALL, "workers=2", "fast_dev_run=true")
    again = call(evaluate.main, tmp_path, "--json")
    assert json.loads(again.out)["loss"] == Run(tmp_path).summary().scores.test_loss


def test_a_fast_dev_run_is_complete_and_stays_one(tmp_path: Path) -> None:
    stdout, stderr = run(tmp_path, *SMALL, "workers=2", "fast_dev_run=true", "hydra.run.dir=trial")
    assert stderr == "" and stdout.count("FAST DEV RUN   ") == 1
    before = (tmp_path / "trial" / "summary.json").read_bytes()
    run(tmp_path, "resume=trial")
    assert (tmp_path / "trial" / "summary.json").read_bytes() == before
    _, stderr = run(tmp_path, "resume=trial", "fast_dev_run=false", code=2)
    assert stderr.startswith("cupynet: fast_dev_run=false: ")


@pytest.mark.parametrize("batches", [1, 3])
def test_a_fast_dev_run_trains_and_evaluates_a_few_batches(batches: int, tmp_path: Path) -> None:
    """The trial writes the same files as any run."""
    trained(tmp_path, *SMALL, "workers=2", f"fast_dev_run={batches}", "epochs=7")
    trial = Run(tmp_path)
    summary = trial.summary()
    assert summary.setup.fast_dev_run == batches and "a fast dev run" in summary.setup.dataset
    assert (summary.outcome.images, summary.outcome.iterations, summary.outcome.epochs) == (32 * batches, batches, 1)
    assert summary.scores.test is not None and summary.scores.test["samples"] == 32 * batches
    assert summary.outcome.advice is None and trial.trial_path.is_file()
    assert [row["kind"] for row in trial.history()] == ["report"] * batches + ["epoch"]
    assert list(trial.checkpoints_path.glob("step-*")) and trial.weights_path.is_file()


@pytest.mark.parametrize(("written", "batches"), [("false", 0), ("true", 1), ("40", 40)])
def test_true_is_one_batch(written: str, batches: int) -> None:
    assert config.compose([f"fast_dev_run={written}"]).fast_dev_run == batches


@pytest.mark.parametrize(("command", "schema"), [(find_rate, RateSettings), (plan, PlanSettings)])
def test_what_measures_refuses_a_few_batches(command: Any, schema: type[Settings]) -> None:
    with refused("fast_dev_run", "3"):
        command.prepare(read(schema, {**MINIMAL, "fast_dev_run": 3}))


def test_a_fast_dev_run_takes_the_first_samples_of_each_shard(tmp_path: Path) -> None:
    whole = small_dataset(41)
    shards = write_shards(whole, tmp_path, 2)
    few = shards.head(8)
    assert (len(shards), len(few), few.counts) == (41, 16, (8, 8)) and shards.head(100).counts == shards.counts
    for number in (0, 1):
        one, all_of_it = few.open(number), shards.open(number)
        assert isinstance(one, Dataset)
        np.testing.assert_array_equal(one.images, all_of_it.images[:8])
        np.testing.assert_array_equal(few.samples[number], shards.samples[number][:8])
    assert as_loader(few, 4).iterations(2) == 2
