"""How long pages take between RAM and a folder on this host, with the file cache defeated."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Final

from poetmodel.errors import InputError
from poetmodel.torch.pages import checksum
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SIZES_BYTES: Final = tuple(4096 * 4**k for k in range(7))
"""Sizes of the pages that are timed: 4 KiB to 16 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One direction: time is latency plus bytes over rate."""

    latency_s: float
    """Time of an empty page [s]."""
    bytes_per_s: float
    """Rate after that [B/s]."""

    def time_s(self, size_bytes: int) -> float:
        """Return the time of a page [s]."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """What a folder takes to page."""

    page_in: Way
    """Storage to RAM."""
    page_out: Way
    """RAM to storage."""
    cold: bool
    """Whether reads came from the medium; False where the cache could not be emptied."""
    folder: str
    """Where it was measured."""


def measure_paging(
    folder: str | Path, *, repeats: int = 5, sizes_bytes: Sequence[int] = SIZES_BYTES
) -> Paging:
    """Measure page-out and page-in in a folder.

    Parameters
    ----------
    folder : str or Path
        Where pages are to lie.
    repeats : int
        Times that each size is moved; the median counts.
    sizes_bytes : sequence of int
        Sizes of the pages, two or more [B].

    Returns
    -------
    Paging
        Latency and rate of both directions.

    Raises
    ------
    InputError
        If no file of the largest size can be written in the folder.

    Notes
    -----
    A page-out is ``pwrite`` and ``fdatasync``, so that it ends when the medium has the bytes, and
    the copy in the file cache is dropped after it (``POSIX_FADV_DONTNEED``); a page-in then reads
    from the medium. Both take the checksum of the page, as steps do. The median is taken, and not
    the least as for operations: what a medium takes varies by itself, and a step pays for all of
    it. Whether the cache was empty is tried with a read that may not wait
    (``RWF_NOWAIT``). Latency and rate are fitted to the relative deviations, so that small pages
    count as much as large ones.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".poetmodel-paging-") as file:
            return _measure(file.fileno(), str(folder), repeats, sorted(sizes_bytes))
    except OSError as error:
        needed = format_bytes(max(sizes_bytes))
        msg = (
            f"{folder}: pages cannot be timed here ({error.strerror or error}); give a folder "
            f"that exists, can be written and has {needed} free"
        )
        raise InputError(msg) from None


def _measure(descriptor: int, folder: str, repeats: int, sizes_bytes: Sequence[int]) -> Paging:
    written, read = [], []
    with mmap.mmap(-1, max(sizes_bytes)) as memory:
        memory[:] = os.urandom(4096) * (max(sizes_bytes) // 4096) + bytes(max(sizes_bytes) % 4096)
        os.pwrite(descriptor, memory, 0)
        os.fdatasync(descriptor)
        for size in sizes_bytes:
            page = memoryview(memory)[:size]
            outs, ins = [], []
            for _ in range(repeats):
                begin = perf_counter()
                checksum(page)
                _write(descriptor, page)
                outs.append(perf_counter() - begin)
                begin = perf_counter()
                _read(descriptor, page)
                checksum(page)
                ins.append(perf_counter() - begin)
            page.release()
            written.append(median(outs))
            read.append(median(ins))
        _write(descriptor, memoryview(memory)[: min(sizes_bytes)])
        cold = _is_cold(descriptor)
    return Paging(
        page_in=fitted(sizes_bytes, read),
        page_out=fitted(sizes_bytes, written),
        cold=cold,
        folder=folder,
    )


def _write(descriptor: int, page: memoryview) -> None:
    done = 0
    while done < len(page):
        done += os.pwrite(descriptor, page[done:], done)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _read(descriptor: int, page: memoryview) -> None:
    done = 0
    while done < len(page):
        got = os.preadv(descriptor, [page[done:]], done)
        if got == 0:
            msg = "the file is shorter than what was written to it"
            raise OSError(msg)
        done += got


def _is_cold(descriptor: int) -> bool:
    """Return whether the first block of a file is not in the file cache."""
    try:
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) == 0
    except BlockingIOError:
        return True
    except OSError:  # the file system does not know such reads: nothing is proven
        return False


def fitted(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> Way:
    """Fit latency and rate to measured times, by least squares of the relative deviations.

    Examples
    --------
    >>> way = fitted([1000, 2000, 4000], [0.002, 0.003, 0.005])
    >>> round(way.latency_s, 9), round(way.bytes_per_s)
    (0.001, 1000000)
    """
    import numpy as np

    sizes, times = np.asarray(sizes_bytes, float), np.asarray(times_s, float)
    columns = np.stack([1 / times, sizes / times], axis=1)
    (latency_s, slope), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    if latency_s < 0 or slope <= 0:
        # A line through the origin: the rate that fits best without a latency.
        ratio = sizes / times
        latency_s, slope = 0.0, float(ratio.sum() / (ratio**2).sum())
    return Way(latency_s=float(latency_s), bytes_per_s=1 / float(slope))
