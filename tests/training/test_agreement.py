"""After an error that all workers raise together, the wrapper remains usable."""

from pathlib import Path

import pytest

from cupynet.core.errors import ConfigError, OutputError
from cupynet.nn import Dense, Model
from cupynet.training import Callback, HistoryWriter, ParallelWrapper
from tests.support.training import fingerprint, small_dataset, small_model

DATA = small_dataset(40)


def wrapper_of(model: Model, workers: int, *callbacks: Callback) -> ParallelWrapper:
    return ParallelWrapper(model, workers, progress="none", timeout_s=20, callbacks=callbacks)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_wrapper_remains_usable_after_a_checkpoint_that_cannot_be_restored(workers: int, tmp_path: Path) -> None:
    others = {"network": Model([Dense(3)], (8, 8, 1), "numpy"), "optimizer": small_model()}
    for name, model in others.items():
        optimizer = "adam" if name == "optimizer" else "nesterov"
        with ParallelWrapper(model, workers, optimizer=optimizer, progress="none") as other:
            other.fit(DATA, epochs=2, batch_size=4)
            other.checkpoint(tmp_path / name)
    (tmp_path / "history.jsonl").touch()
    history = HistoryWriter(tmp_path / "history.jsonl")
    with wrapper_of(small_model(), workers, history) as wrapper, wrapper_of(small_model(), workers) as expected:
        wrapper.fit(DATA, batch_size=4)
        for wrong in (tmp_path / "typo", tmp_path / "network", tmp_path / "optimizer", None):
            with pytest.raises(ConfigError):
                wrapper.restore(wrong)  # type: ignore[arg-type]
        wrapper.fit(DATA, batch_size=4)
        for _ in range(2):
            expected.fit(DATA, batch_size=4)
    assert fingerprint(wrapper.model) == fingerprint(expected.model)
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("workers", [1, 3])
def test_a_wrapper_remains_usable_after_a_checkpoint_that_cannot_be_written(workers: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with wrapper_of(small_model(), workers) as wrapper:
        wrapper.fit(DATA, batch_size=4)
        with pytest.raises(OutputError):
            wrapper.checkpoint(tmp_path / "file" / "below")
        wrapper.restore(wrapper.checkpoint(tmp_path / "elsewhere"))
        wrapper.fit(DATA, batch_size=4)
