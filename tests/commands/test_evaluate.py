"""`cupynet evaluate`: it repeats a run's figures, and notices changes that make them incomparable."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from cupynet.commands.evaluate import main
from tests.support.commands import QUICK, SMALL, Call, summary_of
from tests.support.resumed_runs import trained
from tests.support.user_files import digits, write_pictures

SAME = "the same as in summary.json"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two workers with a checkpoint after each of its two epochs.

    Its user-defined callback is not trusted by evaluations, which do not build the parts that only training needs.
    """
    folder = tmp_path_factory.mktemp("finished") / "run"
    own = ["trusted_modules=[tests]", "+callbacks.own._target_=tests.support.training.Recorder"]
    trained(folder, *QUICK, *SMALL, "workers=2", "epochs=2", *own, "optimizer._target_=cupynet.optim.SGD")
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def test_evaluate_repeats_the_figures_of_a_run_exactly(finished: Path, call: Call) -> None:
    found, summary = call(main, finished), summary_of(finished)
    assert found.code == 0 and SAME in found.out
    assert f"{summary['test_accuracy']:.4f}" in found.out and repr(summary["test_loss"]) in found.out
    other = call(main, finished, "workers=1", "backend=numpy")
    assert other.code == 0 and f"{summary['test_accuracy']:.4f}" in other.out


@pytest.mark.parametrize("figure", ["test_accuracy", "test_loss"])
def test_other_figures_than_the_runs_are_not_called_the_same(figure: str, copy: Path, call: Call) -> None:
    before = summary_of(copy, **{figure: 0.5})["test_accuracy"]
    found = call(main, copy)
    assert found.code == 0 and SAME not in found.out and str(before) in found.out.splitlines()[-1]


def test_evaluate_compares_a_run_that_was_not_tested_with_nothing(copy: Path, call: Call) -> None:
    """A trial of a search is such a run."""
    summary_of(copy, test_accuracy=None, test_loss=None, test=None)
    found = call(main, copy)
    assert found.code == 0 and SAME not in found.out and "None" not in found.out


def test_evaluate_json_has_the_whole_evaluation(finished: Path, call: Call) -> None:
    summary = summary_of(finished)
    (finished.parent / "latest").symlink_to(finished)
    found = json.loads(call(main, finished.parent / "latest", "--json").out)
    assert (found["accuracy"], found["loss"]) == (summary["test_accuracy"], summary["test_loss"])
    assert found["dataset"] == "synthetic" and found["confusion"] == summary["test"]["confusion"]


def test_a_checkpoint_is_evaluated_without_the_results_of_its_run(finished: Path, call: Call) -> None:
    summary = summary_of(finished)
    newest = call(main, finished / "checkpoints", "backend=numpy")
    assert f"{summary['test_accuracy']:.4f}" in newest.out and "summary.json" not in newest.out
    first = min((finished / "checkpoints").glob("step-*"))
    assert json.loads(call(main, "--json", first).out)["loss"] > summary["test_loss"]


