"""What the commands measure with. No time is asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cupynet import config
from cupynet.backend.cpu.numba_backend import NumbaBackend
from cupynet.bench import measure
from cupynet.config.experiment import Experiment
from cupynet.config.schema import BenchSettings, PlanSettings
from cupynet.core.errors import ConfigError, CupynetError
from cupynet.data import Loader
from cupynet.nn import INFERENCE
from cupynet.optim import Nesterov
from cupynet.parallel import ParameterAveraging
from cupynet.training import Replica, Trainer
from tests.support.settings import settings_of
from tests.support.training import small_dataset, small_model


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return Experiment(settings_of("data=synthetic", "data.train=256", "batch_size=16", "workers=2"))


def test_an_average_is_of_the_weights_and_the_optimizer_state(experiment: Experiment) -> None:
    weights = 4 * experiment.model().params.master.size
    assert measure.averaged_bytes(experiment) == 2 * weights
    alone = Experiment(settings_of("data=synthetic", "parallel.average_updaters=false", "workers=2"))
    assert measure.averaged_bytes(alone) == weights


def test_bytes_sent_by_workers_are_measured(experiment: Experiment) -> None:
    """Each sends 2 (W - 1) / W of it in every average: its own parts of the sum, and the means to all others."""
    with experiment.wrapper(callbacks=(), workers=2, synchronizer=ParameterAveraging(1)) as wrapper:
        wrapper.fit(experiment.train_loader(experiment.load()), 1)
        averages = wrapper.trainer.iteration + 1  # the last is that of the end
        sent = wrapper.trainer.spent.bytes_sent
    assert sent[0] / averages == pytest.approx(measure.averaged_bytes(experiment), rel=0.01)


def test_medians_are_measured_in_turn() -> None:
    order: list[str] = []

    def work(name: str, values: list[float]) -> Any:
        def measured() -> float:
            order.append(name)
            return values.pop()

        return measured

    found = measure.medians({"a": work("a", [1.0, 9.0, 2.0]), "b": work("b", [5.0, 5.0, 7.0])}, 3)
    assert found == {"a": 2.0, "b": 5.0} and order == ["a", "b"] * 3


@pytest.mark.parametrize("loop", ["training", "measured"])
def test_a_step_computes_the_norm_of_the_gradient_once(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norms, replica = [], Replica(small_model("float"), Nesterov(0.01, max_grad_norm=1.0))
    squared_norm = type(replica.backend).squared_norm

    def counted(grad: Any) -> Any:
        norms.append(grad)
        return squared_norm(replica.backend, grad)

    monkeypatch.setattr(replica.backend, "squared_norm", counted)
    batches = Loader(small_dataset(24), 8)
    if loop == "training":
        Trainer(replica, synchronizer=ParameterAveraging(3), prefetch_buffer=0).fit(batches, 1)
    else:
        replica.optimizer.learning_rate.span(0, 3, epoch=3, epochs=1)
        for number, batch in enumerate(batches.epoch(0, replica.backend)):
            measure.one_step(replica, batch, number)
    assert len(norms) == 3


@pytest.mark.parametrize("accumulate", [1, 3])
def test_operations_are_those_of_the_parts_that_a_batch_is_cut_into(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest of them is measured, and counted as often as it goes into a batch."""
    seen, images = set(), []

    def passes(backend: Any, layer: Any, x: Any) -> Any:
        seen.add(len(x))
        return 1e-3, 3e-3, layer.forward(x, INFERENCE)[0]

    def timed(work: Any, backend: Any) -> float:
        work()
        return 2e-3

    loaded = NumbaBackend.load_images

    def load_images(*given: Any) -> Any:
        images.append(len(given[2]))
        return loaded(*given)

    monkeypatch.setattr(NumbaBackend, "load_images", load_images)
    monkeypatch.setattr(measure, "passes", passes)
    monkeypatch.setattr(measure, "timed", timed)
    sizes = ("batch_size=10", f"accumulate={accumulate}", "workers=1", "backend=numba")
    rows = measure.operations(Experiment(settings_of("data=synthetic", *sizes)), 50.0)
    times = {1: 1.0, 3: 2.5}[accumulate]
    assert seen == {int(10 / times)} and images[-1] == 10
    found = {row["operation"]: row for row in rows}
    assert found["dense1 forward"]["ms"] == pytest.approx(times) and found["loss"]["ms"] == pytest.approx(2 * times)
    assert found["dense1 backward"]["ms"] == pytest.approx(2 * times)
    assert (found["update"]["ms"], found["load batch"]["ms"]) == (2.0, 2.0)
    assert found["dense1 forward"]["mflop"] == pytest.approx(10 * 2 * 800 * 500 / 1e6)
    assert found["dense1 forward"]["gflop_per_s"] == pytest.approx(8.0 / times)


def test_step_times(experiment: Experiment) -> None:
    times = measure.step_times(experiment, 2, seconds=0.05)
    assert times.shape == (2, 2) and (times > 0).all()


def test_the_loop_counts_images(experiment: Experiment) -> None:
    assert measure.loop_images_per_s(experiment, experiment.load(), 2, 256) > 0


def test_a_run_is_measured_from_outside() -> None:
    quick = ["data=synthetic", "data.train=200", "data.test=50", "epochs=1", "workers=1", "model=mlp"]
    assert measure.run_images_per_s(quick) > 0
    with pytest.raises(CupynetError, match="train stages=2 ended with 2: cupynet: stages=2: was removed"):
        measure.run_images_per_s(["stages=2"])


def test_without_mpi_the_reason_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "find_spec", lambda name: None)
    assert measure.without_ranks() == "mpi4py is not installed: pip install 'cupynet[mpi]'"
    monkeypatch.setattr(measure, "find_spec", lambda name: object())
    monkeypatch.setattr(measure.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure.without_ranks() == "there is no mpiexec: pip install 'cupynet[mpi]'"
    with pytest.raises(ConfigError, match="^there is no mpiexec"):
        measure.run_images_per_s([], ranks=2)
    (tmp_path / "mpiexec").touch()
    assert measure.without_ranks() == ""


def test_a_measured_run_inherits_the_settings_of_the_command(tmp_path: Path) -> None:
    asked = tmp_path / ".hydra" / "overrides.yaml"
    asked.parent.mkdir()
    asked.write_text("- workers=[1,2]\n- batch_size=64\n- ++repeats=1\n- parallel=averaging\n- parallel.timeout_s=9\n")
    assert measure.overrides(tmp_path, PlanSettings, "parallel") == [
        *("data=synthetic", "batch_size=64", "parallel.timeout_s=9")
    ]
    assert measure.overrides(tmp_path, BenchSettings)[1:3] == ["workers=[1,2]", "batch_size=64"]
    asked.write_text("- data=mnist\n- data.limit=5\n- images=3\n")
    assert measure.overrides(tmp_path, BenchSettings) == ["data=mnist", "data.limit=5"]
    assert config.overrides_of(tmp_path / "nowhere") == []
