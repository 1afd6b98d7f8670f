"""A small data set and backends that do no more than a loader needs."""

from typing import Any

import numpy as np

from cupynet.backend import PixelScale
from cupynet.data import Dataset


def numbered_dataset(samples: int) -> Dataset:
    images = (np.arange(samples * 4) % 251).astype(np.uint8).reshape(samples, 2, 2, 1)
    return Dataset("numbered", images, np.arange(samples) % 10, 10)


class RawBackend:
    """Hands images back as they are."""

    def load_images(self, images: Any, samples: Any, pixels: Any) -> Any:
        return images[samples]

    def asarray(self, a: Any, dtype: Any = None) -> Any:
        return np.asarray(a, dtype)


class HostBackend(RawBackend):
    """Scales images as NumPy would."""

    def load_images(self, images: Any, samples: Any, pixels: PixelScale) -> Any:
        return images[samples].astype(np.float32) * np.asarray(pixels.scale, np.float32) + np.asarray(
            pixels.shift, np.float32
        )
