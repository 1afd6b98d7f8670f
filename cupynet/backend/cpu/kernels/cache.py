"""Compiled kernels on the disk: numba's own cache, which may be missing, full or damaged without ending a run.

numba keeps its files beside this one or, where that folder cannot be written, in the user's cache folder, or in
NUMBA_CACHE_DIR. What cannot be read is compiled anew, what cannot be kept is compiled again at the next start; either
is told once, when a kernel is compiled: then there is a log.

The files are numba's, and pickles: as with Python's own .pyc, who can write to that folder decides what runs. So
nothing is ever kept where everybody can write, such as the folder for temporary files.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache

from cupynet.core.checks import one_line

log = logging.getLogger(__name__)

_told: set[str] = set()  # what this process has been told already
_telling = threading.Lock()


class KernelCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of one kernel.

    Attributes:
        trouble: why there is none; None where there is.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.trouble: str | None = None
        try:
            super().__init__(function)
        except (RuntimeError, OSError) as error:
            self.trouble = one_line(error)
            if "no locator available" in self.trouble:
                self.trouble = f"neither {Path(__file__).parent} nor a folder of the user can be written"
            self._name = repr(function)

    @property
    def cache_path(self) -> str:
        """The folder; none is "", as numba has it."""
        return "" if self.trouble else str(super().cache_path)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kernel compiled for these types; None where it is not kept, or cannot be used."""
        if self.trouble is not None:
            return None
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:  # whatever damaged bytes may lead to
            reason = f"{type(error).__name__}: {one_line(error)}"
        else:
            if found is None or tuple(found.signature.args) == tuple(sig):
                return found
            reason = "another kernel is in its place"  # of two processes that wrote at once
        _tell_once("damaged", "damaged kernels in %s are compiled anew (%s)", self.cache_path, reason)
        self._forget()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a kernel that was compiled for these types, where that can be done."""
        reason = self.trouble
        if reason is None:
            try:
                super().save_overload(sig, data)
                return
            except Exception as error:  # a full disk, a folder that is gone, an index that cannot be read
                reason = f"{self.cache_path}: {one_line(error)}"
                self._forget()
        _tell_once(
            "kept",
            "compiled kernels cannot be kept, and each start takes seconds more (%s): name a folder of your own in "
            "NUMBA_CACHE_DIR",
            reason,
        )

    def flush(self) -> None:
        """Forget what is kept."""
        if self.trouble is None:
            super().flush()

    def _forget(self) -> None:
        """Take the list of what is kept away: it must not name a file that was never written, or is no kernel."""
        with suppress(OSError):
            os.unlink(self._cache_file._index_path)


def _tell_once(kind: str, text: str, *arguments: str) -> None:
    """A warning, the first time in this process."""
    with _telling:
        if kind in _told:
            return
        _told.add(kind)
    log.warning(text, *arguments)
