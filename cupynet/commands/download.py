"""Download a data set: `cupynet download mnist --to DIR`, for a machine without a network."""

from __future__ import annotations

import argparse
import shlex

from cupynet.commands.arguments import Arguments
from cupynet.core.errors import DataError
from cupynet.core.exits import run_and_exit
from cupynet.core.wording import counted

NAMES = ("mnist", "fashion_mnist", "kmnist", "cifar10")
EXAMPLES = """examples:
  cupynet download mnist                      # to where `cupynet train` looks for it
  cupynet download cifar10 --to data          # copy data/ to the other machine, and there:
  cupynet train data=cifar10 data.folder=data"""


def main() -> None:
    parser = Arguments("cupynet download", "Download a data set and check its files.", EXAMPLES)
    parser.add_argument("name", choices=NAMES, help="the data set")
    parser.add_argument(
        "--to", metavar="DIR", help="the folder to create NAME/ in; $CUPYNET_DATA, else the user's cache"
    )
    run_and_exit(lambda: download(parser.parse_args()))


def download(arguments: argparse.Namespace) -> None:
    """Download missing files, check all files, and print how to use them. DataError."""
    from cupynet import data
    from cupynet.data.download import Unavailable

    kinds = {kind.name: kind for kind in (data.MNIST, data.FashionMNIST, data.KMNIST, data.CIFAR10)}
    source = kinds[arguments.name](arguments.to)
    if source.missing:
        print(f"downloading {counted(len(source.missing), 'file')} to {source.place} ...", flush=True)
    try:
        source.fetch()
    except Unavailable as error:
        raise DataError(f"{source.place}: downloading failed ({error})") from error
    print(f"{source.place}: {len(source.files)} files, as published")
    print(f"cupynet train {shlex.join([f'data={source.name}', f'data.folder={source.place.parent}'])}")
