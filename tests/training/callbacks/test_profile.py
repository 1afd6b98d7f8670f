"""Profiles: the trace is complete and consistent, and profiling does not change training."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import DivergedError, Loader, Nesterov, ParallelWrapper, Profile, create_backend
from cupynet.nn import BatchNorm, Concat, Conv2D, Dense, Image, Model, Residual, Sequential
from cupynet.training.callbacks.profile import Timer, table
from cupynet.training.clock import Clock
from tests.support.calls import watch
from tests.support.device_runs import assert_same, train_on_device
from tests.support.networks import Around
from tests.support.training import Identity, small_dataset, small_model

LOADER = Loader(small_dataset(96), 8, seed=3)  # two workers have six rounds per epoch
HELD_OUT = Loader(small_dataset(30, seed=1), 8, shuffle=False)
PIECES = {"batch", "update", "averaging of weights", "synchronization of workers", "callbacks", "evaluation"}

Event = dict[str, Any]


def profiled(
    folder: Path, profile: Profile | None = None, *, workers: int = 2, model: Model | None = None, **options: Any
) -> tuple[Profile, ParallelWrapper]:
    """Profile some rounds of a fit, by default five. Return the profile and the closed wrapper."""
    profile = profile or Profile(5, 2)
    with ParallelWrapper(model or small_model(), workers, run=folder, callbacks=[profile], **options) as wrapper:
        wrapper.fit(LOADER, epochs=2, evaluate_on=HELD_OUT)
    return profile, wrapper


def trace(folder: Path) -> list[Event]:
    found: list[Event] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return found


def events(folder: Path) -> dict[int, list[Event]]:
    """Return each thread's complete events by start time. Check that two events of a thread are nested or disjoint."""
    found: dict[int, list[Event]] = {}
    for event in sorted(trace(folder), key=lambda event: (event.get("ts", 0), -event.get("dur", 0))):
        if event["ph"] == "X":
            found.setdefault(event["tid"], []).append(event)
    for own in found.values():
        open_: list[float] = []
        for event in own:
            open_ = [end for end in open_ if end > event["ts"] + 1e-4]
            assert not open_ or event["ts"] + event["dur"] <= open_[-1] + 1e-4, event
            open_.append(event["ts"] + event["dur"])
    return found


def count(own: list[Event], name: str) -> int:
    return sum(event["name"] == name for event in own)


@pytest.mark.parametrize(("backend", "first"), [("numpy", "conv1"), ("numba", "conv1+pool1")])
def test_the_trace_has_a_track_with_every_piece_for_each_worker(tmp_path: Path, backend: str, first: str) -> None:
    profile, wrapper = profiled(tmp_path, model=small_model("float", backend))
    network: Any = wrapper.model.network
    layers = ["+".join(names) for names in network.together()]
    assert layers[0] == first
    found = events(tmp_path)
    assert sorted(found) == [0, 1]
    for own in found.values():
        assert count(own, "round") == 5
        for layer in layers:
            assert count(own, f"{layer} forward") == count(own, f"{layer} backward") == 5
            assert count(own, layer) >= 2  # in evaluations
        assert {event["name"] for event in own} >= PIECES
    names = {event["tid"]: event["args"]["name"] for event in trace(tmp_path) if event["name"] == "thread_name"}
    assert names == {rank: f"worker {rank}: {backend}, device 0" for rank in (0, 1)}
    assert json.loads((tmp_path / "profile.json").read_text()) == profile.pieces


@pytest.mark.parametrize(("iterations", "after", "first", "timed"), [(5, 2, 3, 5), (50, 10, 4, 9), (3, 0, 1, 3)])
def test_profiled_rounds_begin_after_at_most_a_quarter_of_the_fit(
    tmp_path: Path, iterations: int, after: int, first: int, timed: int
) -> None:
    profile, _ = profiled(tmp_path, Profile(iterations, after))
    assert (profile.pieces["first"], profile.pieces["rounds"]) == (first, timed)
    assert count(events(tmp_path)[1], "round") == timed


