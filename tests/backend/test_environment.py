"""What is recorded of the machine a result came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cupynet.backend import available_cores, cpu_model, environment


def files(monkeypatch: pytest.MonkeyPatch, contents: dict[str, str]) -> None:
    """A machine on which these files exist under /sys and /proc, and no others."""

    def read_text(path: Path, *arguments: Any) -> str:
        if str(path) not in contents:
            raise FileNotFoundError(str(path))
        return contents[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)


V1 = "/sys/fs/cgroup/cpu/cpu.cfs_"


@pytest.mark.parametrize(
    ("contents", "cores"),
    [
        ({}, 6),
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, 6),
        ({"/sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"/sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1),
        ({"/sys/fs/cgroup/cpu.max": "900000 100000\n"}, 6),
        ({"/sys/fs/cgroup/cpu.max": "nonsense"}, 6),
        ({f"{V1}quota_us": "-1\n", f"{V1}period_us": "100000\n"}, 6),
        ({f"{V1}quota_us": "300000\n", f"{V1}period_us": "100000\n"}, 3),
    ],
)
def test_cores_by_affinity_and_quota(contents: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    files(monkeypatch, contents)
    assert available_cores() == cores


def test_the_processor_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    files(monkeypatch, {"/proc/cpuinfo": "processor : 0\nmodel name\t: A Fast: One\n"})
    assert cpu_model() == "A Fast: One"
    files(monkeypatch, {})
    assert cpu_model()


def test_an_environment_is_json() -> None:
    record = environment()
    assert json.loads(json.dumps(record)) == record
    assert {"python", "system", "cpu", "cores", "cpu_flags", "blas", "versions"} == record.keys()
    assert "numpy" in record["versions"] and record["cores"] >= 1
