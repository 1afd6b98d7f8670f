"""The user's pictures, in one folder per class."""

import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from cupynet.core.errors import DataError
from cupynet.data import ImageFolder
from cupynet.data.pictures import picture, resized
from tests.support.refusals import data_error, refused
from tests.support.user_files import COLORS, checked, deny, digits, write_pictures

SMALL = digits(60, 30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "mine", SMALL)


@pytest.mark.parametrize(("validation", "train"), [(0, 20), (7, 60)])
def test_pictures_are_decoded_as_late_as_possible_and_no_more_than_the_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, validation: int, train: int
) -> None:
    decoded = Mock(wraps=picture)
    monkeypatch.setattr("cupynet.data.sources.image_folder.picture", decoded)
    source = ImageFolder(folder, limit=20, validation=validation)
    assert (source.image_shape, source.classes) == ((8, 8, 1), 10)
    assert source.class_names == tuple(f"class-{digit}" for digit in range(10)) and not decoded.called
    data: Any = source.load()
    assert data.train.class_names == data.test.class_names == source.class_names
    assert len(data.train) == len(data.test) == 20 and decoded.call_count == train + 20
    assert set(data.test.labels.tolist()) == set(range(10)) and len(set(data.train.labels.tolist())) >= 8


def test_a_picture_is_resized_without_swapping_height_and_width() -> None:
    bright_columns = np.repeat(np.array([[0, 250]], np.uint8), 4, axis=1)[..., None]  # (1, 8, 1)
    found = resized(bright_columns, 4, 6)
    assert found.shape == (4, 6, 1) and (found[:, 0] < 30).all() and (found[:, -1] > 220).all()


def blank(*shape: int, dtype: Any = np.uint8) -> Callable[[Path], None]:
    return lambda path: Image.fromarray(np.zeros(shape, dtype)).save(path)


def unfolding(side: int) -> Callable[[Path], None]:
    """Return a picture of many pixels in few bytes."""
    return lambda path: Image.new("1", (side, side)).save(path)


WRONG: dict[str, tuple[str, Callable[[Path], object]]] = {  # a path in the folder, and a function that writes there
    "of another size": ("test/class-7/00029.png", blank(8, 9)),
    "of 16 bits": ("train/class-2/deep.png", blank(8, 8, dtype=np.uint16)),
    "a note": ("train/class-2/notes.txt", lambda path: path.write_text("these are twos")),
    "the first of all, empty": ("train/class-0/00000.png", lambda path: path.write_bytes(b"")),
    "cut": ("train/class-0/00001.png", lambda path: path.write_bytes(path.read_bytes()[:70])),
    "the first of all, too large": ("train/class-0/00000.png", unfolding(12_000)),
    "unfolding": ("train/class-2/bomb.png", unfolding(15_000)),
    "a class without pictures": ("train/none", Path.mkdir),
    "an unknown class": ("test/two", lambda path: path.with_name("class-2").rename(path)),
    "a loose file": ("train/readme.md", Path.touch),
    "no folder": ("", shutil.rmtree),
    "no classes": ("", lambda path: [part.rename(path.with_name(part.name)) for part in path.iterdir()]),
}


def test_the_first_ten_pictures_that_cannot_be_read_are_named(folder: Path) -> None:
    broken = [path for name in ("class-3", "class-5") for path in sorted((folder / "train" / name).iterdir())]
    for path in broken:
        path.write_bytes(b"no picture")
    (folder / "train" / "class-3" / "Thumbs.db").touch()  # ignored
    with pytest.raises(DataError, match="and 11 other pictures") as caught:
        ImageFolder(folder).load()
    assert [path for path in broken if str(path) in str(caught.value)] == broken[:10]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_pictures_and_folders_are_refused_by_path(folder: Path, name: str) -> None:
    place, spoil = WRONG[name]
    spoil(folder / place)
    with warnings.catch_warnings(), data_error(folder / place):
        warnings.simplefilter("error")
        ImageFolder(folder).load()


def test_class_folders_that_may_not_be_read_are_refused_by_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deny(folder / "train", monkeypatch)
    with data_error(folder / "train"):
        ImageFolder(folder)


def test_a_folder_without_test_images_needs_validation_images(folder: Path) -> None:
    (folder / "test").rename(folder / "tests")
    with refused("validation", "0"):
        ImageFolder(folder).check()
    ImageFolder(folder).check(trains=False)
    ImageFolder(folder, validation=0.2).check()


def test_a_single_folder_of_classes_is_divided_class_by_class(folder: Path) -> None:
    source = ImageFolder(folder / "train", validation=0.2)
    data: Any = checked(source)
    assert source.validates and source.class_names[0] == "class-0"
    assert (len(data.train), len(data.validation), len(data.test)) == (48, 12, 0)
    assert (np.bincount(data.train.labels) >= 3).all() and set(data.validation.labels.tolist()) == set(range(10))


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_validation_images_may_have_their_own_folder(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / "test" / "class-4").rename(folder / name / "class-4")
    source = ImageFolder(folder)
    data: Any = checked(source)
    assert source.validates and source.expected()["validation"] == len(data.validation)
    assert set(data.validation.labels.tolist()) == {4} and 4 not in data.test.labels
    with refused("validation", "0.1"):
        ImageFolder(folder, validation=0.1)
    (folder / "val").mkdir(exist_ok=True)
    (folder / "validation").mkdir(exist_ok=True)
    with data_error(folder):
        ImageFolder(folder)


