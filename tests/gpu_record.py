"""A record of the tests that ran on a GPU, `python -m pytest -p tests.gpu_record ...`, as `make test-gpu` does.

At the end a table, and outputs/records/gpu-tests-<device>-<date>.json. Under xdist the process that shares the tests
out writes it, and it alone.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from cupynet.backend import cuda
from cupynet.bench import records

COUNTED = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")  # as pytest has them; error: around a test


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


class Recorder:
    """Writes the record of this session. It looks at the device first: afterwards that may have failed for good."""

    def __init__(self) -> None:
        self._began, self._fault = time.perf_counter(), cuda.probe()
        self._where = records.where() if self._fault is None else {}

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
        seconds = time.perf_counter() - self._began
        if config.option.collectonly or not self._where:
            terminalreporter.write_line(f"no record is written: {self._fault or 'no test was run'}")
            return
        record = {**self._where, "pytest": pytest.__version__, "arguments": [*config.invocation_params.args]}
        record |= {"seconds": seconds, "exit_status": int(exitstatus), **counted(terminalreporter.stats)}
        path = records.write(record, "gpu-tests")
        for line in table(record):
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"written to {path}")


def counted(stats: dict[str, list[Any]]) -> dict[str, Any]:
    """How many tests came to what, which failed, and why others were skipped; stats: pytest's reports, by outcome."""
    failed = [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())]
    reasons = Counter(_reason(report) for report in stats.get("skipped", ()))
    counts = {kind: len(stats.get(kind, ())) for kind in COUNTED}
    return {"counts": counts, "failures": sorted(set(failed)), "skipped_because": dict(reasons.most_common())}


def _reason(report: Any) -> str:
    """Why a test was skipped."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(why).removeprefix("Skipped: ")


def table(record: dict[str, Any]) -> list[str]:
    """The record in lines."""
    versions, counts = record["cuda"], record["counts"]
    told = ", ".join(f"{name} {versions[name]}" for name in ("cupy", "runtime", "driver", "nccl"))
    lines = ["", f"{record['device']['name']}, {told}", f"commit {record['commit']}"]
    lines += [f"{kind:<10}{count:>8,}" for kind, count in counts.items() if count or kind in ("passed", "failed")]
    lines.append(f"{'seconds':<10}{record['seconds']:>8,.0f}")
    return lines + [f"skipped {count} times: {why}" for why, count in record["skipped_because"].items()]
