"""Page and state files: written data is read back, faults are reported."""

import errno
import gc
import math
import os
import resource
import signal
from pathlib import Path
from random import Random

import pytest
import torch

from kit.patience import make_system_fault, run_in_fork
from kit.rotation import mark_seeds_except
from poetmodel.errors import InputError
from poetmodel.torch import PageError
from poetmodel.torch.graph.profiles import TensorLayout
from poetmodel.torch.graph.step_graph import TensorStorage
from poetmodel.torch.state import pages as page_module
from poetmodel.torch.state.file import LARGE_BYTES, PREFIX, UNFINISHED, StateFile, StateTensor
from poetmodel.torch.state.pages import (
    ALIGNMENT_BYTES,
    PAGE_BYTES,
    Memory,
    PageFile,
    allocate_page,
    bytes_of,
    checksum,
)

SIZES = {2: 10, 5: PAGE_BYTES, 9: LARGE_BYTES // 4 + 3}
"""Elements of each tensor: less than a page, several, and one that leaves RAM at once."""


def stored(index, shape, stride):
    """Return the storage of one tensor."""
    layout = TensorLayout(position=None, dtype=torch.float32, shape=shape, stride=stride, offset=0)
    return TensorStorage(
        index=index,
        name=f"t{index}",
        operation=index,
        bytes=4 * math.prod(shape),
        layouts=(layout,),
    )


def matrix(index, rows):
    """Return a matrix of so many rows of 5 floats, transposed in its memory."""
    return stored(index, (5, rows), (1, 5))


def tensors():
    """Return some tensors of a state file."""
    return [
        StateTensor(storage=stored(index, (count,), (1,)), kind="parameter", owner=f"t{index}")
        for index, count in SIZES.items()
    ]


def put(file, index, value):
    """Write a tensor that is the same number everywhere."""
    held, tensor = allocate_page(file.storages[index])
    tensor.fill_(value)
    file.write(index, bytes_of(held))


def got(file, index):
    """Read a tensor."""
    held, tensor = allocate_page(file.storages[index])
    file.read(index, bytes_of(held))
    return tensor


def mapped(file, index):
    """Return a tensor that lies in the file."""
    memory = Memory(file.storages[index].bytes)
    file.map(index, memory)
    return torch.empty(0).set_(memory.storage, 0, (SIZES[index],), (1,))


def written(folder, **options):
    """Return a file whose first generation has 1 everywhere."""
    found = StateFile(folder, tensors(), **options)
    for index in SIZES:
        put(found, index, 1.0)
    found.commit()
    return found


@pytest.fixture
def file(tmp_path):
    """Return the same, closed in the end."""
    found = written(tmp_path / "scratch", name="net")
    yield found
    found.close()


def values(file):
    """Return the number that each tensor has everywhere."""
    found = {}
    for index in SIZES:
        (value,) = got(file, index).unique()
        found[index] = value.item()
    return found


class Table:
    """A file, and the expected values of its tensors; each method draws its data."""

    def __init__(self, folder, draw):
        self.file, self.draw, self.steps = StateFile(folder, tensors()), draw, 0
        self.mapped, self.addresses = {}, {}
        for index in (5, 9):
            put(self.file, index, 1.0)
        self.file.commit()
        self.values = {index: torch.full((n,), float(index != 2)) for index, n in SIZES.items()}

    def agrees(self):
        """Return whether the file and its mapped tensors have the values of the table."""
        return all(
            torch.equal(tensor, value)
            for index, value in self.values.items()
            for tensor in (got(self.file, index), self.mapped.get(index, value))
        )

    def absent(self, _):
        """Remove a tensor."""
        index = self.draw.choice([i for i in SIZES if i not in self.mapped] or [None])
        if index is not None:
            self.file.commit(absent_indices=[index])
            self.values[index] = torch.zeros(SIZES[index])

    def map(self, _):
        """Let a tensor lie in the file."""
        for index in [i for i in SIZES if self.file.contains(i) and i not in self.mapped][:1]:
            self.mapped[index] = tensor = mapped(self.file, index)
            self.addresses[index] = tensor.data_ptr()

    def change(self, number):
        """Change elements through a mapping: they are read at once, and committed."""
        for index in self.draw.sample(sorted(self.mapped), min(1, len(self.mapped))):
            begin, before = self.draw.randrange(SIZES[index]), self.file.written_bytes
            for tensor in (self.mapped[index], self.values[index]):
                tensor[begin : begin + 700] = number
            assert self.agrees()
            self.file.write_mapped_changes()
            assert self.file.is_changed
            assert self.file.written_bytes - before == 4 * SIZES[index]
            self.file.commit()
            self.file.write_mapped_changes()
            assert not self.file.is_changed

    def failed(self, number):
        """Write some tensors, and leave it at that; return which."""
        written = self.draw.sample(sorted(SIZES), self.draw.randint(1, 3))
        for index in written:
            put(self.file, index, float(number))
        assert self.agrees()
        self.file.rollback()
        return written

    def step(self, number):
        """Write some tensors, and commit."""
        for index in self.failed(number):
            put(self.file, index, float(number))
            self.values[index] = torch.full((SIZES[index],), float(number))
        self.file.commit(steps=1)
        self.steps += 1


@pytest.mark.parametrize("seed", mark_seeds_except(range(36), range(4)))
def test_any_order_of_writes_and_commits_is_that_of_a_table(seed, tmp_path, monkeypatch):
    """Until a commit, old values are read, after a rollback they stay; missing ones are zero.

    Mapped tensors have one address; changes through them are read at once, and survive a failed
    step. This holds also if the system does not report written pages.
    """
    if seed % 2:
        monkeypatch.setattr(page_module.Pagemap, "read_entries", lambda *_: None)
    table = Table(tmp_path, Random(seed))  # noqa: S311 - no secret
    for number in range(2, 14):
        kind = table.draw.choice(("step", "step", "failed", "absent", "map", "change"))
        getattr(table, kind)(number)
        assert table.agrees(), kind
    assert table.file.record.steps == table.steps
    if seed % 3:
        table.file.close()
    del table.file
    assert list(tmp_path.iterdir()) == []
    for index, tensor in table.mapped.items():
        view = tensor[7:]
        assert tensor.data_ptr() == table.addresses[index]
        assert torch.equal(tensor, table.values[index])
        tensor.fill_(5.0)
        assert view.unique().tolist() == [5.0]


def test_one_generation_is_written_over(tmp_path):
    """Without a second generation, written data stays, also of a failed step."""
    file = written(tmp_path, generations=1)
    put(file, 9, 2.0)
    file.rollback()
    assert values(file) == {2: 1.0, 5: 1.0, 9: 2.0}
    file.close()


def test_a_damaged_page_is_noticed(file):
    """A changed bit, and a file that was cut, in the middle of a step and before one."""
    offset = file.format.slot_offset(2, file.record.slots[2])
    with file.path.open("r+b") as opened:
        opened.seek(offset + 4000)
        opened.write(b"\x01")
    with pytest.raises(PageError, match="'t9' does not match"):
        got(file, 9)
    os.truncate(file.path, offset + 100)
    with pytest.raises(PageError, match=r"'t9': only 100 of .* the file was truncated"):
        got(file, 9)
    with pytest.raises(PageError, match="state is lost"):
        file.check()


def test_a_removed_file_is_told_and_its_state_comes_back(file):
    """The process still has it."""
    tensor = mapped(file, 9)
    file.path.unlink()
    with pytest.raises(PageError, match=r"was removed or moved; close\(\) moves"):
        file.check()
    file.close()
    assert tensor.unique().tolist() == [1.0]


def test_a_file_that_may_not_grow_is_told_by_the_system(tmp_path):
    """A limit of the process on the size of files, which the code does not check."""

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE_BYTES, LARGE_BYTES))
        with pytest.raises(InputError, match="not enough space"):
            StateFile(tmp_path, tensors())
        return len(list(tmp_path.iterdir()))

    assert run_in_fork(limited) == 0


