"""Recovery: whatever stops a process or the power, one whole state is found."""

from __future__ import annotations

import logging
import os
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from poetmodel.errors import InputError  # noqa: E402
from poetmodel.torch.state.file import (  # noqa: E402
    LARGE_BYTES,
    PREFIX,
    StateFile,
    StateTensor,
)
from poetmodel.torch.state.pages import blank, bytes_of  # noqa: E402
from poetmodel.torch.state.recovery import replaced_by  # noqa: E402
from poetmodel.torch.step.training_units import layout_of  # noqa: E402
from poetmodel.torch.step.units import TensorStorage  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

SIZES = {"small": 10, "large": LARGE_BYTES // 4 + 3, "frozen": 1500}


class Network(torch.nn.Module):
    """Two parameters that training changes, one that it does not, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.full((size,), -1.0)))
        self.register_buffer("count", torch.tensor(-1.0))


class Written:
    """A state file of a network all of whose tensors are the number of the step."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.model = Network()
        named = {("parameter", n): p for n, p in self.model.named_parameters()}
        named |= {("buffer", n): b for n, b in self.model.named_buffers()}
        moments = {("moment", n): p for n, p in self.model.named_parameters() if n != "frozen"}
        tensors = []
        for index, ((kind, name), value) in enumerate((named | moments).items()):
            key = "exp_avg" if kind == "moment" else ""
            storage = TensorStorage(
                index=index,
                name=name + key,
                unit=0,
                bytes=value.nbytes,
                layouts=(layout_of(value),),
            )
            tensors.append(StateTensor(storage=storage, kind=kind, owner=f"model.{name}", key=key))
        self.file = StateFile(folder, tensors, name="net", **options)
        self.tensors = tensors
        self.put(0)
        self.file.commit()

    def put(self, step: int) -> None:
        """Write what a step writes; moments come with the first one."""
        for tensor in self.tensors:
            is_moment = tensor.kind == "moment"
            if (step == 0 and is_moment) or (step and tensor.owner == "model.frozen"):
                continue
            held, value = blank(tensor.storage)
            value.fill_(float(step))
            self.file.write(tensor.storage.index, bytes_of(held))

    def step(self, number: int) -> None:
        """Make a generation."""
        self.put(number)
        self.file.commit(steps=1)


def recovered(folder: Path) -> tuple[int, set[float], set[float]]:
    """Return the steps done, the values of what changes, and of what is frozen."""
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    steps = pmt.recover(folder, model, optimizer)
    moments = [kept["exp_avg"] for kept in optimizer.state.values()]
    assert len(moments) == (2 if steps else 0)
    changed = [model.small, model.large, model.count.view(1), *moments]
    values = {value for tensor in changed for value in tensor.unique().tolist()}
    with replaced_by(folder, model):
        pass
    return steps, values, set(model.frozen.unique().tolist())


def test_at_every_moment_of_a_power_cut_there_is_one_whole_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of writes that no sync came after, any sectors may be on the medium and any may not."""
    chance = random.Random(7)  # noqa: S311 - no secret
    calls: list[tuple[int, bytes] | None] = []
    write, sync = os.pwritev, os.fdatasync

    def pwritev(descriptor: int, parts: Any, offset: int) -> int:
        calls.append((offset, b"".join(parts)))
        return write(descriptor, parts, offset)

    def fdatasync(descriptor: int) -> None:
        calls.append(None)
        sync(descriptor)

    written = Written(tmp_path / "run")
    image = bytearray(written.file.path.read_bytes())
    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    commits = [0]
    for number in (1, 2, 3):
        written.step(number)
        commits.append(len(calls))
    monkeypatch.undo()
    path = tmp_path / "cut" / f"{PREFIX}x"
    path.parent.mkdir()
    pending: list[tuple[int, bytes]] = []
    seen = set()
    for place, call in enumerate([*calls, None]):
        for _ in range(3):
            path.write_bytes(torn(image, pending, chance))
            steps, values, frozen = recovered(path.parent)
            assert values == {float(steps)}
            assert frozen == {0.0}
            done = sum(commit <= place for commit in commits) - 1
            assert steps in (done, done + 1)
            seen.add((place in commits, steps - done))
        if call is not None:
            pending.append(call)
        else:
            for offset, data in pending:
                image[offset : offset + len(data)] = data
            pending = []
    assert {(False, 0), (False, 1), (True, 0)} <= seen
    form = written.file.format
    records = {form.record_offset(generation) for generation in (0, 1)}
    for before, call, after in zip(calls, calls[1:], calls[2:], strict=False):
        if call is not None and call[0] in records:
            assert before is after is None, "a record comes when its data is on the medium"
    written.file.close()


def torn(image: bytearray, pending: list[tuple[int, bytes]], chance: random.Random) -> bytes:
    """Return what a medium has that was to write more, some sectors of which it has."""
    found = bytearray(image)
    for offset, data in pending:
        for begin in range(0, len(data), 512):
            if chance.random() < 0.5:
                part = data[begin : begin + 512]
                found[offset + begin : offset + begin + len(part)] = part
    return bytes(found)


def left_by(folder: Path, steps: int) -> Path:
    """Return the file of a process that was killed in the middle of the step after some."""
    written = Written(folder)
    for number in range(1, steps + 1):
        written.step(number)
    written.put(steps + 1)
    written.file.leave()
    return written.file.path


def damage(path: Path, offset: int) -> None:
    """Change one bit."""
    with path.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 4]))


def test_a_damaged_record_leads_to_the_one_before(tmp_path: Path) -> None:
    """Where the older generation is whole; where it is not, that is said and nothing loaded."""
    written = Written(tmp_path)
    written.step(1)
    written.step(2)
    form, generation = written.file.format, written.file.record.generation
    written.file.leave()
    damage(written.file.path, form.record_offset(generation) + 50)
    assert recovered(tmp_path) == (1, {1.0}, {0.0})
    path = left_by(tmp_path, 2)
    damage(path, form.record_offset(generation) + 50)
    with pytest.raises(InputError, match=r"no whole state .*after 1 steps"):
        recovered(tmp_path)
    damage(path, form.record_offset(generation - 1) + 50)
    with pytest.raises(InputError, match=r"no whole state in it \(no commit record"):
        recovered(tmp_path)


def test_a_damaged_tensor_leads_to_the_record_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says which tensor it was."""
    written = Written(tmp_path)
    written.step(1)
    written.step(2)
    file = written.file
    damage(file.path, file.format.slot_offset(1, file.record.slots[1]) + 999)
    file.leave()
    with caplog.at_level(logging.WARNING):
        assert recovered(tmp_path) == (1, {1.0}, {0.0})
    assert "large is not what was written after 2 steps; the state after 1 steps" in caplog.text


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    """So is one that is none."""
    path = left_by(tmp_path, 1)
    os.truncate(path, 20_000)
    with pytest.raises(InputError, match="no whole state"):
        recovered(tmp_path)
    damage(path, 22)  # of the length of the header
    with pytest.raises(InputError, match="is no state file of this version"):
        recovered(tmp_path)
    path.write_bytes(b"something else")
    with pytest.raises(InputError, match="is no state file of this version"):
        recovered(tmp_path)


def test_another_model_is_refused_and_unchanged(tmp_path: Path) -> None:
    """All differences are said at once."""
    left_by(tmp_path, 1)
    model = Network()
    model.small = torch.nn.Parameter(torch.zeros(3))
    model.other = torch.nn.Parameter(torch.zeros(3))
    del model.frozen
    optimizer = torch.optim.AdamW([model.small])
    with pytest.raises(InputError) as caught:
        pmt.recover(tmp_path, model, optimizer)
    for told in (
        "small: the file has torch.float32 (10,), the model torch.float32 (3,)",
        "parameter frozen is in the file only",
        "parameter other is in the model only",
        "the optimizer has no parameter large",
    ):
        assert told in str(caught.value)
    assert not optimizer.state
    assert model.large.unique().tolist() == [-1.0]


def test_a_model_that_cannot_have_the_state_is_refused(tmp_path: Path) -> None:
    """Tied weights have one value, the device meta has none; other optimizers keep other things."""
    left_by(tmp_path, 1)
    tied = Network()
    tied.frozen = torch.nn.Parameter(tied.frozen.detach()[: SIZES["small"]])
    tied.small = tied.frozen
    with torch.device("meta"):
        empty = Network()
    model = Network()
    adam, momentum = torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)
    for other, make, told in (
        (tied, adam, "small and frozen are the same tensor in the model only"),
        (empty, adam, r"large of the model has no memory \(device meta\)"),
        (model, momentum, "the file has exp_avg.* of large, .* SGD keeps momentum_buffer"),
    ):
        optimizer = make(other.parameters(), lr=0.1)
        with pytest.raises(InputError, match=told):
            pmt.recover(tmp_path, other, optimizer)
        assert not optimizer.state
    nothing: Any = None
    with pytest.raises(InputError, match="optimizer: expected Optimizer of torch, got nothing"):
        pmt.recover(tmp_path, model, nothing)


