"""User files: shapes known before loading, contents unchanged, and errors of one line that name the file."""

from __future__ import annotations

import gzip
import hashlib
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cupynet.core.errors import ConfigError, DataError
from cupynet.data import Folder, Idx, Npz
from cupynet.data.sources import image_folder
from cupynet.data.sources.idx import IDX_NAMES
from cupynet.data.sources.user_files import UserFiles
from tests.support.user_files import Parts, digits, idx_bytes, write_idx, write_npz, write_pictures

SMALL = digits(60, 30)
COLOURS = Parts(
    np.random.default_rng(1).integers(0, 256, (12, 5, 7, 3), np.uint8),
    np.arange(12, dtype=np.uint8) // 4,
    np.random.default_rng(2).integers(0, 256, (6, 5, 7, 3), np.uint8),
    np.arange(6, dtype=np.uint8) // 2,
)
WAYS: dict[str, Callable[[Path, Parts], UserFiles]] = {
    "idx": lambda path, parts: Idx(write_idx(path / "mine", parts)),
    "plain idx": lambda path, parts: Idx(write_idx(path / "mine", parts, packed=False)),
    "npz": lambda path, parts: Npz(write_npz(path / "mine.npz", parts)),
    "folder": lambda path, parts: Folder(write_pictures(path / "mine", parts)),
}
every_way = pytest.mark.parametrize("way", WAYS)


def checked(source: Any) -> Any:
    """Load the data as a run does."""
    data = source.load()
    data.check(source.image_shape, source.classes)
    return data


@every_way
@pytest.mark.parametrize("parts", [SMALL, COLOURS], ids=["grey", "colours"])
def test_every_format_loads_the_same_images_and_labels(way: str, parts: Parts, tmp_path: Path) -> None:
    source = WAYS[way](tmp_path, parts)
    shape = parts.train_images.shape[1:]
    assert source.image_shape == (*shape[:2], shape[2] if len(shape) == 3 else 1)
    assert source.classes == len(np.unique(parts.train_labels))
    assert source.expected() == {"train": len(parts.train_labels), "test": len(parts.test_labels)}
    data = source.load()
    data.check(source.image_shape, source.classes)
    assert data.name == source.name == "mine" and data.train.name == "mine-train"
    for dataset, images, labels in ((data.train, *parts[:2]), (data.test, *parts[2:])):
        np.testing.assert_array_equal(dataset.images, images.reshape(len(images), *source.image_shape))
        np.testing.assert_array_equal(dataset.labels, labels)


def test_sizes_are_known_before_pictures_are_decoded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(image_folder, "picture", lambda *_, **__: pytest.fail("it decodes a picture"))
    source = WAYS["folder"](tmp_path, SMALL)
    assert (source.image_shape, source.classes) == ((8, 8, 1), 10)


