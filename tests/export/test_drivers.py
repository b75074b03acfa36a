"""Drivers of storage, called from here: slots and their bounds, flash chips."""

import ctypes
import math
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kit.digits import STEP, library
from kit.nor_flash import C
from kit.programs import require_programs, run_command
from kit.shared_objects import link_program
from poetmodel.export.exporting import export_step
from poetmodel.lowered.io import load_step

NO_SUCH_SLOT = 4
SIZES = (4, 20, 4)
"""Of the slots of the toy [B]."""


@pytest.fixture
def pages(tmp_path):
    """Load the page driver over a RAM disk that the core reads."""
    flags = ("-DPM_MAPPED=1", "-DPM_STORAGE_BLOCK=64u", "-DPM_STORAGE_BYTES=256u")
    found = library(tmp_path, "port/driver_ram.c", "src/pm_step.c", flags=flags)
    found.pm_page_address.restype = ctypes.c_void_p
    return found


def test_slots_have_bounds(pages):
    """Slots that are not there, and bytes beyond the end of one, are refused; none overlap."""
    data = ctypes.create_string_buffer(64)
    for slot, size in enumerate(SIZES):
        assert pages.pm_page_out(slot, bytes([65 + slot]) * size, size) == 0
        assert pages.pm_page_out(slot, data, size + 1) == NO_SUCH_SLOT
        assert pages.pm_page_in(slot, data, size + 1) == NO_SUCH_SLOT
        assert pages.pm_page_write(slot, size, data, 1) == NO_SUCH_SLOT
        assert pages.pm_page_wait(slot) == 0
    for slot, size in enumerate(SIZES):
        assert pages.pm_page_in(slot, data, size) == 0
        assert data.raw[:size] == bytes([65 + slot]) * size
    for slot in (len(SIZES), 2**32 - 1):
        assert pages.pm_page_out(slot, data, 1) == NO_SUCH_SLOT
        assert pages.pm_page_in(slot, data, 1) == NO_SUCH_SLOT
        assert pages.pm_page_wait(slot) == NO_SUCH_SLOT


def test_mapped_storage_is_read_where_it_lies(pages):
    """A piece that is written changes these bytes, and no others; slots begin at blocks."""
    addresses = [pages.pm_page_address(slot) for slot in range(len(SIZES))]
    assert [b - a for a, b in pairwise(addresses)] == [64, 64]
    pages.pm_page_out(1, bytes(range(20)), 20)
    assert pages.pm_page_write(1, 8, b"abcd", 4) == 0
    assert ctypes.string_at(addresses[1], 20) == bytes(range(8)) + b"abcd" + bytes(range(12, 20))


def test_storage_that_is_too_small_says_so(tmp_path):
    """A RAM disk refuses addresses beyond its end."""
    flags = ("-DPM_STORAGE_BLOCK=64u", "-DPM_STORAGE_BYTES=80u")
    small = library(tmp_path, "port/driver_ram.c", "src/pm_step.c", flags=flags)
    data = ctypes.create_string_buffer(20)
    assert small.pm_page_out(0, data, 4) == 0
    assert small.pm_page_out(1, data, 20) == 2
    assert small.pm_page_in(1, data, 20) == 2


LOST_STORAGE = """
#include <stdio.h>
#include <string.h>
#include "pm_pages.h"

static _Alignas(16) unsigned char memory[PM_STORED_BYTES];
static int is_lost;

int pm_storage_read(uint32_t address, void *to, uint32_t bytes)
{
    return memcpy(to, memory + address, bytes) ? PM_OK : PM_ERROR_PAGE;
}

int pm_storage_write(uint32_t address, const void *from, uint32_t bytes)
{
    return memcpy(memory + address, from, bytes) ? PM_OK : PM_ERROR_PAGE;
}

const void *pm_storage_address(uint32_t address)
{
    return is_lost ? 0 : memory + address;
}

int main(void)
{
    static pm_real batch[PM_INPUT_BYTES / sizeof(pm_real)], loss;
    const void *inputs[PM_INPUTS];
    for (int k = 0; k < PM_INPUTS; k++) inputs[k] = batch;
    const int begun = pm_init(), trained = pm_step(inputs, (pm_real)0.1, &loss);
    is_lost = 1;
    const int lost = pm_step(inputs, (pm_real)0.1, &loss);
    is_lost = 0;
    printf("%d %d %d %d", begun, trained, lost, pm_step(inputs, (pm_real)0.1, &loss));
    return 0;
}
"""
"""A driver of memory-mapped storage without an address in the second of three steps."""


