"""Devices made in Python: which figures are accepted, and which are possible but hardly true."""

import re
from dataclasses import replace

import pytest

from poetmodel.device import Compute, Costs, Device, Flash, Storage, StorageMode, Transfer
from poetmodel.device.io import device_names
from poetmodel.device.sanity import sanity_warnings
from poetmodel.errors import DeviceError
from poetmodel.files import shipped_folder
from poetmodel.graph import Graph, operation

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
    """Return a device with all parts."""
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
    """Time is latency plus bytes over rate; flash adds that of all erases before it."""
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
    """Stated values of storage are checked; others are unknown."""
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
    """Return a device without warnings: 1 GFLOP/s at 2 W, that is 500 MFLOP/J."""
    return Device(
        name="plausible",
        ram_bytes=2**20,
        aux_bytes=2**30,
        compute=Compute(flops_per_s=1e9, power_w=2.0, flops_per_j=5e8, bytes_per_s=1e9),
        storage=Storage(mode=StorageMode.BLOCKING, page_in=SD_CARD, page_out=SD_CARD),
    )


def test_plausible_figures_pass(plausible):
    """Consistent values, and missing ones, cause no warning."""
    assert sanity_warnings(plausible) == ()
    bare = Device(name="b", ram_bytes=2**20, compute=Compute(flops_per_s=1e9, power_w=2.0))
    assert sanity_warnings(bare) == ()


@pytest.mark.parametrize("flops_per_j", [1e8, 1.2e9, 2.5e8, 1e9])
def test_two_powers_that_differ_are_told(plausible, flops_per_j):
    """Implied power of more than twice or less than half the stated one is a warning."""
    found = sanity_warnings(with_figure(plausible, "compute.flops_per_j", flops_per_j))
    assert len(found) == (flops_per_j in (1e8, 1.2e9))
    assert all(f"implies {1e9 / flops_per_j:.3g} W, but power_w is 2 W" in told for told in found)


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
        ("compute.power_w", 0.0, "implies 2 W, but power_w is 0 W"),
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
        "aux_bytes: expected at most storage_bytes of [flash], which holds the storage, got 4096 "
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


# -- what is shipped -----------------------------------------------------------------------------
TABLE_2 = {"mkr1000": 2**15, "nrf52840": 2**18, "rpi4b": 2**31, "jetson-tx2": 2**33}
"""RAM of the boards of POET (ICML 2022), table 2 [B]."""

PAPER = {"paper-m0": 2**15, "paper-m4": 2**18, "paper-a72": 2**31, "paper-a72-nocache": 2**31}
"""RAM of the boards whose constants the POET authors published [B]."""

BOARDS = {
    "esp32s3": 512 * 2**10,
    "esp32s3-flash": 512 * 2**10,
    "esp32s3-n8r2": 512 * 2**10,
    "imxrt1062": 2**20,
    "imxrt1062-flash": 2**20,
    "imxrt1062-psram": 2**20,
    "nano33ble": 2**18,
    "rp2350": 520 * 2**10,
    "rp2350-psram": 520 * 2**10,
    "stm32f746": 320 * 2**10,
    "stm32f746-sdram": 320 * 2**10,
    "stm32h743": 2**20,
    "stm32h743-sdram": 2**20,
}
"""RAM of the boards whose figures come from data sheets [B]."""

IN_FLASH = {"esp32s3-flash", "imxrt1062-flash", "nano33ble", "rp2350"}
"""The boards whose storage lies in the flash of the program."""

CARDS = {"a100": 80 * 10**9, "h100": 80 * 10**9, "rtx4090": 24 * 10**9}
"""Memory of the graphics cards, whose storage is that of the host [B]."""

OURS = sorted(TABLE_2.keys() | BOARDS.keys() | CARDS.keys())
"""The devices with figures that hold together."""

FIGURES = re.compile(r"^(\w+) = ", re.MULTILINE)

