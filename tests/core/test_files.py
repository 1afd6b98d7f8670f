"""Files: complete or missing, with equal bytes for equal weights."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

import cupynet
from cupynet.core.errors import DataError, OutputError
from cupynet.core.files import digest, load_tensors, load_weights, read_object, save_weights, write_output, write_whole
from tests.support.backends import needs_bfloat16
from tests.support.commands import ROOT
from tests.support.refusals import data_error, refused

RNG = np.random.default_rng(3)
WEIGHTS: dict[str, Any] = {
    "conv1.weight": RNG.normal(size=(3, 3, 1, 4)).astype(np.float32),
    "conv1.bias": RNG.normal(size=4).astype(np.float32),
    "output.weight": RNG.normal(size=(5, 2)),
}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


# weights --------------------------------------------------------------------------------------------------------------


def test_weights_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    transposed = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.arange(10)[::2], "c": np.asfortranarray(np.eye(3)[:2])}
    for given in (WEIGHTS, transposed):
        save_weights(tmp_path / "w", given)
        assert_same(load_weights(str(tmp_path / "w")), given)
        assert_same(load_file(tmp_path / "w"), given)
    save_weights(tmp_path / "w", {"a": np.arange(3, dtype=">f4")})
    assert_same(load_weights(tmp_path / "w"), {"a": np.arange(3, dtype="<f4")})


def test_equal_weights_give_equal_bytes_in_every_process(tmp_path: Path) -> None:
    """Neither the order of names nor Python's hash seed matters."""
    save_weights(tmp_path / "here", WEIGHTS)
    save_weights(tmp_path / "backwards", dict(reversed(WEIGHTS.items())))
    code = "import sys; from tests.core.test_files import *; save_weights(sys.argv[1], WEIGHTS)"
    line = [sys.executable, "-c", code, str(tmp_path / "there")]
    subprocess.run(line, check=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "1"})
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def flipped(whole: bytes) -> bytes:
    return whole[:-1] + bytes([whole[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [lambda whole: b"no safetensors", lambda whole: save(WEIGHTS), flipped],
    ids=["another format", "no digest", "a flipped bit"],
)
def test_missing_and_damaged_weight_files_are_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "w"
    with pytest.raises(DataError):
        load_weights(path)
    save_weights(path, WEIGHTS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError):
        load_weights(path)


@pytest.mark.parametrize("read", [load_weights, load_tensors], ids=lambda read: read.__name__)
def test_weights_from_a_pipe_are_refused_and_not_waited_for(read: Callable[[Path], Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.safetensors")
    with pytest.raises(DataError):
        read(tmp_path / "w.safetensors")


def test_bfloat16_weights_are_read_as_float(tmp_path: Path) -> None:
    """The upper half of 1.5 is 3fc0, stored in little-endian order."""
    header = json.dumps({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "w").write_bytes(len(header).to_bytes(8, "little") + header + b"\xc0\x3f")
    assert_same(load_tensors(tmp_path / "w"), {"a": np.array([1.5], np.float32)})


@needs_bfloat16
def test_bfloat16_weights_are_saved_and_read_as_float(tmp_path: Path) -> None:
    bfloat16 = cupynet.create_backend("numpy", "bfloat16").policy.storage
    save_weights(tmp_path / "w", {"a": np.array([1.5], bfloat16)})
    assert_same(load_weights(tmp_path / "w"), {"a": np.array([1.5], np.float32)})


def test_the_digest_of_weights_depends_on_names_types_shapes_and_bytes() -> None:
    a = np.arange(6, dtype=np.float32)
    others: list[dict[str, Any]] = [{"a": a}, {"b": a}, {"a": a.reshape(2, 3)}, {"a": a.view(np.int32)}, {"a": a + 1}]
    assert len({digest(each) for each in others}) == len(others)
    assert digest({"a": a, "b": a}) == digest({"b": a, "a": a})


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000, None], ids=["broken", "a list", "too deep", "missing"])
def test_a_file_without_a_json_object_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError):
        read_object(tmp_path / "x.json")


# files of a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "key"])
def test_a_file_appears_whole_or_not_at_all(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise error

    write_whole(tmp_path / "x", b"before")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((OutputError, KeyboardInterrupt)):
        write_whole(tmp_path / "x", b"after")
    assert (tmp_path / "x").read_bytes() == b"before" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("link", ["a", f".a.{os.getpid()}.part"], ids=["the file", "the half-written file"])
def test_a_link_in_a_run_folder_is_replaced_and_not_written_through(link: str, tmp_path: Path) -> None:
    """In a container, processes reuse the same process ID, and folders may come from anybody."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / link).symlink_to("victim")
    save_weights(tmp_path / "a", WEIGHTS, write_whole)
    assert_same(load_weights(tmp_path / "a"), WEIGHTS)
    assert (tmp_path / "victim").read_text() == "precious" and sorted(os.listdir(tmp_path)) == ["a", "victim"]
    assert not (tmp_path / "a").is_symlink()


# paths that the user named --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"old"], ids=["to nothing", "to a file"])
def test_a_link_that_the_user_named_is_kept_and_its_target_written(content: bytes | None, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to("there/file")
    if content is not None:
        target.write_bytes(content)
    save_weights(link, WEIGHTS)
    assert_same(load_weights(target), WEIGHTS)
    assert link.is_symlink() and os.listdir(target.parent) == ["file"]


def test_an_output_path_may_be_a_pipe_that_something_reads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    content = bytes(200_000)  # more than a pipe holds
    with subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE) as reader:
        kept = os.open(tmp_path / "pipe", os.O_WRONLY)  # returns once the reader has opened the pipe
        thread = threading.Thread(target=write_output, args=(tmp_path / "pipe", content))
        thread.start()
        assert reader.stdout is not None and reader.stdout.read(len(content)) == content
        thread.join()
        os.close(kept)


def test_an_output_path_may_be_a_device(tmp_path: Path) -> None:
    for name in ("null", "full"):
        (tmp_path / name).symlink_to(f"/dev/{name}")
    write_output(tmp_path / "null", b"new")
    with pytest.raises(OutputError):
        write_output(tmp_path / "full", b"new")
    assert Path("/dev/null").is_char_device() and (tmp_path / "null").is_symlink()


@pytest.mark.parametrize("name", ["folder", "circle", "missing/file", "pipe"])
def test_an_output_path_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")  # nothing reads it
    with pytest.raises(OutputError):
        write_output(tmp_path / name, b"new")
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "circle", "pipe"}
    with refused("path"):
        write_output("", b"new")


def test_output_to_dev_stdout_keeps_its_place_between_printed_lines(tmp_path: Path) -> None:
    code = "from cupynet.core.files import write_output; print(1); write_output('/dev/stdout', b'2\\n'); print(3)"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, cwd=ROOT)
    assert (tmp_path / "out").read_text().split() == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("name", "kind"), [("a.onnx", "ONNX"), ("a.h5", "Keras"), ("a.keras", "Keras"), ("a.PT", "pickle")]
)
def test_weight_files_of_other_frameworks_are_refused_with_their_kind(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"no safetensors")
    for read in (load_weights, cupynet.load):
        with data_error(tmp_path / name, kind):
            read(tmp_path / name)
