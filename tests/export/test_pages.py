"""Slots of storage: their bounds, and bytes that the core reads where they lie."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from kit.toy_export import library

if TYPE_CHECKING:
    from pathlib import Path

NO_SUCH_SLOT = 4
SIZES = (4, 20, 4)
"""Of the slots of the toy [B]."""


@pytest.fixture
def pages(tmp_path: Path) -> ctypes.CDLL:
    """Load the page driver over a RAM disk that the core reads."""
    flags = ("-DPM_MAPPED=1", "-DPM_STORAGE_BLOCK=64u", "-DPM_STORAGE_BYTES=256u")
    found = library(tmp_path, "pm_pages.c", "driver_ram.c", "pm_step.c", flags=flags)
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
    small = library(tmp_path, "pm_pages.c", "driver_ram.c", "pm_step.c", flags=flags)
    data = ctypes.create_string_buffer(20)
    assert small.pm_page_out(0, data, 4) == 0
    assert small.pm_page_out(1, data, 20) == 2
    assert small.pm_page_in(1, data, 20) == 2
