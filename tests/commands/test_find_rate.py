"""`cupynet find_rate` as a user types it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from cupynet.commands import find_rate
from cupynet.config.schema import RateSettings, read
from cupynet.core.errors import ConfigError
from tests.support.commands import run
from tests.support.settings import LEAST

TINY = ["data=synthetic", "data.train=300", "data.test=50", "model=mlp", "backend=numpy", "workers=2", "batch_size=16"]


def test_it_says_which_rate_to_train_with(tmp_path: Path) -> None:
    asked = ["lowest=1e-3", "highest=10", "iterations=40", "hydra.run.dir=there", "parallel.learning_rate_scale=linear"]
    stdout, stderr = run(tmp_path, *TINY, *asked, command="find_rate")
    assert stderr == ""
    folder = tmp_path / "there"
    assert {"find_rate.csv", "train.log", ".hydra"} <= {path.name for path in folder.iterdir()}
    rows = list(csv.DictReader((folder / "find_rate.csv").read_text().splitlines()))
    assert float(rows[0]["learning_rate"]) == pytest.approx(1e-3) and float(rows[-1]["learning_rate"]) <= 10
    (line,) = [line for line in stdout.splitlines() if line.startswith("write ")]
    setting = line.split()[1]
    run(tmp_path, *TINY, "epochs=1", setting, "data.test=50", "hydra.run.dir=run")  # it can be written as it stands
    told = stdout[stdout.index("   loss") :].splitlines()
    assert all(len(line) <= 80 for line in told if str(tmp_path) not in line)
    assert not (folder / "weights.safetensors").exists() and not (folder / "checkpoints").exists()


def test_what_cannot_be_tested_is_refused(tmp_path: Path) -> None:
    _, stderr = run(tmp_path, *TINY, "iterations=5", command="find_rate", code=2)
    assert stderr == "cupynet: iterations=5: must be an integer of at least 10\n"
    assert not (tmp_path / "outputs").exists()
    settings = read(RateSettings, {**LEAST, "lowest": 1.0, "highest": 0.5})
    with pytest.raises(ConfigError, match=r"highest=0.5: must be above lowest=1"):
        find_rate.prepare(settings)