@pytest.mark.parametrize(("kind", "index"), [("page_file", 3), ("file", 2)])
def test_failing_calls_are_explained(kind, index, request, monkeypatch):
    """Errors of the system name the tensor and the failure."""
    file = request.getfixturevalue(kind)
    held, _ = allocate_page(file.storages[index])
    with monkeypatch.context() as patch:
        for call in ("pwrite", "pwritev", "preadv"):
            patch.setattr(os, call, make_system_fault(errno.EIO))
        with pytest.raises(PageError, match=rf"'t{index}' .*written: Input/output error"):
            file.write(index, bytes_of(held))
        with pytest.raises(PageError, match=rf"'t{index}' .*read: Input/output error"):
            file.read(index, bytes_of(held))


def test_a_commit_that_fails_leaves_the_state(file, monkeypatch):
    """A failed record is reported; after a rollback, the state is the one before."""
    put(file, 9, 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", make_system_fault(errno.EIO))
        with pytest.raises(PageError, match="record could not be written: Input/output error"):
            file.commit()
        patch.setattr(os, "pwritev", make_system_fault(errno.EIO))
        with pytest.raises(PageError):
            put(file, 2, 2.0)
    file.rollback()
    assert values(file) == {2: 1.0, 5: 1.0, 9: 1.0}


def test_a_first_state_that_cannot_be_renamed_leaves_no_file(tmp_path, monkeypatch):
    """The file with its unfinished name is removed when it is closed."""
    state_file = StateFile(tmp_path, tensors(), name="step")
    for index in SIZES:
        put(state_file, index, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", make_system_fault(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            state_file.commit()
    assert list(tmp_path.iterdir()) == [state_file.path]
    state_file.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda f: PageFile(f, [matrix(0, 10)]), "page"),
        (lambda f: StateFile(f, tensors()), "state"),
    ],
)
def test_a_full_disk_is_told_at_once(make, kind, tmp_path, monkeypatch):
    """The file is allocated when it is made; if that fails, there is an error and no file."""
    monkeypatch.setattr(os, "posix_fallocate", make_system_fault(errno.ENOSPC))
    with pytest.raises(InputError, match=rf"not enough space for a {kind} file of .*No space left"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make", [lambda f: PageFile(f, [matrix(0, 10)]), lambda f: StateFile(f, tensors())]
)
def test_a_folder_that_cannot_be_made_is_told(make):
    """The folder is named, not a kind of file."""
    message = r"^/proc/nofolder: no file can be created here \(No such file or directory\)$"
    with pytest.raises(InputError, match=message):
        make("/proc/nofolder")


