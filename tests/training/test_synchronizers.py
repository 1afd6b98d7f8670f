"""What a synchronizer can rely on: the same calls on every worker in every round."""

from __future__ import annotations

import numpy as np
import pytest

from cupynet.data import Loader
from cupynet.optim import SGD, Nesterov
from cupynet.parallel import Groups, ParameterAveraging, Synchronizer
from cupynet.training import Callback, Replica, Trainer
from cupynet.training.fit import Fit
from tests.guides.extending.gradient_mean import GradientMean
from tests.support.training import fingerprint, on_threads, small_dataset, small_model, train

COUNTS = [(61, 4, 3, 0.5), (10, 4, 4, None)]  # samples, batch size, workers, clip


@pytest.mark.parametrize(("samples", "batch_size", "workers", "clip"), COUNTS)
def test_gradients_averaged_equal_the_concatenated_batch(samples, batch_size, workers, clip):
    """Also with clipping, which follows the mean. A worker without a batch once skipped the average, and the fit with
    61 samples timed out.
    """

    def optimizer():
        return Nesterov(0.05, 0.9, l2=1e-3, max_grad_norm=clip)

    shared = train(workers, optimizer, samples=samples, batch_size=batch_size, epochs=2, synchronizer=GradientMean)
    alone = train(1, optimizer, samples=samples, batch_size=batch_size * workers, epochs=2)
    assert len({fingerprint(t.model) for t in shared.trainers}) == 1
    assert np.abs(shared.master - alone.master).max() <= 1e-12 * np.abs(alone.master).max()


def test_every_method_is_called_on_every_worker_in_every_round():
    calls: dict[int, list] = {}

    class Noting(Synchronizer):
        shares_gradients = False

        def note(self, *what):
            calls.setdefault(self.communicator.rank, []).append(what)

        def before_update(self, replica, samples):
            self.note("before", samples > 0)

        def after_update(self, replica, iteration):
            self.note("after", iteration)

        def finish(self, replica, moment):
            self.note("finish", moment)
            self.communicator.allreduce_mean(self.shared(replica), 1)

    run = train(3, lambda: SGD(0.05), samples=17, batch_size=4, synchronizer=Noting)  # 5 batches
    one, two = [("before", True), ("after", 0)], [("before", True), ("after", 1)]
    end = [("finish", "fit")]
    assert calls[0] == calls[1] == one + two + end
    assert calls[2] == one + [("before", False), ("after", 1)] + end
    assert [trainer.replica.updates for trainer in run.trainers] == [2, 2, 1]


def test_the_divergence_is_measured_once_every_few_iterations():
    averages = []

    class Noting(ParameterAveraging):
        def after_update(self, replica, iteration):
            average = super().after_update(replica, iteration)
            if average is not None and self.communicator.rank == 0:
                averages.append((iteration, average.divergence > 0))
            return average

    train(2, lambda: SGD(0.05), samples=96, synchronizer=lambda: Noting(2, measure_every=5))
    assert averages == [(1, True), (3, False), (5, True), (7, False), (9, False), (11, True)]
    averages.clear()
    train(2, lambda: SGD(0.05), samples=96, synchronizer=lambda: Noting(2, measure_every=0))
    assert not any(measured for _, measured in averages)


def test_replicas_start_with_the_weights_of_rank_0():
    """Each worker here has its own seed."""

    class First(Callback):
        every_rank = True

        def on_fit_start(self, trainer):
            self.weights = fingerprint(trainer.model)

    def task(communicator):
        first = First()
        replica = Replica(small_model(seed=communicator.rank + 1), SGD(0.05))
        averaging = ParameterAveraging(3)
        trainer = Trainer(replica, groups=Groups.of(communicator), synchronizer=averaging, callbacks=[first])
        trainer.fit(Fit(Loader(small_dataset(20), 4), 1))
        return first.weights

    assert on_threads(3, task) == [fingerprint(small_model(seed=1))] * 3
