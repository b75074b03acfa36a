"""Commits on flash: whenever the power goes, one generation of the state is whole."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest

from kit.toy_export import LEARNING_RATE, library, samples

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 3
TORN, NO_GENERATION = 1, 8


class Flash:
    """The toy with commits over the model of a flash chip, called step by step."""

    def __init__(self, folder: Path) -> None:
        sources = ("pm_step.c", "pm_commit.c", "pm_pages.c", "driver_spi_flash.c", "cut_spi.c")
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


def test_power_cut_before_the_first_commit_says_so(flash: Flash) -> None:
    """While all state is made anew there is nothing to go on from, and nobody is told otherwise."""
    begin = flash.transfers.value
    assert flash.library.pm_init() == 0
    transfers = flash.transfers.value - begin
    empty = 0
    for left in range(1, transfers, 3):
        flash.cut_after(left)
        assert flash.library.pm_init() != 0
        done = flash.resume()
        assert done in {0, -NO_GENERATION}
        empty += done == -NO_GENERATION
        assert flash.library.pm_init() == 0
    assert empty > 3
