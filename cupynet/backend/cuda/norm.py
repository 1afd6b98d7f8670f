from __future__ import annotations

from cupynet.backend.array import Array
from cupynet.backend.cuda.dense import CudaDense
from cupynet.backend.cuda.device import SIXTEEN
from cupynet.backend.cuda.launch import power_of_two
from cupynet.backend.reference.norm import NormOps

MERGED = 8  # columns whose partial sums a block merges


class CudaNorm(CudaDense, NormOps):
    def channel_moments(self, x: Array) -> Array:
        columns = x.shape[-1]
        rows = x.size // columns
        parts, moments = self._parts(rows, columns), self.borrow((2, columns), self.policy.accumulate)
        self._by_chunks(f"moment_parts_{self._kind}", rows, columns, x, parts)
        across, threads = min(MERGED, self.kernels.threads, power_of_two(columns)), self.kernels.threads
        grid, block = (min(-(-columns // across), self.kernels.blocks),), (across, threads // across)
        merge = f"moment_merge_{self._wide}"
        self.kernels.launch(merge, grid, block, parts, moments, rows, columns, *self._chunks(rows))
        return moments

    def track_moments(self, mean: Array, variance: Array, moments: Array, momentum: float, unbiased: float) -> None:
        size = mean.size
        self.kernels.flat(f"track_moments_{self._wide}", size, mean, variance, moments, momentum, unbiased, size)

    def normalize(
        self, x: Array, mean: Array, variance: Array, scale: Array, shift: Array, epsilon: float, *, relu: bool,
        around: Array | None = None,
    ) -> Array:  # fmt: skip
        y, columns = self.borrow(x.shape), x.shape[-1]
        sizes = x.size // columns, columns, int(relu and around is None)
        arguments = x, mean, variance, scale, shift, y, epsilon, *sizes
        self.kernels.flat(f"normalize_{self._kind}", x.size, *arguments, at_once=self._at_once(columns))
        if around is not None:
            self.add(y, around, y)
        return self.relu(y) if relu and around is not None else y

    def normalize_sums(
        self, dy: Array, x: Array, y: Array | None, mean: Array, variance: Array, epsilon: float
    ) -> Array:
        columns = x.shape[-1]
        rows = x.size // columns
        parts = self._parts(rows, columns)
        self._by_chunks(f"normalize_sums_{self._kind}", rows, columns, dy, x, y, mean, variance, parts, epsilon)
        return self._added(parts, columns)

    def normalize_backward(
        self, dy: Array, x: Array, mean: Array, variance: Array, scale: Array, sums: Array, count: float,
        epsilon: float, out: Array | None = None,
    ) -> Array:  # fmt: skip
        columns = x.shape[-1]
        if out is not None:
            out[...] = dy
            dy = out
        arguments = dy, x, mean, variance, scale, sums, 1 / count, epsilon, x.size // columns, columns
        name = f"normalize_backward_{self._kind}"
        self.kernels.flat(name, x.size, *arguments, at_once=self._at_once(columns))
        return dy

    def normalize_rows(self, x: Array, scale: Array, shift: Array, epsilon: float) -> tuple[Array, Array]:
        y, moments, (rows, columns) = self.borrow(x.shape), self.borrow((len(x), 2), self.policy.accumulate), x.shape
        arguments = x, scale, shift, y, moments, epsilon, rows, columns
        self.kernels.rows(f"normalize_rows_{self._kind}", rows, columns, *arguments)
        return y, moments

    def normalize_rows_backward(
        self, dy: Array, x: Array, moments: Array, scale: Array, scale_grad: Array, shift_grad: Array, *, need_dx: bool
    ) -> Array | None:
        rows, columns = x.shape
        parts = self._parts(rows, columns)
        self._by_chunks(f"normalize_rows_sums_{self._kind}", rows, columns, dy, x, moments, parts)
        sums = self._added(parts, columns)
        for grad, sum_ in zip((scale_grad, shift_grad), sums, strict=True):
            grad += sum_
        if not need_dx:
            return None
        name = f"normalize_rows_backward_{self._kind}"
        self.kernels.rows(name, rows, columns, dy, x, moments, scale, rows, columns)
        return dy

    def _at_once(self, columns: int) -> int:
        per_access = SIXTEEN // self.policy.storage.itemsize
        return 1 if columns % per_access else per_access
