"""Devices made in Python: which figures are accepted, and which are possible but hardly true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from poetmodel.device import Compute, Device, Flash, Storage, StorageMode, Transfer
from poetmodel.device.hardware import sanity_warnings
from poetmodel.errors import DeviceError

WAY = Transfer(latency_s=0.5, bytes_per_s=4.0, power_w=2.0)
FLASH = Flash(
    size_bytes=8192,
    write_unit_bytes=4,
    erase_block_bytes=1024,
    erase_s=0.5,
    write_bytes_per_s=4.0,
    power_w=2.0,
)


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


SD_CARD = Transfer(latency_s=1e-4, bytes_per_s=1e6, power_w=0.3)


@pytest.fixture
def plausible() -> Device:
    """Give a device that raises no eyebrow: 1 GFLOP/s at 2 W, that is 500 MFLOP/J."""
    return Device(
        name="plausible",
        ram_bytes=2**20,
        aux_bytes=2**30,
        compute=Compute(flops_per_s=1e9, power_w=2.0, flops_per_j=5e8, bytes_per_s=1e9),
        storage=Storage(mode=StorageMode.BLOCKING, page_in=SD_CARD, page_out=SD_CARD),
    )


def test_plausible_figures_pass(plausible: Device) -> None:
    """Nothing is said of figures that hold together, nor of those that are not given."""
    assert sanity_warnings(plausible) == ()
    bare = Device(name="b", ram_bytes=2**20, compute=Compute(flops_per_s=1e9, power_w=2.0))
    assert sanity_warnings(bare) == ()


@pytest.mark.parametrize("flops_per_j", [1e8, 1.2e9])
def test_two_powers_that_differ_are_told(plausible: Device, flops_per_j: float) -> None:
    """Implied power of more than twice or less than half the stated one is a warning."""
    compute = replace(plausible.compute, flops_per_j=flops_per_j)
    (warning,) = sanity_warnings(replace(plausible, compute=compute))
    assert f"implies {1e9 / flops_per_j:.3g} W, but power_w says 2 W" in warning


@pytest.mark.parametrize("flops_per_j", [2.5e8, 1e9])
def test_a_factor_of_two_is_within_reason(plausible: Device, flops_per_j: float) -> None:
    """Up to a factor of 2, either way, nothing is said."""
    compute = replace(plausible.compute, flops_per_j=flops_per_j)
    assert sanity_warnings(replace(plausible, compute=compute)) == ()


def test_no_power_beside_an_efficiency_is_told(plausible: Device) -> None:
    """A stated power of zero cannot be right where computing takes energy."""
    compute = replace(plausible.compute, power_w=0.0)
    (warning,) = sanity_warnings(replace(plausible, compute=compute))
    assert "implies 2 W, but power_w says 0 W" in warning


def test_storage_faster_than_ram_is_told(plausible: Device) -> None:
    """A storage rate above the RAM bandwidth is a warning for each direction; at it, none."""
    fast = replace(SD_CARD, bytes_per_s=2e9)
    storage = Storage(mode=StorageMode.DMA, page_in=fast, page_out=fast)
    warnings = sanity_warnings(replace(plausible, storage=storage))
    assert len(warnings) == 2
    assert warnings[0] == (
        "[storage.page_in] bytes_per_s is 2e+09 B/s, above the RAM bandwidth of 1e+09 B/s that "
        "[compute] gives"
    )
    assert "[storage.page_out]" in warnings[1]
    same = replace(SD_CARD, bytes_per_s=1e9)
    storage = Storage(mode=StorageMode.DMA, page_in=same, page_out=same)
    assert sanity_warnings(replace(plausible, storage=storage)) == ()


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
    plausible: Device, key: str, value: float, words: str
) -> None:
    """A latency over 1 s, a rate under 1000 B/s, a power over 1 kW: probably another unit."""
    assert plausible.storage is not None
    storage = replace(plausible.storage, page_out=replace(SD_CARD, **{key: value}))
    (warning,) = sanity_warnings(replace(plausible, storage=storage))
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
def test_units_of_the_core_that_look_wrong(plausible: Device, compute: Compute, words: str) -> None:
    """A core slower than 1000 FLOP/s or hungrier than 1 kW was probably given in another unit."""
    (warning,) = sanity_warnings(replace(plausible, compute=compute, storage=None))
    assert warning.startswith(words)


@pytest.mark.parametrize("key", ["ram_bytes", "aux_bytes"])
def test_sizes_that_look_wrong(plausible: Device, key: str) -> None:
    """32 bytes of RAM or storage were probably kilobytes or gigabytes."""
    (warning,) = sanity_warnings(replace(plausible, **{key: 32}))
    assert warning == f"{key} is 32 B, under 1000: is it given in bytes?"
    assert sanity_warnings(replace(plausible, **{key: 1000})) == ()


def test_idle_power_that_looks_wrong(plausible: Device) -> None:
    """More than 1 kW at rest is a warning; none at all is not."""
    assert sanity_warnings(replace(plausible, idle_power_w=0.0)) == ()
    (warning,) = sanity_warnings(replace(plausible, idle_power_w=2000.0))
    assert warning.startswith("idle_power_w is 2000 W, over 1000")


# -- flash -------------------------------------------------------------------------------------


def test_flash_takes_its_erases_and_its_bytes() -> None:
    """Time is that of all erases, plus bytes over the rate of what was erased."""
    assert FLASH.write_s(6, 3) == 3 * 0.5 + 1.5


def test_storage_lies_in_the_flash_where_its_bytes_say_so(board: Device) -> None:
    """Volatile storage lies elsewhere, whatever the flash has for generations."""
    shared = replace(FLASH, storage_bytes=4096)
    assert not replace(board, flash=FLASH).stores_in_flash
    assert replace(board, flash=shared).stores_in_flash
    assert not replace(board, flash=shared, storage=None).stores_in_flash
    assert board.storage is not None
    lost = replace(board, flash=shared, storage=replace(board.storage, volatile=True))
    assert lost.is_volatile
    assert not lost.stores_in_flash
    assert replace(lost, aux_bytes=1).aux_bytes == 1


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"size_bytes": 0}, "size_bytes: expected a whole number of bytes from 1 to 2^53, got 0"),
        ({"write_unit_bytes": 0}, "write_unit_bytes: expected a whole number of bytes from 1"),
        ({"erase_block_bytes": None}, "erase_block_bytes: expected a whole number of bytes"),
        ({"erase_s": -1}, "erase_s: expected a finite number >= 0, got -1"),
        ({"write_bytes_per_s": 0}, "write_bytes_per_s: expected a finite number > 0, got 0"),
        ({"power_w": None}, "power_w: expected a finite number >= 0, got nothing"),
        ({"endurance_cycles": 0}, "endurance_cycles: expected a finite number > 0, got 0"),
        ({"write_unit_bytes": 3}, "erase_block_bytes: expected a multiple of write_unit_bytes"),
        ({"storage_bytes": -1}, "storage_bytes: expected a whole number of bytes from 0"),
        ({"size_bytes": 2048, "storage_bytes": 4096}, "storage_bytes: expected at most size_bytes"),
    ],
)
def test_figures_of_flash_are_checked(board: Device, change: dict[str, Any], fault: str) -> None:
    """Each has its range, blocks hold whole units, and storage is a part of the flash."""
    (found,) = faults_of(board, flash=replace(FLASH, **change))
    assert found.startswith(f"[flash] {fault}")


def test_storage_in_flash_has_the_size_that_the_flash_states(board: Device) -> None:
    """Two sizes of one storage are a fault."""
    faults = faults_of(board, flash=replace(FLASH, storage_bytes=2048))
    assert faults == (
        "aux_bytes: expected at most storage_bytes of [flash], where the storage lies, got 4096 "
        "and 2048",
    )