def test_images_to_test_on_alone_keep_the_labels_of_the_named_classes(folder: Path) -> None:
    (folder / "train").rename(folder.parent / "elsewhere")
    (folder / "test" / "class-0").rename(folder.parent / "zero")
    names = [f"class-{digit}" for digit in range(10)]
    source = ImageFolder(folder, class_names=names)  # type: ignore[arg-type]
    assert checked(source).test.labels.tolist() == [label for label in SMALL.test_labels if label]
    with refused(""):
        source.check()
    with data_error(folder / "test" / "class-9"):
        ImageFolder(folder, class_names=names[:9])  # type: ignore[arg-type]


def test_pictures_are_rotated_by_their_exif_orientation(tmp_path: Path) -> None:
    noted = Image.Exif()
    noted[0x0112] = 6  # orientation: the stored first row is the right side
    folder = write_pictures(tmp_path / "mine", COLORS)
    for path, pixels in zip(sorted((folder / "train").rglob("*.png")), COLORS.train_images, strict=True):
        Image.fromarray(np.rot90(pixels).copy()).save(path, exif=noted)
    source = ImageFolder(folder)
    np.testing.assert_array_equal(checked(source).train.images, COLORS.train_images)


def test_an_unknown_exif_orientation_is_ignored(tmp_path: Path) -> None:
    noted = Image.Exif()
    noted[0x0112] = 9
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (8, 6)).save(tmp_path / name / f"{number}.jpg", exif=noted)
    assert checked(ImageFolder(tmp_path, validation=0.5)).train.images.shape == (2, 6, 8, 3)


def test_duplicate_class_names_are_refused(folder: Path) -> None:
    with refused("class_names"):
        ImageFolder(folder, class_names=("class-0", "class-1", "class-0"))


def test_an_image_folder_without_pillow_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with refused(""):
        ImageFolder(folder)


@pytest.mark.parametrize("first", [True, False])
def test_a_gray_picture_among_others_is_refused_unless_channels_are_given(first: bool, tmp_path: Path) -> None:
    """If the first picture is gray, the error names the folder; otherwise, the gray picture."""
    folder = write_pictures(tmp_path / "mine", COLORS)
    path = min((folder / "train").rglob("*.png")) if first else max((folder / "test").rglob("*.png"))
    Image.fromarray(np.full((5, 7), 76, np.uint8)).save(path)
    with data_error("data.channels", folder if first else path):
        ImageFolder(folder).load()
    for channels in (1, 3):
        assert checked(ImageFolder(folder, channels=channels)).train.image_shape == (5, 7, channels)


def save_drawing(path: Path, mode: str, ink: int = 0) -> None:
    """Save two bars of ink on a transparent background."""
    alpha = np.zeros((8, 8), np.uint8)
    alpha[:, [1, 5]] = 255
    drawn = Image.fromarray(np.full((8, 8), ink, np.uint8))
    if mode == "P":
        Image.fromarray(np.dstack([np.full((8, 8, 3), ink, np.uint8), alpha])).convert("P").save(path)
    elif mode == "RGB":  # one color is transparent
        levels = np.where(alpha == 0, 254, ink).astype(np.uint8)
        Image.fromarray(levels).convert(mode).save(path, transparency=(254, 254, 254))
    else:
        Image.merge(mode, [*[drawn] * (len(mode) - 1), Image.fromarray(alpha)]).save(path)


@pytest.mark.parametrize(("mode", "channels"), [("RGBA", 3), ("LA", None), ("P", 1), ("RGB", 1)])
def test_transparent_pixels_are_white(mode: str, channels: int | None, folder: Path) -> None:
    for path in folder.rglob("*.png"):
        save_drawing(path, mode)
    source = ImageFolder(folder, channels=channels)
    images = checked(source).train.images
    assert source.image_shape[2] == (channels or 1)
    assert (images[0, :, [1, 5]] == 0).all() and (images[0, :, [0, 2, 3, 4, 6, 7]] == 255).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_white_drawings_on_a_transparent_ground_are_refused(mode: str, folder: Path) -> None:
    path = folder / "train" / "class-2" / "white.png"
    save_drawing(path, mode, 255)
    with data_error(path):
        ImageFolder(folder, channels=1).load()
    Image.fromarray(np.zeros((8, 8, 4), np.uint8)).save(path)  # an empty drawing
    assert len(ImageFolder(folder, channels=1).load().train) == 61


@pytest.mark.parametrize(("ending", "most"), [("bmp", 0), ("jpg", 8), ("webp", 8)])  # JPEG and WebP are lossy
def test_bmp_jpeg_and_webp_are_read_and_hidden_files_are_ignored(ending: str, most: int, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "mine", SMALL, ending)
    (folder / "train" / ".DS_Store").touch()
    (folder / "train" / "class-3" / ".thumbnails").mkdir()
    data: Any = ImageFolder(folder).load()
    difference = data.train.images[..., 0].astype(int) - SMALL.train_images
    assert np.abs(difference).mean() <= most
