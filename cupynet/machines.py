"""Two machines on one: `python -m cupynet.machines [--rate 100mbit] [--delay 1ms] [--ranks 2] [key=value ...]`.

Trains under mpiexec as two machines would that a slow cable connects: each is a network namespace of Linux with its own
addresses, the cable a pair of virtual network devices whose rate is limited, and the MPI library is held to TCP. That
takes root, `ip` and `tc`. Without them the two are two groups of processes and no cable. What stands behind is given to
`cupynet.train`.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from cupynet.checks import one_line
from cupynet.config import compose
from cupynet.errors import ConfigError, Interrupted
from cupynet.exits import Arguments, steady_streams, tell
from cupynet.mpiexec import find_mpiexec
from cupynet.settings import AS_RANKS

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # inside the namespaces: they meet no others

# mpiexec starts the processes of another machine by `ssh [options] address command`; this goes there its own way
AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
address=$1; shift
case $address in {address}) exec ip netns exec {namespace} sh -c "$*" ;; esac
echo "no machine has the address $address" >&2; exit 1
"""


def main() -> None:
    """The command."""
    steady_streams()
    parser = Arguments(
        "python -m cupynet.machines",
        "Train as two machines that a slow cable connects, on this one.",
        "key=value: settings of cupynet.train, such as experiment=several_machines",
    )
    parser.add_argument("--rate", default="100mbit", help="of the cable, as tc writes it (%(default)s)")
    parser.add_argument("--delay", default="1ms", help="of the cable, each way, where the kernel can (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="on each machine (%(default)s)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of cupynet.train")
    try:
        asked = parser.parse_args()
        code = train(asked.rate, asked.delay, asked.ranks, asked.settings)
    except BaseException as error:
        raise SystemExit(tell(error)) from None
    raise SystemExit(code)


def train(rate: str, delay: str, ranks: int, settings: list[str]) -> int:
    """Train on two machines; the exit code of mpiexec. ConfigError where that cannot be done."""
    if ranks < 1:
        raise ConfigError(f"--ranks={ranks}: must be an integer of at least 1")
    if not any(each.startswith("-") or each.lstrip("+").startswith("resume=") for each in settings):
        compose([AS_RANKS, *settings])  # what every rank would refuse is refused before there are machines
    mpiexec = find_mpiexec()
    job = ["-n", str(2 * ranks), sys.executable, "-m", "cupynet.train", AS_RANKS, *settings]
    with ExitStack() as stack:
        stack.enter_context(signals(interrupt))
        try:
            first, second = stack.enter_context(machines(rate, delay))
        except OSError as error:
            print(f"two groups of processes, and no cable between them: {error}", flush=True)
            return follow([mpiexec, *job], dict(os.environ))
        agent = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "agent"
        agent.write_text(AGENT.format(address=ADDRESSES[1], namespace=second))
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        reach = ["-hosts", ",".join(ADDRESSES), "-ppn", str(ranks), "-launcher", "ssh", "-launcher-exec", str(agent)]
        command = ["ip", "netns", "exec", first, mpiexec, *reach, "-iface", "cable", *job]
        began = time.monotonic()
        # UCX finds out that both are one machine, and would go through its memory
        code = follow(command, {**os.environ, "UCX_TLS": "tcp,self"})
        megabytes = sent(first) / 1e6, sent(second) / 1e6
        seconds = time.monotonic() - began
        print(f"through the cable: {megabytes[0]:.1f} MB there, {megabytes[1]:.1f} MB back, in {seconds:.1f} s")
    return code


def follow(command: list[str], environment: dict[str, str]) -> int:
    """Run a command, hand on to it the signals that come meanwhile, and return its exit code."""
    came: list[int] = []  # before there was a process
    process: subprocess.Popen[bytes] | None = None

    def hand_on(number: int) -> None:
        number = signal.SIGTERM if number == signal.SIGHUP else number  # by which training is stopped, and saved
        if process is None:
            came.append(number)
        else:
            process.send_signal(number)

    with signals(hand_on):
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        for number in came:
            process.send_signal(number)
        return process.wait()


@contextmanager
def signals(handle: Callable[[int], None]) -> Iterator[None]:
    """SIGHUP, SIGINT and SIGTERM call `handle` with their number; SIGHUP not where it is ignored (nohup)."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]
    try:
        for number in before:
            signal.signal(number, lambda number, frame: handle(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(number: int) -> None:
    """Nothing trains yet."""
    raise Interrupted(number)


@contextmanager
def machines(rate: str, delay: str) -> Iterator[tuple[str, str]]:
    """The names of two namespaces, each with one end of a cable, `cable`, until they are no longer needed.

    OSError where this machine cannot have them.
    """
    names = tuple(f"cupynet-{os.getpid()}-{end}" for end in "ab")
    if os.geteuid() != 0:
        raise PermissionError("a cable takes root")
    try:
        for name in names:
            do("ip", "netns", "add", name)
        ends = ["type", "veth", "peer", "name", "cable", "netns", names[1]]
        do("ip", "-n", names[0], "link", "add", "cable", *ends)
        delayed = True
        for name, address in zip(names, ADDRESSES, strict=True):
            do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                do("ip", "-n", name, "link", "set", device, "up")
            slow = ["tc", "-n", name, "qdisc", "add", "dev", "cable", "root"]
            if subprocess.run([*slow, "netem", "delay", delay, "rate", rate], capture_output=True).returncode:
                delayed = False
                do(*slow, "tbf", "rate", rate, "burst", "64k", "latency", "100ms", else_raise=ConfigError)
        for name in names:
            until_up(name)
        late = f", {delay} late each way" if delayed else " (without delay: this kernel has no netem)"
        print(f"two machines, {ADDRESSES[0]} and {ADDRESSES[1]}, and a cable of {rate}{late}", flush=True)
        yield names[0], names[1]
    finally:
        with signals(lambda number: None):  # a second one must not come between
            for name in names:
                with suppress(OSError):
                    do("ip", "netns", "del", name)


def do(*command: str, else_raise: type[Exception] = OSError) -> None:
    """Run a command that prepares the machines; an error with its own words where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise else_raise(f"{' '.join(command)}: {one_line(done.stderr) or 'failed'}")


def until_up(namespace: str) -> None:
    """Wait until a machine's end of the cable carries: Linux can be a second late in saying so, and until it does MPI
    finds no network there. OSError after 5 seconds.
    """
    until = time.monotonic() + 5
    while cable(namespace, "operstate") != "up":
        if time.monotonic() > until:
            raise OSError(f"the cable of {namespace} carries nothing after 5 s")
        time.sleep(0.02)


def sent(namespace: str) -> int:
    """Bytes that a machine has sent through its end of the cable."""
    return int(cable(namespace, "statistics/tx_bytes"))


def cable(namespace: str, what: str) -> str:
    """What Linux tells of a machine's end of the cable."""
    read = ["ip", "netns", "exec", namespace, "cat", f"/sys/class/net/cable/{what}"]
    return subprocess.run(read, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
