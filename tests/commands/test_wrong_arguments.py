"""Wrong arguments of a command give one line that names the problem, an exit code, and no file."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cupynet.commands import compare, evaluate, export, predict, report
from tests.support.commands import Call
from tests.support.resumed_runs import trained

WRONG = [
    (evaluate, "", 2, "run"),
    (evaluate, "a.png", 2, "a.png"),
    (evaluate, "RUN workrs=1", 2, "'workers'"),
    (evaluate, "RUN --jsn", 2, "--jsn"),
    (evaluate, "RUN model.layers.dense1.units=7", 65, "dense1.weight"),
    (predict, "", 2, "run"),
    (predict, "a.png a.png", 2, "a.png"),
    (predict, "RUN a.png --top 0", 2, "--top=0"),
    (predict, "RUN a.png --invert maybe", 2, "--invert"),
    (predict, "RUN empty", 65, "empty"),
    (export, "RUN", 2, "--onnx"),
    (export, "absent --onnx a", 2, "absent"),
    (export, "RUN --onnx none/a", 74, "none/a"),
    (export, "RUN --torch none/a", 74, "none/a"),
    (export, "RUN --torch a --safetensors ./a", 2, "/a"),
    (report, "absent", 2, "absent"),
    (report, "empty", 2, "empty"),
    (compare, "miss*", 2, "miss*"),
    (compare, "RUN empty", 2, "empty"),
    (compare, "RUN --to 98", 2, "--to 98"),
    (compare, "RUN --sort acuracy", 2, "'accuracy'"),
    (compare, "RUN --csv none/runs.csv", 74, "none/runs.csv"),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a working folder with a run, an empty folder, and a file that is not a picture."""
    folder = tmp_path_factory.mktemp("wrong")
    small = ["data=synthetic", "data.train=64", "data.test=32", "epochs=1", "workers=1", "model=mlp", "backend=numpy"]
    trained(folder / "RUN", *small)
    (folder / "empty").mkdir()
    (folder / "a.png").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.mark.parametrize(
    ("command", "typed", "code", "named"), WRONG, ids=[f"{each[0].__name__} {each[1]}" for each in WRONG]
)
def test_wrong_arguments_of_a_command_give_one_line_an_exit_code_and_no_file(
    command: ModuleType, typed: str, code: int, named: str, here: Path, call: Call
) -> None:
    found = call(command.main, *typed.split())
    assert found.code == code and named in found.error
    assert found.out == "" or (command is compare and code == 74)  # it has already printed its table
    assert sorted(os.listdir(here)) == ["RUN", "a.png", "empty"]
