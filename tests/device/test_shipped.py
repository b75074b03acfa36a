"""The devices that come with the package."""

import re

import pytest

from poetmodel.device import Costs, Device, StorageMode
from poetmodel.device.hardware import sanity_warnings
from poetmodel.device.io import device_names, load_device
from poetmodel.files import shipped
from poetmodel.graph import Graph, operation

TABLE_2 = {"mkr1000": 2**15, "nrf52840": 2**18, "rpi4b": 2**31, "jetson-tx2": 2**33}
"""RAM of the boards of POET (ICML 2022), table 2 [B]."""

PAPER = {"paper-m0": 2**15, "paper-m4": 2**18, "paper-a72": 2**31, "paper-a72-nocache": 2**31}
"""RAM of the boards whose constants the POET authors published [B]."""

BOARDS = {
    "esp32s3": 512 * 2**10,
    "esp32s3-flash": 512 * 2**10,
    "imxrt1062": 2**20,
    "imxrt1062-flash": 2**20,
    "nano33ble": 2**18,
    "rp2350": 520 * 2**10,
    "stm32f746": 320 * 2**10,
    "stm32h743": 2**20,
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

    Boards with flash or PSRAM behind their address bus are memory-mapped, SD cards are not. Three
    boards and all cards have DMA to their storage. The rates of the published A72 imply 49.9 W
    against 3 W, and the sanity check says so; the others agree.
    """
    assert set(device_names()) == TABLE_2.keys() | PAPER.keys() | BOARDS.keys() | CARDS.keys()
    mapped = {name for name in device_names() if load_device(name).is_memory_mapped}
    assert mapped == BOARDS.keys() - {"imxrt1062", "stm32h743"}
    modes = {name: load_device(name).storage for name in device_names()}
    with_dma = {name for name, storage in modes.items() if storage and storage.mode == "dma"}
    assert with_dma == {"esp32s3", "jetson-tx2", "stm32h743"} | CARDS.keys()
    assert {storage.mode for storage in modes.values() if storage} == set(StorageMode)
    (warning,) = sanity_warnings(load_device("paper-a72"))
    assert "implies 49.9 W, but power_w says 3 W" in warning
    for name in PAPER.keys() - {"paper-a72"}:
        assert sanity_warnings(load_device(name)) == ()
    assert Device.load("paper-m4") == load_device("paper-m4")


@pytest.mark.parametrize("name", device_names())
def test_memory_is_that_of_paper_and_data_sheets(name):
    """RAM is as stated; the paper's boards have 32 GB of storage or more, and cards the host's."""
    device = load_device(name)
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
        device = load_device(name)
        worn = device.steps_until_worn([(1, 1)])
        if not device.is_memory_mapped or name == "esp32s3":
            assert worn is None
            continue
        assert device.storage.endurance_cycles in (10_000, 100_000)
        assert worn == device.aux_bytes * device.storage.endurance_cycles / 4096
    flashes = {name: load_device(name).flash for name in device_names()}
    given = {name: flash for name, flash in flashes.items() if flash is not None}
    assert given.keys() == BOARDS.keys() | {"mkr1000", "nrf52840"}
    assert {name for name in given if load_device(name).stores_in_flash} == IN_FLASH
    for name in IN_FLASH:
        assert given[name].size_bytes - given[name].storage_bytes >= 2**18
        assert load_device(name).aux_bytes == given[name].storage_bytes
    volatile = {name for name in device_names() if load_device(name).is_volatile}
    assert volatile == {"esp32s3"}
    assert given["esp32s3"].storage_bytes


@pytest.mark.parametrize("name", device_names())
def test_every_figure_has_a_source(name):
    """The source text of a device speaks of every figure in its file."""
    source = load_device(name).source
    text = (shipped("devices") / f"{name}.toml").read_text(encoding="utf-8")
    keys = set(FIGURES.findall(text.replace(source, "")))
    for key in keys - {"name", "core", "source", "idle_power_w"}:
        assert key in source, key
    for table in ("[compute]", "[storage]", "[storage.page_in]", "[storage.page_out]"):
        assert table in source


@pytest.mark.parametrize("name", OURS)
def test_our_own_devices_raise_no_eyebrow(name):
    """The figures of all boards hold together."""
    assert sanity_warnings(load_device(name)) == ()


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
        (
            "paper-a72",
            1e-3,
            49.855678e-3,
            93.007698e-6,
            13.951155e-6,
            181.796706e-6,
            27.269506e-6,
        ),
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
    """Costs of a layer are what the published code's rules give for it, by hand to seven digits."""
    table = Costs.estimate(LAYER, load_device(name)).table(LAYER)
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
    compute = load_device(name).compute
    assert compute.flops_per_s == pytest.approx(flops_per_s, rel=1e-14)
    assert compute.flops_per_j == pytest.approx(flops_per_j, rel=1e-14)
