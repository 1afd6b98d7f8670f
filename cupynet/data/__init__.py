"""Data: data sets checked before they are used, batches in an order that follows from (seed, epoch) alone.

A `Source` (MNIST, Synthetic, or `Idx`, `Npz`, `Folder` and `Sharded` for your own files) knows the shape of its images
before it loads them; `load()` returns a `Data` of `Dataset`s. `Augmentation`s change training images, each time another
way. A `Loader` cuts a data set into `Batch`es and deals them to the workers; of `Shards`, a training set in parts on
disk, a `ShardedLoader` gives each worker its own. A `BatchFeed` brings the batches to one worker, and its `Prefetcher`
makes them ahead.
"""

from __future__ import annotations

from cupynet.data.augment import Augmentation, CutOut, Draws, Elastic, HorizontalFlip, Rotate, Shift
from cupynet.data.dataset import Dataset, Labelled
from cupynet.data.feed import BatchFeed
from cupynet.data.loader import Batch, Batches, Loader, ShardedLoader, as_loader
from cupynet.data.prefetch import Prefetcher
from cupynet.data.shards import Shards
from cupynet.data.sources.cifar import CIFAR10
from cupynet.data.sources.idx import Idx
from cupynet.data.sources.image_folder import Folder
from cupynet.data.sources.mnist import KMNIST, MNIST, FashionMNIST
from cupynet.data.sources.npz import Npz
from cupynet.data.sources.sharded import Sharded
from cupynet.data.sources.source import Data, Source
from cupynet.data.sources.synthetic import Synthetic

__all__ = [
    "Augmentation",
    "Batch",
    "BatchFeed",
    "Batches",
    "CIFAR10",
    "CutOut",
    "Data",
    "Dataset",
    "Draws",
    "Elastic",
    "FashionMNIST",
    "Folder",
    "HorizontalFlip",
    "Idx",
    "KMNIST",
    "Labelled",
    "Loader",
    "MNIST",
    "Npz",
    "Prefetcher",
    "Rotate",
    "Sharded",
    "ShardedLoader",
    "Shards",
    "Shift",
    "Source",
    "Synthetic",
    "as_loader",
]
