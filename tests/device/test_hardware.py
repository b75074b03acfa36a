"""Devices made in Python: which figures are accepted, and which are possible but hardly true."""

from dataclasses import replace

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
def board():
    """Give a device with every part."""
    return Device(
        name="board",
        ram_bytes=1024,
        aux_bytes=4096,
        compute=Compute(flops_per_s=10.0, power_w=2.0),
        storage=Storage(mode=StorageMode.BLOCKING, page_in=WAY, page_out=WAY),
    )


def faults_of(device, **changes):
    """Return the faults that a change brings."""
    with pytest.raises(DeviceError) as caught:
        replace(device, **changes)
    return caught.value.faults


def with_figure(part, key, value):
    """Return a part of a device with another figure, which may be one of a part of it."""
    inner, _, rest = key.partition(".")
    return replace(
        part, **{inner: with_figure(getattr(part, inner), rest, value) if rest else value}
    )


def test_a_transfer_takes_its_latency_and_its_bytes():
    """Time is latency plus bytes over rate; flash takes that of all erases before it."""
    assert WAY.time_s(6) == 0.5 + 1.5
    assert WAY.time_s(0) == 0.5
    assert FLASH.write_s(6, 3) == 3 * 0.5 + 1.5


def test_zero_is_accepted_where_it_means_something(board):
    """No idle power, no storage space, no latency and free power are possible.

    Every figure that is out of range is reported in one error.
    """
    free = Transfer(latency_s=0, bytes_per_s=1, power_w=0)
    storage = Storage(mode=StorageMode.DMA, page_in=free, page_out=free)
    changed = replace(board, aux_bytes=0, idle_power_w=0, storage=storage)
    assert changed.storage == storage
    assert replace(board, compute=Compute(flops_per_s=1, power_w=0)).compute.power_w == 0
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


NUMBER = "expected a finite number >"


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        *(
            ("ram_bytes", size, "ram_bytes: expected a whole number of bytes from 1 to 2^53, got ")
            for size in (0, 1.5, True, 2**53 + 1, 10**400, None, "1kB", float("nan"))
        ),
        ("aux_bytes", -1, "aux_bytes: expected a whole number of bytes from 0 to 2^53, got -1"),
        (
            "aux_bytes",
            False,
            "aux_bytes: expected a whole number of bytes from 0 to 2^53, got false",
        ),
        *(
            ("compute.flops_per_s", value, f"[compute] flops_per_s: {NUMBER}")
            for value in (0, -1.0, float("nan"), float("inf"), True, "1", None, 10**400)
        ),
        ("compute.flops_per_j", 0, f"[compute] flops_per_j: {NUMBER} 0, got 0"),
        ("compute.bytes_per_s", 0, f"[compute] bytes_per_s: {NUMBER} 0, got 0"),
        ("compute.power_w", -1, f"[compute] power_w: {NUMBER}= 0, got -1"),
        ("compute.power_w", None, "[compute]: expected power_w or flops_per_j, got neither"),
        ("storage.mode", "usb", "[storage] mode: expected blocking or dma, got 'usb'"),
        ("storage.page_in.latency_s", -1, f"[storage.page_in] latency_s: {NUMBER}= 0, got -1"),
        ("storage.page_out.bytes_per_s", 0, f"[storage.page_out] bytes_per_s: {NUMBER} 0, got 0"),
    ],
)
def test_each_figure_has_its_range(board, key, value, fault):
    """One figure out of its range is one fault, which names table and key."""
    with pytest.raises(DeviceError) as caught:
        with_figure(board, key, value)
    (found,) = caught.value.faults
    assert found.startswith(fault)


def test_storage_may_be_memory_mapped_and_wear_out(board):
    """What is stated of it is checked; what is not stated is not known."""
    storage = board.storage
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
def plausible():
    """Give a device that raises no eyebrow: 1 GFLOP/s at 2 W, that is 500 MFLOP/J."""
    return Device(
        name="plausible",
        ram_bytes=2**20,
        aux_bytes=2**30,
        compute=Compute(flops_per_s=1e9, power_w=2.0, flops_per_j=5e8, bytes_per_s=1e9),
        storage=Storage(mode=StorageMode.BLOCKING, page_in=SD_CARD, page_out=SD_CARD),
    )


