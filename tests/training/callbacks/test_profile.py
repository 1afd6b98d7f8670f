"""Profiles: the trace is complete and consistent, and training is unchanged by it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.core.errors import DivergedError
from cupynet.core.wording import percent
from cupynet.data import Loader
from cupynet.nn import BatchNorm, Concat, Conv2D, Dense, Image, Layer, MaxPool2D, Model, Residual, Sequential
from cupynet.optim import Nesterov
from cupynet.parallel import ParameterAveraging, Pipeline, Synchronizer
from cupynet.training import Callback, NonFinite, ParallelWrapper, Profile
from cupynet.training.callbacks.profile import Timer, table
from cupynet.training.clock import Clock
from tests.support.device_runs import assert_same, train_on_device
from tests.support.refusals import refused
from tests.support.training import StopAfter, small_dataset, small_model

DATA = small_dataset(96)
TEST = small_dataset(30, seed=1)


def profiled(
    folder: Path, profile: Profile | None = None, *, workers: int = 2, model: Model | None = None, epochs: int = 2,
    callbacks: tuple[Callback, ...] = (), evaluate_every: int = 1, **options: Any,
) -> tuple[Profile, ParallelWrapper]:  # fmt: skip
    """A profile of some rounds, its files in `folder`, and the wrapper that was trained, which is closed."""
    profile = Profile(5, 2) if profile is None else profile
    with ParallelWrapper(
        small_model() if model is None else model, workers, run=folder, callbacks=[profile, *callbacks], **options
    ) as wrapper:
        held_out = Loader(TEST, 8, shuffle=False)
        wrapper.fit(Loader(DATA, 8, seed=3), epochs, evaluate_on=held_out, evaluate_every=evaluate_every)
        wrapper.clock = wrapper.trainer.statistics.clock  # type: ignore[attr-defined]
    return profile, wrapper


def events(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The complete events of each thread, by when they began."""
    found: dict[int, list[dict[str, Any]]] = {}
    for event in json.loads((folder / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault(event["tid"], []).append(event)
    return {tid: sorted(own, key=lambda each: (each["ts"], -each["dur"])) for tid, own in found.items()}


def check_nesting(own: list[dict[str, Any]]) -> None:
    """Check that two events of a thread are nested or disjoint."""
    open_: list[float] = []
    for event in own:
        ended = event["ts"] + event["dur"]
        while open_ and open_[-1] <= event["ts"] + 1e-4:
            open_.pop()
        assert not open_ or ended <= open_[-1] + 1e-4, event
        open_.append(ended)


def named(own: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in own if event["name"] == name]


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_each_worker_has_a_track_with_every_piece(tmp_path: Path, backend: str) -> None:
    profile, wrapper = profiled(tmp_path, model=small_model("float", backend))
    found = events(tmp_path)
    assert sorted(found) == [0, 1]
    layers = ["+".join(names) for names in wrapper.model.network.together()]
    assert layers[0] == ("conv1+pool1" if backend == "numba" else "conv1")
    for own in found.values():
        check_nesting(own)
        assert len(named(own, "round")) == 5
        for layer in layers:
            assert len(named(own, f"{layer} forward")) == 5
        for layer in layers:
            assert len(named(own, f"{layer} backward")) == 5 and len(named(own, layer)) >= 2  # evaluated
        for name in ("batch", "update", "averaging of weights", "agreement", "callbacks", "evaluation"):
            assert named(own, name), name
    names = {
        event["tid"]: event["args"]["name"]
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert names == {rank: f"worker {rank}: {backend}, device 0" for rank in (0, 1)}
    assert json.loads((tmp_path / "profile.json").read_text()) == profile.pieces


def test_forward_and_backward_lie_in_their_round_in_order(tmp_path: Path) -> None:
    profiled(tmp_path)
    own = events(tmp_path)[0]
    for whole in named(own, "round"):
        inside = [each for each in own if whole["ts"] < each["ts"] < whole["ts"] + whole["dur"]]
        kinds = ("forward", "backward", "averaging")
        order = [each["name"] for each in inside if each["cat"] in kinds or each["name"] == "update"]
        assert order == [
            *(f"{name} forward" for name in ("network", "conv1", "pool1", "dense1", "output")),
            *(f"{name} backward" for name in ("network", "output", "dense1", "pool1", "conv1")),
            *("averaging of gradients", "update", "averaging of weights"),
        ]


@pytest.mark.parametrize("synchronizer", [ParameterAveraging(3)], ids=["averaging"])
def test_profiling_does_not_change_training_and_is_removed_afterwards(
    tmp_path: Path, synchronizer: Synchronizer
) -> None:
    model = small_model()
    with ParallelWrapper(model, 2, synchronizer=synchronizer) as plain:
        plain.fit(Loader(DATA, 8, seed=3), 2, evaluate_on=Loader(TEST, 8, shuffle=False))
    _, wrapper = profiled(tmp_path, synchronizer=synchronizer)
    for name, weight in model.weights().items():
        np.testing.assert_array_equal(wrapper.model.weights()[name], weight)
    for layer in wrapper.model.network.walk():
        assert "forward" not in vars(layer)


@pytest.mark.parametrize(
    ("rounds", "after", "epochs", "first", "timed"),
    [(5, 2, 2, 3, 5), (50, 10, 2, 4, 9), (3, 0, 1, 1, 3)],
)
def test_which_rounds(tmp_path: Path, rounds: int, after: int, epochs: int, first: int, timed: int) -> None:
    """Six rounds an epoch; before them at most a quarter of the fit."""
    profile, _ = profiled(tmp_path, Profile(rounds, after), epochs=epochs)
    assert (profile.pieces["first"], profile.pieces["rounds"]) == (first, timed)
    assert len(named(events(tmp_path)[1], "round")) == timed


class Block(Layer):
    """A layer that holds another as an attribute."""

    def __init__(self) -> None:
        self.inner = Dense(6, "relu")

    def build(self, input: Any, params: Any, backend: Any) -> Any:
        return self.inner.build(input, params.scope("inner"), backend)

    def forward(self, x: Any, context: Any) -> Any:
        return self.inner.forward(x, context)


def test_layers_in_layers_are_pieces_inside(tmp_path: Path) -> None:
    block = Residual([Conv2D(4, 3, padding="same"), BatchNorm()], shortcut=Conv2D(4, 1))
    sides = Concat({"a": Conv2D(2, 3, padding="same"), "b": [Conv2D(2, 1), Conv2D(2, 3, padding="same")]})
    layers = {"block": block, "sides": sides, "pool": MaxPool2D(2), "own": Block(), "output": Dense(3)}
    model = Model(Sequential(layers), Image(8, 8, 1), create_backend("numpy", "double"), 1)
    profile, wrapper = profiled(tmp_path, model=model, workers=1)
    own = events(tmp_path)[0]
    check_nesting(own)
    paths = {each.path for each in wrapper.model.network.walk() if each.path and not isinstance(each, Sequential)}
    assert {"block.conv2d1", "block.shortcut", "own.inner", "block", "output"} < paths
    for path in paths:
        assert len(named(own, f"{path} forward")) == len(named(own, f"{path} backward")) == 5, path
    whole, inner = named(own, "block forward")[0], named(own, "block.conv2d1 forward")[0]
    assert whole["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= whole["ts"] + whole["dur"] + 1e-4
    (row,) = [each for each in profile.pieces["pieces"] if (each["name"], each["kind"]) == ("block", "forward")]
    assert row["total_ms"] < row["inclusive_ms"]


def test_stages_of_a_pipeline_have_their_own_layers(tmp_path: Path) -> None:
    pipeline = Pipeline(stages=2, micro_batches=4)
    _, wrapper = profiled(tmp_path, workers=1, pipeline=pipeline)
    found = events(tmp_path)
    assert sorted(found) == [0, 1]
    for own, names in zip(found.values(), wrapper.layers, strict=True):
        check_nesting(own)
        trained = {each["name"].removesuffix(" forward") for each in own if each["cat"] == "forward"} - {"network"}
        assert trained == set(names)
        assert named(own, "waiting for a stage") and len(named(own, f"{names[0]} forward")) == 5 * 4


def test_a_stop_in_the_middle_and_a_second_fit(tmp_path: Path) -> None:
    profile = Profile(50, 0)
    with ParallelWrapper(small_model(), 2, run=tmp_path, callbacks=[profile, StopAfter(3)]) as wrapper:
        wrapper.fit(Loader(DATA, 8, seed=3), 2)
        first = profile.pieces
        assert first["rounds"] == 3
        wrapper.fit(Loader(DATA, 8, seed=3), 1)
        wrapper.evaluate(TEST)
        assert profile.pieces is first


def test_a_failed_fit_removes_the_timers(tmp_path: Path) -> None:
    with ParallelWrapper(
        small_model(), 2, run=tmp_path, optimizer=Nesterov(1e200), callbacks=[Profile(after=0), NonFinite()]
    ) as wrapper:
        with pytest.raises(DivergedError):
            wrapper.fit(Loader(DATA, 8, seed=3), 2)
        assert not any("forward" in vars(layer) for layer in wrapper.model.network.walk())  # nor before it is closed
    assert not (tmp_path / "trace.json").exists()


def test_training_continues_if_the_profile_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "there").write_text("a file")
    with caplog.at_level(logging.WARNING):
        profile, _ = profiled(tmp_path, Profile(5, 2, path=tmp_path / "there"))
    assert profile.pieces["rounds"] == 5
    (record,) = [each for each in caplog.records if "profile" in each.name]
    assert record.levelname == "WARNING"


def test_the_table_has_the_ten_longest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, _ = profiled(tmp_path)
    printed = capsys.readouterr().out.splitlines()
    begun = next(number for number, line in enumerate(printed) if line.startswith("profile of 5 rounds"))
    rows = printed[begun + 2 : begun + 12]
    for row, piece in zip(rows, profile.pieces["pieces"], strict=False):
        assert row.startswith(piece["name"]) and len(row) <= 80
        assert row.endswith(f" {percent(piece['share'], 1)}") and row.split()[-5] == f"{piece['calls']:,}"
    assert len(rows) == 10


def test_arguments() -> None:
    for arguments in ({"rounds": 0}, {"after": -1}):
        with refused(*arguments):
            Profile(**arguments)


def test_own_times_leave_out_the_spans_inside() -> None:
    model, clock = small_model(), Clock()
    timer = Timer(model.backend, clock, model)
    with clock.measure("compute", "a"):
        with clock.measure("data", "b"):
            pass
        with clock.measure("data", "b"), clock.measure("data", "c"):
            pass
    spans = {name: [span for span in timer.spans if span.name == name] for name in "abc"}
    (a,), (c,), bs = spans["a"], spans["c"], spans["b"]
    assert a.own == a.took - sum(b.took for b in bs) and c.own == c.took
    assert sorted(b.took - b.own for b in bs) == [0, c.took]
    assert sum(span.own for span in timer.spans) == a.took
    timer.end()
    with clock.measure("compute", "a"):
        pass
    assert len(timer.spans) == 4 and "forward" not in vars(model.network)


def test_the_table_adds_up_the_own_times_of_all_workers() -> None:
    found = table([["one", [("a", "x", 0, 10, 6), ("b", "y", 2, 4, 4)]], ["two", [("a", "x", 5, 20, 20)]]], 1, 1)
    assert found["workers"] == 2 and found["total_ms"] == 3e-5
    assert [(row["name"], row["calls"], row["total_ms"], row["inclusive_ms"]) for row in found["pieces"]] == [
        ("a", 2, 26e-6, 30e-6),
        ("b", 1, 4e-6, 4e-6),
    ]
    assert [row["share"] for row in found["pieces"]] == pytest.approx([26 / 30, 4 / 30])
    assert table([["one", []]], 1, 0)["pieces"] == []


@pytest.mark.standin
@pytest.mark.parametrize(("dtype", "workers"), [("half", 1)])
def test_profiled_steps_are_not_captured(tmp_path: Path, dtype: str, workers: int) -> None:
    """Training is the same, bit for bit, before, during and after the profiled rounds."""
    profile, data = Profile(4, 3, path=tmp_path), small_dataset(97)
    with_it = train_on_device(dtype, workers, callbacks=[profile], data=data)
    assert with_it["ahead"], "steps are captured again after those rounds"
    assert_same(with_it, train_on_device(dtype, workers, data=data), scores=workers > 1)
    for own in events(tmp_path).values():
        check_nesting(own)
        assert len(named(own, "round")) == 4
        passes = named(own, "conv1 forward") + named(own, "conv1+pool1 forward")
        assert len(named(own, "update")) == 4 and len(passes) in (
            3,
            4,
        )  # the last round of an epoch has one batch alone


@pytest.mark.standin
def test_each_piece_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is synchronized whenever a clock is read, so work counts where it was launched."""
    model = small_model("float", "cupy")
    waited: list[str] = []
    real = type(model.backend).synchronize

    def noted(backend: Any) -> None:
        waited.append("wait")
        real(backend)

    monkeypatch.setattr(type(model.backend), "synchronize", noted)
    profile, _ = profiled(tmp_path, model=model, workers=1)
    own = events(tmp_path)[0]
    assert waited.count("wait") >= 2 * len(own)
    assert profile.pieces["rounds"] == 5
