"""The public names: complete, each from its package, and not imported until one is used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import cupynet

INIT = Path(cupynet.__file__)


def test_base_classes_for_users_are_public() -> None:
    extended = {"Layer", "Loss", "Optimizer", "Schedule", "Source", "Synchronizer", "Callback"}
    used = {"ParallelWrapper", "ParameterAveraging", "History", "Momentum", "Batch", "save_weights", "load_weights"}
    assert extended | used <= set(cupynet.__all__)


def test_all_names_every_public_name_once() -> None:
    assert len(set(cupynet.__all__)) == len(cupynet.__all__) > 100
    modules = {path.stem for path in INIT.parent.iterdir()}
    own = {"ast", "Path", "import_module"}
    assert {name for name in dir(cupynet) if not name.startswith("_")} - modules - own == set(cupynet.__all__)


def test_a_public_name_is_that_of_its_package() -> None:
    for name, module in cupynet._MODULES.items():
        assert getattr(cupynet, name) is getattr(import_module(module), name)
        assert name in vars(cupynet), "the second access should not import again"


def test_every_error_is_public() -> None:
    errors = import_module("cupynet.core.errors")
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised <= set(cupynet.__all__)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError):
        cupynet.Modle  # noqa: B018
    assert not hasattr(cupynet, "__path_hooks__")


def test_type_checkers_see_every_public_name() -> None:
    for line in INIT.with_suffix(".pyi").read_text("utf-8").splitlines():
        if line.startswith("from"):
            name, alias = line.split(" import ")[1].split(" as ")
            assert name == alias, "only `x as x` is public to a type checker"


def modules_after(statement: str) -> set[str]:
    code = f"import sys\nbefore = set(sys.modules)\n{statement}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=INIT.parents[1], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_costs_nothing() -> None:
    loaded = modules_after("import cupynet; dir(cupynet); cupynet.__version__")
    own = {name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names}
    assert own == {"cupynet", "cupynet.core", "cupynet.core.version"}
    assert not loaded & {"importlib.metadata", "logging", "asyncio"}


def test_a_public_name_imports_only_what_it_needs() -> None:
    loaded = {name for name in modules_after("from cupynet import ConfigError") if name.startswith("cupynet.")}
    assert "cupynet.core.errors" in loaded and all(name.startswith("cupynet.core") for name in loaded)
    assert "numpy" in modules_after("from cupynet import Evaluation")  # so the test above looks at the right thing
