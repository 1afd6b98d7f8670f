"""Differences between runs, averages of their figures, and the conclusions."""

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


def runs(folder: Path, *figures: dict[str, Any]) -> None:
    """Make runs named 0, 1, 2 ... with 1, 2, 3 ... workers and these figures."""
    for number, own in enumerate(figures):
        made(folder / str(number), **{"workers": number + 1, **own})


def of(*folders: Path, to: float | None = None) -> Comparison:
    return compared(find([str(folder) for folder in folders]), to)


def cells(comparison: Comparison, name: str) -> list[str]:
    table = columns(comparison, in_order(comparison, "run"))
    return list(next(column for column in table if column.key == name).cells)


OURS = "cupynet.parallel.ParameterAveraging"
EVERY_3 = "parallel.averaging_frequency=3"
IDLE = "resume: x\ncallbacks:\n  progress: {style: bar}\n  report: {enabled: false}\n  checkpoint: {keep_last: 9}\n"
MODELS = [
    {"extra": f"model: {part}\n"}
    for part in ("{_target_: A}", "{_target_: B, a: 1, b: 2}", "{_target_: B, a: 1, b: 3}")
]
DROPOUT = "model: {_target_: B, drop: {_target_: D, rate: 0.5}}\n"
OF_GPUS = [
    {"extra": f"backend: {{max_block_size: {size}, name: {name}}}\nmemory: {{data_on_device: {size > 128}}}\n"}
    for size, name in ((128, "auto"), (256, "numba"))
]
DIFFERENCES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {  # the runs, and the settings that are listed
    "seeds and callbacks": ([{"seed": 1}, {"seed": 2, "extra": IDLE}], []),
    "references": ([{"averaging_frequency": 1}, {"averaging_frequency": 3}], ["parallel.averaging_frequency"]),
    "equal by chance": ([{"workers": each, "extra": f"repeats: {each}\n"} for each in (1, 2)], ["workers", "repeats"]),
    "no effect": ([{"averaging_frequency": every, "synchronizer": OURS} for every in (1, 3)], []),
    "files": ([{"optimizer": "sgd", "rate": 0.1}, {"optimizer": "adam", "rate": 0.01}], ["optimizer"]),
    "a setting of a file": (
        [{"optimizer": "sgd", "rate": 0.1}, {"optimizer": "adam", "rate": 0.01}, {"optimizer": "adam", "rate": 0.1}],
        ["optimizer", "optimizer.learning_rate"],
    ),
    "a setting beside a file": (
        [
            {"optimizer": "sgd", "rate": 0.1, "extra": "repeats: 1\n"},
            {"optimizer": "adam", "rate": 0.01, "extra": "repeats: 2\n"},
        ],
        ["optimizer", "repeats"],
    ),
    "a typed setting of a file": (
        [
            {"optimizer": "sgd", "rate": 0.1, "typed": ["optimizer=sgd", "optimizer.learning_rate=0.1"]},
            {"optimizer": "adam", "rate": 0.01, "typed": ["optimizer=adam"]},
        ],
        ["optimizer", "optimizer.learning_rate"],
    ),
    "typed alike": (
        [{"averaging_frequency": 3, "synchronizer": OURS, "workers": each, "typed": [EVERY_3]} for each in (1, 2)],
        ["workers"],
    ),
    "typed for several workers": (
        [
            {"workers": 1, "synchronizer": OURS},
            {"workers": 2, "synchronizer": OURS, "averaging_frequency": 3, "typed": [EVERY_3]},
        ],
        ["workers", "parallel.averaging_frequency"],
    ),
    "of synchronizers": (
        [
            {"workers": 1, "synchronizer": OURS},
            {"workers": 2, "synchronizer": "cupynet.parallel.Other", "extra": "    encoding: 4\n"},
        ],
        ["workers"],
    ),
    "classes": (MODELS[:2], ["model._target_"]),
    "arguments of a class": (MODELS, ["model._target_", "model.b"]),
    "an additional part": ([{"extra": "model: {_target_: B}\n"}, {"extra": DROPOUT}], ["model.drop._target_"]),
    "an additional part of a class": (
        [{"extra": "model: {_target_: A}\n"}, *({"extra": part} for part in ("model: {_target_: B}\n", DROPOUT))],
        ["model._target_", "model.drop._target_"],
    ),
    "of GPUs, on a CPU": (OF_GPUS, []),
    "of GPUs": ([{**each, "backend": "cupy"} for each in OF_GPUS], ["backend.max_block_size", "memory.data_on_device"]),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_only_settings_that_differ_between_runs_are_listed(kind: str, tmp_path: Path) -> None:
    made_of, listed = DIFFERENCES[kind]
    for number, settings in enumerate(made_of):
        made(tmp_path / str(number), **settings)
    comparison = of(tmp_path)
    assert comparison.varied == listed and (len(comparison.groups) == 1) == (listed == [])


def test_runs_are_compared_by_the_number_of_workers_that_was_chosen_automatically(tmp_path: Path) -> None:
    for name, workers in (("0", 2), ("1", 4)):
        run = made(tmp_path / name, workers=workers)
        path = run / ".hydra" / "config.yaml"
        path.write_text(path.read_text().replace(f"workers: {workers}", "workers: null"))
    assert cells(of(tmp_path), "workers") == ["2", "4"]


def test_runs_that_differ_only_in_settings_without_effect_are_combined_into_one_row(tmp_path: Path) -> None:
    for workers, every in ((1, 1), (1, 3), (2, 1), (2, 3)):
        made(tmp_path / f"{workers}-{every}", workers=workers, averaging_frequency=every, synchronizer=OURS)
    groups = of(tmp_path).groups
    assert [group.name for group in groups] == [
        "workers=1", "workers=2 averaging_frequency=1", "workers=2 averaging_frequency=3",
    ]  # fmt: skip
    assert [len(group.runs) for group in groups] == [2, 1, 1]
    for every in (1, 3):  # a user's synchronizer may have an effect on one worker
        made(tmp_path / "mine" / str(every), workers=1, averaging_frequency=every)
    assert len(of(tmp_path / "mine").groups) == 2


def test_runs_that_differ_only_in_the_seed_are_combined_into_one_row(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.90, 0.92, 0.97)):
        made(tmp_path / f"a{seed}", seed=seed, test_accuracy=accuracy)
    made(tmp_path / "b", workers=2, test_accuracy=0.95)
    comparison = of(tmp_path)
    assert [len(group.runs) for group in comparison.groups] == [3, 1]
    assert comparison.groups[0].figures["accuracy"] == pytest.approx(0.93)
    assert cells(comparison, "seeds") == ["3", "1"]
    assert [cells(comparison, f"accuracy_{which}")[0] for which in ("min", "max")] == ["90.00 %", "97.00 %"]
    assert cells(comparison, "run") == ["a0 (3 runs)", "b"]


