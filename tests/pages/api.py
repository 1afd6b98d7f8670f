"""api.md: public classes and functions, generated from their signatures and docstrings."""

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from types import GenericAlias
from typing import Any

import cupynet
from tests.pages.markdown import codes, marked, table, wrapped

TOPICS = {  # topic -> module prefixes; the longest match wins
    "Training": ("training", "runs", "config"),
    "Models": ("nn",),
    "Layers": ("nn.activation", "nn.branches", "nn.conv", "nn.dense", "nn.dropout", "nn.norm", "nn.pool"),
    "Losses": ("nn.loss",),
    "Initializers": ("nn.init",),
    "Optimizers": ("optim",),
    "Learning-rate schedules": ("optim.counted", "optim.plateau", "optim.schedules"),
    "Data sets": ("data.sources", "data.dataset", "data.shards"),
    "Batches": ("data",),
    "Image augmentation": ("data.augment",),
    "Parallel training": ("parallel",),
    "Callbacks": ("training.callbacks", "reporting"),
    "scikit-learn": ("sklearn",),
    "Files and other programs": ("interop", "core.files"),
    "Backends": ("backend",),
    "Errors": ("core.errors",),
    "Others": ("",),
}
PACKAGES = ("nn", "optim", "data", "parallel", "training", "reporting")


def api_page() -> Iterator[str]:
    """Yield the public classes and functions by topic."""
    found: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for name, thing in public().items():
        module = f"{thing.__module__.removeprefix('cupynet.')}."
        prefixes = (
            (len(each), topic)
            for topic, modules in TOPICS.items()
            for each in modules
            if module.startswith(each + "." * bool(each))
        )
        found[max(prefixes)[1]].append(name)
    topics = {topic: names for topic, names in found.items() if names}
    yield table(
        "topic | names",
        ((f"[{t}](#{anchor(t)})", ", ".join(f"[{n}](#{anchor(n)})" for n in names)) for t, names in topics.items()),
    )
    for topic, names in topics.items():
        yield from (f"## {topic}", *(part for name in names for part in described(name, public()[name])))


@cache
def public() -> dict[str, Any]:
    """Return the public classes and functions of cupynet, then those that only a package exports."""
    found = {name: getattr(cupynet, name) for name in sorted(vars(cupynet)["__all__"], key=str.lower)}
    for package in PACKAGES:
        module = importlib.import_module(f"cupynet.{package}")
        exported = {f"{package}.{name}": getattr(module, name) for name in sorted(module.__all__, key=str.lower)}
        found |= {name: thing for name, thing in exported.items() if not any(thing is each for each in found.values())}
    estimators = importlib.import_module("cupynet.sklearn")
    found |= {f"sklearn.{name}": getattr(estimators, name) for name in ("Classifier", "Regressor")}
    return {name: thing for name, thing in found.items() if _is_class(thing) or inspect.isfunction(thing)}


def _is_class(thing: object) -> bool:
    return inspect.isclass(thing) and not isinstance(thing, GenericAlias)  # which is a class on Python 3.10


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def described(name: str, thing: Any) -> Iterator[str]:
    yield from (f"### {name}", wrapped(summary(thing)))
    if inspect.isclass(thing) and issubclass(thing, enum.Enum):
        yield f"Members: {codes(each.name for each in thing)}."
    elif not (inspect.isclass(thing) and issubclass(thing, BaseException)):
        text = re.sub(r"(?<![,*]) ", "\0", signature(name.rpartition(".")[2], thing))  # keep arguments on one line
        yield f"```py\n{wrapped(text, then='    ')}\n```".replace("\0", " ")
        yield "\n".join(wrapped(f"`{text}`: {summary(each)}", first="- ", then="  ") for text, each in methods(thing))


def methods(kind: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isclass(kind):
        bases = [base for base in kind.__mro__[1:] if any(base is each for each in public().values())]
        known = {name for base in bases for name in vars(base)}
        for name, each in sorted(vars(kind).items()):
            wrapper = "func" if hasattr(each, "func") else "fget" if isinstance(each, property) else "__func__"
            function = getattr(each, wrapper, each)
            shown = name not in known and (name[0] != "_" or name == "__call__")
            if shown and inspect.isfunction(function) and function.__doc__:
                yield signature(name, function) if wrapper == "__func__" else name, function


def summary(thing: Any) -> str:
    return marked(" ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split()))


def signature(name: str, thing: Any) -> str:
    """Return a signature as in the source, without `self`."""
    text = re.sub(r"^\((?:self|cls)(?:, )?", "(", str(inspect.signature(thing)))
    text = re.sub(r"ForwardRef\('(.*?)'\)", r"\1", text)
    text = re.sub(r"(: |-> )(['\"])(.*?)\2", r"\1\3", text)
    text = text.removesuffix(" -> None")
    text = text.replace("<lambda>", "lambda")
    return name + re.sub(r"<(?:function )?([\w.]+)[^<>]*>", r"\1", text).replace("= factory", "= ...")