# A dense layer of the published code with float32 elements: 1000 elements out, 2 MFLOP.
FLOPS = 2_000_000
SIZE_BYTES = 4_000
LAYER = Graph(name="layer", nodes=(operation("fc", output_bytes=SIZE_BYTES, flops=FLOPS),))


def test_shipped_devices_are_those_of_the_paper_and_of_data_sheets():
    """Boards of table 2, the published constants of three, current boards, graphics cards.

    Boards with flash or RAM behind their address bus are memory-mapped, SD cards are not. Some
    boards and all cards have DMA to their storage. The rates of the published A72 imply 49.9 W
    instead of 3 W, and the check warns of this; the others agree.
    """
    assert set(device_names()) == TABLE_2.keys() | PAPER.keys() | BOARDS.keys() | CARDS.keys()
    mapped = {name for name in device_names() if Device.load(name).is_memory_mapped}
    assert mapped == BOARDS.keys() - {"imxrt1062", "stm32h743"}
    modes = {name: Device.load(name).storage for name in device_names()}
    with_dma = {name for name, storage in modes.items() if storage and storage.mode == "dma"}
    assert with_dma == {"esp32s3", "esp32s3-n8r2", "jetson-tx2", "stm32h743"} | CARDS.keys()
    assert {storage.mode for storage in modes.values() if storage} == set(StorageMode)
    (warning,) = sanity_warnings(Device.load("paper-a72"))
    assert "implies 49.9 W, but power_w is 3 W" in warning
    for name in PAPER.keys() - {"paper-a72"}:
        assert sanity_warnings(Device.load(name)) == ()


@pytest.mark.parametrize("name", device_names())
def test_memory_is_that_of_paper_and_data_sheets(name):
    """RAM is as stated; the paper's boards have 32 GB of storage or more, and cards the host's."""
    device = Device.load(name)
    assert device.key == name
    assert device.ram_bytes == (TABLE_2 | PAPER | BOARDS | CARDS)[name]
    if name in CARDS:
        assert device.aux_bytes is None
    else:
        assert device.aux_bytes >= (1 if name in BOARDS else 32_000_000_000)


def test_flash_wears_and_what_it_wears_by_is_stated():
    """Every board with flash states its cycles and its erase block; a block a step wears it.

    Storage of four lies in it, and leaves at least 256 KiB to the program.
    """
    for name in BOARDS:
        device = Device.load(name)
        worn = device.steps_until_worn([(1, 1)])
        if not device.is_memory_mapped or device.is_volatile:
            assert worn is None
            continue
        assert device.storage.endurance_cycles in (10_000, 100_000)
        assert worn == device.aux_bytes * device.storage.endurance_cycles / 4096
    flashes = {name: Device.load(name).flash for name in device_names()}
    given = {name: flash for name, flash in flashes.items() if flash is not None}
    assert given.keys() == BOARDS.keys() | {"mkr1000", "nrf52840"}
    assert {name for name in given if Device.load(name).stores_in_flash} == IN_FLASH
    for name in IN_FLASH:
        assert given[name].size_bytes - given[name].storage_bytes >= 2**18
        assert Device.load(name).aux_bytes == given[name].storage_bytes
    volatile = {name for name in device_names() if Device.load(name).is_volatile}
    assert volatile == {"esp32s3"} | {k for k in BOARDS if k.endswith(("ram", "n8r2"))}
    assert all(given[name].storage_bytes for name in volatile)


@pytest.mark.parametrize("name", device_names())
def test_every_figure_has_a_source(name):
    """The source text of a device mentions each value in its file."""
    source = Device.load(name).source
    text = (shipped_folder("devices") / f"{name}.toml").read_text(encoding="utf-8")
    keys = set(FIGURES.findall(text.replace(source, "")))
    for key in keys - {"name", "core", "source", "idle_power_w"}:
        assert key in source, key
    for table in ("[compute]", "[storage]", "[storage.page_in]", "[storage.page_out]"):
        assert table in source