def test_speed_up_is_over_one_worker_with_the_same_settings(tmp_path: Path) -> None:
    made(tmp_path / "0", workers=1, averaging_frequency=1, images_per_s=900.0)
    made(tmp_path / "1", workers=1, averaging_frequency=3, images_per_s=1100.0)  # a single worker is never averaged
    made(tmp_path / "2", workers=4, averaging_frequency=3, images_per_s=3000.0)
    made(tmp_path / "3", workers=4, averaging_frequency=3, images_per_s=3000.0, rate=0.5)  # no single worker has it
    groups = of(tmp_path).groups
    assert [group.figures.get("speed_up") for group in groups] == [None, None, 3.0, None]
    assert groups[2].figures["efficiency"] == 0.75


def test_drift_is_shown_only_for_several_replicas(tmp_path: Path) -> None:
    runs(tmp_path, {"workers": 1, "drift": 0.0}, {"workers": 2, "drift": 0.0012}, {"workers": 4, "drift": None})
    assert cells(of(tmp_path), "drift") == ["-", "0.12 %", "-"]


def test_time_to_an_accuracy_is_of_training_up_to_the_first_epoch_that_had_it(tmp_path: Path) -> None:
    runs(tmp_path, {"accuracies": [0.5, 0.91, 0.89]}, {"accuracies": [0.92, 0.95]}, {"accuracies": [0.1, 0.2]})
    assert cells(of(tmp_path, to=0.9), "time_to") == ["10.0 s", "5.0 s", "-"]
    assert of(tmp_path).target == 0.9  # the highest round target that half of them reached
    assert "time_to" not in of(tmp_path, to=0.99).groups[0].figures


