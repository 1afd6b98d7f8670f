"""Data augmentation: random transformations of training images on the host.

The result depends only on the seed, epoch, sample and position of the augmentation. Random numbers come from SplitMix64
(Steele, Lea, Flood 2014), with a separate sequence for each image. Pixels outside an image are 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import checks, wording
from cupynet.core.errors import ConfigError

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mixed(z: Array) -> Array:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)  # modulo 2**64
    z ^= z >> np.uint64(31)
    return z


class SampleRNG:
    """Random numbers for samples with indices `samples` (N,) in an epoch, for the augmentation at index `place`."""

    def __init__(self, seed: int, epoch: int, samples: Array, place: int) -> None:
        key = np.zeros(len(samples), np.uint64)
        for word in (seed, epoch, place, np.asarray(samples).astype(np.uint64)):
            key ^= word if isinstance(word, np.ndarray) else np.uint64(word)
            key += _GAMMA
            key = _mixed(key)
        self._keys, self._drawn = key, 0

    def uniform(self, low: float, high: float, *shape: int) -> Array:
        """Draw (N, *shape) float32 from [low, high). Because of rounding, `high` itself may occur."""
        count = math.prod(shape)
        words = -(-count // 2)  # each 64-bit word yields two numbers
        counters = np.arange(self._drawn + 1, self._drawn + words + 1, dtype=np.uint64) * _GAMMA
        self._drawn += words
        bits = _mixed(self._keys[:, np.newaxis] + counters)  # (N, words)
        halves = np.empty((len(bits), 2 * words), np.uint32)
        halves[:, ::2], halves[:, 1::2] = bits >> np.uint64(40), (bits >> np.uint64(8)) & np.uint64(0xFFFFFF)
        numbers = halves[:, :count].astype(np.float32) * np.float32((high - low) / (1 << 24)) + np.float32(low)
        return numbers.reshape(len(bits), *shape)

    def integers(self, low: int, high: int) -> Array:
        """Draw (N,) int64 from `low` to `high`, inclusive."""
        numbers = np.floor(self.uniform(0, 1) * np.float32(high - low + 1)).astype(np.int64)
        return np.minimum(numbers, high - low) + low


class Augmentation(ABC):
    """Base class of augmentations, which are called with a batch of images."""

    @abstractmethod
    def __call__(self, images: Array, draws: SampleRNG) -> Array:
        """Return transformed images (N, H, W, C) uint8 without changing `images`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in sorted(vars(self).items()))})"


Augment: TypeAlias = "str | Sequence[Augmentation | str] | None"  # see `augmentations`


def augmentations(given: Augment) -> tuple[Augmentation, ...]:
    """Convert `augment`, a list of augmentations or names (as in `NAMES`), `light`, `standard` or None, to a tuple."""
    named = PRESETS.get(given, [given]) if isinstance(given, str) else given
    found = []
    for each in named if isinstance(named, list | tuple) else [] if named is None else [named]:
        part = NAMES[each]() if isinstance(each, str) and each in NAMES else each
        if not isinstance(part, Augmentation):
            names = [*(PRESETS if isinstance(given, str) else ()), *NAMES]
            must = f"must be light, standard, [], or a list of augmentations or their names: {', '.join(NAMES)}"
            hint = wording.guess(each, names)
            raise ConfigError(f"{must}{hint}", "augment", wording.shown(given, wording.written))
        found.append(part)
    if sum(isinstance(part, Mixing) for part in found) > 1:
        raise ConfigError("can contain only one of mixup and cutmix", "augment", wording.shown(given, wording.written))
    return tuple(found)


def augmented(
    parts: Sequence[Augmentation],
    images: Array,
    seed: int,
    epoch: int,
    samples: Array,
    data: Array = None,
    numbers: Array | None = None,
) -> Array:
    """Apply augmentations to images (N, H, W, C) uint8.

    Args:
        samples: (N,) indices of the images in the data set.
        data: images (S, H, W, C) to mix with; by default `images`.
        numbers: (S,) indices in the data set of the images in `data`; by default 0 .. S - 1.
    """
    data = images if data is None else data
    for place, part in enumerate(parts):
        draws = SampleRNG(seed, epoch, samples, place)
        if isinstance(part, Mixing):
            rows, share = part.drawn(draws, len(data), images.shape[1:])
            others = augmented(parts[:place], data[rows], seed, epoch, rows if numbers is None else numbers[rows])
            share = share[..., np.newaxis]
            found = (share * images + (1 - share) * others + np.float32(0.5)).astype(np.uint8)
        else:
            found = np.asarray(part(images, draws))
        if found.shape != images.shape or found.dtype != np.uint8:
            kind = f"{found.shape} of {found.dtype}"
            raise ConfigError(f"{part!r} returned {kind}; expected uint8 images of shape {images.shape}")
        images = found
    return images