def test_a_file_stays_until_a_new_one_has_its_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Recovering twice, or being killed before the next step is compiled, loses nothing."""
    path = left_by(tmp_path, 2)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        assert pmt.recover(tmp_path, model, optimizer) == 2
    other = Network()
    assert pmt.recover(tmp_path, other, optimizer) == 0
    with caplog.at_level(logging.WARNING), replaced_by(tmp_path, other) as steps:
        assert steps == 0
    assert path.exists()
    with pytest.raises(KeyError), replaced_by(tmp_path, model):
        raise KeyError
    assert path.exists()
    with replaced_by(tmp_path / "elsewhere", model) as steps:
        assert steps == 0
    assert path.exists()
    with replaced_by(tmp_path, model) as steps:
        assert steps == 2
    assert not path.exists()
    assert not caplog.text


def test_a_file_that_nobody_recovers_is_reported_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever makes a state file beside it reads it in the log."""
    path = left_by(tmp_path, 2)
    with caplog.at_level(logging.WARNING), replaced_by(tmp_path, Network()):
        pass
    assert f"{path}: a process that was killed has left the state of net after 2" in caplog.text
    assert path.exists()


def test_of_several_files_one_is_chosen_by_the_user(tmp_path: Path) -> None:
    """A folder with the states of two runs is refused; the file of one is taken."""
    paths = [left_by(tmp_path, steps) for steps in (1, 3)]
    with pytest.raises(InputError, match="several runs have left their state"):
        recovered(tmp_path)
    assert recovered(paths[1])[0] == 3