def test_the_pareto_front_has_the_runs_that_no_other_beats_in_both_accuracy_and_time(tmp_path: Path) -> None:
    figures = ((0.95, 20.0), (0.93, 10.0), (0.94, 21.0), (0.90, 12.0), (0.93, 10.0))
    runs(tmp_path, *({"test_accuracy": accuracy, "train_s": train_s} for accuracy, train_s in figures))
    assert [group.front for group in of(tmp_path).groups] == [True, True, False, False, True]


def test_runs_are_sorted_as_requested(tmp_path: Path) -> None:
    for workers, accuracy, train_s in ((1, 0.95, 20.0), (2, 0.93, 30.0), (10, 0.94, 10.0)):
        made(tmp_path / str(workers), workers=workers, test_accuracy=accuracy, train_s=train_s)
    comparison = of(tmp_path)
    for by, order in (
        (None, [1, 10, 2]), ("train_s", [10, 1, 2]), ("-train_s", [2, 1, 10]), ("-workers", [10, 2, 1]),
        ("run", [1, 2, 10]), ("accuracy", [2, 10, 1]),
    ):  # fmt: skip
        assert [group.workers for group in in_order(comparison, by)] == order, by
    with pytest.raises(ConfigError):
        in_order(comparison, "trains_s")


def test_runs_without_a_result_are_listed_with_their_problem(tmp_path: Path) -> None:
    for name in ("unfinished", "failed"):
        (made(tmp_path / name) / "summary.json").unlink()
    (tmp_path / "failed" / "train.log").write_text("2026-11-22 10:00:01,000 ERROR cupynet: job 2: damaged\n")
    made(tmp_path / "SIGTERM", stop_reason="signal", stopped_by="SIGTERM")
    (made(tmp_path / "summary.json") / "summary.json").write_text('{"dataset": ')
    (made(tmp_path / "config.yaml") / ".hydra" / "config.yaml").write_text("a: &a [1]\nb: *a\n")
    others = [run for group in of(tmp_path).others for run in group.runs]
    assert len(others) == 5
    for run in others:  # each folder is named after its problem
        assert run.name in run.trouble


def test_results_from_before_a_run_was_resumed_do_not_count(tmp_path: Path) -> None:
    """The run already has the settings of the longer training."""
    run = made(tmp_path / "0")
    assert [each.trouble for each in find([str(tmp_path)])] == [""]
    Run(run).reopen(100)
    assert all(each.trouble for each in find([str(tmp_path)]))


def test_invalid_values_in_a_history_are_not_used(tmp_path: Path) -> None:
    run = made(tmp_path / "0")
    rows = ["[1]", '{"kind": "epoch"}', '{"kind": "epoch", "iteration": 1' + "0" * 400 + "}"]
    rows += ['{"kind": "epoch", "iteration": 150, "train_s": null, "test_accuracy": "x"}', '{"ki']
    with (run / "history.jsonl").open("a") as file:
        file.write("\n".join(rows))
    (found,) = find([str(run)])
    assert [(each.iteration, each.train_s, each.accuracy["test"]) for each in found.epochs] == [
        (50, 5.0, 0.8), (100, 10.0, 0.9), (0, 10.0, None), (0, 10.0, None), (150, 10.0, None),
    ]  # fmt: skip


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
    """Make another command's folder, which stores its settings like a run."""
    (made(folder) / "summary.json").unlink()
    (folder / "history.jsonl").unlink()
    with (folder / ".hydra" / "config.yaml").open("a") as file:
        file.write(settings)
    return folder


@pytest.mark.parametrize("settings", ["repeats: 5\n", "frequencies: null\n", "lowest: 0.1\n"])
def test_folders_of_other_commands_are_not_runs(settings: str, tmp_path: Path) -> None:
    with refused(""):
        find([str(other_command(tmp_path / "other", settings))])


