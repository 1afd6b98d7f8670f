"""The ParallelWrapper API."""

from __future__ import annotations

import numpy as np
import pytest

from cupynet.data import Loader
from cupynet.errors import ConfigError
from cupynet.optim import SGD, Nesterov, OneCycle
from cupynet.parallel import Synchronizer, placement
from cupynet.training import ParallelWrapper
from tests.training.conftest import Recorder, fingerprint, small_dataset, small_model, train


def test_the_documented_call_trains_the_model_itself():
    model, dataset = small_model("float"), small_dataset(200)
    test = Loader(dataset, 50, shuffle=False)
    with ParallelWrapper(
        model, workers=2, averaging_frequency=3, prefetch_buffer=24, report_score_after_averaging=True
    ) as wrapper:
        before = wrapper.evaluate(test).loss
        wrapper.fit(Loader(dataset, 8, seed=1), epochs=3)
        after = wrapper.evaluate(test)
        assert after.loss < before and after.samples == 200
        assert len({fingerprint(m) for m in wrapper.replicas()}) == 1 and wrapper.replicas()[0] is model
    assert model.predict(dataset.images[:5]).shape == (5, 3)


def test_it_equals_workers_made_by_hand():
    model = small_model("float")
    with ParallelWrapper(model, 3, 2, optimizer=Nesterov(0.05, l2=1e-3)) as wrapper:
        wrapper.fit(Loader(small_dataset(97), 4, seed=3), 2)
    by_hand = train(3, lambda: Nesterov(0.05, l2=1e-3), samples=97, epochs=2, frequency=2, dtype="float")
    # the runs differ in one thing: by hand every epoch is evaluated, and so averaged
    assert np.isfinite(model.params.master).all()
    with ParallelWrapper(small_model("float"), 3, 2, optimizer=Nesterov(0.05, l2=1e-3)) as wrapper:
        wrapper.fit(Loader(small_dataset(97), 4, seed=3), 2, evaluate_on=Loader(small_dataset(97), 7, shuffle=False))
        assert fingerprint(wrapper.replicas()[0]) == fingerprint(by_hand.trainers[0].model)


def test_fit_goes_on_where_it_stopped():
    loader = Loader(small_dataset(40), 4, seed=3)
    with ParallelWrapper(small_model(), 2, 1, optimizer=SGD(0.05)) as once:
        once.fit(loader, 3)
        with ParallelWrapper(small_model(), 2, 1, optimizer=SGD(0.05)) as twice:
            twice.fit(loader, 1).fit(loader, 2)
            assert fingerprint(once.replicas()[0]) == fingerprint(twice.replicas()[0])


def test_a_second_fit_with_other_data_knows_its_end():
    with ParallelWrapper(small_model(), 2, 1, optimizer=Nesterov(OneCycle(0.1))) as wrapper:
        wrapper.fit(Loader(small_dataset(80), 4), 2)
        assert wrapper.trainer.total_iterations == wrapper.trainer.iteration == 20
        wrapper.fit(Loader(small_dataset(16), 4), 1)
        assert wrapper.trainer.total_iterations == wrapper.trainer.iteration == 22


def test_replica_0_is_the_model_and_so_the_first_device_is_the_models(monkeypatch):
    model = small_model()
    model.backend.name = "cupy"
    monkeypatch.setattr(placement, "device_count", lambda name: 2)
    with pytest.raises(ConfigError, match=r"devices=\[1, 0\]: replica 0 is the model itself, .* on device 0"):
        ParallelWrapper(model, devices=[1, 0])


