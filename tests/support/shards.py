"""Write shards for tests, like the recipe in cupynet/data/README.md."""

from pathlib import Path

import numpy as np

from cupynet.data import Dataset, Shards


def save(folder: Path, **arrays: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", np.asarray(array))


def write_shards(dataset: Dataset, folder: Path | str, shards: int, test: Dataset | None = None) -> Shards:
    """Split a training set into shards, a seeded random part for each worker."""
    order = np.random.default_rng(5).permutation(len(dataset))
    for number, samples in enumerate(np.array_split(order, shards)):
        shard = dataset.take(np.sort(samples))
        save(Path(folder, str(number)), images=shard.images, labels=shard.labels, samples=np.sort(samples))
    if test is not None:
        save(Path(folder, "test"), images=test.images, labels=test.labels)
    return Shards(folder, dataset.classes, dataset.pixels)
