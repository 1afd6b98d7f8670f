"""Export a finished run for other programs: `cupynet export RUN --onnx model.onnx`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from cupynet.commands.arguments import Arguments
from cupynet.core.errors import ConfigError, CupynetError
from cupynet.core.exits import run_and_exit
from cupynet.core.version import __version__

if TYPE_CHECKING:
    from cupynet.config.load_model import LoadedRun
    from cupynet.nn import Model

IMAGES = 1000  # number of random images for verifying an ONNX graph
EXAMPLES = """examples:
  cupynet export outputs/latest --onnx model.onnx
  cupynet export outputs/latest --torch net.safetensors --torch-module net.py
  cupynet export outputs/latest/checkpoints/step-00001234 --onnx model.onnx"""


def main() -> None:
    parser = Arguments("cupynet export", "Export a finished run for other programs.", EXAMPLES)
    parser.add_run()
    parser.add_argument(
        "--onnx", type=Path, metavar="FILE", help="write an ONNX graph from images (N, H, W, C) to logits"
    )
    parser.add_argument("--input", choices=("uint8", "float"), default="uint8",
                        help="pixels: uint8 from 0 to 255 or float from 0 to 1 (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--safetensors", type=Path, metavar="FILE", help="write the weights with cupynet's names and layouts"
    )
    parser.add_argument("--torch", type=Path, metavar="FILE", help="write the weights with PyTorch's names and layouts")
    parser.add_argument(
        "--torch-module", type=Path, metavar="FILE", help="write the source of a PyTorch module for these weights"
    )
    parser.add_trusted_modules()
    run_and_exit(lambda: export(parser.parse_args()))


def export(arguments: argparse.Namespace) -> None:
    from cupynet.config.load_model import LoadedRun
    from cupynet.core.files import save_weights, write_output
    from cupynet.interop import export_torch, torch_source
    from cupynet.runs.layout import check_outputs

    files = [arguments.onnx, arguments.safetensors, arguments.torch, arguments.torch_module]
    if not any(files):
        raise ConfigError("nothing to write. Use --onnx, --safetensors, --torch or --torch-module with a file")
    check_outputs(*files)
    trained = LoadedRun(arguments.run, arguments.trusted_modules)
    model = trained.model(dtype="float")  # the dtype of stored weights
    if arguments.onnx:
        _export_onnx(trained, model, arguments.onnx, arguments.input)
    if arguments.safetensors:
        save_weights(arguments.safetensors, model.weights())
        print(f"{arguments.safetensors}: {model.params.count:,} weights")
    if arguments.torch:
        export_torch(model, arguments.torch)
        print(f"{arguments.torch}: {model.params.count:,} weights, for PyTorch's load_state_dict")
    if arguments.torch_module:
        write_output(arguments.torch_module, torch_source(model).encode())
        print(f"{arguments.torch_module}: network() returns the PyTorch module, and prepared() its input")


def _export_onnx(trained: LoadedRun, model: Model, path: Path, input: str) -> None:
    from cupynet.core.files import write_output
    from cupynet.interop import BOUND, difference, onnx_graph

    content = onnx_graph(model, input=input, metadata=_about(trained, model, input))
    found = difference(content, model, IMAGES, input)
    verdict = "unchecked: onnxruntime is not installed (pip install 'cupynet[onnx]')"
    if found is not None:
        verdict = f"on {IMAGES:,} random images, its logits in ONNX Runtime differ by up to {found:.1e} of their range"
        if not found <= BOUND:
            raise CupynetError(f"{path} was not written: {verdict}, but at most {BOUND:g} is allowed")
    write_output(path, content)
    shape = ", ".join(map(str, ("N", *model.input.shape)))
    print(f"{path}: images ({shape}) of {input} to logits (N, {model.output.features}); {verdict}")


def _about(trained: LoadedRun, model: Model, input: str) -> dict[str, str]:
    summary, normalize = trained.summary, model.pixels.normalization()
    scaled = "divided by 255" if normalize is None else f"divided by 255, then normalized with {json.dumps(normalize)}"
    about = {
        "cupynet": __version__,
        "labels": json.dumps(list(model.class_names) or [str(number) for number in range(model.output.features)]),
        "input": f"images (N, H, W, C) {input}, pixels from {'0 to 255' if input == 'uint8' else '0 to 1'}",
        "preprocessing": f"in the graph: pixels from 0 to 255 are {scaled}",
    }
    if summary is not None and trained.checkpoint is None:
        about["dataset"] = summary.setup.dataset
        facts = {"test_accuracy": summary.scores.test_accuracy, "commit": summary.setup.commit}
        about |= {name: str(value) for name, value in facts.items() if value is not None}
    return about
