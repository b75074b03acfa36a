"""Recovery: whatever stops a process or the power, one whole state is found."""

import errno
import gc
import logging
import os
import random
import signal
import time
from functools import partial

import pytest
import torch

import poetmodel.torch as pmt
from kit import killed_run
from kit.eager_steps import find_unequal
from kit.patience import make_system_fault
from kit.rotation import mark_seeds_except
from poetmodel.errors import InputError
from poetmodel.torch.graph.profiles import TensorLayout
from poetmodel.torch.state.file import LARGE_BYTES, PREFIX, StateFile
from poetmodel.torch.state.format import StateTensor, decode, encode
from poetmodel.torch.state.pages import bytes_of
from poetmodel.torch.state.recovery import replace_recovered_file
from poetmodel.torch.step.state_keys import StateKey

SIZES = {"small": 10, "large": LARGE_BYTES // 4 + 3, "frozen": 1500}


@pytest.fixture(autouse=True)
def _one_thread():
    """Compute with one thread: a forked process does not have its parent's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Network(torch.nn.Module):
    """Two parameters that training changes, one that it does not, and a buffer."""

    def __init__(self):
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.full((size,), -1.0)))
        self.register_buffer("count", torch.tensor(-1.0))


class Written:
    """A state file of a network all of whose tensors are the number of the step."""

    def __init__(self, folder, **options):
        self.model = Network()
        named = {("parameter", n): p for n, p in self.model.named_parameters()}
        named |= {("buffer", n): b for n, b in self.model.named_buffers()}
        moments = {("moment", n): p for n, p in self.model.named_parameters() if n != "frozen"}
        tensors = {}
        for (kind, name), value in (named | moments).items():
            key = StateKey(kind, f"model.{name}", "exp_avg" if kind == "moment" else "")
            layout = TensorLayout.from_tensor(value)
            tensors[key] = StateTensor(bytes=value.nbytes, layout=layout)
        self.file = StateFile(folder, tensors, name="net", **options)
        self.tensors = tensors
        self.put(0)
        self.file.commit()

    def put(self, step):
        """Write the values of a step; moments are written from the first one on."""
        for key, tensor in self.tensors.items():
            is_moment = key.kind == "moment"
            if (step == 0 and is_moment) or (step and key.owner == "model.frozen"):
                continue
            value = tensor.allocate().fill_(float(step))
            self.file.write(key, bytes_of(value.untyped_storage()))

    def step(self, number):
        """Make a generation."""
        self.put(number)
        self.file.commit(steps=1)


def recovered(folder):
    """Return the steps done, the changed values, and the frozen ones."""
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    steps = pmt.recover(folder, model, optimizer)
    moments = [kept["exp_avg"] for kept in optimizer.state.values()]
    assert len(moments) == (2 if steps else 0)
    changed = [model.small, model.large, model.count.view(1), *moments]
    values = {value for tensor in changed for value in tensor.unique().tolist()}
    with replace_recovered_file(folder, model):
        pass
    return steps, values, set(model.frozen.unique().tolist())


def test_at_every_moment_of_a_power_cut_there_is_one_whole_state(tmp_path, monkeypatch):
    """Of writes without a later sync, any sectors may be on the medium and any may not."""
    chance = random.Random(7)  # noqa: S311 - no secret
    calls = []
    write, sync = os.pwritev, os.fdatasync

    def pwritev(descriptor, parts, offset):
        calls.append((offset, b"".join(parts)))
        return write(descriptor, parts, offset)

    def fdatasync(descriptor):
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
    pending = []
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


def torn(image, pending, chance):
    """Return the content of a medium after an interrupted write, of which it has some sectors."""
    found = bytearray(image)
    for offset, data in pending:
        for begin in range(0, len(data), 512):
            if chance.random() < 0.5:
                part = data[begin : begin + 512]
                found[offset + begin : offset + begin + len(part)] = part
    return bytes(found)


def left_by(folder, steps):
    """Return the file of a process that was killed in the middle of the step after some."""
    written = Written(folder)
    for number in range(1, steps + 1):
        written.step(number)
    written.put(steps + 1)
    written.file.close_in_child()
    return written.file.path


def damage(path, offset):
    """Change one bit."""
    with path.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 4]))


def test_damage_leads_to_the_record_before(tmp_path, caplog):
    """If a tensor or record is damaged, the older generation is loaded; the log names the tensor.

    If that is damaged, too, an error is raised, and nothing is loaded; likewise for a file that
    is truncated or foreign.
    """
    written = Written(tmp_path / "tensor")
    written.step(1)
    written.step(2)
    file = written.file
    key = StateKey("parameter", "model.large")
    damage(file.path, file.format.slot_offset(key, file.record.entries[key].slot) + 999)
    file.close_in_child()
    with caplog.at_level(logging.WARNING):
        assert recovered(tmp_path / "tensor") == (1, {1.0}, {0.0})
    damage_text = "large does not match its checksum after 2 steps; loading the state after 1 steps"
    assert damage_text in caplog.text
    tmp_path = tmp_path / "record"
    written = Written(tmp_path)
    written.step(1)
    written.step(2)
    form, generation = written.file.format, written.file.record.generation
    written.file.close_in_child()
    damage(written.file.path, form.record_offset(generation) + 50)
    assert recovered(tmp_path) == (1, {1.0}, {0.0})
    path = left_by(tmp_path, 2)
    damage(path, form.record_offset(generation) + 50)
    with pytest.raises(InputError, match=r"no intact state .*after 1 steps"):
        recovered(tmp_path)
    damage(path, form.record_offset(generation - 1) + 50)
    with pytest.raises(InputError, match=r"no intact state \(no commit record"):
        recovered(tmp_path)
    tmp_path = tmp_path.parent / "cut"
    path = left_by(tmp_path, 1)
    os.truncate(path, 20_000)
    with pytest.raises(InputError, match="no intact state"):
        recovered(tmp_path)
    damage(path, 22)  # of the length of the header
    with pytest.raises(InputError, match="is no state file of this version"):
        recovered(tmp_path)
    path.write_bytes(b"something else")
    with pytest.raises(InputError, match="is no state file of this version"):
        recovered(tmp_path)


def test_a_file_of_an_older_version_says_how_to_finish_with_it(tmp_path, caplog):
    """It is not loaded; a step that is compiled beside it logs the same, and leaves it."""
    path = left_by(tmp_path, 1)
    path.write_bytes(encode(decode(path.read_bytes()) | {"version": 3}))
    told = "older version of poetmodel: load it with that version's recover, and save model"
    with pytest.raises(InputError, match=told):
        recovered(tmp_path)
    with replace_recovered_file(tmp_path, Network()) as steps:
        assert steps == 0
    assert told in caplog.text
    assert path.exists()


def failing_after(n_good, call):
    """Return a function that calls another one so many times, and then fails."""
    good_calls = iter(range(n_good))
    fail = make_system_fault(errno.EIO)

    def limited(*arguments):
        return (fail if next(good_calls, None) is None else call)(*arguments)

    return limited


def test_a_medium_that_fails_is_said(tmp_path, monkeypatch):
    """If an intact tensor fails when it is loaded, the error states this, and the changed ones."""
    written = Written(tmp_path)
    written.step(1)
    written.file.close_in_child()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing_after(len(written.tensors) + 1, os.preadv))
        with pytest.raises(InputError, match=r"Input/output error, .*are partly overwritten$"):
            recovered(tmp_path)
    for n_good in range(3):  # the beginning of the header, the header, a record
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", failing_after(n_good, os.pread))
            with pytest.raises(InputError, match=r"cannot be read \(Input/output error\)"):
                recovered(tmp_path)
    assert recovered(tmp_path)[0] == 1


def test_another_model_is_refused_and_unchanged(tmp_path):
    """One error lists all differences."""
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
        "parameter frozen is only in the file",
        "parameter other is only in the model",
        "no optimizer of a supported class has the parameter large",
    ):
        assert told in str(caught.value)
    assert not optimizer.state
    assert model.large.unique().tolist() == [-1.0]


def test_a_model_that_cannot_have_the_state_is_refused(tmp_path):
    """Tied weights have one value, the device meta has none; optimizers have different state."""
    left_by(tmp_path, 1)
    tied = Network()
    tied.frozen = torch.nn.Parameter(tied.frozen.detach()[: SIZES["small"]])
    tied.small = tied.frozen
    with torch.device("meta"):
        empty = Network()
    model = Network()
    adam, momentum = torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)
    for other, make, told in (
        (tied, adam, "small and frozen share memory only in the model"),
        (empty, adam, r"large of the model has no memory \(device meta\)"),
        (model, momentum, "the file has exp_avg.* of large, .* SGD has momentum_buffer"),
    ):
        optimizer = make(other.parameters(), lr=0.1)
        with pytest.raises(InputError, match=told):
            pmt.recover(tmp_path, other, optimizer)
        assert not optimizer.state
    nothing = None
    with pytest.raises(InputError, match=r"^optimizer: "):
        pmt.recover(tmp_path, model, nothing)


def test_a_loss_function_has_no_state_to_recover(tmp_path):
    """It may be passed as to `compile`."""
    left_by(tmp_path, 2)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_fn = torch.nn.functional.mse_loss
    assert pmt.recover(tmp_path, model, optimizer, loss_fn=loss_fn) == 2
    assert model.small.unique().tolist() == [2.0]


def test_a_file_stays_until_a_new_one_has_its_state(tmp_path, caplog):
    """A second recovery, or a kill before the next step is compiled, loses nothing.

    A new state file beside one that was not recovered causes a log message.
    """
    path = left_by(tmp_path, 2)
    with caplog.at_level(logging.WARNING), replace_recovered_file(tmp_path, Network()):
        pass
    assert f"{path}: a killed process has left the state of net after 2" in caplog.text
    assert path.exists()
    caplog.clear()
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        assert pmt.recover(tmp_path, model, optimizer) == 2
    other = Network()
    assert pmt.recover(tmp_path, other, optimizer) == 0
    with caplog.at_level(logging.WARNING), replace_recovered_file(tmp_path, other) as steps:
        assert steps == 0
    assert path.exists()
    with pytest.raises(KeyError), replace_recovered_file(tmp_path, model):
        raise KeyError
    assert path.exists()
    with replace_recovered_file(tmp_path / "elsewhere", model) as steps:
        assert steps == 0
    assert path.exists()
    with replace_recovered_file(tmp_path, model) as steps:
        assert steps == 2
    assert not path.exists()
    assert not caplog.text


@pytest.mark.parametrize("rollback", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_step_without_rollback_leaves_the_recovered_file(tmp_path, rollback):
    """Its own file cannot be recovered, so the one before it stays until another replaces it."""
    model, optimizer = killed_run.network()
    step = killed_run.compile_step(model, optimizer, tmp_path)
    step(*killed_run.batch(0))
    (path,) = tmp_path.glob(f"{PREFIX}*")
    left = path.with_name(f"{path.name}-left")
    left.write_bytes(path.read_bytes())
    step.close()
    model, optimizer = killed_run.network()
    assert pmt.recover(tmp_path, model, optimizer) == 1
    step = killed_run.compile_step(model, optimizer, tmp_path, rollback=rollback)
    step(*killed_run.batch(1))
    step.close()
    assert left.exists() != rollback


def test_of_several_files_one_is_chosen_by_the_user(tmp_path):
    """A folder with the states of two runs is refused; the file of one is read.

    A missing folder has no state, so a script may always begin with `recover`; a file must
    exist, with a second generation.
    """
    assert recovered(tmp_path / "first run")[0] == 0
    with pytest.raises(InputError, match=r"cannot be read \(No such file"):
        recovered(tmp_path / f"{PREFIX}x")
    alone = Written(tmp_path / "alone", generations=1)
    alone.step(1)
    alone.file.close_in_child()
    assert recovered(tmp_path / "alone")[0] == 0
    with pytest.raises(InputError, match="written with rollback=False"):
        recovered(alone.file.path)
    paths = [left_by(tmp_path, steps) for steps in (1, 3)]
    with pytest.raises(InputError, match="several processes have left their state"):
        recovered(tmp_path)
    assert recovered(paths[1])[0] == 3


def test_the_file_of_a_running_process_is_left_alone(tmp_path):
    """Two processes may use one folder; a file in use is no state to recover."""
    one, other = Written(tmp_path), Written(tmp_path)
    other.step(1)
    assert recovered(tmp_path)[0] == 0
    with pytest.raises(InputError, match="in use by a running process"):
        recovered(other.file.path)
    other.file.close_in_child()
    assert recovered(tmp_path) == (1, {1.0}, {0.0})
    one.file.check()
    one.file.close()


def test_a_forked_process_has_no_part_in_the_file(tmp_path):
    """It has no lock, removes no file, and cannot step; its parent continues."""
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
    written.file.close_in_child()
    assert recovered(tmp_path)[0] == 2
    os.write(end, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- processes that are killed ---------------------------------------------------------------------
forks_after_training = pytest.mark.skipif(
    torch.backends.cuda.is_built(),
    reason="PyTorch's builds for GPUs train in no fork of a process that has trained",
)


def recovered_run(folder):
    """Return the steps and the state that are found, and leave the file."""
    model, optimizer = killed_run.network()
    steps = pmt.recover(folder, model, optimizer)
    return steps, killed_run.copy_state(model, optimizer)


def killed_child(folder, number, options=(), *, verifies=False):
    """Train a forked process for two steps, and kill it at a call of the second; return the calls.

    With a negative number, it is not killed. The second step may be only tried, for
    verification.
    """
    child = os.fork()
    if child == 0:
        try:
            model, optimizer = killed_run.network()
            step = killed_run.compile_step(model, optimizer, folder, **dict(options))
            step(*killed_run.batch(0))
            killed_run.kill_at(number)
            _ = step.verify() if verifies else step(*killed_run.batch(1))
            (folder / "calls").write_text(str(len(killed_run.calls)))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    counted = folder / "calls"
    return int(counted.read_text()) if number < 0 else 0


@forks_after_training
@pytest.mark.parametrize("verifies", [False, True])
def test_a_process_that_is_killed_leaves_its_last_step(tmp_path, verifies):
    """Parameters, moments, buffers, unread state, and the random generator.

    Steps that were only tried leave no trace.
    """
    killed_child(tmp_path, -1 if verifies else 3, verifies=verifies)
    steps, found = recovered_run(tmp_path)
    assert steps == 1
    assert not find_unequal(found, killed_run.eager_states(1)[1])


@pytest.fixture(scope="module")
def two_steps():
    """Return the states after no, one and two steps of eager PyTorch."""
    return killed_run.eager_states(2)


WRITES = {"storage": {}, "RAM": {"ram": "100%"}}
PARTS = 8
"""In how many parts the calls of a step are tried."""


@forks_after_training
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "part"),
    mark_seeds_except(
        [(w, part) for w in WRITES for part in range(PARTS)], [("storage", PARTS - 1)]
    ),
)
def test_a_kill_at_any_write_or_sync_leaves_one_whole_state(where, part, tmp_path, two_steps):
    """Before the record is on the medium that of the step before, after it the new one."""
    count = killed_child(tmp_path / "all", -1, WRITES[where])
    assert count > 10
    begin, end = count * part // PARTS, count * (part + 1) // PARTS
    seen = []
    for number in sorted({begin, *(range(end - 3, end) if part == PARTS - 1 else ())}):
        folder = tmp_path / str(number)
        killed_child(folder, number, WRITES[where])
        steps, found = recovered_run(folder)
        assert not find_unequal(found, two_steps[steps])
        seen.append(steps)
    assert seen == sorted(seen)
    assert set(seen) == ({1, 2} if part == PARTS - 1 else {1})


def forked_run(folder, steps):
    """Train in a forked process; return its number, and its output."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            killed_run.main(folder, steps, writes)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writes)
    return child, os.fdopen(reads)


@forks_after_training
@pytest.mark.slow
@pytest.mark.parametrize("seed", mark_seeds_except(range(8), (0,)))
def test_a_run_that_is_killed_at_random_ends_as_one_that_is_not(tmp_path, seed):
    """Each process continues with the state of the killed one."""
    steps, latest = 150, 0
    chance = random.Random(seed)  # noqa: S311 - no secret
    expected = killed_run.eager_states(steps)
    for _ in range(3):
        child, told = forked_run(tmp_path, steps)
        assert told.readline() == f"from {latest}\n"
        said = [told.readline() for _ in range(chance.randint(1, 9))]
        time.sleep(chance.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with told:
            said += told.read().splitlines()
        latest, found = recovered_run(tmp_path)
        assert not find_unequal(found, expected[latest])
        assert latest >= max(int(line.split()[1]) for line in said)
        gc.collect()
    assert latest < steps
    child, told = forked_run(tmp_path, steps)
    with told:
        assert told.read().endswith(f"done {steps}\n")
    assert os.waitpid(child, 0)[1] == 0
    assert not find_unequal(torch.load(tmp_path / "state.pt"), expected[steps])
    assert not list(tmp_path.glob(f"{PREFIX}*"))