def test_a_step_ends_with_an_error_where_storage_has_no_address(tmp_path):
    """It reads no null pointer, and leaves the state as it was."""
    require_programs("cc")
    options = {"device": "nano33ble", "commit": True, "ram": "90%"}
    made = export_step(load_step(STEP), tmp_path, gap=0.5, **options)
    assert made.plan.memory_mapped
    assert made.resident_names < {node.name for node in made.step.graph.nodes if node.is_state}
    (tmp_path / "lost.c").write_text(LOST_STORAGE)
    sources = (*sorted(tmp_path.glob("src/*.c")), tmp_path / "lost.c")
    includes = [tmp_path / name for name in ("include", "port", "src")]
    app = link_program(C, sources, includes, tmp_path / "lost")
    assert run_command([app], tmp_path).split() == ["0", "0", "2", "0"]


# -- the model of a flash chip keeps the rules of real ones; the driver knows them -----------------
PROGRAM, READ, STATUS, ENABLE, ERASE = 0x02, 0x03, 0x05, 0x06, 0x20


class Chip:
    """The model, commanded byte by byte."""

    def __init__(self, folder):
        self.library = library(
            folder,
            "host/spi_flash_model.c",
            "port/driver_spi_flash.c",
            "src/pm_step.c",
            flags=("-DPM_STORAGE_BLOCK=4096u",),
        )

    def send(self, code, address=None, out=b"", count=0):
        """Send a command with its arguments; return the reply of the chip."""
        command = bytes([code]) + (b"" if address is None else address.to_bytes(3, "big"))
        into = ctypes.create_string_buffer(max(count, 1))
        error = self.library.pm_spi_transfer(
            command, len(command), out or None, into if count else None, count or len(out)
        )
        assert error == 0
        return into.raw[:count]

    def ready(self):
        """Wait until the chip is done."""
        while self.send(STATUS, count=1)[0] & 1:
            pass

    def change(self, code, address, out=b""):
        """Enable, command, and wait."""
        self.send(ENABLE)
        self.send(code, address, out)
        self.ready()


@pytest.fixture
def chip(tmp_path):
    """Start with the first two sectors erased."""
    found = Chip(tmp_path)
    for sector in range(2):
        found.change(ERASE, 4096 * sector)
    return found


def test_the_chip_keeps_the_rules_of_flash(chip):
    """Without the latch, no command has an effect, and a busy chip ignores commands.

    Programming only clears bits, and continues at the beginning of its page.
    """
    chip.send(PROGRAM, 0, b"\x00")
    chip.ready()
    assert chip.send(READ, 0, count=1) == b"\xff"
    chip.send(ENABLE)
    chip.send(PROGRAM, 0, b"\x0f")
    assert chip.send(READ, 0, count=1) == b"\xff"
    chip.ready()
    chip.send(PROGRAM, 1, b"\x0f")
    chip.ready()
    assert chip.send(READ, 0, count=2) == b"\x0f\xff"
    chip.change(PROGRAM, 8, b"\xf0")
    chip.change(PROGRAM, 8, b"\x3c")
    assert chip.send(READ, 8, count=1) == b"\x30"
    chip.change(ERASE, 100)
    assert chip.send(READ, 8, count=1) == b"\xff"
    chip.change(PROGRAM, 255, b"\x01\x02")
    assert chip.send(READ, 255, count=2) == b"\x01\xff"
    assert chip.send(READ, 0, count=1) == b"\x02"


