"""Find the run to resume, and reject changes to its settings."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cupynet.config.overrides import last_value, name_of, parseable
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.lock import at_work
from cupynet.core.terminal import near
from cupynet.core.wording import listed, written
from cupynet.runs.layout import (
    CHECKPOINTS,
    SETTINGS,
    STEP,
    STUDY,
    SUMMARY,
    SWEEP,
    checkpoints,
    is_outdated,
    runs_inside,
)

LATEST = Path("outputs", "latest")  # link to the newest run or sweep
OF_LATEST = re.compile(r"[^=,(' \"]*outputs/latest(?![^/,)' \"])")  # a path that begins with the link
# links that W&B creates and never opens again
OF_WANDB = re.compile(r"(^|/)wandb/(offline-)?run-[^/]+/(files|logs)/")
# settings that may change on resume: top-level ones, others that messages omit, and nested ones
MAY_DIFFER = ("epochs", "workers", "devices", "backend", "dtype", "callbacks", "memory", "accumulation_steps")
UNLISTED = ("profile", "resume", "trusted_modules")
NESTED_KEYS = ("parallel.timeout_s", "parallel.launcher", "parallel.prefetch_buffer")
MAY_MOVE = ("data.folder", "data.file")  # to the same data in another place


def asked(arguments: Sequence[str]) -> str | None:
    """Return the value of `resume=` on a command line, which is a path or `latest`, or None if there is none."""
    found = last_value(arguments, "resume")
    return None if found == "null" else found


def find(value: str, arguments: Sequence[str]) -> Path | None:
    """Return the folder of the run or checkpoint to resume; None if `latest` finds no run.

    `latest` is the newest unfinished run under outputs/ that has a checkpoint and is not running. If the command line
    sets hydra.run.dir, it is the run in that folder. Raise ConfigError if the run cannot be resumed.
    """
    if value == "latest":
        own = last_value(arguments, "hydra.run.dir")
        path = _unfinished() if own is None else Path(own)
        if path is None or not checkpoints(path / CHECKPOINTS):
            return None
    else:
        path = Path(value)
        if not value or not os.path.isfile(run_of(path) / SETTINGS):  # isfile returns False for invalid names
            missing = "is neither a run folder nor a checkpoint"
            raise ConfigError((value and runs_inside(path)) or missing, "resume", repr(value))
        if (path / STUDY).is_file():
            hint = f"cupynet tune {shlex.quote(f'resume={value}')}"
            raise ConfigError(f"is a search. Continue it with: {hint}", "resume", repr(value))
        if "hydra.run.dir" in map(name_of, arguments):
            reason = f"conflicts with resume={value}, which continues {run_of(path)}. Remove it"
            raise ConfigError(reason, "hydra.run.dir", repr(last_value(arguments, "hydra.run.dir")))
        if run_of(path).is_symlink():  # the link may change later
            path = Path(near(path.resolve()))
    require_plain_files(run_of(path))
    return path


def mark_latest(folder: Path) -> None:
    """Link outputs/latest to a run inside outputs/, or to the sweep or search that contains it, if possible."""
    with contextlib.suppress(OSError, ValueError):  # the run is outside outputs/, or links are not supported
        outputs, above = LATEST.parent.resolve(), _above(folder, SWEEP, STUDY)
        inside = (folder if above in (None, outputs) else above).resolve().relative_to(outputs)
        if inside.parts and (LATEST.is_symlink() or not LATEST.exists()):
            LATEST.unlink(missing_ok=True)
            LATEST.symlink_to(inside, target_is_directory=True)


def without_latest(arguments: Sequence[str]) -> list[str]:
    """Replace the link in `weights=` by its target, because the first job of a sweep or search changes the link.

    The link stays if the target contains characters with a meaning for Hydra.
    """

    def target(found: re.Match[str]) -> str:
        path = near(Path(found[0]).resolve())
        return path if parseable(path) == path else found[0]

    return [OF_LATEST.sub(target, each) if name_of(each) == "weights" else each for each in arguments]


def _above(run: Path, *names: str) -> Path | None:
    """Return the nearest parent folder of a run that contains one of these files, resolved, or None.

    Searches all parents below outputs/, or below the current folder, because hydra.sweep.subdir may contain slashes.
    """
    parent, *others = run.resolve().parents
    outputs = LATEST.parent.resolve()
    top = outputs if outputs in others else Path.cwd()
    found = [parent, *(each for each in others if top in each.parents)]
    return next((each for each in found if any((each / name).is_file() for name in names)), None)


def finished(folder: Path) -> bool:
    """Return True if a run is complete: not killed, interrupted, stopped on request, or (outside a sweep) diverged."""
    if not (folder / SUMMARY).is_file():
        return False
    try:
        summary = json.loads((folder / SUMMARY).read_bytes())
        reason = summary.get("stop_reason")
        outdated = is_outdated(folder, summary, max(checkpoints(folder / CHECKPOINTS), default=0))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return False
    diverged = reason == "diverged" and _above(folder, SWEEP) is None
    return not outdated and not diverged and reason not in ("signal", "request")


def require_plain_files(folder: Path) -> None:
    """Raise DataError if resuming a folder could write outside it, or if it contains special files.

    Resuming would write through links, change files that share a hard link, or block on a pipe. Folder names
    with `${` are rejected too: Hydra would interpolate them, even if escaped, and could reveal a secret.
    """
    if "${" in str(folder):
        raise DataError(f"{folder}: the name must not contain ${{. Rename the folder")
    for path, found in _below(folder):
        if stat.S_ISLNK(found.st_mode):
            inside = path.parent != folder and is_inside(path, folder)
            plain = inside or (OF_WANDB.search(str(path.relative_to(folder))) and not path.is_dir())
        else:
            plain = stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)
        if not plain:
            raise DataError(
                f"{path}: must be a plain file, because resuming would write to the target of a link or block on a pipe"
            )
        if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            raise DataError(
                f"{path}: must not have other hard links, because resuming would modify them too. Replace the file "
                "with a copy"
            )


def _below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield all files, folders and links below a folder, without following links."""

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # if a running process removed it, the lock prevents resuming
            raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for parent, folders, files in os.walk(folder, onerror=failed):
        for path in sorted(Path(parent, name) for name in (*folders, *files)):
            try:
                yield path, path.lstat()
            except OSError as error:
                failed(error)


