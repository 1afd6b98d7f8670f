"""Pipelines: how a network is split into stages, the stages' order of work, and the bound on the speed-up."""

import itertools
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import Activation, Conv2D, Dense, Flatten, Image, Layer, MaxPool2D, Model, Sequential
from cupynet.parallel import Communicator, Groups, Pipeline, SerialCommunicator
from cupynet.parallel.pipeline import balance_stages, one_forward_one_backward, parts, training_work
from tests.support.networks import lenet
from tests.support.refusals import refused
from tests.support.training import on_threads


def built(network: Layer, backend: str = "numba") -> Any:
    return Model(network, Image(28, 28, 1), create_backend(backend)).network


@pytest.mark.parametrize(
    ("backend", "stages", "cut"),
    [
        ("numba", 4, "conv1 pool1 | conv2 pool2 | dense1 | output"),
        ("numpy", 2, "conv1 pool1 conv2 pool2 | dense1 output"),  # after a pool, less data is sent
    ],
)
def test_stages_of_lenet_are_balanced_by_the_number_of_multiplications(backend: str, stages: int, cut: str) -> None:
    found = Pipeline(stages).partition(built(lenet(), backend), stages)
    assert " | ".join(" ".join(names) for names in found) == cut


def test_the_work_of_a_layer_counts_its_forward_pass_and_both_gradients() -> None:
    layers = dict(built(lenet()))
    assert training_work(layers["conv1"]) == 2 * 24 * 24 * 25 * 20  # images need no gradient
    assert training_work(layers["conv2"]) == 3 * layers["conv2"].multiply_adds()
    assert training_work(layers["pool1"]) == 0
    block = built(Sequential({"block": Sequential([Dense(5), Dense(7)])}))
    assert training_work(dict(block)["block"]) == 2 * 784 * 5 + 3 * 35


@pytest.mark.parametrize("seed", range(20))
def test_stages_minimize_the_work_of_the_slowest_one_and_then_the_data_sent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 8))
    work, sent = rng.integers(0, 9, count).tolist(), rng.integers(1, 9, count).tolist()
    for stages in range(1, count + 1):
        costs = []
        for inner in itertools.combinations(range(1, count), stages - 1):
            slowest = max(sum(work[start:end]) for start, end in itertools.pairwise([0, *inner, count]))
            costs.append((slowest, sum(sent[end - 1] for end in inner), [*inner, count]))
        assert balance_stages(work, sent, stages) == min(costs)[2]


def test_fused_layers_stay_in_one_stage_unless_stages_are_listed() -> None:
    network, names = lenet(), [["conv1"], ["pool1", "conv2", "pool2", "dense1", "output"]]
    assert built(network).together() == [["conv1", "pool1"], ["conv2", "pool2"], ["dense1"], ["output"]]
    with refused("stages", "5"):
        Pipeline(5).max_stages(built(network))
    assert len(Pipeline(5).partition(built(network, "numpy"), 5)) == 5  # NumPy fuses nothing
    assert Pipeline(names).partition(built(network), 2) == names  # an explicit list may split fused layers


def test_auto_makes_at_most_one_stage_for_each_layer_with_weights() -> None:
    network = Sequential({"p": MaxPool2D(2), "c": Conv2D(2, 3), "f": Flatten(), "a": Activation("relu"), "d": Dense(3)})
    assert Pipeline().max_stages(built(network)) == 2
    assert Pipeline().max_stages(built(lenet())) == 4
    assert Pipeline().max_stages(built(Sequential({"f": Flatten()}))) == 1


def test_stages_that_do_not_fit_the_network_are_refused() -> None:
    """Lists must name all layers in order."""
    network = built(Sequential({"d0": Dense(4), "d1": Dense(5), "d2": Dense(6)}))
    texts = "d0 d1|d2 d3", "d0 d1|d1 d2", "d0 d2|d1", "d0 d1 d2|"
    lists: list[Any] = [[stage.split() for stage in text.split("|")] for text in texts]
    for stages in (*lists, [["d0"], "d1"], 0, 1.5, "many"):
        with refused("stages"):
            Pipeline(stages).partition(network, 2)
    with refused("micro_batches"):
        Pipeline(2, 0)
    with refused(""):
        Pipeline(2).partition(built(Dense(3)), 2)


def test_a_stage_of_one_layer_may_be_its_name() -> None:
    assert Pipeline(["a", ["b", "c"]]).stages == [["a"], ["b", "c"]]


def passes(stage: int, stages: int, micro_batches: int) -> str:
    """Return a stage's forward and backward passes in order, as F and B."""
    return "".join("BF"[forward] for forward in one_forward_one_backward(stage, stages, micro_batches))


def test_three_stages_follow_the_1f1b_schedule() -> None:
    assert [passes(stage, 3, 4) for stage in range(3)] == ["FFFBFBBB", "FFBFBFBB", "FBFBFBFB"]


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (5, 2), (5, 9)])
def test_stage_i_of_s_holds_at_most_s_minus_i_micro_batches(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        order = passes(stage, stages, micro_batches)
        held = [order[:end].count("F") - order[:end].count("B") for end in range(len(order) + 1)]
        assert min(held) == held[-1] == 0 and max(held) == min(stages - stage, micro_batches)
        assert order.count("F") == micro_batches


@pytest.mark.parametrize(("samples", "micro_batches", "sizes"), [(7, 4, [1, 2, 2, 2]), (3, 8, [1, 1, 1]), (6, 1, [6])])
def test_micro_batches_split_a_batch_into_nearly_equal_parts(
    samples: int, micro_batches: int, sizes: list[int]
) -> None:
    found = parts(samples, micro_batches)
    assert sorted(part.stop - part.start for part in found) == sizes
    assert np.concatenate([np.arange(samples)[part] for part in found]).tolist() == list(range(samples))


def test_the_speed_up_of_a_pipeline_and_its_bound_follow_from_the_work_of_its_stages() -> None:
    even = Pipeline(2, 4).speed([["a"], ["b"]], 10, [4.0, 4.0], [20, 20], 2.5)  # 8 micro-batches of 0.5 s each
    assert even["bound"] == pytest.approx(1.6) and even["speed_up"] == pytest.approx(1.6)
    replicas = [2.4, 0.8, 1.6] * 2, [50, 50, 50] * 2  # two replicas of three stages, with a batch of 50 each
    uneven = Pipeline(3, 8).speed([["a"], ["b"], ["c"]], 50, *replicas, 3.0)
    assert uneven["bound"] == pytest.approx(2 * 0.8) and uneven["speed_up"] == pytest.approx(1.6)
    assert even["work_s"] == [0.5, 0.5]
    assert Pipeline(2, 8).speed([["a"], ["b"]], 5, [1.0, 1.0], [5, 5], 2.0)["micro_batches"] == 5


def test_worker_r_is_stage_r_mod_s_of_replica_r_over_s() -> None:
    def task(world: Communicator) -> tuple[list[float], list[float]]:
        groups = Groups.grid(world, stages=2)
        same_stage = groups.replicas.gather_numbers(world.rank)[:, 0].tolist()
        one_replica = groups.stages.gather_numbers(world.rank)[:, 0].tolist()
        return same_stage, one_replica

    found = on_threads(6, task)
    assert found[0] == ([0, 2, 4], [0, 1])
    assert found[1] == ([1, 3, 5], [0, 1])
    assert found[5] == ([1, 3, 5], [4, 5])
    alone = SerialCommunicator()
    assert Groups.grid(alone, stages=1).replicas is alone
