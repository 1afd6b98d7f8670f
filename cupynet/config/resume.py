"""Find the run that `resume=...` names, and compare settings with those of the run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cupynet.core.checks import written
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.lock import at_work

STEP = re.compile(r"step-\d+")
MOST_LOOKED_AT = 20  # runs, for an offer at the beginning of another
MOST_LEVELS = 4  # below outputs/: sweeps/<date>/<time>/<job>
LATEST = Path("outputs", "latest")  # leads to the newest run, or sweep
SUMMARY, TRIAL = "summary.json", "FAST_DEV_RUN.txt"  # of a run that is finished, and of one that was but a trial
SWEEP, STUDY = "multirun.yaml", "study.db"  # in the folder of a sweep, and of a search
MAY_DIFFER = ("epochs", "workers", "devices", "backend", "dtype", "callbacks", "resume", "trusted_modules", "profile")


def asked(arguments: Sequence[str]) -> str | None:
    """The value of `resume=` on a command line: a path or `latest`; None if there is nothing to resume."""
    found = [value for name, _, value in map(_parts, arguments) if name == "resume"]
    return None if not found or found[-1] == "null" else unquoted(found[-1])


def find(value: str, arguments: Sequence[str]) -> Path | None:
    """The folder of the run to resume, or of one of its checkpoints; None if `latest` finds none.

    `latest` is the newest unfinished run under outputs/ that has a checkpoint and is not running. If the command line
    sets hydra.run.dir, it is the run in that folder.

    Raises:
        ConfigError: the path is neither.
        DataError: the run's files are links.
    """
    if value == "latest":
        own = [given for name, _, given in map(_parts, arguments) if name == "hydra.run.dir"]
        if own:
            run = Path(unquoted(own[-1]))
            refuse_links(run)
            return run if _checkpoints(run) else None  # a finished run too: it must not be overwritten
        run_there = _unfinished()
        if run_there is not None:
            refuse_links(run_there)
        return run_there
    if not value or not os.path.isfile(run_of(Path(value)) / ".hydra" / "config.yaml"):  # accepts impossible names
        raise ConfigError(f"resume={value!r}: is neither the folder of a run nor one of its checkpoints")
    path = _where_it_leads(Path(value))
    refuse_links(run_of(path))
    return path


def _where_it_leads(path: Path) -> Path:
    """Resolve a path whose run is a link: the link may lead to another run later."""
    if not run_of(path).is_symlink():
        return path
    real = path.resolve()
    return real.relative_to(Path.cwd()) if real.is_relative_to(Path.cwd()) else real


def mark_latest(folder: Path) -> None:
    """Link outputs/latest to a run inside outputs/, or to its sweep or search. Do nothing if that is impossible."""
    link, new = LATEST, LATEST.with_name(f".latest-{os.getpid()}-{threading.get_ident()}")
    try:
        inside = _whole(folder.resolve()).relative_to(link.parent.resolve())
        if not inside.parts or (link.exists() and not link.is_symlink()):
            return  # not a link of ours
        os.symlink(inside, new, target_is_directory=True)
        try:
            os.replace(new, link)
        except OSError:
            new.unlink()
    except (OSError, ValueError, NotImplementedError):  # outside outputs/, or links are not supported or not permitted
        return


def _whole(run: Path) -> Path:
    """The folder of the sweep or search that a run belongs to; else that of the run."""
    if (run.parent / SWEEP).is_file():
        return run.parent
    return run.parent.parent if (run.parent.parent / STUDY).is_file() else run


def ended(arguments: Sequence[str]) -> Path | None:
    """The folder in hydra.run.dir if it holds a finished run without a checkpoint; else None."""
    own = [given for name, _, given in map(_parts, arguments) if name == "hydra.run.dir"]
    run = Path(unquoted(own[-1])) if own else None
    if run is None or not (run / SUMMARY).is_file() or (run / TRIAL).is_file() or _goes_on(run):
        return None
    return run


def nothing_left(arguments: Sequence[str]) -> str:
    """The message for `latest` if there is no run to resume."""
    elsewhere = any(name == "hydra.run.dir" for name, _, _ in map(_parts, arguments))
    newest = None if elsewhere else next(iter(_newest_first(runs_below(LATEST.parent))), None)
    done = "" if newest is None or _goes_on(newest) else f" ({newest} has come to its end)"
    return f"there is nothing to go on with: a new run begins{done}"


def offer(folder: Path) -> str:
    """A line about the run that `latest` would resume; empty if there is none.

    Args:
        folder: of the new run; empty for a job of a sweep.
    """
    run = None if (folder.parent / SWEEP).is_file() else _unfinished(few=True)
    return "" if run is None else f"the run in {run} was not finished: resume=latest goes on with it"


def refuse_links(folder: Path) -> None:
    """Refuse the folder of a run or search that contains links: resuming would write to their targets. DataError."""
    try:
        inside = sorted(folder.iterdir()) if os.path.isdir(folder) else []
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror})") from error
    for path in inside:
        if path.is_symlink():
            raise DataError(f"{path}: is a link, and going on would write where it leads: put a plain file there")


def run_of(path: Path) -> Path:
    """The run's folder, given a path to it, to its checkpoints or to one of them."""
    if STEP.fullmatch(path.name):
        path = path.parent
    return path.parent if path.name == "checkpoints" else path


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that a path names, or the run's folder of checkpoints."""
    return path if STEP.fullmatch(path.name) else run_of(path) / "checkpoints"


