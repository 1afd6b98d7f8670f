"""Sweeps as commands: in one process, where no job leaves anything to the next, and as processes."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import environment

TINY = ["data=synthetic", "data.train=64", "data.test=20", "epochs=1", "batch_size=16", "model=mlp"]

WATCHED = """
import json, logging, os, sys, threading
from threadpoolctl import threadpool_info
from cupynet.config import sweep_record
from cupynet.commands.train import main

began = sweep_record.began
def noted(*arguments):
    began(*arguments)
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    handlers = [len(logging.getLogger(name).handlers) for name in (None, "cupynet", "hydra", "__main__")]
    found = {
        "rss": int(status["VmRSS"].split()[0]), "files": len(os.listdir("/proc/self/fd")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
        "blas": [library["num_threads"] for library in threadpool_info()],
        "handlers": handlers, "open": len(logging._handlerList),
    }
    print("found", json.dumps(found))
sweep_record.began = noted
main()
"""

ON_DEVICES = """
import json, sys, threading
from tests.standin import installed
with installed(2):
    import cupy
    from cupynet.config import sweep_record
    from cupynet.commands.train import main
    began = sweep_record.began
    def noted(*arguments):
        began(*arguments)
        pool = cupy.get_default_memory_pool()
        free = []
        for device in range(2):
            with cupy.cuda.Device(device):
                free.append(pool.free_bytes())
        found = {"free": free, "pinned": cupy.get_default_pinned_memory_pool().n_free_blocks(),
                 "threads": threading.active_count()}
        print("found", json.dumps(found))
    sweep_record.began = noted
    main()
"""


def watched(program: str, *arguments: str, folder: Path) -> list[dict[str, Any]]:
    """What was found at the beginning of each job, when the one before it has ended."""
    done = subprocess.run(
        [sys.executable, "-c", program, "-m", *TINY, *arguments, f"hydra.sweep.dir={folder / 'sweep'}"],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line.removeprefix("found ")) for line in done.stdout.splitlines() if line.startswith("found ")]


linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="/proc shows open files only on Linux")


def check_left(jobs: list[dict[str, Any]]) -> None:
    """Nothing but memory may be other than at the beginning of the second job."""
    first = {**jobs[1], "rss": 0}
    assert first["children"] == "" and first["threads"] == ["MainThread"]
    assert first["handlers"] == [1, 1, 1, 1]
    assert all({**job, "rss": 0} == first for job in jobs[1:])


@linux
@pytest.mark.slow
def test_thirty_jobs_leave_nothing(tmp_path: Path) -> None:
    jobs = watched(WATCHED, "workers=2", f"seed={','.join(map(str, range(30)))}", folder=tmp_path)
    assert len(jobs) == 30
    check_left(jobs)
    middle, end = (sorted(job["rss"] for job in part)[2] for part in (jobs[8:13], jobs[25:30]))
    assert end - middle < 24 * 1024  # kB: what allocators scatter; a model with its buffers is more in each job


@pytest.mark.slow
def test_a_job_leaves_nothing_on_devices(tmp_path: Path) -> None:
    jobs = watched(ON_DEVICES, "backend=cupy", "workers=2", "seed=1,2,3", folder=tmp_path)
    assert [job["free"] for job in jobs[1:]] == [[0, 0]] * 2 and [job["pinned"] for job in jobs[1:]] == [0] * 2
    assert jobs[1] == jobs[2]


@pytest.mark.slow
def test_parallel_jobs_equal_sequential_jobs(tmp_path: Path) -> None:
    own = tmp_path / "mine" / "experiment" / "small.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("# @package _global_\ndata:\n  limit: 32\n")
    own_settings = ["experiment=small", "--config-dir=mine", "workers=1", "seed=1,2", "+callbacks.mine=null"]
    done = subprocess.run(
        [sys.executable, "-m", "cupynet", "train", "-m", *TINY, *own_settings, "hydra/launcher=processes",
         "hydra.sweep.dir=outputs/sweep"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment(CUPYNET_DATA=str(tmp_path)),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.readlink(tmp_path / "outputs" / "latest") == "sweep"
    sweep = tmp_path / "outputs" / "sweep"
    rows = csv.DictReader((sweep / "sweep.csv").read_text().splitlines())
    assert [(row["job"], row["seed"]) for row in rows] == [("0", "1"), ("1", "2")]
    for number in "01":
        asked = yaml.safe_load((sweep / number / ".hydra" / "overrides.yaml").read_text())
        assert {f"seed={int(number) + 1}", "experiment=small", "+callbacks.mine=null"} <= {*asked}
        assert json.loads((sweep / number / "summary.json").read_text())["images"] == 32


@pytest.mark.slow
def test_a_signal_ends_a_sweep_and_its_job_has_a_row(tmp_path: Path) -> None:
    settings = ["epochs=100000", "seed=1,2", "hydra.sweep.dir=sweep", "workers=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cupynet", "train", "-m", *[each for each in TINY if each != "epochs=1"], *settings],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("sweep/0/checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 143 and "Traceback" not in stderr
    (row,) = csv.DictReader((tmp_path / "sweep" / "sweep.csv").read_text().splitlines())
    assert (row["job"], row["exit_code"]) == ("0", "143") and "job 0 " in stdout
