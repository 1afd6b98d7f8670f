"""Record the results of tests on a GPU: `python -m pytest -p tests.gpu_record ...`, as in `make test-gpu`.

The plugin prints a table at the end and writes outputs/records/gpu-tests-<device>-<date>.json. Under xdist, only the
controller does so. Without a usable GPU, no test runs.
"""

import time
from collections import Counter
from typing import Any

import pytest

from cupynet.backend.cuda import gpus
from cupynet.bench import records

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")  # error: a fixture failed


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    fault = gpus.probe()
    if fault is not None:
        raise pytest.UsageError(f"no GPU can be used: {fault}")
    config.pluginmanager.register(Recorder())


class Recorder:
    """Writes the session's record. It reads the device's properties first, because a test may make the device fail."""

    def __init__(self) -> None:
        self._began, self._where = time.perf_counter(), records.where()

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
        if config.option.collectonly:
            return
        record: dict[str, Any] = {
            **self._where,
            "pytest": pytest.__version__,
            "arguments": [*config.invocation_params.args],
            "seconds": time.perf_counter() - self._began,
            "exit_status": int(exitstatus),
            **counted(terminalreporter.stats),
        }
        path = records.write(record, "gpu-tests")
        versions = ", ".join(f"{name} {record['cuda'][name]}" for name in ("cupy", "runtime", "driver", "nccl"))
        counts = [f"{kind:<10}{count:>8,}" for kind, count in record["counts"].items() if count or kind == "failed"]
        reasons = [f"skipped {count} times: {why}" for why, count in record["skipped_because"].items()]
        for line in (f"{record['device']['name']}, {versions}", *counts, *reasons, f"written to {path}"):
            terminalreporter.write_line(line)


def counted(stats: dict[str, list[Any]]) -> dict[str, Any]:
    failures = {report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())}
    reasons = [
        report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in stats.get("skipped", ())
    ]
    return {
        "counts": {kind: len(stats.get(kind, ())) for kind in OUTCOMES},
        "failures": sorted(failures),
        "skipped_because": dict(Counter(why.removeprefix("Skipped: ") for why in reasons).most_common()),
    }
