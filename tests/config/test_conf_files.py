"""conf/: every file of every group composes and is valid, and its classes exist and accept its arguments."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache
from importlib import import_module
from typing import Any, cast

import pytest
from omegaconf import DictConfig, OmegaConf

from cupynet import config
from cupynet.config import composing
from cupynet.config.instantiate import build
from cupynet.core.errors import ConfigError
from cupynet.optim import Optimizer
from cupynet.parallel import ParameterAveraging
from tests.support.refusals import refused
from tests.support.settings import CHOICES, CONF, GROUPS, settings_of

# the files ------------------------------------------------------------------------------------------------------------


@cache
def composed(*overrides: str) -> dict[str, Any]:
    return asdict(config.compose(overrides))


def file_of(group: str, name: str) -> DictConfig:
    """Return a group's file, merged with the files of the same group in its defaults list."""
    file = cast(DictConfig, OmegaConf.load(CONF / group / f"{name}.yaml"))
    order = file.pop("defaults", ["_self_"])
    return cast(DictConfig, OmegaConf.merge(*(file if each == "_self_" else file_of(group, each) for each in order)))


def covering_overrides(group: str, name: str) -> list[str]:
    """Return overrides for this file and one of each other group, so that few combinations cover all files."""
    files = {each: [other for its, other in CHOICES if its == each] for each in GROUPS if each != "experiment"}
    place = files[group].index(name)
    return [f"{each}={names[place % len(names)]}" for each, names in files.items()]


def parts(node: Any, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield key, dict(node)
        for name, item in node.items():
            yield from parts(item, f"{key}.{name}")


def check_built(settings: dict[str, Any]) -> None:
    built = ["data", "model", "loss", "optimizer"]
    if settings["data"]["_target_"].rpartition(".")[2] in ("ImageFolder", "IdxFiles", "NpzFile", "ShardedFiles"):
        with pytest.raises(ConfigError):
            build(settings["data"], built.pop(0))
    for each in built:
        assert type(build(settings[each], each)).__module__.startswith("cupynet.")


@pytest.mark.parametrize(("group", "name"), [choice for choice in CHOICES if choice[0] != "experiment"])
def test_every_file_composes_and_lists_every_argument_of_its_parts(group: str, name: str) -> None:
    settings = composed(*covering_overrides(group, name))
    check_built(settings)
    if group != "backend":
        found: Any = OmegaConf.to_container(OmegaConf.create({group: file_of(group, name)}), resolve=True)
        if found[group].get("fallback") == "auto":
            found[group]["fallback"] = None  # an explicitly chosen data set has no fallback
        assert settings[group] == found[group]
    for key, part in parts(settings[group], group):
        module, _, cls = part.pop("_target_").rpartition(".")
        assert set(part) == set(inspect.signature(getattr(import_module(module), cls)).parameters), key


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "experiment"])
def test_every_experiment_composes(name: str) -> None:
    check_built(composed(f"experiment={name}"))


# defaults -------------------------------------------------------------------------------------------------------------


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


def test_defaults_of_the_contract() -> None:
    settings = settings_of()
    parallel = asdict(settings)["parallel"]
    assert (settings.seed, settings.data["seed"], settings.batch_size) == (123, 12345, 128)
    assert [settings.model["layers"][name]["filters"] for name in ("conv1", "conv2")] == [20, 50]
    assert (parallel["averaging_frequency"], parallel["prefetch_buffer"], parallel["timeout_s"]) == (3, 24, 300)
    assert (parallel["average_updaters"], parallel["learning_rate_scale"], parallel["reduce"]) == (True, "none", "auto")
    assert list(settings.callbacks) == ["history", "progress", "report", "checkpoint", "nonfinite"]
    assert settings.callbacks["checkpoint"]["keep_last"] == 2 and settings.callbacks["nonfinite"]["action"] == "stop"


