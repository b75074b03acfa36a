"""The runtime: a step happens as a whole or not at all, and leaves nothing behind."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import signal
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.eager_steps import differing, eager_step, keep_all, outcome, unequal  # noqa: E402
from kit.networks import ARCHITECTURES, residual_step, transformer_step  # noqa: E402
from kit.plans import random_program  # noqa: E402
from kit.rotation import quick  # noqa: E402
from kit.traced_models import QUICK_STEPS, STEPS, residual, rows  # noqa: E402
from poetmodel.plan import Instruction, Op, Plan  # noqa: E402
from poetmodel.torch import PageError, compile, trace  # noqa: E402
from poetmodel.torch.runtime.runner import Runner  # noqa: E402
from poetmodel.torch.runtime.source import Generated  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.networks import Step
    from poetmodel.torch.compiled import Compiled

nn = torch.nn
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", params=[False, True], ids=["direct", "background"])
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Compiled]:
    """Return a residual step compiled to page and not to recompute, with and without a thread."""
    torch.manual_seed(1)
    own = residual_step()
    folder = tmp_path_factory.mktemp("pages")
    with compile(
        *own, ram="75%", storage=folder, recompute=False, device="rpi4b", time_limit=5,
        background_io=request.param,
    ) as step:  # fmt: skip
        return own, step.compiled


@pytest.fixture
def paged(compiled: tuple[Any, Compiled], tmp_path: Path) -> Iterator[tuple[Any, Paged]]:
    """Return the step, and a fresh runner of it without gradients."""
    own, found = compiled
    own[0].zero_grad()
    step = Paged(found, tmp_path)
    yield own, step
    step.runner.close()


class Paged:
    """A compiled step with a page file of its own."""

    def __init__(self, compiled: Compiled, folder: Path, *, rollback: bool = True) -> None:
        self.plan, self.joint = compiled.plan, compiled.trace.joint
        numbers = compiled.coarse.numbers
        self.runner = Runner(
            compiled.trace, compiled.plan, numbers, folder=folder, rollback=rollback
        )

    def __call__(self, *inputs: Any) -> torch.Tensor:
        """Run a step."""
        return self.runner(self.joint.flat_inputs(inputs))


def file_of(step: Paged) -> Path:
    """Return the page file of a step."""
    file = step.runner.file
    assert file is not None
    return file.path


def truncated(step: Paged, monkeypatch: pytest.MonkeyPatch) -> str:
    """Cut the file before the step."""
    os.truncate(file_of(step), 100)
    del monkeypatch
    return "of .* B; the next step makes a new one"


def removed(step: Paged, monkeypatch: pytest.MonkeyPatch) -> str:
    """Remove the file before the step."""
    file_of(step).unlink()
    del monkeypatch
    return "is gone"


def full(step: Paged, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the third write find no room."""
    real, calls = os.pwrite, []

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    del step
    return "No space left"


