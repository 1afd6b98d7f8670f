from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import wording
from cupynet.core.errors import DataError
from cupynet.data.files import PARSING, FilePath, check_regular
from cupynet.data.sources.user_files import UserArrays, required_path


@dataclass(eq=False)
class NpzFile(UserArrays):
    """A .npz file with images (S, H, W) or (S, H, W, C) and integer labels (S,) or (S, 1).

    Args:
        train_images, train_labels, test_images, test_labels: the keys of the arrays in `file`.
        classes: number of classes; by default the largest training label + 1.
        seed and others: see `Source`.
    """

    file: FilePath | None = None
    train_images: str = "x_train"
    train_labels: str = "y_train"
    test_images: str = "x_test"
    test_labels: str = "y_test"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.place = required_path("file", self.file, "the .npz file")
        self.name = self.place.name.partition(".")[0]
        self._inspect()

    def _has(self, name: str) -> bool:
        with suppress(DataError), self._opened(name):
            return True
        return bool(getattr(self, name) != getattr(type(self), name))

    def _shape(self, name: str) -> tuple[int, ...]:
        with self._opened(name) as (file, size):
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            # `read_array` would allocate memory for any size
            if not dtype.hasobject and file.tell() + math.prod(shape) * dtype.itemsize != size:
                raise ValueError(f"{getattr(self, name)}: its header does not match its contents")
            return tuple(shape)

    def _array(self, name: str) -> Array:
        with self._opened(name) as (file, _):
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
            return array

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[IO[bytes], int]]:
        """Open an array in the archive, and yield it with its size in bytes. Convert errors to DataError."""
        path, key = self.place, getattr(self, name)
        try:
            check_regular(path)
            with PARSING, zipfile.ZipFile(path) as archive:
                if f"{key}.npy" not in archive.namelist():
                    there = ", ".join(each.removesuffix(".npy") for each in archive.namelist()[:8])
                    remedy = f"Set the key with {wording.setting('data', name)}"
                    raise DataError(f"{path}: expected an array {key!r}, found {there or 'nothing'}. {remedy}")
                with archive.open(f"{key}.npy") as file:
                    yield file, archive.getinfo(f"{key}.npy").file_size
        except (DataError, MemoryError):
            raise
        except FileNotFoundError as error:
            raise DataError(f"{path}: no such file") from error
        except Exception as error:  # damaged archives and headers raise exceptions of many types
            reason = wording.one_line(error)
            raise DataError(f"{path}: cannot be read as an .npz file ({reason}). Write it with np.savez") from error
