"""Memory and calls for `kernels/winograd.py`."""

from __future__ import annotations

import functools

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels import winograd
from cupynet.backend.cpu.kernels.narrow import bits
from cupynet.backend.cpu.kernels.vectors import lanes
from cupynet.backend.reference.dense import DenseOps
from cupynet.backend.window import Window

KERNELS = ((3, 3), (5, 5))
USUAL_SIDE = 4  # preferred height and width of tiles, for small rounding errors and few compiled kernels
MAX_FRACTION = 0.85  # use another size only if it needs at most this fraction of the products
MIN_CHANNELS = 10  # minimum number of channels and of filters; fewer do not fill vectors
MAX_PRODUCTS = 0.5  # maximum number of products, relative to direct sums, for which transforms pay off
MIN_TILES = 8  # minimum number of tiles for which the gradients of transformed filters pay off
MIN_GROUP = 16  # minimum number of tiles computed together
GROUP_BYTES = 400_000  # maximum size of a group's transformed tiles, unless it is minimal; they stay in the L2 cache
LARGEST = 1e32  # sums of |x| |w| below this do not overflow in float: transforms scale them by less than 1e5
ROWS = 8  # maximum number of rows in a `block`
NO_INDICES = np.empty((0, 0, 0, 0), np.uint8)


@functools.lru_cache(maxsize=256)
def tiling_of(
    image: tuple[int, int, int], filters: int, window: Window, itemsize: int, *, pools: bool = False
) -> Tiling | None:
    """Return the tiling of a convolution, followed by 2x2 pooling if `pools`, or None if direct sums are faster."""
    supported = window.kernel in KERNELS and window.stride == window.dilation == (1, 1)
    if not supported or min(image[2], filters) < MIN_CHANNELS or not window.fits(*image[:2]):
        return None
    sides = range(2, len(winograd.POINTS) + 3 - window.kernel[0], 1 + pools)
    tilings = [Tiling(image, filters, window, itemsize, side, pools=pools) for side in sides]
    found = min(tilings, key=lambda tiling: tiling.products * (MAX_FRACTION if tiling.side == USUAL_SIDE else 1))
    return found if found.products <= MAX_PRODUCTS else None


class Tiling:
    """Divides the outputs of a convolution into square tiles of `side` x `side`.

    Both passes return False, and the caller computes direct sums, if x or the weight contains NaN or values that might
    overflow. dy is not checked.

    Attributes:
        pool_size: 2 with pooling, or 1.
        products: the number of products, relative to direct sums.
    """

    def __init__(
        self, image: tuple[int, int, int], filters: int, window: Window, itemsize: int, side: int, *, pools: bool
    ) -> None:
        self.image, self.filters, self.window, self.pool_size = image, filters, window, 1 + pools
        self.side, self.lanes, self.size = side, lanes(itemsize), window.kernel[0]
        outputs = [length - length % self.pool_size for length in window.output(*image[:2])]
        self.down, self.across = (-(-length // side) for length in outputs)
        points, direct = self.points**2 * self.down * self.across, self.size**2 * outputs[0] * outputs[1]
        self.products = points / direct if direct else 1.0
        self.blocks = [winograd.block(count, itemsize) for count in (image[2], filters)]
        # C and O, each rounded up to a multiple of its block width
        self.padded = [-(-n // width) * width for n, (_, width) in zip((image[2], filters), self.blocks, strict=True)]

    @property
    def points(self) -> int:
        """Height and width of a transformed tile."""
        return self.size + self.side - 1

    def forward(
        self, backend: DenseOps, x: Array, weight: Array, bias: Array | None, y: Array, indices: Array = NO_INDICES
    ) -> bool:
        """Write the outputs y (N, H', W', O), and the indices of the maxima with pooling. weight: (K, K, C, O)."""
        offset = np.zeros(self.filters, weight.dtype) if bias is None else bias.astype(weight.dtype, copy=False)
        filters, tiles = _flat(backend, weight, self.padded[1]), self._tiles(backend, weight.dtype, gradients=False)
        forward = winograd.forward(self.size, self.side, *self.blocks[1], self.pool_size)
        return forward(bits(np.ascontiguousarray(x)), _bound(weight), filters, offset, tiles, bits(y), indices)

    def backward(
        self, backend: DenseOps, dy: Array, x: Array, weight: Array, weight_grad: Array, dx: Array,
        indices: Array = NO_INDICES,
    ) -> bool:  # fmt: skip
        """Add the gradient of the weight, and write dx (N, H, W, C) unless its length is 0.

        Also returns False if there are so few tiles that direct sums are faster.
        """
        if len(x) * self.down * self.across < MIN_TILES:
            return False
        tiles, turned = self._tiles(backend, weight.dtype), weight.reshape(-1, 1)
        if len(dx):
            turned = _flat(backend, weight.transpose(0, 1, 3, 2), self.padded[0])
        grad = backend.borrow((self.size**2, tiles.weights.shape[1] * self.padded[1]), weight.dtype)
        ends = self.down * self.side + self.size - 1, self.across * self.side + self.size - 1
        if any(
            end - first < length for end, (first, _), length in zip(ends, self.window.padding, self.image, strict=False)
        ):
            dx[...] = 0  # pooling leaves out the last pixels
        backward = winograd.backward(self.size, self.side, *self.blocks[1], *self.blocks[0], self.pool_size)
        x, dy = np.ascontiguousarray(x), np.ascontiguousarray(dy)
        if not backward(bits(x), _bound(weight), bits(dy), indices, turned, tiles, grad, bits(dx)):
            return False
        grad = grad.reshape(self.size, self.size, *tiles.weights.shape[1:])
        weight_grad += grad[:, :, : self.image[2], : self.filters]
        return True

    def _tiles(self, backend: DenseOps, dtype: np.dtype[np.generic], *, gradients: bool = True) -> winograd.Tiles:
        n, (c, o), channels = self.points, self.padded, self.image[2]
        tiles = max(MIN_GROUP, GROUP_BYTES // (n * n * (c + o) * dtype.itemsize))
        width, rows = self.across * self.side + self.size - 1, -(-max(tiles, self.across) // ROWS) * ROWS
        beyond = max(self.lanes, ROWS)
        shapes = {
            "frame": (n, width * channels + 2 * self.lanes),
            "gradient": (n * width * gradients, c),
            "outputs": (self.side**2, o),
            "weights": (n * n, -(-channels // ROWS) * ROWS, o),
            "turned": (n * n * gradients, self.filters, c),
            "points": (rows, n * n * c + beyond),
            "products": (rows, n * n * o + beyond),
        }
        memory = {name: backend.borrow(shape, dtype) for name, shape in shapes.items()}
        (top, _), (left, _) = self.window.padding
        group = max(1, tiles // self.across)  # whole rows
        return winograd.Tiles(self.down, self.across, top, left, group, self.lanes, **memory)


def _flat(backend: DenseOps, weight: Array, columns: int) -> Array:
    """Pad and flatten filters: (K, K, A, B) -> (K · K, A · columns)."""
    padded = backend.borrow((*weight.shape[:3], columns), weight.dtype)
    padded[..., weight.shape[3] :] = 0
    padded[..., : weight.shape[3]] = weight
    return padded.reshape(len(weight) ** 2, -1)


def _bound(weight: Array) -> Array:
    """Return the bound for the sum of |x| below which nothing overflows, or NaN if a weight is NaN."""
    with np.errstate(over="ignore"):
        return weight.dtype.type(LARGEST) / np.maximum(np.abs(weight).sum(), 1)
