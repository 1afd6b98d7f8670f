"""What a search varies: as it is written, read, checked and written again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from cupynet import config
from cupynet.config import Searched, searched, split
from cupynet.errors import ConfigError


def one(text: str) -> Searched:
    (found,) = searched([text])
    return found


@pytest.mark.parametrize(
    "text, kind, ends, values",
    [
        ("batch_size=32,64", "choice", ["32", "64"], ["32", "64"]),
        ("batch_size=choice(32,64,32)", "choice", ["32", "64"], ["32", "64"]),
        ("a='x y',null", "choice", ["'x y'", "null"], ["'x y'", "null"]),
        ("a=interval(0.1,0.3)", "float", [0.1, 0.3], None),
        ("a=int(interval(2,5))", "int", [2, 5], [2, 3, 4, 5]),
        ("a=range(1,8,2)", "int", [1, 7], [1, 3, 5, 7]),
        ("a=range(5,1,-2)", "int", [3, 5], [3, 5]),
        ("a=range(0.1,0.5,0.1)", "float", [0.1, 0.4], [0.1, 0.2, 0.3, 0.4]),
        ("a=tag(log,int(interval(4,128)))", "int", [4, 128], None),
    ],
    ids=["simple", "choice", "texts", "interval", "integers", "range", "downwards", "fractions", "log_integers"],
)
def test_what_is_searched(text: str, kind: str, ends: list[object], values: list[object] | None) -> None:
    found = one(text)
    assert (found.kind, found.ends, found.values) == (kind, ends, values)
    assert found.text == text and str(found)


def test_wide_intervals_count_by_orders_of_magnitude() -> None:
    assert one("a=interval(0.001,0.3)").log and not one("a=interval(0.01,0.3)").log
    assert one("a=tag(log,interval(1,2))").log and not one("a=tag(linear,interval(0.001,0.3))").log
    assert not one("a=interval(0,1000)").log  # nothing comes down to 0 so


def test_a_number_has_few_digits_and_never_leaves_its_interval() -> None:
    found = one("a=interval(0.1234561,0.9876543)")
    assert found.number(0.1234562) == 0.1234561 and found.number(0.98765432) == 0.987654
    assert found.number(0.5555555555) == 0.555556
    assert found.override(0.5) == "a=0.5" and one("+a.b=1,2").override("1") == "+a.b=1"


@pytest.mark.parametrize(
    "texts, wrong",
    [
        (["a=3"], "is one value, and nothing to search"),
        (["a"], "is not written as key=value"),
        (["a=interval(3,"], "is not written as key=value"),
        (["a=interval(3,1)"], "goes from a number up to a greater one"),
        (["a=interval(1,inf)"], "goes from a number up to a greater one"),
        (["a=tag(log,interval(-1,1))"], "begin above 0"),
        (["a=tag(logarithmic,interval(1,2))"], "log or linear"),
        (["a=tag(log,choice(1,2))"], "a tag is for an interval"),
        (["a=choice(1,1)"], "is one value"),
        (["a=range(3,4)"], "not two numbers"),
        (["a=range(3,9,-1)"], "not two numbers"),
        (["a=glob(*)"], "name the files that are to be tried: a=choice(a,b)"),
        (["a=1,2", "+a=3,4"], "a is searched twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_what_is_nothing_to_search_is_refused(texts: list[str], wrong: str) -> None:
    with pytest.raises(ConfigError) as refused:
        searched(texts)
    assert wrong in str(refused.value) and "\n" not in str(refused.value)


def test_a_command_line_is_taken_apart_and_what_is_written_comes_back() -> None:
    texts = ["a=interval(1,2)", "b='x y',\"it's\"", "optimizer=choice(adam,sgd)"]
    given = ["workers=1", texts[0], "--config-dir", "there", texts[1], "broken=(", texts[2], "devices=[0,1]"]
    *kept, last = split(given)
    assert kept == ["workers=1", "--config-dir", "there", "broken=(", "devices=[0,1]"]
    assert split([last]) == [last]  # what a search that goes on has stored
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(last)
    assert parsed.key_or_group == "search" and parsed.value() == texts
    assert split(["workers=1"]) == ["workers=1"]


def test_settings_as_a_file_are_those_of_the_command_line(tmp_path: Path) -> None:
    chosen = [
        "experiment=keras_cnn",
        "optimizer=sgd",
        "data=synthetic",
        "optimizer.learning_rate=0.0123",
        "batch_size=64",
        "callbacks.progress=null",
        "+model.layers.more={_target_: cupynet.nn.Dense, units: 10}",
        "dtype='double'",
    ]
    (tmp_path / "experiment").mkdir()
    text = config.as_file([*chosen, "~callbacks.history"], ["the best"])
    (tmp_path / "experiment" / "best.yaml").write_text(text)
    assert "# the best" in text and "# on the command line add: ~callbacks.history" in text
    lines = config.as_file(["~callbacks.x='a\nmodel: b'"]).splitlines()  # a file of somebody's may say so
    assert all(line.startswith("#") for line in lines[: lines.index("defaults:")]) and "model: b'" not in lines
    typed = config.compose(chosen)
    assert asdict(config.compose(["experiment=best"], tmp_path)) == asdict(typed)
    assert typed.optimizer["_target_"].endswith("SGD") and typed.epochs == 6


def test_composing_leaves_the_door_of_another_command_as_it_was() -> None:
    from hydra.core.config_store import ConfigStore

    from cupynet.config import composing
    from cupynet.settings import Settings, TuneSettings

    composing.register(TuneSettings)
    try:
        assert "trials" not in asdict(config.compose(["epochs=2"]))
        assert "trials" in ConfigStore.instance().repo["spine.yaml"].node
        with pytest.raises(ConfigError, match="there is no setting 'trials'"):
            config.compose(["trials=3"])
        assert "trials" in ConfigStore.instance().repo["spine.yaml"].node
    finally:
        composing.register(Settings)