def test_a_checkpoint_is_found_from_inside_the_run(finished: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    first, newest = sorted((finished / "checkpoints").glob("step-*"))
    losses = [json.loads(call(main, "--json", first).out)["loss"], summary_of(finished)["test_loss"]]
    for folder, path, expected in (
        (finished / "checkpoints", first.name, losses[0]),
        (first, ".", losses[0]),
        (finished / "checkpoints", ".", losses[1]),
        (first, f"../{newest.name}", losses[1]),
        (finished, "checkpoints", losses[1]),
    ):
        monkeypatch.chdir(folder)
        assert json.loads(call(main, "--json", path).out)["loss"] == expected


def test_a_reference_in_summary_json_is_not_resolved(copy: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number of workers is one of an evaluation's settings."""
    monkeypatch.setenv("SECRET", "1234567")
    summary_of(copy, workers="${oc.env:SECRET}")
    found = call(main, copy)
    assert (found.code, found.out) == (65, "") and "workers=" in found.error and "1234567" not in found.error


def test_evaluate_refuses_a_dataset_that_the_run_did_not_use_unless_it_is_chosen(copy: Path, call: Call) -> None:
    summary_of(copy, dataset="mnist")
    found = call(main, copy)
    assert found.code == 65 and "mnist" in found.error and "synthetic" in found.error
    chosen = call(main, copy, "data.test=200")
    assert chosen.code == 0 and "summary.json" not in chosen.out


def test_a_run_without_test_images_is_evaluated_on_its_validation_images(tmp_path: Path, call: Call) -> None:
    parts = digits(100, 90)
    np.savez(tmp_path / "a.npz", x_train=parts.train_images, y_train=parts.train_labels)
    own = ["data=npz", f"data.file={tmp_path / 'a.npz'}", "data.validation=0.2", "model=mlp", "backend=numpy"]
    trained(tmp_path / "run", *own, "workers=1", "epochs=1")
    found = call(main, tmp_path / "run", "--json")
    assert (json.loads(found.out)["split"], json.loads(found.out)["samples"]) == ("validation", 20)
    assert "the same accuracy as in summary.json" in call(main, tmp_path / "run").out
    undivided = call(main, tmp_path / "run", "data.validation=0", "--json")
    assert (json.loads(undivided.out)["split"], json.loads(undivided.out)["samples"]) == ("train", 100)


def test_other_data_are_evaluated_with_the_class_weights_of_the_run(tmp_path: Path, call: Call) -> None:
    rng = np.random.default_rng(3)
    images, labels = rng.integers(0, 256, (120, 6, 6), np.uint8), np.minimum(rng.integers(0, 12, 120), 9)
    for name, count in (("all", 120), ("few", 30)):
        np.savez(
            tmp_path / name, x_train=images[:count], y_train=np.sort(labels)[-count:], x_test=images, y_test=labels
        )
    data = ["data=npz", f"data.file={tmp_path / 'all.npz'}", "data.classes=10", "loss.class_weights=balanced"]
    trained(tmp_path / "run", *data, "model=mlp", "backend=numpy", "workers=1", "epochs=1")
    found = call(main, tmp_path / "run", f"data.file={tmp_path / 'few.npz'}", "--json")
    assert json.loads(found.out)["loss"] == summary_of(tmp_path / "run")["test_loss"]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Return a folder of pictures, on which the run tmp_path/run was trained."""
    folder = write_pictures(tmp_path / "pictures", digits(50, 40))
    own = ["data=folder", f"data.folder={folder}", "data.validation=0.2", "model=mlp", "backend=numpy"]
    trained(tmp_path / "run", *own, "data.size=[6,6]", "workers=1", "epochs=1")
    return folder


def test_evaluate_refuses_pictures_of_other_classes(pictures: Path, tmp_path: Path, call: Call) -> None:
    for name, other, code in (("class-9", "class-z", 65), ("class-z", "class-9", 0)):
        for part in ("train", "test"):
            (pictures / part / name).rename(pictures / part / other)
        assert call(main, tmp_path / "run").code == code
    shutil.copytree(pictures / "train" / "class-9", pictures / "train" / "class-a")
    found = call(main, tmp_path / "run")  # a trained network cannot get another output
    assert found.code == 2 and found.error.startswith("cupynet: data: ")


def test_a_run_is_evaluated_on_another_folder_of_pictures_which_may_lack_a_class(
    pictures: Path, tmp_path: Path, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    test = (pictures / "test").rename(tmp_path / "elsewhere")
    same = json.loads(call(main, tmp_path / "run", "data=folder", f"data.folder={test}", "--json").out)
    assert (same["loss"], same["split"]) == (summary_of(tmp_path / "run")["test_loss"], "test")
    assert "data.validation=0.2" in caplog.text  # the pictures may be training images
    shutil.rmtree(test / "class-9")
    few = json.loads(call(main, tmp_path / "run", f"data.folder={test}", "--json").out)
    assert few["samples"] == (digits(50, 40).test_labels != 9).sum() and few["confusion"][9] == [0] * 10


def test_evaluate_refuses_images_of_another_shape(tmp_path: Path, call: Call) -> None:
    colors = np.random.default_rng(1).integers(0, 256, (80, 6, 6, 3), np.uint8)
    for name, images in (("color", colors), ("gray", colors[..., 0]), ("small", colors[:, :5])):
        labels = np.arange(80) % 10
        np.savez(tmp_path / f"{name}.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    own = ["data=npz", f"data.file={tmp_path / 'color.npz'}", "model=mlp", "backend=numpy", "workers=1", "epochs=1"]
    trained(tmp_path / "run", *own, "data.normalize=auto")
    for name, shown in (("gray", "3"), ("small", "5 x 6 x 3")):
        found = call(main, tmp_path / "run", f"data.file={tmp_path / name}.npz")
        assert found.code == 2 and found.error.startswith("cupynet: data: ") and shown in found.error
