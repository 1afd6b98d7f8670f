"""Two machines on one, for tests: network namespaces of Linux with a cable between them. Takes root, `ip` and `tc`.

MPI is held to TCP, so that everything the ranks exchange goes through the cable.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.mpi import mpiexec

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # inside the namespaces

# mpiexec starts the processes of another machine by `ssh [options] address command`
AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
shift
exec ip netns exec {namespace} sh -c "$*"
"""


def do(*command: str) -> str:
    """Run a command and return what it prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def unavailable() -> str:
    """Return why there can be no namespaces here; "" if there can."""
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
    """The names of two namespaces, joined by a `cable` of that rate as tc writes it."""
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
            while inside(name, "operstate") != "up":  # MPI looks once, and Linux can be late in saying so
                assert time.monotonic() < until, f"the cable of {name} carries nothing"
                time.sleep(0.02)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def inside(namespace: str, what: str) -> str:
    """What Linux says of a machine's end of the cable."""
    return do("ip", "netns", "exec", namespace, "cat", f"/sys/class/net/cable/{what}")


def mpi_command(namespaces: tuple[str, str], folder: Path) -> list[str]:
    """Return the start of a command for one rank on each machine; its agent is written to `folder`.

    Run it with UCX_TLS=tcp,self in the environment: UCX would find that both machines share a memory.
    """
    agent = folder / "agent"
    agent.write_text(AGENT.format(namespace=namespaces[1]))
    agent.chmod(0o755)
    reach = ["-hosts", ",".join(ADDRESSES), "-ppn", "1", "-launcher", "ssh", "-launcher-exec", str(agent)]
    return ["ip", "netns", "exec", namespaces[0], str(mpiexec()), *reach, "-iface", "cable", "-n", "2"]
