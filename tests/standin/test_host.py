"""Kernels of a .cu file on the CPU, from a file or a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.standin.host import compiler, host_library

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

TEXT = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define ADD(name, type)                                                             \\
  extern "C" __global__ void __launch_bounds__(64) add_##name(const type* x, type* y, int n) { \\
    int i = blockIdx.x * blockDim.x + threadIdx.x;                                  \\
    if (i < n) y[i] += x[i];                                                        \\
  }

extern "C" __global__ void add_double(const double* x, double* y, unsigned char far) { y[far] += x[far]; }
extern "C" __global__ void take(const half* x, const __nv_bfloat16* y, long long a, bool b, unsigned c) {}
ADD(chosen, CHOSEN)
"""


def test_kernels_are_found_with_the_types_of_their_parameters() -> None:
    library = host_library(TEXT, options=("-DCHOSEN=int", "-std=c++17", "--use_fast_math"))
    assert {name: kernel.takes for name, kernel in library.items()} == {
        "add_double": ["in:float64", "out:float64", "uint8"],
        "take": ["in:float16", "in:bfloat16", "int64", "bool", "uint32"],
        "add_chosen": ["in:int32", "out:int32", "int32"],
    }
    assert host_library(TEXT, options=("-DCHOSEN=double",))["add_chosen"].takes[0] == "in:float64"


def test_a_changed_header_is_compiled_again(tmp_path: Path) -> None:
    path, header = tmp_path / "put.cu", tmp_path / "value.cuh"
    path.write_text('#include "value.cuh"\nextern "C" __global__ void put(float* y) { y[0] = VALUE; }')
    for value in (2, 3):
        header.write_text(f"#define VALUE {value}\n")
        host_library.cache_clear()
        y = np.zeros(1, np.float32)
        host_library(path)["put"]((1,), (1,), (y,))
        assert y[0] == value
