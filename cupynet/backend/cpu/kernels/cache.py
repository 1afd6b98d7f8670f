"""numba's on-disk cache, except that damaged or unwritable files do not end a run.

The files are in `__pycache__` next to the kernels, in the user's cache folder, or in NUMBA_CACHE_DIR. They are pickles,
so they are never kept in a folder that everybody can write to.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba.core.caching import FunctionCache

from cupynet.core.wording import one_line

log = logging.getLogger(__name__)

DAMAGED = "recompiling damaged kernels (%s)"
CACHE_UNWRITABLE = (
    "compiled kernels cannot be cached, so each start takes seconds longer (%s). Set NUMBA_CACHE_DIR to a folder"
)
_warned: set[str] = set()


class KernelCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of one kernel; unreadable or unwritable files are no error."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
            if found is not None and tuple(found.signature.args) != tuple(sig):  # two processes wrote at once
                raise ValueError("another kernel is in its place")
        except Exception as error:  # damaged files may raise anything
            self._forget(DAMAGED, error)
            found = None
        if found is None:
            gc.freeze()  # it is compiled now: collections need not visit anything that exists before
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:  # a full disk, a deleted folder, a damaged index
            self._forget(CACHE_UNWRITABLE, error)
        gc.collect()  # exceptions within the compiler refer to all callers, so to their borrowed arrays, in cycles
        gc.unfreeze()

    def _forget(self, text: str, error: Exception) -> None:
        """Empty the index, so that it names no file that is damaged or was never written."""
        _warn_once(text, f"{self.cache_path}: {type(error).__name__}: {one_line(error)}")
        with suppress(OSError):
            self.flush()


def keep(compiled: Any, function: Callable[..., Any]) -> None:
    """Cache what numba's dispatcher `compiled` of `function` compiles, if there is a folder to write to."""
    try:
        compiled._cache = KernelCache(function)  # cache=True would make a cache whose errors end the run
    except (RuntimeError, OSError) as error:
        _warn_once(CACHE_UNWRITABLE, one_line(error))


def _warn_once(text: str, reason: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning(text, reason)