def is_inside(path: str | Path, folder: Path) -> bool:
    place, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    return place != root and place.is_relative_to(root)


def run_of(path: Path) -> Path:
    """Return the run folder from a path to the run, to its checkpoints or to one of them."""
    if os.path.isfile(path / SETTINGS):
        return path
    full = _with_name(path)
    if STEP.fullmatch(full.name):
        path = full = full.parent
    return full.parent if full.name == CHECKPOINTS else path


def checkpoint_of(path: Path) -> Path:
    """Return the path if it is a checkpoint, otherwise the run's checkpoints folder."""
    run = run_of(path)
    return path if STEP.fullmatch(_with_name(path).name) and run != path else run / CHECKPOINTS


def _with_name(path: Path) -> Path:
    """Return the absolute path if the last two names of `path` are not known."""
    return path if path.parent.name not in ("", "..") else Path(os.path.abspath(path))


def check_same_settings(given: Mapping[str, Any], stored: Mapping[str, Any], path: Path) -> None:
    for key, now, then in _differences(given, stored):
        if key.partition(".")[0] not in (*MAY_DIFFER, *UNLISTED) and key not in (*NESTED_KEYS, *MAY_MOVE):
            started = "without it" if then is None else f"with {written(then)}"
            listed_keys = ", ".join((*MAY_DIFFER, *NESTED_KEYS, *MAY_MOVE))
            reason = f"the run in {run_of(path)} was started {started}, and resuming can change only {listed_keys}"
            raise ConfigError(f"{reason}. Remove this setting, or start a new run", key, written(now))


def changes_results(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return True if settings that were changed on resume, by dotted key, may change the results."""
    harmless = ("memory.", "profile", "resume", "trusted_modules", *NESTED_KEYS, *MAY_MOVE)
    return any(not key.startswith(harmless) for key, _, _ in _differences(before, after))


def _differences(
    given: Mapping[str, Any], stored: Mapping[str, Any], above: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted(given.keys() | stored.keys()):
        key, now, then = f"{above}{name}", given.get(name), stored.get(name)
        if isinstance(now, Mapping) and isinstance(then, Mapping):
            yield from _differences(now, then, f"{key}.")
        elif now != then:
            yield key, now, then


def check_untaken(folder: Path, results: Sequence[str] = ()) -> None:
    """Raise ConfigError if the folder contains a run, a sweep, or Hydra settings or `results` of another program.

    A run that failed before its first checkpoint may be replaced.
    """
    stored = folder / SETTINGS
    is_run = stored.is_file() and b"trusted_modules" in stored.read_bytes()  # not another program that uses Hydra
    own = [] if is_run else [name for name in (SETTINGS, *results) if os.path.lexists(folder / name)]
    if own:
        raise ConfigError(f"{folder}: the run would overwrite {listed(own, 'and')}. Choose another folder")
    if (folder / SWEEP).is_file():
        raise ConfigError(f"{folder}: already contains a sweep. Choose another folder; only its jobs can be resumed")
    if (folder / SUMMARY).is_file() or checkpoints(folder / CHECKPOINTS):
        hint = f"cupynet train {shlex.quote(f'resume={folder}')}"
        raise ConfigError(f"{folder}: already contains a run. Choose another folder, or resume it: {hint}")


def _unfinished() -> Path | None:
    """Return the newest unfinished run in outputs/ that has a checkpoint, except running ones and trials, or None."""
    folders = [path for path in LATEST.parent.glob(f"**/{CHECKPOINTS}") if not (path.parents[2] / STUDY).is_file()]
    runs = sorted((path.parent for path in folders if checkpoints(path)), key=_written, reverse=True)
    return next((run for run in runs if not finished(run) and not at_work(run)), None)


def _written(run: Path) -> float:
    """Return the modification time of the newest checkpoint, or 0."""
    with contextlib.suppress(OSError):  # checkpoints may be removed concurrently
        return max((path.stat().st_mtime for path in checkpoints(run / CHECKPOINTS).values()), default=0.0)
    return 0.0
