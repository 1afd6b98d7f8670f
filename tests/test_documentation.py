"""What the documentation says can be done: links lead somewhere, commands compose, programs run.

README.md, conf/README.md and the pages below cupynet/ and outputs/records/ are all read by the same rules: a command is
a line of an indented block, or words between backquotes, that begins with `cupynet`, `python -m`, `mpiexec` or `make`,
or with settings. Its settings are composed as the command itself would, a sweep job by job; whether
such a run comes to its end is for the tests of each command. Words in capitals (RUN) and dots (...) stand for what a
reader has.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from safetensors.numpy import load_file, save_file

import cupynet.__main__
from cupynet.config import composing
from cupynet.config import schema as settings
from cupynet.config.schema import Settings
from cupynet.core.errors import ConfigError
from tests.support.commands import ROOT
from tests.support.documentation import FENCE, PAGES, run_guide
from tests.support.settings import settings_of_command

GUIDES = "cupynet/guides/"


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


# links ---------------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text: str) -> list[str]:
    return [*re.findall(r"\]\(([^)\s]+)\)", prose(text)), *re.findall(r'<img src="([^"]+)"', prose(text))]


def test_every_link_resolves() -> None:
    for page, target in ((page, target) for page, text in PAGES.items() for target in links(text)):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        assert path.resolve().is_relative_to(ROOT), f"{page}: {target} lies outside of the project"
        if anchor:
            assert anchor in anchors(path.read_text("utf-8")), f"{page}: {target}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    found, ahead = set(), ["README.md"]
    while ahead:
        page = ahead.pop()
        if page not in found and page in PAGES:
            found.add(page)
            targets = [target.partition("#")[0] for target in links(PAGES[page]) if "://" not in target]
            ahead += [os.path.relpath(ROOT / Path(page).parent / target, ROOT) for target in targets if target]
    assert found == set(PAGES)


# commands ------------------------------------------------------------------------------------------------------------

STARTS = re.compile(r"^(\S*python -m (cupynet|tests)\b|(\S*/)?mpiexec |make [a-z]|(\S*/)?cupynet [a-z])")
PLACEHOLDER = re.compile(r"\.\.\.|<|^[A-Z_]+$|\*")
FOLDERS = ("resume=", "--config-dir", "hydra/launcher=")


class Command(NamedTuple):
    """One command of a page, and its words."""

    page: str
    name: str  # "train", "make test", "tests.soak"
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.name} {' '.join(self.words)}"


def lines(text: str) -> Iterator[str]:
    """Lines of indented blocks and of inline code, without comments, prompts and continuations."""
    whole = re.sub(r"\\\n\s+", "", prose(text))
    for line in re.findall(r"^    (\S.*)$", whole, re.MULTILINE):
        yield re.sub(r"(^|\s)#.*$| </dev/null( &)?$", "", line).removeprefix("$ ").strip()
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^    .*$", "", whole, flags=re.MULTILINE)):
        yield re.sub(r"\s+", " ", span)


def split(line: str) -> list[str]:
    """The words of a line, as a shell has them; [] where it is none of a shell's."""
    try:
        return shlex.split(line)
    except ValueError:
        return []


def is_setting(word: str) -> bool:
    """Whether a word gives a value to a setting of `cupynet train`: `data.limit=1000`, `+callbacks.stop.loss=0.1`."""
    key, equals, value = word.lstrip("+~").partition("=")
    known = key.split(".")[0] in {each.name for each in fields(Settings)}
    return bool(equals and value and known and re.fullmatch(r"[\w.]+", key) and not re.search(r"\.\.\.|\(", value))


def commands(page: str) -> Iterator[Command]:
    """The commands of a page, and the settings that stand alone."""
    for line in lines(PAGES[page]):
        words = split(line)
        if words and all(map(is_setting, words)):
            yield Command(page, "train", tuple(words))
        elif words and STARTS.match(line) and "..." not in words:
            yield from started(page, words)


