"""Users' pictures as a run sees them: with the command, and one at a time."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pictures

from cupynet import load
from cupynet.commands.predict import main, preprocessed
from cupynet.config.load_model import LoadedRun
from cupynet.data import CIFAR10, KMNIST, MNIST, FashionMNIST, Source, Synthetic, pictures
from cupynet.data.centering import centered_as_mnist
from cupynet.data.pictures import picture
from tests.support.commands import Call
from tests.support.refusals import data_error
from tests.support.resumed_runs import trained
from tests.support.user_files import deny

DIGITS = ["data=synthetic", "data.train=2000", "data.test=200", "batch_size=32", "epochs=1", "workers=1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has learned digits well enough."""
    folder = tmp_path_factory.mktemp("digits")
    quick = ["model=simple_cnn", "optimizer=adam", "callbacks.progress.style=lines"]
    trained(folder, *DIGITS, *quick)
    return folder


@pytest.fixture(scope="module")
def digits() -> Any:
    return Synthetic(2000, 200).load().test


def preprocessing(finished: Path, invert: str = "auto") -> Callable[[Path], Any]:
    trained = LoadedRun(finished)
    return partial(preprocessed, shape=trained.model().input.shape, source=trained.source, invert=invert)


def page(digit: Any, random: np.random.Generator, kind: str) -> Any:
    """Return a page with an enlarged digit (28, 28) somewhere on it."""
    size = int(random.integers(100, 300))
    high, wide = (size + int(random.integers(0, 150)) for _ in range(2))
    large = Pictures.fromarray(digit).resize((size, size), Pictures.Resampling.BICUBIC)
    sheet = np.zeros((high, wide), np.uint8)
    top, left = int(random.integers(0, high - size + 1)), int(random.integers(0, wide - size + 1))
    sheet[top : top + size, left : left + size] = np.asarray(large)
    if kind == "blackboard":
        return Pictures.fromarray(sheet)
    pencil = 215 - sheet * 0.6 + random.normal(0, 4, sheet.shape)  # on grainy gray paper
    return Pictures.fromarray(pencil.clip(0, 255).astype(np.uint8))


def clean(digit: Any) -> Any:
    """Return a synthetic digit without its noise, which a pen does not have."""
    return np.where(digit > 80, digit, 0).astype(np.uint8)


@pytest.mark.parametrize("kind", ["blackboard", "pencil"])
def test_digits_drawn_large_are_recognized_as_well(finished: Path, digits: Any, kind: str, tmp_path: Path) -> None:
    model, sees, random = load(finished), preprocessing(finished), np.random.default_rng(5)
    plain = [clean(each[:, :, 0]) for each in digits.images[:40]]
    images = []
    for each in plain:
        page(each, random, kind).save(tmp_path / "a.png")
        images.append(sees(tmp_path / "a.png"))
    expected = model.predict(np.stack([centered_as_mnist(each[:, :, None]) for each in plain])).argmax(1)
    found = model.predict(np.stack(images)).argmax(1)
    assert (found == digits.labels[:40]).mean() >= (expected == digits.labels[:40]).mean() - 0.05
    assert (found == expected).mean() >= 0.9


def test_pictures_of_digits_are_centered_as_in_mnist() -> None:
    """A bar of 40 x 10 on a large sheet becomes one of 20 x 5, centered in the image by its mass."""
    sheet = np.zeros((190, 200, 1), np.uint8)
    sheet[30:70, 150:160] = 200
    found = centered_as_mnist(sheet)[:, :, 0]
    assert found.shape == (28, 28) and found.max() == 255
    rows, columns = np.flatnonzero(found.any(axis=1)), np.flatnonzero(found.any(axis=0))
    assert (rows[0], rows[-1]) == (4, 23) and (columns[0], columns[-1]) == (12, 16)
    np.testing.assert_allclose(centered_as_mnist(found[:, :, None])[:, :, 0], found, atol=1)  # idempotent
    sheet[60:70, 110:160] = 200  # adds a foot on the left
    found = centered_as_mnist(sheet)[:, :, 0].astype(float)
    for axis in (0, 1):
        mass = found.sum(axis=1 - axis)
        assert (mass * np.arange(28)).sum() / mass.sum() == pytest.approx(14, abs=0.51)


