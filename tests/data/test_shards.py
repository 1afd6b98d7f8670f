"""Shards: memory-mapped .npy files, rejected if they are damaged or do not belong together."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.data import Dataset, Loader, ShardedFiles, Shards
from tests.support.refusals import data_error, refused
from tests.support.shards import save, write_shards

ROWS = Dataset("rows", np.arange(20 * 6, dtype=np.uint8).reshape(20, 3, 2, 1), np.arange(20) % 4, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(ROWS, tmp_path / "rows", 3, ROWS.take(np.arange(5)))
    return tmp_path / "rows"


def test_shards_are_read_as_they_were_written(folder: Path) -> None:
    shards = Shards(folder)
    assert (shards.name, len(shards), shards.counts) == ("rows", 20, (7, 7, 6))
    assert (shards.classes, shards.image_shape) == (4, (3, 2, 1))
    for number, samples in enumerate(shards.samples):
        np.testing.assert_array_equal(samples, np.load(folder / str(number) / "samples.npy"))
        dataset = shards.open(number)
        np.testing.assert_array_equal(dataset.images, ROWS.images[samples])
        np.testing.assert_array_equal(dataset.labels, ROWS.labels[samples])


def test_data_larger_than_memory_are_trained_on(tmp_path: Path) -> None:
    """A sparse file has a hundred gigabytes of zeros, of which batches read a few pages."""
    count, shape = 32_000, (1024, 1024, 3)
    save(tmp_path / "0", labels=np.zeros(count, np.int64), samples=np.arange(count))
    images = np.lib.format.open_memmap(tmp_path / "0" / "images.npy", "w+", np.uint8, (count, *shape))
    images[:2] = 7
    del images
    batch = next(Loader(Shards(tmp_path), 2, shuffle=False).epoch(0, create_backend("numpy", "half")))
    assert batch.images.shape == (2, *shape) and (batch.images == np.float16(7 / 255)).all()


def test_a_machine_needs_the_images_of_its_own_workers_only(folder: Path) -> None:
    for number in (0, 2):
        (folder / str(number) / "images.npy").unlink()
    shards = Shards(folder)
    assert shards.counts == (7, 7, 6) and len(shards.open(1)) == 7
    with data_error(folder / "0" / "images.npy"):
        shards.open(0)
    (folder / "1" / "images.npy").unlink()
    with data_error(folder):
        Shards(folder)


def test_more_than_ten_shards_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    write_shards(ROWS, tmp_path, 11)
    shards = Shards(tmp_path)
    for number in (2, 10):
        np.testing.assert_array_equal(shards.samples[number], np.load(tmp_path / str(number) / "samples.npy"))


def overwritten(name: str, array: Any) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / f"{name}.npy", array)


def exchanged(folder: Path) -> None:
    """Replace the first shard by one of another training set of the same size."""
    write_shards(Dataset("x", ROWS.images[:18], ROWS.labels[:18], 4), folder.parent / "x", 3)
    shutil.rmtree(folder / "0")
    (folder.parent / "x" / "0").rename(folder / "0")


def renumbered(folder: Path, old: int, new: int) -> None:
    for path in folder.glob("[0-9]*/samples.npy"):
        samples = np.load(path)
        np.save(path, np.where(samples == old, new, samples))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {  # the damage, and the text that the error must contain
    "no folder": (shutil.rmtree, ""),
    "a shard missing": (lambda folder: shutil.rmtree(folder / "1"), "0, 2"),
    "of another set": (exchanged, "samples.npy"),
    "a shard twice": (lambda folder: shutil.copytree(folder / "1", folder / "3"), "samples.npy"),
    "a sample missing": (lambda folder: renumbered(folder, 19, 20), "samples.npy"),
    "a negative sample": (overwritten("0/samples", np.arange(7) - 1), "samples.npy"),
    "fractional samples": (overwritten("0/samples", np.arange(7.0)), "0/samples.npy"),
    "labels with gaps": (overwritten("0/labels", np.arange(7) * 9), ""),
    "labels in columns": (overwritten("0/labels", np.zeros((7, 1), int)), "0/labels.npy"),
    "no labels": (overwritten("0/labels", np.zeros(0, int)), "0/labels.npy"),
    "16 bits": (overwritten("0/images", np.zeros((7, 3, 2, 1), np.uint16)), "0/images.npy"),
    "Fortran order": (overwritten("0/images", np.asfortranarray(ROWS.images[:7])), "0/images.npy"),
    "an image too many": (overwritten("0/images", np.zeros((8, 3, 2, 1), np.uint8)), "rows/0:"),
    "images turned": (overwritten("1/images", np.zeros((7, 2, 3, 1), np.uint8)), "rows/1:"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_shards_are_refused_by_path(name: str, folder: Path) -> None:
    damage, named = DAMAGES[name]
    damage(folder)
    with data_error(folder, named):
        shards = Shards(folder)
        for number in range(len(shards.counts)):
            shards.open(number)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("CANARY",)


def claim(path: Path, shape: str) -> None:
    """Write another shape into an array's header."""
    content = path.read_bytes()
    header = content[10 : content.index(b"\n") + 1]
    changed = header.replace(b"(7, 3, 2, 1)", shape.encode())
    path.write_bytes(content[:8] + len(changed).to_bytes(2, "little") + changed + content[10 + len(header) :])


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


NO_ARRAYS: dict[str, Callable[[Path], Any]] = {
    "objects": lambda path: np.save(path, np.array([Evil()], dtype=object), allow_pickle=True),
    "pickle": lambda path: path.write_bytes(pickle.dumps(Evil())),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "huge": lambda path: claim(path, "(7000000000000, 3, 2, 1)"),
    "negative": lambda path: claim(path, "(-7, 3, 2, 1)"),
    "deep": lambda path: claim(path, "(" * 9000),
    "code": lambda path: claim(path, "__import__('os').mkdir('CANARY')"),
    "pipe": replace_by_pipe,
}


@pytest.mark.parametrize("name", NO_ARRAYS)
def test_forged_shards_are_refused_and_run_no_code(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    NO_ARRAYS[name](folder / "0" / "images.npy")
    with data_error(folder / "0" / "images.npy"):
        Shards(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["rows"]


def test_a_sharded_source_has_its_parts(folder: Path) -> None:
    save(folder / "validation", images=ROWS.images[:3], labels=ROWS.labels[:3])
    source = ShardedFiles(folder, classes=6, normalize={"mean": [0.5], "std": [0.25]})
    data = source.load()
    data.check(source.image_shape, source.classes)
    assert isinstance(data.train, Shards) and data.validation is not None and len(data.validation) == 3
    np.testing.assert_array_equal(data.test.images, ROWS.images[:5])
    for part in (data.train.open(0), data.validation, data.test):
        assert part.classes == 6 and part.pixels.mean == (0.5,)


def test_a_sharded_source_without_folder_classes_or_labels_is_refused(folder: Path) -> None:
    with refused("folder"):
        ShardedFiles().load()
    with data_error(folder / "0"):
        Shards(folder, classes=2).open(0)
    (folder / "test" / "labels.npy").unlink()
    with data_error(folder / "test" / "labels.npy"):
        ShardedFiles(folder).load()


def test_a_relative_folder_is_found_after_a_change_of_the_current_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    shards = Shards(folder.name)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert [len(part) for part in shards.parts()] == [*shards.counts]
