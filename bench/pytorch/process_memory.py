"""Peak of a process's memory, as the kernel counts it (Linux): anonymous pages, and all pages."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

PERIOD_S: Final = 0.0005
"""Time between two samples of the anonymous pages [s]."""
THRESHOLD_BYTES: Final = 16 * 1024
"""Memory of at least this size goes back to the kernel when it is freed [B]."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
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
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        if not ctypes.CDLL(None).mallopt(option, THRESHOLD_BYTES):
            raise OSError(f"mallopt({option}) was refused")


def process_peak(work: Callable[[], object]) -> ProcessPeak:
    """Measure the memory of this process while something runs.

    Run it in a thread of its own, whose heap has no holes that others have left, such as a solver:
    these would take small tensors, and keep their pages after them.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(_RESET_HIGH_WATER_MARK, encoding="ascii")
    with _samples() as samples:
        work()
    return ProcessPeak(
        before_bytes=samples[0][0],
        anonymous_bytes=max(anonymous for anonymous, _ in samples[1:]),
        total_before_bytes=samples[0][1],
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


@contextmanager
def _samples() -> Iterator[list[tuple[int, int]]]:
    """Read anonymous and all resident pages again and again, in a thread [B].

    The first sample is of before, the thread's own pages included.
    """
    found: list[tuple[int, int]] = []
    began, stopped = threading.Event(), threading.Event()
    statistics = os.open("/proc/self/statm", os.O_RDONLY)

    def read() -> tuple[int, int]:
        _, resident, shared, *_ = map(int, os.pread(statistics, 128, 0).split())
        return (resident - shared) * _PAGE_BYTES, resident * _PAGE_BYTES

    def go_on() -> None:
        highest = 0
        while not stopped.wait(PERIOD_S):
            anonymous, resident = read()
            if anonymous > highest:
                highest = anonymous
                found.append((anonymous, resident))
            began.set()

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(PERIOD_S)
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    began.wait()
    found.insert(0, read())
    try:
        yield found
    finally:
        stopped.set()
        thread.join()
        os.close(statistics)
        sys.setswitchinterval(interval_s)


def _high_water_mark_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").split()
    return int(status[status.index("VmHWM:") + 1]) * 1024


def _mapped_files() -> list[tuple[int, int]]:
    """Return first and last address of what is mapped from files."""
    lines = map(str.split, Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    mapped = [addresses.split("-") for addresses, _, _, _, inode, *_ in lines if inode != "0"]
    return [(int(begin, 16), int(end, 16)) for begin, end in mapped]