def started(page: str, words: list[str]) -> Iterator[Command]:
    """What a line starts: itself, or what mpiexec or make starts."""
    if words[0] == "make":
        target = words[1]
        given = dict(word.split("=", 1) for word in words[2:])
        yield Command(page, f"make {target}", tuple(given))
        if target in ("train", "bench") and "ARGS" in given:
            yield Command(page, target, tuple(shlex.split(given["ARGS"])))
        return
    names = [Path(word).name for word in words]
    if "cupynet" in names:  # `cupynet train`, `python -m cupynet train`, `mpiexec -n 2 cupynet train`
        at = names.index("cupynet")
        yield Command(page, *words[at + 1 : at + 2], tuple(words[at + 2 :]))
    elif "-m" in words:
        at = words.index("-m")
        yield Command(page, words[at + 1].removeprefix("cupynet."), tuple(words[at + 2 :]))


COMMANDS = list({command[1:]: command for page in reversed(PAGES) for command in commands(page)}.values())  # each once


@cache
def hydra_arguments(name: str) -> tuple[str, type[Settings]] | None:
    """The file of conf/ and the schema of a command that Hydra composes, from its call of `config.run`; else None."""
    tree = ast.parse(source(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "config.run":
            primary, schema = node.args[2:4]
            assert isinstance(primary, ast.Constant) and isinstance(schema, ast.Name)
            return primary.value, getattr(settings, schema.id)
    return None


def source(name: str) -> str:
    """The text of what a name starts: a command, or a module of the tests or the guides."""
    module = f"cupynet.{cupynet.__main__.COMMANDS[name][0]}" if name in cupynet.__main__.COMMANDS else name
    path = ROOT / module.replace(".", "/").replace("guides/", "cupynet/guides/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert path.exists(), f"there is no command {name}"
    return path.read_text("utf-8")


Job = tuple[str, type[Settings], tuple[str, ...]]  # the file of conf/, the schema, and the settings of one run


def jobs(words: list[str], name: str, schema: type[Settings]) -> Iterator[Job]:
    """What these settings ask for: of a sweep every job, of an interval that is searched its lower bound."""
    words = [word for word in words if not word.startswith(FOLDERS)]
    parsed = OverridesParser.create().parse_overrides(words)
    for number, each in enumerate(parsed):
        if each.is_interval_sweep():
            words[number] = f"{each.key_or_group}={each.value().start}"
    choices = [
        [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
        if each.is_sweep_override()
        else [each.input_line or ""]
        for each in OverridesParser.create().parse_overrides(words)
    ]
    for job in itertools.product(*choices):
        yield name, schema, job


def conflict(one: Iterable[str], other: Iterable[str]) -> bool:
    """Return True if two lists of overrides set a key differently, or one selects a group that the other changes."""
    first, second = ({word.lstrip("+~").partition("=")[0]: word for word in words} for words in (one, other))
    differ = {key for key in {*first, *second} if first.get(key) != second.get(key)}

    def sets(overrides: dict[str, str], key: str) -> bool:
        return any(f"{each}.".startswith(f"{key}.") for each in overrides)

    return "experiment" in differ or any(sets(first, key) and sets(second, key) for key in differ)


def merged(given: Iterable[Job]) -> list[Job]:
    """Merge jobs whose overrides do not conflict."""
    found: list[Job] = []
    for name, schema, words in dict.fromkeys(given):
        for number, (other, kind, together) in enumerate(found):
            if (other, kind) == (name, schema) and not conflict(words, together):
                found[number] = (name, schema, tuple(dict.fromkeys((*together, *words))))
                break
        else:
            found.append((name, schema, words))
    return found


def compose_jobs(given: Iterable[Job]) -> None:
    """Compose the settings of jobs as the commands do. AssertionError with the words that cannot be given."""
    for name, schema, words in given:
        try:
            settings_of_command(name, schema, *words)
        except (ConfigError, HydraException, OmegaConfBaseException) as error:
            raise AssertionError(f"{schema.__name__} of {name}.yaml: {' '.join(words)}: {error}") from error


def check(command: Command) -> list[Job]:
    """Fail if there is no such command, target, variable or option; return the jobs to compose."""
    name, words = command.name, list(command.words)
    if name.startswith("make "):
        makefile = (ROOT / "Makefile").read_text("utf-8")
        target = name.removeprefix("make ")
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make has no target {target}"
        for variable in words:
            assert re.search(rf"\$[({{]{variable}\b|\$\${variable}\b", makefile), f"make looks at no {variable}"
        return []
    text = source(name)
    if name.startswith(("tests.", "guides.")):
        return []
    options = [word for word in words if word.startswith("-") and word not in ("-m", "--help", "--cfg")]
    words = [word for word in words if word not in ("job", "-m") and not word.startswith("-")]
    described = hydra_arguments(name)
    for option in options:
        assert described and option.startswith("--config-dir") or f'"{option.partition("=")[0]}"' in text, option
    given = [word for word in words if re.match(r"[+~]*[\w./]+=", word) and not PLACEHOLDER.search(word)]
    if described is not None:
        assert len(given) == len(words) or any(map(PLACEHOLDER.search, words)), f"no settings: {words}"
    return list(jobs(given, *(described or ("config", Settings))))


def test_every_command_in_the_pages_parses() -> None:
    compose_jobs(merged(itertools.chain.from_iterable(map(check, COMMANDS))))


def test_commands_are_found_wherever_they_stand() -> None:
    found = {(command.page, command.name) for page in PAGES for command in commands(page)}
    assert {("README.md", "train"), ("README.md", "make train")} <= found
    assert ("cupynet/parallel/README.md", "plan") in found
    assert len(list(commands("README.md"))) > 20


@pytest.mark.parametrize(
    "line",
    [
        *("cupynet train epoch=5", "cupynet trian", "parallel=averages", "make trian", "make test X=1"),
        *("cupynet plan link=10gbs", "mpiexec -n 2 cupynet train parallel.launcher=mpl"),
        *("cupynet train -m workers=1,two", "make train ARGS=batchsize=3"),
    ],
)
def test_an_invalid_command_is_found(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAGES, "made.md", f"Do this:\n\n    {line}   # and see\n\nor `{line}`.\n")
    found = list(commands("made.md"))
    assert len(found) >= 2
    right: Job = ("config", Settings, ("seed=1",))
    with pytest.raises(AssertionError):
        compose_jobs(merged([right, *itertools.chain.from_iterable(map(check, found))]))


# programs ------------------------------------------------------------------------------------------------------------

PROGRAMS = [
    (page, kind, code)
    for page, text in PAGES.items()
    for kind, code in FENCE.findall(text)
    if kind.startswith("python")
]


def test_every_python_block_compiles() -> None:
    for page, _, code in PROGRAMS:
        compile(code, page, "exec")


def made_elsewhere(name: str) -> None:
    """net.safetensors as PyTorch would write it: random weights of the tutorials' LeNet in its layout."""
    shapes = {
        **{"0.weight": (20, 1, 5, 5), "0.bias": (20,), "2.weight": (50, 20, 5, 5), "2.bias": (50,)},
        **{"5.weight": (500, 800), "5.bias": (500,), "7.weight": (10, 500), "7.bias": (10,)},
    }
    rng = np.random.default_rng(1)
    save_file({name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}, name)


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_guide(f"{GUIDES}tutorial.md", tmp_path, monkeypatch)
    assert "Accuracy" in capsys.readouterr().out
    first, second = (model.params.master for model in found["replicas"])
    assert np.array_equal(first, second) and not list(tmp_path.iterdir())


def test_the_example_from_deeplearning4j_runs_and_is_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cupynet.config.experiment import Experiment

    wrapper = run_guide(f"{GUIDES}deeplearning4j.md", tmp_path, monkeypatch)["wrapper"]
    assert "Accuracy" in capsys.readouterr().out
    asked = composing.compose(["experiment=dl4j_parallel_wrapper", "data=synthetic"])
    with Experiment(asked).wrapper() as other:
        for what in (
            lambda w: str(w.model.summary()),
            lambda w: w.placement.workers,
            lambda w: vars(w.synchronizer)["schedule"],
        ):
            assert str(what(wrapper)) == str(what(other))
        for name in ("momentum", "l2", "max_grad_norm", "weight_decay"):
            assert getattr(wrapper.optimizer, name) == getattr(other.optimizer, name)
        assert wrapper.optimizer.learning_rate(0) == other.optimizer.learning_rate(0)


def test_weights_come_from_pytorch_and_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made_elsewhere("net.safetensors")
    run_guide(f"{GUIDES}pytorch.md", tmp_path, monkeypatch)
    there, back = load_file("net.safetensors"), load_file("back.safetensors")
    names = {"0": "conv1", "2": "conv2", "5": "dense1", "7": "output"}
    assert {f"{names[name[0]]}{name[1:]}" for name in there} == set(back)
    for name, array in there.items():
        assert np.array_equal(back[f"{names[name[0]]}{name[1:]}"], array), name


def test_the_readme_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_guide("README.md", tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert "431,080" in printed
