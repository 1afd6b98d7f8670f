"""Pipelines: how a network is split into stages, the stages' order of work, and the bound on the speed-up."""

import itertools
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import Activation, Conv2D, Dense, Flatten, Image, Layer, MaxPool2D, Model, Sequential
from cupynet.parallel import Pipeline, one_forward_one_backward, parts
from cupynet.parallel.pipeline import balance_stages, training_work
from tests.support.networks import lenet
from tests.support.refusals import refused


def built(network: Layer, backend: str = "numba") -> Any:
    return Model(network, Image(28, 28, 1), create_backend(backend)).network


@pytest.mark.parametrize(
    ("backend", "stages", "cut"),
    [
        ("numba", 4, "conv1 pool1 | conv2 pool2 | dense1 | output"),
        ("numpy", 2, "conv1 pool1 conv2 pool2 | dense1 output"),  # after a pool, less data is sent
    ],
)
def test_lenet_is_cut_by_counted_work(backend: str, stages: int, cut: str) -> None:
    found = Pipeline(stages).partition(built(lenet(), backend), stages)
    assert " | ".join(" ".join(names) for names in found) == cut


def test_work_is_forward_and_both_gradients() -> None:
    layers = dict(built(lenet()))
    assert training_work(layers["conv1"]) == 2 * 24 * 24 * 25 * 20  # images need no gradient
    assert training_work(layers["conv2"]) == 3 * layers["conv2"].multiply_adds()
    assert training_work(layers["pool1"]) == 0
    block = built(Sequential({"block": Sequential([Dense(5), Dense(7)])}))
    assert training_work(dict(block)["block"]) == 2 * 784 * 5 + 3 * 35


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_minimises_the_slowest_stage_and_then_the_traffic(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 8))
    work, sent = rng.integers(0, 9, count).tolist(), rng.integers(1, 9, count).tolist()
    for stages in range(1, count + 1):
        costs = []
        for inner in itertools.combinations(range(1, count), stages - 1):
            slowest = max(sum(work[start:end]) for start, end in itertools.pairwise([0, *inner, count]))
            costs.append((slowest, sum(sent[end - 1] for end in inner), [*inner, count]))
        assert balance_stages(work, sent, stages) == min(costs)[2]


def test_fused_layers_stay_together() -> None:
    network, names = lenet(), [["conv1"], ["pool1", "conv2", "pool2", "dense1", "output"]]
    assert built(network).together() == [["conv1", "pool1"], ["conv2", "pool2"], ["dense1"], ["output"]]
    with refused("stages", "5"):
        Pipeline(5).max_stages(built(network))
    assert len(Pipeline(5).partition(built(network, "numpy"), 5)) == 5  # NumPy fuses nothing
    assert Pipeline(names).partition(built(network), 2) == names  # an explicit list may split fused layers


def test_auto_is_at_most_as_many_as_there_are_layers_with_weights() -> None:
    network = Sequential({"p": MaxPool2D(2), "c": Conv2D(2, 3), "f": Flatten(), "a": Activation("relu"), "d": Dense(3)})
    assert Pipeline().max_stages(built(network)) == 2
    assert Pipeline().max_stages(built(lenet())) == 4
    assert Pipeline().max_stages(built(Sequential({"f": Flatten()}))) == 1


@pytest.mark.parametrize(
    "stages",
    [
        [["d0", "d1"], ["d2", "d3"]],
        [["d0", "d1"], ["d1", "d2"]],
        [["d0", "d2"], ["d1"]],
        [["d0", "d1", "d2"], []],
        [["d0"], "d1"],
    ],
)
def test_lists_must_name_all_layers_in_order(stages: list[list[str]]) -> None:
    network = Sequential({"d0": Dense(4), "d1": Dense(5), "d2": Dense(6)})
    with refused("stages"):
        Pipeline(stages).partition(built(network), 2)


def test_invalid_pipelines_are_refused() -> None:
    wrong: list[Any] = [0, 1.5, "many"]
    for stages in wrong:
        with refused("stages"):
            Pipeline(stages)
    with refused("micro_batches"):
        Pipeline(2, 0)
    with refused(""):
        Pipeline(2).partition(built(Dense(3)), 2)


def played(stages: int, micro_batches: int) -> list[str]:
    """Return each stage's passes, one time unit each, as in the module's table."""
    orders = [list(one_forward_one_backward(stage, stages, micro_batches)) for stage in range(stages)]
    done: list[set[str]] = [set() for _ in range(stages)]
    lines = [""] * stages
    while any(orders):
        passes = []
        for stage, order in enumerate(orders):
            kind = "F" if order and order[0] else "B"
            name = f"{kind}{sum(each[0] == kind for each in done[stage]) + 1}"
            needed = stage - 1 if kind == "F" else stage + 1  # the stage that must have done the same pass first
            ready = order and (not 0 <= needed < stages or name in done[needed])
            passes.append(name if ready else " .")
        for stage, name in enumerate(passes):
            lines[stage] += f" {name}"
            if name != " .":
                done[stage].add(name)
                orders[stage].pop(0)
    return lines


def test_the_schedule_of_three_stages() -> None:
    assert played(3, 4) == [
        " F1 F2 F3  .  . B1 F4 B2  . B3  . B4",
        "  . F1 F2  . B1 F3 B2 F4 B3  . B4  .",
        "  .  . F1 B1 F2 B2 F3 B3 F4 B4  .  .",
    ]


def test_a_stage_of_one_layer_may_be_its_name() -> None:
    assert Pipeline(["a", ["b", "c"]]).stages == [["a"], ["b", "c"]]


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (5, 2), (5, 9)])
def test_a_stage_holds_no_more_micro_batches_than_its_schedule_promises(stages: int, micro_batches: int) -> None:
    assert max(len(line) for line in played(stages, micro_batches)) == 3 * 2 * (micro_batches + stages - 1)
    for stage in range(stages):
        order = list(one_forward_one_backward(stage, stages, micro_batches))
        assert order.count(True) == order.count(False) == micro_batches
        held = np.cumsum([1 if forward else -1 for forward in order])
        assert held.min() >= 0 and held.max() == min(stages - stage, micro_batches)


@pytest.mark.parametrize(("samples", "micro_batches", "sizes"), [(7, 4, [1, 2, 2, 2]), (3, 8, [1, 1, 1]), (6, 1, [6])])
def test_parts_cover_a_batch(samples: int, micro_batches: int, sizes: list[int]) -> None:
    found = parts(samples, micro_batches)
    assert sorted(part.stop - part.start for part in found) == sizes
    assert np.concatenate([np.arange(samples)[part] for part in found]).tolist() == list(range(samples))


def test_the_speed_of_a_pipeline_has_a_bound() -> None:
    even = Pipeline(2, 4).speed([["a"], ["b"]], 10, [4.0, 4.0], [20, 20], 2.5)  # 8 micro-batches of 0.5 s each
    assert even["bound"] == pytest.approx(1.6) and even["speed_up"] == pytest.approx(1.6)
    replicas = [2.4, 0.8, 1.6] * 2, [50, 50, 50] * 2  # two replicas of three stages, with a batch of 50 each
    uneven = Pipeline(3, 8).speed([["a"], ["b"], ["c"]], 50, *replicas, 3.0)
    assert uneven["bound"] == pytest.approx(2 * 0.8) and uneven["speed_up"] == pytest.approx(1.6)
    assert even["work_s"] == [0.5, 0.5]
    assert Pipeline(2, 8).speed([["a"], ["b"]], 5, [1.0, 1.0], [5, 5], 2.0)["micro_batches"] == 5