def test_other_pictures_are_resized_as_in_an_image_folder_and_inverted_only_on_request(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(180, 256, (40, 30, 3), np.uint8)
    pixels[10:20, 10:20] //= 4
    Pictures.fromarray(pixels).save(tmp_path / "a.png")
    found = preprocessed(tmp_path / "a.png", (20, 25, 3), None, "auto")
    expected = pictures.resized(picture(tmp_path / "a.png", 3), 20, 25)
    np.testing.assert_array_equal(found, expected)
    turned = preprocessed(tmp_path / "a.png", (20, 25, 3), None, "yes")
    assert abs(turned.astype(int) + expected - 255).max() <= 2  # rounded twice


@pytest.mark.parametrize(
    ("kind", "centered", "inverted"),
    [(MNIST, True, True), (FashionMNIST, False, True), (KMNIST, False, True), (CIFAR10, False, False)],
)
def test_only_digits_are_centered_and_only_pictures_for_sets_on_black_are_inverted(
    kind: type[Source], centered: bool, inverted: bool, tmp_path: Path
) -> None:
    source, path = kind(), tmp_path / "a.png"
    shape = source.image_shape
    sheet = np.full((64, 64), 255, np.uint8)
    sheet[:20, :10] = 0
    Pictures.fromarray(sheet).save(path)
    found = preprocessed(path, shape, source, "auto")
    plain = pictures.resized(picture(path, shape[2]), *shape[:2])
    assert np.array_equal(found, 255 - plain if inverted else plain) is not centered
    assert (found[0, 0] > 128).all() == (inverted and not centered)


def test_dark_drawings_of_digits_are_inverted_unless_invert_is_no(finished: Path, tmp_path: Path) -> None:
    sheet = np.full((28, 28), 255, np.uint8)
    sheet[2:10, 2:5] = 0
    path = tmp_path / "a.png"
    Pictures.fromarray(sheet).save(path)
    np.testing.assert_array_equal(preprocessing(finished)(path)[:, :, 0], 255 - sheet)
    np.testing.assert_array_equal(preprocessing(finished, invert="no")(path)[:, :, 0], sheet)


def test_a_blank_picture_is_refused_for_a_run_on_digits(finished: Path, tmp_path: Path) -> None:
    Pictures.fromarray(np.zeros((5, 5), np.uint8)).save(tmp_path / "a.png")
    with data_error("a.png"):
        preprocessing(finished)(tmp_path / "a.png")


@pytest.fixture
def scans(digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder of three good pictures and a text file in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("scans").mkdir()
    random = np.random.default_rng(2)
    for number, each in enumerate(digits.images[:3]):
        page(clean(each[:, :, 0]), random, "pencil").save(f"scans/{number}.png")
    Path("scans/notes.txt").write_text("no picture")


@pytest.mark.usefixtures("scans")
def test_the_pictures_of_a_folder_are_classified_in_the_order_of_their_names(finished: Path, call: Call) -> None:
    found = call(main, finished, "scans")
    lines = found.out.splitlines()
    assert (found.code, found.err) == (0, "") and all(line.count(" %") == 3 for line in lines)
    assert [line.split("  ")[0] for line in lines] == [f"scans/{number}.png" for number in range(3)]


@pytest.mark.usefixtures("scans")
def test_predict_uses_layers_of_the_user_only_with_trusted_modules(tmp_path: Path, call: Call) -> None:
    own = "model.layers.drop1._target_=tests.guides.extending.scale.Scale"
    trained(tmp_path / "run", *DIGITS, "data.train=100", "model=mlp", own, "trusted_modules=[tests]")
    found = call(main, tmp_path / "run", "scans")
    assert (found.code, found.out) == (2, "") and "trusted_modules" in found.error
    found = call(main, tmp_path / "run", "scans", "--trusted-modules", "tests")
    assert found.code == 0 and len(found.out.splitlines()) == 3


@pytest.mark.usefixtures("scans")
def test_predict_names_an_unreadable_folder(finished: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    deny(Path("scans"), monkeypatch)
    found = call(main, finished, "scans")
    assert found.code == 65 and "scans" in found.error


@pytest.mark.usefixtures("scans")
def test_good_pictures_are_classified_and_bad_ones_get_a_line_each_and_exit_code_65(finished: Path, call: Call) -> None:
    Path("a\x1b\n.png").write_text("text")
    Path("b.png").write_bytes(b"GIF89a" + bytes(40))
    Path("empty").mkdir()
    os.mkfifo("pipe.png")  # has no writer, and must not be waited for
    bad = ("a\x1b\n.png", "b.png", "empty", "pipe.png", "none.png")
    found = call(main, finished, *bad, "scans/1.png", "--json", "--top", "2")
    (row,) = map(json.loads, found.out.splitlines())
    assert found.code == 65 and row["file"] == "scans/1.png"
    assert row["class"] == row["top"][0]["class"] and len(row["top"]) == 2
    assert [line.split(": ")[1] for line in found.err.splitlines()] == ["a\ufffd .png", *bad[1:]]