def short(step: Paged, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the last read find the end of the file."""
    real, calls = os.preadv, []
    last = sum(op == "page_in" for op, _ in step.plan.program)

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        return 0 if len(calls) == last else real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return "only 0 of"


def changed(step: Paged, monkeypatch: pytest.MonkeyPatch) -> str:
    """Flip a bit of every page that is read last."""
    real, calls = os.preadv, []
    last = sum(op == "page_in" for op, _ in step.plan.program)

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        got = real(descriptor, buffers, offset)
        if len(calls) == last:
            buffers[0][7] ^= 1
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    return "not what was"


@pytest.mark.parametrize("fault", [truncated, removed, full, short, changed])
def test_a_failing_step_changes_nothing(
    paged: tuple[Any, Paged],
    fault: Callable[[Paged, pytest.MonkeyPatch], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters, gradients (there already), buffers and random state are as before the step."""
    (model, _, inputs), step = paged
    step(*inputs)
    zero = torch.zeros(())
    before = outcome(model, zero)
    words = fault(step, monkeypatch)
    with pytest.raises(PageError, match=words):
        step(*inputs)
    assert unequal(before, outcome(model, zero)) == []
    monkeypatch.undo()


def test_a_step_after_a_failed_one_is_as_eager(
    paged: tuple[Any, Paged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure in the middle leaves nothing in the way of the next step; no gradients, too."""
    own, step = paged
    changed(step, monkeypatch)
    with pytest.raises(PageError):
        step(*own[2])
    monkeypatch.undo()
    assert all(parameter.grad is None for parameter in own[0].parameters())
    assert differing(step, *own) == []


@pytest.mark.parametrize("fault", [truncated, removed])
def test_a_lost_file_is_made_anew_after_the_error(
    paged: tuple[Any, Paged],
    fault: Callable[[Paged, pytest.MonkeyPatch], str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The step after the one that failed runs as eager, in the only file of the folder."""
    own, step = paged
    before = file_of(step)
    fault(step, monkeypatch)
    with pytest.raises(PageError):
        step(*own[2])
    assert differing(step, *own) == []
    assert file_of(step) != before
    assert list(tmp_path.iterdir()) == [file_of(step)]
    written, read = step.runner.traffic
    assert written == read > 0


def test_a_closed_step_says_so(paged: tuple[Any, Paged]) -> None:
    """Neither the file nor the disk is to blame."""
    own, step = paged
    step.runner.close()
    for _ in range(2):
        with pytest.raises(PageError, match="the step was closed"):
            step(*own[2])


def in_a_fork(work: Callable[[], object]) -> int:
    """Run something in a forked process; return its exit code."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("end", ["collected", "closed", "exit"])
def test_a_forked_process_leaves_the_file_alone(paged: tuple[Any, Paged], end: str) -> None:
    """However it ends; the step of the parent goes on."""
    own, step = paged
    step(*own[2])
    ways: dict[str, Callable[[], object]] = {
        "collected": lambda: step.__dict__.pop("runner") and gc.collect(),
        "closed": step.runner.close,
        "exit": atexit._run_exitfuncs,
    }
    own[0].zero_grad()
    assert in_a_fork(ways[end]) == 0
    assert file_of(step).exists()
    assert differing(step, *own) == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_pages_in_a_file_of_its_own(
    paged: tuple[Any, Paged], tmp_path: Path
) -> None:
    """It has a thread and a file of its own, and removes them."""
    own, step = paged
    step(*own[2])
    own[0].zero_grad()
    before = file_of(step)

    def train() -> None:
        signal.alarm(60)  # in place of waiting for a thread that is not there
        torch.set_num_threads(1)
        step(*own[2])
        assert file_of(step) != before
        step.runner.close()

    assert in_a_fork(train) == 0
    assert list(tmp_path.iterdir()) == [before]
    assert differing(step, *own) == []


def test_gradients_add_up_over_micro_batches(paged: tuple[Any, Paged]) -> None:
    """Two steps without zero_grad between them give eager's sums."""
    own, step = paged
    for _ in range(3):
        assert differing(step, *own) == []


def test_without_rollback_gradients_are_added_at_once(
    compiled: tuple[Any, Compiled], tmp_path: Path
) -> None:
    """No second set of gradients, and the same sums."""
    own, found = compiled
    own[0].zero_grad()
    step = Paged(found, tmp_path, rollback=False)
    assert not step.runner.waits
    for _ in range(2):
        assert differing(step, *own) == []
    step.runner.close()


@pytest.mark.slow
def test_a_hundred_steps_leave_nothing(
    paged: tuple[Any, Paged], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors alive, the size of the file and open files stay the same."""
    monkeypatch.setattr(os, "fdatasync", lambda _: None)  # nothing here depends on the medium
    (_, _, inputs), step = paged

    def counts() -> tuple[int, int, int]:
        gc.collect()
        tensors = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
        return tensors, size, len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(3):
        step(*inputs)
    before = counts()
    for _ in range(100):
        step(*inputs)
    assert counts() == before


def test_closing_removes_the_file_and_its_thread(paged: tuple[Any, Paged], tmp_path: Path) -> None:
    """After close the folder is empty."""
    _, step = paged
    assert len(list(tmp_path.iterdir())) == 1
    step.runner.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("uses", [2, 3])
def test_tied_weights_are_summed_before_they_are_added(uses: int) -> None:
    """A weight in several places gets eager's gradient, on top of one that is there."""
    torch.manual_seed(1)
    layers = [nn.Linear(4, 4, bias=False) for _ in range(uses)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    own = rows(*layers)
    step = keep_all(*own)
    for _ in range(2):
        assert differing(step, *own) == []


def test_gradients_are_the_users_to_keep() -> None:
    """Two weights with the same gradient get memory of their own for it."""
    torch.manual_seed(1)
    parts = (nn.Linear(4, 4), nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False))
    own = rows(*parts, by=lambda p, x: p[0](x) + p[1].weight + p[2].weight)
    step = keep_all(*own)
    step(*own[2])
    gradients = [parameter.grad for parameter in own[0].parameters()]
    assert torch.equal(gradients[2], gradients[3])
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == 4
    assert all(g.untyped_storage().nbytes() == 4 * g.numel() for g in gradients)
    own[0].zero_grad()
    assert differing(step, *own) == []


def test_the_gradient_of_an_input_is_given_too() -> None:
    """An input that requires a gradient gets one."""
    model, loss_fn, (x, y) = rows(nn.Linear(4, 4))
    x.requires_grad_()
    step = keep_all(model, loss_fn, (x, y))
    step(x, y)
    found, x.grad = x.grad, None
    eager_step(model, loss_fn, (x, y))
    assert torch.equal(found, x.grad)


def test_an_input_changed_in_place_is_changed() -> None:
    """What the model does to its input happens, once."""
    model, loss_fn, (x, y) = rows(nn.Linear(4, 4), by=lambda p, x: p[0](x.mul_(2)))
    step = keep_all(model, loss_fn, (x, y))
    before = x.clone()
    step(x, y)
    assert torch.equal(x, 2 * before)


def test_random_plans_accumulate_as_eager(tmp_path: Path) -> None:
    """Tied weights, paging and recomputation together, over several micro-batches."""
    torch.manual_seed(1)
    own = transformer_step()
    traced = trace(*own, measure_workspace=False)
    plan = random_program(traced.graph, Random(5), "dma", page=0.3)  # noqa: S311
    runner = Runner(traced, plan, range(len(traced.parts.storages)), folder=tmp_path)
    for _ in range(3):
        assert differing(lambda *given: runner(traced.joint.flat_inputs(given)), *own) == []
    runner.close()


# -- programs: whatever the plan, the step is the one that PyTorch runs ---------------------------


def check_random(step: Step, mode: str, folder: Path, seeds: range) -> None:
    """Run random plans of a step, and compare each with eager."""
    model, loss_fn, inputs = step
    traced = trace(model, loss_fn, inputs, measure_workspace=False)
    flat = traced.joint.flat_inputs
    for seed in seeds:
        plan = random_program(traced.graph, Random(seed), mode, page=0.3)  # noqa: S311
        runner = Runner(traced, plan, range(len(traced.parts.storages)), folder=folder)
        assert differing(lambda *given, r=runner: r(flat(given)), *step) == [], seed
        runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["blocking", "dma"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_plans_run_as_eager(name: str, mode: str, tmp_path: Path) -> None:
    """Recomputing and paging at random changes no bit of any result, gradients adding up."""
    torch.manual_seed(1)
    check_random(ARCHITECTURES[name](), mode, tmp_path, range(3))


@pytest.mark.parametrize("name", quick(STEPS, QUICK_STEPS))
def test_random_plans_of_all_kinds_of_modules(name: str, tmp_path: Path) -> None:
    """Frozen, tied, unused, random, low-precision and other parts run as eager."""
    torch.manual_seed(1)
    check_random(STEPS[name](), "blocking", tmp_path, range(2))


def test_kept_storages_are_no_part_of_the_plan() -> None:
    """A plan of the large tensors alone runs; small ones are kept as long as they are read."""
    torch.manual_seed(1)
    step = residual()
    traced = trace(*step, measure_workspace=False)
    numbers = [storage.index for storage in traced.parts.storages if storage.bytes >= 512]
    assert 0 < len(numbers) < len(traced.parts.storages)
    program = [Instruction(Op.COMPUTE, k) for k in range(len(traced.graph.nodes))]
    runner = Runner(traced, Plan(program=tuple(program), mode="blocking"), numbers)
    assert differing(lambda *given: runner(traced.joint.flat_inputs(given)), *step) == []


def test_the_source_is_straight_down() -> None:
    """One function, no loop, no branch, and every scheduled tensor freed where the plan says."""
    traced = trace(*residual(), measure_workspace=False)
    plan = random_program(traced.graph, Random(0), "blocking", page=0.0, drop=0.0)  # noqa: S311
    numbers = range(len(traced.parts.storages))
    generated = Generated(traced, plan.program, numbers)
    lines = generated.source.splitlines()
    assert lines[0] == "def step(arguments, emit, pages):"
    assert all(line.startswith("    ") and line[4] != " " for line in lines[1:])
    frees = [step.index for step in plan.program if step.op == Op.FREE]
    freed = [line.strip() for line in lines if line.strip().startswith("del t")]
    assert freed == [f"del t{index}" for index in frees]
    names = [emission.result.name for emission in generated.held.values()]
    assert names.count("loss") == 1
    assert "mutation of 1.bn.running_mean" in names
    assert "get_state" not in generated.source


def test_random_operations_keep_their_state_only_where_needed() -> None:
    """The state of the generator is saved before an operation that is computed again."""
    traced = trace(*residual(), measure_workspace=False)
    (dropout,) = (unit.index for unit in traced.parts.units if unit.random)
    once = [Instruction(Op.COMPUTE, k) for k in range(len(traced.graph.nodes))]
    twice = [*once[: dropout + 1], once[dropout], *once[dropout + 1 :]]
    numbers = range(len(traced.parts.storages))
    source = Generated(traced, tuple(twice), numbers).source
    assert source.count(f"g{dropout} = get_state()") == 1
    assert source.count(f"set_state(g{dropout})") == 1
    assert source.count("set_state(now)") == 1
