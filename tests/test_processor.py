"""The choice of BLAS kernels: only where it helps, never against the user."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cupynet.processor import choose_blas_kernels

FLAGS = "fpu sse2 avx2 avx512f avx512cd avx512bw avx512dq avx512vl"


def cpuinfo(vendor: str = "AuthenticAMD", family: str = "26", flags: str = FLAGS) -> str:
    one = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: some\nflags\t\t: {flags}\n"
    return f"{one}\n{one}"


def test_an_unknown_amd_processor_with_avx512_is_helped() -> None:
    environment: dict[str, str] = {}
    assert choose_blas_kernels(cpuinfo(), environment) == "SkylakeX"
    assert environment == {"OPENBLAS_CORETYPE": "SkylakeX"}


@pytest.mark.parametrize(
    "info",
    [
        cpuinfo(family="25"),
        cpuinfo(vendor="GenuineIntel"),
        cpuinfo(flags="fpu sse2 avx2"),
        cpuinfo(flags=FLAGS.replace(" avx512vl", "")),
        "processor : 0\nFeatures : fp asimd\n",
        "",
    ],
)
def test_others_are_left_alone(info: str) -> None:
    environment: dict[str, str] = {}
    assert choose_blas_kernels(info, environment) is None and environment == {}


def test_the_users_own_choice_stands() -> None:
    environment = {"OPENBLAS_CORETYPE": "Haswell"}
    assert choose_blas_kernels(cpuinfo(), environment) is None
    assert environment == {"OPENBLAS_CORETYPE": "Haswell"}


def test_after_numpy_it_is_too_late() -> None:
    code = "import numpy, os; from cupynet.processor import choose_blas_kernels as c; before = dict(os.environ); "
    code += f"assert c({cpuinfo()!r}) is None and os.environ == before"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_commands_choose_before_numpy_is_imported() -> None:
    code = "import sys; import cupynet.train, cupynet.evaluate, cupynet.bench; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
