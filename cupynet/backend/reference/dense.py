from __future__ import annotations

from cupynet.backend.array import Array
from cupynet.backend.reference.activation import ActivationOps


class DenseOps(ActivationOps):
    def matmul(self, a: Array, b: Array, *, transpose_b: bool = False) -> Array:
        """Compute a @ b, or a @ bᵀ if `transpose_b`, in storage precision: (I, J), (J, K) -> (I, K)."""
        return self._stored_copy(self._product(a, b, transpose_b=transpose_b))

    def dense(self, x: Array, weight: Array, bias: Array | None, *, relu: bool = False) -> Array:
        """Compute x W + b, then ReLU if `relu`: (N, F), (F, O), (O,) -> (N, O)."""
        y = self.matmul(x, weight)
        self._add_bias(y, bias, relu=relu)
        return y

    def dense_backward(
        self, dy: Array, x: Array, weight: Array, weight_grad: Array, bias_grad: Array | None, *, need_dx: bool,
        relu_y: Array | None = None,
    ) -> Array | None:  # fmt: skip
        """Add the gradients of weight and bias. Return dx (N, F) or None.

        relu_y: the output of `dense` with `relu`. dy is then first multiplied by the derivative of ReLU, in place.
        """
        self._relu_and_bias_backward(dy, relu_y, bias_grad)
        factor = self._operand(dy)
        self._add_product(weight_grad, x, factor)
        return self.matmul(factor, weight, transpose_b=True) if need_dx else None

    def _operand(self, a: Array) -> Array:
        """Return `a` as `_gemm` requires it, by default in compute precision."""
        return self._widened(a)

    def _widened(self, a: Array) -> Array:
        """Return `a` in compute precision: the array itself, or a borrowed copy."""
        if a.dtype == self.policy.compute:
            return a
        copy = self.borrow(a.shape, self.policy.compute)
        self.convert(a, copy)
        return copy

    def _product(self, a: Array, b: Array, *, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        a, b = self._operand(a), self._operand(b)
        left, right = (a.T if transpose_a else a), (b.T if transpose_b else b)
        out = self.borrow((left.shape[0], right.shape[1]), self.policy.compute)
        self._gemm(left, right, out)
        return out

    def _gemm(self, left: Array, right: Array, out: Array) -> None:
        """Compute out = left @ right for 2-D arrays of the same dtype. All matrix products call this."""
        self.xp.matmul(left, right, out=out)

    def _add_product(self, grad: Array, a: Array, dy: Array) -> None:
        product = self._product(a, dy, transpose_a=True)
        grad += product

    def _add_bias(self, y: Array, bias: Array | None, *, relu: bool) -> None:
        if bias is not None:
            y += bias
        if relu:
            self.relu(y)

    def _relu_and_bias_backward(self, dy: Array, relu_y: Array | None, bias_grad: Array | None) -> None:
        """Apply the derivative of ReLU to dy (..., O), if `relu_y` is given, and add the gradient of the bias (O,)."""
        if relu_y is not None:
            self.relu_backward(dy, relu_y)
        if bias_grad is not None:
            self._add_column_sums(bias_grad, dy.reshape(-1, dy.shape[-1]))

    def _add_column_sums(self, grad: Array, dy: Array) -> None:
        grad += dy.sum(axis=0, dtype=self.policy.accumulate)
