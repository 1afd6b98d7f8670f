"""The command: run each check in its own process, and print the findings."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict

from cupynet.commands.doctor import machine, surroundings
from cupynet.commands.doctor.finding import Finding
from cupynet.core.checks import number, one_line, one_of
from cupynet.core.errors import ConfigError
from cupynet.core.exits import Arguments, steady_streams, tell
from cupynet.core.mpiexec import started
from cupynet.core.terminal import wrapped

Check = Callable[[list[str]], Iterator[Finding]]
LIMIT_S = 120.0  # of one check, by default: compiling all kernels takes seconds, on a busy machine many

CHECKS: dict[str, Check] = {
    "packages": machine.check_packages,
    "cpu": machine.check_cpu,
    "blas": machine.check_blas,
    "numba": machine.check_numba,
    "gpu": machine.check_gpu,
    "mpi": surroundings.check_mpi,
    "data": surroundings.check_data,
    "disk": surroundings.check_disk,
    "training": surroundings.check_training,
}


# the command ----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the command."""
    steady_streams()
    parser = Arguments(
        "cupynet doctor",
        "Say what this machine has and lacks for training.",
        "key=value: settings of cupynet train, such as backend=cupy; of this command: json=true\n"
        f"prints JSON, timeout_s={LIMIT_S:.0f} is the limit of each check, and this makes one alone:\n"
        f"check={'|'.join(CHECKS)}",
    )
    parser.add_argument("settings", nargs="*", metavar="key=value")
    try:
        given = parser.parse_args().settings
        if started() is not None:
            raise ConfigError("doctor looks at one machine, in one process: start it without mpiexec")
        own, asked = divided(given)
        as_json = one_of("json", own.get("json", "false").lower(), ("true", "false")) == "true"
        names = [one_of("check", own["check"], tuple(CHECKS))] if "check" in own else list(CHECKS)
        code = report(names, asked, limit(own.get("timeout_s", str(LIMIT_S))), as_json)
    except BaseException as error:
        raise SystemExit(tell(error)) from None
    raise SystemExit(code)


def divided(given: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separate the settings of this command from those of a run. ConfigError."""
    own: dict[str, str] = {}
    asked = []
    for argument in given:
        key, equals, value = argument.partition("=")
        if not equals and not argument.startswith("~"):
            raise ConfigError(f"{argument}: is not written as key=value")
        if key in ("json", "check", "timeout_s"):
            own[key] = value
        else:
            asked.append(argument)
    return own, asked


def limit(text: str) -> float:
    """Parse a number of seconds. ConfigError."""
    try:
        return number("timeout_s", float(text), above=0, unit="seconds")
    except ValueError as error:
        raise ConfigError(f"timeout_s={text}: must be a number of seconds above 0") from error


def report(names: Sequence[str], asked: list[str], limit_s: float, as_json: bool) -> int:
    """Run checks and print their findings, line by line or as JSON. Return the exit code."""
    found: list[Finding] = []
    for name in names:
        for finding in examined(name, asked, limit_s):
            found.append(finding)
            if not as_json:
                print(line(finding), flush=True)
    code = next((finding.code for finding in found if finding.code), 0)
    if as_json:
        print(json.dumps({"exit_code": code, "findings": [asdict(finding) for finding in found]}, indent=2))
    elif len(names) == len(CHECKS):
        notes = sum(finding.state == "note" for finding in found)
        said = (
            "training works here" if code == 0 else f"training would end with exit code {code}: see the first problem"
        )
        print(f"{said}{f' ({notes} notes)' if notes > 1 else ''}")
    return code


def line(finding: Finding) -> str:
    """Return a finding as text, wrapped if stdout is a terminal."""
    head, text = f"{finding.state:<9}{finding.part:<10}", str(finding)
    if not sys.stdout.isatty():
        return head + text
    width = max(shutil.get_terminal_size().columns, 60)
    return "\n".join(wrapped(head + text, width, " " * len(head)))


# a check, in a process of its own -------------------------------------------------------------------------------------


def examined(name: str, asked: list[str], limit_s: float) -> list[Finding]:
    """Return the findings of a check; a process that dies or hangs is one."""
    command = [sys.executable, "-c", "from cupynet.commands.doctor.command import alone; alone()", name, *asked]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=limit_s)
        return [Finding(**each) for each in json.loads(out)]
    except subprocess.TimeoutExpired:
        return [unfinished(name, f"no answer within {limit_s:g} s")]
    except (ValueError, TypeError):
        ended = f"ended with exit code {process.returncode}"
        if process.returncode < 0:
            ended = f"was killed by {signal.Signals(-process.returncode).name}"
        last = one_line(err.decode(errors="replace").strip().rpartition("\n")[2])
        return [unfinished(name, f"its process {ended}{f' ({last})' if last else ''}")]
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # with all processes it has started
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5)


def unfinished(name: str, why: str) -> Finding:
    """Return the finding for a check that did not finish. It is a problem for the check that trains."""
    if name == "training":
        return Finding(name, "problem", why, "the lines above may say why", 1)
    return Finding(name, "note", f"could not be checked: {why}")


def alone() -> None:
    """Run the check named by the first argument with the settings in the others. Write its findings to stdout as JSON.

    Warnings become notes.
    """
    steady_streams()
    name, *asked = sys.argv[1:]
    answer = os.dup(1)
    os.dup2(2, 1)  # output of libraries must not mix with the findings
    warnings = _Warnings()
    logging.getLogger("cupynet").addHandler(warnings)
    found: list[Finding] = []
    try:
        found += CHECKS[name](asked)
    except Exception as error:
        found.append(unfinished(name, f"{type(error).__name__}: {one_line(error)}"))
    found += [Finding(name, "note", text) for text in dict.fromkeys(warnings.texts)]
    with os.fdopen(answer, "w", encoding="utf-8") as file:
        json.dump([asdict(finding) for finding in found], file)


class _Warnings(logging.Handler):
    """Collects warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(one_line(record.getMessage()))
