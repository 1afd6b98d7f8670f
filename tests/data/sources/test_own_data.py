"""Training on the user's data: learning, evaluating and resuming."""

from pathlib import Path

from cupynet.runs.checkpoints import Checkpoints, read
from tests.support.commands import SMALL, run, summary_of
from tests.support.refusals import data_error
from tests.support.resumed_runs import resumed, trained
from tests.support.user_files import Parts, digits, write_npz, write_pictures

LENET = ["model.layers.conv1.kernel_size=3", "model.layers.conv2.kernel_size=2", "callbacks.progress.style=lines"]
SHORT = [*LENET, *SMALL, "workers=2", "epochs=1", "batch_size=32"]


def test_real_digits_are_learned_and_evaluated_again(tmp_path: Path) -> None:
    path, folder = write_npz(tmp_path / "digits.npz", digits()), tmp_path / "run"
    network = [*LENET, "model.layers.conv1.activation=relu", "model.layers.conv2.activation=relu"]
    small = ["workers=1", "epochs=20", "batch_size=32", "optimizer.learning_rate.peak=0.05"]
    trained(folder, "data=npz", f"data.file={path}", *network, *small, "data.normalize=auto")
    summary = summary_of(folder)
    assert summary["test_accuracy"] > 0.93  # on writers who are not in the training set
    loss = f"loss {summary['test_loss']!r}"
    # evaluation uses the run's mean, because the mean of other images would differ
    assert loss in run(tmp_path, str(folder), "data.validation=400", command="evaluate")[0]
    assert loss not in run(tmp_path, str(folder), "data.normalize=null", command="evaluate")[0]


def test_evaluation_refuses_classes_of_other_names(tmp_path: Path) -> None:
    """The renamed class would shift the indices of the others, so labels would be wrong."""
    few = Parts(*(array[:: len(array) // 40] for array in digits()))  # sorted by class
    then, now = (write_pictures(tmp_path / name, few) for name in ("then", "now"))
    for part in ("train", "test"):
        (now / part / "class-9").rename(now / part / "another")
    trained(tmp_path / "run", "data=folder", f"data.folder={then}", *SHORT)
    assert summary_of(tmp_path / "run")["class_names"] == [f"class-{digit}" for digit in range(10)]
    _, stderr = run(tmp_path, "run", "data.folder=now", command="evaluate", code=65)
    assert "another" in stderr and stderr.count("\n") == 1


def of_version_0_1_0(run: Path) -> None:
    """Remove the data's identity from a run's checkpoints, as in version 0.1.0."""
    store = Checkpoints(run / "checkpoints")
    for step in store.steps():
        found = read(store.path(step))
        store.save(step, {name: each for name, each in found.state.items() if name != "data"}, found.arrays)


def test_a_resumed_run_continues_on_the_same_data(tmp_path: Path) -> None:
    parts, folder = digits(320, 80), tmp_path / "run"
    path = write_npz(tmp_path / "digits.npz", parts)
    trained(folder, "data=npz", f"data.file={path}", *SHORT)
    resumed(folder, "epochs=2")
    of_version_0_1_0(folder)
    resumed(folder, "epochs=3")
    write_npz(path, parts._replace(train_labels=parts.train_labels[::-1]))
    before = (folder / "weights.safetensors").read_bytes()
    with data_error("labels"):
        resumed(folder, "epochs=4")
    assert (folder / "weights.safetensors").read_bytes() == before
