"""Record the tests that run on a GPU: `python -m pytest -p tests.gpu_record ...`, as in `make test-gpu`.

Prints a table at the end and writes outputs/records/gpu-tests-<device>-<date>.json. Under xdist only the controlling
process does so. Without a usable GPU it runs no test.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from cupynet.backend.cuda import gpus
from cupynet.bench import records

COUNTED = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")  # pytest's outcomes; error: in a fixture


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    fault = gpus.probe()
    if fault is not None:
        raise pytest.UsageError(f"no GPU can be used: {fault}")
    config.pluginmanager.register(Recorder())


class Recorder:
    """Writes the record of this session. It reads the device's properties first: a test may make the device fail."""

    def __init__(self) -> None:
        self._began, self._where = time.perf_counter(), records.where()

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
        seconds = time.perf_counter() - self._began
        if config.option.collectonly:
            return
        record = {**self._where, "pytest": pytest.__version__, "arguments": [*config.invocation_params.args]}
        record |= {"seconds": seconds, "exit_status": int(exitstatus), **counted(terminalreporter.stats)}
        path = records.write(record, "gpu-tests")
        for line in table(record):
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"written to {path}")


def counted(stats: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the number of tests by outcome, the failures, and the reasons of skips. stats: reports by outcome."""
    failed = [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())]
    reasons = Counter(_reason(report) for report in stats.get("skipped", ()))
    counts = {kind: len(stats.get(kind, ())) for kind in COUNTED}
    return {"counts": counts, "failures": sorted(set(failed)), "skipped_because": dict(reasons.most_common())}


def _reason(report: Any) -> str:
    """Return why a test was skipped."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(why).removeprefix("Skipped: ")


def table(record: dict[str, Any]) -> list[str]:
    """Return the record as lines of text."""
    versions, counts = record["cuda"], record["counts"]
    stack = ", ".join(f"{name} {versions[name]}" for name in ("cupy", "runtime", "driver", "nccl"))
    lines = ["", f"{record['device']['name']}, {stack}", f"commit {record['commit']}"]
    lines += [f"{kind:<10}{count:>8,}" for kind, count in counts.items() if count or kind in ("passed", "failed")]
    lines.append(f"{'seconds':<10}{record['seconds']:>8,.0f}")
    return lines + [f"skipped {count} times: {why}" for why, count in record["skipped_because"].items()]
