"""The description of the machine that produced a result."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cupynet.backend import available_cores, memory
from cupynet.backend.environment import commit


def files(monkeypatch: pytest.MonkeyPatch, contents: dict[str, str]) -> None:
    """Simulate a machine on which only these files exist under /sys and /proc."""

    def read_text(path: Path, *arguments: Any) -> str:
        if str(path) not in contents:
            raise FileNotFoundError(str(path))
        return contents[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000\n", 6), ("150000 100000\n", 2), ("20000 100000\n", 1), ("900000 100000\n", 6), ("nonsense", 6)],
)
def test_cores_are_limited_by_affinity_and_cpu_quota(quota: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    files(monkeypatch, {"/sys/fs/cgroup/cpu.max": quota})
    assert available_cores() == cores


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({}, 4096000),
        ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/memory.max": "max\n"}, 4096000),
        ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/memory.max": "5000\n"}, 5000),
        ({"/proc/self/cgroup": "nonsense\n"}, 4096000),
    ],
)
def test_memory_is_the_lowest_cgroup_limit_that_applies(
    contents: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.get)
    files(monkeypatch, contents)
    found = memory()
    assert found is not None and found[0] == expected


def git(tree: Path, *arguments: str) -> str:
    own = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *own, "-C", tree, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "CUPYNET_COMMIT"):
        monkeypatch.delenv(name, raising=False)
    made = tmp_path / "tree"
    for name in ("cupynet/nn/conv.py", "conf/config.yaml", "README.md"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("one\n")
    git(tmp_path, "init", "-q", str(made))
    assert commit(made) is None, "nothing has been committed yet"
    git(made, "add", ".")
    git(made, "commit", "-q", "-m", "all")
    return made


@pytest.mark.parametrize("changed", ["cupynet/nn/conv.py", "conf/config.yaml"])
def test_the_commit_of_a_changed_source_tree_is_marked_dirty(tree: Path, changed: str) -> None:
    head = git(tree, "rev-parse", "HEAD")
    (tree / "README.md").write_text("two\n")
    (tree / "cupynet" / "new.py").touch()
    assert commit(tree) == head, "no result follows from these"
    (tree / changed).write_text("two\n")
    assert commit(tree) == f"{head}-dirty"
    (tree / changed).unlink()
    assert commit(tree) == f"{head}-dirty"


def test_a_package_inside_another_repository_has_no_commit(tree: Path) -> None:
    assert commit(tree / "cupynet") is None


@pytest.mark.parametrize(("variable", "found"), [("5b0f524", "5b0f524"), ("HEAD", None), ("", None)])
def test_a_commit_in_the_environment_takes_precedence(
    variable: str, found: str | None, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYNET_COMMIT", variable)
    assert commit(tmp_path / "copy") == found
    assert commit(tree) == (found or git(tree, "rev-parse", "HEAD"))


@pytest.mark.parametrize("git_says", ["exit 128", "echo rubbish", None])
def test_a_commit_is_ignored_if_git_fails(
    git_says: str | None, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if git_says is not None:
        (tmp_path / "git").write_text(f"#!/bin/sh\n{git_says}\n")
        (tmp_path / "git").chmod(0o755)
    assert commit(tree) is None
