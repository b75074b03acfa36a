"""Drivers of storage, called from here: slots and their bounds, flash chips, commits on them."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from kit.toy_export import LEARNING_RATE, library, samples

if TYPE_CHECKING:
    from pathlib import Path

NO_SUCH_SLOT = 4
SIZES = (4, 20, 4)
"""Of the slots of the toy [B]."""


@pytest.fixture
def pages(tmp_path: Path) -> ctypes.CDLL:
    """Load the page driver over a RAM disk that the core reads."""
    flags = ("-DPM_MAPPED=1", "-DPM_STORAGE_BLOCK=64u", "-DPM_STORAGE_BYTES=256u")
    found = library(tmp_path, "port/driver_ram.c", "src/pm_step.c", flags=flags)
    found.pm_page_address.restype = ctypes.c_void_p
    return found


def test_slots_have_bounds(pages: ctypes.CDLL) -> None:
    """Slots that are not there, and bytes beyond the end of one, are refused."""
    data = ctypes.create_string_buffer(64)
    for slot, size in enumerate(SIZES):
        assert pages.pm_page_out(slot, data, size) == 0
        assert pages.pm_page_out(slot, data, size + 1) == NO_SUCH_SLOT
        assert pages.pm_page_in(slot, data, size + 1) == NO_SUCH_SLOT
        assert pages.pm_page_write(slot, size, data, 1) == NO_SUCH_SLOT
        assert pages.pm_page_wait(slot) == 0
    for slot in (len(SIZES), 2**32 - 1):
        assert pages.pm_page_out(slot, data, 1) == NO_SUCH_SLOT
        assert pages.pm_page_in(slot, data, 1) == NO_SUCH_SLOT
        assert pages.pm_page_wait(slot) == NO_SUCH_SLOT


def test_slots_do_not_overlap(pages: ctypes.CDLL) -> None:
    """What is written to one is read from it after all were written."""
    for slot, size in enumerate(SIZES):
        pages.pm_page_out(slot, bytes([65 + slot]) * size, size)
    for slot, size in enumerate(SIZES):
        data = ctypes.create_string_buffer(size)
        assert pages.pm_page_in(slot, data, size) == 0
        assert data.raw == bytes([65 + slot]) * size


def test_mapped_storage_is_read_where_it_lies(pages: ctypes.CDLL) -> None:
    """A piece that is written changes these bytes, and no others; slots begin at blocks."""
    addresses = [pages.pm_page_address(slot) for slot in range(len(SIZES))]
    assert [b - a for a, b in pairwise(addresses)] == [64, 64]
    pages.pm_page_out(1, bytes(range(20)), 20)
    assert pages.pm_page_write(1, 8, b"abcd", 4) == 0
    assert ctypes.string_at(addresses[1], 20) == bytes(range(8)) + b"abcd" + bytes(range(12, 20))


def test_storage_that_is_too_small_says_so(tmp_path: Path) -> None:
    """A RAM disk refuses what lies beyond it."""
    flags = ("-DPM_STORAGE_BLOCK=64u", "-DPM_STORAGE_BYTES=80u")
    small = library(tmp_path, "port/driver_ram.c", "src/pm_step.c", flags=flags)
    data = ctypes.create_string_buffer(20)
    assert small.pm_page_out(0, data, 4) == 0
    assert small.pm_page_out(1, data, 20) == 2
    assert small.pm_page_in(1, data, 20) == 2


# -- the model of a flash chip keeps the rules of real ones; the driver knows them -----------------

PROGRAM, READ, STATUS, ENABLE, ERASE = 0x02, 0x03, 0x05, 0x06, 0x20


class Chip:
    """The model, commanded byte by byte."""

    def __init__(self, folder: Path) -> None:
        self.library = library(
            folder,
            "host/spi_flash_model.c",
            "port/driver_spi_flash.c",
            "src/pm_step.c",
            flags=("-DPM_STORAGE_BLOCK=4096u",),
        )

    def send(
        self, code: int, address: int | None = None, out: bytes = b"", count: int = 0
    ) -> bytes:
        """Send a command with what belongs to it; return what the chip says."""
        command = bytes([code]) + (b"" if address is None else address.to_bytes(3, "big"))
        into = ctypes.create_string_buffer(max(count, 1))
        error = self.library.pm_spi_transfer(
            command, len(command), out or None, into if count else None, count or len(out)
        )
        assert error == 0
        return into.raw[:count]

    def ready(self) -> None:
        """Wait until the chip is done."""
        while self.send(STATUS, count=1)[0] & 1:
            pass

    def change(self, code: int, address: int, out: bytes = b"") -> None:
        """Enable, command, and wait."""
        self.send(ENABLE)
        self.send(code, address, out)
        self.ready()


@pytest.fixture
def chip(tmp_path: Path) -> Chip:
    """Start with the first two sectors erased."""
    found = Chip(tmp_path)
    for sector in range(2):
        found.change(ERASE, 4096 * sector)
    return found


def test_nothing_changes_without_the_latch(chip: Chip) -> None:
    """A program command that no enable came before does nothing, nor does a second one."""
    chip.send(PROGRAM, 0, b"\x00")
    chip.ready()
    assert chip.send(READ, 0, count=1) == b"\xff"
    chip.change(PROGRAM, 0, b"\x0f")
    chip.send(PROGRAM, 1, b"\x0f")
    chip.ready()
    assert chip.send(READ, 0, count=2) == b"\x0f\xff"


def test_programming_clears_bits_only(chip: Chip) -> None:
    """Without an erase, what is written is ANDed with what was there."""
    chip.change(PROGRAM, 8, b"\xf0")
    chip.change(PROGRAM, 8, b"\x3c")
    assert chip.send(READ, 8, count=1) == b"\x30"
    chip.change(ERASE, 100)
    assert chip.send(READ, 8, count=1) == b"\xff"


def test_programming_wraps_in_its_page(chip: Chip) -> None:
    """Bytes beyond the end of a page go to its begin."""
    chip.change(PROGRAM, 255, b"\x01\x02")
    assert chip.send(READ, 255, count=2) == b"\x01\xff"
    assert chip.send(READ, 0, count=1) == b"\x02"


def test_busy_chip_does_not_listen(chip: Chip) -> None:
    """Until the status says so, commands are lost."""
    chip.send(ENABLE)
    chip.send(PROGRAM, 0, b"\x11")
    assert chip.send(READ, 0, count=1) == b"\xff"
    chip.ready()
    assert chip.send(READ, 0, count=1) == b"\x11"


@pytest.mark.parametrize("address", [0, 4096])
@pytest.mark.parametrize("size", [1, 256, 300, 4096])
def test_driver_writes_what_is_read(chip: Chip, address: int, size: int) -> None:
    """Twice over the same place, in two calls that follow each other, across pages and sectors."""
    for salt in (1, 2):
        data = bytes((salt * 7 + k * k) % 256 for k in range(size + 9))
        chip.library.pm_storage_write(address, data[:size], size)
        chip.library.pm_storage_write(address + size, data[size:], 9)
        into = ctypes.create_string_buffer(size + 9)
        assert chip.library.pm_storage_read(address, into, size + 9) == 0
        assert into.raw == data


def test_driver_refuses_what_the_chip_cannot_address(chip: Chip) -> None:
    """Three bytes of address reach 16 MiB."""
    into = ctypes.create_string_buffer(1)
    assert chip.library.pm_storage_read(1 << 24, into, 1) != 0


# -- commits on flash: whenever the power goes, one generation of the state is whole ---------------

STEPS = 3
TORN, NO_GENERATION = 1, 8


class Flash:
    """The toy with commits over the model of a flash chip, called step by step."""

    def __init__(self, folder: Path) -> None:
        sources = ("src/pm_step.c", "src/pm_commit.c", "port/driver_spi_flash.c", "cut_spi.c")
        flags = ("-DPM_COMMIT=1", "-DPM_STORAGE_BLOCK=4096u", "-DPM_CHECKSUM")
        self.library = library(folder, *sources, flags=flags)
        self._left = ctypes.c_int.in_dll(self.library, "transfers_left")
        self.transfers = ctypes.c_int.in_dll(self.library, "transfers")
        self._commits = ctypes.c_uint32.in_dll(self.library, "pm_commits")

    def cut_after(self, transfers: int) -> None:
        """Let the power go after some transfers; negative: not any more."""
        self._left.value = transfers

    def train(self, first: int) -> int:
        """Train from step `first` to the last; return the first error."""
        for step in range(first, STEPS):
            x, k = samples()[step]
            values, factor, loss = (ctypes.c_float * 5)(*x), ctypes.c_int32(k), ctypes.c_float()
            inputs = (ctypes.c_void_p * 2)(ctypes.addressof(values), ctypes.addressof(factor))
            rate = ctypes.c_float(LEARNING_RATE)
            error = self.library.pm_step(inputs, rate, ctypes.byref(loss))
            if error:
                return int(error)
        return 0

    def resume(self) -> int:
        """Restart with the power back; return the steps that were committed."""
        self.cut_after(-1)
        error = self.library.pm_resume()
        return int(self._commits.value) - 1 if error == 0 else -int(error)

    def state(self) -> bytes:
        """Return both parameters."""
        into = ctypes.create_string_buffer(20)
        found = b""
        for index, size in ((0, 20), (1, 4)):
            assert self.library.pm_read_state(index, into) == 0
            found += into.raw[:size]
        return found


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Flash:
    """Build it once: each test begins with ``pm_init``."""
    return Flash(tmp_path_factory.mktemp("flash"))


def test_power_cut_at_any_transfer_leaves_a_whole_generation(flash: Flash) -> None:
    """In the middle of a page, before or after any command: training goes on to the same end."""
    assert flash.library.pm_init() == 0
    begin = flash.transfers.value
    assert flash.train(0) == 0
    whole, transfers = flash.state(), flash.transfers.value - begin
    torn = 0
    for left in range(1, transfers):
        assert flash.library.pm_init() == 0
        flash.cut_after(left)
        error = flash.train(0)
        torn += error == TORN
        # The state was read over the same wires after the last step.
        done = flash.resume()
        assert 0 <= done <= STEPS
        assert flash.train(done) == 0
        assert flash.state() == whole
    assert torn > transfers // 4


def test_power_cut_in_a_new_beginning_leaves_the_old_state(flash: Flash, tmp_path: Path) -> None:
    """Until all state is made anew what was there is whole; where nothing was, that is said."""
    assert flash.library.pm_init() == 0
    assert flash.train(0) == 0
    old = flash.state()
    begin = flash.transfers.value
    assert flash.library.pm_init() == 0
    transfers = flash.transfers.value - begin
    new = flash.state()
    for left in range(1, transfers, 3):
        assert flash.library.pm_init() == 0
        assert flash.train(0) == 0
        flash.cut_after(left)
        assert flash.library.pm_init() != 0
        done = flash.resume()
        assert done in {0, STEPS}
        assert flash.state() == (old if done else new)
    blank = Flash(tmp_path)
    blank.cut_after(transfers // 2)
    assert blank.library.pm_init() != 0
    assert blank.resume() == -NO_GENERATION
