"""Data: data sets checked before they are used, batches in an order that follows from (seed, epoch) alone.

A `Source` (MNIST, Synthetic, or `Idx`, `Npz` and `Folder` for files of one's own) knows the shape of its images before
it loads them; `load()` returns a `Data` of `Dataset`s. `Augmentation`s change training images, each time another way. A
`Loader` cuts a data set into `Batch`es and deals them to the workers; a `BatchFeed` brings them to one worker, and its
`Prefetcher` makes them ahead.
`write_shards` cuts a training set into parts on disk, one for each worker, which a `ShardedLoader` deals out;
`load_mapped` lets the processes of one machine share what a source has loaded.
"""

from __future__ import annotations

from cupynet.data.augment import Augmentation, CutOut, Draws, Elastic, HorizontalFlip, Rotate, Shift
from cupynet.data.cache import load_mapped
from cupynet.data.cifar import CIFAR10
from cupynet.data.dataset import Dataset, Labelled
from cupynet.data.feed import BatchFeed
from cupynet.data.loader import Batch, Batches, Loader, ShardedLoader, as_loader
from cupynet.data.mnist import KMNIST, MNIST, FashionMNIST
from cupynet.data.npz import Npz
from cupynet.data.own import Idx
from cupynet.data.pictures import Folder
from cupynet.data.prefetch import Prefetcher
from cupynet.data.sharding import check_target, write_shards
from cupynet.data.shards import Shards
from cupynet.data.source import Data, Source
from cupynet.data.synthetic import Synthetic

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
    "ShardedLoader",
    "Shards",
    "Shift",
    "Source",
    "Synthetic",
    "as_loader",
    "check_target",
    "load_mapped",
    "write_shards",
]
