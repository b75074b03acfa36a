"""Figures that are possible but hardly true."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poetmodel.device import Compute, Device, Storage, StorageMode, Transfer
from poetmodel.device.sanity import sanity_warnings

WAY = Transfer(latency_s=1e-4, bytes_per_s=1e6, power_w=0.3)


@pytest.fixture
def board() -> Device:
    """Give a device that raises no eyebrow: 1 GFLOP/s at 2 W, that is 500 MFLOP/J."""
    return Device(
        name="board",
        ram_bytes=2**20,
        aux_bytes=2**30,
        compute=Compute(flops_per_s=1e9, power_w=2.0, flops_per_j=5e8, bytes_per_s=1e9),
        storage=Storage(mode=StorageMode.BLOCKING, page_in=WAY, page_out=WAY),
    )


def test_plausible_figures_pass(board: Device) -> None:
    """Nothing is said of figures that hold together, nor of those that are not given."""
    assert sanity_warnings(board) == ()
    bare = Device(name="b", ram_bytes=2**20, compute=Compute(flops_per_s=1e9, power_w=2.0))
    assert sanity_warnings(bare) == ()


@pytest.mark.parametrize("flops_per_j", [1e8, 1.2e9])
def test_two_powers_that_differ_are_told(board: Device, flops_per_j: float) -> None:
    """Implied power of more than twice or less than half the stated one is a warning."""
    compute = replace(board.compute, flops_per_j=flops_per_j)
    (warning,) = sanity_warnings(replace(board, compute=compute))
    assert f"implies {1e9 / flops_per_j:.3g} W, but power_w says 2 W" in warning


@pytest.mark.parametrize("flops_per_j", [2.5e8, 1e9])
def test_a_factor_of_two_is_within_reason(board: Device, flops_per_j: float) -> None:
    """Up to a factor of 2, either way, nothing is said."""
    compute = replace(board.compute, flops_per_j=flops_per_j)
    assert sanity_warnings(replace(board, compute=compute)) == ()


def test_no_power_beside_an_efficiency_is_told(board: Device) -> None:
    """A stated power of zero cannot be right where computing takes energy."""
    compute = replace(board.compute, power_w=0.0)
    (warning,) = sanity_warnings(replace(board, compute=compute))
    assert "implies 2 W, but power_w says 0 W" in warning


def test_storage_faster_than_ram_is_told(board: Device) -> None:
    """A storage rate above the RAM bandwidth is a warning for each direction; at it, none."""
    fast = replace(WAY, bytes_per_s=2e9)
    storage = Storage(mode=StorageMode.DMA, page_in=fast, page_out=fast)
    warnings = sanity_warnings(replace(board, storage=storage))
    assert len(warnings) == 2
    assert warnings[0] == (
        "[storage.page_in] bytes_per_s is 2e+09 B/s, above the RAM bandwidth of 1e+09 B/s that "
        "[compute] gives"
    )
    assert "[storage.page_out]" in warnings[1]
    same = replace(WAY, bytes_per_s=1e9)
    storage = Storage(mode=StorageMode.DMA, page_in=same, page_out=same)
    assert sanity_warnings(replace(board, storage=storage)) == ()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("latency_s", 5.1, "latency_s is 5.1 s, over 1: is it given in seconds?"),
        ("bytes_per_s", 45.5, "bytes_per_s is 45.5 B/s, under 1000: is it given in bytes per sec"),
        ("power_w", 1500.0, "power_w is 1500 W, over 1000: is it given in watts?"),
        ("power_w", 1e-7, "power_w is 1e-07 W, under 1e-06: is it given in watts?"),
    ],
)
def test_units_of_storage_that_look_wrong(
    board: Device, key: str, value: float, words: str
) -> None:
    """A latency over 1 s, a rate under 1000 B/s, a power over 1 kW: probably another unit."""
    assert board.storage is not None
    storage = replace(board.storage, page_out=replace(WAY, **{key: value}))
    (warning,) = sanity_warnings(replace(board, storage=storage))
    assert warning.startswith(f"[storage.page_out] {words}")


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (Compute(flops_per_s=48.0, power_w=1.0), "[compute] flops_per_s is 48 FLOP/s, under 1000"),
        (Compute(flops_per_s=1e17, power_w=1.0), "[compute] flops_per_s is 1e+17 FLOP/s, over 1e"),
        (Compute(flops_per_s=1e9, flops_per_j=0.5), "[compute] flops_per_j is 0.5 FLOP/J, under"),
        (Compute(flops_per_s=1e9, power_w=3000.0), "[compute] power_w is 3000 W, over 1000"),
    ],
)
def test_units_of_the_core_that_look_wrong(board: Device, compute: Compute, words: str) -> None:
    """A core slower than 1000 FLOP/s or hungrier than 1 kW was probably given in another unit."""
    (warning,) = sanity_warnings(replace(board, compute=compute, storage=None))
    assert warning.startswith(words)


@pytest.mark.parametrize("key", ["ram_bytes", "aux_bytes"])
def test_sizes_that_look_wrong(board: Device, key: str) -> None:
    """32 bytes of RAM or storage were probably kilobytes or gigabytes."""
    (warning,) = sanity_warnings(replace(board, **{key: 32}))
    assert warning == f"{key} is 32 B, under 1000: is it given in bytes?"
    assert sanity_warnings(replace(board, **{key: 1000})) == ()


def test_idle_power_that_looks_wrong(board: Device) -> None:
    """More than 1 kW at rest is a warning; none at all is not."""
    assert sanity_warnings(replace(board, idle_power_w=0.0)) == ()
    (warning,) = sanity_warnings(replace(board, idle_power_w=2000.0))
    assert warning.startswith("idle_power_w is 2000 W, over 1000")
