"""The page of a run: what it shows of which folder, that it is whole, and that no text of a run becomes part of it."""

from __future__ import annotations

import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.errors import ConfigError, OutputError
from cupynet.files import save_weights
from cupynet.lock import Hold
from cupynet.report import page as pages
from cupynet.report.about import repeat
from cupynet.report.folder import MOST_ROWS, look
from cupynet.report.make import Maker
from cupynet.report.page import Entry, Markup, document, element, escape, table
from cupynet.report.run import clock, page, state
from tests.report.folders import HOSTILE, finished, history, start, summary, unfinished

VOID = {"meta", "link", "img", "br", "path", "use"}


class Page(HTMLParser):
    """A page taken apart: AssertionError where its elements do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def made(folder: Path) -> Page:
    """The page of a folder, without charts."""
    return Page(page(look(folder), []))


def check_alone(text: str) -> None:
    """The page refers to nothing outside itself, runs nothing, and has each name once."""
    parsed = Page(text)
    assert not parsed.all("script") and not parsed.all("iframe") and not parsed.all("base")
    names = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(names) == len(set(names))
    for _, attributes in parsed.elements:
        assert not [name for name in attributes if name.startswith("on")], attributes
        for name in ("src", "href", "xlink:href", "action", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), value
            assert value is None or not value.startswith("#") or value[1:] in names, value
    assert not re.search(r"url\((?!#)|@import|https?:", text)


def test_the_page_of_a_finished_run_shows_what_it_came_to(tmp_path):
    parsed = made(finished(tmp_path))
    for text in (
        "mnist: 93.33 % test accuracy", "finished", "2 workers", "commit 0123456789", "uncommitted changes",
        "3,210/s", "1:15 min", "averaged every 3 iterations", "computing", "nothing stands out", "cat", "dog", "owl",
        "98.0 %", "conv1", "Conv2D", "conv1.weight: 4 filters of 3 x 3", "a processor", "history.jsonl", "1.5 MB",
        "started 2026-05-01 12:30:00", "python -m cupynet.train workers=2",
    ):  # fmt: skip
        assert text in parsed.text, text
    assert "dog taken for cat: 2" in [cell.get("title") for cell in parsed.all("td")]
    assert not [meta for meta in parsed.all("meta") if meta.get("http-equiv") == "refresh"]
    assert [image["alt"] for image in parsed.all("img")] == [
        "sample 7, dog taken for cat", "sample 3, cat taken for dog", "sample 9, dog taken for cat",
        "filters of conv1.weight",
    ]  # fmt: skip


def test_a_page_is_whole_and_refers_to_nothing_outside(tmp_path):
    folder = finished(tmp_path)
    Maker(folder).make()
    check_alone((folder / "report.html").read_text())


def test_no_text_of_a_run_becomes_part_of_its_page(tmp_path):
    names = [HOSTILE, "dog", "owl"]
    folder = finished(
        tmp_path, name="a<b>&'run", dataset=HOSTILE, class_names=names, stopped_by=HOSTILE, stop_reason="early",
        backend=HOSTILE, dtype=HOSTILE, commit=HOSTILE, synchronizer=HOSTILE, advice=HOSTILE, devices=[HOSTILE],
        environment={"cpu": HOSTILE, "versions": {HOSTILE: HOSTILE}, "blas": [{"version": HOSTILE}]},
    )  # fmt: skip
    layers = [{"layer": HOSTILE, "kind": HOSTILE, "settings": HOSTILE, "output": HOSTILE}]
    (folder / "started.json").write_text(
        json.dumps(start(layers=layers, overrides=[f"data={HOSTILE}"], config_dir=HOSTILE, started=HOSTILE))
    )
    (folder / ".hydra" / "config.yaml").write_text(f"a: {HOSTILE}")
    (folder / "<img src=x onerror=alert(1)>").write_text("")
    rows = history()
    rows[0]["divergence_by_layer"] = {HOSTILE: 1.0}
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Maker(folder).make()
    text = (folder / "report.html").read_text()
    check_alone(text)
    parsed = Page(text)
    assert parsed.text.count("<script>alert('x')</script>") > 10
    assert all((image.get("src") or "").startswith("data:") for image in parsed.all("img"))


def test_a_log_is_escaped_too(tmp_path):
    log = f"2026-05-01 12:00:00,000 ERROR cupynet.config.door: {HOSTILE}\n"
    check_alone(page(look(unfinished(tmp_path, log=log)), []))


RUNS: dict[str, tuple[dict[str, Any], str, str]] = {
    "whole": ({}, "finished", "good"),
    "early": ({"stop_reason": "early", "stopped_by": "no better"}, "stopped early", "good"),
    "signal": ({"stop_reason": "signal", "stopped_by": "SIGINT"}, "stopped", "warn"),
    "diverged": ({"stop_reason": "diverged", "stopped_by": "loss is NaN"}, "diverged", "bad"),
    "gone on": ({"iterations": 200}, "killed", "bad"),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_mark_says_what_became_of_a_run(tmp_path, name):
    changed, word, kind = RUNS[name]
    seen = look(finished(tmp_path, **changed))
    assert state(seen)[:2] == (word, kind)
    assert str(changed.get("stopped_by", "")) in Page(page(seen, [])).text


def test_a_run_without_results_was_killed_or_failed(tmp_path):
    seen = look(unfinished(tmp_path, name="killed", rows=history(2)))
    assert state(seen)[:2] == ("killed", "bad") and "after 2 of 3 epochs" in state(seen)[2]
    line = "2026-05-01 12:00:00,000 ERROR cupynet.config.door: iteration 7: the loss is not finite\n"
    seen = look(unfinished(tmp_path, name="diverged", log=line))
    assert state(seen) == ("diverged", "bad", "iteration 7: the loss is not finite")
    seen = look(unfinished(tmp_path, name="failed", log=line.replace("not finite", "odd")))
    assert state(seen)[0] == "failed"
    went_on = line + "2026-05-01 12:00:00,000 INFO __main__: going on after iteration 5, epoch 1\n"
    assert state(look(unfinished(tmp_path, name="again", log=went_on)))[0] == "killed"


def test_what_can_be_gone_on_with_is_said_where_there_is_something(tmp_path):
    folder = unfinished(tmp_path, rows=history(1))
    assert state(look(folder))[2] == "The run ended without a result, after 1 of 3 epochs."
    (folder / "checkpoints" / "step-00000100.tmp-7").mkdir(parents=True)
    assert "gone on" not in state(look(folder))[2]
    (folder / "checkpoints" / "step-00000100").mkdir()
    assert state(look(folder))[2].endswith("; its last checkpoint can be gone on with.")


def test_the_end_of_a_long_log_is_read(tmp_path):
    """A warning at its beginning, a million characters, and the error that ended it."""
    line = "2026-05-01 12:00:00,000 {} cupynet.config.door: {}\n"
    much = line.format("INFO", "epoch") * 30_000
    text = line.format("WARNING", "no GPU") + much + line.format("ERROR", "the disk is full")
    seen = look(unfinished(tmp_path, log=text))
    assert state(seen) == ("failed", "bad", "the disk is full")
    assert [each.partition(": ")[2] for each in seen.warnings] == ["no GPU"]


def test_the_loss_is_of_the_weights_whose_accuracy_stands_beside_it(tmp_path):
    """Those of the last epoch are no longer there where a callback has put others in their place."""
    parsed = made(finished(tmp_path, test_loss=0.1234, test_accuracy=0.9876))
    assert "0.1234" in parsed.text and "98.76 %" in parsed.text
    folder = finished(tmp_path, name="other", test_loss=None)
    assert "test loss" in made(folder).text  # of the last row


def test_the_first_convolution_is_the_networks(tmp_path):
    """Not one that is called so in a block further on."""
    folder = finished(tmp_path)
    row = {"kind": "", "settings": "", "output": "", "parameters": ""}
    names = ["input", "conv1", "block1", "  conv1", "  conv2", "output"]
    started = json.loads((folder / "started.json").read_text())
    started["layers"] = [{"layer": name, **row} for name in names]
    (folder / "started.json").write_text(json.dumps(started))
    shape = (3, 3, 1, 4)
    weights = {name: np.zeros(shape) for name in ("block1.conv1.weight", "block1.conv2.weight", "conv1.weight")}
    save_weights(folder / "weights.safetensors", weights)
    found = look(folder).filters
    assert found is not None and found[0] == "conv1.weight"


def test_the_page_of_a_run_that_goes_on_reads_itself_again(tmp_path):
    folder = unfinished(tmp_path, rows=history(2)[:-1])
    hold = Hold(folder)
    try:
        parsed = made(folder)
        over = page(look(folder, over=True), [])
    finally:
        hold.release()
    assert [meta["content"] for meta in parsed.all("meta") if meta.get("http-equiv") == "refresh"] == ["5"]
    assert "mnist: epoch 2/3" in parsed.text and "running" in parsed.text and "1 of 3 epochs complete" in parsed.text
    assert "Refreshed at" in parsed.text
    (bar,) = parsed.all("progress")
    assert bar["max"] == "3" and float(bar["value"] or 0) == 2.0
    assert "refresh" not in over and "killed" in over
    for seen in (parsed, Page(over)):  # the confusion matrix, of what is known by now
        assert "After epoch 1, on test images. Rows: what an image is" in seen.text
        assert "cat taken for cat: 21" in [cell.get("title") for cell in seen.all("td")]
        assert "precision" not in seen.text


def test_a_run_that_is_gone_on_with_does_not_show_its_old_results_as_the_new(tmp_path):
    folder = finished(tmp_path, test_accuracy=0.5)
    hold = Hold(folder)
    try:
        parsed = made(folder)
    finally:
        hold.release()
    assert "running" in parsed.text and "Most confident mistakes" not in parsed.text
    assert "93.33 %" in parsed.text and "50.00 %" not in parsed.text
    assert "After epoch 3, on test images" in parsed.text and "precision" not in parsed.text
    assert "cat taken for cat: 23" in [cell.get("title") for cell in parsed.all("td")]


def test_a_run_that_validation_images_judge_has_its_matrix_at_the_end_too(tmp_path):
    folder = finished(tmp_path, test=None, test_accuracy=None, validation_accuracy=0.9)
    path = folder / "history.jsonl"
    path.write_text(path.read_text().replace('"test_', '"validation_'))
    parsed = made(folder)
    assert "After epoch 3, on validation images" in parsed.text and "precision" not in parsed.text
    assert "cat taken for cat: 23" in [cell.get("title") for cell in parsed.all("td")]


def test_fallback_data_are_marked(tmp_path):
    parsed = made(finished(tmp_path, fallback=True, dataset="synthetic"))
    assert "fallback data: synthetic, not what was asked for" in parsed.text


def test_an_old_run_without_what_came_later_has_a_page(tmp_path):
    folder = finished(tmp_path)
    (folder / "started.json").unlink()
    (folder / "examples.safetensors").unlink()
    (folder / ".hydra" / "overrides.yaml").write_text("- workers=2\n- seed=7\n")
    old = summary()
    del old["test"]["mistakes"], old["class_names"], old["spent"], old["advice"]
    (folder / "summary.json").write_text(json.dumps(old))
    rows = [{key: value for key, value in row.items() if key not in ("losses",)} for row in history()]
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parsed = made(folder)
    assert "93.33 %" in parsed.text and "python -m cupynet.train workers=2 seed=7" in parsed.text
    assert "Most confident mistakes" not in parsed.text


DAMAGE = {
    "cut": "{", "null": "null", "list": "[1, 2]", "text": '"x"', "binary": "\x00\x01", "deep": "[" * 100_000,
    "half a character": '{"dataset": "\\ud800", "class_names": ["\\udfff", "b", "c"]}\n',
    "empty": "", "long number": '{"epochs": 1' + "0" * 5000 + "}",
}  # fmt: skip


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["summary.json", "started.json", "history.jsonl", "weights.safetensors"])
def test_a_damaged_file_is_told_and_the_rest_shown(tmp_path, name, content):
    folder = finished(tmp_path)
    (folder / name).write_text(content)
    Maker(folder).make(picture=False)
    parsed = Page((folder / "report.html").read_text())
    assert "Files" in parsed.text
    if name == "weights.safetensors":
        assert "cannot be read: weights.safetensors" in parsed.text


WRONG: list[Any] = [None, 1, "x", [], {}, [None], [[1]], {"a": 1}, True, 1e400, -5, [{"kind": 1}], [[1, 2], [3]]]


@pytest.mark.parametrize("value", WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_values_that_are_not_what_they_should_be_are_left_out(tmp_path, value):
    """Of every key of every file, one after the other."""
    folder = finished(tmp_path)
    for key in summary():
        (folder / "summary.json").write_text(json.dumps(summary(**{key: value})))
        Page(page(look(folder), []))
    for key in summary()["test"]:
        (folder / "summary.json").write_text(json.dumps(summary(test=summary()["test"] | {key: value})))
        Page(page(look(folder), []))
    (folder / "summary.json").unlink()
    for key in start():
        (folder / "started.json").write_text(json.dumps(start(**{key: value})))
        Page(page(look(folder), []))
    rows = history()
    for key in {key for row in rows for key in row}:
        changed = [row | {key: value} for row in rows]
        (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
        Page(page(look(folder), []))


def test_a_row_that_is_being_written_is_left_for_later(tmp_path):
    folder = unfinished(tmp_path, rows=history(1))
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epo')
    seen = look(folder)
    assert len(seen.epochs) == 1 and not seen.damaged


def test_of_very_many_reports_some_are_read_and_all_epochs(tmp_path):
    rows = [row for row in history(1, reports=1) if row["kind"] == "report"]
    lines = [json.dumps(rows[0] | {"iteration": at}) + "\n" for at in range(3 * MOST_ROWS)]
    lines[7] = lines[7777] = json.dumps(history()[-1]) + "\n"
    folder = unfinished(tmp_path)
    (folder / "history.jsonl").write_text("".join(lines))
    seen = look(folder)
    assert len(seen.epochs) == 2 and MOST_ROWS / 2 < len(seen.reports) <= MOST_ROWS and not seen.damaged


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()], ids=["missing", "empty"])
def test_a_folder_that_is_no_run_is_refused(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(ConfigError, match="is not the folder of a run: name one under outputs/"):
        look(tmp_path / "x")


def test_examples_without_a_pixel_are_told(tmp_path):
    folder = finished(tmp_path)
    save_weights(folder / "examples.safetensors", {"images": np.zeros((3, 8, 8, 0), np.uint8)})
    assert "cannot be read: examples.safetensors" in page(look(folder), [])


def test_links_in_a_folder_are_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('{"dataset": "a secret"}')
    folder = unfinished(tmp_path)
    (folder / "summary.json").symlink_to(secret)
    assert "a secret" not in page(look(folder), [])
    (folder / "gone").symlink_to("nowhere")
    assert "<code>gone</code>" in page(look(folder), [])


def test_a_page_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    folder = finished(tmp_path)
    maker = Maker(folder)
    maker.make(picture=False)
    before = (folder / "report.html").read_text()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cupynet.files.os.fsync", full)
    with pytest.raises(OutputError, match="report.html: cannot be written"):
        maker.make(picture=False)
    assert (folder / "report.html").read_text() == before and not list(folder.glob(".*.part"))


def test_the_command_that_repeats_a_run_is_quoted_for_a_shell(tmp_path):
    folder = unfinished(tmp_path)
    settings = ["data.name='two words'", "resume=old", "a=$(rm -rf /)", "model={x: 1}"]
    (folder / "started.json").write_text(json.dumps(start(overrides=settings, config_dir="my conf")))
    line = repeat(look(folder))
    assert line is not None and "$(rm" in line
    kept = [settings[0], *settings[2:]]
    assert shlex.split(line) == ["python", "-m", "cupynet.train", "--config-dir=my conf", *kept]
    mpi = start(overrides=["parallel.launcher=mpi"], processes=6)
    (folder / "started.json").write_text(json.dumps(mpi))
    assert (repeat(look(folder)) or "").startswith("mpiexec -n 6 python -m cupynet.train ")


def test_text_is_escaped_once_and_markup_is_not():
    assert escape('<a href="&">') == "&lt;a href=&quot;&amp;&quot;&gt;" and escape(Markup("<b>")) == "<b>"
    assert element("p", "<", element("b", ">"), title='"') == '<p title="&quot;">&lt;<b>&gt;</b></p>'
    assert "<td>&lt;</td>" in table(("a",), [("<",)])


def test_a_document_allows_itself_nothing_but_its_own_style_and_pictures():
    (policy,) = [
        meta["content"]
        for meta in Page(document("t")).all("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_shares_and_legends_are_told_in_words_too():
    text = pages.bars([("worker 0", [0.75, 0.25])], [Entry("computing", 0), Entry("data", 2)])
    assert 'aria-label="computing 75 %, data 25 %"' in text and "width:75.00%" in text
    with pytest.raises(ValueError, match="argument 2 is"):
        pages.bars([("x", [1.0])], [Entry("a", 0), Entry("b", 1)])


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.04, "0.0 s"), (45.24, "45.2 s"), (75, "1:15 min"), (3599.6, "1:00 h"), (7500, "2:05 h")]
)
def test_a_time_is_short(seconds, said):
    assert clock(seconds) == said


def test_many_classes_and_images_of_all_kinds_are_shown(tmp_path):
    """100 classes become a picture; mistakes with another number of images have none."""
    counts = np.eye(100, dtype=int) * 9 + np.roll(np.eye(100, dtype=int), 1, axis=1)
    test = summary()["test"] | {"confusion": counts.tolist(), "per_class": []}
    parsed = made(finished(tmp_path, test=test | {"mistakes": test["mistakes"][:1]}, class_names=None))
    assert [image["alt"] for image in parsed.all("img")] == ["confusion matrix", "filters of conv1.weight"]
    assert "1 98.0 %" not in parsed.text and "0 98.0 %" in parsed.text


def test_a_page_by_way_of_a_link_names_the_run_itself(tmp_path):
    folder = finished(tmp_path)
    link = tmp_path / "latest"
    link.symlink_to(folder)
    assert f"cupynet · {folder.parent.name}/{folder.name} " in page(look(link, over=True), [])