@pytest.fixture
def page_file(tmp_path):
    """Return a file for a small and a large page."""
    return PageFile(tmp_path / "scratch", [matrix(3, 7), matrix(8, 1000)])


def page_out(file, index):
    """Write a page of random numbers; return it."""
    held, tensor = allocate_page(file.storages[index])
    tensor.normal_()
    file.write(index, bytes_of(held))
    return tensor


def test_pages_come_back(page_file, tmp_path):
    """Values, shape and strides survive; bytes are counted, and the file is as large as it was.

    Outputs that share memory share it after a page-in.
    """
    size = page_file.path.stat().st_size
    written = {index: page_out(page_file, index) for index in (8, 3)}
    for index, tensor in written.items():
        held, again = allocate_page(page_file.storages[index])
        page_file.read(index, bytes_of(held))
        assert torch.equal(tensor, again)
        assert tensor.stride() == again.stride() == (1, 5)
    assert page_file.written_bytes == page_file.read_bytes == 20 * 1007
    assert page_file.path.stat().st_size == size == page_file.bytes == ALIGNMENT_BYTES + 20000
    page_file.check()
    first = matrix(0, 4)
    both = (*first.layouts, TensorLayout(
        position=1, dtype=torch.float32, shape=(5,), stride=(1,), offset=15
    ))  # fmt: skip
    shared = TensorStorage(index=0, name="t", operation=0, bytes=80, layouts=both)
    _, (whole, row) = allocate_page(PageFile(tmp_path, [shared]).storages[0])
    whole.fill_(1.0)
    assert row.tolist() == [1.0] * 5


def test_a_changed_page_is_noticed(page_file):
    """One flipped bit anywhere, or two blocks, or words of a tail, in each other's place."""
    one, other = bytes(range(24)), bytes([*range(8, 16), *range(8), *range(16, 24)])
    assert checksum(memoryview(one)) != checksum(memoryview(other))
    page_out(page_file, 8)
    good = page_file.path.read_bytes()
    held, _ = allocate_page(page_file.storages[8])
    begin = page_file.offsets[8]
    for place in (0, 4095, 4096, 16383, 16384, 19999):
        bad = bytearray(good)
        bad[begin + place] ^= 0x80
        page_file.path.write_bytes(bad)
        with pytest.raises(PageError, match="'t8' does not match its checksum"):
            page_file.read(8, bytes_of(held))
    blocks = good[begin + 4096 : begin + 8192] + good[begin : begin + 4096]
    page_file.path.write_bytes(good[:begin] + blocks + good[begin + 8192 :])
    with pytest.raises(PageError, match="does not match its checksum"):
        page_file.read(8, bytes_of(held))
    page_file.path.write_bytes(good)
    page_file.read(8, bytes_of(held))


@pytest.mark.parametrize("kind", ["page", "state"])
def test_what_killed_processes_left_goes(kind, tmp_path):
    """Files that are not in use, and not just being made, are removed by the next one.

    A state file stays, unless it was killed before its first commit.
    """

    def make():
        is_page = kind == "page"
        return PageFile(tmp_path, [matrix(0, 10)]) if is_page else StateFile(tmp_path, tensors())

    used = make()
    head = ".poetmodel-pages-" if kind == "page" else PREFIX
    left = tmp_path / f"{head}left{UNFINISHED if kind == 'state' else ''}"
    stays = tmp_path / f"{head}young"
    for path in (left, stays):
        path.write_bytes(b"pages")
    for path in (left, used.path, *([stays] if kind == "state" else [])):
        os.utime(path, (0, 0))
    other = make()
    assert set(tmp_path.iterdir()) == {used.path, stays, other.path}
    used.check()


def test_a_forked_process_on_a_full_disk_writes_to_no_closed_file(page_file, monkeypatch, tmp_path):
    """Each check fails until there is space; then there is a new file, and no other is changed."""

    def step_twice():
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", make_system_fault(errno.ENOSPC))
            for _ in range(2):
                with pytest.raises(PageError, match="not enough space for a page file"):
                    page_file.check()
        with (tmp_path / "other").open("wb+") as other:  # has the number of the closed descriptor
            page_file.check()
            page_out(page_file, 3)
            page_file.close()
            return other.read() != b""

    page_out(page_file, 3)
    assert run_in_fork(step_twice) == 0
    assert list(tmp_path.glob("scratch/*")) == [page_file.path]
    page_file.check()


def test_page_files_go_with_their_object(tmp_path):
    """No file and no descriptor is left after the object is deleted or closed."""
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    file = PageFile(tmp_path, [matrix(0, 10)])
    assert len(list(tmp_path.iterdir())) == 1
    file.close()
    file.close()
    another = PageFile(tmp_path, [matrix(0, 10)])
    assert another.path.exists()
    del another
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before
