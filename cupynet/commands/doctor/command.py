"""The command: run each check in its own process, and print the findings."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from logging.handlers import BufferingHandler

from cupynet.commands.doctor import machine, surroundings
from cupynet.commands.doctor.finding import Finding
from cupynet.core.checks import one_line, one_of
from cupynet.core.errors import ConfigError
from cupynet.core.exits import Arguments, leave_after, steady_streams
from cupynet.core.mpiexec import started

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
    leave_after(lambda: _doctor(parser.parse_args().settings))


def _doctor(given: Sequence[str]) -> int:
    if started() is not None:
        raise ConfigError("doctor looks at one machine, in one process: start it without mpiexec")
    own = {"json": "false", "check": "", "timeout_s": str(LIMIT_S)}
    asked = []
    for argument in given:
        key, equals, value = argument.partition("=")
        if not equals and not argument.startswith("~"):
            raise ConfigError(f"{argument}: is not written as key=value")
        if key in own:
            own[key] = value
        else:
            asked.append(argument)
    as_json = one_of("json", own["json"].lower(), ("true", "false")) == "true"
    names = [one_of("check", own["check"], tuple(CHECKS))] if own["check"] else list(CHECKS)
    try:
        limit_s = float(own["timeout_s"])
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < threading.TIMEOUT_MAX:
        raise ConfigError(f"timeout_s={own['timeout_s']}: must be a number of seconds above 0")
    return report(names, asked, limit_s, as_json)


def report(names: Sequence[str], asked: list[str], limit_s: float, as_json: bool) -> int:
    """Run checks and print their findings, line by line or as JSON. Return the exit code."""
    found: list[Finding] = []
    for name in names:
        for finding in examined(name, asked, limit_s):
            found.append(finding)
            if not as_json:
                print(f"{finding.state:<9}{finding.part:<10}{finding}", flush=True)
    code = next((finding.code for finding in found if finding.code), 0)
    if as_json:
        print(json.dumps({"exit_code": code, "findings": [asdict(finding) for finding in found]}, indent=2))
    elif len(names) == len(CHECKS):
        end = f"training would end with exit code {code}: see the first problem" if code else "training works here"
        print(end)
    return code


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
        code = process.returncode
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        before, _, _ = err.decode(errors="replace").partition("Fatal Python error: ")  # then faulthandler's stacks
        last = one_line(before.strip().rpartition("\n")[2])
        return [unfinished(name, f"its process {ended}{f' ({last})' if last else ''}")]
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # with all processes it has started
        with suppress(subprocess.TimeoutExpired):  # another process may hold the pipes
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
    warnings = BufferingHandler(1000)
    warnings.setLevel(logging.WARNING)
    logging.getLogger("cupynet").addHandler(warnings)
    found: list[Finding] = []
    try:
        found += CHECKS[name](asked)
    except Exception as error:
        found.append(unfinished(name, f"{type(error).__name__}: {one_line(error)}"))
    texts = dict.fromkeys(one_line(record.getMessage()) for record in warnings.buffer)
    found += [Finding(name, "note", text) for text in texts]
    with os.fdopen(answer, "w", encoding="utf-8") as file:
        json.dump([asdict(finding) for finding in found], file)
