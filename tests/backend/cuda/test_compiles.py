"""CUDA's compiler (NVRTC) compiles every .cu file for architectures from Turing on, without a GPU."""

import functools
import hashlib
import importlib.util
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cupynet.backend.cuda.launch import FOLDER, INSTANCES, OPTIONS, source
from cupynet.backend.update_rules import RULES
from tests.standin.host import once

QUICKLY = "--Ofast-compile=max"  # less optimization takes a third of the time and reports the same errors
HOW: list[Any] = [("sm_75", ()), ("sm_100", (QUICKLY,))]  # the oldest, compiled as CuPy does
HOW += [pytest.param(name, (), marks=pytest.mark.slow) for name in ("sm_80", "sm_90", "sm_100")]

FLAT = {  # kernels over whole vectors or segments of them
    "activation": ("relu", "relu_backward", "pointwise", "pointwise_backward"),
    "averages": ("weighted_sum",),
    "reductions": ("sum_vector",),
    "update": (
        *(f"{rule}_update" for rule in RULES),
        *("undo", "widen", "narrow", "clip_norm", "clip_norms", "stretch_squares", "trust_weights"),
    ),
}
ONE_WAY = {"sum_vector": "ld", "stretch_squares": "ld", "widen": "st", "narrow": "ld"}  # the other one is narrower


def includes() -> list[Path]:
    found = importlib.util.find_spec("nvidia")
    places = [] if found is None else list(found.submodule_search_locations or ())
    return [header.parent for place in places for header in sorted(Path(place).glob("*/include/cuda_fp16.h"))]


def has_nvrtc() -> bool:
    """Return True if the wheels of the dev extra are installed (Linux on x86_64 has them)."""
    try:
        return importlib.util.find_spec("cuda.bindings") is not None and bool(includes())
    except ModuleNotFoundError:
        return False


needs_nvrtc = pytest.mark.skipif(
    "CUPYNET_TEST_ALL" not in os.environ and not has_nvrtc(),
    reason="NVRTC is not installed: pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime",
)
every_file = pytest.mark.parametrize("file", sorted(path.stem for path in FOLDER.glob("*.cu")))


def compiled(text: str, architecture: str, *more: str) -> tuple[bytes, str]:
    """Return the machine code (PTX for a virtual architecture, such as compute_90) and the compiler's messages.

    A text is compiled once per version of the compiler and of CUDA's headers. Raises ValueError if that fails.
    """
    flags = [*OPTIONS, f"-arch={architecture}", "-ftz=true", *more]  # -ftz: as CuPy does
    key = hashlib.sha256("\0".join([text, *flags, *compiler()]).encode()).hexdigest()[:20]
    flags.append(f"-I{includes()[-1]}")
    built = once(f"{architecture}-{key}.cubin", lambda made: made.write_bytes(_compiled(text, flags)))
    log, _, code = built.read_bytes().partition(b"\0")
    return code, log.decode()


@functools.cache
def compiler() -> list[str]:
    """Return the versions of the compiler and of each package that may contain it or headers."""
    from cuda.bindings import nvrtc

    packages = {(each.metadata["Name"].replace("_", "-"), each.version) for each in metadata.distributions()}
    parts = [f"{name} {version}" for name, version in sorted(packages) if name.startswith("nvidia-cuda")]
    return [str(nvrtc.nvrtcVersion()), *parts]


def _compiled(text: str, flags: list[str]) -> bytes:
    """Return the compiler's messages, a zero byte, and the code."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    # written in place, so more than one byte: Python shares a single object for each one-byte value
    nvrtc.nvrtcGetProgramLog(program, log := b" " * (size + 1))
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ValueError(log.decode())
    kind = "PTX" if any("compute_" in flag for flag in flags) else "CUBIN"
    _, size = getattr(nvrtc, f"nvrtcGet{kind}Size")(program)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, code := b" " * (size + 1))
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(log.strip(b"\0 \n") + b"\0" + code[:size])


@needs_nvrtc
@pytest.mark.parametrize(("architecture", "more"), HOW)
@every_file
def test_cuda_files_compile_without_warnings_for_turing_and_later(
    file: str, architecture: str, more: tuple[str, ...]
) -> None:
    code, log = compiled(source(file), architecture, *more)
    kernels = [name for name, it in INSTANCES.items() if it.file == file]
    assert log == "" and all(name.encode() + b"\0" in code for name in kernels)


@needs_nvrtc
@pytest.mark.parametrize("file", sorted(FLAT))
def test_kernels_over_whole_vectors_read_and_write_sixteen_bytes_at_a_time(file: str) -> None:
    """Reads and writes do in every precision. Of two precisions, only the wider one has to."""
    code, _ = compiled(source(file), "compute_90")
    bodies = {text.partition("(")[0]: text for text in code.decode().split(".visible .entry ")[1:]}
    for kernel in FLAT[file]:
        found = [body for name, body in bodies.items() if name.rpartition("_")[0] == kernel]
        assert len(found) in (2, 4), kernel
        for way in [ONE_WAY[kernel]] if kernel in ONE_WAY else ["ld", "st"]:
            whole = re.compile(rf"\b{way}\.global\.v(4\.[fub]32|2\.[fub]64)")
            times = 1 + (way == "st" and kernel.endswith("_update"))  # another loop zeroes the gradients
            assert all(len(whole.findall(body)) >= times for body in found), (kernel, way)


@needs_nvrtc
@every_file
def test_no_kernel_has_a_maximum_of_three_with_a_negated_number(file: str) -> None:
    """For sm_90, ptxas 13.0 fuses these into one instruction and drops the sign, so a loop on an H200 ran too often."""
    code, _ = compiled(source(file), "compute_90")
    assert dropped_signs(code.decode()) == []


def test_a_maximum_of_three_with_a_negated_number_is_found() -> None:
    first = "neg.s32 \t%r142, %r74;\nmax.s32 \t%r144, %r142, %r143;\n"
    assert dropped_signs(first) == []
    assert dropped_signs(first + "max.s32 \t%r146, %r144, %r145;\n") == ["%r146"]


def dropped_signs(ptx: str) -> list[str]:
    """Return the registers that hold the maximum or minimum of three numbers, one of them negated."""
    found = []
    for body in ptx.split(".visible .entry "):
        negated = set(re.findall(r"neg\.s32\s+(%r\d+)", body))
        largest: dict[str, set[str]] = {"max": set(), "min": set()}  # max or min of two numbers, one of them negated
        for kind, to, *of in re.findall(r"(max|min)\.s32\s+(%r\d+), (%r\d+), (%r\d+)", body):
            if largest[kind] & {*of}:
                found.append(to)
            elif negated & {*of}:
                largest[kind].add(to)
    return found
