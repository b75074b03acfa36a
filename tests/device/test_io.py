"""Device files and profiles."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

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
from poetmodel.device.io import device_names, load_device, load_profile, save_profile
from poetmodel.errors import CostError, DeviceError, InputError

if TYPE_CHECKING:
    from pathlib import Path

    from kit.messages import Told

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
def board(tmp_path: Path) -> Path:
    """Give a device file with every key."""
    path = tmp_path / "board.toml"
    path.write_text(BOARD)
    return path


def device_faults(path: Path, text: str) -> list[str]:
    """Return the faults of a device file, less its name in front."""
    path.write_text(text)
    with pytest.raises(DeviceError) as caught:
        load_device(path)
    assert all(fault.startswith(f"{path}: ") for fault in caught.value.faults)
    return [fault.removeprefix(f"{path}: ") for fault in caught.value.faults]


def profile_faults(path: Path, text: str) -> list[str]:
    """Return the faults of a profile, less its name in front."""
    path.write_text(text, newline="")
    with pytest.raises(CostError) as caught:
        load_profile(path)
    assert all(fault.startswith(f"{path}: ") for fault in caught.value.faults)
    return [fault.removeprefix(f"{path}: ") for fault in caught.value.faults]


# -- devices -----------------------------------------------------------------------------------


def test_a_device_file_is_read(board: Path) -> None:
    """Every key of a file is the figure of the device; whole numbers will do for figures."""
    assert load_device(board) == Device(
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


def test_the_mode_is_a_member(board: Path) -> None:
    """The mode read from a file is a StorageMode, not merely its text."""
    storage = load_device(board).storage
    assert storage is not None
    assert storage.mode is StorageMode.DMA


def test_what_may_be_left_out_of_a_device(tmp_path: Path) -> None:
    """Only name, RAM and a core with a power are needed."""
    path = tmp_path / "small.toml"
    path.write_text('name = "s"\nram_bytes = 8\n[compute]\nflops_per_s = 1\nflops_per_j = 2\n')
    device = Device.load(str(path))
    assert (device.storage, device.aux_bytes, device.idle_power_w) == (None, None, 0.0)
    assert (device.compute.power_w, device.compute.bytes_per_s) == (None, None)
    assert device.key == str(path)


def test_shipped_devices_go_by_their_name(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shipped name is that device, even where a file of the name lies about."""
    monkeypatch.chdir(board.parent)
    (board.parent / "rpi4b").write_text(BOARD)
    assert load_device("rpi4b").name == "Raspberry Pi 4B"
    assert load_device("rpi4b").key == "rpi4b"


