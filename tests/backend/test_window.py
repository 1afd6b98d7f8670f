"""The geometry of windows compared with counting."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cupynet.backend import Window

sides = st.tuples(st.integers(1, 5), st.integers(1, 5))
gaps = st.tuples(st.integers(1, 3), st.integers(1, 3))
paddings = st.tuples(st.integers(0, 2), st.integers(0, 2))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    window=st.builds(Window, kernel=sides, stride=sides, padding=st.tuples(paddings, paddings), dilation=gaps),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_windows_are_those_that_fit(window: Window, size: tuple[int, int]) -> None:
    starts = [
        [at for at in range(0, size[i] + sum(window.padding[i]), window.stride[i]) if at + window.extent[i] <= padded]
        for i, padded in enumerate(window.padded(*size))
    ]
    extent = [1 + (k - 1) * gap for k, gap in zip(window.kernel, window.dilation, strict=True)]
    assert list(window.extent) == extent and window.dilates == (window.dilation != (1, 1))
    fits = all(starts)
    assert window.fits(*size) == fits and window.pads == any(map(sum, window.padding))
    if not fits:
        return
    output = window.output(*size)
    assert output == (len(starts[0]), len(starts[1]))
    rows, cols = np.indices(window.padded(*size))[:, None]  # (1, H, W)
    for ky, kx in np.ndindex(*window.kernel):
        seen = window.seen(ky, kx, output)
        np.testing.assert_array_equal(rows[seen][0, :, 0], np.add(starts[0], ky * window.dilation[0]))
        np.testing.assert_array_equal(cols[seen][0, 0, :], np.add(starts[1], kx * window.dilation[1]))
    inside = rows[window.inside(*size)]
    assert inside.shape == (1, *size) and inside[0, 0, 0] == window.padding[0][0]
