"""The settings: every one keeps its rule, and a mapping becomes settings or is refused by the name of what is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import pytest

from cupynet.backend import BACKENDS, DTYPES
from cupynet.config.schema import (
    MOST_IMAGES,
    MOST_WORKERS,
    BenchSettings,
    ParallelSettings,
    PlanSettings,
    Settings,
    as_is,
    read,
    rules,
    size,
)
from cupynet.core.errors import ConfigError
from tests.support.settings import MINIMAL

GROUPS = ("backend", "backend.priority", "memory", "parallel")


def given(key: str, value: Any) -> dict[str, Any]:
    """The least that can be read, and `value` at the dotted key."""
    *above, last = key.split(".")
    tree: dict[str, Any] = {**MINIMAL, "backend": {"priority": {}}, "memory": {}, "parallel": {"synchronizer": {}}}
    node = tree
    for name in above:
        node = node[name]
    node[last] = value
    return tree


def test_defaults() -> None:
    settings = read(BenchSettings, MINIMAL)
    assert (settings.workers, settings.dtype, settings.repeats, settings.peers) == (None, "float", 5, None)
    assert (settings.parallel.averaging_frequency, settings.parallel.timeout_s) == (3, 300.0)
    assert (settings.backend.name, settings.backend.priority.gpu) == ("auto", 100)
    assert settings.trusted_modules == [] and settings.trusted_modules is not read(Settings, MINIMAL).trusted_modules


@pytest.mark.parametrize("kind", [BenchSettings, PlanSettings])
def test_every_rule_names_its_key_and_value(kind: type[Settings]) -> None:
    seen = []
    for key, rule in rules(kind):
        if key in GROUPS or rule is as_is:  # the schema or a constructor checks it
            continue
        seen.append(key)
        for value, shown in (("surely wrong", "surely wrong"), (object, "<class 'object'>")):
            with pytest.raises(ConfigError) as caught:
                read(kind, given(key, value))
            assert re.match(f"{re.escape(key)}='?{shown}'?: must be ", str(caught.value)), caught.value
    assert len(seen) == len(set(seen)) > 20


def test_every_setting_has_a_rule_and_a_type() -> None:
    def walk(kind: Any) -> None:
        hints = get_type_hints(kind)
        for each in fields(kind):
            assert callable(each.metadata["rule"]), each.name
            assert ("group" in each.metadata) == is_dataclass(hints[each.name])
            if "group" in each.metadata:
                assert each.metadata["group"] is hints[each.name]
                walk(hints[each.name])

    walk(BenchSettings)
    walk(PlanSettings)


def test_unknown_and_missing_names() -> None:
    for key, line in {
        "workrs": "workrs=1: there is no setting 'workrs'; did you mean 'workers'?",
        "parallel.timout_s": "parallel.timout_s=1: there is no setting 'parallel.timout_s'"
        "; did you mean 'parallel.timeout_s'?",
        "backend.priority.gup": "backend.priority.gup=1: there is no setting 'backend.priority.gup'"
        "; did you mean 'backend.priority.gpu'?",
        "peers": "peers=1: there is no setting 'peers'",
    }.items():
        with pytest.raises(ConfigError) as caught:
            read(Settings, given(key, 1))
        assert str(caught.value).startswith(line)
    for key in ("parallel", "callbacks", "data"):
        with pytest.raises(ConfigError, match=f"^{key}: is missing$"):
            read(Settings, {name: value for name, value in MINIMAL.items() if name != key})
    with pytest.raises(ConfigError, match="^parallel.synchronizer: is missing$"):
        read(Settings, {**MINIMAL, "parallel": {}})


@pytest.mark.parametrize(("key", "most"), [("workers", MOST_WORKERS), ("images", MOST_IMAGES)])
def test_absurd_sizes_are_refused(key: str, most: int) -> None:
    read(BenchSettings, given(key, most))
    for value in (most + 1, 99999999999999999999):
        with pytest.raises(ConfigError, match=f"^{key}={value}: must be at most {most}"):
            read(BenchSettings, given(key, value))


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("max_block_size", 16, "must be an integer of at least 32"),
        ("max_block_size", 2048, "must be at most 1024: GPUs allow no more"),
        ("max_block_size", None, "must be an integer of at least 32"),
        ("max_grid_size", 0, "must be an integer of at least 1, or null for no limit"),
        ("max_grid_size", 2**31, "must be at most 2147483647, or null for no limit"),
    ],
)
def test_impossible_block_and_grid_sizes_are_refused(key: str, value: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^backend.{key}={value}: {line}$"):
        read(Settings, given(f"backend.{key}", value))


def test_tf32_is_a_choice() -> None:
    assert read(Settings, MINIMAL).backend.tf32 is False and read(Settings, given("backend.tf32", True)).backend.tf32
    for value in (1, None, "yes"):
        with pytest.raises(ConfigError, match="^backend.tf32=.*: must be true or false$"):
            read(Settings, given("backend.tf32", value))


def test_launches_have_bounds() -> None:
    settings = read(Settings, given("backend.max_block_size", 1024)).backend
    assert (settings.max_block_size, settings.max_grid_size) == (1024, None)


def test_seeds_have_64_bits() -> None:
    assert read(Settings, given("seed", 2**64 - 1)).seed == 2**64 - 1
    for value in (2**64, -1):
        with pytest.raises(ConfigError, match=f"^seed={value}: must be "):
            read(Settings, given("seed", value))


def test_names_of_dtypes_and_backends() -> None:
    for dtype in DTYPES:
        assert read(Settings, given("dtype", dtype)).dtype == dtype
    assert read(Settings, given("dtype", "float32")).dtype == "float"  # as in Python
    for backend in ("auto", *BACKENDS):
        assert read(Settings, given("backend.name", backend)).backend.name == backend


def test_a_group_of_settings_can_be_built_in_python() -> None:
    assert ParallelSettings(synchronizer=None).prefetch_buffer == 24


def test_settings_import_no_heavy_packages() -> None:
    code = "import cupynet.config.schema, sys; assert not {'numpy', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sizes_have_units() -> None:
    assert size(4096) == size("4096") == size("4KiB") == size("4 kib") == size("4096B") == 4096
    assert size("2GiB") == 2 << 30 and size("1.5GB") == 1_500_000_000 and size("1TiB") == 1 << 40
    assert size("80%", share=True) == 0.8 and size("100%", share=True) == 1.0
    assert type(size("2GiB", share=True)) is int
    wrong: object
    for wrong in (
        0,
        -1,
        True,
        1.0e30,
        "",
        "GiB",
        "80%",
        "2 gibs",
        "-2GiB",
        "nan",
        None,
        [],
        10**400,
        "9" * 30,
        "9999999999 TB",
    ):
        with pytest.raises(ValueError):
            size(wrong)
    for wrong in ("0%", "101%"):
        with pytest.raises(ValueError):
            size(wrong, share=True)


def test_a_timeout_is_at_least_a_second() -> None:
    assert read(Settings, given("parallel.timeout_s", 1)).parallel.timeout_s == 1
    with pytest.raises(ConfigError, match="^parallel.timeout_s=0.5: must be a number of seconds of at least 1"):
        read(Settings, given("parallel.timeout_s", 0.5))
