"""Peak of a process's memory, as the kernel counts it (Linux): anonymous pages, and all pages."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

PERIOD_S: Final = 0.0005
"""Time between two samples of the anonymous pages [s]."""
THRESHOLD_BYTES: Final = 16 * 1024
"""Memory of at least this size goes back to the kernel when it is freed [B]."""

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_RESET_HIGH_WATER_MARK: Final = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPeak:
    """What a process holds before something runs, and the most that it holds while it runs."""

    before_bytes: int
    """Anonymous pages before [B]."""
    anonymous_bytes: int
    """Most anonymous pages, of samples [B]."""
    total_before_bytes: int
    """All resident pages before, those of mapped files included [B]."""
    total_bytes: int
    """Most resident pages, by the kernel's high-water mark [B]."""


def give_back_at_once() -> None:
    """Let the C library give the memory of freed tensors back to the kernel at once.

    It keeps some for later otherwise, so that a process holds what no tensor needs any more.
    """
    library = ctypes.CDLL(None)
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        if not library.mallopt(option, THRESHOLD_BYTES):
            msg = f"mallopt({option}) was refused"
            raise OSError(msg)


def process_peak(work: Callable[[], object]) -> ProcessPeak:
    """Measure the memory of this process while something runs.

    In a thread of its own there are no holes in the heap that others have left, such as a solver;
    those would take small tensors, and keep their pages after them.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(_RESET_HIGH_WATER_MARK, encoding="ascii")
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(PERIOD_S)
    try:
        with _Samples() as samples:
            work()
    finally:
        sys.setswitchinterval(interval_s)
    return ProcessPeak(
        before_bytes=samples.first[0],
        anonymous_bytes=samples.highest,
        total_before_bytes=samples.first[1],
        total_bytes=_high_water_mark_bytes(),
    )


def anonymous_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors, but for those that lie in a mapped file."""
    from poetmodel.torch.capturing.replay import storage_key

    files = _mapped_files()
    storages = {storage_key(tensor): tensor.untyped_storage() for tensor in tensors}
    return sum(
        storage.nbytes()
        for storage in storages.values()
        if not any(begin <= storage.data_ptr() < end for begin, end in files)
    )


class _Samples:
    """Reads how many pages are resident again and again, in a thread."""

    def __init__(self) -> None:
        self._statistics = os.open("/proc/self/statm", os.O_RDONLY)
        self.first = (0, 0)
        """Anonymous and all resident pages in the beginning, the thread's own included [B]."""
        self.highest = 0
        """Most anonymous pages of a sample [B]."""
        self._began, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._began.wait()
        self.first = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        os.close(self._statistics)

    def _go_on(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self.highest = max(self.highest, self._read()[0])
            self._began.set()

    def _read(self) -> tuple[int, int]:
        _, resident, shared, *_ = map(int, os.pread(self._statistics, 128, 0).split())
        return (resident - shared) * _PAGE_BYTES, resident * _PAGE_BYTES


def _high_water_mark_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    msg = "/proc/self/status has no VmHWM"
    raise OSError(msg)


def _mapped_files() -> list[tuple[int, int]]:
    """Return first and last address of what is mapped from files."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        if inode != "0":
            begin, end = (int(address, 16) for address in addresses.split("-"))
            found.append((begin, end))
    return found