def test_the_file_of_a_running_process_is_left_alone(tmp_path: Path) -> None:
    """Two processes may use one folder; a file in use is no state to recover."""
    one, other = Written(tmp_path), Written(tmp_path)
    other.step(1)
    assert recovered(tmp_path)[0] == 0
    with pytest.raises(InputError, match="in use by a process that runs"):
        recovered(other.file.path)
    other.file.leave()
    assert recovered(tmp_path) == (1, {1.0}, {0.0})
    one.file.check()
    one.file.close()


def test_a_folder_that_is_not_there_has_no_state(tmp_path: Path) -> None:
    """So a training script may always begin with `recover`; a file must be there."""
    assert recovered(tmp_path / "first run")[0] == 0
    with pytest.raises(InputError, match=r"cannot be read \(No such file"):
        recovered(tmp_path / f"{PREFIX}x")


def test_nothing_is_recovered_without_a_second_generation(tmp_path: Path) -> None:
    """Such a file never has the name of one that could be."""
    written = Written(tmp_path, generations=1)
    written.step(1)
    written.file.leave()
    assert recovered(tmp_path)[0] == 0
    with pytest.raises(InputError, match="made with rollback=False"):
        recovered(written.file.path)


def test_a_forked_process_has_no_part_in_the_file(tmp_path: Path) -> None:
    """It holds no lock, removes nothing, and cannot step; its parent goes on."""
    written = Written(tmp_path)
    written.step(1)
    (ready, told), (wait, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                written.file.check()
            except pmt.PageError as error:
                code = 0 if "forked from it" in str(error) else 2
            written.file.close()
            os.write(told, b"x")
            os.read(wait, 1)
        finally:
            os._exit(code)
    os.read(ready, 1)
    written.file.check()
    written.step(2)
    written.file.leave()
    assert recovered(tmp_path)[0] == 2
    os.write(end, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