@pytest.mark.parametrize("address", [0, 4096])
@pytest.mark.parametrize("size", [1, 256, 300, 4096])
def test_driver_writes_what_is_read(chip, address, size):
    """Twice over the same place, in two calls that follow each other, across pages and sectors."""
    for salt in (1, 2):
        data = bytes((salt * 7 + k * k) % 256 for k in range(size + 9))
        chip.library.pm_storage_write(address, data[:size], size)
        chip.library.pm_storage_write(address + size, data[size:], 9)
        into = ctypes.create_string_buffer(size + 9)
        assert chip.library.pm_storage_read(address, into, size + 9) == 0
        assert into.raw == data
    assert chip.library.pm_storage_read(1 << 24, into, 1) != 0  # beyond three bytes of address


# -- numbers as text -------------------------------------------------------------------------------
FLOATS = st.floats(width=32)


class Text:
    """The functions of pm_text.c for one type of numbers."""

    def __init__(self, loaded, kind, digits):
        self._of_real = loaded.pm_text_of_real
        loaded.pm_text_of_real.argtypes = [kind, ctypes.c_char_p]
        loaded.pm_text_of_real.restype = ctypes.c_char_p
        self._read = loaded.pm_real_of_text
        self._kind, self.digits = kind, digits

    def write(self, value):
        """Return a number as C writes it."""
        return self._of_real(value, ctypes.create_string_buffer(32)).decode()

    def read(self, text):
        """Return the number that C reads; None if it refuses the text."""
        found = self._kind()
        return found.value if self._read(text.encode(), ctypes.byref(found)) else None


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Numbers of the build for a device."""
    return Text(library(tmp_path_factory.mktemp("text"), "host/pm_text.c"), ctypes.c_float, 9)


@pytest.fixture(scope="module")
def double(tmp_path_factory):
    """Numbers of the build that checks."""
    flags = ("-DPM_REAL=double",)
    loaded = library(tmp_path_factory.mktemp("text"), "host/pm_text.c", flags=flags)
    return Text(loaded, ctypes.c_double, 17)


def _agrees(text, value, digits):
    if math.isnan(value):
        return text in {"nan", "-nan"}
    return text == f"{value:.{digits - 1}e}"


@given(FLOATS)
@example(0.0)
@example(-0.0)
@example(2.0**-149)
@example(3.4028234663852886e38)
@example(float.fromhex("0x1.82db34p-77"))  # rounds up to 1e-23
def test_floats_are_rounded_exactly(single, value):
    """Nine digits of any float are those of Python, and are read back as the float."""
    text = single.write(value)
    assert _agrees(text, value, 9)
    if not math.isnan(value):
        assert struct.pack("f", float(text)) == struct.pack("f", value)


@given(st.floats())
@example(5e-324)
@example(1.7976931348623157e308)
@example(1e-277)  # rounds up to that
def test_doubles_are_rounded_exactly(double, value):
    """Seventeen digits of any double are those of Python."""
    assert _agrees(double.write(value), value, 17)


@given(st.floats(min_value=1e-20, max_value=1e20), st.booleans())
@example(0.05, False)
@example(1.0, True)
def test_learning_rates_are_read_as_python_does(single, double, value, negative):
    """The text of a number is read as that double, and as its float except the last bit."""
    value = -value if negative else value
    assert double.read(repr(value)) == value
    assert single.read(repr(value)) == pytest.approx(float(np.float32(value)), rel=2.0**-23)


SHORT = ("0.1", "0.05", "1e-3", "0.001", "3", ".5", "2.5E+2", "1e-05")
NO_NUMBERS = ("", "-", ".", "1e", "0.1x", "1..2", "nan", "1e999")


@pytest.mark.parametrize("text", [*SHORT, *NO_NUMBERS])
def test_short_numbers_are_read_exactly_and_other_text_is_none(single, text):
    """Decimal text becomes the float that PyTorch would use; other text is refused."""
    assert single.read(text) == (float(np.float32(float(text))) if text in SHORT else None)
