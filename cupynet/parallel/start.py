"""How the processes of a job come together: the time before MPI is up, when nobody hears anybody.

MPI waits for ever for a process that has ended by itself, whatever its exit code; one that was killed makes mpiexec end
all others at once. So who cannot come says why, and dies by a signal.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import signal
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cupynet.mpiexec import started

START_S = 60.0  # how long it may take until all processes have come together
OUTPUT_S = 2.0  # how long mpiexec may take to read the last words of a rank
HAND_ON_S = 0.2  # and how long it has, in the end, to hand them on

# MPI lets Python do nothing while it waits for all processes to start; so another process looks at the clock. It is in
# a session of its own, where Ctrl-Z does not reach it: time in which this process is stopped does not count
WATCH = """
import os, select, signal, sys, time

patience_s, line, watched, pause_s = float(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])

def stands_still():
    try:
        with open(f"/proc/{watched}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False

while patience_s > 0:
    began = time.monotonic()
    if select.select([0], [], [], min(patience_s, 0.2))[0]:
        sys.exit()
    if not stands_still():
        patience_s -= time.monotonic() - began
os.write(2, line.encode())
time.sleep(pause_s)
os.kill(watched, signal.SIGKILL)
"""


@contextmanager
def coming_together() -> Iterator[None]:
    """The start of MPI: as long as this lasts, the processes of a job wait for each other.

    If one never comes, because it ended before, this one is killed, with a sentence. If this one cannot go on, whatever
    it raises, it dies by a signal at the end of its program.
    """
    process = started()
    if process is None:
        yield
        return
    rank, size = process
    patience_s = START_S + 2 * (rank > 0)  # rank 0 speaks for all, if it is there
    line = (
        f"cupynet: rank {rank}: not all{'' if size is None else f' {size}'} processes have come together within "
        f"{START_S:g} s: one has ended, or they do not reach each other\n"
    )
    arguments = [str(patience_s), line, str(os.getpid()), str(HAND_ON_S)]
    command = [sys.executable, "-ISc", WATCH, *arguments]
    # it ends when its input does: when all is well, or with this process
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        try:
            yield
        except BaseException:
            atexit.register(_die)
            raise


def _die() -> None:
    """End this process by a signal, after its last words."""
    sys.stdout.flush()
    sys.stderr.flush()
    let_output_go()
    os.kill(os.getpid(), signal.SIGKILL)


def let_output_go() -> None:
    """Wait until what this process printed has been taken out of its pipes: what mpiexec has not read by the time of an
    abort is lost, and with it the traceback."""
    deadline = time.monotonic() + OUTPUT_S
    for stream in (1, 2):
        with suppress(OSError):  # no pipe, or closed
            while time.monotonic() < deadline and stat.S_ISFIFO(os.fstat(stream).st_mode):
                unread = fcntl.ioctl(stream, termios.FIONREAD, b"\0" * 4)
                if not int.from_bytes(unread, sys.byteorder):
                    break
                time.sleep(0.001)
    time.sleep(HAND_ON_S)