@pytest.mark.parametrize("name", OURS)
def test_our_own_devices_raise_no_eyebrow(name):
    """The figures of all boards hold together."""
    assert sanity_warnings(Device.load(name)) == ()


@pytest.mark.parametrize(
    ("name", "compute_s", "compute_j", "page_in_s", "page_in_j", "page_out_s", "page_out_j"),
    [
        # 2 MFLOP at 2000 FLOP per 12 ms: 12 s, at 20 mA * 3.3 V = 66 mW: 0.792 J.
        # In: 109 us + 4000 B / 4616.51 kB/s = 109 + 866.455396 us; out: 113 us + 900.900901 us;
        # both at 100 mA * 3.3 V = 330 mW.
        ("paper-m0", 12.0, 0.792, 975.455396e-6, 321.900281e-6, 1013.900901e-6, 334.587297e-6),
        # 2 MFLOP at 1628.3 MFLOP per 255.6237 s: 0.313976171 s, at 3.328 mA * 3.3 V = 10.9824 mW.
        (
            "paper-m4",
            0.313976171,
            3.448211900e-3,
            975.455396e-6,
            321.900281e-6,
            1013.900901e-6,
            334.587297e-6,
        ),
        # 2 MFLOP at 2 GFLOP/s: 1 ms; but energy as if at 1628.3 MFLOP per 13.53 s (16.618559 ms)
        # and 0.6 A * 5 V = 3 W. In: 5.09561 us + 4000 B / 45.5 MB/s = 5.09561 + 87.912088 us;
        # out: 18.5314 us + 163.265306 us; both at 30 mA * 5 V = 150 mW.
        ("paper-a72", 1e-3, 49.855678e-3, 93.007698e-6, 13.951155e-6, 181.796706e-6, 27.269506e-6),
        # As before, but the time agrees with the energy; out: 4.23532 ms + 4000 B / 17.1 MB/s.
        (
            "paper-a72-nocache",
            16.618559e-3,
            49.855678e-3,
            93.007698e-6,
            13.951155e-6,
            4469.238129e-6,
            670.385719e-6,
        ),
    ],
)
def test_published_constants_give_the_published_costs(
    name, compute_s, compute_j, page_in_s, page_in_j, page_out_s, page_out_j
):
    """Costs of a layer equal those of the published code's formulas by hand, to seven digits."""
    table = Costs.estimate(LAYER, Device.load(name)).table(LAYER)
    assert table.compute_time_s[0] == pytest.approx(compute_s, rel=1e-7)
    assert table.compute_energy_j[0] == pytest.approx(compute_j, rel=1e-7)
    assert table.page_in_time_s[0] == pytest.approx(page_in_s, rel=1e-7)
    assert table.page_in_energy_j[0] == pytest.approx(page_in_j, rel=1e-7)
    assert table.page_out_time_s[0] == pytest.approx(page_out_s, rel=1e-7)
    assert table.page_out_energy_j[0] == pytest.approx(page_out_j, rel=1e-7)


@pytest.mark.parametrize(
    ("name", "flops_per_s", "flops_per_j"),
    [
        ("paper-m0", 2000 / 0.012, 2000 / (0.012 * 0.020 * 3.3)),
        ("paper-m4", 1_628_300_000 / 255.6237, 1_628_300_000 / (255.6237 * 0.003328 * 3.3)),
        ("paper-a72", 2e9, 1_628_300_000 / (13.53 * 0.6 * 5)),
        ("paper-a72-nocache", 1_628_300_000 / 13.53, 1_628_300_000 / (13.53 * 0.6 * 5)),
    ],
)
def test_published_rates_are_exact(name, flops_per_s, flops_per_j):
    """The two compute rates are the quotients that the published constants state."""
    compute = Device.load(name).compute
    assert compute.flops_per_s == pytest.approx(flops_per_s, rel=1e-14)
    assert compute.flops_per_j == pytest.approx(flops_per_j, rel=1e-14)
