"""Pairwise combinations of test parameters: every pair of values occurs, not every combination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def pairwise(**axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize a test so that any two values of different parameters meet in at least one case.

    The cases are the same in every run: a greedy choice, in the order in which the values are written.

    Args:
        axes: parameter name -> its values; a mapping gives each value the name that it has in the test's id.
    """
    named = {
        axis: values if isinstance(values, Mapping) else {getattr(v, "__name__", str(v)): v for v in values}
        for axis, values in axes.items()
    }
    assert all(len(named[axis]) == len(values) for axis, values in axes.items()), "two values have one name"
    cases = cover([len(values) for values in named.values()])
    columns = [list(values.items()) for values in named.values()]
    chosen = [[column[i] for column, i in zip(columns, case, strict=True)] for case in cases]
    return pytest.mark.parametrize(
        list(axes), [pytest.param(*(v for _, v in case), id="-".join(name for name, _ in case)) for case in chosen]
    )


def cover(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return tuples of indices below `sizes` in which every pair of indices of two places occurs."""
    assert len(sizes) > 1 and all(sizes), "pairs need two axes, with values"
    open_pairs = {
        ((a, i), (b, j)): None
        for a, b in combinations(range(len(sizes)), 2)
        for i in range(sizes[a])
        for j in range(sizes[b])
    }
    uses = [[0] * size for size in sizes]
    cases = []
    while open_pairs:
        case = dict(next(iter(open_pairs)))
        for axis, size in enumerate(sizes):
            if axis not in case:
                gains = [sum(pair_of(axis, i, *other) in open_pairs for other in case.items()) for i in range(size)]
                case[axis] = rarest([i for i in range(size) if gains[i] == max(gains)], uses[axis])
        for axis, i in case.items():
            uses[axis][i] += 1
        cases.append(tuple(case[axis] for axis in range(len(sizes))))
        for pair in combinations(sorted(case.items()), 2):
            open_pairs.pop(pair, None)
    return cases


def rarest(candidates: Sequence[int], uses: Sequence[int]) -> int:
    return min(candidates, key=lambda i: uses[i])


def pair_of(axis: int, i: int, other: int, j: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((axis, i), (other, j)) if axis < other else ((other, j), (axis, i))
