"""Numba's on-disk cache. Damaged or unwritable files do not end a run.

Files are stored in `__pycache__` next to the kernels, in the user's cache folder, or in NUMBA_CACHE_DIR. They are
pickles, so they are never stored in a world-writable folder.
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
    "compiled kernels cannot be cached, so each start takes seconds longer (%s). "
    "Set NUMBA_CACHE_DIR to a writable folder"
)
_warned: set[str] = set()


class KernelCache(FunctionCache):  # type: ignore[misc]
    _froze = False  # True if `load_overload` called gc.freeze, so `save_overload` must undo it

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            kernel = super().load_overload(sig, target_context)
            if kernel is not None and tuple(kernel.signature.args) != tuple(sig):  # two processes wrote concurrently
                raise ValueError("the file contains another kernel")
        except Exception as error:  # damaged files may raise anything
            self._forget(DAMAGED, error)
            kernel = None
        if kernel is None and not gc.get_freeze_count():  # otherwise an outer compilation or the caller froze objects
            gc.freeze()  # speeds up garbage collection during compilation
            self._froze = True
        return kernel

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:  # such as a full disk, deleted folder or damaged index
            self._forget(CACHE_UNWRITABLE, error)
        gc.collect()  # the compiler's exceptions are in reference cycles that keep all callers' frames and arrays alive
        if self._froze:
            gc.unfreeze()
            self._froze = False

    def _forget(self, text: str, error: Exception) -> None:
        """Empty the index, so that it does not list damaged or missing files."""
        _warn_once(text, f"{self.cache_path}: {type(error).__name__}: {one_line(error)}")
        with suppress(OSError):
            self.flush()


def keep(compiled: Any, function: Callable[..., Any]) -> None:
    """Cache the machine code of Numba's dispatcher `compiled` for `function`, if there is a writable folder."""
    try:
        compiled._cache = KernelCache(function)  # instead of cache=True, whose errors end the run
    except (RuntimeError, OSError) as error:
        _warn_once(CACHE_UNWRITABLE, one_line(error))


def _warn_once(text: str, reason: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning(text, reason)
