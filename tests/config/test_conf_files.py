"""conf/: every file of every group composes, keeps the rules, and names parts that exist, with all their arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from cupynet import config
from cupynet.config.instantiate import build
from cupynet.config.schema import Settings
from cupynet.core.errors import ConfigError
from cupynet.parallel import ParameterAveraging
from cupynet.training import EarlyStopping
from tests.support.refusals import refused
from tests.support.settings import CHOICES, CONF, GROUPS, file_of, settings_of


def plain(settings: Settings) -> dict[str, Any]:
    return asdict(settings)


def parts(node: Any, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield key, dict(node)
        for name, item in node.items():
            yield from parts(item, f"{key}.{name}")


def test_the_groups_are_these() -> None:
    assert {path.name for path in CONF.iterdir() if path.is_dir()} == {*GROUPS, "hydra"}
    assert {group for group, _ in CHOICES} == set(GROUPS)
    assert not list(CONF.rglob("*.yml"))


@cache
def composed(*overrides: str) -> Settings:
    """Return settings as Hydra composes them."""
    return config.compose(overrides)


def covering_overrides(group: str, name: str) -> list[str]:
    """Return overrides that select this file and one file of every other group; few combinations cover all files."""
    if group == "experiment":
        return [f"experiment={name}"]
    files = {each: [other for its, other in CHOICES if its == each] for each in GROUPS if each != "experiment"}
    place = files[group].index(name)
    return [f"{each}={names[place % len(names)]}" for each, names in files.items()]


def with_file(group: str, name: str, *values: str) -> Settings:
    return settings_of(f"{group}={name}", *values)


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_file_composes_and_its_parts_can_be_built(group: str, name: str) -> None:
    settings = composed(*covering_overrides(group, name))
    built = ["data", "model", "loss", "optimizer"]
    if settings.data["_target_"].rpartition(".")[2] in ("Folder", "Idx", "Npz", "Sharded"):  # the user names the files
        with pytest.raises(ConfigError):
            build(settings.data, built.pop(0))
    for each in built:
        assert type(build(getattr(settings, each), each)).__module__.startswith("cupynet.")
    if group not in ("experiment", "backend"):
        file = OmegaConf.create({group: file_of(group, name)})
        found: Any = OmegaConf.to_container(file, resolve=True)
        if found[group].get("fallback") == "auto":
            found[group]["fallback"] = None  # because the file was chosen
        assert plain(settings)[group] == found[group]
    if group != "experiment":
        for key, part in parts(plain(settings)[group], group):
            module, _, cls = part.pop("_target_").rpartition(".")
            known = inspect.signature(getattr(import_module(module), cls)).parameters
            assert set(part) == set(known), f"{key}: every argument must be listed"


FILES = ["data=npz", "loss=hinge", "optimizer=adam", "backend=cupy", "parallel=post_local", "callbacks=weight_average"]
VALUES = ["data.limit=9", "seed=5", "+workers=3", "callbacks.checkpoint.keep_last=3", "memory.device_pool_limit=80%"]
ADDED = ["+model.layers.more={_target_: cupynet.nn.Dropout}", "+callbacks.mine._target_=mymodule.Mine"]
REMOVED = ["~callbacks.progress", "callbacks.history=null"]


@pytest.mark.parametrize(
    "overrides",
    [
        [*FILES, "parallel.averaging_frequency=7", *VALUES, *ADDED],
        ["parallel=hybrid", "callbacks=[default,tensorboard]", "model=mlp", *VALUES, *REMOVED],
    ],
    ids=["files", "lists"],
)
def test_settings_of_equals_config_compose(overrides: list[str]) -> None:
    assert settings_of(*overrides) == config.compose(overrides)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_files_are_written_for_hydra_1_4_too(path: Path) -> None:
    code = re.sub(r"(^|\s)#.*", "", path.read_text())
    if re.search(r"^defaults:", code, re.MULTILINE):
        assert re.search(r"^  - _self_$", code, re.MULTILINE), "_self_ must be written out"
    assert "override_dirname" not in code and "_group_." not in code
    assert not re.search(r"(:|-)\s+[\[{].*\$\{", code), "${} in a flow mapping or list is a parse error"
    assert path.parent.name != "experiment" or path.read_text().startswith("# @package _global_\n")


def test_defaults_of_config_yaml_equal_those_of_the_schema() -> None:
    def compare(settings: Any) -> Iterator[str]:
        for each in fields(settings):
            default = each.default_factory() if each.default_factory is not MISSING else each.default
            if "group" in each.metadata:
                yield from compare(getattr(settings, each.name))
            elif default is not MISSING:
                assert getattr(settings, each.name) == default, each.name
                yield each.name

    assert {"epochs", "gpu", "pinned_pool_trim_above", "timeout_s"} < set(compare(settings_of()))


def test_the_spine_is_first_and_experiment_is_not_optional() -> None:
    """What is first is what the rest is held against; a missing *optional* file is passed over in silence."""
    defaults = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"))["defaults"]  # type: ignore[call-overload, index]
    assert defaults[0] == "spine" and {"experiment": None} in defaults
    assert {"override hydra/help": "cupynet"} in defaults


def test_defaults_of_the_contract() -> None:
    settings = settings_of()
    parallel = plain(settings)["parallel"]
    assert (settings.seed, settings.data["seed"], settings.batch_size) == (123, 12345, 128)
    assert [settings.model["layers"][name]["filters"] for name in ("conv1", "conv2")] == [20, 50]
    assert (parallel["averaging_frequency"], parallel["prefetch_buffer"], parallel["timeout_s"]) == (3, 24, 300)
    assert (parallel["average_updaters"], parallel["learning_rate_scale"], parallel["reduce"]) == (True, "none", "auto")
    assert {**parallel["synchronizer"]} == {
        **{"_target_": "cupynet.parallel.ParameterAveraging", "averaging_frequency": 3, "average_updaters": True},
        **{"report_score": True, "measure_every": 50, "wire": "exact", "outer": "mean"},
    }
    assert list(settings.callbacks) == ["history", "progress", "report", "checkpoint", "nonfinite"]
    assert settings.callbacks["checkpoint"]["keep_last"] == 2 and settings.callbacks["nonfinite"]["action"] == "stop"
    assert settings.callbacks["report"]["enabled"] is False  # by CUPYNET_REPORT, which tests/conftest.py sets


def test_the_synchronizer_follows_the_settings_of_its_group() -> None:
    settings = settings_of("parallel.averaging_frequency=end", "parallel.average_updaters=false")
    found = settings.parallel.synchronizer
    assert (found["averaging_frequency"], found["average_updaters"], found["report_score"]) == ("end", False, True)


def test_experiments() -> None:
    wrapper = composed("experiment=dl4j_parallel_wrapper")
    assert (wrapper.workers, wrapper.epochs, wrapper.batch_size, wrapper.dtype) == (2, 10, 128, "float")
    assert (wrapper.parallel.averaging_frequency, wrapper.parallel.prefetch_buffer) == (3, 24)
    nesterov = {"_target_": "cupynet.optim.Nesterov", "learning_rate": 0.01, "momentum": 0.9, "l2": 0.0005}
    assert wrapper.optimizer.items() >= nesterov.items()
    guide = composed("experiment=dl4j_gpu_guide")
    assert (guide.workers, guide.dtype, guide.parallel.averaging_frequency) == (4, "half", 1)
    assert (guide.optimizer["learning_rate"], guide.parallel.learning_rate_scale) == (0.01, 1.2)
    assert guide.memory.device_pool_trim_above == "2GiB"
    parallel = composed("experiment=data_parallel")
    assert parallel.parallel.averaging_frequency == "end"
    assert parallel.data["fallback"] == "auto"  # although its file has `override /data: mnist`
    early = composed("experiment=dl4j_early_stopping")
    assert early.data["validation"] == 5000 and early.epochs == early.callbacks["early_stopping"]["max_epochs"] == 50
    diloco = composed("experiment=diloco")
    assert (diloco.workers, diloco.parallel.averaging_frequency) == (4, 50)
    assert diloco.parallel.synchronizer["outer"]["momentum"] < 0.9


def test_early_stopping_is_added_to_the_default_callbacks() -> None:
    default, early = settings_of().callbacks, settings_of("callbacks=early_stopping").callbacks
    assert early == {**default, "early_stopping": early["early_stopping"]}
    arguments = inspect.signature(EarlyStopping).parameters
    part = {name: value for name, value in early["early_stopping"].items() if name != "_target_"}
    assert part == {name: each.default for name, each in arguments.items()}
    chosen = settings_of("+callbacks.early_stopping._target_=cupynet.training.EarlyStopping").callbacks
    assert chosen["early_stopping"] == {"_target_": "cupynet.training.EarlyStopping"}


def test_the_command_line_overrides_an_experiment() -> None:
    settings = settings_of("experiment=dl4j_gpu_guide", "workers=3", "optimizer=sgd")
    assert settings.workers == 3 and settings.optimizer["_target_"] == "cupynet.optim.SGD"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # the file's own class, a subclass, another class that shares some arguments, one that shares none
        (["parallel.synchronizer._target_=cupynet.parallel.ParameterAveraging"],
         {"averaging_frequency": 10, "average_updaters": True, "report_score": True, "measure_every": 50,
          "wire": "exact", "outer": "mean"}),
        ([f"trusted_modules=[{__name__}]", f"parallel.synchronizer._target_={__name__}.Own"],
         {"averaging_frequency": 10}),
        (["trusted_modules=[tests]",
          "parallel.synchronizer._target_=tests.guides.extending.gradient_mean.GradientMean"],
         {}),
        (["parallel.synchronizer._target_=cupynet.parallel.ParameterAveraging", "parallel.synchronizer.wire=half"],
         {"averaging_frequency": 10, "average_updaters": True, "report_score": True, "measure_every": 50,
          "wire": "half", "outer": "mean"}),
    ],
    ids=["same", "own", "another", "asked"],
)  # fmt: skip
def test_an_overridden_class_keeps_the_arguments_it_accepts(overrides: list[str], expected: dict[str, Any]) -> None:
    settings = settings_of("parallel.averaging_frequency=10", *overrides)
    assert {k: v for k, v in settings.parallel.synchronizer.items() if k != "_target_"} == expected


class Own(ParameterAveraging):
    def __init__(self, averaging_frequency: int = 1) -> None:
        super().__init__(averaging_frequency)


def test_another_optimizer_keeps_the_learning_rate() -> None:
    settings = settings_of("optimizer._target_=cupynet.optim.SGD", "optimizer.l2=0.25")
    clipping = {"max_grad_norm", "clip_layer_norm", "clip_value"}
    assert set(settings.optimizer) == {"_target_", "learning_rate", "l1", "l2", "weight_decay", *clipping}
    assert settings.optimizer["l2"] == 0.25 and settings.optimizer["learning_rate"]["peak"] == 0.2


def test_an_argument_that_was_typed_stays_whatever_class_is_chosen() -> None:
    """So that a wrong one is refused when the part is built."""
    settings = settings_of("optimizer._target_=cupynet.optim.SGD", "optimizer.momentum=0.5")
    with refused("optimizer.momentum"):
        build(settings.optimizer, "optimizer")


@pytest.mark.parametrize(("name", "frequency"), [
    ("averaging", 7), ("slowmo", 7), ("diloco", 7), ("elastic", 7), ("post_local", None), ("adaptive", None),
])  # fmt: skip
def test_frequency_sets_the_period_of_every_synchronizer(name: str, frequency: int | None) -> None:
    settings = with_file("parallel", name, "parallel.averaging_frequency=7")
    built = build(settings.parallel.synchronizer, "parallel.synchronizer")
    assert built.averaging_frequency == frequency
    if name == "post_local":
        assert built.schedule.later.averaging_frequency == 7
    if name == "adaptive":
        assert built.schedule.first == 7


def test_each_short_name_builds_the_class_of_its_file() -> None:
    """`encoding=threshold` and `outer=diloco` are the files' parts with the classes' defaults."""
    short = settings_of("parallel=gradients", "parallel.synchronizer.encoding=threshold").parallel.synchronizer
    one, other = (build(node, "x") for node in (short, with_file("parallel", "threshold").parallel.synchronizer))
    assert vars(one.encoding.algorithm) == pytest.approx(vars(other.encoding.algorithm), rel=1e-6)
    assert (one.encoding.clip_residual_every, one.encoding.clip_residual) == (5, 5.0)
    for name in ("slowmo", "diloco"):
        short = settings_of(f"parallel.synchronizer.outer={name}").parallel.synchronizer
        one, other = (build(node, "x") for node in (short, with_file("parallel", name).parallel.synchronizer))
        assert str(one.outer) == str(other.outer)
