"""Sweeps in one process: no job leaves anything behind for the next."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from threadpoolctl import threadpool_info

from cupynet.commands.train import main
from cupynet.config import sweep_record
from tests.support.commands import ROOT

pytestmark = pytest.mark.slow

TINY = ["data=synthetic", "data.train=64", "data.test=20", "batch_size=16", "model=mlp", "epochs=1", "workers=2"]


def left_in_the_process() -> dict[str, Any]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss": int(status["VmRSS"].split()[0]),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "blas": [library["num_threads"] for library in threadpool_info()],
        "handlers": [len(logging.getLogger(name).handlers) for name in (None, "cupynet", "hydra", "__main__")],
        "open": len(logging._handlerList),  # type: ignore[attr-defined]
    }


def watched() -> None:
    """Train, and print the leftovers in the process when each job begins."""

    def noted(*arguments: Any) -> None:
        began(*arguments)
        print("found", json.dumps(left_in_the_process()))

    began = sweep_record.began
    sweep_record.began = noted  # type: ignore[assignment]
    main()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="/proc shows open files only on Linux")
def test_thirty_jobs_leave_nothing(tmp_path: Path) -> None:
    arguments = ["-m", *TINY, f"seed={','.join(map(str, range(30)))}", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    line = [sys.executable, "-c", "from tests.config.test_sweep import watched; watched()", *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("found ")]
    sizes = [job.pop("rss") for job in jobs]
    assert len(jobs) == 30 and all(job == jobs[1] for job in jobs[1:])
    assert jobs[1]["children"] == "" and jobs[1]["threads"] == ["MainThread"] and jobs[1]["handlers"] == [1, 1, 1, 1]
    middle, end = sorted(sizes[8:13])[2], sorted(sizes[25:30])[2]
    assert end - middle < 24 * 1024  # kB for fragmentation; leaking a model and its buffers in each job would be more