def test_stop_ends_a_fit_from_a_callback():
    class Stop(Recorder):
        every_rank = False

        def on_iteration_end(self, trainer):
            if trainer.iteration == 4:
                wrapper.stop()

    with ParallelWrapper(small_model(), 2, 2, callbacks=[Stop()]) as wrapper:
        wrapper.fit(Loader(small_dataset(400), 4), 10)
        assert wrapper.trainer.iteration in (4, 6)
        wrapper.fit(Loader(small_dataset(40), 4), 1)  # a stop is for one fit
        assert wrapper.trainer.epoch == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers=0: must be an integer of at least 1"),
        ({"averaging_frequency": 0}, "averaging_frequency=0: must be an integer of at least 1, epoch or end"),
        ({"prefetch_buffer": -1}, "prefetch_buffer=-1: must be an integer of at least 0"),
        ({"devices": [0, 1]}, "devices=\\[0, 1\\]: backend numpy runs on the CPU and has none"),
        ({"report_every": -1}, "report_every=-1: must be an integer of at least 0"),
        ({"timeout_s": 0}, "timeout_s=0: must be a number of seconds above 0"),
        ({"optimizer": Nesterov}, "optimizer is the class Nesterov: must be an Optimizer, such as Nesterov"),
        ({"optimizer": "adam"}, "optimizer is a str: must be an Optimizer, such as Nesterov"),
        ({"synchronizer": "mean"}, "synchronizer is a str"),
        ({"callbacks": [Recorder]}, "a callback is the class Recorder"),
        ({"blas_threads": 0}, "blas_threads=0: must be an integer of at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ParallelWrapper(small_model(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 1.5}, "epochs=1.5: must be an integer of at least 1"),
        ({"epochs": -1}, "epochs=-1: must be an integer of at least 1"),
        ({"epochs": 0}, "epochs=0: must be an integer of at least 1"),
        ({"evaluate_every": 0}, "evaluate_every=0: must be an integer of at least 1"),
        ({"batch_size": 0}, "batch_size=0: must be an integer of at least 1"),
        ({"split": "dev"}, "split=dev: must be one of test, validation"),
    ],
)
def test_bad_arguments_of_fit_are_refused_and_nothing_is_trained(arguments, message):
    model = small_model()
    before = fingerprint(model)
    with ParallelWrapper(model, 2) as wrapper, pytest.raises(ConfigError, match=message):
        wrapper.fit(small_dataset(20), **arguments)
    assert fingerprint(model) == before


def test_data_are_taken_as_people_write_them():
    data = small_dataset(40)
    prints = set()
    grey = data.images[..., 0]
    for given in (Loader(data, 8, seed=12345), data, (data.images, data.labels), (grey, data.labels)):
        with ParallelWrapper(small_model(), np.int64(2), np.int32(2)) as wrapper:
            wrapper.fit(given, np.int64(2), batch_size=8)
            assert wrapper.evaluate(data if given is data else Loader(data, 8)).samples == 40
            prints.add(fingerprint(wrapper.model))
    assert len(prints) == 1


def test_one_synchronizer_lives_as_long_as_the_wrapper():
    class Counting(Synchronizer):
        def __init__(self):
            self.rounds = 0

        def before_update(self, replica, samples):
            self.rounds += 1
            return samples > 0

    described = Counting()
    with ParallelWrapper(small_model(), 2, synchronizer=described) as wrapper:
        wrapper.fit(Loader(small_dataset(20), 4), 1).fit(Loader(small_dataset(20), 4), 2)
        assert wrapper.trainer.synchronizer.rounds == 9
    assert described.rounds == 0  # a description, of which each worker has a copy


def test_a_synchronizer_that_forgets_to_answer_is_told_so():
    class Forgetful(Synchronizer):
        def before_update(self, replica, samples):
            pass

    with (
        ParallelWrapper(small_model(), 2, synchronizer=Forgetful()) as wrapper,
        pytest.raises(ConfigError, match="Forgetful.before_update returned None: return True or False"),
    ):
        wrapper.fit(Loader(small_dataset(20), 4), 1)


def test_callbacks_are_the_users_own_on_rank_0_and_copies_elsewhere():
    class Everywhere(Recorder):
        started = 0

        def start(self, trainer, run):
            self.started += 1
            self.rank = trainer.rank
            everybody.append(self)

    everybody, mine = [], Everywhere()
    with ParallelWrapper(small_model(), 3, callbacks=[mine]) as wrapper:
        wrapper.fit(Loader(small_dataset(24), 4), 1).fit(Loader(small_dataset(24), 4), 1)
    assert len({id(each) for each in everybody}) == 3 and mine.rank == 0
    assert {(each.rank, each.started, len(each.weights)) for each in everybody} == {(r, 1, 4) for r in range(3)}
