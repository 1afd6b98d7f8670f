"""Data sets, augmentation, and batches in an order that depends only on seed and epoch."""

from __future__ import annotations

from cupynet.data.augment import (
    Augmentation,
    ColorJitter,
    CutMix,
    Cutout,
    Elastic,
    HorizontalFlip,
    MixUp,
    Rotate,
    SampleRNG,
    Scale,
    Shift,
)
from cupynet.data.dataset import Dataset
from cupynet.data.feed import BatchFeed
from cupynet.data.loader import Batch, LabeledData, Loader, as_loader
from cupynet.data.pairs import read_pairs
from cupynet.data.prefetch import Prefetcher
from cupynet.data.shards import Shards
from cupynet.data.sources.cifar import CIFAR10
from cupynet.data.sources.idx import IdxFiles
from cupynet.data.sources.image_folder import ImageFolder
from cupynet.data.sources.mnist import KMNIST, MNIST, FashionMNIST
from cupynet.data.sources.npz import NpzFile
from cupynet.data.sources.sharded import ShardedFiles
from cupynet.data.sources.source import Data, Source
from cupynet.data.sources.synthetic import Synthetic

__all__ = [
    "Augmentation",
    "Batch",
    "BatchFeed",
    "CIFAR10",
    "ColorJitter",
    "CutMix",
    "Cutout",
    "Data",
    "Dataset",
    "SampleRNG",
    "Elastic",
    "FashionMNIST",
    "ImageFolder",
    "HorizontalFlip",
    "IdxFiles",
    "KMNIST",
    "LabeledData",
    "Loader",
    "MNIST",
    "MixUp",
    "NpzFile",
    "Prefetcher",
    "Rotate",
    "Scale",
    "ShardedFiles",
    "Shards",
    "Shift",
    "Source",
    "Synthetic",
    "as_loader",
    "read_pairs",
]