def check_augmentations(parts: Sequence[Augmentation], image_shape: Sequence[int]) -> None:
    if parts:
        augmented(parts, np.zeros((1, *image_shape), np.uint8), 0, 0, np.zeros(1, np.int64))


class Shift(Augmentation):
    """Shift by up to `pixels` in each direction, like a random crop after zero padding."""

    def __init__(self, pixels: int = 2) -> None:
        self.pixels = checks.integer("Shift pixels", pixels, 1, most=(1 << 31) - 1)

    def __call__(self, images: Array, draws: SampleRNG) -> Array:
        _, height, width, _ = images.shape
        pixels = self.pixels
        if pixels >= min(height, width):
            reason = f"must be less than {min(height, width)}, the smaller side of the images"
            raise ConfigError(reason, "Shift pixels", str(pixels))
        padded = np.pad(images, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))  # (N, y, x, C, H, W)
        down, across = draws.integers(0, 2 * pixels), draws.integers(0, 2 * pixels)
        return np.ascontiguousarray(windows[np.arange(len(images)), down, across].transpose(0, 2, 3, 1))


class HorizontalFlip(Augmentation):
    """Flip images left to right, with the given probability."""

    def __init__(self, probability: float = 0.5) -> None:
        self.probability = checks.number("HorizontalFlip probability", probability, minimum=0)
        if self.probability > 1:
            raise ConfigError("must be a number from 0 to 1", "HorizontalFlip probability", str(self.probability))

    def __call__(self, images: Array, draws: SampleRNG) -> Array:
        chosen = draws.uniform(0, 1) < self.probability  # (N,)
        flipped = images.copy()
        flipped[chosen] = images[chosen, :, ::-1]
        return flipped


class Cutout(Augmentation):
    """Set a square of `size` x `size` pixels to 0, centered at a random pixel (DeVries and Taylor 2017)."""

    def __init__(self, size: int = 8) -> None:
        self.size = checks.integer("Cutout size", size, 1)

    def __call__(self, images: Array, draws: SampleRNG) -> Array:
        _, height, width, _ = images.shape
        inside = []
        for length in (height, width):
            first = draws.integers(0, length - 1)[:, np.newaxis] - self.size // 2  # (N, 1)
            places = np.arange(length)
            inside.append((places >= first) & (places < first + self.size))  # (N, length)
        cut = inside[0][:, :, np.newaxis] & inside[1][:, np.newaxis, :]  # (N, H, W)
        return np.where(cut[..., np.newaxis], np.uint8(0), images)


class Rotate(Augmentation):
    """Rotate about the center by an angle from -degrees to degrees, with bilinear interpolation."""

    def __init__(self, degrees: float = 10.0) -> None:
        self.degrees = checks.number("Rotate degrees", degrees, above=0)

    def __call__(self, images: Array, draws: SampleRNG) -> Array:
        _, height, width, _ = images.shape
        angle = draws.uniform(-self.degrees, self.degrees)[:, np.newaxis, np.newaxis] * np.float32(math.pi / 180)
        cos, sin = np.cos(angle), np.sin(angle)
        y = (np.arange(height, dtype=np.float32) - np.float32((height - 1) / 2))[:, np.newaxis]
        x = np.arange(width, dtype=np.float32) - np.float32((width - 1) / 2)
        return _sampled(
            images,
            cos * y - sin * x + np.float32((height - 1) / 2),  # (N, H, W)
            sin * y + cos * x + np.float32((width - 1) / 2),
        )