def test_layers_inside_layers_are_pieces_inside_pieces(tmp_path: Path) -> None:
    block = Residual([Conv2D(4, 3, padding="same"), BatchNorm()], shortcut=Conv2D(4, 1))
    branches: list[Any] = [Conv2D(2, 3, padding="same"), [Conv2D(2, 1), Conv2D(2, 3, padding="same")]]
    layers = {"block": block, "sides": Concat(branches), "own": Around(Identity()), "output": Dense(3)}
    model = Model(Sequential(layers), Image(8, 8, 1), create_backend("numpy", "double"), 1)
    profile, wrapper = profiled(tmp_path, model=model, workers=1)
    own = events(tmp_path)[0]
    paths = {each.path for each in wrapper.model.network.walk() if each.path and not isinstance(each, Sequential)}
    assert {"block.conv2d1", "block.shortcut", "own.branch", "block", "output"} < paths
    for path in paths:
        assert count(own, f"{path} forward") == count(own, f"{path} backward") == 5, path
    (row,) = [each for each in profile.pieces["pieces"] if (each["name"], each["kind"]) == ("block", "forward")]
    assert row["total_ms"] < row["inclusive_ms"]


def test_the_own_time_of_a_piece_excludes_the_pieces_inside_it() -> None:
    model, clock = small_model(), Clock()
    timer = Timer(model.backend, clock, model)
    with clock.measure("compute", "a"):
        with clock.measure("data", "b"):
            pass
        with clock.measure("data", "c"), clock.measure("data", "d"):
            pass
    a, b, c, d = sorted(timer.spans, key=lambda span: span.name)
    assert (a.own, b.own, c.own, d.own) == (a.took - b.took - c.took, b.took, c.took - d.took, d.took)


def test_the_table_of_a_profile_adds_up_the_own_times_of_all_workers() -> None:
    found = table([["one", [("a", "x", 0, 10, 6), ("b", "y", 2, 4, 4)]], ["two", [("a", "x", 5, 20, 20)]]], 1, 1)
    assert found["workers"] == 2 and found["total_ms"] == 3e-5
    assert [(row["name"], row["calls"], row["total_ms"], row["inclusive_ms"]) for row in found["pieces"]] == [
        ("a", 2, 26e-6, 30e-6),
        ("b", 1, 4e-6, 4e-6),
    ]
    assert [row["share"] for row in found["pieces"]] == pytest.approx([26 / 30, 4 / 30])


def test_profiling_does_not_change_training_and_is_removed_afterwards(tmp_path: Path) -> None:
    with ParallelWrapper(small_model(), 2) as plain:
        plain.fit(LOADER, epochs=2, evaluate_on=HELD_OUT)
    profile = Profile(5, 2)
    for folder in (tmp_path / "a", tmp_path / "b"):  # a profile may be used again
        _, wrapper = profiled(folder, profile)
        np.testing.assert_array_equal(wrapper.model.params.master, plain.model.params.master)
        assert not any("forward" in vars(layer) for layer in wrapper.model.network.walk())
        assert [count(own, "round") for own in events(folder).values()] == [5, 5]


def test_a_failed_fit_removes_the_timers_of_its_profile(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": Nesterov(1e200), "callbacks": [Profile(after=0)]}
    with ParallelWrapper(small_model(), 2, run=tmp_path, **options) as wrapper:
        with pytest.raises(DivergedError):
            wrapper.fit(LOADER, epochs=2)
        assert not any("forward" in vars(layer) for layer in wrapper.model.network.walk())  # before it is closed
    assert not (tmp_path / "trace.json").exists()


def test_training_continues_if_the_profile_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "there").write_text("a file")
    profile, _ = profiled(tmp_path, Profile(5, 2, path=tmp_path / "there"))
    assert profile.pieces["rounds"] == 5
    assert [each.levelno for each in caplog.records if "profile" in each.name] == [logging.WARNING]


@pytest.mark.standin
def test_profiled_steps_are_not_captured(tmp_path: Path) -> None:
    data = small_dataset(97)
    found = train_on_device("half", 1, callbacks=[Profile(4, 3, path=tmp_path)], data=data)
    assert found["ahead"], "steps are captured again after those rounds"
    assert_same(found, train_on_device("half", 1, data=data), scores=False)
    (own,) = events(tmp_path).values()
    assert count(own, "round") == count(own, "update") == 4
    passes = count(own, "conv1 forward") + count(own, "conv1+pool1 forward")
    assert passes in (3, 4)  # the last batch of an epoch has only one sample


@pytest.mark.standin
def test_a_profile_waits_for_the_gpu_at_the_end_of_each_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is synchronized whenever a clock is read, so work counts for the piece that launched it."""
    model = small_model("float", "cupy")
    waits: list[Any] = []
    watch(monkeypatch, type(model.backend), "synchronize", lambda _, backend: waits.append(backend))
    profiled(tmp_path, model=model, workers=1)
    assert len(waits) >= 2 * len(events(tmp_path)[0])
