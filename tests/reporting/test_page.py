"""A run's page: what it shows for each kind of folder, valid markup, and escaping of all text from the run."""

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.core.errors import DivergedError, OutputError
from cupynet.core.files import load_weights
from cupynet.core.lock import Hold
from cupynet.reporting import pictures
from cupynet.reporting.folder import read_run
from cupynet.reporting.page import clock, page_values, repeat, state, write_page
from cupynet.reporting.render import render
from cupynet.runs.run import Run
from tests.support.pages import Page, check_alone
from tests.support.run_folders import HOSTILE, finished, history, start, summary, unfinished


def page(folder: Path) -> str:
    return render("run.html", **page_values(read_run(folder)), charts=[], missing="").decode()


def made(folder: Path) -> Page:
    return Page(page(folder))


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_page_of_a_finished_run_shows_the_numbers_of_its_summary_json(tmp_path: Path) -> None:
    parsed = made(finished(tmp_path))
    for text in (
        "mnist: 93.33 % test accuracy", "finished", "2 workers", "commit 0123456789", "3,210/s", "1,605 per worker",
        "averaged every 3 iterations", "nothing stands out", "Conv2D",
        "a processor", "1.5 MB", "2026-05-01 12:30:00", "cupynet train workers=2",
    ):  # fmt: skip
        assert text in parsed.text, text
    (policy,) = [meta for meta in parsed.all("meta") if meta.get("http-equiv")]  # and none that loads the page again
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert policy["content"] == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_the_page_of_a_run_shows_its_times_and_the_shares_of_each_worker_also_as_text(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    time = page_values(read_run(folder))["time"]
    assert [figure for _, figure in time["facts"]] == ["2.0 s", "1:00 min", "3.0 s", "1:15 min", "1.5 MB"]
    shares = [each["aria-label"] for each in made(folder).all("div") if each.get("role") == "img"]
    assert shares == ["computing 75 %, averaging 10 %, other 15 %", "computing 80 %, averaging 5 %, other 15 %"]


def test_the_confusion_matrix_has_a_row_for_each_actual_class(tmp_path: Path) -> None:
    values = page_values(read_run(finished(tmp_path)))["evaluation"]
    assert [(name, [cell.text for cell in cells]) for name, cells in values["matrix"]] == [
        ("cat", ["30", "1", "0"]), ("dog", ["2", "29", "0"]), ("owl", ["0", "0", "38"]),
    ]  # fmt: skip
    assert values["matrix"][1][1][0].title == "dog predicted as cat: 2"
    assert values["classes"][0][:3] == ["cat", "0.9000", "0.8000"]  # precision, recall


def test_each_mistake_is_shown_with_its_own_picture(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    shown = page_values(read_run(folder))["mistakes"]
    assert [each["image"].alt for each in shown] == [
        "sample 7, dog predicted as cat", "sample 3, cat predicted as dog", "sample 9, dog predicted as cat",
    ]  # fmt: skip
    images = load_weights(folder / "examples.safetensors")["images"]
    sources = [pictures.example(image, "").source for image in images]
    assert [each["image"].source for each in shown] == sources
    assert [each["confidence"] for each in shown] == ["98.0 %", "71.0 %", "98.0 %"]


def test_hostile_text_of_a_run_is_escaped_in_its_page_which_needs_no_network(tmp_path: Path) -> None:
    text = HOSTILE + "a\x1b]0;title\x07\u202eb\u2066\x00"
    folder = finished(
        tmp_path, name="a<b>&'run", dataset=text, class_names=[text, "dog", "owl"], stopped_by=text,
        stop_reason="early", backend=text, dtype=text, commit=text, synchronizer=text, advice=text, devices=[text],
        environment={"cpu": text, "versions": {text: text}, "blas": [{"version": text}]},
    )  # fmt: skip
    layers = [{"layer": text, "kind": text, "settings": text, "output": text}]
    started = start(layers=layers, overrides=[f"data={text}"], config_dir=text, started=text)
    (folder / "started.json").write_text(json.dumps(started))
    (folder / ".hydra" / "config.yaml").write_text(f"a: {text}")
    write_rows(folder, [row | {"drift_by_layer": {text: 1.0}} for row in history()])
    path, missing = write_page(folder)
    written = path.read_text()
    assert not missing
    check_alone(written)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", written)
    parsed = Page(written)
    assert parsed.text.count("<script>alert('x')</script>") > 10 and parsed.text.count("\ufffd") > 50
    assert all((image.get("src") or "").startswith("data:") for image in parsed.all("img"))


RUNS: dict[str, tuple[dict[str, Any], str, str]] = {
    "whole": ({}, "finished", "good"),
    "early": ({"stop_reason": "early", "stopped_by": "no better"}, "stopped early", "good"),
    "signal": ({"stop_reason": "signal", "stopped_by": "SIGINT"}, "stopped", "warn"),
    "diverged": ({"stop_reason": "diverged", "stopped_by": "loss is NaN"}, "diverged", "bad"),
    "gone on": ({"iterations": 200}, "killed", "bad"),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_page_shows_whether_a_run_finished_stopped_diverged_or_was_killed(tmp_path: Path, name: str) -> None:
    changed, word, kind = RUNS[name]
    folder = finished(tmp_path, **changed)
    assert state(read_run(folder))[:2] == (word, kind)
    assert str(changed.get("stopped_by", "")) in made(folder).text


ERROR = "2026-05-01 12:00:00,000 ERROR cupynet.config.hydra_main: iteration 7: the loss is not finite\n"


@pytest.mark.parametrize(
    ("log", "code", "expected"),
    [
        ("", None, "killed"),
        (ERROR + "Traceback\n  more\n", None, "failed"),  # a run of an earlier version
        (ERROR, DivergedError.exit_code, "diverged"),
        (ERROR.replace("iteration 7", "infinite_mnist"), OutputError.exit_code, "failed"),
        (ERROR + "2026-05-01 12:00:00,000 INFO __main__: a second process began\n", None, "killed"),
        (ERROR.replace("ERROR", "INFO") * 30_000 + ERROR, None, "failed"),
    ],
    ids=["nothing", "error", "diverged", "no divergence", "resumed", "a long log"],
)
def test_a_run_without_results_failed_diverged_or_was_killed_as_its_log_and_exit_code_say(
    log: str, code: int | None, expected: str, tmp_path: Path
) -> None:
    folder = unfinished(tmp_path, rows=history(2), log=log)
    if code is not None:  # in earlier versions without the error
        Run(folder).failed_path.write_text(json.dumps({"exit_code": code}))
    word, kind, sentence = state(read_run(folder))
    assert (word, kind) == (expected, "bad")
    for part in ("2 of 3 epochs", "resume=") if expected == "killed" else (": the loss is not finite",):
        assert part in sentence


def test_a_failed_run_without_a_log_names_its_error(tmp_path: Path) -> None:
    folder = unfinished(tmp_path, rows=history(2))
    Run(folder).fail(DivergedError("the loss is not finite"))
    assert state(read_run(folder)) == ("diverged", "bad", "the loss is not finite")


@contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Lock a folder, as a process that is training in it does."""
    hold = Hold(folder)
    try:
        yield folder
    finally:
        hold.release()


def test_the_page_of_a_run_that_is_still_training_shows_its_progress(tmp_path: Path) -> None:
    with held(unfinished(tmp_path, rows=history(2)[:-1])) as folder:  # in the second of three epochs
        parsed = made(folder)
    assert "mnist: epoch 2/3" in parsed.text and "running" in parsed.text and "1 of 3 epochs" in parsed.text
    (bar,) = parsed.all("progress")
    assert (float(bar["max"] or 0), float(bar["value"] or 0)) == (3, 1)
    assert "cat predicted as cat: 21" in [cell.get("title") for cell in parsed.all("td")]  # from the last evaluation


def test_a_resumed_run_does_not_show_old_results(tmp_path: Path) -> None:
    with held(finished(tmp_path, test_accuracy=0.5)) as folder:
        values, parsed = page_values(read_run(folder)), made(folder)
    assert "running" in parsed.text and not values["mistakes"]
    assert "93.33 %" in parsed.text and "50.00 %" not in parsed.text


def test_the_page_of_a_run_with_only_validation_images_shows_their_last_confusion_matrix(tmp_path: Path) -> None:
    folder = finished(tmp_path, test=None, test_accuracy=None, validation_accuracy=0.9)
    path = folder / "history.jsonl"
    path.write_text(path.read_text().replace('"test_', '"validation_'))
    parsed = made(folder)
    assert "validation images" in parsed.text
    assert "cat predicted as cat: 23" in [cell.get("title") for cell in parsed.all("td")]


def test_the_figures_of_a_page_describe_the_final_weights(tmp_path: Path) -> None:
    """The final weights may come from an earlier epoch or be an average."""
    final = {"samples": 50, "loss": 0.125, "f1": 0.75, "metrics": {"kappa": 0.625}, "confusion": [[7, 0], [1, 42]]}
    other: dict[str, Any] = dict.fromkeys(["test", "test_accuracy", "test_loss", "test_f1"])
    folder = finished(tmp_path, validation=final, validation_accuracy=0.9, class_names=["a", "b"], **other)
    path = folder / "history.jsonl"
    path.write_text(path.read_text().replace('"test_', '"validation_'))
    tiles = {name: (value, remark) for name, value, remark in page_values(read_run(folder))["tiles"]}
    assert tiles["validation accuracy"] == ("90.00 %", "macro F1 0.7500")
    assert (tiles["validation loss"][0], tiles["validation kappa"][0]) == ("0.125", "0.625")
    assert "b predicted as b: 42" in [cell.get("title") for cell in made(folder).all("td")]


def test_the_figures_of_a_regression_describe_the_final_weights(tmp_path: Path) -> None:
    test = {"samples": 50, "loss": 0.5, "r2": 0.25, "metrics": {"median_error": 0.125}}
    folder = finished(tmp_path, test=test, test_accuracy=None, test_loss=0.5, test_f1=None)
    row = {"kind": "epoch", "epoch": 1, "iteration": 9, "test_loss": 0.75, "test_r2": 0.0}
    (folder / "history.jsonl").write_text(json.dumps(row) + "\n")
    tiles = {name: value for name, value, _ in page_values(read_run(folder))["tiles"]}
    assert (tiles["test loss"], tiles["test r2"], tiles["test median_error"]) == ("0.5", "0.25", "0.125")


def test_a_command_that_does_not_repeat_the_run_is_marked(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    before = made(folder).text
    (folder / "started.json").write_text(json.dumps(start(changed=True)))
    assert len(made(folder).text) > len(before)


def test_fallback_data_are_marked(tmp_path: Path) -> None:
    parsed = made(finished(tmp_path, fallback=True, dataset="synthetic"))
    assert "fallback data: synthetic" in parsed.text


DAMAGED = [
    ("summary.json", "{"),
    ("summary.json", "null"),
    ("summary.json", "\x00\x01"),
    ("summary.json", "[" * 100_000),
    ("summary.json", '{"epochs": 1' + "0" * 5000 + "}"),
    ("started.json", "[1, 2]"),
    ("started.json", ""),
    ("examples.safetensors", "\x00\x01"),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGED, ids=range(len(DAMAGED)))
def test_the_page_names_a_damaged_file_and_shows_the_rest(tmp_path: Path, name: str, damage: str) -> None:
    folder = finished(tmp_path)
    (folder / name).write_text(damage)
    values = page_values(read_run(folder))
    assert made(folder).text and values["settings"] and values["tiles"]
    assert any(name in text for text, _ in values["notices"])


WRONG: list[Any] = [None, 1, "x", [], {}, [None], [[1]], {"a": 1}, True, 1e400, -5, [{"kind": 1}], [[1, 2], [3]]]


def test_values_of_the_wrong_type_are_omitted_from_the_page(tmp_path: Path) -> None:
    """Each key of each file gets a wrong value in turn."""
    folder, values = finished(tmp_path), itertools.cycle(WRONG)
    for key in summary():
        (folder / "summary.json").write_text(json.dumps(summary(**{key: next(values)})))
        page(folder)
    for key in summary()["test"]:
        (folder / "summary.json").write_text(json.dumps(summary(test=summary()["test"] | {key: next(values)})))
        page(folder)
    (folder / "summary.json").unlink()
    for key in start():
        (folder / "started.json").write_text(json.dumps(start(**{key: next(values)})))
        page(folder)
    for key in sorted({key for row in history() for key in row}):
        value = next(values)
        write_rows(folder, [row | {key: value} for row in history()])
        page(folder)


def test_links_in_the_folder_of_a_run_are_not_followed_by_its_page(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"dataset": "a secret"}')
    folder = unfinished(tmp_path)
    (folder / "summary.json").symlink_to(secret)
    assert "a secret" not in page(folder)


def test_the_command_that_repeats_a_run_is_quoted_for_a_shell_and_starts_its_ranks(tmp_path: Path) -> None:
    settings = ["data.name='two words'", "a=$(rm -rf /)", "model={x: 1}"]
    changed = start(overrides=[*settings, "resume=old", "parallel.launcher=mpi"], config_dir="my conf", processes=6)
    folder = unfinished(tmp_path)
    (folder / "started.json").write_text(json.dumps(changed))
    data = read_run(folder)
    words = ["mpiexec", "-n", "6", "cupynet", "train", "--config-dir=my conf", *settings, "parallel.launcher=mpi"]
    assert shlex.split(repeat(data, data.start["overrides"])) == words


@pytest.mark.parametrize(
    ("seconds", "said"), [(45.24, "45.2 s"), (75, "1:15 min"), (3599.6, "1:00 h"), (7500, "2:05 h")]
)
def test_times_are_formatted_briefly(seconds: float, said: str) -> None:
    assert clock(seconds) == said


def test_many_classes_have_a_table_but_no_matrix(tmp_path: Path) -> None:
    """Mistakes are left out if their number of images differs."""
    counts = np.eye(100, dtype=int) * 9 + np.roll(np.eye(100, dtype=int), 1, axis=1)
    test = summary()["test"] | {"confusion": counts.tolist()}
    parsed = made(finished(tmp_path, test=test | {"mistakes": test["mistakes"][:1]}, class_names=None))
    assert not parsed.all("img")
    assert "predicted as" not in str(parsed.elements) and "0.9000" in parsed.text