def test_files_go_by_any_path(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path with the suffix, with a folder, or of a file that exists is a file; it is the key."""
    monkeypatch.chdir(board.parent)
    board.with_suffix("").write_text(BOARD)
    for key in ("board.toml", "./board", "board"):
        assert load_device(key).key == key
        assert load_device(key).name == "Board"


def test_an_unknown_device_is_answered_with_the_known_ones(told: Told) -> None:
    """The message lists what is shipped, and what is close."""
    with pytest.raises(DeviceError) as caught:
        load_device("RPI4")
    (fault,) = caught.value.faults
    assert "device 'RPI4': there is no such device (did you mean rpi4b?)" in fault
    assert all(name in fault for name in device_names())
    with told.raises(DeviceError):
        load_device("")
    with told.raises(DeviceError, "second"):
        load_device("x" * 300)


@pytest.mark.parametrize("name", ["none.toml", "none/board", "x" * 300 + ".toml"])
def test_a_missing_device_file_is_named(tmp_path: Path, name: str, told: Told) -> None:
    """A path that leads nowhere is an error of that path, not an unknown name."""
    with told.raises(DeviceError):
        load_device(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name =", "not valid TOML (Invalid value"),
        ("name = 'a'\nname = 'b'", "not valid TOML (Cannot overwrite a value"),
        ("a = " + "[" * 100_000, "its TOML is nested too deeply"),
        ("ram_bytes = " + "9" * 5000, "it holds a number with too many digits"),
    ],
)
def test_what_is_no_toml_is_one_plain_error(board: Path, text: str, message: str) -> None:
    """Syntax errors, half a file and monsters are one fault each."""
    (fault,) = device_faults(board, text)
    assert fault.startswith(message)


def test_a_binary_device_file_is_refused(board: Path, told: Told) -> None:
    """A binary file is an error that says so."""
    board.write_bytes(b"\x00\xff")
    with told.raises(DeviceError):
        load_device(board)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('core = "a core"', 'cores = "a core"', "cores: unknown key; did you mean core?"),
        ("[compute]", "[compute]\nvoltage = 3", "[compute] voltage: unknown key; accepted are flo"),
        ("latency_s = 0\n", "latency = 0\nlatency_s = 0\n", "[storage.page_out] latency: unknown"),
        ('name = "Board"', "", "name: expected a non-empty string, got nothing"),
        ('name = "Board"', "name = 5", "name: expected a non-empty string, got 5"),
        (
            "2_048",
            "2048.0",
            "ram_bytes: expected a whole number of bytes from 1 to 2^53, got 2048.",
        ),
        ("2_048", "true", "ram_bytes: expected a whole number of bytes from 1 to 2^53, got true"),
        ("4_096", "-1", "aux_bytes: expected a whole number of bytes from 0 to 2^53, got -1"),
        ("2.0e9", "nan", "[compute] flops_per_s: expected a finite number > 0, got nan"),
        ("2.0e9", "inf", "[compute] flops_per_s: expected a finite number > 0, got inf"),
        ("2.0e9", "0", "[compute] flops_per_s: expected a finite number > 0, got 0"),
        ("flops_per_s = 2.0e9", "", "[compute] flops_per_s: expected a finite number > 0, got no"),
        (
            "power_w = 3",
            "power_w = true",
            "[compute] power_w: expected a finite number >= 0, got t",
        ),
        (
            "power_w = 3",
            "power_w = '3 W'",
            "[compute] power_w: expected a finite number >= 0, got '",
        ),
        (
            "idle_power_w = 0.5",
            "idle_power_w = -0.5",
            "idle_power_w: expected a finite number >= 0",
        ),
        ('"dma"', '"usb"', "[storage] mode: expected blocking or dma, got 'usb'"),
        ('mode = "dma"', "", "[storage] mode: expected blocking or dma, got nothing"),
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
def test_each_fault_of_a_device_names_its_place(
    board: Path, old: str, new: str, message: str
) -> None:
    """One wrong key is one fault that names table and key, and what is accepted."""
    assert BOARD.count(old) == 1
    (fault,) = device_faults(board, BOARD.replace(old, new))
    assert fault.startswith(message)


def test_all_faults_of_a_device_come_together(board: Path) -> None:
    """Unknown keys, tables that are none and figures out of range, in one error."""
    faults = device_faults(
        board,
        "name = 'b'\nram_bytes = 0\nfoo = 1\ncompute = 5\n[storage]\nmode = 'dma'\n"
        "[storage.page_in]\nlatency_s = -1\nbytes_per_s = 1\npower_w = 1\n",
    )
    assert faults == [
        "foo: unknown key; accepted are name, core, ram_bytes, aux_bytes, idle_power_w, source, "
        "compute, storage, flash",
        "[compute]: expected a table, got 5",
        "ram_bytes: expected a whole number of bytes from 1 to 2^53, got 0",
        "[compute] flops_per_s: expected a finite number > 0, got nothing",
        "[compute]: expected power_w or flops_per_j, got neither",
        "[storage.page_in] latency_s: expected a finite number >= 0, got -1",
        "[storage.page_out] latency_s: expected a finite number >= 0, got nothing",
        "[storage.page_out] bytes_per_s: expected a finite number > 0, got nothing",
        "[storage.page_out] power_w: expected a finite number >= 0, got nothing",
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


def test_storage_in_flash_takes_what_the_flash_states(board: Path) -> None:
    """Size, erase block and endurance of storage are those of the flash that it lies in."""
    board.write_text(BOARD.replace("aux_bytes = 4_096\n", "") + FLASH)
    device = load_device(board)
    assert device.flash is not None
    assert device.storage is not None
    assert (device.aux_bytes, device.flash.storage_bytes) == (4096, 4096)
    assert (device.storage.erase_block_bytes, device.storage.endurance_cycles) == (1024, 10_000)


def test_volatile_storage_lies_elsewhere(board: Path) -> None:
    """What the flash has for generations says nothing of it."""
    board.write_text(BOARD.replace('mode = "dma"', 'mode = "dma"\nvolatile = true') + FLASH)
    device = load_device(board)
    assert device.storage is not None
    assert device.is_volatile
    assert (device.storage.erase_block_bytes, device.storage.endurance_cycles) == (None, None)


def test_faults_of_flash_are_named(tmp_path: Path) -> None:
    """What is missing, unknown or no table."""
    path = tmp_path / "board.toml"
    assert device_faults(path, "flash = 3\n" + BOARD)[0] == "[flash]: expected a table, got 3"
    faults = device_faults(path, BOARD + FLASH.replace("erase_s", "erase"))
    assert faults == [
        "[flash] erase: unknown key; did you mean erase_s?",
        "[flash] erase_s: expected a finite number >= 0, got nothing",
    ]


# -- profiles ----------------------------------------------------------------------------------


def test_a_profile_is_read(tmp_path: Path) -> None:
    """Rows of nodes, of tensors and of both become costs by name, in whatever order of columns."""
    path = tmp_path / "p.csv"
    path.write_text(
        " page_out_energy_j ,name,compute_time_s,compute_energy_j,page_in_time_s,page_in_energy_j,"
        "page_out_time_s\n"
        "6,conv,1,2, 3e0 ,4.,.5\n"
        "\n"
        ",bn,0,0,,,\n"
        "+1e-3,bn.mean,,,1,1,1\n"
    )
    costs = load_profile(path)
    assert costs.compute == {"conv": Cost(1.0, 2.0), "bn": FREE}
    assert costs.pages == {
        "conv": PageCost(Cost(3.0, 4.0), Cost(0.5, 6.0)),
        "bn.mean": PageCost(Cost(1.0, 1.0), Cost(1.0, 0.001)),
    }
    assert costs.device is None
    assert Costs.load(str(path)) == costs


def test_a_profile_may_come_from_a_spreadsheet(tmp_path: Path) -> None:
    """A byte order mark, line ends of Windows and quoted names are read."""
    path = tmp_path / "p.csv"
    path.write_bytes(
        b"\xef\xbb\xbf" + (HEADER + '"a,""b""\n",1,2,,,,\n').replace("\n", "\r\n").encode()
    )
    assert load_profile(path).compute == {'a,"b"\r\n': Cost(1.0, 2.0)}


def test_a_device_beside_a_profile_is_kept(tmp_path: Path, board: Path) -> None:
    """The device gives RAM and storage; without storage the page columns are not used."""
    path = tmp_path / "p.csv"
    path.write_text(HEADER + "a,1,2,3,4,5,6\n")
    device = load_device(board)
    assert load_profile(path, device=device).device is device
    assert load_profile(path, device=device).pages is not None
    bare = replace(device, storage=None)
    assert Costs.load(path, device=bare).pages is None


@pytest.mark.slow
@given(data=st.data())
def test_saved_profiles_lose_nothing(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Costs of any graph, whatever its names, come back from the file."""
    costs = data.draw(costs_for(data.draw(rich_graphs())))
    path = tmp_path_factory.mktemp("profile") / "p.csv"
    save_profile(costs, path)
    assert load_profile(path) == costs


@given(data=st.data())
def test_saved_figures_are_exact(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every figure that costs may hold comes back as the same float."""
    amount = st.floats(min_value=0, allow_infinity=False)
    cost = st.builds(Cost, amount, amount)
    costs = Costs(compute={"a": data.draw(cost)}, pages={"b": PageCost(data.draw(cost), FREE)})
    path = tmp_path_factory.mktemp("profile") / "p.csv"
    save_profile(costs, path)
    assert load_profile(path) == costs


def test_saved_profiles_have_one_row_per_name(tmp_path: Path, board: Path) -> None:
    """A node and a tensor of one name share a row; cells that do not apply are empty."""
    device = replace(load_device(board), storage=None)
    pages = {"a": PageCost(Cost(3.0, 4.0), Cost(5.0, 6.0)), "t": PageCost(FREE, FREE)}
    costs = Costs(compute={"a": Cost(1.0, 2.0), "b": FREE}, pages=pages)
    path = tmp_path / "p.csv"
    save_profile(costs, path)
    assert path.read_text() == HEADER + (
        "a,1.0,2.0,3.0,4.0,5.0,6.0\nb,0.0,0.0,,,,\nt,,,0.0,0.0,0.0,0.0\n"
    )
    without = Costs(compute={"a": Cost(1.0, 2.0)}, pages=None, device=device)
    save_profile(without, path)
    assert load_profile(path, device=device) == without


def test_saving_a_profile_nowhere_is_an_error(tmp_path: Path) -> None:
    """A missing folder is named."""
    with pytest.raises(InputError, match="does not exist"):
        save_profile(Costs(compute={"a": FREE}), tmp_path / "none" / "p.csv")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("", "expected the columns name, compute_time_s, compute_energy_j, page_in_time_s,"),
        ("\n\n", "expected the columns name"),
        ("name,compute_time_s\n", "line 1: missing compute_energy_j, page_in_time_s, page_in_ener"),
        (HEADER.replace("name", "node,name"), "line 1: unknown column 'node'; expected are name, "),
        (HEADER.replace("name", "name,name"), "line 1: the column name comes 2 times"),
        (HEADER, "expected a row for every node, got no rows"),
        ('"name', "line 1: not valid CSV (unexpected end of data)"),
    ],
)
def test_a_header_must_name_exactly_the_columns(tmp_path: Path, header: str, message: str) -> None:
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
        ("a,1,nan,,,,", "line 2 ('a'): compute_energy_j: expected a finite number >= 0, got 'nan'"),
        ("a,inf,2,,,,", "line 2 ('a'): compute_time_s: expected a finite number >= 0, got 'inf'"),
        ("a,1e999,2,,,,", "line 2 ('a'): compute_time_s: expected a finite number >= 0, got '1e9"),
        ("a,-1,2,,,,", "line 2 ('a'): compute_time_s: expected a finite number >= 0, got '-1'"),
        ("a,1_0,2,,,,", "line 2 ('a'): compute_time_s: expected a finite number >= 0, got '1_0'"),
        ('"a,1,2,,,,', "line 2: not valid CSV (unexpected end of data)"),
    ],
)
def test_each_fault_of_a_row_names_its_line(tmp_path: Path, row: str, message: str) -> None:
    """One wrong cell is one fault that names line, row and column."""
    (fault,) = profile_faults(tmp_path / "p.csv", HEADER + row + "\n")
    assert fault.startswith(message)


def test_all_faults_of_a_profile_come_together(tmp_path: Path) -> None:
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


def test_a_missing_profile_is_a_cost_error(tmp_path: Path, told: Told) -> None:
    """A path that leads nowhere, to a folder or to a binary file is an error that names it."""
    with told.raises(CostError):
        load_profile(tmp_path / "none.csv")
    with pytest.raises(CostError, match="found a folder"):
        load_profile(tmp_path)
    (tmp_path / "p.csv").write_bytes(b"\xff")
    with pytest.raises(CostError, match="binary file"):
        load_profile(tmp_path / "p.csv")


def test_file_says_how_storage_is_read_and_wears(tmp_path: Path, told: Told) -> None:
    """Three keys of [storage] are optional; each has its place in messages."""
    path = tmp_path / "board.toml"
    more = 'mode = "dma"\nmemory_mapped = true\nendurance_cycles = 1e5\nerase_block_bytes = 4_096\n'
    path.write_text(BOARD.replace('mode = "dma"\n', more))
    storage = load_device(path).storage
    assert storage is not None
    assert (storage.memory_mapped, storage.endurance_cycles) == (True, 1e5)
    assert storage.erase_block_bytes == 4096
    path.write_text(BOARD.replace('mode = "dma"\n', more.replace("true", '"yes"')))
    with told.raises(DeviceError):
        load_device(path)
