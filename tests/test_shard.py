"""`python -m cupynet.shard` as a user types it, and training on what it wrote."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.test_train import run, run_folder

SMALL = ["data=synthetic", "data.train=500", "data.test=100"]
TRAIN = [*SMALL, "data.storage=sharded", "batch_size=32", "epochs=1", "callbacks.progress.style=lines"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cut")
    stdout, stderr = run(folder, *SMALL, "shards=3", "to=parts", command="shard")
    assert stderr == ""
    assert "parts/shard-0000-of-0003: 167 of 500 training images" in stdout
    line = f"python -m cupynet.train {' '.join(SMALL)} workers=3 data.storage=sharded data.shards=parts"
    assert f"to train on them:\n{line}\n" in re.sub(r"^\[[\d:]+\] ", "", stdout, flags=re.M)
    run(folder, *line.split()[3:], "fast_dev_run=true")
    assert sorted(path.name for path in (folder / "parts").iterdir()) == [f"shard-000{r}-of-0003" for r in range(3)]
    return folder / "parts"


def test_training_and_evaluating(shards: Path, tmp_path: Path) -> None:
    chosen = [*TRAIN, f"data.shards={shards}", "workers=3"]
    weights = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run(tmp_path / name, *chosen)
        weights.append((run_folder(tmp_path / name) / "weights.safetensors").read_bytes())
    assert weights[0] == weights[1]
    folder = run_folder(tmp_path / "one")
    summary = json.loads((folder / "summary.json").read_text())
    found = {key: summary[key] for key in ("dataset", "fallback", "workers", "images", "iterations")}
    assert found == {"dataset": "synthetic", "fallback": False, "workers": 3, "images": 500, "iterations": 6}
    stdout, _ = run(tmp_path, str(folder), command="evaluate")
    assert "the same as in summary.json" in stdout
    run(tmp_path, str(folder), "workers=1", command="evaluate")  # the test set is whole in each shard


def test_what_stands_in_for_mnist_is_trained_on_by_what_is_told(tmp_path: Path) -> None:
    """In a folder whose name has to be quoted."""
    stdout, _ = run(tmp_path, "shards=2", "to='my parts'", command="shard", CUPYNET_OFFLINE="1")
    (line,) = [each for each in stdout.splitlines() if "-m cupynet.train" in each]
    words = shlex.split(line[line.index("python") :])[3:]
    assert words[-1] == "data.fallback=synthetic" and words[-2] == "data.shards='my parts'"
    run(tmp_path, *words, "fast_dev_run=true", CUPYNET_OFFLINE="1")


def test_as_many_workers_as_shards(shards: Path, tmp_path: Path) -> None:
    stdout, stderr = run(tmp_path, *TRAIN, f"data.shards={shards}", "workers=2", code=2)
    assert "has 3 shards, one for each worker, and workers=2: train with workers=3" in stderr
    assert stderr.startswith("cupynet: data: ") and stderr.count("\n") == 1
    assert stdout == "" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("data.seed=7", "data.seed=7: parts was written with seed=12345: say so here"),
        ("data.train=400", "data.train=400: asks for 400 train images, and parts has 500: ask for as many"),
        ("data.test=101", "data.test=101: asks for 101 test images, and parts has 100: ask for as many"),
        ("data.validation=5", "data.validation=5: parts was written with validation=0: say so here"),
    ],
)
def test_settings_that_the_shards_were_not_written_with(setting: str, line: str, shards: Path, tmp_path: Path) -> None:
    (tmp_path / "parts").symlink_to(shards)
    _, stderr = run(tmp_path, *TRAIN, "data.shards=parts", "workers=3", setting, code=2)
    assert line in stderr and stderr.count("\n") == 1 and not (tmp_path / "outputs").exists()


def test_shards_of_some_of_the_images(tmp_path: Path) -> None:
    some = ["data.validation=50", "data.limit=60"]
    run(tmp_path, *SMALL, *some, "shards=2", "to=parts", command="shard")
    run(tmp_path, *TRAIN, *some, "data.shards=parts", "workers=2")


def test_what_is_no_shard(shards: Path, tmp_path: Path) -> None:
    _, stderr = run(tmp_path, *TRAIN, "data.shards=nowhere", "workers=3", code=65)
    assert "nowhere: expected shards" in stderr and not list(tmp_path.iterdir())
    _, stderr = run(tmp_path, *TRAIN, "workers=3", code=2)
    assert "data.storage=sharded: must have a folder of shards" in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["to=x"], "shards=null: must be given: the number of workers"),
        (["shards=2"], "to=null: must be given: the folder to write to"),
        (["shards=0", "to=x"], "shards=0: must be an integer of at least 1"),
        (["shards=many", "to=x"], "shards=many: must be an integer of at least 1"),
        (["shards=2", "to=''"], "to=: must be the name of a folder"),
        (["shards=2", "to=full"], "to=full: has notes.txt in it, which is no shard"),
        (["shards=2", "to=x", "dat=mnist"], "did you mean 'data'?"),
        (["shards=2", "to=x", "data.storage=sharded", "data.shards=x"], "data: these are shards already"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    stdout, stderr = run(tmp_path, *SMALL, *arguments, command="shard", code=2)
    assert message in stderr and stderr.count("\n") == 1 and stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_more_shards_than_images(tmp_path: Path) -> None:
    _, stderr = run(tmp_path, *SMALL, "shards=501", "to=x", command="shard", code=2)
    assert "shards=501: must be at most 500, the training images of 'synthetic'" in stderr
    assert not (tmp_path / "x").exists()
