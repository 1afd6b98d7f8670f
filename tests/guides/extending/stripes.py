"""A data source: noisy images with one bright row, whose position is the class."""

import numpy as np

from cupynet import Data, Dataset, Source


class Stripes(Source):
    """`images` training images and a quarter as many to test on."""

    image_shape = (12, 16, 1)
    classes = 3

    def __init__(self, images: int = 400, seed: int = 0, validation: int = 0, limit: int | None = None) -> None:
        super().__init__(seed=seed, validation=validation, limit=limit)
        self.images = images

    def load(self) -> Data:
        return self._divided("stripes", self._drawn("train", self.images), self._drawn("test", self.images // 4))

    def _drawn(self, name: str, count: int) -> Dataset:
        rng = np.random.default_rng([self.seed, count])
        labels = rng.integers(0, 3, count)
        images = rng.integers(0, 160, (count, *self.image_shape), dtype=np.uint8)
        images[np.arange(count), 3 * labels + 2] += 90
        return Dataset(name, images, labels, self.classes)
