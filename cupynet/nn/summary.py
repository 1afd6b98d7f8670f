"""The table of layers that `Model.summary` returns."""

from __future__ import annotations

from collections.abc import Sequence

from cupynet.nn.layer import Layer, Sequential
from cupynet.nn.params import Params
from cupynet.nn.types import InputType


def layer_rows(network: Layer, input: InputType, itemsize: int) -> list[tuple[str, ...]]:
    """Return the header, a row for the input, and a row for each layer. A number takes `itemsize` bytes."""

    def size(of: InputType) -> str:
        return f"{of.features * itemsize:,}"

    header = ("layer", "kind", "settings", "output", "bytes", "parameters", "multiply-adds")
    rows: list[tuple[str, ...]] = [header, ("input", "", "", str(input), size(input), "", "")]
    for layer in network.walk():
        if not layer.path and isinstance(layer, Sequential):
            continue  # its layers have their own rows
        above, _, name = layer.path.rpartition(".")
        indent = "  " * (above.count(".") + bool(above))
        work = sum(each.multiply_adds() for each in layer.walk())
        cells = (type(layer).__name__, layer.describe(), str(layer.output), size(layer.output))
        rows.append((f"{indent}{name or 'network'}", *cells, f"{layer.declared:,}", f"{work:,}"))
    return rows


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Align the columns of a table, whose first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = [str.ljust] * 4 + [str.rjust] * 3  # text, then numbers
    lines = [
        "  ".join(to(cell, width) for to, cell, width in zip(align, row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def totals(network: Layer, params: Params) -> str:
    total = sum(each.multiply_adds() for each in network.walk())
    work = f"{total:,} multiply-adds ({2e-6 * total:,.3g} MFLOP) per sample"
    frozen = sum(p.size for name, p in params.named() if name in params.frozen)
    return f"total {params.count:,} parameters{f' ({frozen:,} frozen)' * (frozen > 0)}, {work}"
