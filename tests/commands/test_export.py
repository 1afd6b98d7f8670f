"""`cupynet export` as a user types it; what it writes is tested in tests/interop."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors.numpy import load_file

from cupynet import Run, interop, load_model, load_weights
from cupynet.commands import export
from tests.support.commands import environment, run, run_folder

SMALL = ["data=synthetic", "data.train=200", "data.test=100", "batch_size=32", "epochs=1", "workers=1", "model=mlp"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    run(folder, *SMALL, "data.normalize=auto", "callbacks.progress.style=lines")
    return run_folder(folder)


def test_every_export_format(finished: Path, tmp_path: Path) -> None:
    files = {"onnx": "a.onnx", "safetensors": "a.safetensors", "torch": "torch.safetensors", "torch-module": "a.py"}
    given = [word for form, name in files.items() for word in (f"--{form}", name)]
    stdout, stderr = run(tmp_path, str(finished), *given, command="export")
    assert stderr == "" and [line.split(":")[0] for line in stdout.splitlines()] == list(files.values())
    assert (
        "images (N, 28, 28, 1) of uint8 to logits (N, 10); on 1,000 random images its logits in onnxruntime" in stdout
    )
    model, summary = load_model(finished), Run(finished).summary()
    images = np.random.default_rng(1).integers(0, 256, (5, 28, 28, 1), np.uint8)
    session = onnxruntime.InferenceSession(str(tmp_path / "a.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(["probabilities"], {"images": images})
    np.testing.assert_allclose(found, model.predict(images), atol=1e-5)
    metadata = {each.key: each.value for each in onnx.load(tmp_path / "a.onnx").metadata_props}
    assert json.loads(metadata["labels"]) == [str(number) for number in range(10)]
    assert metadata["dataset"] == "synthetic" and float(metadata["test_accuracy"]) == summary.scores.test_accuracy
    assert (
        metadata["commit"] == str(summary.setup.commit)
        and json.dumps(summary.setup.normalize) in metadata["preprocessing"]
    )
    for name, weight in load_weights(tmp_path / "a.safetensors").items():
        np.testing.assert_array_equal(weight, model.weights()[name])
    assert load_file(tmp_path / "torch.safetensors")["dense1.weight"].shape == (256, 784)
    assert "nn.Linear(784, 256, bias=True)" in (tmp_path / "a.py").read_text()


def test_a_checkpoint_is_exported(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, file = finished / "checkpoints" / "step-00000007", tmp_path / "a.onnx"
    monkeypatch.setattr("sys.argv", ["export", str(step), "--onnx", str(file), "--input", "float"])
    with pytest.raises(SystemExit) as left:
        export.main()
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{file}: images (N, 28, 28, 1) of float to logits (N, 10); on 1,000")


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ([], 2, "the following arguments are required: run"),
        (["RUN"], 2, "nothing to write: name --onnx, --safetensors, --torch or --torch-module, and a file"),
        (["absent", "--onnx", "a"], 2, "absent: there is no such folder: name a run's, under outputs/"),
        (["RUN", "--onnx", "none/a"], 74, "none/a: cannot be written (No such file or directory)"),
        (["RUN", "--torch", "none/a"], 74, "none/a: cannot be written (No such file or directory)"),
        (["DAMAGED", "--onnx", "a"], 65, "weights.safetensors: damaged weights, expected SHA-256"),
    ],
    ids=["nothing", "no form", "missing folder", "onnx nowhere", "torch nowhere", "damaged"],
)
def test_impossible_exports_are_refused(
    arguments: list[str], code: int, expected: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    damaged = Path(shutil.copytree(finished, tmp_path / "damaged"))
    content = bytearray((damaged / "weights.safetensors").read_bytes())
    content[-100] ^= 1
    (damaged / "weights.safetensors").write_bytes(content)
    named = {"RUN": str(finished), "DAMAGED": str(damaged)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["export", *(named.get(each, each) for each in arguments)])
    with pytest.raises(SystemExit) as left:
        export.main()
    output = capsys.readouterr().err
    assert left.value.code == code
    assert expected in output and output.startswith("cupynet: ") and output.count("\n") == 1
    assert os.listdir(tmp_path) == ["damaged"]


@pytest.mark.slow
def test_a_closed_stdout_is_no_error(finished: Path, tmp_path: Path) -> None:
    """Neither a closed pipe nor a full disk behind stdout is a bug."""
    command = f"{sys.executable} -m cupynet export {finished} --safetensors a.st"
    for behind, code, expected in (("| true", 141, ""), ("> /dev/full", 74, "cupynet: the output cannot be written")):
        script = f"{command} {behind}; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
        )
        assert done.stderr.startswith(expected) and done.stderr.count("\n") == bool(expected), done.stderr
        assert done.returncode in (code, 0 if not expected else code)


def test_a_graph_that_differs_is_not_written(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interop, "difference", lambda *_: 2e-4)
    monkeypatch.setattr("sys.argv", ["export", str(finished), "--onnx", str(tmp_path / "a.onnx")])
    with pytest.raises(SystemExit) as left:
        export.main()
    assert left.value.code == 1 and not list(tmp_path.iterdir())
    output = capsys.readouterr().err
    assert "not written: on 1,000 random images its logits in onnxruntime differ by at most 2.0e-04" in output
    monkeypatch.setattr(interop, "difference", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        export.main()
    assert left.value.code == 0 and (tmp_path / "a.onnx").exists()
    assert "onnxruntime is not installed (pip install 'cupynet[onnx]')" in capsys.readouterr().out
