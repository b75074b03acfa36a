"""Devices made in Python: which figures are accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from poetmodel.device import Compute, Device, Storage, StorageMode, Transfer
from poetmodel.errors import DeviceError

WAY = Transfer(latency_s=0.5, bytes_per_s=4.0, power_w=2.0)


@pytest.fixture
def board() -> Device:
    """Give a device with every part."""
    return Device(
        name="board",
        ram_bytes=1024,
        aux_bytes=4096,
        compute=Compute(flops_per_s=10.0, power_w=2.0),
        storage=Storage(mode=StorageMode.BLOCKING, page_in=WAY, page_out=WAY),
    )


def faults_of(device: Device, **changes: Any) -> tuple[str, ...]:
    """Return the faults that a change brings."""
    with pytest.raises(DeviceError) as caught:
        replace(device, **changes)
    return caught.value.faults


def test_a_device_needs_little() -> None:
    """Name, RAM and a core are enough: nothing can be paged then, and nothing is known of it."""
    device = Device(name="b", ram_bytes=1, compute=Compute(flops_per_s=1, flops_per_j=2))
    assert device.storage is None
    assert device.aux_bytes is None
    assert device.idle_power_w == 0.0


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    """Time is latency plus bytes over rate; nothing still takes the latency."""
    assert WAY.time_s(6) == 0.5 + 1.5
    assert WAY.time_s(0) == 0.5


def test_zero_is_accepted_where_it_means_something(board: Device) -> None:
    """No idle power, no storage space, no latency and free power are possible."""
    free = Transfer(latency_s=0, bytes_per_s=1, power_w=0)
    storage = Storage(mode=StorageMode.DMA, page_in=free, page_out=free)
    changed = replace(board, aux_bytes=0, idle_power_w=0, storage=storage)
    assert changed.storage == storage
    assert replace(board, compute=Compute(flops_per_s=1, power_w=0)).compute.power_w == 0


@pytest.mark.parametrize("size", [0, -1, 1.5, True, 2**53 + 1, 10**400, None, "1kB", float("nan")])
def test_ram_is_whole_bytes(board: Device, size: object) -> None:
    """RAM is a whole number of bytes, at least one."""
    (fault,) = faults_of(board, ram_bytes=size)
    assert fault.startswith("ram_bytes: expected a whole number of bytes from 1 to 2^53, got ")


@pytest.mark.parametrize("size", [-1, 0.5, False, float("inf")])
def test_storage_size_is_whole_bytes(board: Device, size: object) -> None:
    """Storage is a whole number of bytes, perhaps none."""
    (fault,) = faults_of(board, aux_bytes=size)
    assert fault.startswith("aux_bytes: expected a whole number of bytes from 0 to 2^53, got ")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), True, "1", None, 10**400])
@pytest.mark.parametrize(
    ("part", "figure"),
    [("compute", "flops_per_s"), ("page_in", "latency_s"), ("page_out", "bytes_per_s")],
)
def test_figures_are_finite_numbers(board: Device, part: str, figure: str, value: object) -> None:
    """Negative, endless and missing figures are faults that name table and key."""
    changes: dict[str, Any]
    if part == "compute":
        changes = {"compute": replace(board.compute, **{figure: value})}
        where = "[compute]"
    else:
        assert board.storage is not None
        changes = {"storage": replace(board.storage, **{part: replace(WAY, **{figure: value})})}
        where = f"[storage.{part}]"
    (fault,) = faults_of(board, **changes)
    assert fault.startswith(f"{where} {figure}: expected a finite number >")


@pytest.mark.parametrize(
    "compute",
    [
        Compute(flops_per_s=0, power_w=1),
        Compute(flops_per_s=1, flops_per_j=0),
        Compute(flops_per_s=1, power_w=1, bytes_per_s=0),
        Compute(flops_per_s=1, power_w=-1),
    ],
)
def test_rates_are_above_zero(board: Device, compute: Compute) -> None:
    """Nothing takes for ever: rates must be positive, powers not negative."""
    assert len(faults_of(board, compute=compute)) == 1


def test_energy_must_be_known(board: Device) -> None:
    """A core needs a power or an efficiency."""
    faults = faults_of(board, compute=Compute(flops_per_s=1))
    assert faults == ("[compute]: expected power_w or flops_per_j, got neither",)


def test_mode_is_one_of_two(board: Device) -> None:
    """Storage blocks the core or has DMA."""
    storage = Storage(mode="usb", page_in=WAY, page_out=WAY)  # type: ignore[arg-type]
    faults = faults_of(board, storage=storage)
    assert faults == ("[storage] mode: expected blocking or dma, got 'usb'",)


def test_all_faults_come_together(board: Device) -> None:
    """Every figure that is out of range is reported in one error."""
    storage = Storage(
        mode=StorageMode.DMA, page_in=replace(WAY, power_w=-1), page_out=replace(WAY, power_w=-1)
    )
    faults = faults_of(
        board,
        name="",
        ram_bytes=0,
        idle_power_w=-1,
        compute=Compute(flops_per_s=0),
        storage=storage,
    )
    assert len(faults) == 7


def test_storage_may_be_memory_mapped_and_wear_out(board: Device) -> None:
    """What is stated of it is checked; what is not stated is not known."""
    storage = board.storage
    assert storage is not None
    assert not board.is_memory_mapped
    assert (storage.endurance_cycles, storage.erase_block_bytes) == (None, None)
    flash = replace(storage, memory_mapped=True, endurance_cycles=1e5, erase_block_bytes=4096)
    assert replace(board, storage=flash).is_memory_mapped
    for key, value, words in (
        ("memory_mapped", 1, "expected true or false, got 1"),
        ("endurance_cycles", 0, "expected a finite number > 0, got 0"),
        ("endurance_cycles", "many", "expected a finite number > 0, got 'many'"),
        ("erase_block_bytes", 0, "expected a whole number of bytes from 1 to 2^53, got 0"),
        ("erase_block_bytes", 0.5, "expected a whole number of bytes from 1 to 2^53, got 0.5"),
    ):
        found = faults_of(board, storage=replace(storage, **{key: value}))
        assert found == (f"[storage] {key}: {words}",)
