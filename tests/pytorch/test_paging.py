"""Page times: fits, and measuring a folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from poetmodel.errors import InputError
from poetmodel.torch import paging
from poetmodel.torch.paging import fitted, measure_paging

if TYPE_CHECKING:
    from pathlib import Path

SIZES = (4096, 65536)


def test_fit_is_exact_on_a_line() -> None:
    """Latency and rate come out as they went in, over four decades."""
    sizes = [10**k for k in range(3, 8)]
    way = fitted(sizes, [2e-4 + size / 5e7 for size in sizes])
    assert way.latency_s == pytest.approx(2e-4, rel=1e-6)
    assert way.bytes_per_s == pytest.approx(5e7, rel=1e-6)
    assert way.time_s(5 * 10**7) == pytest.approx(1.0002, rel=1e-6)


def test_fit_has_no_negative_latency() -> None:
    """Where a line would begin below zero, the latency is zero and the rate fits what is left."""
    way = fitted([1000, 2000], [0.001, 0.003])
    assert way.latency_s == 0
    assert 2000 / 0.003 < way.bytes_per_s < 1000 / 0.001


def test_measuring_leaves_nothing_behind(tmp_path: Path) -> None:
    """Both directions get a rate, and the folder is empty afterwards."""
    found = measure_paging(tmp_path, repeats=1, sizes_bytes=SIZES)
    assert found.page_in.bytes_per_s > 0
    assert found.page_out.bytes_per_s > 0
    assert found.folder == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_page_is_synced_dropped_and_read_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short writes and reads go on, and every timed read comes after a sync and a drop."""
    calls: list[str] = []
    write, read = os.pwrite, os.preadv

    def short_write(descriptor: int, page: Any, offset: int) -> int:
        calls.append("write")
        return write(descriptor, page[:40000], offset)

    def short_read(descriptor: int, pages: list[Any], offset: int, flags: int = 0) -> int:
        calls.append("probe" if flags else "read")
        return read(descriptor, [pages[0][:40000]], offset, flags)

    monkeypatch.setattr(paging.os, "pwrite", short_write)
    monkeypatch.setattr(paging.os, "preadv", short_read)
    monkeypatch.setattr(paging.os, "fdatasync", lambda _: calls.append("sync"))
    monkeypatch.setattr(paging.os, "posix_fadvise", lambda *_: calls.append("drop"))
    measure_paging(tmp_path, repeats=1, sizes_bytes=SIZES)
    assert calls == [
        "write", "sync",
        "write", "sync", "drop", "read",
        "write", "write", "sync", "drop", "read", "read",
        "write", "sync", "drop", "probe",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "cold"),
    [(BlockingIOError(), True), (OSError(95, "Operation not supported"), False), (4096, False)],
)
def test_a_full_cache_is_noticed(
    answer: Any, cold: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that need not wait means that the cache was not empty, and none means no proof."""
    read = os.preadv

    def probe(descriptor: int, pages: list[Any], offset: int, flags: int = 0) -> int:
        if not flags:
            return read(descriptor, pages, offset)
        if isinstance(answer, OSError):
            raise answer
        return int(answer)

    monkeypatch.setattr(paging.os, "preadv", probe)
    assert measure_paging(tmp_path, repeats=1, sizes_bytes=SIZES).cold is cold


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A missing folder, or one where nothing fits, gives a sentence with its name."""
    with pytest.raises(InputError, match="nowhere: pages cannot be timed here"):
        measure_paging(tmp_path / "nowhere")


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk gives a sentence that says how much must be free."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(paging.os, "pwrite", full)
    with pytest.raises(InputError, match=r"No space left on device.*64\.00 KiB free"):
        measure_paging(tmp_path, sizes_bytes=SIZES)
