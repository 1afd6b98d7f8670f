"""Pipelines: where a network is cut into stages, their order of work, and the bound on the speed-up."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import Activation, Conv2D, Dense, Flatten, Image, Layer, MaxPool2D, Model, Sequential
from cupynet.parallel import Pipeline, one_forward_one_backward, parts
from cupynet.parallel.pipeline import balanced, training_work
from tests.support.networks import lenet
from tests.support.refusals import refused


def built(network: Layer, backend: str = "numba") -> Any:
    return Model(network, Image(28, 28, 1), create_backend(backend)).network


def dense(*units: int) -> Sequential:
    return Sequential({f"d{i}": Dense(count) for i, count in enumerate(units)})


@pytest.mark.parametrize(
    ("backend", "stages", "cut"),
    [
        ("numba", 3, "conv1 pool1 | conv2 pool2 | dense1 output"),
        ("numba", 4, "conv1 pool1 | conv2 pool2 | dense1 | output"),
        ("numpy", 2, "conv1 pool1 conv2 pool2 | dense1 output"),  # behind a pool less is sent
    ],
)
def test_lenet_is_cut_by_counted_work(backend: str, stages: int, cut: str) -> None:
    found = Pipeline(stages).cut(built(lenet(), backend), stages)
    assert " | ".join(" ".join(names) for names in found) == cut


def test_work_is_forward_and_both_gradients() -> None:
    layers = dict(built(lenet()))
    forward = {name: layer.multiply_adds() for name, layer in layers.items()}
    assert training_work(layers["conv1"]) == 2 * forward["conv1"] == 2 * 24 * 24 * 25 * 20  # images need no gradient
    assert training_work(layers["conv2"]) == 3 * forward["conv2"]
    assert training_work(layers["pool1"]) == 0
    block = built(Sequential({"block": Sequential([Dense(5), Dense(7)])}))
    assert training_work(dict(block)["block"]) == 2 * 784 * 5 + 3 * 35


def test_the_cut_minimises_the_slowest_stage() -> None:
    """Compare with all possible cuts on random work: the smallest largest stage, then the least traffic."""
    rng = np.random.default_rng(4)
    for _ in range(20):
        count = int(rng.integers(1, 8))
        work, sent = rng.integers(0, 9, count).tolist(), rng.integers(1, 9, count).tolist()
        for stages in range(1, count + 1):
            costs = []
            for inner in itertools.combinations(range(1, count), stages - 1):
                bounds = [0, *inner, count]
                sums = [sum(work[a:b]) for a, b in itertools.pairwise(bounds)]
                costs.append((max(sums), sum(sent[end - 1] for end in inner), [*inner, count]))
            assert balanced(work, sent, stages) == min(costs)[2]


def test_fused_layers_stay_together() -> None:
    network = lenet()
    assert built(network).together() == [["conv1", "pool1"], ["conv2", "pool2"], ["dense1"], ["output"]]
    assert built(network, "numpy").together() == [[name] for name, _ in network]
    with refused("stages", "5"):
        Pipeline(5).most(built(network))
    assert len(Pipeline(5).cut(built(network, "numpy"), 5)) == 5
    names = [["conv1"], ["pool1", "conv2", "pool2", "dense1", "output"]]
    assert Pipeline(names).cut(built(network), 2) == names  # who names them all may cut there


def test_auto_is_at_most_as_many_as_there_are_layers_with_weights() -> None:
    network = Sequential({"p": MaxPool2D(2), "c": Conv2D(2, 3), "f": Flatten(), "a": Activation("relu"), "d": Dense(3)})
    assert Pipeline().most(built(network)) == 2 and Pipeline().count is None
    assert Pipeline().most(built(lenet())) == 4
    assert Pipeline().most(built(Sequential({"f": Flatten()}))) == 1
    assert Pipeline([["c"], ["d"]]).count == 2 and Pipeline(3).count == 3


LISTS = [
    [["d0", "d1"], ["d2", "d3"]],
    [["d0", "d1"], ["d1", "d2"]],
    [["d0", "d2"], ["d1"]],
    [["d0", "d1", "d2"], []],
    [["d0"], "d1"],
]


@pytest.mark.parametrize("stages", LISTS)
def test_lists_must_name_all_layers_in_order(stages: list[list[str]]) -> None:
    with refused("stages"):
        Pipeline(stages).cut(built(dense(4, 5, 6)), 2)


def test_invalid_pipelines_are_refused() -> None:
    for stages in (0, 1.5, "many"):
        with refused("stages"):
            Pipeline(stages)  # type: ignore[arg-type]
    with refused("micro_batches"):
        Pipeline(2, 0)
    with refused(""):
        Pipeline(2).cut(built(Dense(3)), 2)


def played(stages: int, micro_batches: int) -> list[str]:
    """The stages at work, one time unit a pass: a line per stage, as in the table of the module."""
    orders = [list(one_forward_one_backward(s, stages, micro_batches)) for s in range(stages)]
    done: list[list[tuple[bool, int]]] = [[] for _ in range(stages)]  # (forward, micro-batch), in order
    lines = [""] * stages
    while any(orders):
        passes = []
        for s, order in enumerate(orders):
            if not order:
                passes.append(None)
                continue
            number = sum(each == order[0] for each, _ in done[s])
            needs = s - 1 if order[0] else s + 1  # whose pass of the same kind must be done before
            ready = not 0 <= needs < stages or (order[0], number) in done[needs]
            passes.append((order[0], number) if ready else None)
        for s, found in enumerate(passes):
            lines[s] += "  ." if found is None else f" {'F' if found[0] else 'B'}{found[1] + 1}"
            if found is not None:
                done[s].append(found)
                orders[s].pop(0)
    return lines


def test_the_schedule_of_three_stages() -> None:
    assert played(3, 4) == [
        " F1 F2 F3  .  . B1 F4 B2  . B3  . B4",
        "  . F1 F2  . B1 F3 B2 F4 B3  . B4  .",
        "  .  . F1 B1 F2 B2 F3 B3 F4 B4  .  .",
    ]


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (3, 9), (5, 2), (5, 9)])
def test_every_schedule_ends_in_time_and_holds_few_micro_batches(stages: int, micro_batches: int) -> None:
    assert max(len(line) for line in played(stages, micro_batches)) == 3 * 2 * (micro_batches + stages - 1)
    for stage in range(stages):
        order = list(one_forward_one_backward(stage, stages, micro_batches))
        assert order.count(True) == order.count(False) == micro_batches
        flying = np.cumsum([1 if forward else -1 for forward in order])
        assert flying.min() >= 0 and flying.max() == min(stages - stage, micro_batches)


@pytest.mark.parametrize(("samples", "micro_batches"), [(128, 4), (7, 4), (3, 8), (1, 1), (10, 3)])
def test_parts_cover_a_batch(samples: int, micro_batches: int) -> None:
    found = parts(samples, micro_batches)
    assert len(found) == min(samples, micro_batches)
    assert np.concatenate([np.arange(samples)[part] for part in found]).tolist() == list(range(samples))
    sizes = [part.stop - part.start for part in found]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def test_the_speed_of_a_pipeline_has_a_bound() -> None:
    even = Pipeline(2, 4).speed([["a"], ["b"]], 10, [4.0, 4.0], [20, 20], 2.5)  # 8 micro-batches, each 0.5 s
    assert even["bound"] == pytest.approx(1.6) and even["speed_up"] == pytest.approx(1.6)
    replicas = [2.4, 0.8, 1.6] * 2, [50, 50, 50] * 2  # two of three stages, and a batch of 50 each
    uneven = Pipeline(3, 8).speed([["a"], ["b"], ["c"]], 50, *replicas, 3.0)
    assert uneven["bound"] == pytest.approx(2 * 0.8) and uneven["speed_up"] == pytest.approx(1.6)
    assert even["layers"] == [["a"], ["b"]] and even["work_s"] == [0.5, 0.5]
    assert Pipeline(2, 8).speed([["a"], ["b"]], 5, [1.0, 1.0], [5, 5], 2.0)["micro_batches"] == 5
