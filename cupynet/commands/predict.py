"""Classify pictures with a finished run: `cupynet predict RUN digit.png [more.png | folder]`.

If the run was trained on digits, pictures of a different size are centered as in MNIST. Otherwise, they are resized, as
with `data=folder`. By default, dark-on-light pictures are inverted if the training images are light on black.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from cupynet.commands.arguments import Arguments
from cupynet.core.checks import integer
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.exits import run_and_exit
from cupynet.core.terminal import printable, say_error
from cupynet.core.wording import one_line, percent

EXAMPLES = """examples:
  cupynet predict outputs/latest digit.png
  cupynet predict outputs/latest scans/ --top 1 --json > scans.jsonl
  cupynet predict outputs/latest blackboard.jpg --invert no"""


def main() -> None:
    parser = Arguments("cupynet predict", "Classify pictures with a finished run.", EXAMPLES)
    parser.add_run()
    parser.add_argument("pictures", type=Path, nargs="+", metavar="picture",
                        help="PNG, JPEG, BMP and WebP files, and folders of them")  # fmt: skip
    parser.add_argument("--top", type=int, default=3, metavar="N",
                        help="number of classes to print (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one line of JSON per picture")
    parser.add_argument("--invert", choices=("auto", "yes", "no"), default="auto",
                        help="invert pictures; auto: if they are dark on light, unlike the run's images")  # fmt: skip
    parser.add_trusted_modules()
    run_and_exit(lambda: predict(parser.parse_args()))


def predict(arguments: argparse.Namespace) -> int:
    from cupynet.config.load_model import LoadedRun

    integer("--top", arguments.top, 1)
    trained = LoadedRun(arguments.run, arguments.trusted_modules)
    model = trained.model()
    source = None
    with suppress(DataError):  # prediction works without the run's data files
        source = trained.source
    shape = model.input.shape
    if len(shape) != 3 or shape[2] not in (1, 3):
        raise ConfigError(f"the network has input {shape}, but pictures need an input (H, W, C) with 1 or 3 channels")
    failed = False
    for path in chain(*map(_files, arguments.pictures)):
        try:
            image = preprocessed(path, shape, source, arguments.invert)
        except DataError as error:  # continue with the other pictures
            say_error(str(error))
            failed = True
            continue
        (best,) = model.classify(image[None], min(arguments.top, model.output.features))
        if arguments.json:
            top = [{"class": name, "score": score} for name, score in best]
            print(json.dumps({"file": str(path), **top[0], "top": top}), flush=True)
        else:
            form = partial(percent, digits=1) if model.loss.applies is not None else "{:.3g}".format
            scores = [f"{printable(one_line(name))} {form(score)}" for name, score in best]
            print("  ".join([printable(one_line(path)), *scores]), flush=True)
    return DataError.exit_code if failed else 0


def _files(path: Path) -> list[Path]:
    """Return the pictures in a folder, sorted, or the path itself if it is a file or a folder without pictures."""
    from cupynet.data.pictures import ENDINGS

    if not os.path.isdir(path):  # isdir and isfile return False for invalid names, and without permission
        return [path]
    found = [each for each in sorted(path.glob("[!.]*")) if each.suffix.lower() in ENDINGS and os.path.isfile(each)]
    return found or [path]


def preprocessed(path: Path, shape: tuple[int, ...], source: Any, invert: str) -> Any:
    """Read a picture for a network with input `shape`, as (H, W, C) uint8.

    Args:
        source: the data source of the run, which determines whether pictures are centered and inverted; or None.
        invert: `yes`, `no`, or `auto` to invert pictures that are dark on light if the training images are not.
    """
    from cupynet.data.centering import centered_as_mnist, is_dark_on_light
    from cupynet.data.pictures import picture, resized

    height, width, channels = shape
    pixels = picture(path, channels)
    if invert == "yes" or (invert == "auto" and getattr(source, "on_black", False) and is_dark_on_light(pixels)):
        pixels = 255 - pixels
    try:
        if getattr(source, "centered", False) and pixels.shape[:2] != (height, width):
            return centered_as_mnist(pixels, height)
        return resized(pixels, height, width)
    except DataError as error:
        raise DataError(f"{one_line(path)}: {error}") from error
