"""Records of GPU measurements (`gpu-*.json`) and GPU tests (`gpu-tests-*.json`) in `outputs/records/`."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

from cupynet.backend.cuda import gpus
from cupynet.backend.environment import commit, environment
from cupynet.core.files import write_json

RECORDS = Path("outputs/records")


def where(device: int = 0) -> dict[str, Any]:
    """Return the device, CUDA versions, commit, machine and date. Requires that `gpus.probe` has returned None."""
    inventory = gpus.inventory()
    return {
        "device": inventory["devices"][device],
        "cuda": {name: inventory[name] for name in ("cupy", "driver", "runtime", "nccl")},
        "commit": commit(),
        "environment": environment(),
        "date": date.today().isoformat(),
    }


def write(record: dict[str, Any], kind: str = "gpu") -> Path:
    """Write a record to a new file whose name begins with `kind`. Return its path."""
    name = re.sub(r"[^a-z0-9]+", "-", record["device"]["name"].lower()).strip("-")
    RECORDS.mkdir(parents=True, exist_ok=True)
    stem, number = f"{kind}-{name}-{record['date']}", 1
    path = RECORDS / f"{stem}.json"
    while path.exists():
        number += 1
        path = RECORDS / f"{stem}-{number}.json"
    write_json(path, record)
    return path
