"""Compilation of kernels. test_operations.py compares their results."""

import platform
import re
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("numba")

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir

from cupynet.backend.cpu.kernels import jit, outer, rows, windows
from cupynet.backend.cpu.kernels.tiles import add_products
from cupynet.backend.cpu.kernels.vectors import lanes, multiply_add, widths
from tests.support.commands import ROOT


def test_kernels_for_other_constants_have_other_cache_files() -> None:
    kernels: list[Any] = [windows.conv_pool(4, 0, 0, filters) for filters in (8, 24)]
    kernels += [rows.weight_gradient(0, 0, length) for length in (16, 20)]
    kernels += [outer.weight_gradient(4, 1, 3, filters) for filters in (8, 24)]
    names = {kernel._cache._impl.filename_base for kernel in kernels}
    assert len(names) == len(kernels)
    assert all(jit.SOURCES in name for name in names)


def test_a_loop_whose_sums_fill_the_registers_is_not_unrolled() -> None:
    @numba.njit  # type: ignore[untyped-decorator]
    def tile(x: Any, starts: Any, outs: Any, table: Any, w: Any, out: Any) -> None:
        add_products(4, 16, 0, 4, x, 0, starts, outs, 0, table, 0, table.size, w, 0, 16, out, 0)

    offsets, outs = np.zeros(8, np.int32), np.arange(0, 64, 16, dtype=np.int32)
    tile(np.ones(8, np.float32), offsets, outs, offsets, np.ones(128, np.float32), np.zeros(64, np.float32))
    code = next(iter(tile.inspect_llvm().values()))
    assert len(re.findall("call .*@llvm.fmuladd", code)) == 4 * len(widths(16, lanes(4)))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors can multiply and add")
def test_a_processor_without_fused_multiply_add_calls_no_function_for_it() -> None:
    """Calling the C library's fmaf for each value makes the convolution 17 times slower than NumPy's."""
    vector, module = ir.VectorType(ir.FloatType(), 4), ir.Module()
    function = ir.Function(module, ir.FunctionType(vector, [vector, ir.FloatType(), vector]), "sum")
    b = ir.IRBuilder(function.append_basic_block())
    b.ret(multiply_add(b, *function.args))
    assembly = {}
    for cpu in ("nehalem", "haswell"):
        machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu)
        assembly[cpu] = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert "mulps" in assembly["nehalem"] and "call" not in assembly["nehalem"]
    assert "vfmadd" in assembly["haswell"]


def test_importing_the_package_and_building_a_model_compiles_no_kernel() -> None:
    code = (
        "from cupynet import Conv2D, Dense, Image, MaxPool2D, Model, Sequential, create_backend\n"
        "layers = {'conv1': Conv2D(4, 3), 'pool1': MaxPool2D(2), 'output': Dense(3)}\n"
        "model = Model(Sequential(layers), Image(8, 8, 1), create_backend('numba'))\n"
        "model.summary()\n"
        "import gc, numpy\n"
        "from numba.core.dispatcher import Dispatcher\n"
        "def compiled():\n"
        "    return any(isinstance(each, Dispatcher) and each.signatures for each in gc.get_objects())\n"
        "assert not compiled()\n"
        "model.predict(numpy.zeros((1, 8, 8, 1), numpy.uint8))\n"
        "assert compiled()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
