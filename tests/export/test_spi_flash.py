"""The model of a flash chip keeps the rules of real ones; the driver knows them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest

from kit.toy_export import library

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM, READ, STATUS, ENABLE, ERASE = 0x02, 0x03, 0x05, 0x06, 0x20


class Chip:
    """The model, commanded byte by byte."""

    def __init__(self, folder: Path) -> None:
        self.library = library(
            folder,
            "spi_flash_model.c",
            "driver_spi_flash.c",
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