def test_the_trials_of_a_search_are_runs_and_the_search_is_not(tmp_path: Path) -> None:
    search = other_command(tmp_path / "tune", "search: [seed=1]\ntrials: 2\n")
    made(search / "trials" / "0000", rate=0.1)
    made(search / "trials" / "0001", rate=0.2, stop_reason="early", stopped_by="pruned: other trials were better")
    made(tmp_path / "run", workers=2)
    comparison = of(tmp_path)
    assert [run.folder.name for run in comparison.finished] == ["run", "0000"]
    assert [group.runs[0].name for group in comparison.others] == ["tune/trials/0001"]
    with refused(""):
        read_run(search)


MANY = {"samples": 10_000_000}  # so many that no difference is due to chance


def chosen(folder: Path) -> int | None:
    group = answer(of(folder)).chosen
    return None if group is None else group.workers


def test_the_fastest_run_within_a_tenth_of_a_point_of_the_best_accuracy_is_recommended(tmp_path: Path) -> None:
    figures = ((0.9900, 30.0), (0.9891, 16.0), (0.9880, 9.0))
    runs(tmp_path, *({"test_accuracy": a, "train_s": s, "test": MANY} for a, s in figures))
    assert chosen(tmp_path) == 2
    for part in ("workers=2", "98.91 %", "16.0 s", "workers=1", "99.00 %", "30.0 s"):
        assert part in answer(of(tmp_path)).text
    made(tmp_path / "3", workers=8, test_accuracy=0.9950, train_s=40.0, test=MANY)
    assert chosen(tmp_path) == 8


def test_a_more_accurate_run_that_takes_at_most_5_percent_longer_is_recommended(tmp_path: Path) -> None:
    figures = ((0.9900, 10.2), (0.9895, 10.0))
    runs(tmp_path, *({"test_accuracy": a, "train_s": s, "test": MANY} for a, s in figures))
    assert chosen(tmp_path) == 1 and "workers=2" in answer(of(tmp_path)).notes[0]
    made(tmp_path / "2", workers=4, test_accuracy=0.9895, train_s=9.0, test=MANY)
    assert chosen(tmp_path) == 4 and "workers=" not in answer(of(tmp_path)).notes[0]


def test_a_comparison_of_single_seeds_notes_differences_that_may_be_due_to_chance(tmp_path: Path) -> None:
    runs(tmp_path, {"test_accuracy": 0.9900, "train_s": 30.0}, {"test_accuracy": 0.9880, "train_s": 16.0})
    # two standard errors of a difference: 2 sqrt(2 · 0.99 · 0.01 / 10,000) = 0.28 points
    note = answer(of(tmp_path)).notes[0]
    assert "10,000 images" in note and "0.28 points" in note and "seed=1,2,3" in note
    for workers in (1, 2):
        made(tmp_path / f"seed-{workers}", workers=workers, seed=7)
    assert "10,000 images" not in " ".join(answer(of(tmp_path)).notes)


@pytest.mark.parametrize(
    ("other", "data"), [({"dataset": "cifar10"}, "cifar10"), ({"test": {"samples": 500}}, "mnist (500 images)")]
)
def test_runs_on_different_data_are_not_ranked(other: dict[str, Any], data: str, tmp_path: Path) -> None:
    runs(tmp_path, {}, other)
    _, notes, chosen = answer(of(tmp_path))
    assert chosen is None and len(notes) == 1 and data in notes[0]


@pytest.mark.parametrize(
    ("dataset", "figures", "ranked"),
    [("synthetic", {}, False), ("mnist", {}, True), ("mnist", {"validation_accuracy": 0.9}, False)],
)
def test_runs_are_not_ranked_if_the_data_seed_gave_them_other_images(
    dataset: str, figures: dict[str, Any], ranked: bool, tmp_path: Path
) -> None:
    for seed in (1, 2):
        extra = f"data: {{seed: {seed}, validation: 100}}\n"
        made(tmp_path / str(seed), dataset=dataset, extra=extra, **figures)
    text, notes, chosen = answer(of(tmp_path))
    assert (chosen is not None) == ranked and ("data.seed=1" in text if ranked else "data.seed=2" in notes[0])


@pytest.mark.parametrize(("downloaded", "noted"), [("", True), ("timeout_s: 30, ", False)])
def test_runs_on_different_files_of_the_user_are_noted(downloaded: str, noted: bool, tmp_path: Path) -> None:
    for number in (1, 2):
        made(tmp_path / str(number), dataset="d", extra=f"data: {{{downloaded}folder: v{number}}}\n")
    assert ("data.folder" in " ".join(answer(of(tmp_path)).notes)) == noted