class Scale(Augmentation):
    """Zoom about the center by a factor from `low` to `high`, with bilinear interpolation."""

    def __init__(self, low: float = 0.9, high: float = 1.1) -> None:
        self.low = checks.number("Scale low", low, minimum=0.01)
        self.high = checks.number("Scale high", high, minimum=self.low, below=100)

    def __call__(self, images: Array, draws: SampleRNG) -> Array:
        _, height, width, _ = images.shape
        step = 1 / draws.uniform(self.low, self.high)[:, np.newaxis, np.newaxis]  # (N, 1, 1)
        middle_y, middle_x = np.float32((height - 1) / 2), np.float32((width - 1) / 2)
        y = step * (np.arange(height, dtype=np.float32) - middle_y)[:, np.newaxis] + middle_y
        x = step * (np.arange(width, dtype=np.float32) - middle_x) + middle_x
        shape = (len(images), height, width)
        return _sampled(images, np.broadcast_to(y, shape), np.broadcast_to(x, shape))


class ColorJitter(Augmentation):
    """Change brightness, contrast and saturation, in this order, by factors from 1 - value to 1 + value.

    Contrast scales the distance of pixels from the image's mean, saturation their distance from their gray value.
    """

    def __init__(self, brightness: float = 0.2, contrast: float = 0.2, saturation: float = 0.2) -> None:
        self.brightness = checks.number("ColorJitter brightness", brightness, minimum=0, below=100)
        self.contrast = checks.number("ColorJitter contrast", contrast, minimum=0, below=100)
        self.saturation = checks.number("ColorJitter saturation", saturation, minimum=0, below=100)

    def __call__(self, images: Array, draws: SampleRNG) -> Array:
        ranges = (self.brightness, self.contrast, self.saturation)
        bright, contrast, saturation = (
            draws.uniform(max(0.0, 1 - each), 1 + each)[:, np.newaxis, np.newaxis, np.newaxis] for each in ranges
        )
        pixels = images * bright
        mean = pixels.mean(axis=(1, 2, 3), keepdims=True)
        pixels = mean + contrast * (pixels - mean)
        if images.shape[3] == 3:
            gray = pixels @ np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601
            pixels = gray[..., np.newaxis] + saturation * (pixels - gray[..., np.newaxis])
        return (np.clip(pixels, 0, 255) + np.float32(0.5)).astype(np.uint8)


class Elastic(Augmentation):
    """Elastic distortion with a smooth random displacement field (Simard, Steinkraus, Platt 2003).

    The defaults are the paper's best values for digits of 29 x 29 pixels.

    Args:
        alpha: factor of the displacement field, in pixels. Before smoothing, the field is uniform in -1 to 1.
        sigma: standard deviation of the Gaussian filter, in pixels. The filter is truncated at three standard
            deviations.
    """

    def __init__(self, alpha: float = 34.0, sigma: float = 4.0) -> None:
        self.alpha = checks.number("Elastic alpha", alpha, above=0)
        self.sigma = checks.number("Elastic sigma", sigma, above=0)

    def __call__(self, images: Array, draws: SampleRNG) -> Array:
        _, height, width, _ = images.shape
        field = draws.uniform(-self.alpha, self.alpha, 2, height, width)
        field = self._smooth(self._smooth(field, 2), 3)  # (N, 2, H, W)
        field[:, 0] += np.arange(height, dtype=np.float32)[:, np.newaxis]
        field[:, 1] += np.arange(width, dtype=np.float32)
        return _sampled(images, field[:, 0], field[:, 1])

    def _smooth(self, field: Array, axis: int) -> Array:
        """Smooth along one axis, in an order that does not depend on the batch size."""
        length = field.shape[axis]
        reach = math.ceil(min(3 * self.sigma, length - 1))
        weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / self.sigma) ** 2)
        weights = (weights / weights.sum()).astype(np.float32)
        smooth = np.zeros_like(field)
        for offset in range(-reach, reach + 1):
            to, from_ = [slice(None)] * 4, [slice(None)] * 4
            to[axis] = slice(max(0, -offset), length - max(0, offset))
            from_[axis] = slice(max(0, offset), length - max(0, -offset))
            smooth[tuple(to)] += field[tuple(from_)] * weights[offset + reach]
        return smooth


