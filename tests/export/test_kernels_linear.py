"""Products of matrices and vectors against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kit.kernel_calls import check, lowered, real  # noqa: E402
from poetmodel.export.step import Call, Ref  # noqa: E402

pytestmark = pytest.mark.torch
aten = torch.ops.aten


def lying(rows: int, columns: int, how: str) -> Any:
    """Return a matrix that lies by rows, by columns, or with gaps."""
    if how == "rows":
        return real(rows, columns)
    if how == "columns":
        return real(columns, rows).t()
    return real(2 * rows, 3 * columns + 1)[::2, 1::3]


SIZES = [
    (1, 1, 1),
    (1, 7, 5),
    (2, 3, 4),
    (5, 4, 6),
    (3, 1, 9),
    (6, 9, 1),
    (1, 8, 1),
    (7, 5, 8),
    (4, 2, 3),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("a", ["rows", "columns", "gaps"])
@pytest.mark.parametrize("b", ["rows", "columns", "gaps"])
def test_products(sizes: tuple[int, int, int], a: str, b: str) -> None:
    """A product of matrices, however they lie, alone and added to a bias or a matrix."""
    m, k, n = sizes
    left, right = lying(m, k, a), lying(k, n, b)
    check(aten.mm.default, left, right)
    check(aten.addmm.default, real(n), left, right)
    check(aten.addmm.default, real(m, n), left, right)


def test_transposed_outputs() -> None:
    """An output that lies by columns, or with gaps, is written as it lies."""
    a, b = real(5, 3), real(3, 6)
    check(aten.mm.default, a, b, strides={0: (1, 5)})
    check(aten.mm.default, a, b, strides={0: (20, 3)})
    check(aten.addmm.default, real(6), a, b, strides={0: (1, 5)})
    check(aten.bmm.default, real(2, 5, 3), real(2, 3, 6), strides={0: (30, 1, 5)})


def test_factors() -> None:
    """What is added and what is multiplied may have factors."""
    a, b = real(5, 3), real(3, 6)
    check(aten.addmm.default, real(6), a, b, beta=0.5)
    check(aten.addmm.default, real(5, 6), a, b, alpha=-2.0)
    check(aten.addmm.default, real(5, 6), a, b, beta=0, alpha=0.3)
    check(aten.baddbmm.default, real(2, 5, 6), real(2, 5, 3), real(2, 3, 6), beta=0.5, alpha=0.3)


def test_batches() -> None:
    """Products of several matrices, permuted ones and repeated ones among them."""
    check(aten.bmm.default, real(3, 4, 5), real(3, 5, 6))
    check(aten.bmm.default, real(4, 3, 5).transpose(0, 1), real(3, 6, 5).transpose(1, 2))
    check(aten.bmm.default, real(1, 4, 5).expand(3, 4, 5), real(3, 5, 1))
    check(aten.bmm.default, real(1, 4, 5), real(1, 5, 6))
    check(aten.baddbmm.default, real(4, 6), real(3, 4, 5), real(3, 5, 6))


def test_vectors() -> None:
    """Products with vectors."""
    check(aten.mv.default, real(5, 7), real(7))
    check(aten.mv.default, real(7, 5).t(), real(14)[::2])
    check(aten.addmv.default, real(5), real(5, 7), real(7))
    check(aten.dot.default, real(7), real(14)[::2])


@pytest.mark.parametrize("sizes", [(1, 9, 10), (6, 9, 10)])
def test_pieces_have_the_same_bits(sizes: tuple[int, int, int]) -> None:
    """Cut by columns, by rows or by k with sums that go on, a product has the same bits."""
    m, k, n = sizes
    ours = lowered(aten.mm.default, real(m, k), real(n, k).t())
    whole = ours.execute()[0]
    (call,) = ours.operation.calls
    out, a, b, *sizes_and_steps = call.arguments
    *_, out_row, a_row, a_column, b_row, b_column, _ = sizes_and_steps
    cuts: dict[str, list[Call]] = {"columns": [], "rows": [], "k": []}

    def piece(rows: range, inner: range, columns: range, accumulate: int = 0) -> Call:
        there = Ref(out.buffer, out.offset + rows.start * out_row + columns.start)
        left = Ref(a.buffer, a.offset + rows.start * a_row + inner.start * a_column)
        right = Ref(b.buffer, b.offset + inner.start * b_row + columns.start * b_column)
        lengths = (len(rows), len(inner), len(columns))
        steps = (out_row, a_row, a_column, b_row, b_column, accumulate)
        return Call("pm_mm", (there, left, right, *lengths, *steps))

    for start, end in ((0, 3), (3, 8), (8, n)):
        cuts["columns"].append(piece(range(m), range(k), range(start, end)))
    for row in range(m):
        cuts["rows"].append(piece(range(row, row + 1), range(k), range(n)))
    for start, end in ((0, 4), (4, 5), (5, k)):
        cuts["k"].append(piece(range(m), range(start, end), range(n), int(start > 0)))
    for name, calls in cuts.items():
        assert torch.equal(ours.execute(calls)[0], whole), name
