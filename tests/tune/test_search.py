"""A search: what it tries, what counts, what is pruned, and that it goes on where it was."""

from __future__ import annotations

import math
import signal
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cupynet.config import searched
from cupynet.errors import DataError, OutputError
from cupynet.sweeps.shares import Share
from cupynet.tune.judged import GO_ON, PRUNED
from cupynet.tune.search import Search
from tests.tune.scripted import Scripted, epoch, result

pytest.importorskip("optuna")
from cupynet.tune.study import Study
from cupynet.tune.tried import Tried

RATE = "optimizer.learning_rate=interval(0.0001,1)"
LAYERS = "model.layers.conv1.channels=int(interval(4,32))"


@contextmanager
def study(folder: Path, *texts: str, **how: Any) -> Iterator[Study]:
    settings = {"objective": "accuracy", "sampler": "tpe", "seed": 0, "pruner": "median", "epochs": 3} | how
    opened = Study(folder / "study.db", searched(texts or (RATE, LAYERS)), **settings)
    try:
        yield opened
    finally:
        opened.close()


def good(tried: Tried) -> float:
    """What a trial comes to: best at a rate of 0.01."""
    rate = tried.values.get("optimizer.learning_rate", 0.01)
    return 0.9 - 0.1 * abs(math.log10(rate) + 2)


def trains(tried: Tried, share: Share) -> Scripted:
    return Scripted([epoch(1, good(tried) / 2), epoch(2, good(tried), last=True), result(2, good(tried))])


def went(
    opened: Study,
    trials: int,
    begin: Callable[[Tried, Share], Scripted] = trains,
    jobs: int = 1,
    timeout_s: float | None = None,
) -> Search:
    search = Search(opened, begin, [Share() for _ in range(jobs)], trials, timeout_s, lambda tried: None)
    search.run()
    return search


def values(opened: Study) -> list[dict[str, Any]]:
    return [each.values for each in opened.tried() if each.outcome != "interrupted"]


def test_the_same_seed_tries_the_same_and_learns_from_it(tmp_path: Path) -> None:
    tried = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        (tmp_path / name).mkdir()
        with study(tmp_path / name, seed=seed, pruner="none") as opened:
            went(opened, 12)
            tried.append(values(opened))
            best = opened.ranked()
            assert len(best) == opened.counted == 12
            assert [each.figure for each in best] == sorted((each.figure for each in best), reverse=True)
    assert tried[0] == tried[1] != tried[2]
    assert all(0.0001 <= each["optimizer.learning_rate"] <= 1 for each in tried[0])
    assert all(4 <= each["model.layers.conv1.channels"] <= 32 for each in tried[0])


def test_the_least_loss_is_the_best(tmp_path: Path) -> None:
    with study(tmp_path, objective="loss") as opened:
        went(opened, 5)
        found = [each.figure for each in opened.ranked()]
        assert found == sorted(found) and found[0] == pytest.approx(1 - max(map(good, opened.tried())))


def test_what_was_interrupted_does_not_count_and_the_search_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    with study(tmp_path / "whole") as opened:
        went(opened, 13)
        whole = values(opened)

    def interrupts(tried: Tried, share: Share) -> Scripted:
        if tried.number < 11:
            return trains(tried, share)
        return Scripted([epoch(1, 0.5)], 130, "stopped", before=lambda: signal.raise_signal(signal.SIGINT))

    with study(tmp_path / "broken") as opened:
        search = went(opened, 13, interrupts)
        assert search.signal == signal.SIGINT and opened.counted == 11
        assert opened.tried()[11].outcome == "interrupted"
    with study(tmp_path / "broken") as opened:  # and once more, as a process that is killed leaves it
        opened.ask()
    with study(tmp_path / "broken") as opened:
        assert [each.outcome for each in opened.tried()[11:]] == ["interrupted", "interrupted"]
        assert opened.tried()[12].reason == "the search was killed"
        went(opened, 13)
        assert values(opened) == whole and opened.counted == 13
        assert went(opened, 13).signal == 0 and opened.counted == 13