def refuse_other(given: Mapping[str, Any], stored: Mapping[str, Any], path: Path) -> None:
    """Refuse settings, by dotted keys, that differ from those of the run and must not. ConfigError."""
    for key in [*stored, *(key for key in given if key not in stored)]:
        now, then = given.get(key, "missing"), stored.get(key, "missing")
        if now != then and key.partition(".")[0] not in MAY_DIFFER:
            only = ", ".join(MAY_DIFFER[:6])
            raise ConfigError(
                f"{key}={written(now)}: the run in {run_of(path)} was made with {written(then)}: leave it out, or "
                f"begin a new run; to go on only {only} may differ"
            )


def name_of(override: str) -> str:
    """The key of an override."""
    return override.lstrip("+~").partition("=")[0]


def _parts(argument: str) -> tuple[str, str, str]:
    name, equals, value = argument.partition("=")
    return name.lstrip("+~"), equals, value


def unquoted(value: str) -> str:
    """A path that may be in quotes, the inverse of `quoted`."""
    if len(value) < 2 or value[0] not in "'\"" or value[-1] != value[0] or os.path.exists(value):
        return value
    return re.sub(rf"(\\+)({value[0]}|$)", lambda found: found[1][: len(found[1]) // 2] + found[2], value[1:-1])


def quoted(path: Path) -> str:
    """A path as a quoted value of a setting, in which `${` is not an interpolation."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(path))
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", text) + "'"


def refuse_taken(folder: Path) -> None:
    """Refuse a folder for a new run or sweep that holds the results of another, unless it was a trial. ConfigError."""
    lost, way_out, checkpoints = "", "", bool(_checkpoints(folder))
    if (folder / SWEEP).is_file():
        lost = "a sweep"
    elif (folder / TRIAL).is_file():
        return
    elif checkpoints and _goes_on(folder):
        lost, way_out = "a run that was not finished", f"{shlex.quote(f'resume={folder}')} goes on with it"
    elif (folder / SUMMARY).is_file():
        lost = "a run that was stopped" if _goes_on(folder) else "a run that is finished"
        way_out = f"{shlex.quote(f'resume={folder}')} with more epochs=... trains it further" * checkpoints
    if lost:
        raise ConfigError(
            f"{folder}: holds {lost}, and beginning there would remove it: {way_out and f'{way_out}; or '}name another "
            "folder, or remove this one"
        )


def runs_below(folder: Path) -> Iterator[Path]:
    """Yield the runs below a folder that may have checkpoints, up to four levels down, jobs of sweeps included.

    Links are not followed. Trials of a search are left out, because the search resumes them.
    """
    for inside, folders, files in os.walk(folder):
        here = Path(inside)
        if "checkpoints" in folders and here != folder:
            yield here
            folders.clear()  # a run holds no others
        elif STUDY in files or len(here.relative_to(folder).parts) == MOST_LEVELS:
            folders.clear()
        elif here == LATEST.parent:
            folders[:] = [name for name in folders if name != LATEST.name]


def _unfinished(*, few: bool = False) -> Path | None:
    """The newest unfinished run under outputs/ that has a checkpoint.

    Args:
        few: look only at the newest runs, which is quick.
    """
    found = list(runs_below(LATEST.parent))
    if few:
        found = sorted(found, key=lambda run: _touched(run / "checkpoints"), reverse=True)[:MOST_LOOKED_AT]
    return next((run for run in _newest_first(found) if _left_off(run) and not at_work(run)), None)


def _newest_first(runs: Iterable[Path]) -> list[Path]:
    """The runs that have a checkpoint, newest first."""
    return sorted((run for run in runs if _checkpoints(run)), key=_written, reverse=True)


def _left_off(run: Path) -> bool:
    """Return True if `latest` may resume a run. A diverged job of a sweep counts as finished."""
    job = (run.parent / SWEEP).is_file()
    return _goes_on(run, ("signal", "request")) if job else _goes_on(run)


def _touched(path: Path) -> float:
    """The time of the last change in a folder; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _checkpoints(run: Path) -> list[Path]:
    with contextlib.suppress(OSError):  # they may be removed meanwhile
        there = list((run / "checkpoints").glob("step-*"))
        return [entry for entry in there if STEP.match(entry.name) and ".tmp" not in entry.name]
    return []


def _written(run: Path) -> float:
    """When the newest checkpoint of a run was written."""
    return max(map(_touched, _checkpoints(run)), default=0.0)


def _goes_on(run: Path, ends: Sequence[str] = ("signal", "request", "diverged")) -> bool:
    """Return True if a run is unfinished, or has been resumed since its summary was written.

    Args:
        ends: reasons to stop that leave a run unfinished.
    """
    try:
        summary = json.loads((run / SUMMARY).read_bytes())
        reason, iterations = summary.get("stop_reason"), summary.get("iterations")
    except (OSError, ValueError, AttributeError, RecursionError):
        return True  # no summary: it was killed
    newest = max((int(found[0]) for each in _checkpoints(run) if (found := re.findall(r"\d+", each.name))), default=0)
    return reason in ends or (isinstance(iterations, int) and newest > iterations)
