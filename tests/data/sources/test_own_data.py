"""Training on the user's data: learning and evaluating."""

from pathlib import Path

from tests.support.commands import run, summary_of
from tests.support.resumed_runs import trained
from tests.support.user_files import digits, write_npz

LENET = ["model.layers.conv1.kernel_size=3", "model.layers.conv2.kernel_size=2", "callbacks.progress.style=lines"]


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