def test_a_signal_reaches_every_trial_as_often_as_it_came(tmp_path: Path) -> None:
    begun: list[Scripted] = []
    sent: list[int] = []

    def begin(tried: Tried, share: Share) -> Scripted:
        def twice() -> None:
            if not sent:
                sent.extend([signal.SIGTERM] * 2)
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)

        begun.append(Scripted([epoch(1, 0.5)], 143, "stopped", before=twice))
        return begun[-1]

    with study(tmp_path) as opened:
        search = went(opened, 6, begin, jobs=2)
        assert search.signal == signal.SIGTERM and opened.counted == 0
        assert len(begun) == 2 and [each.signals for each in begun] == [sent, sent]
        assert not any(each.open for each in begun)


@pytest.mark.parametrize(
    "code, reason, outcome",
    [
        (3, "the loss is not finite", "diverged"),
        (1, "GPU 0 has no memory left", "out of memory"),
        (137, "ended by SIGKILL", "out of memory"),
        (2, "dtype=half: too narrow", "failed"),
        (1, "this is a bug: ValueError", "failed"),
        (0, "", "failed"),
    ],
    ids=["diverged", "device_memory", "killed", "refused", "bug", "no_evaluation"],
)
def test_a_trial_that_fails_counts_as_a_bad_one(tmp_path: Path, code: int, reason: str, outcome: str) -> None:
    def begin(tried: Tried, share: Share) -> Scripted:
        return Scripted([epoch(1, 0.9)], code, reason) if tried.number == 1 else trains(tried, share)

    with study(tmp_path) as opened:
        went(opened, 3, begin)
        bad = opened.tried()[1]
        assert (bad.outcome, opened.counted) == (outcome, 3)
        assert reason in bad.reason and bad.reason
        assert bad.number not in [each.number for each in opened.ranked()]


@pytest.mark.parametrize("code, kind", [(65, DataError), (74, OutputError)], ids=["data", "output"])
def test_what_no_settings_can_change_ends_the_search(tmp_path: Path, code: int, kind: type[Exception]) -> None:
    with study(tmp_path) as opened:
        with pytest.raises(kind, match="trial 0: the disk is full"):
            went(opened, 3, lambda tried, share: Scripted([], code, "the disk is full"))
        assert opened.counted == 0 and len(opened.tried()) == 1


def test_a_trial_that_cannot_be_started_lets_the_others_come_to_their_end(tmp_path: Path) -> None:
    def begin(tried: Tried, share: Share) -> Scripted:
        if tried.number == 1:
            raise BlockingIOError(11, "no room for a process")
        return trains(tried, share)

    with study(tmp_path) as opened:
        with pytest.raises(OutputError, match=r"trial 1: cannot be started \(no room for a process\)"):
            went(opened, 3, begin, jobs=2)
        assert [each.outcome for each in opened.tried()] == ["complete", "interrupted"]


def test_what_is_worse_than_half_is_pruned_but_not_in_its_last_epoch(tmp_path: Path) -> None:
    begun: list[Scripted] = []

    def begin(tried: Tried, share: Share) -> Scripted:
        bad = tried.number == 6
        said = [epoch(1, 0.1 if bad else 0.8)]
        said += [] if bad else [epoch(2, 0.1 if tried.number == 7 else 0.9, last=True), result(2, 0.9)]
        begun.append(Scripted([*said, result(1, 0.1)] if bad else said))
        return begun[-1]

    with study(tmp_path) as opened:
        went(opened, 8, begin)
        tried = opened.tried()
        assert (tried[6].outcome, tried[6].figure, tried[6].epochs) == ("pruned", 0.1, 1)
        assert begun[6].answers[0] == PRUNED and set(begun[7].answers) == {GO_ON}
        assert [each.outcome for each in tried].count("complete") == 7
    with study(tmp_path, pruner="none") as opened:
        went(opened, 9, lambda tried, share: Scripted([epoch(1, 0.0), epoch(2, 0.0, last=True), result(2, 0.0)]))
        assert opened.tried()[8].outcome == "complete"


