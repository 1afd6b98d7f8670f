"""Data: data sets checked before they are used, batches in an order that follows from (seed, epoch) alone.

A `Source` (MNIST, Synthetic) knows the shape of its images before it loads them; `load()` returns a `Data` of
`Dataset`s. A `Loader` cuts a data set into `Batch`es and deals them to the workers; a `Prefetcher` makes them ahead,
and a `Feeding` is their way to one worker.
`write_shards` cuts a training set into parts on disk, one for each worker, which a `ShardedLoader` deals out;
`load_mapped` lets the processes of one machine share what a source has loaded.
"""

from __future__ import annotations

from cupynet.data.cache import load_mapped
from cupynet.data.dataset import Dataset, Labelled
from cupynet.data.feeding import Feeding
from cupynet.data.loader import Batch, Batches, Loader, ShardedLoader, as_loader
from cupynet.data.mnist import MNIST
from cupynet.data.prefetch import Prefetcher
from cupynet.data.sharding import check_target, write_shards
from cupynet.data.shards import Shards
from cupynet.data.source import Data, Source
from cupynet.data.synthetic import Synthetic

__all__ = [
    "MNIST",
    "Batch",
    "Batches",
    "Data",
    "Dataset",
    "Feeding",
    "Labelled",
    "Loader",
    "Prefetcher",
    "ShardedLoader",
    "Shards",
    "Source",
    "Synthetic",
    "as_loader",
    "check_target",
    "load_mapped",
    "write_shards",
]
