"""Search spaces: the syntax, rejected spaces, and splitting of command lines."""

from typing import Any

import pytest

pytest.importorskip("optuna")

from hydra.core.override_parser.overrides_parser import OverridesParser

from cupynet.config import search_space, split
from cupynet.config.search_space import lowest
from tests.support.refusals import refused


def one(text: str) -> Any:
    (found,) = search_space([text]).values()
    return found


@pytest.mark.parametrize(
    ("text", "kind", "ends"),
    [
        ("batch_size=32,64", "Categorical", ("32", "64")),
        ("batch_size=choice(32,64,32)", "Categorical", ("32", "64")),
        ("a='x y',null", "Categorical", ("'x y'", "null")),
        ("a=interval(0.1,0.3)", "Float", (0.1, 0.3)),
        ("a=int(interval(2,5))", "Int", (2, 5)),
        ("a=range(1,8,2)", "Int", (1, 7)),
        ("a=range(5,1,-2)", "Int", (3, 5)),
        ("a=range(0.1,0.5,0.1)", "Float", (0.1, 0.4)),
        ("a=tag(log,int(interval(4,7)))", "Int", (4, 7)),
    ],
)
def test_lists_ranges_and_intervals_become_distributions(text: str, kind: str, ends: tuple[object, ...]) -> None:
    found = one(text)
    assert type(found).__name__ == f"{kind}Distribution"
    assert (found.choices if kind == "Categorical" else (found.low, found.high)) == ends
    assert lowest(found) == ends[0]


def test_a_searched_range_keeps_its_step() -> None:
    assert one("a=range(1,8,2)").step == 2 and one("a=range(0.5,0.1,-0.1)").step == 0.1


def test_wide_intervals_are_searched_on_a_logarithmic_scale() -> None:
    assert one("a=interval(0.001,0.3)").log and not one("a=interval(0.01,0.3)").log
    assert one("a=tag(log,interval(1,2))").log and not one("a=tag(linear,interval(0.001,0.3))").log
    assert not one("a=interval(0,1000)").log  # 0 has no logarithm


@pytest.mark.parametrize(
    "text",
    [
        *("a=3", "a", "a=interval(3,", "a=interval(3,1)", "a=interval(1,inf)", "a=range(3,9,-1)", "a=range(3,9,0)"),
        *("a=tag(log,interval(-1,1))", "a=tag(logarithmic,interval(1,2))", "a=glob(*)"),
    ],
)
def test_a_value_that_leaves_nothing_to_search_is_refused(text: str) -> None:
    with refused("a", text.partition("=")[2] or None):
        search_space([text])


def test_a_setting_that_is_searched_twice_is_refused() -> None:
    with refused("+a"):
        search_space(["a=1,2", "+a=3,4"])


def test_a_command_line_is_split_into_settings_and_a_search() -> None:
    searched = ["a=interval(1,2)", "b='x y',\"it's\"", "optimizer=choice(adam,sgd)"]
    kept = ["workers=1", "--config-dir", "there", "broken=(", "devices=[0,1]"]
    *found, search = split([*kept[:3], *searched, *kept[3:]])
    parsed = OverridesParser.create().parse_override(search)
    assert found == kept and (parsed.key_or_group, parsed.value()) == ("search", searched)
    assert split(["workers=1"]) == ["workers=1"]
