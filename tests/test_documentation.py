"""The documentation works: links have targets, settings in commands compose, programs run.

A command is a line of an indented block, or inline code, that starts with `cupynet` or `make` or consists of settings.
Words in capitals (RUN) and dots (...) stand for the reader's own values.
"""

import ast
import itertools
import os
import re
import shlex
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from safetensors.numpy import load_file, save_file

import cupynet.__main__
from cupynet.config import composing
from cupynet.config.experiment import Experiment
from cupynet.config.schema import BenchSettings, PlanSettings, RateSettings, Settings, TuneSettings
from cupynet.core.errors import ConfigError
from tests.pages.api import anchor as anchor_of
from tests.support.commands import ROOT
from tests.support.settings import settings_of_command

GUIDES = "cupynet/guides/"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in sorted(
        [
            *(ROOT / "README.md", ROOT / "conf" / "README.md", ROOT / ".github" / "CONTRIBUTING.md"),
            *(ROOT / "cupynet").rglob("*.md"),
            *(ROOT / "outputs" / "records").glob("*.md"),
        ]
    )
}
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUICK = {
    "MNIST()": "Synthetic(train=200, test=50)",
    "import MNIST": "import Synthetic",
    "Synthetic()": "Synthetic(train=200, test=50)",
    "Synthetic(train=2000, test=500)": "Synthetic(train=200, test=50)",
    "epochs=10": "epochs=1",
    "epochs=5": "epochs=1",
    '"numba", seed=123, dtype="double"': '"numpy", seed=123, dtype="double"',  # no test needs these kernels in double
}


def prose(text: str) -> str:
    return FENCE.sub("", text)


# links ---------------------------------------------------------------------------------------------------------------


