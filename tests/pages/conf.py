"""Files of conf/ with their comments, and the types of settings."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path

from cupynet.config.schema import Group, as_is
from cupynet.core.shared_options import DTYPES, SCALES
from tests.pages.markdown import codes
from tests.support.settings import CONF

LINE = re.compile(r"(?P<indent> *)(?P<key>[\w/ ]+):(?: +(?P<value>[^\s#].*?))??(?: +# ?(?P<comment>.*))?")


@dataclass
class Node:
    """A key of a YAML file: its value as written, its comment, and the keys below it."""

    value: str = ""
    comment: str = ""
    below: dict[str, Node] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """The class that `_target_` names, or ""."""
        return self.below["_target_"].value if "_target_" in self.below else ""

    def merge(self, other: Node) -> None:
        """Merge another node into this one, as a file overrides the files in its defaults list."""
        self.value, self.comment = other.value, other.comment or self.comment
        for key, node in other.below.items():
            self.below.setdefault(key, Node()).merge(node)


def written(path: Path) -> Node:
    """Return a file's content. Its comment is at its head; a comment of `_target_` belongs to the whole part."""
    lines = path.read_text("utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    root = last = Node("", " ".join(line[2:] for line in lines[:start] if "@package" not in line))
    stack = [(-1, root)]
    for line in lines[start:]:
        found = LINE.fullmatch(line)
        if line.lstrip().startswith("#"):
            last.comment += f" {line.lstrip('# ')}"
        elif line.lstrip().startswith("- "):  # an entry of a defaults list
            last.below[line.lstrip("- ").partition("#")[0].strip()] = Node()
        elif found is not None:
            stack = [(indent, node) for indent, node in stack if indent < len(found["indent"])]
            above, last = stack[-1][1], Node(found["value"] or "", found["comment"] or "")
            above.below[found["key"]] = last
            stack.append((len(found["indent"]), last))
            if found["key"] == "_target_" and last.comment:
                above.comment, last = last.comment, above
    return root


@cache
def choice(group: str, name: str) -> Node:
    whole, own = Node(), written(CONF / group / f"{name}.yaml")
    for other in own.below.pop("defaults", Node()).below:
        if other != "_self_":
            whole.merge(choice(group, other))
    whole.merge(own)
    return whole


# types ----------------------------------------------------------------------------------------------------------------

WORDS = {  # for annotations
    **{"int": "integer", "float": "number", "bool": "true, false", "str": "text", "None": "null", "FilePath": "path"},
    **{"Path": "path", "Size": "integer, pair", "Any": "number, schedule", "Initializer": "initializer"},
    **{"AveragingSchedule": "schedule", "Sequence": "list", "tuple": "list", "list": "list", "Mapping": "mapping"},
    **{"dict": "mapping", "Normalize": "text, mapping, null", "Augment": "text, list", "Stages": "integer, text, list"},
    **{"Weights": "list", "Layer": "layer"},
}
RULES = {  # for functions that check a value
    **{"flag": "true, false", "count_or_flag": "true, false, integer ≥ 1", "seed": "integer ≥ 0", "factors": "mapping"},
    **{"memory": "bytes, amount", "on_device": "`auto`, true, false", "block_size": "integer, 32 to 1024"},
    **{"grid_size": "integer ≥ 1", "integers": "integer ≥ 1, list", "link": "text, mapping", "dtype": codes(DTYPES)},
    **{"learning_rate_scale": f"{codes(SCALES)}, number > 0"},
}


def words(annotation: str) -> str:
    """Return an annotation in YAML's terms."""
    kinds = re.sub(r"\[[^|]*?\]+(?= \||$)", "", re.sub(r" \| (?=[^[]*\])", "", annotation)).split(" | ")
    return ", ".join(dict.fromkeys(WORDS.get(kind, "part") for kind in kinds))


@cache
def constructor(target: str) -> dict[str, inspect.Parameter]:
    module, _, name = target.rpartition(".")
    return dict(inspect.signature(getattr(importlib.import_module(module), name)).parameters) if target else {}


def schema(kind: type[Group], above: str = "") -> dict[str, str]:
    """Return the types of a class's settings by dotted key; "" for those left to a constructor."""
    found = {}
    for each in fields(kind):
        check = each.metadata.get("check", partial(as_is))
        bounds = check.keywords
        limits = [f" {sign} {bounds[name]:g}" for name, sign in (("minimum", "≥"), ("above", ">")) if name in bounds]
        plain = "" if each.type == "Any" else words(str(each.type)).removesuffix(", null") + "".join(limits)
        plain = codes(bounds["names"]) if "names" in bounds else RULES.get(check.func.__name__, plain)
        found[above + each.name] = plain + ", null" * (each.default is None and bool(plain))
        found |= schema(each.metadata["group"], f"{above}{each.name}.") if "group" in each.metadata else {}
    return found
