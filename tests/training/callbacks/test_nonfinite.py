"""A loss or gradient that is not finite: found in its round, on its worker, and never averaged into other replicas."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.core.errors import DivergedError
from cupynet.data import Loader
from cupynet.nn import BatchNorm, Conv2D, Dense, Dropout, Image, Layer, MaxPool2D, Model, Sequential
from cupynet.optim import SGD, Nesterov
from cupynet.parallel import (
    GradientSharing,
    Groups,
    ParameterAveraging,
    Pipeline,
)
from cupynet.training import NonFinite, ParallelWrapper, Replica, Trainer
from cupynet.training.fit import Fit
from tests.support.refusals import refused
from tests.support.training import (
    At,
    Poisoned,
    StopAfter,
    alone,
    fingerprint,
    network_with,
    on_threads,
    small_dataset,
    small_model,
)
from tests.support.workspaces import on_loan

DATA = small_dataset(97)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_loss_names_worker_batch_samples_and_layer(workers):
    loader, bad = Loader(DATA, 4, seed=3), (17, 44, 45)
    order = [batch for r in range(workers) for batch in loader.epoch(0, small_model().backend, r, workers)]
    first = min((batch for batch in order if np.isin(batch.samples, bad).any()), key=lambda batch: batch.index)
    named = ", ".join(str(sample) for sample in first.samples if sample in bad)
    text = f"worker {first.index % workers} at batch {first.index} of epoch 1.* {named},.*'poisoned'"
    wrapper = ParallelWrapper(network_with(Poisoned(*bad)), workers, report_every=0)
    with wrapper, pytest.raises(DivergedError, match=text):
        wrapper.fit(loader, 2)


def normalised(layer: Layer, sync: bool = False) -> Model:
    """The small model, normalised before the layer and behind it."""
    layers = {"conv1": Conv2D(3, 3), "norm1": BatchNorm(sync=sync), "pool1": MaxPool2D(2), "drop": Dropout(0.2)}
    layers |= {"poisoned": layer, "norm2": BatchNorm(sync=sync), "output": Dense(3)}
    return Model(Sequential(layers), Image(8, 8, 1), create_backend("numpy", "double"), 1)


def test_a_worker_spoiled_by_another_workers_batch_leaves_its_own_out(caplog):
    """With synchronized statistics one bad batch makes all losses NaN, but only its worker has the cause."""
    guard = NonFinite("skip")
    with ParallelWrapper(normalised(Poisoned(0), sync=True), 2, callbacks=[guard], timeout_s=20) as wrapper:
        wrapper.fit(Loader(DATA, 8, shuffle=False), 1)
        assert on_loan(wrapper) == [0, 0] and guard.left_out == 2
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sorted("poisoned" in text for text in warnings) == [False, True]


def test_weights_that_are_not_finite_are_never_skipped():
    for action in ("stop", "skip"):
        model = small_model()
        bias = dict(model.params.named())["output.bias"].master
        spoil = At(5, lambda bias=bias: bias.__setitem__(1, np.inf))
        trainer = alone(model, SGD(0.01), callbacks=[spoil, NonFinite(action)])
        with pytest.raises(DivergedError, match="'output' of worker 0 at batch 5 of epoch 1"):
            trainer.fit(Fit(Loader(DATA, 4), 1))
        assert trainer.iteration == 5


def test_a_stage_names_its_batch():
    for layer in (Poisoned(17), Poisoned(17, backwards=True)):
        with (
            pytest.raises(DivergedError, match=r"worker \d at batch \d+ of epoch 1"),
            ParallelWrapper(network_with(layer), 1, pipeline=Pipeline(2, 2), timeout_s=20) as wrapper,
        ):
            wrapper.fit(Loader(DATA, 4, seed=3), 1)


@pytest.mark.parametrize("way", [ParameterAveraging(3), ParameterAveraging("end"), GradientSharing()], ids=str)
def test_skip_equals_a_run_without_that_batch(way):
    """It equals a run in which that worker had no batch there."""
    loader, workers = Loader(DATA, 4, seed=3), 3

    class Leaves(Replica):
        """Gets no batch in place of the one with sample 17."""

        def backpropagate(self, batch):
            return super().backpropagate(None if batch is not None and 17 in batch.samples else batch)

    def fitted(kind, layer, callbacks):
        def task(communicator):
            replica = kind(network_with(copy.deepcopy(layer)), Nesterov(0.05))
            trainer = Trainer(
                replica, groups=Groups.of(communicator), synchronizer=copy.deepcopy(way), callbacks=callbacks()
            )
            trainer.fit(Fit(loader, 2))
            return fingerprint(trainer.model), sum(each.left_out for each in trainer.callbacks)

        return on_threads(workers, task)

    skipped = fitted(Replica, Poisoned(17), lambda: [NonFinite("skip")])
    without = fitted(Leaves, None, list)
    assert {weights for weights, _ in skipped} == {weights for weights, _ in without}
    assert {count for _, count in skipped} == {2}  # one in each epoch, known on every worker


def test_the_number_of_skipped_batches_is_limited():
    trainer = alone(network_with(Poisoned(17)), SGD(0.01), callbacks=[NonFinite("skip", most_skipped=2)])
    with pytest.raises(DivergedError):
        trainer.fit(Fit(Loader(DATA, 4, seed=3), 5))
    assert trainer.epoch == 2


def test_batches_that_other_workers_trained_were_not_skipped(tmp_path):
    with ParallelWrapper(network_with(Poisoned(1)), 4, 1, callbacks=[StopAfter(5), NonFinite("skip")]) as one:
        one.fit(Loader(DATA, 4, shuffle=False), 1)
        path = one.checkpoint(tmp_path)
        assert (one.trainer.epoch, one.trainer.iteration) == (0, 5)
    guard = NonFinite("skip")
    with ParallelWrapper(network_with(Poisoned(1)), 2, 1, callbacks=[guard]) as other:
        other.restore(path)
        other.fit(Loader(DATA, 4, shuffle=False), 1)
        assert (other.trainer.epoch, guard.left_out) == (1, 1)


@pytest.mark.parametrize(("workers", "stages"), [(1, 1), (2, 2)])
def test_skip_in_a_pipeline_and_alone(workers, stages):
    pipeline = None if stages == 1 else Pipeline(stages, 2)
    guard = NonFinite("skip")
    options = {"callbacks": [guard], "pipeline": pipeline, "timeout_s": 20}
    with ParallelWrapper(network_with(Poisoned(17)), workers, 2, **options) as wrapper:
        wrapper.fit(Loader(DATA, 4, seed=3), 2)
        assert all(np.isfinite(each.params.master).all() for each in wrapper.replicas())
    assert guard.left_out == 2


@pytest.mark.parametrize("arguments", [{"action": "ignore"}, {"most_skipped": 0}])
def test_invalid_arguments_are_refused(arguments):
    with refused(*arguments):
        NonFinite(**arguments)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_round_in_which_every_worker_leaves_its_batch_out_passes(reduce):
    """The last round has one batch, and it is skipped: no worker sends an update."""
    loader, guard = Loader(DATA, 4, seed=3), NonFinite("skip")
    sample = int(next(batch for batch in loader.epoch(0, small_model().backend) if batch.index == 24).samples[0])
    way = GradientSharing("threshold", reduce=reduce)
    with ParallelWrapper(
        network_with(Poisoned(sample)), 3, synchronizer=way, callbacks=[guard], timeout_s=20
    ) as wrapper:
        wrapper.fit(loader, 1)
        assert guard.left_out == 1 and len({fingerprint(each) for each in wrapper.replicas()}) == 1
        assert np.isfinite(wrapper.model.params.master).all()


def test_skipped_batches_count_across_a_resume(tmp_path):
    """One skipped batch is allowed and the second is not, even if the run was stopped in between."""

    def fit(*callbacks):
        guard = NonFinite("skip", most_skipped=1)
        with ParallelWrapper(network_with(Poisoned(5, 41)), 1, callbacks=[guard, *callbacks]) as wrapper:
            if tmp_path.joinpath("step-00000005").is_dir():
                wrapper.restore(tmp_path)
            wrapper.fit(Loader(DATA, 4, shuffle=False), 1)
            wrapper.checkpoint(tmp_path)

    fit(StopAfter(5))
    with pytest.raises(DivergedError, match="batch 10 of epoch 1"):
        fit()


def test_a_guard_of_another_wrapper_begins_anew():
    guard, loader = NonFinite("skip"), Loader(DATA, 4, shuffle=False)
    for poisoned, left_out in ((Poisoned(5), 1), (Poisoned(), 0)):
        with ParallelWrapper(network_with(poisoned), 1, callbacks=[guard]) as wrapper:
            wrapper.fit(loader, 1)
            assert guard.left_out == left_out and wrapper.trainer.statistics.clock.samples == 97 - 4 * left_out


@pytest.mark.parametrize("pipeline", [None, Pipeline(2, 2)])
def test_values_beyond_half_cause_no_warning(pipeline):
    """Neither in the warm-up at a large loss scale, nor in an evaluation outside a fit."""
    model = small_model("half")
    model.load_weights({name: 3e4 * weight for name, weight in model.weights().items()})
    with ParallelWrapper(model, 1, pipeline=pipeline, progress="none") as wrapper:
        wrapper.on_workers(lambda trainer: setattr(trainer.backend, "loss_scale", 2.0**20))
        wrapper.warm_up(4)
        assert not np.isfinite(wrapper.evaluate(small_dataset(20)).loss)


def test_a_gradient_names_its_batch():
    trainer = alone(network_with(Poisoned(17, backwards=True)), SGD(0.01))
    index = next(b.index for b in Loader(DATA, 4, seed=3).epoch(0, trainer.backend) if 17 in b.samples)
    with pytest.raises(DivergedError, match=f"worker 0 at batch {index} "):
        trainer.fit(Fit(Loader(DATA, 4, seed=3), 1))
    assert all(np.isfinite(w).all() for w in trainer.model.weights().values())  # that batch moved nothing
