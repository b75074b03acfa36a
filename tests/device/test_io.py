"""Device files and profiles."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.strategies import costs_for, rich_graphs
from poetmodel.device import (
    FREE,
    Compute,
    Cost,
    Costs,
    Device,
    PageCost,
    Storage,
    StorageMode,
    Transfer,
)
from poetmodel.device.io import device_names
from poetmodel.errors import CostError, DeviceError

BOARD = """
name = "Board"
core = "a core"
ram_bytes = 2_048
aux_bytes = 4_096
idle_power_w = 0.5
source = "made up"
[compute]
flops_per_s = 2.0e9
power_w = 3
flops_per_j = 1e9
bytes_per_s = 1e9
[storage]
mode = "dma"
[storage.page_in]
latency_s = 5.1e-6
bytes_per_s = 45.5e6
power_w = 0.15
[storage.page_out]
latency_s = 0
bytes_per_s = 24.5e6
power_w = 0.25
"""

HEADER = (
    "name,compute_time_s,compute_energy_j,page_in_time_s,page_in_energy_j,"
    "page_out_time_s,page_out_energy_j\n"
)


@pytest.fixture
def board(tmp_path):
    """Return a device file with all keys."""
    path = tmp_path / "board.toml"
    path.write_text(BOARD)
    return path


def device_faults(path, text):
    """Return the faults of a device file, less its name in front."""
    path.write_text(text)
    with pytest.raises(DeviceError) as caught:
        Device.load(path)
    assert all(fault.startswith(f"{path}: ") for fault in caught.value.faults)
    return [fault.removeprefix(f"{path}: ") for fault in caught.value.faults]


def profile_faults(path, text):
    """Return the faults of a profile, less its name in front."""
    path.write_text(text, newline="")
    with pytest.raises(CostError) as caught:
        Costs.load(path)
    assert all(fault.startswith(f"{path}: ") for fault in caught.value.faults)
    return [fault.removeprefix(f"{path}: ") for fault in caught.value.faults]


# -- devices -----------------------------------------------------------------------------------
def test_a_device_file_is_read(board):
    """Every key of a file is the figure of the device; whole numbers will do for figures."""
    assert Device.load(board) == Device(
        name="Board",
        core="a core",
        ram_bytes=2048,
        aux_bytes=4096,
        idle_power_w=0.5,
        source="made up",
        compute=Compute(flops_per_s=2e9, power_w=3.0, flops_per_j=1e9, bytes_per_s=1e9),
        storage=Storage(
            mode=StorageMode.DMA,
            page_in=Transfer(latency_s=5.1e-6, bytes_per_s=45.5e6, power_w=0.15),
            page_out=Transfer(latency_s=0.0, bytes_per_s=24.5e6, power_w=0.25),
        ),
        key=str(board),
    )


def test_a_device_needs_little(tmp_path):
    """Only name, RAM and a core with a power are required; paging is then impossible."""
    path = tmp_path / "small.toml"
    path.write_text('name = "s"\nram_bytes = 8\n[compute]\nflops_per_s = 1\nflops_per_j = 2\n')
    device = Device.load(str(path))
    assert device == Device(
        name="s", ram_bytes=8, compute=Compute(flops_per_s=1, flops_per_j=2), key=str(path)
    )
    assert (device.storage, device.aux_bytes, device.idle_power_w) == (None, None, 0.0)


def test_shipped_devices_go_by_their_name(board, monkeypatch):
    """A shipped name is that device, even where a file of the name lies about.

    A path with the suffix, with a folder, or of a file that exists is a file; it is the key.
    """
    monkeypatch.chdir(board.parent)
    (board.parent / "rpi4b").write_text(BOARD)
    assert Device.load("rpi4b").name == "Raspberry Pi 4B"
    assert Device.load("rpi4b").key == "rpi4b"
    monkeypatch.chdir(board.parent)
    board.with_suffix("").write_text(BOARD)
    for key in ("board.toml", "./board", "board"):
        assert Device.load(key).key == key
        assert Device.load(key).name == "Board"


def test_an_unknown_device_is_answered_with_the_known_ones(told):
    """The message lists the shipped devices and those with similar names."""
    with pytest.raises(DeviceError) as caught:
        Device.load("RPI4")
    (fault,) = caught.value.faults
    assert "device 'RPI4': there is no such device (did you mean rpi4b?)" in fault
    assert all(name in fault for name in device_names())
    with told.raises(DeviceError):
        Device.load("")
    with told.raises(DeviceError, "second"):
        Device.load("x" * 300)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('core = "a core"', 'cores = "a core"', "cores: unknown key; did you mean core?"),
        ("[compute]", "[compute]\nvoltage = 3", "[compute] voltage: unknown key; accepted are flo"),
        ("latency_s = 0\n", "latency = 0\nlatency_s = 0\n", "[storage.page_out] latency: unknown"),
        ('name = "Board"', "name = 5", "name: expected a non-empty string, got 5"),
        (
            "2_048",
            "2048.0",
            "ram_bytes: expected a whole number of bytes from 1 to 2^53, got 2048.",
        ),
        ("2.0e9", "nan", "[compute] flops_per_s: expected a finite number > 0, got nan"),
        (
            "power_w = 3",
            "power_w = true",
            "[compute] power_w: expected a finite number >= 0, got t",
        ),
        ('mode = "dma"', "mode = [1]", "[storage] mode: expected blocking or dma, got a list"),
        (
            "24.5e6",
            "1979-05-27",
            "[storage.page_out] bytes_per_s: expected a finite number > 0, go",
        ),
        (
            "power_w = 0.15\n",
            "",
            "[storage.page_in] power_w: expected a finite number >= 0, got no",
        ),
    ],
)
def test_each_fault_of_a_device_names_its_place(board, old, new, message):
    """One wrong key is one fault that names table, key, and the accepted values."""
    assert BOARD.count(old) == 1
    (fault,) = device_faults(board, BOARD.replace(old, new))
    assert fault.startswith(message)


def test_all_faults_of_a_device_come_together(board):
    """Unknown keys, tables that are none and figures out of range, in one error."""
    faults = device_faults(
        board,
        "name = 'b'\nram_bytes = 0\nfoo = 1\ncompute = 5\n[storage]\nmode = 'dma'\n"
        "[storage.page_in]\nlatency_s = -1\nbytes_per_s = 1\npower_w = 1\n",
    )
    assert faults == [
        "foo: unknown key; accepted are name, ram_bytes, aux_bytes, core, idle_power_w, source, "
        "compute, storage, flash",
        "[compute]: expected a table, got 5",
        "ram_bytes: expected a whole number of bytes from 1 to 2^53, got 0",
        "[compute] flops_per_s: expected a finite number > 0, got nothing",
        "[storage.page_in] latency_s: expected a finite number >= 0, got -1",
        "[storage.page_out] latency_s: expected a finite number >= 0, got nothing",
        "[storage.page_out] bytes_per_s: expected a finite number > 0, got nothing",
        "[storage.page_out] power_w: expected a finite number >= 0, got nothing",
        "[compute]: expected power_w or flops_per_j, got neither",
    ]


FLASH = """
[flash]
size_bytes = 65_536
write_unit_bytes = 4
erase_block_bytes = 1024
erase_s = 0.1
write_bytes_per_s = 1e5
power_w = 0.1
endurance_cycles = 10_000
storage_bytes = 4_096
"""


def test_storage_in_flash_takes_what_the_flash_states(board, tmp_path):
    """Size, erase block and endurance of storage are those of its flash.

    The flash of volatile storage is not used. A missing or unknown flash, or one that is no
    table, is an error.
    """
    board.write_text(BOARD.replace("aux_bytes = 4_096\n", "") + FLASH)
    device = Device.load(board)
    assert (device.aux_bytes, device.flash.storage_bytes) == (4096, 4096)
    assert (device.storage.erase_block_bytes, device.storage.endurance_cycles) == (1024, 10_000)
    board.write_text(BOARD.replace('mode = "dma"', 'mode = "dma"\nvolatile = true') + FLASH)
    device = Device.load(board)
    assert device.is_volatile
    assert (device.storage.erase_block_bytes, device.storage.endurance_cycles) == (None, None)
    path = tmp_path / "board.toml"
    assert device_faults(path, "flash = 3\n" + BOARD)[0] == "[flash]: expected a table, got 3"
    faults = device_faults(path, BOARD + FLASH.replace("erase_s", "erase"))
    assert faults == [
        "[flash] erase: unknown key; did you mean erase_s?",
        "[flash] erase_s: expected a finite number >= 0, got nothing",
    ]


# -- profiles ----------------------------------------------------------------------------------
def test_a_profile_is_read(tmp_path, board):
    """Rows of nodes, of tensors and of both become costs by name, in any order of columns.

    A byte order mark, line ends of Windows and quoted names are read. RAM and storage are a
    device's; without storage, the page columns are not used.
    """
    path = tmp_path / "p.csv"
    path.write_text(
        " page_out_energy_j ,name,compute_time_s,compute_energy_j,page_in_time_s,page_in_energy_j,"
        "page_out_time_s\n"
        "6,conv,1,2, 3e0 ,4.,.5\n"
        "\n"
        ",bn,0,0,,,\n"
        "+1e-3,bn.mean,,,1,1,1\n"
    )
    costs = Costs.load(path)
    assert costs.compute == {"conv": Cost(1.0, 2.0), "bn": FREE}
    assert costs.pages == {
        "conv": PageCost(Cost(3.0, 4.0), Cost(0.5, 6.0)),
        "bn.mean": PageCost(Cost(1.0, 1.0), Cost(1.0, 0.001)),
    }
    assert costs.device is None
    assert Costs.load(str(path)) == costs
    path = tmp_path / "p.csv"
    path.write_bytes(
        b"\xef\xbb\xbf" + (HEADER + '"a,""b""\n",1,2,,,,\n').replace("\n", "\r\n").encode()
    )
    assert Costs.load(path).compute == {'a,"b"\r\n': Cost(1.0, 2.0)}
    path = tmp_path / "p.csv"
    path.write_text(HEADER + "a,1,2,3,4,5,6\n")
    device = Device.load(board)
    assert Costs.load(path, device=device).device is device
    assert Costs.load(path, device=device).pages is not None
    bare = replace(device, storage=None)
    assert Costs.load(path, device=bare).pages is None


@given(data=st.data())
def test_saved_profiles_lose_nothing(data, tmp_path_factory):
    """Costs of any graph, with any names, are read back as the same floats."""
    amount = st.floats(min_value=0, allow_infinity=False)
    cost = st.builds(Cost, amount, amount)
    costs = data.draw(costs_for(data.draw(rich_graphs(max_nodes=3))))
    costs = replace(costs, compute={**costs.compute, "a": data.draw(cost)})
    path = tmp_path_factory.mktemp("profile") / "p.csv"
    costs.save(path)
    assert Costs.load(path) == costs


def test_saved_profiles_have_one_row_per_name(tmp_path, board):
    """A node and a tensor of one name share a row; cells that do not apply are empty."""
    device = replace(Device.load(board), storage=None)
    pages = {"a": PageCost(Cost(3.0, 4.0), Cost(5.0, 6.0)), "t": PageCost(FREE, FREE)}
    costs = Costs(compute={"a": Cost(1.0, 2.0), "b": FREE}, pages=pages)
    path = tmp_path / "p.csv"
    costs.save(path)
    assert path.read_text() == HEADER + (
        "a,1.0,2.0,3.0,4.0,5.0,6.0\nb,0.0,0.0,,,,\nt,,,0.0,0.0,0.0,0.0\n"
    )
    without = Costs(compute={"a": Cost(1.0, 2.0)}, pages=None, device=device)
    without.save(path)
    assert Costs.load(path, device=device) == without


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("", "expected the columns name, compute_time_s, compute_energy_j, page_in_time_s,"),
        ("\n\n", "expected the columns name"),
        ("name,compute_time_s\n", "line 1: missing compute_energy_j, page_in_time_s, page_in_ener"),
        (HEADER.replace("name", "node,name"), "line 1: unknown column 'node'; expected name, "),
        (HEADER.replace("name", "name,name"), "line 1: the column name comes 2 times"),
        (HEADER, "expected a row for every node, got no rows"),
        ('"name', "line 1: not valid CSV (unexpected end of data)"),
    ],
)
def test_a_header_must_name_exactly_the_columns(tmp_path, header, message):
    """Columns that are missing, unknown or repeated are one fault each."""
    (fault,) = profile_faults(tmp_path / "p.csv", header)
    assert fault.startswith(message)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,1,2,3,4,5", "line 2: expected 7 cells, got 6"),
        ("a,1,2,3,4,5,6,7", "line 2: expected 7 cells, got 8"),
        (",1,2,3,4,5,6", "line 2: name: expected a non-empty string, got an empty cell"),
        ("a,,,,,,", "line 2 ('a'): expected compute_time_s and compute_energy_j, or the four page"),
        ("a,1,,3,4,5,6", "line 2 ('a'): compute_time_s is given, but not compute_energy_j"),
        ("a,1,2,3,,5,", "line 2 ('a'): page_in_time_s is given, but not page_in_energy_j, page_ou"),
        ("a,1,x,,,,", "line 2 ('a'): compute_energy_j: expected a finite number >= 0, got 'x'"),
        ("a,1e999,2,,,,", "line 2 ('a'): compute_time_s: expected a finite number >= 0, got '1e9"),
        ("a,1_0,2,,,,", "line 2 ('a'): compute_time_s: expected a finite number >= 0, got '1_0'"),
        ('"a,1,2,,,,', "line 2: not valid CSV (unexpected end of data)"),
    ],
)
def test_each_fault_of_a_row_names_its_line(tmp_path, row, message):
    """One wrong cell is one fault that names line, row and column."""
    (fault,) = profile_faults(tmp_path / "p.csv", HEADER + row + "\n")
    assert fault.startswith(message)


def test_all_faults_of_a_profile_come_together(tmp_path):
    """Every wrong row is reported, by the line where it begins; a name has one row."""
    faults = profile_faults(
        tmp_path / "p.csv",
        HEADER + '"two\nlines",1,2,,,,\na,1,2,,,,\n\na,-1,x,,,,\n"two\nlines",1,2,,,,\nb\n',
    )
    assert faults == [
        "line 6 ('a'): the name already has a row, in line 4",
        "line 6 ('a'): compute_time_s: expected a finite number >= 0, got '-1'",
        "line 6 ('a'): compute_energy_j: expected a finite number >= 0, got 'x'",
        "line 7 ('two\\nlines'): the name already has a row, in line 2",
        "line 9: expected 7 cells, got 1",
    ]


def test_file_says_how_storage_is_read_and_wears(tmp_path, told):
    """Three keys of [storage] are optional; each has its place in messages."""
    path = tmp_path / "board.toml"
    more = 'mode = "dma"\nmemory_mapped = true\nendurance_cycles = 1e5\nerase_block_bytes = 4_096\n'
    path.write_text(BOARD.replace('mode = "dma"\n', more))
    storage = Device.load(path).storage
    assert (storage.memory_mapped, storage.endurance_cycles) == (True, 1e5)
    assert storage.erase_block_bytes == 4096
    path.write_text(BOARD.replace('mode = "dma"\n', more.replace("true", '"yes"')))
    with told.raises(DeviceError):
        Device.load(path)
