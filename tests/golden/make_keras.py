"""Writes keras.keras and keras.npz: a Keras 3 network with many kinds of layers, images, and its predictions for them.

Run once with Keras installed: KERAS_BACKEND=jax python make_keras.py. Tests need only the files.
"""

from pathlib import Path

import keras
import numpy as np
from keras import layers

FOLDER = Path(__file__).parent

keras.utils.set_random_seed(1)
network = keras.Sequential(
    [
        keras.Input((12, 10, 3)),
        layers.Rescaling(1 / 255),
        layers.RandomFlip("horizontal"),
        layers.Conv2D(4, 3, activation="relu", strides=(2, 1), padding="same"),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.MaxPooling2D(),
        layers.DepthwiseConv2D(2, depth_multiplier=2),
        layers.LeakyReLU(),
        layers.ZeroPadding2D(1),
        layers.Conv2D(6, 3, strides=2, activation="leaky_relu"),
        layers.ELU(),
        layers.AveragePooling2D(2, strides=1, padding="same"),
        layers.LayerNormalization(),
        layers.Dropout(0.3),
        layers.GlobalAveragePooling2D(),
        layers.Flatten(),
        layers.Dense(5, use_bias=False),
        layers.Activation("gelu"),
        layers.Dense(3, activation="softmax"),
    ]
)
rng = np.random.default_rng(3)
for weight in network.weights:
    if "seed" not in weight.path:
        weight.assign(weight + 0.1 * rng.random(weight.shape))
images = rng.integers(0, 256, (5, 12, 10, 3)).astype(np.uint8)
network.save(FOLDER / "keras.keras")
np.savez_compressed(FOLDER / "keras.npz", images=images, probabilities=network.predict(images.astype(np.float32)))
