"""Instantiate the classes named by `_target_` in the configuration.

A target must be a class that is defined in `PACKAGES` or in a trusted module. Checking only a prefix of the dotted path
would allow `cupynet.config.instantiate.sys.exit`, and some classes of cupynet write files when they are created.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter
from typing import Any, TypeVar

from cupynet.core.errors import ConfigError, errors_of
from cupynet.core.wording import listed, nearest, one, one_line, written

T = TypeVar("T")

# packages whose classes untrusted settings may instantiate, because they have no side effects
PACKAGES = tuple(
    f"cupynet.{name}"
    for name in (
        *("data.augment", "data.sources", "optim", "parallel.pipeline", "parallel.synchronizers"),
        *("nn.branches", "nn.conv", "nn.dense", "nn.dropout", "nn.init", "nn.layer", "nn.loss", "nn.norm", "nn.pool"),
        *("reporting.callback", "training.callbacks"),
    )
)


def build_as(kind: type[T], node: Any, key: str, trusted_modules: Iterable[str] = ()) -> T:
    part = build(node, key, trusted_modules)
    if isinstance(part, kind):
        return part
    raise ConfigError(f"must be {one(kind.__name__)}, got {type(part).__name__}. Set its _target_", key)


def build(node: Any, key: str, trusted_modules: Iterable[str] = ()) -> Any:
    """Build a node of the configuration and everything inside it.

    Args:
        node: plain values. A mapping with a `_target_`, such as "cupynet.nn.Conv2D", becomes an object of that class.
            Other mappings and lists are built item by item, and other values are returned unchanged.
        key: the dotted key of the node, for errors.
        trusted_modules: additional modules, including their submodules, with classes that may be built.
    """
    trusted = tuple(trusted_modules)
    if isinstance(node, Mapping):
        items = {name: item for name, item in node.items() if name != "_target_"}
        if "_target_" not in node:
            return {name: build(item, f"{key}.{name}", trusted) for name, item in items.items()}
        cls = class_of(node["_target_"], key, trusted)
        _fit(cls, items, key)
        arguments = {name: build(item, f"{key}.{name}", trusted) for name, item in items.items()}
        with errors_of(key, items):
            try:
                return cls(**arguments)
            except ConfigError:
                raise
            except (TypeError, ValueError) as error:
                raise ConfigError(one_line(error)) from error
    if isinstance(node, list | tuple):
        return [build(item, f"{key}[{index}]", trusted) for index, item in enumerate(node)]
    return node


def for_chosen_classes(plain: dict[str, Any], asked: Sequence[str]) -> None:
    """If an override sets `_target_`, drop the file's arguments that the new class does not have.

    For example, `optimizer._target_=cupynet.optim.SGD` keeps the file's learning_rate, but not its momentum. `asked`
    has the keys of all overrides.
    """
    for place in {key.removesuffix("._target_") for key in asked if key.endswith("._target_")}:
        part: Any = plain
        for name in place.split("."):
            part = part.get(name) if isinstance(part, dict) else None
        if not isinstance(part, dict):
            continue
        with suppress(ConfigError):  # the error is reported when the part is built
            named, takes_any = arguments(class_of(part.get("_target_"), place, plain["trusted_modules"]))
            for name in part.keys() - named.keys() - {"_target_"} if not takes_any else ():
                if not any(key.startswith(f"{place}.{name}") for key in asked):
                    del part[name]


def check_modules(names: Sequence[str]) -> None:
    """Raise ConfigError if the top-level package of a trusted module is not found, without importing it."""
    if names:
        _search_current_folder()
    for package in (name.partition(".")[0] for name in names):
        if not package or (package not in sys.modules and find_spec(package) is None):
            raise ConfigError(f"there is no module '{package}'", "trusted_modules", written(names))


def _search_current_folder() -> None:
    """Also search the current folder for trusted modules, as `python -m` does and console scripts do not."""
    if "" not in sys.path:
        sys.path.append("")


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    """Return True if a dotted name is one of the modules or inside one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def class_of(target: Any, key: str, trusted_modules: Iterable[str]) -> type:
    """Return the class that `_target_` names. Raise ConfigError if it is unknown or not trusted."""
    trusted = ("cupynet", *trusted_modules)

    def refused(reason: object) -> ConfigError:
        return ConfigError(str(reason), f"{key}._target_", one_line(target))

    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")) or "." not in target:
        raise refused("must be a class with its module, such as cupynet.nn.Conv2D")
    if not _is_inside(target, trusted):  # other modules are not even imported
        top = target.partition(".")[0]
        remedy = f"If you trust {top}, add it to trusted_modules (in predict and export: --trusted-modules {top})"
        raise refused(f"only classes of {listed(trusted, 'and')} can be used. {remedy}")
    module_name, _, name = target.rpartition(".")
    if not _is_inside(module_name, ("cupynet",)):
        _search_current_folder()
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise refused(error) from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [other for other in getattr(module, "__all__", dir(module)) if other[0].isupper()]
        raise refused(f"there is no class '{name}' in {module_name}{nearest(name, classes)}")
    if not _is_inside(found.__module__, (*PACKAGES, *(name for name in trusted if name != "cupynet"))):
        own = _is_inside(found.__module__, ("cupynet",))
        raise refused(
            "is not a class that settings can use" if own else f"is defined in {found.__module__}, which is not trusted"
        )
    return found


def arguments(cls: type) -> tuple[dict[str, Parameter], bool]:
    parameters = inspect.signature(cls).parameters
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    named = {name: each for name, each in parameters.items() if each.kind in by_name}
    return named, any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())


def _fit(cls: type, given: Mapping[Any, Any], key: str) -> None:
    named, takes_any = arguments(cls)
    for name in given:
        if name not in named and not takes_any:
            reason = f"{cls.__name__} has no argument '{name}'{nearest(str(name), named)}"
            raise ConfigError(reason, f"{key}.{name}")
    for name, each in named.items():
        if each.default is Parameter.empty and name not in given:
            raise ConfigError(f"is missing, but {cls.__name__} requires it", f"{key}.{name}")


def with_class_weights(loss: Any, weights: Sequence[float] | None = None) -> Any:
    """Return the settings of a loss with `class_weights: balanced` replaced by `weights`."""
    balanced = isinstance(loss, Mapping) and loss.get("class_weights") == "balanced"
    return {**loss, "class_weights": weights} if balanced else loss
