from __future__ import annotations

from collections.abc import Sequence

from cupynet.backend.array import Array
from cupynet.backend.cuda.dense import MAX_PARTS
from cupynet.backend.cuda.device import SIXTEEN, CudaDevice
from cupynet.backend.cuda.launch import INSTANCES, KIND_OF, MAX_BLOCKS_DOWN, TERMS
from cupynet.backend.reference.update import UpdateOps
from cupynet.backend.update_rules import Layers, Rule, UpdateScalars

MAX_ALONG = 32  # maximum number of blocks per segment of weights


class CudaUpdate(CudaDevice, UpdateOps):
    def weighted_sum(self, out: Array, parts: list[Array], shares: list[float]) -> None:
        """See `UpdateOps`. With more than 16 parts, the sum is rounded to the output precision after every 16 parts."""
        nonzero = [(part, share) for part, share in zip(parts, shares, strict=True) if share]
        first, rest = nonzero[:TERMS], nonzero[TERMS:]
        missing = TERMS - len(first)
        terms = [part for part, _ in first] + [None] * missing
        factors = [share for _, share in first] + [0.0] * missing
        self._flat(f"weighted_sum_{KIND_OF[out.dtype.name]}", out.size, out, *terms, *factors, len(first))
        if rest:
            self.weighted_sum(out, [out, *(part for part, _ in rest)], [1.0, *(share for _, share in rest)])

    def squared_norm(self, grad: Array) -> Array:
        return self._total("squares", self.partial_sums(grad, squares=True))

    def total(self, vector: Array) -> Array:
        return self._total("values", self.partial_sums(vector))

    def partial_sums(self, vector: Array, *, squares: bool = False) -> Array:
        """Return partial sums of `vector`, or of its squares, few enough for one block to add.

        The result may be `vector` itself; otherwise it is borrowed. The order of summation is fixed.
        """
        vector = self.asarray(vector, self.policy.accumulate)  # user-defined losses may be in storage precision
        threads, at_once = self.kernels.threads, SIXTEEN // vector.dtype.itemsize
        blocks = max(1, min(-(-vector.size // (threads * at_once)), 2 * MAX_PARTS, self.kernels.blocks))
        if blocks == 1 and not squares:
            return vector
        sums = self.borrow((blocks,), self.policy.accumulate)
        self._sum_vector(blocks, vector, sums, squares=squares)
        return sums

    def _total(self, key: str, parts: Array) -> Array:
        if key not in self._totals:
            self._totals[key] = self.allocate((), self.policy.accumulate)
        self._sum_vector(1, parts, self._totals[key])
        return self._totals[key]

    def _sum_vector(self, blocks: int, vector: Array, sums: Array, *, squares: bool = False) -> None:
        arguments = vector, sums, vector.size, int(squares)
        self.kernels.launch(f"sum_vector_{self._wide}", (blocks,), (self.kernels.threads,), *arguments)

    def clip_norm(self, grad: Array, squared_norm: Array, largest: float) -> None:
        norm = self.asarray(squared_norm, grad.dtype)
        self._flat(f"clip_norm_{self._wide}", grad.size, grad, norm, largest, self.controls)

    def move_weights(
        self,
        rule: Rule,
        weight: Array,
        grad: Array,
        states: Sequence[Array],
        scalars: UpdateScalars,
        stored: Array | None = None,
    ) -> None:
        vectors = weight, grad, *states
        name = f"{rule.name}_update_{self._kind}"
        if name in INSTANCES:
            norm, largest = scalars.norm or (None, 0.0)
            numbers = *scalars.in_order(), largest, norm if norm is None else self.asarray(norm, grad.dtype)
            self._flat(name, weight.size, *vectors, stored, *numbers, self.controls)
            return
        if self.controls is not None:  # a captured step would repeat this iteration's scalars
            raise RuntimeError(f"{rule.name}: this rule has no kernel that reads its scalars from the device")
        super().move_weights(rule, weight, grad, states, scalars, stored)

    def squared_norms(self, vector: Array, layers: Layers) -> Array:
        result = self.borrow((layers.count,), self.policy.accumulate)
        parts, down = self._stretches(layers)
        sums = self.borrow((len(layers.bounds), parts), self.policy.accumulate)
        count, threads = len(layers.bounds), self.kernels.threads
        if count:
            name = f"stretch_squares_{self._wide}"
            self.kernels.launch(name, (parts, down), (threads,), vector, layers.table, sums, count)
            arguments = sums, layers.table, result, count, parts, layers.count
            self.kernels.flat(f"layer_squares_{self._wide}", layers.count, *arguments)
        return result

    def clip_norms(self, grad: Array, squared_norms: Array, layers: Layers, largest: float) -> None:
        if layers.bounds:
            name, grid = f"clip_norms_{self._wide}", self._stretches(layers)
            arguments = grad, squared_norms, layers.table, largest, self.controls, len(layers.bounds)
            self.kernels.launch(name, grid, (self.kernels.threads,), *arguments)

    def trust_weights(
        self, weight: Array, grad: Array, norms: tuple[Array, Array], layers: Layers, rate: float,
        stored: Array | None = None,
    ) -> None:  # fmt: skip
        if layers.bounds:
            name, grid = f"trust_weights_{self._kind}", self._stretches(layers)
            arguments = weight, grad, stored, *norms, layers.table, rate, self.controls, len(layers.bounds)
            self.kernels.launch(name, grid, (self.kernels.threads,), *arguments)

    def _stretches(self, layers: Layers) -> tuple[int, int]:
        """Return the grid size: blocks along each segment, and blocks across segments."""
        longest = max((stop - start for start, stop in layers.bounds), default=1)
        down = max(1, min(len(layers.bounds), MAX_BLOCKS_DOWN, self.kernels.blocks))
        across = min(-(-longest // (4 * self.kernels.threads)), MAX_ALONG, self.kernels.blocks // down)
        return max(1, across), down
