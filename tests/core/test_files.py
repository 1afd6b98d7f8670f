"""Files: whole or not at all, and the same bytes for the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from cupynet.core.errors import DataError, OutputError
from cupynet.core.files import digest, load_tensors, load_weights, read_object, save_weights, write_output, write_whole
from cupynet.interop import import_torch
from cupynet.runs.run import Run


def weights() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "conv1.weight": rng.normal(size=(3, 3, 1, 4)).astype(np.float32),
        "conv1.bias": rng.normal(size=4).astype(np.float32),
        "output.weight": rng.normal(size=(5, 2)),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def test_weights_come_back(tmp_path: Path) -> None:
    for path in (tmp_path / "w.safetensors", str(tmp_path / "v.safetensors")):
        save_weights(path, weights())
        assert_same(load_weights(path), weights())
        assert_same(load_file(path), weights())


def test_equal_weights_give_equal_bytes_in_every_process(tmp_path: Path) -> None:
    """In any order of their names, and whatever the seed of Python's hashes."""
    save_weights(tmp_path / "here", weights())
    save_weights(tmp_path / "backwards", dict(reversed(weights().items())))
    code = "import sys; from tests.core.test_files import *; save_weights(sys.argv[1], weights())"
    variables = {**os.environ, "PYTHONHASHSEED": "1"}
    line = [sys.executable, "-c", code, str(tmp_path / "there")]
    subprocess.run(line, check=True, cwd=Path(__file__).parents[2], env=variables)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_arrays_in_any_layout(tmp_path: Path) -> None:
    given = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.arange(10)[::2], "c": np.asfortranarray(np.eye(3)[:2])}
    save_weights(tmp_path / "w", given)
    assert_same(load_weights(tmp_path / "w"), given)


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "w"
    with pytest.raises(DataError):
        load_weights(path)
    path.write_bytes(b"no safetensors")
    with pytest.raises(DataError):
        load_weights(path)
    path.write_bytes(save(weights()))
    with pytest.raises(DataError):
        load_weights(path)
    save_weights(path, weights())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError):
        load_weights(path)


def test_a_digest_sees_names_types_shapes_and_bytes() -> None:
    a = np.arange(6, dtype=np.float32)
    others: list[dict[str, Any]] = [{"a": a}, {"b": a}, {"a": a.reshape(2, 3)}, {"a": a.view(np.int32)}, {"a": a + 1}]
    assert len({digest(each) for each in others}) == len(others)
    assert digest({"a": a, "b": a}) == digest({"b": a, "a": a})


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_whole(path, b"before")
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):

        def fail(descriptor: int, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises((OutputError, KeyboardInterrupt)):
            write_whole(path, b"after")
        assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["x"], "nothing is left beside it"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none" / "x", tmp_path / "file" / "x", tmp_path / "folder"):
        with pytest.raises(OutputError):
            write_whole(path, b"")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_pieces_are_written_one_after_the_other_or_not_at_all(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", iter([b"one", b"", b"two"]))
    assert (tmp_path / "a").read_bytes() == b"onetwo"

    def broken() -> Any:
        yield b"three"
        raise DataError("no more")

    with pytest.raises(DataError):
        write_whole(tmp_path / "a", broken())
    assert (tmp_path / "a").read_bytes() == b"onetwo" and len(list(tmp_path.iterdir())) == 1


def test_a_link_in_place_of_the_half_written_file_is_not_written_through(tmp_path: Path) -> None:
    """In a container the next process has the number that the last one had, and a folder may come from anybody."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f".a.{os.getpid()}.part").symlink_to("victim")
    write_whole(tmp_path / "a", b"mine")
    assert (tmp_path / "a").read_bytes() == b"mine" and not (tmp_path / "a").is_symlink()
    assert (tmp_path / "victim").read_text() == "precious" and sorted(os.listdir(tmp_path)) == ["a", "victim"]


@pytest.mark.parametrize("read", [load_weights, load_tensors, lambda path: import_torch(None, path)], ids=range(3))  # type: ignore[arg-type]
def test_a_pipe_is_refused_and_not_waited_for(read: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.safetensors")
    with pytest.raises(DataError):
        read(tmp_path / "w.safetensors")


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000, None], ids=["broken", "a list", "too deep", "missing"])
def test_what_is_no_object_in_json_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError):
        read_object(tmp_path / "x.json")


def test_bfloat16_weights_are_read_as_float(tmp_path: Path) -> None:
    """Of 1.5 the upper half is 3fc0, in little-endian order."""
    header = json.dumps({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "w").write_bytes(len(header).to_bytes(8, "little") + header + b"\xc0\x3f")
    assert_same(load_tensors(tmp_path / "w"), {"a": np.array([1.5], np.float32)})


def test_a_history_that_is_a_pipe(tmp_path: Path) -> None:
    run = Run(tmp_path)
    os.mkfifo(run.history_path)
    with pytest.raises(DataError):
        run.history()


# paths that the user named --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"old"], ids=["to nothing", "to a file"])
def test_a_link_is_kept_and_its_target_written(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to("there/file")
    if content is not None:
        target.write_bytes(content)
    write_output(link, b"new")
    save_weights(link, weights())
    assert_same(load_weights(target), weights())
    assert link.is_symlink() and [path.name for path in target.parent.iterdir()] == ["file"]


def test_a_link_in_the_folder_of_a_run_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to("victim")
    save_weights(tmp_path / "link", weights(), write_whole)
    assert (tmp_path / "victim").read_text() == "precious" and not (tmp_path / "link").is_symlink()


def test_a_pipe_is_written_to_if_something_reads_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError):
        write_output(tmp_path / "pipe", b"new")
    content, read = bytes(200_000), bytearray()
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)  # without any writer the pipe is at its end
    os.set_blocking(reader, True)

    def collect() -> None:
        while len(read) < len(content):
            read.extend(os.read(reader, 1 << 16))

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    write_output(tmp_path / "pipe", content)
    thread.join(timeout=10)
    os.close(reader)
    os.close(writer)
    assert bytes(read) == content and (tmp_path / "pipe").is_fifo()


def test_a_device_is_written_to(tmp_path: Path) -> None:
    for name in ("null", "full"):
        (tmp_path / name).symlink_to(f"/dev/{name}")
    write_output(tmp_path / "null", b"new")
    with pytest.raises(OutputError):
        write_output(tmp_path / "full", b"new")
    assert Path("/dev/null").is_char_device() and (tmp_path / "null").is_symlink()


@pytest.mark.parametrize("name", ["folder", "circle", "missing/file"])
def test_an_impossible_output_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OutputError):
        write_output(tmp_path / name, b"new")
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "circle"}


def test_what_goes_to_the_own_stdout_is_between_what_is_printed(tmp_path: Path) -> None:
    code = "from cupynet.core.files import write_output; print(1); write_output('/dev/stdout', b'2\\n'); print(3)"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, cwd=Path(__file__).parents[2])
    assert (tmp_path / "out").read_text().split() == ["1", "2", "3"] and Path("/dev/stdout").is_symlink()
