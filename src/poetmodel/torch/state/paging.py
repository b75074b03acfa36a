"""Times of pages: a folder's transfers, measured, as latency and rate."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.errors import InputError
from poetmodel.torch.state.pages import checksum, read_page, write_page
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PAGE_SIZES_BYTES: Final = tuple(4096 * 4**k for k in range(7))
"""Sizes of the pages that are timed: 4 KiB to 16 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTime:
    """The time of transfers in one direction: latency plus bytes over rate."""

    latency_s: float
    bytes_per_s: float

    def time_s(self, size_bytes: int) -> float:
        """Return the time of one transfer [s]."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """Measured transfer times of a folder."""

    page_in: TransferTime
    page_out: TransferTime
    cold: bool
    """Whether reads came from the medium, as tested for one page; False if unknown."""
    folder: str


def measure_paging(
    folder: str | Path, *, repeats: int = 5, sizes_bytes: Sequence[int] = PAGE_SIZES_BYTES
) -> Paging:
    """Measure page-out and page-in in a temporary file of a folder, for two or more `sizes_bytes`.

    A page-out ends on the medium, from which a page-in reads: the copy in the file cache is
    dropped. The median counts, because a step includes all variations of the medium's time. The fit
    minimizes relative deviations, so that small pages weigh as much as large ones.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".poetmodel-paging-") as file:
            return _measure_transfers(file.fileno(), str(folder), repeats, sorted(sizes_bytes))
    except OSError as error:
        size_text = format_bytes(max(sizes_bytes))
        raise InputError(
            f"{folder}: pages cannot be timed here ({error.strerror or error}); use a folder that "
            f"exists, is writable and has {size_text} free"
        ) from None


def _measure_transfers(
    descriptor: int, folder: str, repeats: int, sizes_bytes: Sequence[int]
) -> Paging:
    """Time writes and reads of pages in an open file; return the times fitted to the medians."""
    page_outs_s, page_ins_s = [], []
    # The map closes when its last view is deleted. A `with` would fail after an error, when some
    # views still exist.
    memory = memoryview(mmap.mmap(-1, max(sizes_bytes)))
    memory[:] = os.urandom(4096) * (max(sizes_bytes) // 4096) + bytes(max(sizes_bytes) % 4096)
    os.pwrite(descriptor, memory, 0)
    os.fdatasync(descriptor)
    for size in sizes_bytes:
        page = memory[:size]
        writes_s, reads_s = [], []
        for _ in range(repeats):
            start_s = perf_counter()
            checksum(page)
            write_page(descriptor, page, 0)
            writes_s.append(perf_counter() - start_s)
            start_s = perf_counter()
            if read_page(descriptor, page, 0) < size:
                raise OSError("the file is shorter than the data written to it")
            checksum(page)
            reads_s.append(perf_counter() - start_s)
        page_outs_s.append(median(writes_s))
        page_ins_s.append(median(reads_s))
    write_page(descriptor, memory[: min(sizes_bytes)], 0)
    is_cold = _is_cold(descriptor)
    return Paging(
        page_in=fit_transfer_time(sizes_bytes, page_ins_s),
        page_out=fit_transfer_time(sizes_bytes, page_outs_s),
        cold=is_cold,
        folder=folder,
    )


def _is_cold(descriptor: int) -> bool:
    """Return whether the first block of a file is not in the file cache; False if unknown."""
    try:
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) == 0
    except BlockingIOError:
        return True
    except OSError:  # the file system does not support such reads
        return False


def fit_transfer_time(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> TransferTime:
    """Fit latency, at least 0, and rate by least squares of the relative deviations."""
    sizes, times = np.asarray(sizes_bytes, float), np.asarray(times_s, float)
    columns = np.stack([1 / times, sizes / times], axis=1)
    (latency_s, slope), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    if latency_s < 0 or slope <= 0:
        # A line through the origin: the rate of least squares without latency.
        ratio = sizes / times
        latency_s, slope = 0.0, float(ratio.sum() / (ratio**2).sum())
    return TransferTime(latency_s=float(latency_s), bytes_per_s=1 / float(slope))
