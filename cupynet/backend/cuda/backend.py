"""The GPU backend: arrays are CuPy's, products are cuBLAS's, everything else is a kernel of ours."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np

from cupynet.backend import philox, shapes
from cupynet.backend.array import Array
from cupynet.backend.backend import Backend
from cupynet.backend.cuda.conv_pool import ConvPool
from cupynet.backend.cuda.cublas import Cublas
from cupynet.backend.cuda.failures import failure
from cupynet.backend.cuda.graph_capture import Recorder
from cupynet.backend.cuda.launch import KIND_OF, MOST_BLOCKS_DOWN, TERMS, Kernels, first_use, power_of_two
from cupynet.backend.cuda.resident import ResidentTransfer, resident
from cupynet.backend.cuda.ring import RingTransfer
from cupynet.backend.cuda.staging import check_rows
from cupynet.backend.failure import Failure
from cupynet.backend.fusion import Convolution, MaxPool, Operation, Pair
from cupynet.backend.pixels import FRACTIONS, PixelScale
from cupynet.backend.policy import DtypePolicy
from cupynet.backend.reference.activation import NAMES
from cupynet.backend.transfer import Shared, Transfer
from cupynet.backend.update_rules import Layers, Move, Rule
from cupynet.backend.window import Window
from cupynet.checks import tf32_products
from cupynet.errors import ConfigError

MOST_VALUES = 1 << 31  # of an image, its windows or a row: kernels number these in 32 bits
ACROSS = 32  # columns that a block adds up side by side
MOST_ALONG = 32  # blocks along a layer's weights
MERGED = 8  # columns whose parts a block merges: the fewer, the more of its threads share the parts of one
MOST_PARTS = 256  # sums of parts that are added up in a second pass
FEW_ROWS = 128  # in one part at least
SIXTEEN = 16  # bytes in one access

_thread = threading.local()  # `mark`: of the backend that the thread has activated last


class CupyBackend(Backend):
    """Arrays of CuPy on one device, and 2-D products of cuBLAS; the other operations are kernels (`kernels/`).

    Each worker calls `activate` once, in its own thread: the current device and stream are the thread's, and every
    array and kernel of the worker belongs to its non-blocking stream. What other threads ask of this backend (a
    prefetcher making batches, a caller reading weights) is put on the same stream: it happens in the order it was asked
    for, and memory that was freed is written again only after its last use. While the worker records a step they wait.

    Kernels trust the shapes they are given and take contiguous arrays in the policy's precisions alone: each operation
    checks the shapes, and leaves arrays of another kind to the reference.

    Args:
        dtype: half, bfloat16, float or double.
        device: number of the GPU.
        max_block_size, max_grid_size: of a launch, see `Kernels`.
        tf32: whether products of float are made in TF32, see `Cublas`.
    """

    name = "cupy"
    on_gpu = True

    def __init__(
        self,
        dtype: str = "float",
        device: int = 0,
        max_block_size: int = 256,
        max_grid_size: int | None = None,
        *,
        tf32: bool = False,
    ) -> None:
        import cupy

        self.xp = cupy
        self._stream: Any = None
        self._second_stream: Any = None
        self._before = 0
        self._mark = object()  # on the thread whose own device and stream are this backend's
        self.apart = threading.RLock()  # held by the worker while it records, and by others who ask for anything
        super().__init__(DtypePolicy.of(dtype, half_arithmetic=True), device)
        self.controls: Array | None = None  # what a step reads its numbers from, see `Recorder`
        self._totals: dict[str, Array] = {}
        self._losses: dict[int, Array] = {}
        tf32 = tf32_products("tf32", tf32, self.name, self.policy.name)
        self.options = {"max_block_size": max_block_size, "max_grid_size": max_grid_size, "tf32": tf32}
        self._cublas: Cublas | None = None  # of the stream that products were last made on
        self.kernels = Kernels(cupy, device, self.here, max_block_size, max_grid_size)
        self._kind = self.policy.name
        self._wide = "double" if self.policy.accumulate == np.float64 else "float"

    # arrays ---------------------------------------------------------------------------------------------------------

    def activate(self) -> None:
        if getattr(_thread, "mark", None) is self._mark:
            return
        self._before = int(self.xp.cuda.runtime.getDevice())
        self.xp.cuda.Device(self.device).use()
        if self._stream is None:  # another thread may go on where one has failed: in the order of the same stream
            self._stream = self.xp.cuda.Stream(non_blocking=True)
        self._stream.__enter__()  # after `use`, the end of a `with` block would bring the null stream back
        _thread.mark = self._mark = object()  # the thread that had it before asks like any other from now on

    def deactivate(self) -> None:
        if getattr(_thread, "mark", None) is self._mark:
            self._stream.__exit__(None, None, None)
            self.xp.cuda.Device(self._before).use()
            _thread.mark = None

    def here(self) -> AbstractContextManager[Any]:
        """See `Backend.here`: its device and stream; the worker has them anyway."""
        if getattr(_thread, "mark", None) is self._mark:
            current = self.xp.cuda.get_current_stream()
            if current.ptr == self._stream.ptr:  # else somebody computes beside the worker, in its thread
                return nullcontext()
        there = ExitStack()
        there.enter_context(self.apart)
        there.enter_context(self.xp.cuda.Device(self.device))
        if self._stream is not None:
            there.enter_context(self._stream)
        return there

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        with self.here():
            return super().allocate(shape, dtype)

    def asarray(self, array: Any, dtype: Any = None) -> Array:
        with self.here():
            return super().asarray(array, dtype)

    def address(self, array: Array) -> int:
        return int(getattr(array.data, "ptr", 0))  # an array on the host was never borrowed

    def to_host(self, array: Array) -> Any:
        with self.here():
            return self.xp.asnumpy(array)

    def synchronize(self) -> None:
        with self.xp.cuda.Device(self.device):
            self.xp.cuda.get_current_stream().synchronize()  # of the calling thread, which may be another
            if self._stream is not None:
                self._stream.synchronize()

    def stream(self) -> int:
        return int(self._stream.ptr)

    def place(self) -> str:
        return f"{platform.node()} {self.xp.cuda.runtime.deviceGetPCIBusId(self.device)}"

    def recorder(self) -> Recorder:
        return Recorder(self)

    def failure(self, error: BaseException, device: int) -> Failure | None:
        return failure(error, device)

    def mark(self) -> Any:
        with self.here():
            event = self.xp.cuda.Event(disable_timing=True)
            event.record()
            return event

    def after(self, *marks: Any) -> None:
        with self.here():
            for mark in marks:
                self.xp.cuda.get_current_stream().wait_event(mark)

    def fetch(self, out: Array, array: Array, source: Backend) -> None:
        with self.here():
            if source.device == self.device:
                out[...] = array
                return
            stream = self.xp.cuda.get_current_stream().ptr
            self.xp.cuda.runtime.memcpyPeerAsync(
                out.data.ptr, self.device, array.data.ptr, source.device, out.nbytes, stream
            )

    def load_images(self, images: Any, samples: Any, pixels: PixelScale = FRACTIONS) -> Array:
        """See `Backend.load_images`. Images on the device are gathered there, by samples that are on the host."""
        fits = images.ndim == 4 and len(pixels.scale) in (1, images.shape[3])
        if images.dtype != np.uint8 or not fits or not images.flags.c_contiguous:
            with self.here():
                return super().load_images(images, samples, pixels)
        if not isinstance(images, self.xp.ndarray):
            chosen, order = self.asarray(images[samples]), None
            count = len(chosen)
        else:
            samples = np.asarray(samples, np.int64)
            check_rows(samples, len(images))
            chosen, order, count = images, self.asarray(samples), len(samples)
        batch = self.allocate((count, *images.shape[1:]), self.policy.storage)
        self._gather(chosen, order, batch, self.kernels, self._tables(pixels))
        return batch

    def _tables(self, pixels: PixelScale) -> tuple[Array, Array]:
        """Scale and shift on the device, on the worker's stream."""
        wide = self.policy.accumulate
        return self.asarray(np.array(pixels.scale, wide)), self.asarray(np.array(pixels.shift, wide))

    def _gather(
        self, images: Array, samples: Array | None, out: Array, kernels: Kernels, tables: tuple[Array, Array]
    ) -> None:
        """out (N, H, W, C) = images (S, H, W, C) uint8 at samples (N,) int64, scaled by what `_tables` has made, all on
        the device; on the stream of `kernels`. Without samples the first N."""
        count, size, channels = len(out), int(np.prod(out.shape[1:])), len(tables[0])
        kernels.images(f"load_images_{self._kind}", count, size, images, samples, *tables, out, count, size, channels)

    @property
    def _arrivals(self) -> Any:
        """The stream on which batches come to the device while the worker computes on its own; made once."""
        if self._second_stream is None:
            with self.xp.cuda.Device(self.device):
                self._second_stream = self.xp.cuda.Stream(non_blocking=True)
        return self._second_stream

    def transfer(
        self,
        images: Any,
        labels: Any,
        *,
        batch_size: int,
        ahead: int,
        on_device: bool | str,
        shared: Shared,
        pixels: PixelScale = FRACTIONS,
        edited: bool = False,
    ) -> Transfer:
        """See `Backend.transfer`. Images that are edited on the host come over the ring.

        ConfigError: the images are to stay on the device, and do not fit, or are edited.
        """
        if images is None:
            return ResidentTransfer(self, None, labels, batch_size, shared)
        if edited and on_device is True:
            raise ConfigError("data_on_device=true: images are augmented on the host: take auto, or no augmentation")
        there = resident(self, images, on_device, shared) if on_device and not edited else None
        if there is None:
            return RingTransfer(self, images, labels, batch_size, ahead, pixels)
        try:
            return ResidentTransfer(self, there, labels, batch_size, shared, pixels)
        except BaseException:
            there.leave(self, shared)
            raise

    def convert(self, source: Array, target: Array) -> None:
        shapes.alike("convert", source, target)
        storage, wide = self.policy.storage, self.policy.accumulate
        if not self._contiguous(source, target) or {source.dtype, target.dtype} != {storage, wide}:
            return super().convert(source, target)
        name = "widen" if target.dtype == wide else "narrow"
        self._flat(f"{name}_{self._kind}", target.size, source, target)

    # what kernels take ----------------------------------------------------------------------------------------------

    def _contiguous(self, *arrays: Array) -> bool:
        return all(array.flags.c_contiguous for array in arrays)

    def _stores(self, *arrays: Array) -> bool:
        """Whether kernels take these activations: contiguous, in the storage precision."""
        storage = self.policy.storage
        return all(array.dtype == storage and array.flags.c_contiguous for array in arrays)

    def _updates(self, *vectors: Array) -> bool:
        """Whether kernels take these flat vectors: contiguous, in the accumulation precision."""
        wide = self.policy.accumulate
        return all(vector.dtype == wide and vector.flags.c_contiguous for vector in vectors)

    def _flat(self, name: str, count: int, *arguments: Any) -> None:
        """Launch a kernel over flat arrays; the number of values is its last argument. Of nothing there is none."""
        if not count:
            return
        widest = max(array.dtype.itemsize for array in arguments if getattr(array, "size", 0) == count)
        self.kernels.flat(name, count, *arguments, count, at_once=SIXTEEN // widest)

    # products -------------------------------------------------------------------------------------------------------

    def _gemm(self, left: Array, right: Array, out: Array, beta: float = 0.0) -> None:
        """See `Backend._gemm`; beta · out is added. The first one on a stream allocates memory."""
        with self.here():
            if self._cublas is None or self._cublas.stream != self.xp.cuda.get_current_stream().ptr:
                self._cublas = None  # the next one takes over its handle
                with first_use:
                    self._cublas = Cublas(self.xp, tf32=self.options["tf32"])
            self._cublas.gemm(left, right, out, beta=beta)

    def _operand(self, a: Array) -> tuple[Array, bool]:
        """See `Backend._operand`. cuBLAS takes no array with gaps, neither as it stands nor transposed."""
        if a.flags.c_contiguous or a.flags.f_contiguous:
            return super()._operand(a)
        copy = self.borrow(a.shape, self.policy.compute)
        copy[...] = a
        return copy, True

    def _add_product(self, grad: Array, a: Array, dy: Array) -> None:
        """See `Backend._add_product`. The sums are made in the gradient's precision, and nothing is rounded before."""
        if not self._updates(grad) or not self._stores(a, dy):
            return super()._add_product(grad, a, dy)
        self._gemm(a.T, dy, grad, beta=1.0)

    def _add_bias(self, y: Array, bias: Array) -> None:
        if not self._stores(y, bias) or y.shape[1:] != bias.shape:
            return super()._add_bias(y, bias)
        rows, columns = y.shape
        at_once = SIXTEEN // y.dtype.itemsize
        if columns % at_once:
            at_once = 1
        self.kernels.flat(f"add_bias_{self._kind}", y.size, y, bias, rows, columns, 0, at_once=at_once)

    def _add_column_sums(self, grad: Array, dy: Array) -> None:
        """See `Backend._add_column_sums`. Parts of the rows first, then their sums: always in the same order."""
        if not self._stores(dy) or not self._updates(grad) or grad.shape != dy.shape[1:]:
            return super()._add_column_sums(grad, dy)
        rows, columns = dy.shape
        length = max(FEW_ROWS, -(-rows // MOST_PARTS))
        parts = -(-rows // length)
        if parts <= 1:
            return self._column_sums(self._kind, dy, grad, length, 1, add=True)
        sums = self.borrow((parts, columns), self.policy.accumulate)
        self._column_sums(self._kind, dy, sums, length, parts, add=False)
        self._column_sums(self._wide, sums, grad, parts, 1, add=True)
        self.give_back(sums)

    def _column_sums(self, kind: str, values: Array, sums: Array, length: int, parts: int, *, add: bool) -> None:
        """`parts` sums of `length` rows each."""
        rows, columns = values.shape
        if not rows or not columns:
            return
        most, threads = self.kernels.blocks, self.kernels.threads
        across = min(ACROSS, threads, power_of_two(columns))
        down = min(parts, most)
        grid = (min(-(-columns // across), max(1, most // down)), down)
        block = (across, threads // across)
        self.kernels.launch(f"column_sums_{kind}", grid, block, values, sums, rows, columns, length, parts, int(add))

    # windows --------------------------------------------------------------------------------------------------------

    def im2col(self, x: Array, window: Window) -> Array:
        shapes.windows("im2col", x.shape, window)
        n, _, _, channels = x.shape
        geometry, values = self._geometry(x.shape, window), self._values(x.shape, window)
        if values is None or not self._stores(x) or self.policy.compute != self.policy.storage:
            return super().im2col(x, window)
        rows, cols = window.output(*x.shape[1:3])
        columns = self.borrow((n * rows * cols, window.places * channels))
        at_once = 4 if channels % 4 == 0 else 1
        self.kernels.images(f"im2col_{self._kind}", n, values // at_once, x, columns, n, *geometry, *window.dilation)
        return columns

    def col2im(self, columns: Array, shape: tuple[int, ...], window: Window) -> Array:
        shapes.windows("col2im", shape, window)
        n, height, width, channels = shape
        geometry, values = self._geometry(shape, window), self._values(shape, window)
        if values is None or not self._stores(columns):
            return super().col2im(columns, shape, window)
        rows, cols = window.output(height, width)
        shapes.shape_of("col2im", "columns", columns, (n * rows * cols, window.places * channels))
        x = self.borrow(shape)
        self.kernels.images(
            f"col2im_{self._kind}", n, height * width * channels, columns, x, n, *geometry, *window.dilation
        )
        return x

    def _geometry(self, shape: tuple[int, ...], window: Window) -> tuple[int, ...]:
        """What kernels over windows are told of images (N, H, W, C)."""
        (top, _), (left, _) = window.padding
        return (*shape[1:], *window.output(*shape[1:3]), *window.kernel, *window.stride, top, left)

    def _values(self, shape: tuple[int, ...], window: Window) -> int | None:
        """How many values the windows of one image have; None where they are more than kernels can number."""
        _, height, width, channels = shape
        rows, cols = window.output(height, width)
        values = rows * cols * window.places * channels
        padded_height, padded_width = window.padded(height, width)
        return values if max(values, padded_height * padded_width * channels, shape[0]) < MOST_VALUES else None

    def _grouped(self, x: Array, weight: Array, window: Window, groups: int) -> tuple[Array, Array]:
        n, filters = len(x), weight.shape[3]
        if weight.shape[2] > 1 or not self._stores(x, weight) or self._values((*x.shape[:3], filters), window) is None:
            return super()._grouped(x, weight, window, groups)
        y = self.borrow((n, *window.output(*x.shape[1:3]), filters))
        told = (n, *self._geometry(x.shape, window), *window.dilation, filters // groups)
        self.kernels.images(f"depthwise_{self._kind}", n, y.size // max(n, 1), x, weight, y, *told)
        return y, None

    def _grouped_backward(
        self, dy: Array, columns: Array, x: Array, weight: Array, weight_grad: Array, window: Window, groups: int, *,
        need_dx: bool,
    ) -> Array | None:  # fmt: skip
        """See `Backend._grouped_backward`. Depthwise, parts of the sums first, then their sums: always in one order."""
        if columns is not None or not self._stores(dy, x, weight) or not self._updates(weight_grad):
            given = dy, columns, x, weight, weight_grad, window, groups
            return super()._grouped_backward(*given, need_dx=need_dx)
        n, height, width, channels = x.shape
        told = (n, *self._geometry(x.shape, window), *window.dilation, weight.shape[3] // groups)
        parts = max(1, min(n * window.output(height, width)[0], MOST_PARTS))
        sums = self.borrow((parts, weight.size), self.policy.accumulate)
        self.kernels.images(f"depthwise_weight_{self._kind}", parts, weight.size, x, dy, sums, *told, parts)
        self._column_sums(self._wide, sums, weight_grad.reshape(-1), parts, 1, add=True)
        self.give_back(sums)
        if not need_dx:
            return None
        dx, values = self.borrow(x.shape), height * width * channels
        self.kernels.images(f"depthwise_input_{self._kind}", n, values, dy, weight, dx, *told)
        return dx

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        if not self._stores(x) or x.ndim != 4 or self._values(x.shape, window) is None:
            return super().max_pool2d(x, window)
        shapes.windows("max_pool2d", x.shape, window, pool=True)
        return self._pool(x, None, window, self.winner_dtype(window), relu=False)

    def _pool(self, x: Array, bias: Array | None, window: Window, numbers: Any, *, relu: bool) -> tuple[Array, Array]:
        """The pool of x + bias behind a ReLU or not, and its winners in the integers `numbers`; see pooling.cu."""
        n, _, _, channels = x.shape
        y = self.borrow((n, *window.output(*x.shape[1:3]), channels))
        winners = self.borrow(y.shape, numbers)
        name, geometry = f"max_pool_{self._kind}_{winners.dtype.name}", self._geometry(x.shape, window)
        values = y.size // max(n, 1)
        self.kernels.images(name, n, values, x, bias, y, winners, n, *geometry, int(relu))
        return y, winners

    def max_pool2d_backward(self, dy: Array, winners: Array, shape: tuple[int, ...], window: Window) -> Array:
        shapes.windows("max_pool2d_backward", shape, window, pool=True)
        if not self._stores(dy) or not self._contiguous(winners) or self._values(shape, window) is None:
            return super().max_pool2d_backward(dy, winners, shape, window)
        n, height, width, channels = shape
        shapes.shape_of("max_pool2d_backward", "dy", dy, (n, *window.output(height, width), channels))
        shapes.alike("max_pool2d_backward", dy, winners)
        dx = self.borrow(shape)
        name, geometry = f"max_pool_backward_{self._kind}_{winners.dtype.name}", self._geometry(shape, window)
        self.kernels.images(name, n, height * width * channels, dy, winners, dx, n, *geometry)
        return dx

    def avg_pool2d(self, x: Array, window: Window) -> Array:
        shapes.windows("avg_pool2d", x.shape, window, pool=True)
        if not self._stores(x) or self._values(x.shape, window) is None:
            return super().avg_pool2d(x, window)
        n, height, width, channels = x.shape
        y = self.borrow((n, *window.output(height, width), channels))
        values = y.size // max(n, 1)
        self.kernels.images(f"avg_pool_{self._kind}", n, values, x, y, n, *self._geometry(x.shape, window))
        return y

    def avg_pool2d_backward(self, dy: Array, shape: tuple[int, ...], window: Window) -> Array:
        shapes.windows("avg_pool2d_backward", shape, window, pool=True)
        if not self._stores(dy) or self._values(shape, window) is None:
            return super().avg_pool2d_backward(dy, shape, window)
        n, height, width, channels = shape
        shapes.shape_of("avg_pool2d_backward", "dy", dy, (n, *window.output(height, width), channels))
        dx, name = self.borrow(shape), f"avg_pool_backward_{self._kind}"
        self.kernels.images(name, n, height * width * channels, dy, dx, n, *self._geometry(shape, window))
        return dx

    def fused_pair(self, first: Operation, second: Operation) -> Pair | None:
        fuse = FUSED.get((type(first), type(second)))
        return None if fuse is None else fuse(self, first, second)

    # activations ----------------------------------------------------------------------------------------------------

    def relu(self, x: Array) -> Array:
        if not self._stores(x):
            return super().relu(x)
        self._flat(f"relu_{self._kind}", x.size, x)
        return x

    def relu_backward(self, dy: Array, y: Array) -> Array:
        shapes.alike("relu_backward", dy, y)
        if not self._stores(dy, y):
            return super().relu_backward(dy, y)
        self._flat(f"relu_backward_{self._kind}", dy.size, dy, y)
        return dy

    def softmax(self, x: Array) -> Array:
        if not self._stores(x) or not x.ndim or x.shape[-1] >= MOST_VALUES:
            return super().softmax(x)
        columns = x.shape[-1]
        rows = x.size // max(columns, 1)
        self.kernels.rows(f"softmax_{self._kind}", rows, columns, x, rows, columns)
        return x

    def softmax_backward(self, dy: Array, y: Array) -> Array:
        if not self._stores(dy, y) or dy.shape != y.shape or not y.ndim or y.shape[-1] >= MOST_VALUES:
            return super().softmax_backward(dy, y)
        columns = y.shape[-1]
        rows = y.size // max(columns, 1)
        self.kernels.rows(f"softmax_backward_{self._kind}", rows, columns, dy, y, rows, columns)
        return dy

    def pointwise(self, name: str, x: Array, out: Array, slope: float = 0.0) -> Array:
        shapes.alike("pointwise", x, out)
        if not self._stores(x, out) or name not in NAMES:
            return super().pointwise(name, x, out, slope)
        self._flat(f"pointwise_{self._kind}", x.size, x, out, NAMES.index(name), slope)
        return out

    def pointwise_backward(self, name: str, dy: Array, kept: Array, slope: float = 0.0) -> Array:
        shapes.alike("pointwise_backward", dy, kept)
        if not self._stores(dy, kept) or name not in NAMES:
            return super().pointwise_backward(name, dy, kept, slope)
        self._flat(f"pointwise_backward_{self._kind}", dy.size, dy, kept, NAMES.index(name), slope)
        return dy

    def softmax_cross_entropy(
        self, logits: Array, labels: Array, smoothing: float = 0.0, weights: tuple[float, ...] | None = None
    ) -> tuple[Array, Array]:
        """See `Backend.softmax_cross_entropy`. A label that is no class makes its loss NaN: nobody waits to look."""
        if not self._stores(logits) or max(logits.shape) >= MOST_VALUES:
            self._not_steered("softmax_cross_entropy")
            return super().softmax_cross_entropy(logits, labels, smoothing, weights)
        own = None if weights is None else self.constants(weights)
        if own is not None:
            shapes.shape_of("softmax_cross_entropy", "weights", own, logits.shape[1:])
        return self._loss("softmax_cross_entropy", logits, labels, (own,), smoothing, len(logits))

    def target_loss(self, kind: str, prediction: Array, labels: Array, parameter: float = 0.0) -> tuple[Array, Array]:
        """See `Backend.target_loss`. A label that is no class makes its loss NaN: nobody waits to look."""
        if not self._stores(prediction) or max(prediction.shape) >= MOST_VALUES:
            self._not_steered("target_loss")
            return super().target_loss(kind, prediction, labels, parameter)
        return self._loss(f"{kind}_loss", prediction, labels, (), parameter, prediction.size)

    def _loss(
        self, name: str, prediction: Array, labels: Array, more: tuple[Any, ...], parameter: float, count: int
    ) -> tuple[Array, Array]:
        """The losses (N,) and the gradient (N, O) of a kernel; `count`: what a mean is taken over."""
        n, outputs = prediction.shape
        shapes.shape_of(name, "labels", labels, (n,))
        labels = self.asarray(labels, np.int64)
        if n not in self._losses:  # none is given up: a recorded step writes there
            self._losses[n] = self.allocate((n,), self.policy.accumulate)
        losses = self._losses[n]
        gradient = self.borrow(prediction.shape)
        scale = (self.loss_scale if self.controls is None else 1) / max(count, 1)
        arguments = prediction, labels, *more, losses, gradient, parameter, scale, self.controls, n, outputs
        self.kernels.rows(f"{name}_{self._kind}", n, outputs, *arguments)
        return losses, gradient

    # normalisation --------------------------------------------------------------------------------------------------

    def _normalises(self, x: Array, *others: Array) -> bool:
        """Whether kernels take these activations, and vectors of their channels in the storage precision."""
        shapes.channels("normalisation", x, *others)
        return self._stores(x, *others) and x.shape[-1] < MOST_VALUES

    def _chunks(self, rows: int) -> tuple[int, int]:
        """How many rows are added up together first, and how many such parts there are."""
        length = max(FEW_ROWS, -(-rows // MOST_PARTS))
        return length, -(-rows // length)

    def _by_chunks(self, name: str, rows: int, columns: int, *arguments: Any) -> None:
        """Launch a kernel that makes sums of parts of the columns; these sizes are its last arguments."""
        length, parts = self._chunks(rows)
        most, threads = self.kernels.blocks, self.kernels.threads
        across, down = min(ACROSS, threads, power_of_two(columns)), min(parts, most)
        grid = (min(-(-columns // across), max(1, most // down)), down)
        self.kernels.launch(name, grid, (across, threads // across), *arguments, rows, columns, length, parts)

    def _parts(self, rows: int, columns: int) -> Array:
        return self.borrow((self._chunks(rows)[1], 2 * columns), self.policy.accumulate)

    def _added(self, parts: Array, columns: int) -> Array:
        """Two sums of each column, of sums of parts; (2, C)."""
        sums = self.borrow((2, columns), self.policy.accumulate)
        self._column_sums(self._wide, parts, sums, len(parts), 1, add=False)
        self.give_back(parts)
        return sums

    def channel_moments(self, x: Array) -> Array:
        if not self._normalises(x):
            return super().channel_moments(x)
        columns = x.shape[-1]
        rows = x.size // columns
        parts, moments = self._parts(rows, columns), self.borrow((2, columns), self.policy.accumulate)
        self._by_chunks(f"moment_parts_{self._kind}", rows, columns, x, parts)
        across, threads = min(MERGED, self.kernels.threads, power_of_two(columns)), self.kernels.threads
        grid, block = (min(-(-columns // across), self.kernels.blocks),), (across, threads // across)
        merge = f"moment_merge_{self._wide}"
        self.kernels.launch(merge, grid, block, parts, moments, rows, columns, *self._chunks(rows))
        self.give_back(parts)
        return moments

    def track_moments(self, mean: Array, variance: Array, moments: Array, momentum: float, unbiased: float) -> None:
        shapes.shape_of("track_moments", "moments", moments, (2, *mean.shape))
        shapes.alike("track_moments", mean, variance)
        if not self._updates(mean, variance, moments):
            return super().track_moments(mean, variance, moments, momentum, unbiased)
        size = mean.size
        self.kernels.flat(f"track_moments_{self._wide}", size, mean, variance, moments, momentum, unbiased, size)

    def normalize(
        self, x: Array, mean: Array, variance: Array, scale: Array, shift: Array, epsilon: float, *, relu: bool
    ) -> Array:
        shapes.channels("normalize", x, mean, variance)
        if not self._normalises(x, scale, shift) or not self._updates(mean, variance):
            return super().normalize(x, mean, variance, scale, shift, epsilon, relu=relu)
        y, columns = self.borrow(x.shape), x.shape[-1]
        sizes = x.size // columns, columns, int(relu)
        arguments = x, mean, variance, scale, shift, y, epsilon, *sizes
        self.kernels.flat(f"normalize_{self._kind}", x.size, *arguments, at_once=self._at_once(columns))
        return y

    def _at_once(self, columns: int) -> int:
        """Values of a row that a thread takes in one access."""
        several = SIXTEEN // self.policy.storage.itemsize
        return 1 if columns % several else several

    def normalize_sums(
        self, dy: Array, x: Array, y: Array | None, mean: Array, variance: Array, epsilon: float
    ) -> Array:
        shapes.alike("normalize_sums", dy, x, *([] if y is None else [y]))
        shapes.channels("normalize_sums", x, mean, variance)
        if not self._normalises(x) or not self._stores(dy, x if y is None else y) or not self._updates(mean, variance):
            return super().normalize_sums(dy, x, y, mean, variance, epsilon)
        columns = x.shape[-1]
        rows = x.size // columns
        parts = self._parts(rows, columns)
        self._by_chunks(f"normalize_sums_{self._kind}", rows, columns, dy, x, y, mean, variance, parts, epsilon)
        return self._added(parts, columns)

    def normalize_backward(
        self, dy: Array, x: Array, mean: Array, variance: Array, scale: Array, sums: Array, count: float, epsilon: float
    ) -> Array:
        shapes.alike("normalize_backward", dy, x)
        shapes.channels("normalize_backward", x, mean, variance)
        shapes.shape_of("normalize_backward", "sums", sums, (2, x.shape[-1]))
        if not self._normalises(x, scale) or not self._stores(dy) or not self._updates(mean, variance, sums):
            return super().normalize_backward(dy, x, mean, variance, scale, sums, count, epsilon)
        columns = x.shape[-1]
        arguments = dy, x, mean, variance, scale, sums, 1 / count, epsilon, x.size // columns, columns
        name = f"normalize_backward_{self._kind}"
        self.kernels.flat(name, x.size, *arguments, at_once=self._at_once(columns))
        return dy

    def normalize_rows(self, x: Array, scale: Array, shift: Array, epsilon: float) -> tuple[Array, Array]:
        if not self._normalises(x, scale, shift):
            return super().normalize_rows(x, scale, shift, epsilon)
        y, moments, (rows, columns) = self.borrow(x.shape), self.borrow((len(x), 2), self.policy.accumulate), x.shape
        arguments = x, scale, shift, y, moments, epsilon, rows, columns
        self.kernels.rows(f"normalize_rows_{self._kind}", rows, columns, *arguments)
        return y, moments

    def normalize_rows_backward(
        self, dy: Array, x: Array, moments: Array, scale: Array, scale_grad: Array, shift_grad: Array, *, need_dx: bool
    ) -> Array | None:
        shapes.alike("normalize_rows_backward", dy, x)
        shapes.shape_of("normalize_rows_backward", "moments", moments, (len(x), 2))
        shapes.channels("normalize_rows_backward", x, scale_grad, shift_grad)
        if not self._normalises(x, scale) or not self._stores(dy) or not self._updates(moments, scale_grad, shift_grad):
            return super().normalize_rows_backward(dy, x, moments, scale, scale_grad, shift_grad, need_dx=need_dx)
        rows, columns = x.shape
        parts = self._parts(rows, columns)
        self._by_chunks(f"normalize_rows_sums_{self._kind}", rows, columns, dy, x, moments, parts)
        sums = self._added(parts, columns)
        for grad, sum_ in zip((scale_grad, shift_grad), sums, strict=True):
            grad += sum_
        self.give_back(sums)
        if not need_dx:
            return None
        name = f"normalize_rows_backward_{self._kind}"
        self.kernels.rows(name, rows, columns, dy, x, moments, scale, rows, columns)
        return dy

    # random ---------------------------------------------------------------------------------------------------------

    def dropout(self, x: Array, samples: Array, epoch: Any, key: int, rate: float, out: Array | None = None) -> Array:
        size = x.size // max(len(x), 1)
        if not self._stores(x) or (out is not None and not self._stores(out)) or max(size, len(x)) >= MOST_VALUES - 4:
            return super().dropout(x, samples, epoch, key, rate, out)
        out = self.borrow(x.shape) if out is None else out
        shapes.alike("dropout", x, out)
        shapes.shape_of("dropout", "samples", samples, x.shape[:1])
        when = self.asarray(np.full(1, epoch, np.int64)) if isinstance(epoch, int) else epoch
        draw = key & philox.MASK, key >> 32, philox.dropped_below(rate), 1 / (1 - rate)
        arguments = x, out, self.asarray(samples), when, *draw, len(x), size
        self.kernels.images(f"dropout_{self._kind}", len(x), -(-size // 4), *arguments)
        return out

    # updates of flat vectors ----------------------------------------------------------------------------------------

    def weighted_sum(self, out: Array, parts: list[Array], shares: list[float]) -> None:
        """See `Backend.weighted_sum`. Of more than 16 parts each 16 are rounded to the vectors' precision."""
        counted = [(part, share) for part, share in zip(parts, shares, strict=True) if share]
        kind = KIND_OF.get(out.dtype.name)
        if kind is None:
            super().weighted_sum(out, parts, shares)
            return
        shapes.alike("weighted_sum", out, *parts)
        some, rest = counted[:TERMS], counted[TERMS:]
        lacking = TERMS - len(some)
        terms = [part for part, _ in some] + [None] * lacking
        factors = [share for _, share in some] + [0.0] * lacking
        self._flat(f"weighted_sum_{kind}", out.size, out, *terms, *factors, len(some))
        if rest:
            self.weighted_sum(out, [out, *(part for part, _ in rest)], [1.0, *(share for _, share in rest)])

    def squared_norm(self, grad: Array) -> Array:
        return self._total("squares", grad, squares=True) if self._updates(grad) else super().squared_norm(grad)

    def total(self, vector: Array) -> Array:
        return self._total("values", vector, squares=False) if self._updates(vector) else super().total(vector)

    def _total(self, what: str, vector: Array, *, squares: bool) -> Array:
        """The sum of a vector or of its squares: parts first, then their sums, always in the same order."""
        if what not in self._totals:
            self._totals[what] = self.allocate((), self.policy.accumulate)
        total, name, threads = self._totals[what], f"sum_vector_{self._wide}", self.kernels.threads
        at_once = SIXTEEN // vector.dtype.itemsize
        blocks = max(1, min(-(-vector.size // (threads * at_once)), 2 * MOST_PARTS, self.kernels.blocks))
        if blocks == 1:
            self.kernels.launch(name, (1,), (threads,), vector, total, vector.size, int(squares))
            return total
        sums = self.borrow((blocks,), self.policy.accumulate)
        self.kernels.launch(name, (blocks,), (threads,), vector, sums, vector.size, int(squares))
        self.kernels.launch(name, (1,), (threads,), sums, total, blocks, 0)
        self.give_back(sums)
        return total

    def clip_norm(self, grad: Array, squared_norm: Array, largest: float) -> None:
        if not self._updates(grad):
            self._not_steered("clip_norm")
            return super().clip_norm(grad, squared_norm, largest)
        norm = self.asarray(squared_norm, grad.dtype)
        self._flat(f"clip_norm_{self._wide}", grad.size, grad, norm, largest, self.controls)

    def move_weights(
        self, rule: Rule, weight: Array, grad: Array, states: Sequence[Array], move: Move, stored: Array | None = None
    ) -> None:
        vectors = weight, grad, *states
        shapes.alike(rule.name, *vectors, *(() if stored is None else (stored,)))
        if not self._updates(*vectors) or not self._copies(stored):
            self._not_steered(rule.name)
            return super().move_weights(rule, weight, grad, states, move, stored)
        arguments = *vectors, stored, *move.in_order(), self.controls
        self._flat(f"{rule.name}_update_{self._kind}", weight.size, *arguments)

    # layer by layer -------------------------------------------------------------------------------------------------

    def squared_norms(self, vector: Array, layers: Layers) -> Array:
        if not self._updates(vector):
            self._not_steered("squared_norms")
            return super().squared_norms(vector, layers)
        found = self.borrow((layers.count,), self.policy.accumulate)
        parts, down = self._stretches(layers)
        sums = self.borrow((len(layers.bounds), parts), self.policy.accumulate)
        count, threads = len(layers.bounds), self.kernels.threads
        if count:
            name = f"stretch_squares_{self._wide}"
            self.kernels.launch(name, (parts, down), (threads,), vector, layers.table, sums, count)
            arguments = sums, layers.table, found, count, parts, layers.count
            self.kernels.flat(f"layer_squares_{self._wide}", layers.count, *arguments)
        self.give_back(sums)
        return found

    def clip_norms(self, grad: Array, squared_norms: Array, layers: Layers, largest: float) -> None:
        if not self._updates(grad, squared_norms):
            self._not_steered("clip_norms")
            return super().clip_norms(grad, squared_norms, layers, largest)
        if layers.bounds:
            name, grid = f"clip_norms_{self._wide}", self._stretches(layers)
            arguments = grad, squared_norms, layers.table, largest, self.controls, len(layers.bounds)
            self.kernels.launch(name, grid, (self.kernels.threads,), *arguments)

    def trust_weights(
        self, weight: Array, grad: Array, norms: tuple[Array, Array], layers: Layers, rate: float,
        stored: Array | None = None,
    ) -> None:  # fmt: skip
        shapes.alike("trust_weights", weight, grad, *(() if stored is None else (stored,)))
        if not self._updates(weight, grad, *norms) or not self._copies(stored):
            self._not_steered("trust_weights")
            return super().trust_weights(weight, grad, norms, layers, rate, stored)
        if layers.bounds:
            name, grid = f"trust_weights_{self._kind}", self._stretches(layers)
            arguments = weight, grad, stored, *norms, layers.table, rate, self.controls, len(layers.bounds)
            self.kernels.launch(name, grid, (self.kernels.threads,), *arguments)

    def _stretches(self, layers: Layers) -> tuple[int, int]:
        """Blocks along each stretch, of which there are as many as the longest has use for, and along all of them."""
        longest = max((stop - start for start, stop in layers.bounds), default=1)
        down = max(1, min(len(layers.bounds), MOST_BLOCKS_DOWN, self.kernels.blocks))
        across = min(-(-longest // (4 * self.kernels.threads)), MOST_ALONG, self.kernels.blocks // down)
        return max(1, across), down

    def _not_steered(self, name: str) -> None:
        """Refuse, in a step that runs ahead, what the reference computes with numbers of the host. RuntimeError."""
        if self.controls is not None:
            raise RuntimeError(f"{name}: arrays of this kind have no kernel that takes its numbers from the device")

    def _copies(self, stored: Array | None) -> bool:
        """Whether kernels take this copy of the weights, or there is none."""
        return stored is None or self._stores(stored)


def _convolution_and_max_pool(backend: CupyBackend, first: Convolution, second: MaxPool) -> Pair | None:
    if first.groups > 1:
        return None  # not one product
    return ConvPool(backend, backend._pool, first, second)


# What is faster as one operation here, by what the first and the second are.
FUSED: dict[tuple[type, type], Callable[[Any, Any, Any], Pair | None]] = {
    (Convolution, MaxPool): _convolution_and_max_pool,
}
