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
from poetmodel.torch.state import memory as memory_module
from poetmodel.torch.state.file import LARGE_BYTES, PREFIX, UNFINISHED, StateFile
from poetmodel.torch.state.format import StateTensor
from poetmodel.torch.state.memory import PAGE_BYTES, Memory
from poetmodel.torch.state.pages import (
    ALIGNMENT_BYTES,
    Pages,
    ScratchFile,
    bytes_of,
    checksum,
)
from poetmodel.torch.step.state_keys import StateKey

SMALL, PAGES, LARGE = (StateKey("parameter", name) for name in ("small", "pages", "large"))
SIZES = {SMALL: 10, PAGES: PAGE_BYTES, LARGE: LARGE_BYTES // 4 + 3}
"""Elements of each tensor: less than a page, several, and one that leaves RAM at once."""


def layout_of(shape, stride):
    """Return the layout of a tensor at the beginning of its memory."""
    return TensorLayout(position=None, dtype=torch.float32, shape=shape, stride=stride, offset=0)


def stored(index, shape, stride):
    """Return the storage of one tensor."""
    return TensorStorage(
        index=index,
        name=f"t{index}",
        operation=index,
        bytes=4 * math.prod(shape),
        layouts=(layout_of(shape, stride),),
    )


def matrix(index, rows):
    """Return a matrix of so many rows of 5 floats, transposed in its memory."""
    return stored(index, (5, rows), (1, 5))


def tensors():
    """Return some tensors of a state file."""
    return {
        key: StateTensor(bytes=4 * count, layout=layout_of((count,), (1,)))
        for key, count in SIZES.items()
    }


def put(file, key, value):
    """Write a tensor that is the same number everywhere."""
    tensor = file.format.tensors[key].allocate().fill_(value)
    file.write(key, bytes_of(tensor.untyped_storage()))


def got(file, key):
    """Read a tensor."""
    tensor = file.format.tensors[key].allocate()
    file.read(key, bytes_of(tensor.untyped_storage()))
    return tensor


def mapped(file, key):
    """Return a tensor that lies in the file."""
    memory = Memory(file.format.tensors[key].bytes)
    file.map(key, memory)
    return torch.empty(0).set_(memory.storage, 0, (SIZES[key],), (1,))


def written(folder, **options):
    """Return a file whose first generation has 1 everywhere."""
    found = StateFile(folder, tensors(), **options)
    for key in SIZES:
        put(found, key, 1.0)
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
    for key in SIZES:
        (value,) = got(file, key).unique()
        found[key] = value.item()
    return found


class Table:
    """A file, and the expected values of its tensors; each method draws its data."""

    def __init__(self, folder, draw):
        self.file, self.draw, self.steps = StateFile(folder, tensors()), draw, 0
        self.mapped, self.addresses = {}, {}
        for key in (PAGES, LARGE):
            put(self.file, key, 1.0)
        self.file.commit()
        self.values = {key: torch.full((n,), float(key != SMALL)) for key, n in SIZES.items()}

    def agrees(self):
        """Return whether the file and its mapped tensors have the values of the table."""
        return all(
            torch.equal(tensor, value)
            for key, value in self.values.items()
            for tensor in (got(self.file, key), self.mapped.get(key, value))
        )

    def absent(self, _):
        """Remove a tensor."""
        key = self.draw.choice([i for i in SIZES if i not in self.mapped] or [None])
        if key is not None:
            self.file.commit(absent=[key])
            self.values[key] = torch.zeros(SIZES[key])

    def map(self, _):
        """Let a tensor lie in the file."""
        for key in [i for i in SIZES if self.file.contains(i) and i not in self.mapped][:1]:
            self.mapped[key] = tensor = mapped(self.file, key)
            self.addresses[key] = tensor.data_ptr()

    def change(self, number):
        """Change elements through a mapping: they are read at once, and committed."""
        for key in self.draw.sample(sorted(self.mapped), min(1, len(self.mapped))):
            begin, before = self.draw.randrange(SIZES[key]), self.file.written_bytes
            for tensor in (self.mapped[key], self.values[key]):
                tensor[begin : begin + 700] = number
            assert self.agrees()
            self.file.write_mapped_changes()
            assert self.file.is_changed
            assert self.file.written_bytes - before == 4 * SIZES[key]
            self.file.commit()
            self.file.write_mapped_changes()
            assert not self.file.is_changed

    def failed(self, number):
        """Write some tensors, and leave it at that; return which."""
        written = self.draw.sample(sorted(SIZES), self.draw.randint(1, 3))
        for key in written:
            put(self.file, key, float(number))
        assert self.agrees()
        self.file.rollback()
        return written

    def step(self, number):
        """Write some tensors, and commit."""
        for key in self.failed(number):
            put(self.file, key, float(number))
            self.values[key] = torch.full((SIZES[key],), float(number))
        self.file.commit(steps=1)
        self.steps += 1


@pytest.mark.parametrize("seed", mark_seeds_except(range(36), range(4)))
def test_any_order_of_writes_and_commits_is_that_of_a_table(seed, tmp_path, monkeypatch):
    """Until a commit, old values are read, after a rollback they stay; missing ones are zero.

    Mapped tensors have one address; changes through them are read at once, and survive a failed
    step. This holds also if the system does not report written pages.
    """
    if seed % 2:
        monkeypatch.setattr(memory_module.Pagemap, "read_entries", lambda *_: None)
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
    for key, tensor in table.mapped.items():
        view = tensor[7:]
        assert tensor.data_ptr() == table.addresses[key]
        assert torch.equal(tensor, table.values[key])
        tensor.fill_(5.0)
        assert view.unique().tolist() == [5.0]


def test_one_generation_is_written_over(tmp_path):
    """Without a second generation, written data stays, also of a failed step."""
    file = written(tmp_path, generations=1)
    put(file, LARGE, 2.0)
    file.rollback()
    assert values(file) == {SMALL: 1.0, PAGES: 1.0, LARGE: 2.0}
    file.close()


def test_a_damaged_page_is_noticed(file):
    """A changed bit, and a file that was cut, in the middle of a step and before one."""
    offset = file.format.slot_offset(LARGE, file.record.entries[LARGE].slot)
    with file.path.open("r+b") as opened:
        opened.seek(offset + 4000)
        opened.write(b"\x01")
    with pytest.raises(PageError, match="'large' does not match"):
        got(file, LARGE)
    os.truncate(file.path, offset + 100)
    with pytest.raises(PageError, match=r"'large': only 100 of .* the file was truncated"):
        got(file, LARGE)
    with pytest.raises(PageError, match="state is lost"):
        file.check()


def test_a_removed_file_is_told_and_its_state_comes_back(file):
    """The process still has it."""
    tensor = mapped(file, LARGE)
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


def test_failing_calls_are_explained(file, scratch_file, monkeypatch):
    """Errors of the system name the tensor and the failure."""
    tensor = file.format.tensors[SMALL].allocate()
    held = tensor.untyped_storage()
    pages = Pages(PAGED, scratch_file)
    pages.page_out(3, tensor)
    with monkeypatch.context() as patch:
        for call in ("pwrite", "pwritev", "preadv"):
            patch.setattr(os, call, make_system_fault(errno.EIO))
        for name, write in (
            ("small", lambda: file.write(SMALL, bytes_of(held))),
            ("t8", lambda: pages.page_out(8, tensor)),
        ):
            with pytest.raises(PageError, match=rf"'{name}' .*written: Input/output error"):
                write()
        for name, read in (
            ("small", lambda: file.read(SMALL, bytes_of(held))),
            ("t3", lambda: pages.page_in(3)),
        ):
            with pytest.raises(PageError, match=rf"'{name}' .*read: Input/output error"):
                read()


def test_a_commit_that_fails_leaves_the_state(file, monkeypatch):
    """A failed record is reported; after a rollback, the state is the one before."""
    put(file, LARGE, 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", make_system_fault(errno.EIO))
        with pytest.raises(PageError, match="record could not be written: Input/output error"):
            file.commit()
        patch.setattr(os, "pwritev", make_system_fault(errno.EIO))
        with pytest.raises(PageError):
            put(file, SMALL, 2.0)
    file.rollback()
    assert values(file) == {SMALL: 1.0, PAGES: 1.0, LARGE: 1.0}


def test_a_first_state_that_cannot_be_renamed_leaves_no_file(tmp_path, monkeypatch):
    """The file with its unfinished name is removed when it is closed."""
    state_file = StateFile(tmp_path, tensors(), name="step")
    for key in SIZES:
        put(state_file, key, 1.0)
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
        (lambda f: ScratchFile(f, [200]), "page"),
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
    "make", [lambda f: ScratchFile(f, [200]), lambda f: StateFile(f, tensors())]
)
def test_a_folder_that_cannot_be_made_is_told(make):
    """The folder is named, not a kind of file."""
    message = r"^/proc/nofolder: no file can be created here \(No such file or directory\)$"
    with pytest.raises(InputError, match=message):
        make("/proc/nofolder")


PAGED = {3: matrix(3, 7), 8: matrix(8, 1000)}
"""A small and a large page."""


@pytest.fixture
def scratch_file(tmp_path):
    """Return a file with slots for both pages."""
    return ScratchFile(tmp_path / "scratch", [page.bytes for page in PAGED.values()])


def page_out(pages, index):
    """Write a page of random numbers; return it."""
    (layout,) = PAGED[index].layouts
    tensor = layout.tensor_in(torch.UntypedStorage(PAGED[index].bytes)).normal_()
    pages.page_out(index, tensor)
    return tensor


def test_pages_come_back(scratch_file, tmp_path):
    """Values, shape and strides survive; bytes are counted, and the file is as large as it was.

    A page that is written again, and the pages of the next step, use the same slots. Outputs that
    share memory share it after a page-in.
    """
    size = scratch_file.path.stat().st_size
    for _ in range(2):
        pages = Pages(PAGED, scratch_file)
        written = {index: page_out(pages, index) for index in (8, 3, 8)}
        for index, tensor in written.items():
            again = pages.page_in(index)
            assert torch.equal(tensor, again)
            assert tensor.stride() == again.stride() == (1, 5)
        pages.close()
    assert scratch_file.written_bytes == 2 * 20 * 2007
    assert scratch_file.read_bytes == 2 * 20 * 1007
    assert scratch_file.path.stat().st_size == size == scratch_file.bytes == 6 * ALIGNMENT_BYTES
    scratch_file.check()
    first = matrix(0, 4)
    both = (*first.layouts, TensorLayout(
        position=1, dtype=torch.float32, shape=(5,), stride=(1,), offset=15
    ))  # fmt: skip
    shared = TensorStorage(index=0, name="t", operation=0, bytes=80, layouts=both)
    pages = Pages([shared], ScratchFile(tmp_path))
    pages.page_out(0, torch.ones(20))
    whole, row = pages.page_in(0)
    whole.mul_(2)
    assert row.tolist() == [2.0] * 5


def test_a_changed_page_is_noticed(scratch_file):
    """One flipped bit anywhere, or two blocks, or words of a tail, in each other's place."""
    one, other = bytes(range(24)), bytes([*range(8, 16), *range(8), *range(16, 24)])
    assert checksum(memoryview(one)) != checksum(memoryview(other))
    pages = Pages(PAGED, scratch_file)
    tensor = page_out(pages, 8)
    path, good = scratch_file.path, scratch_file.path.read_bytes()
    begin = good.index(bytes(bytes_of(tensor.untyped_storage())))
    for place in (0, 4095, 4096, 16383, 16384, 19999):
        bad = bytearray(good)
        bad[begin + place] ^= 0x80
        path.write_bytes(bad)
        with pytest.raises(PageError, match="'t8' does not match its checksum"):
            pages.page_in(8)
    blocks = good[begin + 4096 : begin + 8192] + good[begin : begin + 4096]
    path.write_bytes(good[:begin] + blocks + good[begin + 8192 :])
    with pytest.raises(PageError, match="does not match its checksum"):
        pages.page_in(8)
    path.write_bytes(good)
    assert torch.equal(pages.page_in(8), tensor)


@pytest.mark.parametrize("kind", ["page", "state"])
def test_what_killed_processes_left_goes(kind, tmp_path):
    """Files that are not in use, and not just being made, are removed by the next one.

    A state file stays, unless it was killed before its first commit.
    """

    def make():
        is_page = kind == "page"
        return ScratchFile(tmp_path, [200]) if is_page else StateFile(tmp_path, tensors())

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


def test_a_forked_process_on_a_full_disk_writes_to_no_closed_file(
    scratch_file, monkeypatch, tmp_path
):
    """Each check fails until there is space; then there is a new file, and no other is changed."""

    def step_twice():
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", make_system_fault(errno.ENOSPC))
            for _ in range(2):
                with pytest.raises(PageError, match="not enough space for a page file"):
                    scratch_file.check()
        with (tmp_path / "other").open("wb+") as other:  # has the number of the closed descriptor
            scratch_file.check()
            page_out(Pages(PAGED, scratch_file), 3)
            scratch_file.close()
            return other.read() != b""

    page_out(Pages(PAGED, scratch_file), 3)
    assert run_in_fork(step_twice) == 0
    assert list(tmp_path.glob("scratch/*")) == [scratch_file.path]
    scratch_file.check()


def test_page_files_go_with_their_object(tmp_path):
    """No file and no descriptor is left after the object is deleted or closed."""
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    file = ScratchFile(tmp_path, [200])
    assert len(list(tmp_path.iterdir())) == 1
    file.close()
    file.close()
    another = ScratchFile(tmp_path, [200])
    assert another.path.exists()
    del another
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before
