"""Download a data set, for a machine without network access: `cupynet download mnist --to DIR`."""

from __future__ import annotations

import argparse
import shlex

from cupynet.commands.arguments import Arguments
from cupynet.core.errors import DataError
from cupynet.core.exits import run_and_exit
from cupynet.core.wording import counted

NAMES = ("mnist", "fashion_mnist", "kmnist", "cifar10")
EXAMPLES = """examples:
  cupynet download mnist                      # where `cupynet train` looks for it
  cupynet download cifar10 --to data          # then copy data/ to the other machine, and run:
  cupynet train data=cifar10 data.folder=data"""


def main() -> None:
    parser = Arguments("cupynet download", "Download a data set and verify its files.", EXAMPLES)
    parser.add_argument("name", choices=NAMES, help="the data set")
    parser.add_argument(
        "--to", metavar="DIR", help="folder in which to create NAME/ (default: $CUPYNET_DATA, or the user's cache)"
    )
    run_and_exit(lambda: download(parser.parse_args()))


def download(arguments: argparse.Namespace) -> None:
    """Download missing files, verify all files, and print how to use them."""
    from cupynet import data
    from cupynet.core.files import require_folder
    from cupynet.data.download import Unavailable
    from cupynet.data.sources.downloaded import offline

    kinds = {kind.name: kind for kind in (data.MNIST, data.FashionMNIST, data.KMNIST, data.CIFAR10)}
    source = kinds[arguments.name](arguments.to)
    if source.missing and not offline():
        require_folder(source.place)
        print(f"downloading {counted(len(source.missing), 'file')} to {source.place} ...", flush=True)
    try:
        source.fetch()
    except Unavailable as error:
        raise DataError(f"{source.place}: downloading failed ({error})") from error
    print(f"{source.place}: {len(source.files)} files, verified")
    print(f"cupynet train {shlex.join([f'data={source.name}', f'data.folder={source.place.parent}'])}")