def test_a_fast_dev_run_of_an_earlier_version_is_not_a_result(tmp_path: Path) -> None:
    made(tmp_path / "0", extra="fast_dev_run: true\n")
    ((run,),) = (group.runs for group in of(tmp_path).others)
    assert "fast_dev_run" in run.trouble


@pytest.mark.parametrize(
    "doubt",
    [{"fallback": True}, {"commit": "def"}, {"environment": {"cpu": "another", "cores": 8, "system": "Linux"}}],
    ids=["fallback data", "another version", "another machine"],
)
def test_runs_on_fallback_data_another_version_or_machine_are_noted(doubt: dict[str, Any], tmp_path: Path) -> None:
    few: dict[str, Any] = {"test": {"samples": 10}}
    runs(tmp_path, few, few)
    sure = answer(of(tmp_path))
    made(tmp_path / "2", workers=4, **few, **doubt)
    doubtful = answer(of(tmp_path))
    assert doubtful.chosen is not None and len(set(doubtful.notes) - set(sure.notes) - {doubtful.notes[0]}) == 1


def test_runs_are_ranked_by_validation_accuracy_if_all_have_one_otherwise_by_test_accuracy(tmp_path: Path) -> None:
    extra = "data:\n  validation: 5000\n"
    made(tmp_path / "0", validation_accuracy=0.91, test_accuracy=0.99, extra=extra)
    made(tmp_path / "1", workers=2, validation_accuracy=0.98, test_accuracy=0.90, extra=extra)
    assert of(tmp_path).split == "validation" and chosen(tmp_path) == 2
    made(tmp_path / "2", workers=4)
    assert of(tmp_path).split == "test"


def test_nothing_is_recommended_from_a_single_result(tmp_path: Path) -> None:
    (made(tmp_path / "0") / "summary.json").unlink()
    assert answer(of(tmp_path)).chosen is None
    made(tmp_path / "1", workers=2)
    text, notes, _ = answer(of(tmp_path))
    assert "90.00 % in 10.0 s" in text and "Use" not in text and notes == []


def test_pipes_and_devices_in_the_folder_of_a_run_are_not_read(tmp_path: Path) -> None:
    run = made(tmp_path / "0")
    (run / "summary.json").unlink()
    (run / "history.jsonl").unlink()
    os.mkfifo(run / "train.log")
    (run / "history.jsonl").symlink_to("/dev/zero")
    assert [each.trouble for each in find([str(tmp_path)])] == ["unfinished"]


def test_the_parallel_method_of_the_only_run_with_several_workers_is_listed(tmp_path: Path) -> None:
    for workers, name in ((1, "averaging"), (2, "gradients")):
        typed = [] if workers == 1 else ["parallel=gradients"]
        run = made(tmp_path / name, workers=workers, synchronizer=f"cupynet.parallel.{name}", typed=typed)
        path = run / ".hydra" / "hydra.yaml"
        path.write_text(path.read_text() + f"      parallel: {name}\n")
    assert of(tmp_path).varied == ["parallel", "workers"]


def test_settings_that_may_follow_from_an_experiment_are_not_listed(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b", "b")):
        run = made(tmp_path / str(number), rate=0.1 * (number + 1), extra=f"repeats: {min(number, 1)}\n")
        path = run / ".hydra" / "hydra.yaml"
        path.write_text(path.read_text() + f"      experiment: {name}\n")
    assert of(tmp_path).varied == ["experiment", "optimizer.learning_rate"]


def test_runs_that_differ_only_in_files_of_groups_without_effect_are_combined_into_one_row(tmp_path: Path) -> None:
    for number, name in enumerate(("averaging", "elastic", "elastic")):
        run = made(tmp_path / str(number), workers=1 + number // 2, synchronizer=f"cupynet.parallel.{name}")
        path = run / ".hydra" / "hydra.yaml"
        path.write_text(path.read_text() + f"      parallel: {name}\n      backend: {('auto', 'numba')[number % 2]}\n")
    assert [group.name for group in of(tmp_path).groups] == ["workers=1", "workers=2"]
