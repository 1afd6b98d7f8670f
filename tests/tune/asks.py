"""A job for tests: asks once, prints what it was answered and its cores to a file, and ends as it is told to."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from cupynet.sweeps.jobs import Asking

asking = Asking()
answer = asking.ask({"epoch": 1, "text": "it's\n"})
Path(sys.argv[1]).write_text(f"{answer} {len(os.sched_getaffinity(0))} {os.get_inheritable(asking._pipes[0])}")
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "waits":
    Path(sys.argv[1]).write_text(repr(asking.ask({"epoch": 2})))
print("noise", file=sys.stderr)
if sys.argv[2] == "fails":
    raise SystemExit("cupynet: first: then\ncupynet: it has failed")
