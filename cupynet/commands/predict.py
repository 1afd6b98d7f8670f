"""Classify pictures with a finished run: `cupynet predict RUN digit.png [more.png | folder]`.

Pictures may have any size. For a run on digits, those of another size than the network's are centred like MNIST's
(data/centering.py), and dark digits on light paper are inverted.
For other runs they are resized, as by `data=folder`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet.core.checks import integer, one_line, percent
from cupynet.core.errors import ConfigError, CupynetError, DataError
from cupynet.core.exits import Arguments, leave_after, named_path, say_error
from cupynet.core.terminal import printable

if TYPE_CHECKING:
    from cupynet.config.load_model import Trained
    from cupynet.nn import Model

BATCH_SIZE = 64
SHADES = " ░▒▓█"
EXAMPLES = """examples:
  cupynet predict outputs/latest digit.png
  cupynet predict outputs/latest scans/ --top 1 --json > scans.jsonl
  cupynet predict outputs/latest blackboard.jpg --invert no --show"""


def main() -> None:
    """Run the command."""
    parser = Arguments("cupynet predict", "Classify pictures with a finished run.", EXAMPLES)
    parser.add_argument("run", type=named_path, help="the folder of a finished run, or one of its checkpoints")
    parser.add_argument("pictures", type=named_path, nargs="+", metavar="picture",
                        help="PNG and JPEG files, and folders of them")  # fmt: skip
    parser.add_argument("--top", type=int, default=3, metavar="N", help="number of classes to print (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--center", action=argparse.BooleanOptionalAction,
                        help="centre the drawing as in MNIST (by default for a run on digits, "
                        "if the picture is not of the network's size)")  # fmt: skip
    parser.add_argument("--invert", choices=("auto", "yes", "no"), default="auto",
                        help="invert; auto: if the run's images are light on black, and this one is not")  # fmt: skip
    parser.add_argument("--show", action="store_true", help="print what the network sees, in shades")
    parser.add_argument("--trusted-modules", default="", metavar="NAMES",
                        help="comma-separated modules whose classes the run may use")  # fmt: skip
    leave_after(lambda: predict(parser.parse_args()))


def predict(arguments: argparse.Namespace) -> int:
    """Classify each picture; return the exit code. ConfigError, DataError."""
    from cupynet.config.load_model import Trained

    integer("--top", arguments.top, 1)
    trained = Trained(arguments.run, filter(None, arguments.trusted_modules.split(",")))
    model = trained.model()
    preprocessing = Preprocessing.of(trained, model, arguments.center, arguments.invert)
    failed = False
    batch: list[tuple[Path, Any]] = []
    for path in _files(arguments.pictures):
        try:
            if isinstance(path, CupynetError):
                raise path
            batch.append((path, preprocessing.image(path)))
        except DataError as error:  # the others are still classified
            say_error(str(error))
            failed = True
        if len(batch) == BATCH_SIZE:
            _print_classes(model, batch, arguments)
            batch = []
    _print_classes(model, batch, arguments)
    return DataError.exit_code if failed else 0


@dataclass(frozen=True)
class Preprocessing:
    """The preparation of pictures for a network.

    Attributes:
        shape: (H, W, C) of the network's input.
        centred: True to centre the drawing as in MNIST.
        any_size: True to centre also pictures of the network's size; by default they are used unchanged.
        on_black: True if the training images are light on black.
        invert: `yes`, `no`, or `auto`: invert if the picture is dark on light and the training images are not.
    """

    shape: tuple[int, ...]
    centred: bool
    on_black: bool
    invert: str
    any_size: bool = False

    @classmethod
    def of(cls, trained: Trained, model: Model, center: bool | None, invert: str) -> Preprocessing:
        """Return the preprocessing for a run. ConfigError if its input is not an image of 1 or 3 channels."""
        shape = model.input.shape
        if len(shape) != 3 or shape[2] not in (1, 3):
            raise ConfigError(
                f"{trained.path}: takes {model.input}, but a picture must have a height, a width, and 1 or 3 channels"
            )
        try:
            source: Any = trained.source
        except ConfigError:  # its class is not trusted
            source = None
        centred = bool(getattr(source, "centred", False)) if center is None else center
        if centred and (shape[0] != shape[1] or shape[2] != 1):
            raise ConfigError(f"--center: needs square images of one channel, and {trained.path} takes {model.input}")
        return cls(shape, centred, centred or bool(getattr(source, "on_black", False)), invert, bool(center))

    def image(self, path: Path) -> Any:
        """Read a picture as (H, W, C) uint8. DataError; ConfigError without Pillow."""
        from cupynet.data.centering import centred_as_mnist, is_dark_on_light
        from cupynet.data.pictures import one_name, picture, resized

        height, width, channels = self.shape
        pixels = picture(path, channels, drawn=self.on_black)
        if self.invert == "yes" or (self.invert == "auto" and self.on_black and is_dark_on_light(pixels)):
            pixels = 255 - pixels
        try:
            if self.centred and (self.any_size or pixels.shape[:2] != (height, width)):
                return centred_as_mnist(pixels, height)
            return resized(pixels, height, width)
        except DataError as error:
            raise DataError(f"{one_name(path)}: {error}") from error


def _files(paths: Sequence[Path]) -> Iterator[Path | CupynetError]:
    """Yield files, and the pictures in folders by name; an error for a folder without pictures."""
    from cupynet.data.pictures import ENDINGS, one_name

    for path in paths:
        if not os.path.isdir(path):  # False for impossible names
            yield path
            continue
        try:
            inside = sorted(each for each in path.iterdir() if not each.name.startswith("."))
        except OSError as error:
            yield DataError(f"{one_name(path)}: cannot be read ({error.strerror})")
            continue
        found = [each for each in inside if each.suffix.lower() in ENDINGS and each.is_file()]
        yield from found
        if not found:
            yield DataError(f"{one_name(path)}: has no pictures ({', '.join(ENDINGS)})")


def _print_classes(model: Model, batch: Sequence[tuple[Path, Any]], arguments: argparse.Namespace) -> None:
    """Classify a batch of pictures, and print a line for each."""
    import numpy as np

    from cupynet.data.pictures import one_name

    if not batch:
        return
    images = np.stack([image for _, image in batch])
    probabilities = model.loss.applies is not None
    best = model.classify(images, min(arguments.top, model.output.features))
    for (path, image), found in zip(batch, best, strict=True):
        if arguments.json:
            top = [{"class": name, "score": score} for name, score in found]
            print(json.dumps({"file": str(path), **top[0], "top": top}))
        else:
            scores = [
                f"{printable(one_line(name))} {percent(p, 1) if probabilities else f'{p:.3g}'}" for name, p in found
            ]
            print("  ".join([one_name(path), *scores]))
        if arguments.show and not arguments.json:
            print(shown(image))
    sys.stdout.flush()


def shown(image: Any) -> str:
    """Draw an image (H, W, C) uint8 with characters, two rows to a line."""
    grey = image.mean(axis=2)
    step = -(-grey.shape[1] // 76)
    rows = grey[: len(grey) // (2 * step) * 2 * step, ::step]
    rows = rows.reshape(-1, 2 * step, rows.shape[1]).mean(axis=1)
    return "\n".join("".join(SHADES[min(int(level * 5 / 256), 4)] for level in row).rstrip() for row in rows)
