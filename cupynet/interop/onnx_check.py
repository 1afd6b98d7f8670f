"""Comparison of an ONNX graph with its model."""

from __future__ import annotations

import numpy as np

from cupynet.nn import Model

BATCH_SIZE = 100
BOUND = 1e-5  # largest acceptable result of `difference` in float


def difference(content: bytes, model: Model, images: int = 1000, input: str = "uint8") -> float | None:
    """Return the largest difference of logits on random images, relative to their range; None without onnxruntime."""
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    pixels = np.random.default_rng(0).integers(0, 256, (images, *model.input.shape), np.uint8)
    inputs = pixels if input == "uint8" else pixels.astype(np.float32) / np.float32(255)
    parts = np.array_split(inputs, -(-images // BATCH_SIZE))
    logits = np.concatenate([session.run(["logits"], {"images": part})[0] for part in parts])
    x = model.backend.load_images(pixels, np.arange(images), model.pixels)
    expected = model.scores(x)[1].astype(np.float64)
    return float(np.abs(logits - expected).max() / (np.ptp(expected) or 1.0))
