"""Pairwise combinations of test parameters: every pair of values occurs, but not every combination."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def pairwise(**axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize a test so that any two values of different parameters occur together in at least one case.

    The choice is greedy, in the order of the values, so all runs have the same cases.

    Args:
        axes: parameter name -> its values, or a mapping from names in the test's id to values.
    """
    columns = [
        list(values.items() if isinstance(values, Mapping) else ((getattr(v, "__name__", str(v)), v) for v in values))
        for values in axes.values()
    ]
    cases = []
    for indices in cover([len(column) for column in columns]):
        chosen = [column[i] for column, i in zip(columns, indices, strict=True)]
        cases.append(pytest.param(*(value for _, value in chosen), id="-".join(name for name, _ in chosen)))
    return pytest.mark.parametrize(list(axes), cases)


def cover(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return tuples of indices below `sizes` such that every pair of indices at two positions occurs."""
    missing = {
        ((a, i), (b, j)): None
        for a, b in combinations(range(len(sizes)), 2)
        for i in range(sizes[a])
        for j in range(sizes[b])
    }
    uses = [[0] * size for size in sizes]
    cases = []
    while missing:
        case = dict(next(iter(missing)))  # axis -> index
        for axis, size in enumerate(sizes):
            if axis not in case:
                pairs = [[tuple(sorted([(axis, i), other])) for other in case.items()] for i in range(size)]
                gains = [sum(pair in missing for pair in each) for each in pairs]
                case[axis] = min((i for i in range(size) if gains[i] == max(gains)), key=uses[axis].__getitem__)
        for axis, i in case.items():
            uses[axis][i] += 1
        cases.append(tuple(case[axis] for axis in range(len(sizes))))
        for pair in combinations(sorted(case.items()), 2):
            missing.pop(pair, None)
    return cases
