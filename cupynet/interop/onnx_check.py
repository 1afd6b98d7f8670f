"""Compares an ONNX graph with its model. This is the only file that imports onnxruntime."""

from __future__ import annotations

import numpy as np

from cupynet.nn import Model

TOGETHER = 100  # images per batch
BOUND = 1e-5  # largest acceptable difference relative to the range of the logits, in float


def difference(content: bytes, model: Model, images: int = 1000, input: str = "uint8", seed: int = 0) -> float | None:
    """Compare the graph `content` with the model on random images.

    input: see `export_onnx`.

    Returns:
        The largest difference of logits, relative to the range of all logits; None if onnxruntime is not installed.
    """
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    pixels = np.random.default_rng(seed).integers(0, 256, (images, *model.input.shape), np.uint8)
    given = pixels if input == "uint8" else pixels.astype(np.float32) / np.float32(255)
    parts = np.array_split(given, -(-images // TOGETHER))
    found = np.concatenate([session.run(["logits"], {"images": part})[0] for part in parts])
    x = model.backend.load_images(pixels, np.arange(images), model.pixels)
    expected = model.scores(x)[1].astype(np.float64)
    return float(np.abs(found - expected).max() / (np.ptp(expected) or 1.0))
