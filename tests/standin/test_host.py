"""Kernels of a .cu file on the CPU, from a file or a text: calls, refusals, sanitizers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.standin.host import LaunchError, compiler, exported, host_library

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
extern "C" __global__ void unseen(float* y) { y[threadIdx.x] = blockDim.x; }
"""


def test_source_text_is_compiled_like_a_file(tmp_path: Path) -> None:
    path = tmp_path / "some.cu"
    path.write_text(TEXT)
    of_file, of_text = host_library(path), host_library(TEXT)
    for library in (of_file, of_text):
        assert {name: kernel.takes for name, kernel in library.items()} == {
            "add_double": ["in:float64", "out:float64", "uint8"],
            "take": ["in:float16", "in:bfloat16", "int64", "bool", "uint32"],
            "unseen": ["out:float32"],
        }
        x, y = np.arange(3.0), np.ones(3)
        library["add_double"]((1,), (1,), (x, y, np.uint8(2)))
        assert y.tolist() == [1, 1, 3]


def test_kernels_made_by_macros_are_found() -> None:
    text = TEXT + "ADD(float, float) ADD(chosen, CHOSEN)"
    library = host_library(text, options=("-DCHOSEN=int", "-std=c++17", "--use_fast_math"))
    assert library["add_chosen"].takes == ["in:int32", "out:int32", "int32"]
    assert library["add_float"].takes == ["in:float32", "out:float32", "int32"]
    assert host_library(text, options=("-DCHOSEN=double",))["add_chosen"].takes[0] == "in:float64"


def test_headers_beside_a_file_and_in_a_folder_are_found_and_watched(tmp_path: Path) -> None:
    header = tmp_path / "value.cuh"
    text = '#include "value.cuh"\nextern "C" __global__ void put(float* y) { y[0] = VALUE; }'
    path = tmp_path / "put.cu"
    path.write_text(text)
    for value in (2, 3):
        header.write_text(f"#define VALUE {value}\n")
        host_library.cache_clear()
        for library in (host_library(path), host_library(text, options=(f"-I{tmp_path}",))):
            y = np.zeros(1, np.float32)
            library["put"]((1,), (1,), (y,))
            assert y[0] == value
    assert exported(path) == ["put"]


@pytest.mark.parametrize(
    "arguments",
    [
        (np.zeros(3), np.zeros(3)),
        (np.zeros(3, np.float32), np.zeros(3), np.uint8(0)),
        (np.zeros(6)[::2], np.zeros(3), np.uint8(0)),
        (np.zeros(3), np.zeros(3), 0),
    ],
    ids=["too few", "another precision", "gaps", "a number of Python"],
)
def test_wrong_kernel_arguments_are_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(LaunchError):
        host_library(TEXT)["add_double"]((1,), (1,), arguments)
