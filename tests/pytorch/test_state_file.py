"""State files: a whole state at every moment, and tensors that are where the file is."""

from __future__ import annotations

import errno
import os
import resource
import signal
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

torch = pytest.importorskip("torch")

from poetmodel.errors import InputError  # noqa: E402
from poetmodel.torch import PageError  # noqa: E402
from poetmodel.torch.state import pages as page_module  # noqa: E402
from poetmodel.torch.state.file import (  # noqa: E402
    LARGE_BYTES,
    PREFIX,
    UNFINISHED,
    StateFile,
    StateTensor,
)
from poetmodel.torch.state.pages import PAGE_BYTES, Memory, blank, bytes_of  # noqa: E402  # noqa: E402
from poetmodel.torch.step.units import TensorLayout, TensorStorage  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.torch

SIZES = {2: 10, 5: PAGE_BYTES, 9: LARGE_BYTES // 4 + 3}
"""Elements of each tensor: less than a page, several, and one that leaves RAM at once."""


def tensors() -> list[StateTensor]:
    """Return some tensors of a state file."""
    found = []
    for index, count in SIZES.items():
        layout = TensorLayout(
            position=None, dtype=torch.float32, shape=(count,), stride=(1,), offset=0
        )
        storage = TensorStorage(
            index=index, name=f"t{index}", unit=index, bytes=4 * count, layouts=(layout,)
        )
        found.append(StateTensor(storage=storage, kind="parameter", owner=f"t{index}"))
    return found


def put(file: StateFile, index: int, value: float) -> None:
    """Write a tensor that is the same number everywhere."""
    held, tensor = blank(file.storages[index])
    tensor.fill_(value)
    file.write(index, bytes_of(held))


def got(file: StateFile, index: int) -> Any:
    """Read a tensor."""
    held, tensor = blank(file.storages[index])
    file.read(index, bytes_of(held))
    return tensor


def mapped(file: StateFile, index: int) -> Any:
    """Return a tensor that lies in the file."""
    memory = Memory(file.storages[index].bytes)
    file.map(index, memory)
    return torch.empty(0).set_(memory.storage, 0, (SIZES[index],), (1,))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[StateFile]:
    """Return a file whose first generation has 1 everywhere."""
    found = StateFile(tmp_path / "scratch", tensors(), name="net")
    for index in SIZES:
        put(found, index, 1.0)
    found.commit()
    yield found
    found.close()


def values(file: StateFile) -> dict[int, float]:
    """Return the number that each tensor has everywhere."""
    found = {}
    for index in SIZES:
        (value,) = got(file, index).unique()
        found[index] = value.item()
    return found


def test_what_is_committed_is_there_and_nothing_else(file: StateFile) -> None:
    """Until the commit the old values are read; after a rollback they stay; unwritten ones stay."""
    put(file, 5, 2.0)
    put(file, 9, 2.0)
    assert values(file) == {2: 1.0, 5: 1.0, 9: 1.0}
    file.commit(steps=1)
    assert values(file) == {2: 1.0, 5: 2.0, 9: 2.0}
    put(file, 2, 3.0)
    put(file, 9, 3.0)
    file.rollback()
    file.commit(steps=1)
    assert values(file) == {2: 1.0, 5: 2.0, 9: 2.0}
    assert file.record.steps == 2


def test_one_generation_is_written_over(tmp_path: Path) -> None:
    """Without a second one what was written stays, also of a step that failed."""
    file = StateFile(tmp_path, tensors(), generations=1)
    for index in SIZES:
        put(file, index, 1.0)
    file.commit()
    put(file, 9, 2.0)
    file.rollback()
    assert values(file) == {2: 1.0, 5: 1.0, 9: 2.0}
    file.close()


def test_an_absent_tensor_is_zero(tmp_path: Path) -> None:
    """Moments are zeros before the first step, and when they were taken away."""
    file = StateFile(tmp_path, tensors())
    put(file, 2, 1.0)
    file.commit()
    assert values(file) == {2: 1.0, 5: 0.0, 9: 0.0}
    file.commit(absent=[2])
    assert values(file) == {2: 0.0, 5: 0.0, 9: 0.0}
    file.close()


def test_a_mapped_tensor_is_the_current_generation_at_one_address(file: StateFile) -> None:
    """Tensors and their views follow commits, and nothing of an uncommitted step is seen."""
    tensor = mapped(file, 9)
    view, address = tensor[7:], tensor.data_ptr()
    assert tensor.unique().tolist() == [1.0]
    put(file, 9, 2.0)
    assert view.unique().tolist() == [1.0]
    file.commit()
    assert view.unique().tolist() == [2.0]
    file.close()
    assert view.unique().tolist() == [2.0]
    assert tensor.data_ptr() == address
    tensor.fill_(5.0)
    assert view.unique().tolist() == [5.0]


@pytest.mark.parametrize("told", [True, False])
def test_changes_through_a_mapping_become_a_generation(
    file: StateFile, monkeypatch: pytest.MonkeyPatch, *, told: bool
) -> None:
    """They are read at once, are in the file from the commit on, and look like no corruption.

    So it is where the system does not tell which pages were written.
    """
    if not told:
        monkeypatch.setattr(page_module.Pagemap, "entries", lambda *_: None)
    tensor = mapped(file, 5)
    other = mapped(file, 9)
    assert other.sum() == other.numel()
    tensor[3] = 7.0
    assert got(file, 5)[:5].tolist() == [1.0, 1.0, 1.0, 7.0, 1.0]
    before = file.written_bytes
    file.take_over()
    assert file.is_changed
    assert file.written_bytes - before == 4 * SIZES[5]
    file.commit()
    assert tensor[:5].tolist() == got(file, 5)[:5].tolist() == [1.0, 1.0, 1.0, 7.0, 1.0]
    file.take_over()
    assert not file.is_changed
    tensor.zero_()
    file.close()
    assert not tensor.any()


def test_changes_through_a_mapping_outlive_a_step_that_fails(file: StateFile) -> None:
    """What was written in the step goes, what was changed before it stays."""
    tensor = mapped(file, 9)
    tensor.fill_(4.0)
    file.take_over()
    file.commit()
    put(file, 9, 5.0)
    file.rollback()
    assert tensor.unique().tolist() == got(file, 9).unique().tolist() == [4.0]


def test_a_damaged_page_is_noticed(file: StateFile) -> None:
    """A changed bit, and a file that was cut, in the middle of a step and before one."""
    offset = file.format.slot_offset(2, file.record.slots[2])
    with file.path.open("r+b") as opened:
        opened.seek(offset + 4000)
        opened.write(b"\x01")
    with pytest.raises(PageError, match="'t9' is not what"):
        got(file, 9)
    os.truncate(file.path, offset + 100)
    with pytest.raises(PageError, match=r"'t9': only 100 of .* the file was cut"):
        got(file, 9)
    with pytest.raises(PageError, match="state is lost"):
        file.check()


def test_a_removed_file_is_told_and_its_state_comes_back(file: StateFile) -> None:
    """The process still has it."""
    tensor = mapped(file, 9)
    file.path.unlink()
    with pytest.raises(PageError, match=r"was removed or moved; close\(\) brings"):
        file.check()
    file.close()
    assert tensor.unique().tolist() == [1.0]


def test_failing_calls_are_explained(file: StateFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the system name the file, the tensor and what happened; the state stays."""

    def fail(*_: Any) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    put(file, 9, 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(PageError, match="record could not be written: Input/output error"):
            file.commit()
        patch.setattr(os, "pwritev", fail)
        with pytest.raises(PageError, match=r"'t2' .*written: Input"):
            put(file, 2, 2.0)
        patch.setattr(os, "preadv", fail)
        with pytest.raises(PageError, match=r"'t2' .*read: Input"):
            got(file, 2)
    file.rollback()
    assert values(file) == {2: 1.0, 5: 1.0, 9: 1.0}


def test_a_full_disk_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is taken when the file is made; without it there is an error and no file."""

    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"no room for a state file of .*No space left"):
        StateFile(tmp_path, tensors())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_may_not_grow_is_told_by_the_system(tmp_path: Path) -> None:
    """A limit of the process on the size of files, which nothing here knows of."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE_BYTES, LARGE_BYTES))
            with pytest.raises(InputError, match="no room"):
                StateFile(tmp_path, tensors())
            code = len(list(tmp_path.iterdir()))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_has_no_whole_state_is_removed(tmp_path: Path) -> None:
    """A process that was killed before the first commit leaves a file that is of no use."""
    used = StateFile(tmp_path, tensors())
    left = tmp_path / f"{PREFIX}left{UNFINISHED}"
    whole = tmp_path / f"{PREFIX}whole"
    for path in (left, whole):
        path.write_bytes(b"state")
    for path in (left, whole, used.path):
        os.utime(path, (0, 0))
    other = StateFile(tmp_path, tensors())
    assert set(tmp_path.iterdir()) == {used.path, whole, other.path}


def test_the_file_goes_with_its_object(tmp_path: Path) -> None:
    """Tensors that were mapped keep their values."""
    file = StateFile(tmp_path, tensors())
    for index in SIZES:
        put(file, index, 3.0)
    file.commit()
    tensor = mapped(file, 9)
    assert len(list(tmp_path.iterdir())) == 1
    del file
    assert list(tmp_path.iterdir()) == []
    assert tensor.unique().tolist() == [3.0]
