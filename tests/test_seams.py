"""The seams of the house, read from the sources: no import cycles, each decision in one place, typed commands."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import MODULES, ROOT, SOURCES, Source, called, imported

# From the lowest room to the highest; a file may import what stands before its own room, or its own room.
ORDER = (
    "errors",
    "checks",
    "mpiexec",
    "files",
    "lock",
    "runs",
    "backend",
    "nn",
    "optim",
    "data",
    "parallel",
    "training",
)


def edges(sources: Iterable[Source]) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, for type checkers alone too."""
    return {s.module: {name for name, _ in imported(s) if name in MODULES and name != s.module} for s in sources}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected groups of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_no_circle_of_files() -> None:
    assert circles(edges(SOURCES)) == []


def test_a_circle_is_seen() -> None:
    text = "if TYPE_CHECKING:\n    from cupynet.backend.select import create_backend\n"
    graph = edges(SOURCES) | edges([Source("backend/policy.py", text)])
    assert any({"cupynet.backend.policy", "cupynet.backend.select"} <= set(group) for group in circles(graph))


def upward(source: Source) -> list[str]:
    """What a file imports from a room above its own."""
    if source.room not in ORDER:
        return []
    above = ORDER[ORDER.index(source.room) + 1 :]
    return [name for name, _ in imported(source) if (name.split(".") + [""])[1] in above]


def test_imports_lead_down() -> None:
    assert {s.path: upward(s) for s in SOURCES if upward(s)} == {}


def test_an_import_that_leads_up_is_seen() -> None:
    text = "if TYPE_CHECKING:\n    from cupynet.training.trainer import Trainer\n"
    assert upward(Source("parallel/x.py", text)) == ["cupynet.training.trainer"]


# What is decided once: the call that decides it, and the only file that makes it.
DECIDED = {
    "device_count": "parallel/placement.py",  # which devices there are to share
    "threads_per_worker": "training/wrapper.py",  # BLAS threads
    "ParameterAveraging": "training/wrapper.py",  # how the replicas are kept together, where nothing else is said
    "scale_factor": "training/wrapper.py",  # the learning rate as workers grow
    "ThreadLauncher": "training/wrapper.py",  # how workers are started
    "MpiLauncher": "training/wrapper.py",
    "Trainer": "training/wrapper.py",  # what each of them gets: its share of the prefetch buffer, callbacks, reports
    "Replica": "training/recorded.py",  # whether a GPU records its steps
    "replica_of": "training/wrapper.py",
    "Stage": "training/wrapper.py",  # (or a stage of one)
    "cut": "training/wrapper.py",  # which layers belong to which stage (the forecast cuts measured steps)
    "one_forward_one_backward": "training/stage.py",  # in which order a stage works
    "ParallelWrapper": "experiment.py",
    "ShardedLoader": "data/loader.py",  # who reads what, where each worker has its own part of the data
}
DEFINED = {
    "device_count": {"backend/cuda/devices.py", "backend/select.py"},
    "Replica": {"training/replica.py"},
    "cut": {"parallel/forecast.py"},
    "ParallelWrapper": {"training/rate_test.py"},  # its own, of whatever arguments it was given
}


@cache
def calls(source: Source) -> set[str]:
    """The last names of all that a file calls."""
    return {called(node) for node in ast.walk(source.tree) if isinstance(node, ast.Call)}


@pytest.mark.parametrize("name", DECIDED)
def test_it_is_decided_in_one_place(name: str) -> None:
    places = {source.path for source in SOURCES if name in calls(source)} - DEFINED.get(name, set())
    assert places == {DECIDED[name]}


def test_placement_is_asked_for() -> None:
    """By the class that trains, and by who must refuse a wrong one before that is made."""
    places = {s.path for s in SOURCES if "Placement.of(" in s.text}
    assert places == {"training/wrapper.py", "experiment.py"}


def test_the_prefetch_buffer_is_shared_out_in_one_place() -> None:
    shared = re.compile(r"prefetch\w*[^\n]*//|//[^\n]*prefetch")
    assert {s.path for s in SOURCES if shared.search(s.text)} == {"training/wrapper.py"}
    assert shared.search("mine = -(-prefetch_buffer // workers)")


def test_rounds_are_counted_by_who_deals_them_out() -> None:
    """The trainer asks: it is right for shards too, which a division by the workers is not."""
    counted = re.compile(r"\.batches\b|\bbatch_size\b *[*/]|[*/] *(?:\w+\.)*batch_size\b")
    (trainer,) = (s.text for s in SOURCES if s.path == "training/trainer.py")
    assert counted.search(trainer) is None
    assert counted.search("-(-loader.batches // workers)") and counted.search("number * loader.batch_size")


def test_blas_threads_are_limited_in_one_way() -> None:
    """For the workers by the wrapper; who measures operations on one core holds the rest still."""
    assert {s.path for s in SOURCES if "limited" in calls(s)} == {"training/wrapper.py", "measure.py"}
    assert {s.path for s in SOURCES if "threadpool_limits" in calls(s)} == {"backend/blas.py"}


def test_a_second_place_would_be_seen() -> None:
    assert "threads_per_worker" in calls(Source("x.py", "from a import b\nn = b.threads_per_worker('numba', 2)"))


# Types ----------------------------------------------------------------------------------------------------------------

PLANTED = {  # file -> (what is there, what a slip of the pen would make of it)
    "train.py": ("wrapper.trainer.evaluation", "wrapper.trainer.evaluatoin"),
    "evaluate.py": ("wrapper.model.load_weights", "wrapper.model.load_wieghts"),
    "bench.py": ("experiment.placement.workers", "experiment.placement.wrokers"),
    "measure.py": ("wrapper.trainer.clock.images_per_s", "wrapper.trainer.clock.images_pre_s"),
    "plan.py": ("each.images_per_s", "each.images_pre_s"),
    "doctor/surroundings.py": ("found.settings.batch_size", "found.settings.bacth_size"),
    "shard.py": ("written.counts", "written.cuonts"),
    "experiment.py": ("settings.parallel.synchronizer", "settings.parallel.sychronizer"),
}


def test_the_type_checker_finds_a_misspelt_attribute_in_each_command(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "cupynet", tmp_path / "cupynet", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, (right, wrong) in PLANTED.items():
        path = tmp_path / "cupynet" / name
        text = path.read_text("utf-8")
        assert right in text, f"{name} has no {right} any more: plant another slip"
        path.write_text(text.replace(right, wrong, 1), "utf-8")
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    for name, (_, wrong) in PLANTED.items():
        attribute = wrong.rpartition(".")[2]
        assert f"cupynet/{name}:" in done.stdout and f'has no attribute "{attribute}"' in done.stdout, done.stdout
