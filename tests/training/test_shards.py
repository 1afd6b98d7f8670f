"""Training on shards, one per worker: evaluations, the check that all data are equal, the recipe."""

from pathlib import Path

import pytest

from cupynet import SGD, DataError, Loader, ParallelWrapper, Replica
from cupynet.parallel import Communicator, ParameterAveraging
from cupynet.training.fit import Fit
from tests.support.refusals import refused
from tests.support.shards import write_shards
from tests.support.trainers import trainer_of
from tests.support.training import on_threads, small_dataset, small_model


def test_an_evaluation_on_shards_equals_one_on_the_whole_data_set(tmp_path: Path) -> None:
    data = small_dataset(60)
    shards = write_shards(data, tmp_path, 2)
    with ParallelWrapper(small_model("float", "numba"), 2, 1) as wrapper:
        wrapper.fit(shards, epochs=6, batch_size=4, evaluate_on=small_dataset(9))
        found, expected = (wrapper.evaluate(each).to_dict() for each in (shards, data))
    assert found.pop("loss") == pytest.approx(expected.pop("loss"))
    assert found == expected


def test_another_number_of_shards_than_workers_is_refused(tmp_path: Path) -> None:
    shards = write_shards(small_dataset(60), tmp_path, 3)
    with ParallelWrapper(small_model(), workers=2) as wrapper:
        with refused("workers"):
            wrapper.fit(shards)
        wrapper.fit(small_dataset(20))  # the wrapper still works


@pytest.mark.parametrize("what", ["train", "evaluate_on"])
def test_processes_whose_data_differ_are_refused_before_training(what: str) -> None:
    """One machine may have other files than the rest."""

    def task(communicator: Communicator) -> int:
        other = small_dataset(60, seed=int(communicator.rank == 1))
        loaders = {"train": Loader(small_dataset(60), 4), "evaluate_on": Loader(small_dataset(60), 7)}
        loaders[what] = Loader(other, 4)
        trainer = trainer_of(communicator, Replica(small_model(), SGD(0.05)), ParameterAveraging(1))
        with pytest.raises(DataError):
            trainer.fit(Fit(loaders["train"], 1, evaluate_on=loaders["evaluate_on"]))
        return trainer.iteration

    assert on_threads(3, task) == [0, 0, 0]
