"""Building parts from `_target_`: nested parts, errors that name the key, and the classes that are trusted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cupynet.config.instantiate import build, build_as, under
from cupynet.core.errors import ConfigError


class Conv:
    def __init__(self, filters: int, kernel: int = 3) -> None:
        if kernel < 1:
            raise ConfigError("must be at least 1", "kernel", str(kernel))
        self.filters, self.kernel = filters + 0, kernel


class Stack:
    def __init__(self, layers: dict[str, Any], *, extra: list[Any] | None = None) -> None:
        self.layers, self.extra = layers, extra


class Anything:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings


def function() -> None:
    raise AssertionError("a function was called")


HERE = __name__


def test_build_makes_parts_inside_parts_in_order() -> None:
    conv = {"_target_": f"{HERE}.Conv", "filters": 2}
    node = {
        "_target_": f"{HERE}.Stack",
        "layers": {"z": conv, "a": {**conv, "kernel": 5}, "m": conv},
        "extra": [conv, 3, {"plain": (1, 2)}],
    }
    stack = build(node, "model", [HERE])
    assert type(stack) is Stack and list(stack.layers) == ["z", "a", "m"]
    assert (stack.layers["z"].kernel, stack.layers["a"].kernel) == (3, 5)
    assert stack.extra is not None and type(stack.extra[0]) is Conv and stack.extra[1:] == [3, {"plain": [1, 2]}]
    assert build({"a": [1, "b", None]}, "x") == {"a": [1, "b", None]}
    assert build({"_target_": f"{HERE}.Anything", "whatever": 1}, "x", [HERE]).settings == {"whatever": 1}
    assert node["_target_"] == f"{HERE}.Stack"  # what was given is left as it was


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"filters": 1, "kernal": 5}, "model.layers.a.kernal: Conv has no argument 'kernal'; did you mean 'kernel'?"),
        ({"kernel": 5}, "model.layers.a.filters: is missing: Conv needs it"),
        ({"filters": 1, "_partial_": True}, "model.layers.a._partial_: Conv has no argument '_partial_'"),
        ({"filters": 1, "kernel": 0}, "model.layers.a.kernel=0: must be at least 1"),
        ({"filters": "many"}, "model.layers.a: "),  # TypeError
    ],
)
def test_build_errors_name_the_key(node: dict[str, Any], message: str) -> None:
    model = {"_target_": f"{HERE}.Stack", "layers": {"a": {"_target_": f"{HERE}.Conv", **node}}}
    with pytest.raises(ConfigError) as caught:
        build(model, "model", [HERE])
    assert str(caught.value).startswith(message)
    assert str(caught.value).count("model.layers.a") == 1


UNTRUSTED: list[tuple[Any, str]] = [
    ("os.mkdir", "only classes of cupynet"),
    ("cupynetx.nn.Conv2D", "only classes of cupynet"),
    ("pathlib.Path", "only classes of cupynet"),
    (f"{HERE}x.Conv", "only classes of cupynet"),
    (f"{HERE}.{os.__name__}.mkdir", "No module named"),
    (f"{HERE}.{os.__name__}", "there is no class 'os'"),
    (f"{HERE}.Path", "is a class of pathlib, which is not trusted"),
    (f"{HERE}.function", "there is no class 'function'"),
    (f"{HERE}.HERE", "there is no class 'HERE'"),
    (f"{HERE}.Conw", "there is no class 'Conw' in " + HERE + "; did you mean 'Conv'?"),
    (f"{HERE}.Conv.__init__", "No module named"),
    ("cupynet.nn.init.zeros", "there is no class 'zeros' in cupynet.nn.init"),
    ("cupynet.config.instantiate.os.mkdir", "No module named"),
    ("cupynet.config.instantiate.Parameter", "is a class of inspect, which is not trusted"),
    ("cupynet.core.lock.Hold", "is a class of cupynet.core.lock, which is not trusted"),  # would write a file
    ("cupynet.nowhere.Conv2D", "No module named 'cupynet.nowhere'"),
    ("cupynet", "must be a class with its module"),
    ("..Conv2D", "must be a class with its module"),
    ("", "must be a class with its module"),
    (3, "must be a class with its module"),
    (None, "must be a class with its module"),
]


def test_build_trusts_definitions_only() -> None:
    for target, reason in UNTRUSTED:
        with pytest.raises(ConfigError) as caught:
            build({"_target_": target}, "loss", [HERE])
        assert str(caught.value).startswith(f"loss._target_={target}: ") and reason in str(caught.value), target


def test_build_trusts_no_module_by_default() -> None:
    with pytest.raises(ConfigError, match="list '.*' in trusted_modules if it is yours"):
        build({"_target_": f"{HERE}.Conv", "filters": 1}, "model")


def test_build_imports_nothing_untrusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "poor.py").write_text("import no_such_package_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="only classes of"):
        build({"_target_": "trap.Layer"}, "model")
    with pytest.raises(ConfigError, match="No module named 'no_such_package_anywhere'"):
        build({"_target_": "poor.Layer"}, "model", ["poor"])


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ("mse", "loss: must be a Conv, got str: give it a _target_"),
        (None, "loss: must be a Conv, got NoneType: give it a _target_"),
        ({"filters": 2}, "loss: must be a Conv, got dict: give it a _target_"),
        (
            {"_target_": f"{HERE}.Anything"},
            "loss: must be a Conv, got Anything: give it a _target_",
        ),
    ],
)
def test_a_part_of_the_wrong_kind(node: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_as(Conv, node, "loss", [HERE])
    assert str(caught.value) == line
    assert type(build_as(Conv, {"_target_": f"{HERE}.Conv", "filters": 2}, "loss", [HERE])) is Conv


@pytest.mark.parametrize(
    ("arguments", "text", "setting"),
    [
        (("is odd", "Conv2D kernel", "0"), "model.kernel=0: is odd", "model.kernel"),
        (("is odd", "sha256.images", "0"), "model.sha256.images=0: is odd", "model.sha256.images"),
        (("is odd", "Conv2D depth", "0"), "model: Conv2D depth=0: is odd", "model"),
        (("is odd",), "model: is odd", "model"),
    ],
)
def test_a_part_puts_its_key_before_the_setting(arguments: tuple[str, ...], text: str, setting: str) -> None:
    error = under("model", {"kernel": 0, "sha256": {}}, ConfigError(*arguments))
    assert (str(error), error.setting, error.owner) == (text, setting, "")
