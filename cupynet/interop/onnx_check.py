"""Comparison of an ONNX graph with its model on the same images.

The only file that imports onnxruntime.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupynet.nn import Model

TOGETHER = 100  # images
BOUND = 1e-5  # of the range of the logits, in float


@dataclass(frozen=True)
class Difference:
    """The difference between onnxruntime and the model.

    Attributes:
        images: the number of images.
        logits: the largest difference of two logits, relative to the range of all logits.
        runtime: the version of onnxruntime.
    """

    images: int
    logits: float
    runtime: str


def difference(
    content: bytes, model: Model, images: int = 1000, input: str = "uint8", seed: int = 0
) -> Difference | None:
    """Compare the graph `content` with the model on random images; None if onnxruntime is missing.

    input: see `export_onnx`.
    """
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors alone
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    random, apart, lowest, highest = np.random.default_rng(seed), 0.0, np.inf, -np.inf
    for start in range(0, images, TOGETHER):
        pixels = random.integers(0, 256, (min(TOGETHER, images - start), *model.input.shape), np.uint8)
        given = pixels if input == "uint8" else pixels.astype(np.float32) / np.float32(255)
        (found,) = session.run(["logits"], {"images": given})
        x = model.backend.load_images(pixels, np.arange(len(pixels)), model.pixels)
        expected = model.scores(x)[1].astype(np.float64)
        apart = max(apart, float(np.abs(found - expected).max()))
        lowest, highest = min(lowest, float(expected.min())), max(highest, float(expected.max()))
    return Difference(images, apart / (highest - lowest) if highest > lowest else apart, onnxruntime.__version__)