def test_a_grid_is_gone_through_once_in_order(tmp_path: Path) -> None:
    texts = ["batch_size=32,64", "model.layers.conv1.channels=range(1,4)"]
    with study(tmp_path, *texts, sampler="grid") as opened:
        went(opened, 20)
        tried = [tuple(each.values.values()) for each in opened.tried()]
        assert tried == [("32", 1), ("32", 2), ("32", 3), ("64", 1), ("64", 2), ("64", 3)]
        assert opened.exhausted


def test_the_same_settings_are_not_trained_twice(tmp_path: Path) -> None:
    begun = []

    def begin(tried: Tried, share: Share) -> Scripted:
        begun.append(tuple(tried.values.values()))
        return trains(tried, share)

    with study(tmp_path, "batch_size=32,64", "seed=1,2", sampler="random") as opened:
        went(opened, 30, begin)
        assert sorted(begun) == [("32", "1"), ("32", "2"), ("64", "1"), ("64", "2")]
        repeated = [each for each in opened.tried() if each.outcome == "repeated"]
        assert all(each.reason.startswith("as trial ") and each.figure is not None for each in repeated)
        assert len(opened.ranked()) == 4 and opened.counted == 4 + len(repeated)


def test_trials_side_by_side_are_as_many_as_there_are_shares(tmp_path: Path) -> None:
    begun: list[Scripted] = []
    most = []

    def begin(tried: Tried, share: Share) -> Scripted:
        begun.append(trains(tried, share))
        most.append(sum(each.open for each in begun))
        return begun[-1]

    with study(tmp_path) as opened:
        went(opened, 7, begin, jobs=3)
        assert max(most) == 3 and opened.counted == len(begun) == 7


def test_no_trial_begins_after_the_time(tmp_path: Path) -> None:
    with study(tmp_path) as opened:
        assert went(opened, 3, timeout_s=1e-9).late and opened.tried() == []


def test_what_matters_is_told(tmp_path: Path) -> None:
    with study(tmp_path) as opened:
        assert opened.importances() == {}
        went(opened, 12)
        found = opened.importances()
        assert set(found) == {"optimizer.learning_rate", "model.layers.conv1.channels"}
        assert found["optimizer.learning_rate"] > 0.5 and sum(found.values()) == pytest.approx(1)


def test_files_that_are_no_study_of_this_search_are_refused(tmp_path: Path) -> None:
    with study(tmp_path):
        pass
    with pytest.raises(DataError, match="is a study of another search"), study(tmp_path, "batch_size=1,2"):
        pass
    with pytest.raises(DataError, match="is a study of another search"), study(tmp_path, objective="loss"):
        pass
    other = tmp_path / "other"
    other.mkdir()
    for content in (b"a text\n" * 100, b"\0" * 4096):
        (other / "study.db").write_bytes(content)
        with pytest.raises(DataError, match="study.db: is not a study") as refused, study(other):
            pass
        assert "\n" not in str(refused.value)


def test_a_study_that_was_tampered_with_gives_no_settings(tmp_path: Path) -> None:
    with study(tmp_path, "batch_size=32,64") as opened:
        went(opened, 2)
    with sqlite3.connect(tmp_path / "study.db") as database:
        changed = '{"name": "CategoricalDistribution", "attributes": {"choices": ["32", "64 hydra.run.dir=/"]}}'
        database.execute("UPDATE trial_params SET distribution_json = ?, param_value = 1", (changed,))
    database.close()
    with study(tmp_path, "batch_size=32,64") as opened, pytest.raises(DataError, match="none of those"):
        opened.tried()


def test_nothing_is_warned_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with study(tmp_path, pruner="hyperband") as opened:
            went(opened, 12)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