def links(page: str) -> Iterator[tuple[Path, str]]:
    """Yield (file, anchor) for each link on a page to a file in the repository."""
    for target in re.findall(r'(?:\]\(|<img src=")([^)"\s]+)', prose(PAGES[page])):
        if not re.match(r"https?:", target):
            name, _, anchor = target.partition("#")
            yield (ROOT / page).parent / name if name else ROOT / page, anchor


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page: str) -> None:
    for path, anchor in links(page):
        assert path.exists() and path.resolve().is_relative_to(ROOT), path
        headings = re.findall(r"^#{1,6} (.+)$", prose(path.read_text("utf-8")), re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(anchor_of, headings), f"{path}#{anchor}"


def test_every_test_that_a_page_names_exists() -> None:
    for file, name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", "\n".join(PAGES.values())):
        assert f"def {name}(" in (ROOT / file).read_text("utf-8") if name else (ROOT / file).is_file(), (file, name)


def test_every_page_can_be_reached_from_the_readme() -> None:
    found, ahead = set(), ["README.md"]
    while ahead:
        page = ahead.pop()
        if page not in found and page in PAGES:
            found.add(page)
            ahead += [os.path.relpath(path, ROOT) for path, _ in links(page)]
    assert found == set(PAGES)


# commands ------------------------------------------------------------------------------------------------------------

START = re.compile(r"(?:\S*mpiexec .*?)?(?:\S*python -m )?(?:\S*/)?cupynet (?P<name>[a-z_]+)(?= |$)(?P<rest>.*)")
MAKE = re.compile(r"make (?P<name>[a-z-]+)(?P<rest>.*)")
SETTING = re.compile(r"(?:\+\+|\+|~)?(?P<group>\w+)[\w./]*=.+")
PLACEHOLDER = re.compile(r"\.\.\.|<|^[A-Z_]+$|\*")
NOT_COMPOSED = ("-m", "--help", "--config-dir", "resume=", "hydra/", "hydra.")  # Hydra's, or need existing folders
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
SCHEMAS: dict[str, tuple[str, type[Settings]]] = {
    "train": ("config", Settings),
    "find_rate": ("find_rate", RateSettings),
    "tune": ("tune", TuneSettings),
    "plan": ("plan", PlanSettings),
    "bench": ("bench", BenchSettings),
}


class Command(NamedTuple):
    """A command on a page: its name, such as `train` or `make test`, and its arguments."""

    name: str
    words: tuple[str, ...]


def lines(text: str) -> Iterator[str]:
    """Yield lines of indented blocks and inline code, without comments and prompts. Continued lines are joined."""
    whole = re.sub(r"\\\n\s+", "", prose(text))
    for line in re.findall(r"^    (\S.*)$", whole, re.MULTILINE):
        yield re.sub(r"(^|\s)#.*$| </dev/null( &)?$", "", line).removeprefix("$ ").strip()
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^    .*$", "", whole, flags=re.MULTILINE)):
        yield re.sub(r"\s+", " ", span)


def commands(text: str) -> Iterator[Command]:
    for line in lines(text):
        make, start = MAKE.fullmatch(line), START.fullmatch(line)
        if make is not None:
            yield Command(f"make {make['name']}", split(make["rest"]))
            for word in split(make["rest"]):
                if make["name"] in SCHEMAS and word.startswith("ARGS="):
                    yield Command(make["name"], split(word.removeprefix("ARGS=")))
        elif start is not None and "..." not in line:
            yield Command(start["name"], split(start["rest"]))
        elif split(line) and all(map(is_setting, split(line))):
            yield Command("train", split(line))


def split(line: str) -> tuple[str, ...]:
    """Return the words of a line as a shell splits them. Return () for text with an apostrophe."""
    try:
        return tuple(shlex.split(line))
    except ValueError:
        return ()


def is_setting(word: str) -> bool:
    found = SETTING.fullmatch(word)
    return found is not None and found["group"] in Settings.__dataclass_fields__ and not re.search(r"\.\.\.|\(", word)


@cache  # several pages show the same commands
def check(command: Command) -> None:
    """Fail if there is no such command, target, variable or option, or if its settings do not compose."""
    if command.name.startswith("make "):
        assert re.search(rf"^{command.name.removeprefix('make ')}:", MAKEFILE, re.MULTILINE), command
        assert all(f"$({word.partition('=')[0]}" in MAKEFILE for word in command.words), command
        return
    module = cupynet.__main__.COMMANDS[command.name][0]
    source = (ROOT / "cupynet" / f"{module.replace('.', '/')}.py").read_text("utf-8")
    words = [word for word in command.words if not word.startswith(NOT_COMPOSED) and not PLACEHOLDER.search(word)]
    settings = [word for word in words if SETTING.fullmatch(word)]
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert all(f'"{option}"' in source for option in options), command
    assert command.name not in SCHEMAS or settings == words, command
    own_files = any(word.startswith("--config-dir") for word in command.words)
    for job in () if own_files else jobs(settings):
        settings_of_command(*SCHEMAS.get(command.name, SCHEMAS["train"]), *job)


def jobs(words: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the settings of each job of a sweep. A search interval is replaced by its lower bound."""
    choices = []
    words = [re.sub(r"interval\((.+?),.+\)", r"\1", word) for word in words]
    for each, word in zip(OverridesParser.create().parse_overrides(words), words, strict=True):
        values = each.sweep_string_iterator() if each.is_discrete_sweep() else ()
        choices.append([f"{each.get_key_element()}={value}" for value in values] or [word])
    return itertools.product(*choices)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_on_a_page_exists_and_its_settings_compose(page: str) -> None:
    for command in dict.fromkeys(commands(PAGES[page])):
        check(command)


def test_the_yaml_files_on_the_pages_compose(tmp_path: Path) -> None:
    for page, file in (("settings", "experiment/small.yaml"), ("models", "model/tiny.yaml")):
        (content,) = re.findall(r"```yaml\n(.*?)```", PAGES[f"cupynet/guides/{page}.md"], re.DOTALL)
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(content)
    settings = composing.compose(["experiment=small", "model=tiny"], tmp_path)
    assert settings.epochs == 3 and list(settings.model["layers"]) == ["conv1", "pool1", "output"]


def test_commands_are_found_in_blocks_and_between_backquotes() -> None:
    page = (
        "Do:\n\n    $ mpiexec -n 2 cupynet train epochs=1 \\\n        workers=2  # now\n\nor `make train ARGS=seed=3`."
    )
    train = Command("train", ("epochs=1", "workers=2"))
    assert [*commands(page)] == [train, Command("make train", ("ARGS=seed=3",)), Command("train", ("seed=3",))]
    assert len([*commands(PAGES["README.md"])]) >= 10


@pytest.mark.parametrize(
    "line",
    [
        "cupynet train epoch=5",
        "cupynet train +epochs=5",
        "cupynet train batch_size=many",
        "cupynet train parallel.averagingfrequency=3",
        "cupynet trian",
        "parallel=averages",
        "make trian",
        "make test X=1",
        "make train ARGS=batchsize=3",
        "cupynet plan link=10gbs",
        "cupynet train -m workers=1,two",
        "cupynet evaluate RUN --jason",
    ],
)
def test_a_command_that_does_not_exist_or_compose_is_found(line: str) -> None:
    with pytest.raises((AssertionError, KeyError, ConfigError, HydraException, OmegaConfBaseException)):
        for command in commands(f"`{line}`"):
            check(command)


# programs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_python_program_on_a_page_compiles(page: str) -> None:
    for kind, code in FENCE.findall(PAGES[page]):
        if kind.startswith("python"):
            compile(code, page, "exec")


PROGRAM = re.compile(r" +(?:[\w., ]+ = [\w.]+\(|[\w.]+\(|(?:with|from|import|class|def) )")


def test_programs_in_docstrings_compile() -> None:
    blocks = [
        block
        for path in (ROOT / "cupynet").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for block in (ast.get_docstring(node) or "").split("\n\n")
        if PROGRAM.match(block) and block.isascii()
    ]
    assert len(blocks) > 8
    for block in blocks:
        compile(textwrap.dedent(block), block, "exec")


CHECKED = ("averaging_from_scratch.md", "fine_tuning.md", "from_deeplearning4j.md", "from_pytorch.md")  # tested below
PROGRAMS = [page for page, text in PAGES.items() if re.search(r"^```python$", text, re.MULTILINE)]


def run_guide(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a page's programs, reduced in size and without those for PyTorch, in one module; return its variables."""
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {"__name__": "guide"}
    for kind, code in FENCE.findall(PAGES[page]):
        if kind == "python":
            for long, short in QUICK.items():
                code = code.replace(long, short)
            exec(compile(code, page, "exec"), found)
    return found


@pytest.mark.parametrize("page", [page for page in PROGRAMS if not page.endswith(CHECKED)])
def test_the_programs_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_guide(page, tmp_path, monkeypatch)


def test_averaging_from_scratch_ends_with_equal_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_guide(f"{GUIDES}averaging_from_scratch.md", tmp_path, monkeypatch)
    first, second = (model.params.master for model in found["replicas"])
    assert np.array_equal(first, second) and not list(tmp_path.iterdir())


def test_the_guide_to_fine_tuning_runs_and_loads_all_weights_except_the_output_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_guide(f"{GUIDES}fine_tuning.md", tmp_path, monkeypatch)
    assert found["unmatched"].missing == ["output.bias", "output.weight"] == found["unmatched"].unexpected


def test_the_example_from_deeplearning4j_has_the_settings_of_experiment_dl4j_parallel_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = run_guide(f"{GUIDES}from_deeplearning4j.md", tmp_path, monkeypatch)["wrapper"]
    experiment = Experiment(composing.compose(["experiment=dl4j_parallel_wrapper", "data=synthetic"]))
    with experiment.wrapper(experiment.own_callbacks()) as wrapper:
        assert str(guide.model.summary()) == str(wrapper.model.summary())
        assert guide.placement.workers == wrapper.placement.workers
        assert str(vars(guide.synchronizer)["schedule"]) == str(vars(wrapper.synchronizer)["schedule"])
        assert guide.optimizer.learning_rate(0) == wrapper.optimizer.learning_rate(0)
        for name in ("momentum", "l2", "max_grad_norm", "weight_decay"):
            assert getattr(guide.optimizer, name) == getattr(wrapper.optimizer, name)


def test_the_guide_from_pytorch_imports_weights_and_exports_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file net.safetensors has the same structure as in the program for PyTorch."""
    rng = np.random.default_rng(1)
    shapes = {"0": (20, 1, 5, 5), "2": (50, 20, 5, 5), "5": (500, 800), "7": (10, 500)}
    theirs = {f"{layer}.weight": rng.standard_normal(shape).astype(np.float32) for layer, shape in shapes.items()}
    theirs |= {f"{layer}.bias": rng.standard_normal(shape[0]).astype(np.float32) for layer, shape in shapes.items()}
    save_file(theirs, tmp_path / "net.safetensors")
    run_guide(f"{GUIDES}from_pytorch.md", tmp_path, monkeypatch)
    back = load_file(tmp_path / "back.safetensors")
    names = {"0": "conv1", "2": "conv2", "5": "dense1", "7": "output"}
    assert len(back) == len(theirs)
    for name, array in theirs.items():
        assert np.array_equal(back[f"{names[name[0]]}{name[1:]}"], array), name
