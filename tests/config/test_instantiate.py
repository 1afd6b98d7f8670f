"""Building parts from `_target_`: nested parts, errors that name the key, and trusted classes."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from cupynet.config.instantiate import build, build_as, check_modules
from cupynet.core.errors import ConfigError, errors_of
from tests.support.refusals import refused


class Conv:
    def __init__(self, filters: int, kernel_size: int = 3) -> None:
        if kernel_size < 1:
            raise ConfigError("must be at least 1", "kernel_size", str(kernel_size))
        self.filters, self.kernel_size = filters + 0, kernel_size


class Stack:
    def __init__(self, layers: dict[str, Any], *, extra: list[Any], **more: Any) -> None:
        self.layers, self.extra, self.more = layers, extra, more


def function() -> None:
    raise AssertionError("a function was called")


HERE = __name__
CONV = {"_target_": f"{HERE}.Conv", "filters": 2}
STACK = {"_target_": f"{HERE}.Stack", "layers": {}, "extra": []}


def test_parts_inside_parts_are_built_in_order() -> None:
    layers = {"z": CONV, "a": {**CONV, "kernel_size": 5}, "m": CONV}
    node = {**STACK, "layers": layers, "extra": [CONV, 3, {"plain": (1, None)}], "whatever": 1}
    stack = build(node, "model", [HERE])
    assert [(name, layer.kernel_size) for name, layer in stack.layers.items()] == [("z", 3), ("a", 5), ("m", 3)]
    assert type(stack.extra[0]) is Conv and stack.extra[1:] == [3, {"plain": [1, None]}]
    assert stack.more == {"whatever": 1}
    assert node["_target_"] == f"{HERE}.Stack"  # the argument is unchanged


@pytest.mark.parametrize(
    ("node", "setting"),
    [
        ({"filters": 1, "kernal": 5}, "model.layers.a.kernal"),
        ({"kernel_size": 5}, "model.layers.a.filters"),
        ({"filters": 1, "_partial_": True}, "model.layers.a._partial_"),
        ({"filters": 1, "_args_": [1]}, "model.layers.a._args_"),
        ({"filters": [{"x": {"_target_": "os.mkdir"}}]}, "model.layers.a.filters[0].x._target_"),
        ({"filters": 1, "kernel_size": 0}, "model.layers.a.kernel_size"),
        ({"filters": "many"}, "model.layers.a"),  # TypeError
    ],
)
def test_an_error_in_a_part_names_its_dotted_key(node: dict[str, Any], setting: str) -> None:
    with refused(setting):
        build({**STACK, "layers": {"a": {"_target_": f"{HERE}.Conv", **node}}}, "model", [HERE])


UNTRUSTED: list[Any] = [
    *("os.mkdir", "cupynetx.nn.Conv2D", "pathlib.Path"),
    *(f"{HERE}x.Conv", f"{HERE}.{os.__name__}.mkdir", f"{HERE}.{os.__name__}", f"{HERE}.Path"),
    *(f"{HERE}.function", f"{HERE}.HERE", f"{HERE}.Conw", f"{HERE}.Conv.__init__"),
    *("cupynet.nn.init.zeros", "cupynet.config.instantiate.os.mkdir", "cupynet.config.instantiate.Parameter"),
    "cupynet.core.lock.Hold",  # would write a file
    *("cupynet.nowhere.Conv2D", "cupynet", "..Conv2D", "", 3, None),
]


@pytest.mark.parametrize("target", UNTRUSTED, ids=str)
def test_only_classes_that_cupynet_or_a_trusted_module_defines_are_built(target: Any) -> None:
    with refused("loss._target_", str(target)):
        build({"_target_": target}, "loss", [HERE])


@pytest.mark.parametrize(
    ("target", "trusted"),
    [("trap.Layer", []), ("poorx.Layer", ["poor"]), ("poor.Layer", ["poor"])],
    ids=["untrusted", "begins like a trusted name", "cannot be imported"],
)
def test_a_module_that_is_not_trusted_is_not_imported(
    target: str, trusted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("trap", "poorx"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "poor.py").write_text("import no_such_package_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with refused("model._target_"):
        build({"_target_": target}, "model", trusted)


def test_a_trusted_module_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lies_here.py").write_text("class Part:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])  # as in a script
    monkeypatch.delitem(sys.modules, "lies_here", raising=False)
    check_modules(["lies_here"])
    assert type(build({"_target_": "lies_here.Part"}, "model", ["lies_here"])).__name__ == "Part"


@pytest.mark.parametrize("node", ["mse", {"filters": 2}, STACK], ids=str)
def test_a_part_of_the_wrong_kind_is_refused(node: Any) -> None:
    assert type(build_as(Conv, CONV, "loss", [HERE])) is Conv
    with refused("loss"):
        build_as(Conv, node, "loss", [HERE])


@pytest.mark.parametrize(
    ("named", "setting"),
    [
        (("Conv2D kernel_size", "0"), "model.kernel_size"),
        (("sha256.images", "0"), "model.sha256.images"),
        (("Conv2D depth", "0"), "model"),
        ((), "model"),
    ],
)
def test_an_error_of_a_part_begins_with_its_key_and_argument(named: tuple[str, ...], setting: str) -> None:
    with pytest.raises(ConfigError) as caught, errors_of("model", {"kernel_size": 0, "sha256": {}}):
        raise ConfigError("is odd", *named)
    error = caught.value
    assert (error.setting, error.owner) == (setting, "") and str(error).startswith(setting)
