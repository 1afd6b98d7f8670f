"""Data: data sets checked before they are used, batches in an order that follows from (seed, epoch) alone.

A `Source` (MNIST, Synthetic) knows the shape of its images before it loads them; `load()` returns a `Data` of
`Dataset`s. A `Loader` cuts a data set into `Batch`es and deals them to the workers; a `Prefetcher` makes them ahead.
"""

from __future__ import annotations

from cupynet.data.dataset import Data, Dataset, Source
from cupynet.data.loader import Batch, Loader, as_loader
from cupynet.data.mnist import MNIST
from cupynet.data.prefetch import Prefetcher
from cupynet.data.synthetic import Synthetic

__all__ = ["MNIST", "Batch", "Data", "Dataset", "Loader", "Prefetcher", "Source", "Synthetic", "as_loader"]
