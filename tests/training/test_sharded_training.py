"""The recipe for shards in cupynet/guides/data.md, and the train command on its shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cupynet.commands.evaluate import evaluated
from tests.support.commands import run_folder
from tests.support.documentation import run_guide
from tests.support.mpi import NO_MPI, under_mpiexec
from tests.support.resumed_runs import trained

TRAIN = ["data=shards", "data.folder=../shards", "model=mlp", "backend=numpy", "batch_size=32", "epochs=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of 300 digits, written by the recipe, and a run with four threads."""
    folder = tmp_path_factory.mktemp("guide")
    with pytest.MonkeyPatch.context() as patch:
        run_guide("cupynet/guides/data.md", folder, patch)
    assert sorted(path.name for path in (folder / "shards").iterdir()) == ["0", "1", "2", "3", "test"]
    (folder / "threads").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "threads")
        trained(folder / "threads" / "run", *TRAIN, "workers=4")
    return folder


def test_an_evaluation_repeats_the_figures_of_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "threads")
    found = evaluated(Path("run")).evaluation
    summary = json.loads(Path("run", "summary.json").read_text())
    assert (found.accuracy, found.loss) == (summary["test_accuracy"], summary["test_loss"])


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
def test_ranks_and_threads_give_the_same_weights(folder: Path) -> None:
    (folder / "ranks").mkdir()
    done = under_mpiexec(4, "-m", "cupynet", "train", *TRAIN, "parallel.launcher=mpi", cwd=folder / "ranks")
    assert done.returncode == 0, done.stderr
    runs = folder / "threads" / "run", run_folder(folder / "ranks")
    assert len({(run / "weights.safetensors").read_bytes() for run in runs}) == 1
