"""What differs between runs, what their figures come to, and what is made of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cupynet.core.errors import ConfigError
from cupynet.reporting.comparison.answer import answer
from cupynet.reporting.comparison.groups import Comparison, compared
from cupynet.reporting.comparison.runs import find, natural
from cupynet.reporting.comparison.table import columns, in_order
from cupynet.reporting.folder import read_run
from cupynet.runs.run import Run
from tests.support.compared_runs import made
from tests.support.refusals import refused


def of(*runs: Path, to: float | None = None) -> Comparison:
    return compared(find([str(run) for run in runs]), to)


def cells(comparison: Comparison, name: str, sort: str | None = "run") -> list[str]:
    table = columns(comparison, in_order(comparison, sort))
    return list(next(column for column in table if column.key == name).cells)


def test_only_differing_settings_are_listed(tmp_path: Path) -> None:
    made(tmp_path / "0", workers=1, averaging_frequency=1, seed=1)
    idle = "  progress: {style: bar}\n  report: {enabled: false}\n  checkpoint: {keep_last: 9}\n"
    made(tmp_path / "1", workers=2, averaging_frequency=1, seed=2, extra=f"resume: x\ncallbacks:\n{idle}")
    assert of(tmp_path).varied == ["workers"]
    made(tmp_path / "2", workers=2, averaging_frequency=3)
    comparison = of(tmp_path)
    assert comparison.varied == ["workers", "parallel.averaging_frequency"]  # what refers to it does not count again
    assert [group.name for group in comparison.groups] == [
        "workers=1 averaging_frequency=1",
        "workers=2 averaging_frequency=1",
        "workers=2 averaging_frequency=3",
    ]


def test_a_file_of_a_group_stands_for_what_is_in_it(tmp_path: Path) -> None:
    made(tmp_path / "0", optimizer="sgd", rate=0.1)
    made(tmp_path / "1", optimizer="adam", rate=0.001)
    assert of(tmp_path).varied == ["optimizer"]
    made(tmp_path / "2", optimizer="adam", rate=0.01)
    assert of(tmp_path).varied == ["optimizer", "optimizer.learning_rate"]


def test_the_arguments_of_another_class_are_not_listed(tmp_path: Path) -> None:
    for number, part in enumerate(("{_target_: One}", "{_target_: Two, a: 1, b: 2}", "{_target_: Two, a: 1, b: 3}")):
        made(tmp_path / str(number), extra=f"model: {part}\n")
    assert of(tmp_path).varied == ["model._target_", "model.b"]
    assert of(tmp_path / "0", tmp_path / "1").varied == ["model._target_"]


def test_the_number_of_workers_that_was_decided_counts(tmp_path: Path) -> None:
    for name, workers in (("0", 2), ("1", 4)):
        run = made(tmp_path / name, workers=workers)
        path = run / ".hydra" / "config.yaml"
        path.write_text(path.read_text().replace(f"workers: {workers}", "workers: null"))
    assert cells(of(tmp_path), "workers") == ["2", "4"]


OURS = "cupynet.parallel.ParameterAveraging"


def test_settings_without_effect_make_no_row(tmp_path: Path) -> None:
    for workers in (1, 2):
        for every in (1, 3):
            name = f"{workers}-{every}"
            made(tmp_path / name, workers=workers, averaging_frequency=every, synchronizer=OURS, train_s=10.0 + every)
    comparison = of(tmp_path)
    assert [group.name for group in comparison.groups] == [
        "workers=1",
        "workers=2 averaging_frequency=1",
        "workers=2 averaging_frequency=3",
    ]
    assert [len(group.runs) for group in comparison.groups] == [2, 1, 1]
    assert any("10,000 images" in note for note in answer(comparison).notes)  # the same seed twice is one result
    alone = of(tmp_path / "1-1", tmp_path / "1-3")
    assert alone.varied == [] and len(alone.judged) == 1
    assert len(of(tmp_path / "1-1", made(tmp_path / "x", averaging_frequency=3)).groups) == 2  # a user's synchronizer


def test_settings_of_gpus_and_open_settings_make_no_row_on_a_cpu(tmp_path: Path) -> None:
    settings = ("  max_block_size: 128\n  name: auto\n", "  max_block_size: 256\n  name: numba\n")
    for number, setting in enumerate(settings):
        made(tmp_path / str(number), extra=f"backend:\n{setting}memory:\n  data_on_device: {number}\n")
    assert len(of(tmp_path).groups) == 1
    for number in range(2):
        path = tmp_path / str(number) / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "backend": "cupy"}))
    assert of(tmp_path).varied == ["backend.max_block_size", "memory.data_on_device"]


def test_files_of_groups_without_effect_make_no_row(tmp_path: Path) -> None:
    for number, name in enumerate(("averaging", "elastic", "elastic")):
        run = made(tmp_path / str(number), workers=1 + number // 2, synchronizer=f"cupynet.parallel.{name}")
        path = run / ".hydra" / "hydra.yaml"
        path.write_text(path.read_text() + f"      parallel: {name}\n      backend: {('auto', 'numba')[number % 2]}\n")
    assert [group.name for group in of(tmp_path).groups] == ["workers=1", "workers=2"]


def test_seeds_are_repetitions(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.90, 0.92, 0.97)):
        made(tmp_path / f"a{seed}", seed=seed, test_accuracy=accuracy)
    made(tmp_path / "b", workers=2, test_accuracy=0.95)
    comparison = of(tmp_path)
    assert [len(group.runs) for group in comparison.groups] == [3, 1]
    assert comparison.groups[0].figures["accuracy"] == pytest.approx(0.93)
    assert cells(comparison, "seeds") == ["3", "1"] and cells(comparison, "accuracy_range")[0] == "90.00-97.00"
    assert cells(comparison, "run") == ["a0+2", "b"]


def test_speed_up_is_over_one_worker_with_the_same_settings(tmp_path: Path) -> None:
    made(tmp_path / "0", workers=1, averaging_frequency=1, images_per_s=900.0)
    made(tmp_path / "1", workers=1, averaging_frequency=3, images_per_s=1100.0)  # one alone is never averaged
    made(tmp_path / "2", workers=4, averaging_frequency=3, images_per_s=3000.0)
    made(tmp_path / "3", workers=4, averaging_frequency=3, images_per_s=3000.0, rate=0.5)  # there is no such single one
    groups = of(tmp_path).groups
    assert [group.figures.get("speed_up") for group in groups] == [None, None, 3.0, None]
    assert groups[2].figures["efficiency"] == 0.75


def test_time_to_an_accuracy_is_of_training_up_to_the_first_epoch_that_had_it(tmp_path: Path) -> None:
    made(tmp_path / "0", accuracies=[0.5, 0.91, 0.89])
    made(tmp_path / "1", workers=2, accuracies=[0.92, 0.95])
    made(tmp_path / "2", workers=4, accuracies=[0.1, 0.2])
    assert cells(of(tmp_path, to=0.9), "time_to") == ["10.0 s", "5.0 s", "-"]
    assert of(tmp_path).target == 0.9  # the highest of round ones that half of them reached
    assert "time_to" not in of(tmp_path, to=0.99).groups[0].figures


def test_the_front_has_runs_that_no_other_beats_in_both(tmp_path: Path) -> None:
    for workers, accuracy, train_s in (
        (1, 0.95, 20.0),
        (2, 0.93, 10.0),
        (3, 0.94, 21.0),
        (4, 0.90, 12.0),
        (5, 0.93, 10.0),
    ):
        made(tmp_path / str(workers), workers=workers, test_accuracy=accuracy, train_s=train_s)
    assert [group.front for group in of(tmp_path).groups] == [True, True, False, False, True]


def test_runs_are_sorted_as_requested(tmp_path: Path) -> None:
    for workers, accuracy, train_s in ((1, 0.95, 20.0), (2, 0.93, 30.0), (10, 0.94, 10.0)):
        made(tmp_path / str(workers), workers=workers, test_accuracy=accuracy, train_s=train_s)
    comparison = of(tmp_path)
    for by, order in (
        (None, [1, 10, 2]), ("train_s", [10, 1, 2]), ("-train_s", [2, 1, 10]), ("workers", [1, 2, 10]),
        ("-workers", [10, 2, 1]), ("run", [1, 2, 10]), ("-run", [10, 2, 1]), ("accuracy", [2, 10, 1]),
    ):  # fmt: skip
        assert [group.workers for group in in_order(comparison, by)] == order, by
    with pytest.raises(ConfigError):
        in_order(comparison, "trains_s")


# what is left of a run ------------------------------------------------------------------------------------------------


def test_runs_without_a_result_are_listed(tmp_path: Path) -> None:
    made(tmp_path / "0")
    (made(tmp_path / "1", workers=2) / "summary.json").unlink()
    (made(tmp_path / "2", workers=3) / "summary.json").unlink()
    log = "2026-11-22 10:00:00,000 INFO cupynet: x\n2026-11-22 10:00:01,000 ERROR cupynet: job 2: damaged\n"
    (tmp_path / "2" / "train.log").write_text(log)
    made(tmp_path / "3", workers=4, stop_reason="signal", stopped_by="SIGTERM")
    (made(tmp_path / "4", workers=5) / "summary.json").write_text('{"dataset": ')
    (made(tmp_path / "5", workers=6) / "summary.json").write_text('{"dataset": "mnist"}')
    (made(tmp_path / "6") / ".hydra" / "config.yaml").write_text("a: &a [1]\nb: *a\n")
    found = {group.runs[0].name: group.runs[0].trouble for group in of(tmp_path).others}
    assert list(found) == ["1", "2", "3", "4", "5", "6"]
    for name, part in {"1": "unfinished", "2": "failed", "3": "SIGTERM"}.items():
        assert part in found[name]
    for name, file in {"4": "summary.json", "5": "summary.json", "6": ".hydra/config.yaml"}.items():
        assert file in found[name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train_s", "soon"), ("images_per_s", True), ("test_accuracy", [0.9]), ("workers", 1.5), ("dataset", 3),
        ("train_s", float("nan")), ("environment", None), ("test", "all"), ("seed", None), ("stages", "2"),
        pytest.param("train_s", 10**400, id="train_s-long"),
        ("commit", ["abc"]), ("fallback", "no"), ("devices", None),
    ],
)  # fmt: skip
def test_missing_figures_name_their_run(name: str, value: Any, tmp_path: Path) -> None:
    made(tmp_path / "0")
    summary = json.loads((tmp_path / "0" / "summary.json").read_text())
    (tmp_path / "0" / "summary.json").write_text(json.dumps({**summary, name: value}))
    made(tmp_path / "1")
    comparison = of(tmp_path)
    ((run,),) = (group.runs for group in comparison.others)
    assert run.name == "0" and "summary.json" in run.trouble and len(comparison.groups) == 1


def test_results_from_before_a_run_was_resumed_do_not_count(tmp_path: Path) -> None:
    """Its settings are already those of the longer training."""
    run = made(tmp_path / "0")
    assert [each.trouble for each in find([str(tmp_path)])] == [""]
    Run(run).reopen(100)
    assert all(each.trouble for each in find([str(tmp_path)]))


def test_an_unfinished_run_is_marked(tmp_path: Path) -> None:
    from cupynet.core.lock import Hold

    (made(tmp_path / "0") / "summary.json").unlink()
    made(tmp_path / "1")
    hold = Hold(tmp_path / "0")
    try:
        assert of(tmp_path).others[0].runs[0].trouble == "still training"
    finally:
        hold.release()


def test_invalid_values_in_a_history_are_not_used(tmp_path: Path) -> None:
    run = made(tmp_path / "0")
    with (run / "history.jsonl").open("a") as file:
        file.write(
            '[1]\n{"kind": "epoch"}\n{"kind": "epoch", "iteration": 1'
            + "0" * 400
            + '}\n{"kind": "epoch", "iteration": 150, "train_s": null, "test_accuracy": "x"}\n{"ki'
        )
    (found,) = find([str(run)])
    assert [(each.iteration, each.train_s, each.accuracy) for each in found.epochs] == [
        (50, 5.0, {"test": 0.8, "validation": None}),
        (100, 10.0, {"test": 0.9, "validation": None}),
        (0, 10.0, {"test": None, "validation": None}),
        (0, 10.0, {"test": None, "validation": None}),
        (150, 10.0, {"test": None, "validation": None}),
    ]


def test_folders_are_found_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (0, 2, 10):
        made(tmp_path / "outputs" / "sweeps" / "today" / "now" / str(number), workers=number + 1)
    made(tmp_path / "outputs" / "today" / "early", workers=7)
    (tmp_path / "outputs" / "latest").symlink_to("today/early")

    def names(*paths: str) -> list[str]:
        return [run.folder.name for run in find(paths)]

    assert names("outputs/sweeps/today/now") == ["0", "2", "10"]
    assert names("outputs") == ["0", "2", "10", "early"]
    assert names("outputs/latest", "outputs/today/early", "outputs/sweeps/*/*/2") == ["latest", "2"]
    assert names("outputs/sweeps/today/now/[12]*") == ["2", "10"]
    assert sorted(["a10", "a9", "b"], key=natural) == ["a9", "a10", "b"]


def other_command(folder: Path, settings: str) -> Path:
    """Make the folder of another command, which stores its settings like a run."""
    (made(folder) / "summary.json").unlink()
    (folder / "history.jsonl").unlink()
    with (folder / ".hydra" / "config.yaml").open("a") as file:
        file.write(settings)
    return folder


def test_the_trials_of_a_search_are_runs_and_other_commands_are_not(tmp_path: Path) -> None:
    search = other_command(tmp_path / "tune", "search: [seed=1]\ntrials: 2\n")
    for name, settings in (("bench", "repeats: 5\n"), ("plan", "frequencies: null\n"), ("rate", "lowest: 0.1\n")):
        with refused(""):
            find([str(other_command(tmp_path / name, settings))])
    made(search / "trials" / "0000", rate=0.1)
    pruned = {"stop_reason": "early", "stopped_by": "pruned: other trials were better after as many epochs"}
    made(search / "trials" / "0001", rate=0.2, train_s=1.0, **pruned)
    made(tmp_path / "run", workers=2)
    comparison = of(tmp_path)
    assert [run.folder.name for run in comparison.finished] == ["run", "0000"]
    assert [group.runs[0].name for group in comparison.others] == ["tune/trials/0001"]
    assert len(of(search).finished) == 1
    with refused(""):
        read_run(search)


def test_trials_without_a_test_do_not_forbid_the_comparison_of_others(tmp_path: Path) -> None:
    made(tmp_path / "0")
    made(tmp_path / "1", workers=2, test=None, test_accuracy=None, test_loss=None, accuracies=[0.9])
    comparison = of(tmp_path)
    assert answer(comparison).chosen is comparison.groups[0]


# what is made of it ---------------------------------------------------------------------------------------------------


def test_the_fastest_close_to_the_best_is_recommended(tmp_path: Path) -> None:
    many = {"samples": 10_000_000}  # nothing is chance
    made(tmp_path / "0", workers=1, test_accuracy=0.9900, train_s=30.0, test=many)
    made(tmp_path / "1", workers=2, test_accuracy=0.9891, train_s=16.0, test=many)
    made(tmp_path / "2", workers=4, test_accuracy=0.9880, train_s=9.0, test=many)
    text, _, chosen = answer(of(tmp_path))
    assert chosen is not None and chosen.workers == 2
    for part in ("workers=2", "98.91 %", "16.0 s", "workers=1", "99.00 %", "30.0 s"):
        assert part in text
    made(tmp_path / "3", workers=8, test_accuracy=0.9950, train_s=40.0, test=many)
    chosen = answer(of(tmp_path)).chosen
    assert chosen is not None and chosen.workers == 8


def test_the_noise_of_a_timing_decides_nothing(tmp_path: Path) -> None:
    many = {"samples": 10_000_000}
    made(tmp_path / "0", workers=1, test_accuracy=0.9900, train_s=10.2, test=many)
    made(tmp_path / "1", workers=2, test_accuracy=0.9895, train_s=10.0, test=many)
    text, notes, chosen = answer(of(tmp_path))
    assert chosen is not None and chosen.workers == 1 and "workers=2" in notes[0]
    made(tmp_path / "2", workers=4, test_accuracy=0.9895, train_s=9.0, test=many)
    text, notes, chosen = answer(of(tmp_path))
    assert chosen is not None and chosen.workers == 4 and "workers=" not in notes[0]


def test_a_single_seed_has_a_note_on_chance(tmp_path: Path) -> None:
    made(tmp_path / "0", workers=1, test_accuracy=0.9900, train_s=30.0)
    made(tmp_path / "1", workers=2, test_accuracy=0.9880, train_s=16.0)
    # two standard errors of a difference: 2 sqrt(2 0.99 0.01 / 10,000) = 0.28 points
    note = answer(of(tmp_path)).notes[0]
    assert "10,000 images" in note and "0.28 points" in note and "seed=1,2,3" in note
    for workers in (1, 2):
        made(tmp_path / f"seed-{workers}", workers=workers, seed=7)
    assert "10,000 images" not in " ".join(answer(of(tmp_path)).notes)


AGAINST = {
    "data": ({"dataset": "cifar10"}, "cifar10 (10,000 images), mnist (10,000 images)"),
    "images": ({"test": {"samples": 500}}, "mnist (10,000 images), mnist (500 images)"),
}


@pytest.mark.parametrize("name", AGAINST)
def test_runs_on_different_data_are_not_ranked(name: str, tmp_path: Path) -> None:
    other, data = AGAINST[name]
    made(tmp_path / "0")
    made(tmp_path / "1", workers=2, **other)
    _, notes, chosen = answer(of(tmp_path))
    assert chosen is None and len(notes) == 1 and data in notes[0]


def test_a_trial_run_is_no_result(tmp_path: Path) -> None:
    made(tmp_path / "0", extra="fast_dev_run: true\n")
    ((run,),) = (group.runs for group in of(tmp_path).others)
    assert "fast_dev_run" in run.trouble


DOUBTS: dict[str, dict[str, Any]] = {
    "fallback data": {"fallback": True},
    "another version": {"commit": "def"},
    "another machine": {"environment": {"cpu": "another", "cores": 8, "system": "Linux"}},
}


@pytest.mark.parametrize("name", DOUBTS)
def test_doubtful_comparisons_are_flagged(name: str, tmp_path: Path) -> None:
    made(tmp_path / "0", test={"samples": 10})
    made(tmp_path / "1", workers=2, test={"samples": 10})
    sure = answer(of(tmp_path))
    made(tmp_path / "2", workers=4, test={"samples": 10}, **DOUBTS[name])
    doubtful = answer(of(tmp_path))
    assert doubtful.chosen is not None and len(set(doubtful.notes) - set(sure.notes) - {doubtful.notes[0]}) == 1


def test_validation_images_decide_where_all_have_some(tmp_path: Path) -> None:
    extra = "data:\n  validation: 5000\n"
    made(tmp_path / "0", validation_accuracy=0.91, test_accuracy=0.99, extra=extra)
    made(tmp_path / "1", workers=2, validation_accuracy=0.98, test_accuracy=0.90, extra=extra)
    comparison = of(tmp_path)
    chosen = answer(comparison).chosen
    assert comparison.split == "validation" and chosen is not None and chosen.workers == 2
    made(tmp_path / "2", workers=4)
    assert of(tmp_path).split == "test"


def test_no_recommendation_from_one_result(tmp_path: Path) -> None:
    (made(tmp_path / "0") / "summary.json").unlink()
    assert answer(of(tmp_path)).chosen is None
    made(tmp_path / "1", workers=2)
    text, notes, _ = answer(of(tmp_path))
    assert "90.00 % in 10.0 s" in text and "Use" not in text and notes == []


def test_files_that_never_end_are_not_read(tmp_path: Path) -> None:
    for name in ("0", "1"):
        run = made(tmp_path / name)
        (run / "summary.json").unlink()
        (run / "history.jsonl").unlink()
    for name in ("train.log", "history.jsonl"):
        os.mkfifo(tmp_path / "0" / name)
        (tmp_path / "1" / name).symlink_to("/dev/zero")
    assert [run.trouble for run in find([str(tmp_path)])] == ["unfinished", "unfinished"]