def test_plausible_figures_pass(plausible):
    """Nothing is said of figures that hold together, nor of those that are not given."""
    assert sanity_warnings(plausible) == ()
    bare = Device(name="b", ram_bytes=2**20, compute=Compute(flops_per_s=1e9, power_w=2.0))
    assert sanity_warnings(bare) == ()


@pytest.mark.parametrize("flops_per_j", [1e8, 1.2e9, 2.5e8, 1e9])
def test_two_powers_that_differ_are_told(plausible, flops_per_j):
    """Implied power of more than twice or less than half the stated one is a warning."""
    found = sanity_warnings(with_figure(plausible, "compute.flops_per_j", flops_per_j))
    assert len(found) == (flops_per_j in (1e8, 1.2e9))
    assert all(f"implies {1e9 / flops_per_j:.3g} W, but power_w says 2 W" in told for told in found)


def test_storage_faster_than_ram_is_told(plausible):
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
        ("storage.page_out.latency_s", 5.1, "latency_s is 5.1 s, over 1: is it given in seconds?"),
        (
            "storage.page_out.bytes_per_s",
            45.5,
            "bytes_per_s is 45.5 B/s, under 1000: is it given in",
        ),
        ("storage.page_out.power_w", 1500.0, "power_w is 1500 W, over 1000: is it given in watts?"),
        (
            "storage.page_out.power_w",
            1e-7,
            "power_w is 1e-07 W, under 1e-06: is it given in watts?",
        ),
        ("compute", Compute(flops_per_s=48.0, power_w=1.0), "flops_per_s is 48 FLOP/s, under 1000"),
        ("compute", Compute(flops_per_s=1e17, power_w=1.0), "flops_per_s is 1e+17 FLOP/s, over 1e"),
        ("compute", Compute(flops_per_s=1e9, flops_per_j=0.5), "flops_per_j is 0.5 FLOP/J, under"),
        ("compute", Compute(flops_per_s=1e9, power_w=3000.0), "power_w is 3000 W, over 1000"),
        ("ram_bytes", 32, "ram_bytes is 32 B, under 1000: is it given in bytes?"),
        ("aux_bytes", 32, "aux_bytes is 32 B, under 1000: is it given in bytes?"),
        ("idle_power_w", 2000.0, "idle_power_w is 2000 W, over 1000"),
        ("ram_bytes", 1000, None),
        ("idle_power_w", 0.0, None),
        ("compute.power_w", 0.0, "implies 2 W, but power_w says 0 W"),
    ],
)
def test_units_that_look_wrong_are_told(plausible, key, value, words):
    """A latency over 1 s, a rate under 1000 B/s, a power over 1 kW: probably another unit."""
    warnings = sanity_warnings(with_figure(plausible, key, value))
    assert len(warnings) == (words is not None)
    assert all(words in warning for warning in warnings)
    table = f"[{key.rpartition('.')[0] or key}] "
    assert all(warning.startswith(table) == ("[" in warning[:1]) for warning in warnings)


# -- flash -------------------------------------------------------------------------------------


def test_storage_lies_in_the_flash_where_its_bytes_say_so(board):
    """Volatile storage lies elsewhere; two sizes of one storage are a fault."""
    shared = replace(FLASH, storage_bytes=4096)
    assert not replace(board, flash=FLASH).stores_in_flash
    assert replace(board, flash=shared).stores_in_flash
    assert not replace(board, flash=shared, storage=None).stores_in_flash
    assert board.storage is not None
    lost = replace(board, flash=shared, storage=replace(board.storage, volatile=True))
    assert lost.is_volatile
    assert not lost.stores_in_flash
    assert replace(lost, aux_bytes=1).aux_bytes == 1
    faults = faults_of(board, flash=replace(FLASH, storage_bytes=2048))
    assert faults == (
        "aux_bytes: expected at most storage_bytes of [flash], where the storage lies, got 4096 "
        "and 2048",
    )


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
def test_figures_of_flash_are_checked(board, change, fault):
    """Each has its range, blocks hold whole units, and storage is a part of the flash."""
    (found,) = faults_of(board, flash=replace(FLASH, **change))
    assert found.startswith(f"[flash] {fault}")
