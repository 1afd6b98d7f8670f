"""Training on two machines: two Linux network namespaces with a cable between them. Needs root, `ip` and `tc`.

MPI is restricted to TCP, so that all traffic between ranks goes through the cable.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from cupynet.core.mpiexec import find_mpiexec
from tests.support.commands import QUICK, environment, run, run_folder
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


pytestmark = [*needs_mpi, pytest.mark.slow]


def test_mpi_ranks_on_two_machines_train_the_weights_of_two_threads_bit_for_bit(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    folders = [tmp_path / "threads", tmp_path / "machines"]
    for folder in folders:
        folder.mkdir()
    run(folders[0], *QUICK, "workers=2")
    variables = {**environment(), "UCX_TLS": "tcp,self"}
    with two_machines("200mbit") as names:
        command = [*mpi_command(names, folders[1]), sys.executable, "-m", "cupynet", "train"]
        command += [*QUICK, "parallel.launcher=mpi"]
        null = subprocess.DEVNULL
        done = subprocess.run(command, cwd=folders[1], env=variables, stdin=null, stderr=subprocess.PIPE, timeout=120)
        assert done.returncode == 0, done.stderr
        sent = [int(inside(name, "statistics/tx_bytes")) for name in names]
    threads, machines = (run_folder(folder) / "weights.safetensors" for folder in folders)
    assert threads.read_bytes() == machines.read_bytes()
    size = sum(array.nbytes for array in load_file(threads).values())
    assert min(sent) > size  # at least one average went each way
