"""Pages: what is written comes back, and what does not is noticed."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

torch = pytest.importorskip("torch")

from poetmodel.errors import InputError  # noqa: E402
from poetmodel.torch import PageError  # noqa: E402
from poetmodel.torch.state.pages import (  # noqa: E402
    ALIGNMENT_BYTES,
    PageFile,
    blank,
    bytes_of,
    checksum,
)
from poetmodel.torch.step.units import TensorLayout, TensorStorage  # noqa: E402

pytestmark = pytest.mark.torch


def storage(index: int, rows: int) -> TensorStorage:
    """Return a matrix of so many rows of 5 floats, transposed in its memory."""
    layout = TensorLayout(
        position=None, dtype=torch.float32, shape=(5, rows), stride=(1, 5), offset=0
    )
    return TensorStorage(
        index=index, name=f"t{index}", unit=index, bytes=20 * rows, layouts=(layout,)
    )


@pytest.fixture
def file(tmp_path: Path) -> PageFile:
    """Return a file for a small and a large page."""
    return PageFile(tmp_path / "scratch", [storage(3, 7), storage(8, 1000)])


def page_out(file: PageFile, index: int) -> Any:
    """Write a page of random numbers; return it."""
    held, tensor = blank(file.storages[index])
    tensor.normal_()
    file.write(index, bytes_of(held))
    return tensor


def test_pages_come_back(file: PageFile) -> None:
    """Values, shape and strides survive; bytes are counted, and the file is as large as it was."""
    size = file.path.stat().st_size
    written = {index: page_out(file, index) for index in (8, 3)}
    for index, tensor in written.items():
        held, again = blank(file.storages[index])
        file.read(index, bytes_of(held))
        assert torch.equal(tensor, again)
        assert tensor.stride() == again.stride() == (1, 5)
    assert file.written_bytes == file.read_bytes == 20 * 1007
    assert file.path.stat().st_size == size == file.bytes == ALIGNMENT_BYTES + 20000
    file.check()


def test_several_tensors_of_one_storage_come_back_together(tmp_path: Path) -> None:
    """Outputs that share memory share it after a page-in."""
    first = storage(0, 4)
    both = (*first.layouts, TensorLayout(
        position=1, dtype=torch.float32, shape=(5,), stride=(1,), offset=15
    ))  # fmt: skip
    shared = TensorStorage(index=0, name="t", unit=0, bytes=80, layouts=both)
    _, (whole, row) = blank(PageFile(tmp_path, [shared]).storages[0])
    whole.fill_(1.0)
    assert row.tolist() == [1.0] * 5


def test_a_changed_page_is_noticed(file: PageFile) -> None:
    """One flipped bit anywhere, or two blocks in each other's place."""
    page_out(file, 8)
    good = file.path.read_bytes()
    held, _ = blank(file.storages[8])
    begin = file.offsets[8]
    for place in (0, 4095, 4096, 16383, 16384, 19999):
        bad = bytearray(good)
        bad[begin + place] ^= 0x80
        file.path.write_bytes(bad)
        with pytest.raises(PageError, match="'t8' is not what was written"):
            file.read(8, bytes_of(held))
    blocks = good[begin + 4096 : begin + 8192] + good[begin : begin + 4096]
    file.path.write_bytes(good[:begin] + blocks + good[begin + 8192 :])
    with pytest.raises(PageError, match="not what was written"):
        file.read(8, bytes_of(held))
    file.path.write_bytes(good)
    file.read(8, bytes_of(held))


def test_words_in_each_others_place_change_the_sum_of_a_tail() -> None:
    """The last bytes of a page that fill no block are summed in their order."""
    one, other = bytes(range(24)), bytes([*range(8, 16), *range(8), *range(16, 24)])
    assert checksum(memoryview(one)) != checksum(memoryview(other))


def test_a_short_file_is_noticed(file: PageFile) -> None:
    """A file that was cut is told before a step, and by a read in the middle of one."""
    page_out(file, 8)
    os.truncate(file.path, file.offsets[8] + 100)
    with pytest.raises(PageError, match="has 4,196 of 24,096 B"):
        file.check()
    held, _ = blank(file.storages[8])
    with pytest.raises(PageError, match="only 100 of 20,000 B"):
        file.read(8, bytes_of(held))


def test_a_removed_file_is_noticed(file: PageFile) -> None:
    """A file that is gone is told before a step."""
    file.path.unlink()
    with pytest.raises(PageError, match="is gone"):
        file.check()
    file.close()


def test_failing_calls_are_explained(file: PageFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the operating system name the file, the tensor, and what happened."""

    def fail(*_: Any) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    held, _ = blank(file.storages[3])
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(PageError, match=r"'t3' could not be written: Input/output error"):
        file.write(3, bytes_of(held))
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(PageError, match=r"'t3' could not be read: Input/output error"):
        file.read(3, bytes_of(held))


def test_a_full_disk_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is taken when the file is made; without it there is an error and no file."""

    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"no room for a page file of .*No space left"):
        PageFile(tmp_path, [storage(0, 10)])
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_goes(tmp_path: Path) -> None:
    """Page files that are not in use, and not just being made, are removed by the next one."""
    used = PageFile(tmp_path, [storage(0, 10)])
    left, young = (tmp_path / f".poetmodel-pages-{name}" for name in ("left", "young"))
    for path in (left, young):
        path.write_bytes(b"pages")
    for path in (left, used.path):
        os.utime(path, (0, 0))
    other = PageFile(tmp_path, [storage(0, 10)])
    assert set(tmp_path.iterdir()) == {used.path, young, other.path}
    used.check()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """A file in place of the folder."""
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="no page file can be made here"):
        PageFile(tmp_path / "file", [storage(0, 10)])


def test_files_go_with_their_object(tmp_path: Path) -> None:
    """No file and no descriptor is left when the object is gone or closed."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    file = PageFile(tmp_path, [storage(0, 10)])
    assert len(list(tmp_path.iterdir())) == 1
    file.close()
    file.close()
    another = PageFile(tmp_path, [storage(0, 10)])
    assert another.path.exists()
    del another
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before