@pytest.mark.parametrize("way", ["idx", "plain idx", "npz"])
def test_only_headers_and_training_labels_are_read_before_load(way: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The images may not fit in memory, which is checked before they are loaded."""
    kind: Any = Npz if way == "npz" else Idx
    read, array = list[str](), kind._array
    monkeypatch.setattr(kind, "_array", lambda self, part: read.append(part) or array(self, part))
    source = WAYS[way](tmp_path, SMALL)
    assert (source.image_shape, source.classes, source.expected()["train"]) == ((8, 8, 1), 10, 60)
    assert read == ["train_labels"]
    source.load()
    assert len(read) == 5


@every_way
def test_validation_and_limit(way: str, tmp_path: Path) -> None:
    source = WAYS[way](tmp_path, SMALL)
    source.validation, source.limit = 20, 7
    data = source.load()
    assert data.validation is not None and (len(data.train), len(data.validation), len(data.test)) == (7, 20, 7)
    source = WAYS[way](tmp_path / "again", SMALL)
    source.validation = 60
    for use in (source.check, source.load):
        with pytest.raises(ConfigError, match="validation=60: must be below the 60 training images"):
            use()


def given(source: Any) -> dict[str, Any]:
    return {"file": source.file} if isinstance(source, Npz) else {"folder": source.folder}


@pytest.mark.parametrize(
    ("kind", "what"), [(Idx, "folder"), (Npz, "file"), (Folder, "folder")], ids=["idx", "npz", "folder"]
)
def test_the_path_is_required(kind: Any, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind()
    assert (caught.value.setting, caught.value.value) == (what, "null")


# IDX ----------------------------------------------------------------------------------------------------------------


def test_four_paths_and_digests(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "mine", SMALL)
    paths = {name: tmp_path / f"{name}.idx" for name in IDX_NAMES}
    for name, path in paths.items():
        (folder / f"{IDX_NAMES[name]}.gz").rename(path)
    raw = hashlib.sha256(idx_bytes(SMALL.train_images)).hexdigest()
    packed = hashlib.sha256(paths["test_labels"].read_bytes()).hexdigest()
    source = Idx(**paths, sha256={"train_images": raw.upper(), "test_labels": packed, "test_images": None})
    np.testing.assert_array_equal(source.load().test.labels, SMALL.test_labels)
    wrong = Idx(**paths, sha256={"test_labels": raw})
    with pytest.raises(DataError, match=r"test_labels.idx: expected contents of sha256 .*, found other contents"):
        wrong.load()
    with pytest.raises(ConfigError, match="^sha256={images:.*: must map some of train_images, .* to digests"):
        Idx(folder, sha256={"images": raw})
    with pytest.raises(ConfigError, match="^sha256=abc: must map some of train_images"):
        Idx(folder, sha256="abc")  # type: ignore[arg-type]
    named = Idx(tmp_path, **{name: path.name for name, path in paths.items()})
    assert named.classes == 10


def a_header_of(*axes: int, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, len(axes)]) + b"".join(axis.to_bytes(4, "big") for axis in axes)


@pytest.mark.parametrize(
    ("part", "content", "expected"),
    [
        ("train_images", b"some text, not images", "expected an IDX file of .*, found b'some text"),
        ("train_images", b"<html>", "found b'<html>'"),
        ("train_images", b"", "found b''"),
        ("train_images", a_header_of(60), r"expected images \(S, H, W\) or \(S, H, W, C\), found \(60,\)"),
        (
            "train_images",
            a_header_of(60, 8, 8, kind=13) + bytes(4),
            "an IDX file of unsigned bytes",
        ),
        (
            "train_images",
            a_header_of(60, 8, 8) + bytes(60 * 64 - 1),
            "an IDX file.* Found: 3839",
        ),
        (
            "train_images",
            a_header_of(1 << 30, 8, 8) + bytes(9),
            "an IDX file.* 68719476736. Found: 9",
        ),
        ("train_images", gzip.compress(a_header_of(60, 8, 8) + bytes(9), mtime=0), "expected an IDX file.* Found: 9"),
        ("train_labels", a_header_of(59) + bytes(59), r"labels must be \(60,\), one per image, got \(59,\)"),
        ("train_images", gzip.compress(idx_bytes(SMALL.train_images), mtime=0)[:90], "complete gzip data"),
        ("test_images", a_header_of(30, 8, 9) + bytes(30 * 72), r"declared images of \(8, 8, 1\) .* of \(8, 9, 1\)"),
        ("test_labels", a_header_of(29) + bytes(29), r"labels must be \(30,\), one per image, got \(29,\)"),
        ("test_labels", a_header_of(30) + bytes([77] * 30), "labels must be in 0 .. 9 for 10 classes, got 77 .. 77"),
        ("train_labels", a_header_of(60, 2) + bytes(120), r"labels must be .*, got \(60, 2\)"),
        ("train_labels", a_header_of(30, 2) + bytes(60), r"labels must be .*, got \(30, 2\)"),
        ("test_labels", a_header_of(2, 15) + bytes(30), r"labels must be .*, got \(2, 15\)"),
        ("train_images", a_header_of(60, 65535, 65535) + bytes(99), "Found: 99"),
        ("test_images", gzip.compress(a_header_of(30, 65535, 65535) + bytes(99), mtime=0), "Found: 99"),
        ("train_images", a_header_of(60, 3, 20, 30) + bytes(60 * 1800), r"x.transpose\(0, 2, 3, 1\)"),
    ],
)
def test_wrong_idx_files(tmp_path: Path, part: str, content: bytes, expected: str) -> None:
    path = write_idx(tmp_path / "mine", SMALL) / f"{IDX_NAMES[part]}.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=expected) as caught:
        checked(Idx(tmp_path / "mine"))
    text = str(caught.value)
    assert "mine" in text and "\n" not in text and "download it" not in text and "delete" not in text
    assert path.read_bytes() == content


def test_an_idx_file_that_is_missing(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "mine", SMALL)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte.gz: cannot be read .No such file"):
        Idx(folder)


@pytest.mark.parametrize("classes", [3, 10, 40])
def test_the_number_of_classes_can_be_given(tmp_path: Path, classes: int) -> None:
    folder = write_idx(tmp_path / "mine", SMALL)
    source = Idx(folder, classes=classes)
    assert source.classes == classes
    if classes > 9:
        assert source.load().train.classes == classes
    else:
        with pytest.raises(DataError, match="mine: .* labels must be in 0 .. 2 for 3 classes, got 0 .. 9"):
            source.load()


# npz ----------------------------------------------------------------------------------------------------------------


def test_other_keys_and_labels_as_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, a=SMALL[0], b=SMALL[1].astype(np.int32)[:, None], c=SMALL[2], d=SMALL[3].astype(np.int64))
    source = Npz(path, "a", "b", "c", "d", sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    np.testing.assert_array_equal(source.load().train.labels, SMALL.train_labels)
    with pytest.raises(
        DataError, match=r"a.npz: expected an array 'x_train', found a, b, c, d: name the key in data.train_images"
    ):
        Npz(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert Npz(path, "a", "b", "c", "d", sha256=digest.upper()).classes == 10
    with pytest.raises(DataError, match=r"a.npz: expected contents of SHA-256 0{64}, found other contents"):
        Npz(path, sha256="0" * 64)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"x_train": SMALL[0].astype(np.float32) / 255}, "images must be .* integers.*multiply by 255"),
        ({"x_train": SMALL[0].reshape(60, 64)}, r"a.npz: expected images \(S, H, W\) or .*found \(60, 64\)"),
        ({"y_train": SMALL[1][:-1]}, r"labels must be \(60,\), one per image, got \(59,\)"),
        ({"y_train": np.eye(10)[SMALL[1]]}, r"labels must be .* integers, got \(60, 10\) of float64"),
        ({"y_train": SMALL[1].astype(float)}, r"labels must be .* integers, got \(60,\) of float64"),
        ({"y_train": np.array(["a"] * 60)}, r"labels must be .* integers, got \(60,\) of <U1"),
        ({"x_test": SMALL[2][:, :7]}, r"declared images of \(8, 8, 1\)"),
        ({"y_test": SMALL[3] + 5}, "labels must be in 0 .. 9 for 10 classes, got 5 .. 14"),
        ({"y_train": SMALL[1].reshape(30, 2)}, r"labels must be .*, got \(30, 2\)"),
        ({"y_test": SMALL[3].reshape(15, 2)}, r"labels must be .*, got \(15, 2\)"),
        ({"x_train": np.zeros((60, 3, 28, 28), np.uint8)}, r"x\.transpose\(0, 2, 3, 1\)"),
        ({"x_test": np.zeros((30, 1, 28, 20), np.uint8)}, r"x\.transpose\(0, 2, 3, 1\)"),
    ],
)
def test_wrong_arrays(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    arrays = dict(zip(("x_train", "y_train", "x_test", "y_test"), SMALL, strict=True)) | change
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=expected) as caught:
        checked(Npz(tmp_path / "a.npz"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"train_labels": SMALL[1].astype(int) - 1}, "found -1 .. 8 of 60 images: renumber them"),
        (
            {"train_labels": np.full(60, 2**64 - 1, np.uint64)},
            f"found 0 .. {2**64 - 1} of 60 images: renumber them, or set data.classes (in",
        ),
        ({"train_labels": np.arange(60) + 1}, "found 0 .. 60 of 60 images: renumber them, or"),
        (
            {"train_images": SMALL[0][:0], "train_labels": SMALL[1][:0]},
            "found 0 .. 0 of 0 images",
        ),
        (
            {"test_images": SMALL[2][:0], "test_labels": SMALL[3][:0]},
            "to train and to test on, found 60 and 0 of (8, 8, 1)",
        ),
        (
            {"train_images": SMALL[0][:, :0], "test_images": SMALL[2][:, :0]},
            "found 60 and 30 of (0, 8, 1)",
        ),
    ],
)
def test_unusable_shapes_and_classes_are_refused(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    """The error comes before any image is read."""
    arrays = dict(zip(IDX_NAMES, SMALL, strict=True)) | change
    np.savez(tmp_path / "a.npz", **arrays)
    sources: list[tuple[Callable[[], Any], str]] = [(lambda: Npz(tmp_path / "a.npz", *IDX_NAMES), "a.npz")]
    if all(array.dtype == np.uint8 for array in arrays.values()):
        folder = write_idx(tmp_path / "mine", Parts(*arrays.values()))
        sources.append((lambda: Idx(folder), "mine"))
    for source, where in sources:
        with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path))}/{where}: ") as caught:
            source()
        assert line in str(caught.value) and "\n" not in str(caught.value)


def test_a_forged_size_is_refused_before_memory_for_it_is_counted(tmp_path: Path) -> None:
    """With a directory that claims the size of the forged header."""
    path = tmp_path / "a.npz"
    small = SMALL[0][:, :1, :1]
    np.savez(path, x_train=small, y_train=SMALL[1], x_test=small, y_test=SMALL[3])
    raw, header = path.read_bytes(), b"(60, 1, 1), }"
    claimed = 60 * 50_000 * 50_000
    forged = raw.replace(header + b" " * 8, b"(60, 50000, 50000), }".ljust(21), 1)
    at = forged.index(b"PK\x01\x02")
    forged = forged[: at + 24] + struct.pack("<I", 128 + claimed & 0xFFFFFFFF) + forged[at + 28 :]
    path.write_bytes(forged)
    with pytest.raises(DataError, match=r"a\.npz: .*directory claims"):
        Npz(path)


@pytest.mark.parametrize("way", ["idx", "npz"])
@pytest.mark.parametrize("validation", [0, 15])
def test_a_limit_keeps_some_of_each_class_of_sorted_files(way: str, validation: int, tmp_path: Path) -> None:
    whole = WAYS[way](tmp_path / "all", SMALL)
    whole.validation = validation
    source = WAYS[way](tmp_path, SMALL)
    source.limit, source.validation = 20, validation
    data, every = source.load(), whole.load()
    for part, all_of_it in ((data.train, every.train), (data.test, every.test)):
        counts = np.bincount(part.labels, minlength=10)  # type: ignore[union-attr]
        assert len(part) == 20 and counts.min() > 0 and counts.max() - counts.min() <= 2
        rows = [each.tobytes() for each in all_of_it.images]  # type: ignore[union-attr]
        places = [rows.index(each.tobytes()) for each in part.images]  # type: ignore[union-attr]
        assert places == sorted(places), "in their order"
    if validation:
        np.testing.assert_array_equal(data.validation.images, every.validation.images)  # type: ignore[union-attr]
    source.limit = 60
    assert len(source.load().train) == 60 - validation and not source.changed()


def test_classes_are_counted_from_the_labels(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=SMALL[0], y_train=np.arange(60), x_test=SMALL[2], y_test=SMALL[3])
    assert Npz(tmp_path / "a.npz").classes == 60
    np.savez(tmp_path / "a.npz", x_train=SMALL[0], y_train=np.arange(60) + 9, x_test=SMALL[2], y_test=SMALL[3])
    assert Npz(tmp_path / "a.npz", classes=100).load().train.classes == 100


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", SMALL)
    np.savez(path, x_train=np.array([print], object), y_train=SMALL[1], x_test=SMALL[2], y_test=SMALL[3])
    with pytest.raises(DataError, match=r"a.npz: cannot be read .*x_train: its header says \(1,\) of object"):
        Npz(path).load()


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04broken"])
def test_files_that_are_not_npz_archives_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"a.npz: cannot be read as an .npz file \(.*\): write it with np.savez"):
        Npz(tmp_path / "a.npz")


def test_a_damaged_archive(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", SMALL)
    raw = bytearray(path.read_bytes())
    raw[600] ^= 255
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"a.npz: "):
        Npz(path).load()
    with pytest.raises(DataError, match=r"none.npz: cannot be read as an .npz file \(.*No such file"):
        Npz(tmp_path / "none.npz")


def test_a_member_that_is_no_array(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x_train=SMALL[0], y_train=SMALL[1], x_test=SMALL[2])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("y_test.npy", b"text, and no header of NumPy")
    with pytest.raises(DataError, match=r"a.npz: cannot be read as an .npz file"):
        Npz(path)


def test_too_little_memory_is_not_reported_as_a_damaged_archive(tmp_path: Path, monkeypatch: Any) -> None:
    def read_array(*_: Any, **__: Any) -> None:
        raise MemoryError

    source = Npz(write_npz(tmp_path / "a.npz", SMALL))
    assert source.classes == 10
    monkeypatch.setattr(np.lib.format, "read_array", read_array)
    with pytest.raises(MemoryError):
        source.load()


@pytest.mark.parametrize(
    ("make", "name"), [(Npz, "sha256"), (lambda sha256: Idx(sha256={"test_labels": sha256}), r"sha256\.test_labels")]
)
@pytest.mark.parametrize("wrong", [5, "abc", "g" * 64, "a" * 65, "", ["a"]])
def test_a_digest_is_64_digits(make: Any, name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=.*: must be a SHA-256, 64 hexadecimal digits, or null$"):
        make(sha256=wrong)


# folders of pictures ------------------------------------------------------------------------------------------------


def pictures(tmp_path: Path, ending: str = "png") -> Path:
    return write_pictures(tmp_path / "mine", SMALL, ending)


def test_names_of_classes_are_kept(tmp_path: Path) -> None:
    assert Folder(pictures(tmp_path)).class_names == tuple(f"class-{digit}" for digit in range(10))


@pytest.mark.parametrize("validation", [0, 7])
def test_a_limited_image_folder_has_images_of_each_class_and_reads_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validation: int
) -> None:
    folder, read = pictures(tmp_path), list[Path]()
    decoded = image_folder.picture
    monkeypatch.setattr(image_folder, "picture", lambda path, *a, **k: (read.append(path), decoded(path, *a, **k))[1])
    source = Folder(folder, limit=20, validation=validation)
    data = source.load()
    assert len(data.train) == len(data.test) == 20
    assert set(data.test.labels.tolist()) == set(range(10))
    assert len(set(data.train.labels.tolist())) >= 8  # type: ignore[union-attr]
    train = sum(path.parts[-3] == "train" for path in read)
    assert len(read) - train == 20 and train == (20 if not validation else len(SMALL.train_labels))


def test_jpeg_is_read_and_hidden_files_are_ignored(tmp_path: Path) -> None:
    folder = pictures(tmp_path, "jpg")
    (folder / "train" / ".DS_Store").touch()
    (folder / "train" / "class-3" / ".thumbnails").mkdir()
    data = Folder(folder).load()
    difference = data.train.images[..., 0].astype(int) - SMALL.train_images  # type: ignore[union-attr]
    assert 0 < np.abs(difference).mean() < 8  # JPEG forgets a little


def test_another_size_and_other_channels(tmp_path: Path) -> None:
    folder = pictures(tmp_path)
    source = Folder(folder, size=[4, 16], channels=3)
    assert source.image_shape == (4, 16, 3)
    images: Any = source.load().train.images  # type: ignore[union-attr]
    np.testing.assert_array_equal(images[..., 0], images[..., 2])
    flat = Folder(write_pictures(tmp_path / "flat", Parts(*[a * 0 + 9 for a in SMALL])), size=[3, 3]).load()
    assert (flat.train.images == 9).all()  # type: ignore[union-attr]
    grey = Folder(write_pictures(tmp_path / "colours", COLOURS), channels=1)
    assert grey.image_shape == (5, 7, 1) and grey.load().train.image_shape == (5, 7, 1)


def of_another_size(folder: Path) -> Path:
    path = folder / "test" / "class-7" / "00029.png"
    Image.fromarray(np.zeros((8, 9), np.uint8)).save(path)
    return path


def text(folder: Path) -> Path:
    path = folder / "train" / "class-2" / "notes.txt"
    path.write_text("these are twos")
    return path


def text_called_png(folder: Path) -> Path:
    path = folder / "train" / "class-2" / "notes.png"
    path.write_text("these are twos")
    return path


def first_of_all(folder: Path) -> Path:
    path = folder / "train" / "class-0" / "00000.png"
    path.write_bytes(b"")
    return path


def cut(folder: Path) -> Path:
    path = folder / "train" / "class-2" / "cut.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:70])
    return path


def unfolding(folder: Path) -> Path:
    path = folder / "train" / "class-2" / "bomb.png"
    Image.new("1", (15_000, 15_000)).save(path)
    return path


def empty(folder: Path) -> Path:
    (folder / "train" / "none").mkdir()
    return folder / "train" / "none"


def unknown(folder: Path) -> Path:
    (folder / "test" / "class-2").rename(folder / "test" / "two")
    return folder / "test" / "two"


def loose(folder: Path) -> Path:
    (folder / "train" / "readme.md").touch()
    return folder / "train" / "readme.md"


def nothing_to_test_on(folder: Path) -> Path:
    (folder / "test").rename(folder / "tests")
    return folder


def sixteen_bits(folder: Path) -> Path:
    path = folder / "train" / "class-2" / "deep.png"
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(path)
    return path


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (
            of_another_size,
            r"expected 8 x 8 pixels, .*, found 8 x 9: resize all with data.size=\[8,8\] \(in Python size=\[8, 8\]\)",
        ),
        (text, "expected only .png, .jpg, .jpeg files: move it elsewhere"),
        (text_called_png, r"cannot be read as a PNG or JPEG \(cannot identify image file\)"),
        (first_of_all, r"cannot be read as a PNG or JPEG"),
        (cut, r"cannot be read as a PNG or JPEG \(.*\)"),
        (unfolding, r"cannot be read as a PNG or JPEG \(Image size"),
        (sixteen_bits, "expected 8 bits in each channel, found 16"),
        (empty, "expected pictures of a class"),
        (unknown, "expected pictures of a class of train/"),
        (loose, "expected pictures of a class"),
        (nothing_to_test_on, "expected images to train and to test on, found 60 and 0 of"),
    ],
)
def test_wrong_pictures(tmp_path: Path, spoil: Callable[[Path], Path], expected: str) -> None:
    path = spoil(pictures(tmp_path))
    with pytest.raises(DataError, match=expected) as caught:
        Folder(tmp_path / "mine").load()
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"channels": 2}, "channels=2: must be 1"),
        ({"size": [0, 3]}, "size="),
        ({"folder": 3}, "folder=3: must be a path"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{expected}"):
        Folder(**arguments)


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pictures(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"pictures need Pillow, .*: pip install 'cupynet\[images\]'"):
        Folder(folder)


def test_a_picture_of_too_many_pixels_is_refused_without_a_warning(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "mine", SMALL)
    first = sorted((folder / "train").rglob("*.png"))[0]
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", 12_000, 12_000, 8, 0, 0, 0, 0), b"IDAT"]
    packed = [struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks]
    first.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))
    with (
        warnings.catch_warnings(record=True) as caught_warnings,
        pytest.raises(DataError, match=f"{first}: expected at most"),
    ):
        warnings.simplefilter("always")
        Folder(folder).load()
    assert caught_warnings == []


def mixed(tmp_path: Path, first: str) -> Path:
    """Write pictures in colour, one of them grey: the first of all by name, or the last to test on."""
    folder = write_pictures(tmp_path / "mine", COLOURS)
    path = sorted((folder / ("train" if first == "grey" else "test")).rglob("*.png"))[0 if first == "grey" else -1]
    Image.fromarray(np.full((5, 7), 76, np.uint8)).save(path)
    return path


@pytest.mark.parametrize("first", ["grey", "colours"])
def test_grey_pictures_among_others_are_refused_unless_channels_are_given(first: str, tmp_path: Path) -> None:
    path = mixed(tmp_path, first)
    with pytest.raises(DataError, match=r"data\.channels=1 .*data\.channels=3") as caught:
        Folder(tmp_path / "mine").load()
    assert first == "grey" or str(caught.value).startswith(f"{path}: ")
    for channels in (1, 3):
        assert checked(Folder(tmp_path / "mine", channels=channels)).train.image_shape == (5, 7, channels)


def drawing(mode: str, ink: int = 0) -> Any:
    """Two bars of ink on a transparent background."""
    alpha = np.zeros((8, 8), np.uint8)
    alpha[:, [1, 5]] = 255
    drawn = Image.fromarray(np.full((8, 8), ink, np.uint8))
    if mode == "P":
        return Image.fromarray(np.dstack([np.full((8, 8, 3), ink, np.uint8), alpha])).convert("P")
    if mode in ("L", "RGB"):  # one colour is transparent
        return Image.fromarray(np.where(alpha == 0, 255 - ink, ink).astype(np.uint8) ^ (alpha == 0)).convert(mode)
    return Image.merge(mode, [*[drawn] * (len(mode) - 1), Image.fromarray(alpha)])


def save_drawing(path: Path, mode: str, ink: int = 0) -> None:
    transparent = {"L": 254, "RGB": (254, 254, 254)}.get(mode)
    drawing(mode, ink).save(path, **({} if transparent is None else {"transparency": transparent}))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
@pytest.mark.parametrize("channels", [None, 1, 3])
def test_transparent_pixels_are_white(mode: str, channels: int | None, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "mine", SMALL)
    for path in folder.rglob("*.png"):
        save_drawing(path, mode)
    source = Folder(folder, channels=channels)
    images = checked(source).train.images
    assert source.image_shape[2] == channels or (1 if mode in ("LA", "L") else 3)
    np.testing.assert_array_equal(images[0, :, :, 0] == 0, np.asarray(drawing("LA").getchannel("A")) == 255)
    assert set(np.unique(images)) == {0, 255}
    assert source.changed() and not Folder(pictures(tmp_path / "grey")).changed()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_white_drawings_on_a_transparent_ground_are_refused(mode: str, tmp_path: Path) -> None:
    path = pictures(tmp_path) / "train" / "class-2" / "white.png"
    save_drawing(path, mode, 255)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: .*transparen"):
        Folder(tmp_path / "mine", channels=1).load()
    Image.fromarray(np.zeros((8, 8, 4), np.uint8)).save(path)  # nothing is drawn
    assert len(Folder(tmp_path / "mine", channels=1).load().train) == 61
