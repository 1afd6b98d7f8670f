"""Shards: together they are the training set, each stands alone, and what is wrong with one is told."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupynet.data import MNIST, Data, Dataset, Shards, Synthetic, check_target, write_shards
from cupynet.data.stored import read_manifest, write_manifest
from cupynet.errors import ConfigError, DataError, OutputError


def numbered(samples: int, name: str = "numbered-train") -> Dataset:
    images = (np.arange(samples * 4) % 251).astype(np.uint8).reshape(samples, 2, 2, 1)
    return Dataset(name, images, np.arange(samples) % 10, 10)


def data(samples: int = 20, validation: int = 0) -> Data:
    return Data("numbered", numbered(samples), numbered(validation) if validation else None, numbered(5, "test"))


def digests(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@settings(max_examples=40, deadline=None)
@given(samples=st.integers(1, 60), shards=st.integers(1, 9), seed=st.integers(0, 2**64 - 1))
def test_the_shards_together_are_the_training_set(samples: int, shards: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if shards > samples:
            with pytest.raises(ConfigError, match=f"shards={shards}: must be at most {samples}, the training images"):
                write_shards(data(samples), folder, shards, seed)
            assert not list(Path(folder).iterdir())
            return
        written, whole = write_shards(data(samples), folder, shards, seed), numbered(samples)
        assert (written.name, written.classes, written.image_shape) == ("numbered", 10, (2, 2, 1))
        assert len(written) == samples and len(written.counts) == shards
        assert max(written.counts) - min(written.counts) <= 1
        seen: list[int] = []
        for number, count in enumerate(written.counts):
            shard = written.open(number)
            assert len(shard.dataset) == len(shard.samples) == count and shard.samples.dtype == np.int64
            np.testing.assert_array_equal(shard.dataset.images, whole.images[shard.samples])
            np.testing.assert_array_equal(shard.dataset.labels, whole.labels[shard.samples])
            assert shard.samples.tolist() == sorted(shard.samples.tolist())
            seen += shard.samples.tolist()
        assert sorted(seen) == list(range(samples))
        del shard, written  # the files are still mapped


def test_the_same_bytes_every_time_and_others_for_another_seed(tmp_path: Path) -> None:
    for name, seed in (("one", 7), ("two", 7), ("three", 8)):
        write_shards(data(50, validation=4), tmp_path / name, 3, seed)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert len(digests(tmp_path / "one")) == 3 * 8
    one, three = Shards(tmp_path / "one"), Shards(tmp_path / "three")
    assert one.open(0).samples.tolist() != three.open(0).samples.tolist()


def test_a_shard_is_a_random_share(tmp_path: Path) -> None:
    """Data sets are often sorted by class: each shard must be like the whole."""
    labels = np.repeat(np.arange(10), 100)
    ordered = Dataset("sorted", np.zeros((1000, 2, 2, 1), np.uint8), labels, 10)
    shards = write_shards(Data("sorted", ordered, None, numbered(5)), tmp_path, 2)
    for number in range(2):
        assert np.bincount(shards.open(number).dataset.labels).min() > 30


@pytest.mark.parametrize("validation", [0, 4])
def test_every_shard_stands_alone(validation: int, tmp_path: Path) -> None:
    """A machine that has one shard only knows all it must know of the others."""
    write_shards(data(20, validation), tmp_path / "all", 3)
    (tmp_path / "here").mkdir()
    shutil.move(tmp_path / "all" / "shard-0001-of-0003", tmp_path / "here")
    shutil.rmtree(tmp_path / "all")
    shards = Shards(tmp_path / "here")
    assert shards.counts == (7, 7, 6) and len(shards) == 20 and len(shards.open(1).dataset) == 7
    held_out, test = shards.held_out()
    np.testing.assert_array_equal(test.images, numbered(5).images)
    assert (len(held_out) if held_out is not None else 0) == validation
    with pytest.raises(
        DataError, match=r"shard-0002-of-0003/manifest.json: is missing; write the shards again, or copy"
    ):
        shards.open(2)


@pytest.mark.parametrize("file", ["images.npy", "labels.npy", "samples.npy", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_a_damaged_shard_is_told_with_its_file_and_the_way_out(file: str, harm: str, tmp_path: Path) -> None:
    write_shards(data(), tmp_path, 2)
    path = tmp_path / "shard-0001-of-0002" / file
    content = path.read_bytes()
    damaged = {"flip": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], "cut": content[:-5]}
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(damaged[harm])
    shards = Shards(tmp_path)
    assert len(shards.open(0).dataset) == 10
    with pytest.raises(DataError, match=f"^{path}: .*; write the shards again, or copy this one again") as caught:
        shards.open(1)
    assert "\n" not in str(caught.value)


def test_a_damaged_test_set_is_told(tmp_path: Path) -> None:
    write_shards(data(), tmp_path, 2)
    (tmp_path / "shard-0000-of-0002" / "test-labels.npy").write_bytes(b"no")
    with pytest.raises(DataError, match=r"test-labels.npy: expected 168 bytes, found 2; write the shards again"):
        Shards(tmp_path).held_out()


def test_shards_of_two_sets_are_never_mixed(tmp_path: Path) -> None:
    write_shards(data(), tmp_path / "a", 2, seed=1)
    write_shards(data(), tmp_path / "b", 2, seed=2)
    shutil.rmtree(tmp_path / "a" / "shard-0001-of-0002")
    shutil.copytree(tmp_path / "b" / "shard-0001-of-0002", tmp_path / "a" / "shard-0001-of-0002")
    with pytest.raises(
        DataError, match="expected a shard of the same set as shard-0000-of-0002, found one that was not"
    ):
        Shards(tmp_path / "a").open(1)
    shutil.copytree(tmp_path / "b" / "shard-0001-of-0002", tmp_path / "a" / "shard-0001-of-0003")
    with pytest.raises(DataError, match="expected shards of one set, found shard-.*-of-0002 and shard-.*-of-0003"):
        Shards(tmp_path / "a")


def test_a_shard_under_anothers_name_is_told(tmp_path: Path) -> None:
    write_shards(data(), tmp_path, 2)
    shutil.rmtree(tmp_path / "shard-0001-of-0002")
    shutil.copytree(tmp_path / "shard-0000-of-0002", tmp_path / "shard-0001-of-0002")
    with pytest.raises(DataError, match="expected this shard, found shard-0000-of-0002 under its name"):
        Shards(tmp_path).open(1)


@pytest.mark.parametrize("folder", ["nowhere", "empty", "file"])
def test_a_folder_without_shards(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=f"{folder}: expected .*; name the folder in which they were written"):
        Shards(tmp_path / folder)
    with pytest.raises(DataError, match="~no-such-user/x: Could not determine home directory.: name another folder"):
        Shards("~no-such-user/x")
    with pytest.raises(ConfigError, match="shards=3: must be the folder of the shards"):
        Shards(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, None) for key in ("name", "fallback", "counts", "shard", "set", "source", "train", "test", "samples")),
        ("counts", [14, "14", 13]),
        ("source", {"seed": 1}),
        ("train", {"classes": 7}),
        ("train", {"classes": 7, "images": {"shape": 3}}),
        ("validation", 5),
        ("samples", "samples.npy"),
    ],
)
def test_a_manifest_of_something_else_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    """One whose digest is right: it was written so."""
    path = write_shards(data(), tmp_path, 3).path(0)
    about = read_manifest(path, "cupynet shard 1") | {key: value}
    write_manifest(path, {name: each for name, each in about.items() if each is not None or name == "validation"})
    with pytest.raises(DataError, match=r"shard-0000-of-0003/manifest.json: does not describe a shard; write"):
        Shards(tmp_path)


def test_shards_have_as_many_samples_as_their_manifests_say(tmp_path: Path) -> None:
    path = write_shards(data(), tmp_path, 3).path(0)
    about = read_manifest(path, "cupynet shard 1")
    write_manifest(path, about | {"counts": [about["counts"][0] + 1, *about["counts"][1:]]})
    with pytest.raises(DataError, match=r"shard-0000-of-0003: expected \d+ samples, found \d+ and \d+ names; write"):
        Shards(tmp_path).open(0)


# writing --------------------------------------------------------------------------------------------------------------


def test_shards_are_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    write_shards(data(), tmp_path / "to", 4)
    (tmp_path / "to" / "shard-0002-of-0004" / ".images.npy.123.part").touch()  # of a command that was killed
    (tmp_path / "to" / "shard-0002-of-0004" / "manifest.json").unlink()
    write_shards(data(), tmp_path / "to", 2)
    write_shards(data(), tmp_path / "new", 2)
    assert digests(tmp_path / "to") == digests(tmp_path / "new")
    for strange in ("notes.txt", "shard-0000-of-0002/notes.txt"):
        (tmp_path / "to" / strange).touch()
        before = digests(tmp_path / "to")
        with pytest.raises(ConfigError, match="which is no shard: name an empty or a new folder"):
            write_shards(data(), tmp_path / "to", 3)
        assert digests(tmp_path / "to") == before
        (tmp_path / "to" / strange).unlink()
    with pytest.raises(ConfigError, match="is a file: name a folder that is not there yet"):
        check_target(tmp_path / "new" / "shard-0000-of-0002" / "images.npy")


def test_a_shard_that_was_not_finished_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupynet.data import sharding

    def full(*_: Any) -> None:
        raise OutputError("the disk is full")

    monkeypatch.setattr(sharding, "write_manifest", full)
    with pytest.raises(OutputError):
        write_shards(data(), tmp_path, 2)
    with pytest.raises(DataError, match=r"manifest.json: is missing"):
        Shards(tmp_path)


@pytest.mark.parametrize("shards", [0, -1, 2.0, None, True])
def test_a_wrong_number_of_shards(shards: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"shards={shards}: must be an integer of at least 1"):
        write_shards(data(), tmp_path, shards)


def test_shards_are_not_cut_again(tmp_path: Path) -> None:
    shards = write_shards(data(), tmp_path / "a", 2)
    with pytest.raises(ConfigError, match="these are shards already: cut the whole data set"):
        write_shards(Data("x", shards, None, numbered(5)), tmp_path / "b", 2)


# sources --------------------------------------------------------------------------------------------------------------


def test_every_source_reads_its_shards(tiny: Any, tmp_path: Path) -> None:
    tiny.write()
    sources = {
        "mnist": lambda **more: MNIST(tiny.root, validation=6, limit=20, **more),
        "synthetic": lambda **more: Synthetic(40, 10, validation=6, limit=20, **more),
    }
    for name, source in sources.items():
        whole = source().load()
        write_shards(whole, tmp_path / name, 3, limit=20)
        found = source(storage="sharded", shards=tmp_path / name).load()
        found.check(source().image_shape, source().classes)
        assert (found.name, found.fallback, len(found.train)) == (name, False, 20)
        assert isinstance(found.train, Shards)
        for mine, theirs in ((found.test, whole.test), (found.validation, whole.validation)):
            assert mine is not None and theirs is not None and mine.name == theirs.name
            np.testing.assert_array_equal(mine.images, theirs.images)
            np.testing.assert_array_equal(mine.labels, theirs.labels)


def test_a_source_takes_its_own_shards_only(tmp_path: Path) -> None:
    write_shards(Synthetic(20, 5).load(), tmp_path, 2)
    sharded: dict[str, Any] = {"storage": "sharded", "shards": tmp_path}
    with pytest.raises(DataError, match="expected shards of 'mnist', found those of 'synthetic'"):
        MNIST(**sharded).load()
    for name in ("seed", "validation", "limit"):
        said = f"{name}=3: .* was written with {name}=(12345|0|null): say so here, or write"
        with pytest.raises(ConfigError, match=said):
            Synthetic(20, 5, **sharded, **{name: 3}).load()
    with pytest.raises(ConfigError, match="train=21: asks for 21 train images, and .* has 20: ask for as many, or"):
        Synthetic(21, 5, **sharded).load()
    with pytest.raises(ConfigError, match="test=4: asks for 4 test images, and .* has 5: ask for as many, or"):
        Synthetic(20, 4, **sharded).load()
    Synthetic(20, 5, **sharded).check_workers(2)
    with pytest.raises(ConfigError, match="has 2 shards, one for each worker, and workers=3: train with workers=2"):
        Synthetic(20, 5, **sharded).check_workers(3)
    Synthetic().check_workers(3)


def test_digits_in_place_of_mnist_stay_known_as_such(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = MNIST(tmp_path / "none", "synthetic", limit=30).load()
    write_shards(data, tmp_path / "shards", 2, limit=30)
    caplog.clear()
    for fallback in (None, "auto"):  # who names the shards says where the data are
        with pytest.raises(DataError, match="shards: holds synthetic digits in place of mnist; cut mnist again, or"):
            MNIST(fallback=fallback, limit=30, storage="sharded", shards=tmp_path / "shards").load()
    found = MNIST(fallback="synthetic", limit=30, storage="sharded", shards=tmp_path / "shards").load()
    assert (found.name, found.fallback) == ("synthetic", True)
    assert "holds synthetic in place of mnist, of which results say nothing" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"storage": "spread"}, "storage=spread: must be one of shared, sharded"),
        (
            {"storage": "sharded"},
            "storage=sharded: must have a folder of shards: name it in data.shards .in Python shards.",
        ),
        ({"shards": "x"}, "shards=x: is read with storage=sharded only"),
        ({"storage": "sharded", "shards": 4}, "shards=4: must be the folder of the shards, or null for none"),
    ],
)
@pytest.mark.parametrize("source", [MNIST, Synthetic])
def test_arguments_that_do_not_go_together(source: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source(**arguments)
