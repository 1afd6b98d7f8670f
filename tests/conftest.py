"""What holds for all tests."""

from __future__ import annotations

import signal

# under nohup SIGHUP is ignored, by whatever a test starts too: here it means what it means from a terminal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