def test_an_experiment_chooses_data_with_a_fallback_and_yields_to_the_command_line() -> None:
    assert composed("experiment=data_parallel")["data"]["fallback"] == "auto"  # it has `override /data: mnist`
    settings = settings_of("experiment=dl4j_gpu_guide", "workers=3", "optimizer=sgd")
    assert settings.workers == 3 and settings.optimizer["_target_"] == "cupynet.optim.SGD"


# arguments of an overridden class -------------------------------------------------------------------------------------


class Own(ParameterAveraging):
    def __init__(self, averaging_frequency: int = 1) -> None:
        super().__init__(averaging_frequency)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (f"{__name__}.Own", {"averaging_frequency": 10}),
        ("tests.guides.extending.gradient_mean.GradientMean", {}),
    ],
    ids=["some", "none"],
)
def test_an_overridden_class_keeps_the_arguments_it_accepts(target: str, expected: dict[str, Any]) -> None:
    chosen = ["trusted_modules=[tests]", f"parallel.synchronizer._target_={target}"]
    settings = settings_of("parallel.averaging_frequency=10", *chosen)
    assert settings.parallel.synchronizer == {"_target_": target, **expected}


def test_an_argument_that_was_typed_stays_whatever_class_is_chosen() -> None:
    """A wrong argument then raises an error when the object is built."""
    settings = settings_of("optimizer._target_=cupynet.optim.SGD", "optimizer.momentum=0.5", "optimizer.l2=0.25")
    assert settings.optimizer["l2"] == 0.25 and settings.optimizer["learning_rate"]["peak"] == 0.2
    with refused("optimizer.momentum"):
        build(settings.optimizer, "optimizer")


COSINE, CYCLE = "cupynet.optim.Cosine", "cupynet.optim.OneCycle"
STEP = "optimizer.learning_rate={name: step, every: 5, factor: 0.5}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["optimizer.learning_rate=cosine"], {"_target_": COSINE, "initial": 0.2}),
        (["optimizer=adam", "optimizer.learning_rate=one_cycle"], {"_target_": CYCLE, "peak": 0.001}),
        (["optimizer=sgd", STEP], {"_target_": "cupynet.optim.StepDecay", "initial": 0.1, "every": 5, "factor": 0.5}),
        (["optimizer.learning_rate={name: one_cycle, warmup: 0.1}"], {"_target_": CYCLE, "peak": 0.2, "warmup": 0.1}),
        (["optimizer.learning_rate={_target_: cupynet.optim.Cosine, initial: 1}"], {"_target_": COSINE, "initial": 1}),
    ],
    ids=str,
)
def test_a_schedule_is_named_beside_every_optimizer(overrides: list[str], expected: dict[str, Any]) -> None:
    for settings in (composing.compose(overrides), settings_of(*overrides)):
        assert settings.optimizer["learning_rate"] == expected
    assert isinstance(build(settings.optimizer, "optimizer"), Optimizer)


def test_an_unknown_schedule_and_wrong_arguments_of_one_are_refused() -> None:
    with refused("optimizer.learning_rate", "cosin"):
        settings_of("optimizer.learning_rate=cosin")
    for wrong in ("{name: cosine, evry: 3}", "{name: step, every: 3, factor: 0.5, evry: 3}"):
        with refused("optimizer.learning_rate.evry"):
            build(settings_of(f"optimizer.learning_rate={wrong}").optimizer, "optimizer")


def test_one_name_in_place_of_a_list_is_refused() -> None:
    for key, name in (("metrics", "auc"), ("freeze", "conv*")):
        with refused(key, name):
            composing.compose([f"{key}={name}"])


@pytest.mark.parametrize("name", ["averaging", "slowmo", "diloco", "elastic"])
def test_frequency_sets_the_period_of_every_synchronizer(name: str) -> None:
    settings = settings_of(f"parallel={name}", "parallel.averaging_frequency=7")
    assert build(settings.parallel.synchronizer, "parallel.synchronizer").averaging_frequency == 7
