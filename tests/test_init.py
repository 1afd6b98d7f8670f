"""The public names: complete, each from its own package, and imported only when used."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import cupynet

INIT = Path(cupynet.__file__)
NAMES: dict[str, str] = vars(cupynet)["_MODULES"]  # name -> module


def test_classes_that_users_extend_and_every_error_are_public() -> None:
    extended = {"Layer", "Loss", "Optimizer", "Schedule", "Source", "Synchronizer", "Callback"}
    errors = vars(import_module("cupynet.core.errors"))
    raised = {name for name, value in errors.items() if isinstance(value, type) and issubclass(value, Exception)}
    assert extended | raised <= set(vars(cupynet)["__all__"]) == set(NAMES)
    assert extended < set(dir(cupynet))


def test_a_public_name_is_the_object_of_its_own_package_and_imported_once() -> None:
    for name, module in NAMES.items():
        assert getattr(cupynet, name) is getattr(import_module(module), name)
        assert name in vars(cupynet)


@pytest.mark.parametrize(
    ("name", "ours"), [("Modle", "Model"), ("load_model", "load"), ("MaxPooling2D", "MaxPool2D"), ("Linear", "Dense")]
)
def test_an_unknown_name_is_refused_with_a_similar_name_or_the_one_for_a_name_of_another_library(
    name: str, ours: str
) -> None:
    with pytest.raises(AttributeError, match=f"'{ours}'"):
        getattr(cupynet, name)


def test_names_of_other_libraries_have_public_names_here() -> None:
    elsewhere: dict[str, str] = vars(cupynet)["_ELSEWHERE"]
    assert {*elsewhere.values()} <= {*NAMES} and not {*elsewhere} & {*NAMES}


def test_type_checkers_see_every_public_name() -> None:
    """For type checkers, only names imported as `x as x` are public."""
    for line in INIT.with_suffix(".pyi").read_text("utf-8").splitlines():
        if line.startswith("from"):
            name, alias = line.split(" import ")[1].split(" as ")
            assert name == alias


def modules_after(statement: str) -> set[str]:
    code = f"import sys\nbefore = set(sys.modules)\n{statement}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=INIT.parents[1], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_else() -> None:
    loaded = modules_after("import cupynet; dir(cupynet); cupynet.__version__")
    ours = {name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names}
    assert ours == {"cupynet", "cupynet.core", "cupynet.core.version"}
    assert not loaded & {"importlib.metadata", "logging", "asyncio"}


def test_a_public_name_imports_only_what_it_needs() -> None:
    loaded = {name for name in modules_after("from cupynet import ConfigError") if name.startswith("cupynet.")}
    assert "cupynet.core.errors" in loaded and all(name.startswith("cupynet.core") for name in loaded)
