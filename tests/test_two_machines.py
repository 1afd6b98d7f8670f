"""Training on two machines: two Linux network namespaces with a cable between them. Needs root, `ip` and `tc`.

MPI is restricted to TCP, so that all traffic between ranks goes through the cable.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from cupynet.core.mpiexec import find_mpiexec
from tests.support.commands import QUICK, ROOT, environment, run, run_folder
from tests.support.mpi import needs_mpi

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # inside the namespaces

# mpiexec starts processes on another machine with `ssh [options] address command`
AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
shift
exec ip netns exec {namespace} sh -c "$*"
"""


def do(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def unavailable() -> str:
    """Return why namespaces cannot be created here, or "" if they can."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return "network namespaces take root, ip and tc"
    name = f"cupynet-{os.getpid()}-try"
    try:
        do("ip", "netns", "add", name)
        do("ip", "netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return ""


@contextmanager
def two_machines(rate: str) -> Iterator[tuple[str, str]]:
    """Yield the names of two namespaces joined by a `cable` of that rate, in tc's notation."""
    names = (f"cupynet-{os.getpid()}-a", f"cupynet-{os.getpid()}-b")
    try:
        for name in names:
            do("ip", "netns", "add", name)
        do("ip", "-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                do("ip", "-n", name, "link", "set", device, "up")
            tbf = ["tbf", "rate", rate, "burst", "64k", "latency", "100ms"]
            do("tc", "-n", name, "qdisc", "add", "dev", "cable", "root", *tbf)
        for name in names:
            until = time.monotonic() + 5
            while inside(name, "operstate") != "up":  # MPI checks once, and Linux may report it late
                assert time.monotonic() < until, f"the cable of {name} carries nothing"
                time.sleep(0.02)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def inside(namespace: str, what: str) -> str:
    """Return an attribute of a machine's end of the cable from /sys."""
    return do("ip", "netns", "exec", namespace, "cat", f"/sys/class/net/cable/{what}")


def mpi_command(namespaces: tuple[str, str], folder: Path) -> list[str]:
    """Return the start of a command for one rank on each machine, and write its agent to `folder`.

    Run it with UCX_TLS=tcp,self in the environment. Otherwise UCX would detect that the machines share memory.
    """
    agent = folder / "agent"
    agent.write_text(AGENT.format(namespace=namespaces[1]))
    agent.chmod(0o755)
    reach = ["-hosts", ",".join(ADDRESSES), "-ppn", "1", "-launcher", "ssh", "-launcher-exec", str(agent)]
    return ["ip", "netns", "exec", namespaces[0], find_mpiexec(), *reach, "-iface", "cable", "-n", "2"]


pytestmark = [*needs_mpi, pytest.mark.slow, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]


def start(names: tuple[str, str], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [*mpi_command(names, folder), sys.executable, *arguments]
    variables = environment() | {"UCX_TLS": "tcp,self", "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, cwd=folder, env=variables, stdin=null, stdout=null, stderr=pipe, text=True)


def test_two_machines_give_the_weights_of_two_threads(tmp_path: Path) -> None:
    folders = [tmp_path / "threads", tmp_path / "machines"]
    for folder in folders:
        folder.mkdir()
    run(folders[0], *QUICK, "workers=2")
    with two_machines("200mbit") as names:
        with start(names, folders[1], "-m", "cupynet", "train", *QUICK, "parallel.launcher=mpi") as process:
            _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        sent = [int(inside(name, "statistics/tx_bytes")) for name in names]
    threads, machines = (run_folder(folder) / "weights.safetensors" for folder in folders)
    assert threads.read_bytes() == machines.read_bytes()
    size = sum(array.nbytes for array in load_file(threads).values())
    assert min(sent) > size  # at least one average went each way


TRAINING = """
import os
from pathlib import Path
from cupynet.parallel import MpiLauncher

def task(c):
    for now in range(1_000_000):
        c.gather_numbers(now)
        if now == 20:
            Path(f"{c.rank}.part").write_text(str(os.getpid()))
            os.rename(f"{c.rank}.part", f"{c.rank}.pid")

MpiLauncher(timeout_s=1.0).run(task)
"""


def test_a_cut_cable_ends_the_ranks_on_both_machines(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    files = [tmp_path / f"{rank}.pid" for rank in (0, 1)]
    with two_machines("200mbit") as names, start(names, tmp_path, "training.py") as process:
        assert until(lambda: all(file.exists() for file in files))
        do("ip", "-n", names[0], "link", "set", "cable", "down")
        ranks = [int(file.read_text()) for file in files]
        ended = until(lambda: not any(map(runs, ranks)))
        for rank in filter(runs, ranks):
            os.kill(rank, signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    assert ended and process.returncode == 1 and " waited 1 s for " in stderr


def until(true: Callable[[], bool]) -> bool:
    """Wait up to a minute until `true` returns True, and return its last result."""
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
