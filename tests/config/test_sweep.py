"""A sweep in one process: no job leaves anything behind for the next."""

import gc
import logging
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from threadpoolctl import threadpool_info

from cupynet.config import sweep_record
from tests.support.called import train_job
from tests.support.calls import watch
from tests.support.commands import Command

TINY = ["data=synthetic", "data.train=64", "data.test=20", "batch_size=16", "model=mlp", "epochs=1", "workers=2"]
PACKAGES = tuple(f"cupynet.{name}." for name in ("backend", "nn", "optim", "data", "parallel", "training"))


def left_in_the_process() -> dict[str, Any]:
    gc.collect()
    objects = (type(each) for each in gc.get_objects())
    return {
        "objects": Counter(each.__qualname__ for each in objects if str(each.__module__).startswith(PACKAGES)),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": [each.name for each in threading.enumerate() if each.name.startswith("cupynet")],
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "blas": [library["num_threads"] for library in threadpool_info()],
        "handlers": [len(logging.getLogger(name).handlers) for name in (None, "cupynet", "hydra", "__main__")],
        "open": len(logging._handlerList),  # type: ignore[attr-defined]
    }


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="/proc shows open files only on Linux")
def test_jobs_leave_no_objects_files_or_threads_to_the_next(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []
    watch(monkeypatch, sweep_record, "began", lambda *_: found.append(left_in_the_process()))
    assert command("-m", *TINY, "seed=1,2,3", task=train_job)[0] == 0
    assert found[1] == found[2] and not found[2]["threads"]
