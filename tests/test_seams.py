"""Import cycles, read from the sources."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.sources import MODULES, SOURCES, Source, imported


def edges(sources: Iterable[Source]) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports at run time.

    An import for type checkers may go back: a callback names the type of its trainer, which imports callbacks.
    """
    return {
        source.module: {name for name, _ in imported(source, at_run_time=True) if name in MODULES} - {source.module}
        for source in sources
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected groups of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_no_circle_of_files() -> None:
    assert circles(edges(SOURCES)) == []


def test_a_circle_is_found() -> None:
    text = "def f():\n    from cupynet.backend.select import create_backend\n"
    graph = edges(SOURCES) | edges([Source("backend/policy.py", text)])
    assert any({"cupynet.backend.policy", "cupynet.backend.select"} <= set(group) for group in circles(graph))