class Mixing(Augmentation):
    """Base class of augmentations that mix each image and label with another sample of the data set or shard.

    The preceding augmentations are applied to both images. Labels become class probabilities (N, C). The share of the
    first image, lambda, is drawn from Beta(alpha, alpha).
    """

    def __init__(self, alpha: float = 1.0) -> None:
        # from about 520, the density in `_beta` underflows
        self.alpha = checks.number(f"{type(self).__name__} alpha", alpha, minimum=0.01, below=500)

    def __call__(self, images: Array, draws: SampleRNG) -> Array:
        """Return the images unchanged, because `augmented` mixes them."""
        return images

    def drawn(self, draws: SampleRNG, count: int, shape: Sequence[int]) -> tuple[Array, Array]:
        """Draw the rows (N,) of the other images, below `count`, and lambda per pixel, (N, H, W) or (N, 1, 1)."""
        rows = draws.integers(0, count - 1)
        return rows, self.share(np.interp(draws.uniform(0, 1), *_beta(self.alpha)), draws, *shape[:2])

    @abstractmethod
    def share(self, drawn: Array, draws: SampleRNG, height: int, width: int) -> Array:
        """Convert lambda per image, (N,), to lambda per pixel, (N, H, W) or (N, 1, 1) float32."""


class MixUp(Mixing):
    """Average two images and their labels with random weights (Zhang et al. 2018)."""

    def __init__(self, alpha: float = 0.2) -> None:
        super().__init__(alpha)

    def share(self, drawn: Array, draws: SampleRNG, height: int, width: int) -> Array:
        return drawn[:, np.newaxis, np.newaxis].astype(np.float32)


class CutMix(Mixing):
    """Paste a rectangle of another image, centered at a random pixel (Yun et al. 2019). Labels are mixed by area."""

    def share(self, drawn: Array, draws: SampleRNG, height: int, width: int) -> Array:
        side, inside = np.sqrt(1 - drawn)[:, np.newaxis], []
        for length in (height, width):
            center, half = draws.integers(0, length - 1)[:, np.newaxis], side * length / 2
            inside.append((np.arange(length) >= np.rint(center - half)) & (np.arange(length) < np.rint(center + half)))
        return 1 - (inside[0][:, :, np.newaxis] & inside[1][:, np.newaxis]).astype(np.float32)


@lru_cache
def _beta(alpha: float) -> tuple[Array, Array]:
    """Return values of the CDF of Beta(alpha, alpha), and the points at which they are taken, in ascending order."""
    power = min(alpha, 1.0)  # the density with respect to x**power is finite
    points = np.linspace(0, 0.5**power, 4097) ** (1 / power)
    density = points ** (alpha - power) * (1 - points) ** (alpha - 1)
    below = np.append(0, np.cumsum(density[1:] + density[:-1]))
    below *= 0.5 / below[-1]
    return np.append(below, 1 - below[-2::-1]), np.append(points, 1 - points[-2::-1])


def _sampled(images: Array, y: Array, x: Array) -> Array:
    """Sample images (N, H, W, C) at positions y, x (N, H, W), with bilinear interpolation."""
    count, height, width, channels = images.shape
    padded = np.zeros((count, height + 2, width + 2, channels), np.uint8)  # zero padding
    padded[:, 1:-1, 1:-1] = images
    y, x = np.clip(y, -1, height) + np.float32(1), np.clip(x, -1, width) + np.float32(1)
    top, left = np.minimum(y.astype(np.int64), height), np.minimum(x.astype(np.int64), width)
    down = (y - top).astype(np.float32)[..., np.newaxis]
    across = (x - left).astype(np.float32)[..., np.newaxis]
    pixels = padded.reshape(-1, channels)
    first = (np.arange(count)[:, np.newaxis, np.newaxis] * (height + 2) + top) * (width + 2) + left  # (N, H, W)

    def at(offset: int) -> Any:
        return np.take(pixels, first + offset, axis=0).astype(np.float32)  # (N, H, W, C)

    above, below = at(0), at(width + 2)
    above += (at(1) - above) * across
    below += (at(width + 3) - below) * across
    above += (below - above) * down
    return (above + np.float32(0.5)).astype(np.uint8)


NAMES: dict[str, type[Augmentation]] = {
    "shift": Shift,
    "flip": HorizontalFlip,
    "rotate": Rotate,
    "scale": Scale,
    "elastic": Elastic,
    "cutout": Cutout,
    "color_jitter": ColorJitter,
    "mixup": MixUp,
    "cutmix": CutMix,
}
PRESETS: dict[str, list[Augmentation | str]] = {
    "light": ["shift"],
    "standard": ["shift", "rotate", "scale"],  # no flips, because they change digits and letters
}
