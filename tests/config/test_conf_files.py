"""conf/: every file of every group composes and is valid, and its classes exist and accept its arguments."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import MISSING, asdict, fields
from importlib import import_module
from typing import Any

import pytest

from cupynet import config
from cupynet.config.instantiate import build
from cupynet.core.errors import ConfigError
from cupynet.optim import Optimizer
from cupynet.parallel import ParameterAveraging
from tests.support.refusals import refused
from tests.support.settings import CHOICES, GROUPS, settings_of


def parts(node: Any, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield key, dict(node)
        for name, item in node.items():
            yield from parts(item, f"{key}.{name}")


FILES = {group: [name for its, name in CHOICES if its == group] for group in GROUPS if group != "experiment"}
WITHOUT_A_PATH = ("ImageFolder", "IdxFiles", "NpzFile", "ShardedFiles")


@pytest.mark.parametrize("number", range(max(map(len, FILES.values()))))
def test_every_file_of_conf_composes_and_lists_every_argument_of_its_parts(number: int) -> None:
    """Each number chooses one file of every group. tests/commands/test_train.py trains with every experiment."""
    settings = asdict(config.compose([f"{group}={names[number % len(names)]}" for group, names in FILES.items()]))
    for each in ("model", "loss", "optimizer"):
        build(settings[each], each)
    needs_path = settings["data"]["_target_"].endswith(WITHOUT_A_PATH)
    with pytest.raises(ConfigError) if needs_path else nullcontext():
        build(settings["data"], "data")
    for key, part in (each for group in FILES for each in parts(settings[group], group)):
        module, _, cls = part.pop("_target_").rpartition(".")
        assert set(part) == set(inspect.signature(getattr(import_module(module), cls)).parameters), key


def test_settings_composed_for_tests_equal_settings_composed_by_hydra() -> None:
    files = ["experiment=dl4j_gpu_guide", "callbacks=[default,tensorboard]", "~callbacks.progress"]
    values = ["parallel.averaging_frequency=7", "+callbacks.mine={a: 1}", "optimizer.learning_rate=cosine"]
    assert settings_of(*values, *files) == config.compose([*values, *files])


def test_defaults_of_config_yaml_equal_the_defaults_of_the_schema() -> None:
    def compare(settings: Any) -> Iterator[str]:
        for each in fields(settings):
            default = each.default_factory() if each.default_factory is not MISSING else each.default
            if "group" in each.metadata:
                yield from compare(getattr(settings, each.name))
            elif default is not MISSING:
                assert getattr(settings, each.name) == default, each.name
                yield each.name

    assert {"epochs", "gpu", "pinned_pool_trim_above", "timeout_s"} < set(compare(settings_of()))


def test_data_chosen_by_an_experiment_fall_back_to_synthetic_digits_like_the_default() -> None:
    assert config.compose(["experiment=data_parallel"]).data["fallback"] == "auto"  # it has `override /data: mnist`


def test_settings_on_the_command_line_take_precedence_over_an_experiment() -> None:
    settings = settings_of("experiment=dl4j_gpu_guide", "workers=3", "optimizer=sgd")
    assert settings.workers == 3 and settings.optimizer["_target_"] == "cupynet.optim.SGD"


class Own(ParameterAveraging):
    def __init__(self, averaging_frequency: int = 1) -> None:
        super().__init__(averaging_frequency)


def test_a_class_chosen_by_target_keeps_the_arguments_that_it_accepts() -> None:
    target = f"{__name__}.Own"
    chosen = ["trusted_modules=[tests]", f"parallel.synchronizer._target_={target}"]
    settings = settings_of("parallel.averaging_frequency=10", *chosen)
    assert settings.parallel.synchronizer == {"_target_": target, "averaging_frequency": 10}


def test_an_argument_that_was_typed_is_kept_and_refused_by_a_class_without_it() -> None:
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
def test_a_schedule_chosen_by_name_keeps_the_learning_rate(overrides: list[str], expected: dict[str, Any]) -> None:
    settings = settings_of(*overrides)
    assert settings.optimizer["learning_rate"] == expected
    assert isinstance(build(settings.optimizer, "optimizer"), Optimizer)


def test_an_unknown_schedule_and_wrong_arguments_of_one_are_refused() -> None:
    with refused("optimizer.learning_rate", "cosin"):
        settings_of("optimizer.learning_rate=cosin")
    for wrong in ("{name: cosine, evry: 3}", "{name: step, every: 3, factor: 0.5, evry: 3}"):
        with refused("optimizer.learning_rate.evry"):
            build(settings_of(f"optimizer.learning_rate={wrong}").optimizer, "optimizer")


@pytest.mark.parametrize("name", ["averaging", "slowmo", "diloco", "elastic"])
def test_averaging_frequency_sets_the_period_of_every_synchronizer(name: str) -> None:
    settings = settings_of(f"parallel={name}", "parallel.averaging_frequency=7")
    assert build(settings.parallel.synchronizer, "parallel.synchronizer").averaging_frequency == 7
