"""The user's pictures, in a folder for each class."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cupynet.data import Folder
from cupynet.data.pictures import resized
from cupynet.data.sources import image_folder
from tests.support.data_errors import data_error
from tests.support.refusals import refused
from tests.support.user_files import COLOURS, checked, digits, write_pictures

SMALL = digits(60, 30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "mine", SMALL)


def test_sizes_are_known_before_pictures_are_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_folder, "picture", lambda *_, **__: pytest.fail("it decodes a picture"))
    source = Folder(folder)
    assert (source.image_shape, source.classes) == ((8, 8, 1), 10)
    assert source.class_names == tuple(f"class-{digit}" for digit in range(10))


def test_a_class_without_test_images_does_not_shift_the_others(folder: Path) -> None:
    (folder / "test" / "class-0").rename(folder.parent / "elsewhere")
    test = Folder(folder).load().test
    assert test.labels.tolist() == [label for label in SMALL.test_labels if label]


@pytest.mark.parametrize("validation", [0, 7])
def test_a_limited_image_folder_has_images_of_each_class_and_reads_no_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, validation: int
) -> None:
    read, decoded = list[Path](), image_folder.picture
    monkeypatch.setattr(image_folder, "picture", lambda path, *a, **k: (read.append(path), decoded(path, *a, **k))[1])
    data: Any = Folder(folder, limit=20, validation=validation).load()
    assert len(data.train) == len(data.test) == 20
    assert set(data.test.labels.tolist()) == set(range(10))
    assert len(set(data.train.labels.tolist())) >= 8
    train = sum(path.parts[-3] == "train" for path in read)
    assert len(read) - train == 20 and train == (20 if not validation else len(SMALL.train_labels))


def test_jpeg_is_read_and_hidden_files_are_ignored(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "mine", SMALL, "jpg")
    (folder / "train" / ".DS_Store").touch()
    (folder / "train" / "class-3" / ".thumbnails").mkdir()
    data: Any = Folder(folder).load()
    difference = data.train.images[..., 0].astype(int) - SMALL.train_images
    assert 0 < np.abs(difference).mean() < 8  # JPEG forgets a little


def test_another_size_and_other_channels(folder: Path, tmp_path: Path) -> None:
    source = Folder(folder, size=(4, 16), channels=3)
    assert source.image_shape == (4, 16, 3)
    images: Any = checked(source).train.images
    np.testing.assert_array_equal(images[..., 0], images[..., 2])
    grey = Folder(write_pictures(tmp_path / "colours", COLOURS), channels=1)
    assert grey.image_shape == (5, 7, 1) and checked(grey).train.image_shape == (5, 7, 1)


def test_a_picture_is_resized_without_turning() -> None:
    bright_columns = np.repeat(np.array([[0, 250]], np.uint8), 4, axis=1)[..., None]  # (1, 8, 1)
    found = resized(bright_columns, 4, 6)
    assert found.shape == (4, 6, 1) and (found[:, 0] < 30).all() and (found[:, -1] > 220).all()


def text(path: Path) -> None:
    path.write_text("these are twos")


def cut(path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:70])


def picture(*shape: int, dtype: Any = np.uint8) -> Callable[[Path], None]:
    return lambda path: Image.fromarray(np.zeros(shape, dtype)).save(path)


WRONG: dict[str, tuple[str, Callable[[Path], object]]] = {  # a path in the folder, and what is written there
    "of another size": ("test/class-7/00029.png", picture(8, 9)),
    "of 16 bits": ("train/class-2/deep.png", picture(8, 8, dtype=np.uint16)),
    "a note": ("train/class-2/notes.txt", text),
    "a note called a picture": ("train/class-2/notes.png", text),
    "the first of all, empty": ("train/class-0/00000.png", lambda path: path.write_bytes(b"")),
    "cut": ("train/class-2/cut.png", cut),
    "unfolding": ("train/class-2/bomb.png", lambda path: Image.new("1", (15_000, 15_000)).save(path)),
    "a class without pictures": ("train/none", Path.mkdir),
    "an unknown class": ("test/two", lambda path: path.with_name("class-2").rename(path)),
    "a loose file": ("train/readme.md", Path.touch),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_pictures_are_named(folder: Path, name: str) -> None:
    place, spoil = WRONG[name]
    spoil(folder / place)
    with data_error(folder / place):
        Folder(folder).load()


def test_a_folder_without_test_images_is_refused(folder: Path) -> None:
    (folder / "test").rename(folder / "tests")
    with data_error(folder):
        Folder(folder)


@pytest.mark.parametrize(("name", "value"), [("channels", 2), ("size", [0, 3]), ("folder", 3)])
def test_wrong_arguments(name: str, value: Any) -> None:
    with refused(name):
        Folder(**{name: value})


def test_without_pillow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with refused(""):
        Folder(folder)


def test_a_picture_of_too_many_pixels_is_refused_without_a_warning(folder: Path) -> None:
    first = sorted((folder / "train").rglob("*.png"))[0]
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", 12_000, 12_000, 8, 0, 0, 0, 0), b"IDAT"]
    packed = [struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks]
    first.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))
    with warnings.catch_warnings(), data_error(first):
        warnings.simplefilter("error")
        Folder(folder).load()


@pytest.mark.parametrize("first", ["grey", "colours"])
def test_grey_pictures_among_others_are_refused_unless_channels_are_given(first: str, tmp_path: Path) -> None:
    """One is grey: the first of all by name, or the last to test on."""
    folder = write_pictures(tmp_path / "mine", COLOURS)
    path = sorted((folder / ("train" if first == "grey" else "test")).rglob("*.png"))[0 if first == "grey" else -1]
    Image.fromarray(np.full((5, 7), 76, np.uint8)).save(path)
    with data_error("data.channels", path if first == "colours" else folder):
        Folder(folder).load()
    for channels in (1, 3):
        assert checked(Folder(folder, channels=channels)).train.image_shape == (5, 7, channels)


def save_drawing(path: Path, mode: str, ink: int = 0) -> None:
    """Two bars of ink on a transparent background."""
    alpha = np.zeros((8, 8), np.uint8)
    alpha[:, [1, 5]] = 255
    drawn = Image.fromarray(np.full((8, 8), ink, np.uint8))
    if mode == "P":
        Image.fromarray(np.dstack([np.full((8, 8, 3), ink, np.uint8), alpha])).convert("P").save(path)
    elif mode in ("L", "RGB"):  # one colour is transparent
        levels = np.where(alpha == 0, 255 - ink, ink).astype(np.uint8) ^ (alpha == 0)
        Image.fromarray(levels).convert(mode).save(path, transparency=254 if mode == "L" else (254, 254, 254))
    else:
        Image.merge(mode, [*[drawn] * (len(mode) - 1), Image.fromarray(alpha)]).save(path)


@pytest.mark.parametrize(
    ("mode", "channels"), [("RGBA", None), ("LA", None), ("P", 1), ("L", 3), ("RGB", 1), ("RGBA", 3)]
)
def test_transparent_pixels_are_white(mode: str, channels: int | None, folder: Path) -> None:
    for path in folder.rglob("*.png"):
        save_drawing(path, mode)
    source = Folder(folder, channels=channels)
    images: Any = checked(source).train.images
    assert source.image_shape[2] == channels or (1 if mode == "LA" else 3)
    assert (images[0, :, [1, 5]] == 0).all() and (images[0, :, [0, 2, 3, 4, 6, 7]] == 255).all()
    assert source.changed()


def test_pictures_without_transparency_have_not_changed(folder: Path) -> None:
    assert not Folder(folder).changed()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_white_drawings_on_a_transparent_ground_are_refused(mode: str, folder: Path) -> None:
    path = folder / "train" / "class-2" / "white.png"
    save_drawing(path, mode, 255)
    with data_error(path):
        Folder(folder, channels=1).load()
    Image.fromarray(np.zeros((8, 8, 4), np.uint8)).save(path)  # nothing is drawn
    assert len(Folder(folder, channels=1).load().train) == 61
