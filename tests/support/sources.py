"""The modules of the package as text and as syntax trees."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "cupynet"


class Source(NamedTuple):
    path: str  # below cupynet/, as "nn/conv.py"
    text: str

    @property
    def module(self) -> str:
        return ".".join(("cupynet", *self.path.removesuffix(".py").split("/"))).removesuffix(".__init__")

    @property
    def package(self) -> str:
        return self.path.removesuffix(".py").split("/")[0]

    @property
    def tree(self) -> ast.Module:
        return parsed(self.text, self.path)

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        return walked(self.text, self.path)


@cache
def parsed(text: str, path: str) -> ast.Module:
    """What a file says, read once for all rules."""
    return ast.parse(text, path)


@cache
def walked(text: str, path: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(text, path)))


SOURCES = [Source(p.relative_to(PACKAGE).as_posix(), p.read_text("utf-8")) for p in sorted(PACKAGE.rglob("*.py"))]
MODULES = {source.module for source in SOURCES}


def called(node: ast.Call) -> str:
    """The last name of what is called: `import_module` for importlib.import_module(...)."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def dotted(node: ast.AST) -> str:
    """The dotted name that an expression is, such as `np.load`. Empty if it is anything else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def imported(source: Source) -> Iterator[tuple[str, int]]:
    """Yield (module, line) of everything imported, at any depth of the source, also for type checkers."""
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*parents, *filter(None, [base])))
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield (name if name in MODULES else base), node.lineno
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__") and node.args:
            argument = getattr(node.args[0], "value", None)
            if isinstance(argument, str):
                yield argument, node.lineno
