"""The schema: each setting's rule, and mappings that become settings or an error that names the wrong key."""

from copy import deepcopy
from typing import Any

import pytest

from cupynet import config
from cupynet.config.schema import BenchSettings, PlanSettings, Settings, as_is, read, rules, size
from cupynet.core.shared_options import MOST_WORKERS
from tests.support.refusals import refused
from tests.support.settings import MINIMAL

GROUPS = ("backend", "backend.priority", "memory", "parallel")


def given(key: str, value: Any) -> dict[str, Any]:
    """Return a minimal valid mapping with `value` at a dotted key."""
    tree = deepcopy(MINIMAL)
    *above, last = key.split(".")
    node = tree
    for name in above:
        node = node[name]
    node[last] = value
    return tree


@pytest.mark.parametrize("kind", [BenchSettings, PlanSettings])
def test_every_setting_refuses_values_of_the_wrong_type_and_names_its_key(kind: type[Settings]) -> None:
    ruled = [key for key, rule in rules(kind) if key not in GROUPS and rule is not as_is]
    assert len(ruled) == len(set(ruled)) > 20
    for key in ruled:
        for value in ("surely wrong", object):
            with refused(key):
                read(kind, given(key, value))


def test_unknown_and_missing_settings_are_refused() -> None:
    for key in ("workrs", "parallel.timout_s", "backend.priority.gup", "peers"):
        with refused(key, "1"):
            read(Settings, given(key, 1))
    with refused("callbacks"):
        read(Settings, {name: value for name, value in MINIMAL.items() if name != "callbacks"})
    with refused("parallel.synchronizer"):
        read(Settings, {**MINIMAL, "parallel": {}})


@pytest.mark.parametrize(
    ("key", "good", "wrong"),
    [
        ("workers", MOST_WORKERS, MOST_WORKERS + 1),
        ("seed", 2**64 - 1, 2**64),
        ("parallel.timeout_s", 0.5, 0),
        ("backend.max_block_size", 1024, 2048),
        ("backend.max_grid_size", 2**31 - 1, 2**31),
        ("backend.tf32", True, 1),
    ],
)
def test_a_value_beyond_the_bounds_of_its_setting_is_refused(key: str, good: Any, wrong: Any) -> None:
    read(BenchSettings, given(key, good))
    with refused(key):
        read(BenchSettings, given(key, wrong))


def test_an_amount_of_memory_is_a_number_of_bytes_or_has_a_unit() -> None:
    assert size(4096) == size("4096") == size("4KiB") == size("4 kib") == size("4096B") == 4096
    assert size("2GiB") == 2 << 30 and size("1.5GB") == 1_500_000_000 and size("1TiB") == 1 << 40
    assert size("80%", share=True) == 0.8 and size("100%", share=True) == 1.0
    assert type(size("2GiB", share=True)) is int


@pytest.mark.parametrize(
    ("wrong", "share"),
    [
        *((value, False) for value in (0, True, 1.0e30, "", "GiB", "80%", "2 gibs", "-2GiB", "nan", None, 10**400)),
        *(("0%", True), ("101%", True)),
    ],
    ids=str,
)
def test_values_that_are_not_an_amount_of_memory_are_refused(wrong: object, share: bool) -> None:
    with pytest.raises(ValueError):
        size(wrong, share=share)


COMMON = {
    "parallel.synchronizer._target_": "cupynet.parallel.ParameterAveraging",
    "parallel.averaging_frequency": 3,
    "parallel.learning_rate_scale": "none",
    "parallel.prefetch_buffer": 24,
}


@pytest.mark.parametrize(
    ("key", "value", "workers", "backend", "same"),
    [
        ("parallel.averaging_frequency", 7, 1, "numba", True),
        ("parallel.averaging_frequency", 7, 2, "numba", False),
        ("parallel.synchronizer.outer_optimizer", "diloco", 1, "numba", True),
        ("parallel.learning_rate_scale", "linear", 1, "numba", True),
        ("parallel.learning_rate_scale", "linear", 2, "numba", False),
        ("parallel.prefetch_buffer", 0, 1, "numba", False),
        ("parallel.timeout_s", 60.0, 2, "numba", True),
        ("data.timeout_s", 30.0, 2, "numba", True),
        ("memory.data_on_device", True, 2, "numba", True),
        ("backend.max_block_size", 64, 2, "numba", True),
        ("backend.max_block_size", 64, 1, "cupy", False),
        ("optimizer.learning_rate", 0.1, 1, "numba", False),
    ],
)
def test_settings_that_differ_only_where_they_have_no_effect_are_equal(
    key: str, value: Any, workers: int, backend: str, same: bool
) -> None:
    one, other = (config.effective({**COMMON, **each}, workers, backend) for each in ({}, {key: value}))
    assert (one == other) == same
