"""Measured peaks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from poetmodel.torch.peaks import heap_peak_bytes, storage_peak_bytes  # noqa: E402

pytestmark = pytest.mark.torch


def work() -> None:
    """Hold 3 MB at most: two tensors of 1 MB, and their sum before the first is let go."""
    one = torch.ones(250_000)
    two = one + 1
    three = one + two
    del one, two
    four = three.view(500, 500).t()
    del three
    assert four.numel() == 250_000


def test_heap_peak_is_the_highest_total() -> None:
    """What is let go counts no more, and what was there before does not count."""
    held = torch.ones(1000)
    assert heap_peak_bytes(work) == pytest.approx(3_000_000, abs=1000)
    assert held.numel() == 1000


def test_storage_peak_counts_each_storage_once() -> None:
    """Views take nothing, and what is known does not count."""
    assert storage_peak_bytes(work, ()) == 3_000_000
    known = torch.ones(10)
    assert storage_peak_bytes(lambda: known.add_(1), [known]) == 0
    assert storage_peak_bytes(lambda: known + 1, [known]) == 40
