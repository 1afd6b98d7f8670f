"""The user's arrays in IDX and .npz files: sizes known before loading, values unchanged, files named in errors."""

import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.core.errors import DataError
from cupynet.data import IdxFiles, ImageFolder, NpzFile
from cupynet.data.sources.idx import IDX_NAMES
from tests.support.commands import run, summary_of
from tests.support.refusals import data_error, refused
from tests.support.resumed_runs import trained
from tests.support.user_files import COLORS, Parts, checked, digits, idx_bytes, idx_header, write_idx, write_npz
from tests.support.user_files import write_pictures as write_folder

SMALL = digits(60, 30)
WAYS: dict[str, Callable[[Path, Parts], Any]] = {
    "idx": lambda path, parts: IdxFiles(write_idx(path / "mine", parts)),
    "plain idx": lambda path, parts: IdxFiles(write_idx(path / "mine", parts, packed=False)),
    "npz": lambda path, parts: NpzFile(write_npz(path / "mine.npz", parts)),
    "folder": lambda path, parts: ImageFolder(write_folder(path / "mine", parts)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parts", [SMALL, COLORS], ids=["gray", "colors"])
def test_every_format_loads_the_same_images_and_labels(way: str, parts: Parts, tmp_path: Path) -> None:
    source = WAYS[way](tmp_path, parts)
    images = [each if each.ndim == 4 else each[..., None] for each in (parts.train_images, parts.test_images)]
    assert source.image_shape == images[0].shape[1:]
    assert source.classes == len(np.unique(parts.train_labels))
    assert source.expected() == {"train": len(images[0]), "test": len(images[1])}
    data = checked(source)
    assert data.name == source.name == "mine" and data.train.name == "mine-train"
    np.testing.assert_array_equal(data.train.images, images[0])
    np.testing.assert_array_equal(data.train.labels, parts.train_labels)
    np.testing.assert_array_equal(data.test.images, images[1])
    np.testing.assert_array_equal(data.test.labels, parts.test_labels)


@pytest.mark.parametrize(("way", "kind"), [("idx", IdxFiles), ("npz", NpzFile)])
def test_only_headers_and_training_labels_are_read_before_load(
    way: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images are read when training begins, after all settings have been checked."""
    read, array = list[str](), kind._array

    def watched(self: Any, part: str) -> Any:
        read.append(part)
        return array(self, part)

    monkeypatch.setattr(kind, "_array", watched)
    source = WAYS[way](tmp_path, SMALL)
    assert (source.image_shape, source.classes, source.expected()["train"]) == ((8, 8, 1), 10, 60)
    assert read == ["train_labels"]


@pytest.mark.parametrize(("way", "validation"), [("idx", 15), ("npz", 0)])
def test_a_limit_keeps_some_of_each_class_of_sorted_files(way: str, validation: int, tmp_path: Path) -> None:
    source = WAYS[way](tmp_path, SMALL)
    source.validation = validation
    whole = source.load()
    source.limit = 20
    data = source.load()
    for part, all_of_it in ((data.train, whole.train), (data.test, whole.test)):
        counts = np.bincount(part.labels, minlength=10)
        assert len(part) == 20 and counts.min() > 0 and counts.max() - counts.min() <= 2
        rows = [image.tobytes() for image in all_of_it.images]
        places = [rows.index(image.tobytes()) for image in part.images]
        assert places == sorted(places)
    if validation:
        np.testing.assert_array_equal(data.validation.images, whole.validation.images)


def only(part: str, kind: Any, folder: Path, **options: Any) -> Any:
    """Make a source of images to train on, or of images to test on."""
    images, labels = (getattr(SMALL, f"{part}_{what}") for what in ("images", "labels"))
    (folder / IDX_NAMES[f"{part}_images"]).write_bytes(idx_bytes(images))
    (folder / IDX_NAMES[f"{part}_labels"]).write_bytes(idx_bytes(labels))
    np.savez(folder / "a.npz", **{f"x_{part}": images, f"y_{part}": labels})
    return kind(folder if kind is IdxFiles else folder / "a.npz", **options)


@pytest.mark.parametrize("kind", [IdxFiles, NpzFile])
def test_test_images_alone_are_enough_for_an_evaluation(kind: Any, tmp_path: Path) -> None:
    source = only("test", kind, tmp_path, classes=10)
    data = checked(source)
    assert (len(data.train), len(data.test), data.test.classes) == (0, 30, 10)
    source.check(trains=False)
    with refused(""):
        source.check()


@pytest.mark.parametrize("kind", [IdxFiles, NpzFile])
def test_training_images_alone_are_enough_if_some_are_held_out(kind: Any, tmp_path: Path) -> None:
    with refused("validation", "0"):
        only("train", kind, tmp_path).check()
    source = only("train", kind, tmp_path, validation=0.1)
    source.check()
    assert (len(checked(source).train), len(source.load().validation)) == (54, 6)


def test_each_idx_file_can_have_its_own_path(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "mine", SMALL)
    paths: dict[str, Any] = {name: tmp_path / f"{name}.idx" for name in IDX_NAMES}
    for name, path in paths.items():
        (folder / f"{IDX_NAMES[name]}.gz").rename(path)
    np.testing.assert_array_equal(IdxFiles(**paths).load().test.labels, SMALL.test_labels)
    names: dict[str, Any] = {name: path.name for name, path in paths.items()}
    assert IdxFiles(tmp_path, **names).classes == 10


WRONG_IDX = {
    "no IDX": ("train_images", b"some text, not images"),
    "floats": ("train_images", idx_header(60, 8, 8, kind=13) + bytes(4)),
    "a byte too few": ("train_images", idx_header(60, 8, 8) + bytes(60 * 64 - 1)),
    "a forged number": ("train_images", idx_header(1 << 30, 8, 8) + bytes(9)),
    "packed, cut": ("train_images", gzip.compress(idx_bytes(SMALL.train_images))[:90]),
    "packed, forged": ("test_images", gzip.compress(idx_header(30, 65535, 65535) + bytes(99))),
    "another shape": ("test_images", idx_header(30, 8, 9) + bytes(30 * 72)),
    "a label too few": ("test_labels", idx_header(29) + bytes(29)),
    "an unknown class": ("test_labels", idx_header(30) + bytes([77] * 30)),
}
DISAGREE = ("another shape", "a label too few", "an unknown class")  # two files disagree, so the error names the part
FORGED = ("a byte too few", "a forged number", "packed, forged")


@pytest.mark.parametrize("name", WRONG_IDX)
def test_damaged_idx_files_are_refused_by_path_and_left_alone(tmp_path: Path, name: str) -> None:
    part, content = WRONG_IDX[name]
    path = write_idx(tmp_path / "mine", SMALL) / f"{IDX_NAMES[part]}.gz"
    path.write_bytes(content)
    with data_error("'mine-test'" if name in DISAGREE else path):
        source = IdxFiles(tmp_path / "mine")
        assert name not in FORGED, "the constructor accepted a forged header"
        checked(source)
    assert path.read_bytes() == content


def test_the_number_of_classes_can_be_given_but_not_too_low(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "mine", SMALL)
    assert IdxFiles(folder, classes=40).load().train.classes == 40
    with data_error(folder, "0 .. 9"):
        IdxFiles(folder, classes=3).load()


def test_npz_arrays_may_have_other_keys_and_labels_in_a_column(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, a=SMALL[0], b=SMALL[1].astype(np.int32)[:, None], c=SMALL[2], d=SMALL[3].astype(np.int64))
    np.testing.assert_array_equal(NpzFile(path, "a", "b", "c", "d").load().train.labels, SMALL.train_labels)
    with data_error(path, "a, b, c, d", "data.train_images"):
        NpzFile(path)


WRONG_ARRAYS: dict[str, dict[str, Any]] = {
    "fractions": {"x_train": SMALL[0].astype(np.float32) / 255},
    "a label too few": {"y_train": SMALL[1][:-1]},
    "another shape": {"x_test": SMALL[2][:, :7]},
    "an unknown class": {"y_test": SMALL[3] + 5},
    "fractional labels": {"y_train": SMALL[1] + 0.5},
    "an enormous label": {"y_train": np.full(60, 2**64 - 1, np.uint64)},
    "more classes than images": {"y_train": np.arange(60) + 1},
    "nothing to train on": {"x_train": SMALL[0][:0], "y_train": SMALL[1][:0]},
    "no pixels": {"x_train": SMALL[0][:, :0], "x_test": SMALL[2][:, :0]},
    "objects": {"x_train": np.array([print], object)},
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_npz_files_with_wrong_arrays_are_refused_by_path(tmp_path: Path, name: str) -> None:
    arrays = dict(zip(("x_train", "y_train", "x_test", "y_test"), SMALL, strict=True)) | WRONG_ARRAYS[name]
    np.savez(tmp_path / "a.npz", **arrays)
    with data_error("'a-test'" if name == "another shape" else tmp_path / "a.npz"):
        checked(NpzFile(tmp_path / "a.npz"))


def test_class_probabilities_as_labels_are_refused(tmp_path: Path) -> None:
    probabilities = np.eye(10, dtype=np.float32)[SMALL.train_labels]
    path = write_npz(tmp_path / "a.npz", SMALL._replace(train_labels=probabilities))
    with data_error(path):
        NpzFile(path, classes=10)


BROKEN: dict[str, Callable[[Path], object]] = {
    "no archive": lambda path: path.write_bytes(b"PK\x03\x04broken"),
    "a byte changed": lambda path: path.write_bytes(path.read_bytes()[:600] + b"?" + path.read_bytes()[601:]),
    "a member is no array": lambda path: zipfile.ZipFile(path, "w").writestr("x_train.npy", b"no header of NumPy"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_npz_files_are_refused_by_path(name: str, tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", SMALL)
    BROKEN[name](path)
    with data_error(path):
        NpzFile(path).load()


def test_a_missing_npz_file_is_named_once_and_not_called_unreadable(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        NpzFile(tmp_path / "a.npz")
    assert str(caught.value).count("a.npz") == 1 and "savez" not in str(caught.value)


@pytest.mark.parametrize("forged", [b"(60, 32, 16), }", b"(60, 99999999, 99999999), }"])
def test_an_npz_header_that_claims_less_or_more_than_the_file_has_is_refused(forged: bytes, tmp_path: Path) -> None:
    path, labels = tmp_path / "a.npz", np.arange(60) % 10
    images = np.zeros((60, 32, 32), np.uint8)
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    whole, header = path.read_bytes(), b"(60, 32, 32), }".ljust(len(forged))
    path.write_bytes(whole.replace(header, forged.ljust(len(header))))
    with data_error(path):
        NpzFile(path)


def test_the_home_folder_of_an_unknown_user_is_refused() -> None:
    with data_error("~no-such-user"):
        NpzFile("~no-such-user/a.npz")


def test_real_digits_are_learned_and_evaluated_with_the_normalization_of_the_run(tmp_path: Path) -> None:
    path, folder = write_npz(tmp_path / "digits.npz", digits()), tmp_path / "run"
    layers = ["model.layers.conv1.kernel_size=3", "model.layers.conv2.kernel_size=[2,3]"]
    layers += ["model.layers.conv2.padding=[0,1]"]
    layers += ["model.layers.conv1.activation=relu", "model.layers.conv2.activation=relu"]
    small = ["workers=1", "epochs=20", "batch_size=32", "optimizer.learning_rate.peak=0.05"]
    trained(folder, "data=npz", f"data.file={path}", *layers, *small, "data.normalize=auto")
    summary = summary_of(folder)
    assert summary["test_accuracy"] > 0.93  # on writers who are not in the training set
    loss = f"loss {summary['test_loss']!r}"
    # evaluation uses the run's mean, because the mean of other images would differ
    assert loss in run(tmp_path, str(folder), "data.validation=400", command="evaluate")[0]
    assert loss not in run(tmp_path, str(folder), "data.normalize=null", command="evaluate")[0]
