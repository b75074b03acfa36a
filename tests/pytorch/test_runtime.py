"""The runtime: a step is atomic, and leaves no files."""

import ast
import atexit
import errno
import gc
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch

from kit.eager_steps import (
    check_random_plans,
    compile_keep_all,
    copy_outcome,
    find_differences,
    find_unequal,
    plan_of_trace,
    run_eager_step,
)
from kit.networks import ARCHITECTURES, residual_step
from kit.patience import make_system_fault, run_in_fork
from kit.plans import random_program
from kit.rotation import mark_seeds_except
from kit.traced_models import QUICK_STEPS, STEPS, residual, row_step
from poetmodel.plan import Instruction, Op, Plan
from poetmodel.torch import PageError, compile, trace
from poetmodel.torch.runtime.program import StepWriter
from poetmodel.torch.runtime.runner import Runner

nn = torch.nn


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return a residual step compiled to page and not to recompute."""
    torch.manual_seed(1)
    own = residual_step()
    folder = tmp_path_factory.mktemp("pages")
    with compile(
        *own, ram="75%", storage=folder, recompute=False, device="rpi4b", time_limit=5
    ) as step:
        return own, step.compiled


@pytest.fixture
def paged(compiled, tmp_path):
    """Return the step, and a fresh runner of it without gradients."""
    own, found = compiled
    own[0].zero_grad()
    step = Paged(found, tmp_path)
    yield own, step
    step.runner.close()


class Paged:
    """A compiled step with a page file of its own."""

    def __init__(self, compiled, folder, *, rollback=True):
        self.plan, self.joint = compiled.plan, compiled.trace.joint
        plan = compiled.scheduled.to_whole_plan(compiled.plan)
        self.runner = Runner(compiled.trace, plan, folder=folder, rollback=rollback)

    def __call__(self, *inputs):
        """Run a step."""
        return self.runner(self.joint.flat_inputs(inputs))


def file_of(step):
    """Return the page file of a step."""
    file = step.runner.page_file
    assert file is not None
    return file.path


def at_call(monkeypatch, name, number, act):
    """Let the call of the system of that number be another one."""
    real, calls = getattr(os, name), []

    def call(*given):
        calls.append(given)
        return act(real, *given) if len(calls) == number else real(*given)

    monkeypatch.setattr(os, name, call)


def full(_, monkeypatch):
    """Let the third write find no room."""
    at_call(monkeypatch, "pwrite", 3, lambda *_: make_system_fault(errno.ENOSPC)())
    return "No space left"


def reads(step):
    """Return how many pages a step reads."""
    return sum(op == "page_in" for op, _ in step.plan.program)


def short(step, monkeypatch):
    """Let the last read find the end of the file."""
    at_call(monkeypatch, "preadv", reads(step), lambda *_: 0)
    return "only 0 of"


def changed(step, monkeypatch):
    """Flip a bit of the page that is read last."""

    def flipped(real, descriptor, buffers, offset):
        got = real(descriptor, buffers, offset)
        buffers[0][7] ^= 1
        return got

    at_call(monkeypatch, "preadv", reads(step), flipped)
    return "does not match its checksum"


FAULTS = (full, short, changed)


@pytest.mark.parametrize(("fault", "earlier"), [*((fault, 1) for fault in FAULTS), (changed, 0)])
def test_a_failing_step_changes_nothing(paged, fault, earlier, monkeypatch, tmp_path):
    """Parameters, gradients (present or not), buffers and random state are as before the step.

    The next step succeeds.
    """
    own, step = paged
    model, _, inputs = own
    for _ in range(earlier):
        step(*inputs)
    zero = torch.zeros(())
    before = copy_outcome(model, zero)
    words = fault(step, monkeypatch)
    with pytest.raises(PageError, match=words):
        step(*inputs)
    assert find_unequal(before, copy_outcome(model, zero)) == []
    monkeypatch.undo()
    assert find_differences(step, *own) == []
    assert list(tmp_path.iterdir()) == [file_of(step)]


def test_a_step_needs_no_name_of_its_file_and_no_length(paged):
    """Removing or truncating the page file between steps has no effect."""
    own, step = paged
    step(*own[2])
    os.truncate(file_of(step), 100)
    own[0].zero_grad()
    assert find_differences(step, *own) == []
    file_of(step).unlink()
    own[0].zero_grad()
    assert find_differences(step, *own) == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "end", mark_seeds_except(["collected", "closed", "exit"], ["exit"], ["collected", "closed"])
)
def test_a_forked_process_leaves_the_file_alone(paged, end):
    """In any case; the step of the parent continues."""
    own, step = paged
    step(*own[2])

    def collected():
        del step.runner
        gc.collect()

    ways = {"collected": collected, "closed": step.runner.close, "exit": atexit._run_exitfuncs}
    own[0].zero_grad()
    assert run_in_fork(ways[end]) == 0
    assert file_of(step).exists()
    assert find_differences(step, *own) == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_pages_in_a_file_of_its_own(paged, tmp_path):
    """It has a file of its own, and removes it."""
    own, step = paged
    step(*own[2])
    own[0].zero_grad()
    before = file_of(step)

    def train():
        torch.set_num_threads(1)
        step(*own[2])
        assert file_of(step) != before
        step.runner.close()

    assert run_in_fork(train) == 0
    assert list(tmp_path.iterdir()) == [before]
    assert find_differences(step, *own) == []


def test_without_rollback_gradients_are_added_at_once(compiled, tmp_path):
    """No second set of gradients, and the same sums."""
    own, found = compiled
    own[0].zero_grad()
    step = Paged(found, tmp_path, rollback=False)
    assert not step.runner.delays_gradients
    for _ in range(2):
        assert find_differences(step, *own) == []
    step.runner.close()


@pytest.mark.slow
def test_a_hundred_steps_leave_nothing(paged, tmp_path, monkeypatch):
    """The file keeps its size; tensors and open files do not grow in every round of steps."""
    monkeypatch.setattr(os, "fdatasync", lambda _: None)  # nothing here depends on the medium
    (_, _, inputs), step = paged

    def after(steps):
        for _ in range(steps):
            step(*inputs)
        gc.collect()
        tensors = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
        return tensors, len(list(Path("/proc/self/fd").iterdir())), size

    # What earlier tests left may be collected meanwhile: a leak of the steps shows in each round.
    *counts, sizes = zip(after(3), *(after(25) for _ in range(4)), strict=True)
    assert len(set(sizes)) == 1
    for found in counts:
        assert min(b - a for a, b in pairwise(found)) <= 0, found


def test_closing_removes_the_file(paged, tmp_path):
    """After close, the folder is empty, and a step raises that it was closed."""
    own, step = paged
    assert len(list(tmp_path.iterdir())) == 1
    step.runner.close()
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        with pytest.raises(PageError, match="the step was closed"):
            step(*own[2])


def test_gradients_are_the_users_to_keep():
    """Two weights with the same gradient get separate memory for it.

    An input that requires a gradient gets one; a model's change of an input happens once.
    """
    parts = (nn.Linear(4, 4), nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False))
    own = row_step(*parts, by=lambda p, x: p[0](x) + p[1].weight + p[2].weight)
    step = compile_keep_all(*own)
    step(*own[2])
    gradients = [parameter.grad for parameter in own[0].parameters()]
    assert torch.equal(gradients[2], gradients[3])
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == 4
    assert all(g.untyped_storage().nbytes() == 4 * g.numel() for g in gradients)
    own[0].zero_grad()
    assert find_differences(step, *own) == []
    model, loss_fn, (x, y) = row_step(nn.Linear(4, 4))
    x.requires_grad_()
    step = compile_keep_all(model, loss_fn, (x, y))
    step(x, y)
    found, x.grad = x.grad, None
    run_eager_step(model, loss_fn, (x, y))
    assert torch.equal(found, x.grad)
    model, loss_fn, (x, y) = row_step(nn.Linear(4, 4), by=lambda p, x: p[0](x.mul_(2)))
    before = x.clone()
    step = compile_keep_all(model, loss_fn, (x, y))
    step(x, y)
    assert torch.equal(x, 2 * before)


# -- programs: whatever the plan, the step is the one that PyTorch runs ---------------------------
PLANS = [(name, "blocking") for name in STEPS]
PLANS += [(name, mode) for name in ARCHITECTURES for mode in ("blocking", "dma")]
SLOW_PLANS = [("encoder layer", "blocking"), ("transformer", "dma")]
QUICK_PLANS = [("plain", "dma"), *((name, "blocking") for name in QUICK_STEPS[1::2])]


@pytest.mark.parametrize(
    ("name", "mode"), mark_seeds_except(PLANS, {*QUICK_PLANS} - {*SLOW_PLANS}, SLOW_PLANS)
)
def test_random_plans_run_as_eager(name, mode, tmp_path):
    """Recomputing and paging at random changes no bit of any result, gradients adding up.

    So it is for frozen, tied, unused, random, low-precision and other parts.
    """
    check_random_plans((STEPS | ARCHITECTURES)[name](), tmp_path, range(2), mode)


def test_kept_storages_are_no_part_of_the_plan():
    """A plan of the large tensors alone runs; small ones are kept as long as they are read."""
    step = residual()
    traced = trace(*step, measure_workspace=False)
    large = {storage.index for storage in traced.step_graph.storages if storage.bytes >= 512}
    assert 0 < len(large) < len(traced.step_graph.storages)
    program = [Instruction(Op.COMPUTE, k) for k in range(len(traced.graph.nodes))]
    plan = plan_of_trace(traced, Plan(program=tuple(program), mode="blocking"))
    runner = Runner(traced, replace(plan, storages=frozenset(large)))
    assert find_differences(lambda *given: runner(traced.joint.flat_inputs(given)), *step) == []


def test_the_source_is_straight_down():
    """One function without loops or branches, in which each value is deleted after its last use."""
    traced = trace(*residual(), measure_workspace=False)
    plan = random_program(traced.graph, Random(0), "blocking", page=0.0, drop=0.0)  # noqa: S311
    program = StepWriter(traced, plan_of_trace(traced, plan)).write()
    (function,) = ast.parse(program.source).body
    assert [argument.arg for argument in function.args.args] == ["arguments", "emit", "pages"]
    _given, *body, end = function.body
    kinds = (ast.Assign, ast.Delete)
    assert all(isinstance(statement, kinds) for statement in body)
    alive = set()
    for statement, following in pairwise([*body, end]):
        if isinstance(statement, ast.Assign):
            (name,) = names_in(statement.targets[0])
            alive.add(name)
            later = body[body.index(statement) + 1 :]
            read = set().union(*map(names_in, (s for s in later if isinstance(s, ast.Assign))))
            dead = alive - read - names_in(end)
            assert dead == (names_in(following) if isinstance(following, ast.Delete) else set())
            alive -= dead
    assert alive == names_in(end)
    names = [output.result.name for output in program.end_results.values()]
    assert names.count("loss") == 1
    assert "mutation of 1.bn.running_mean" in names
    assert torch.default_generator.get_state not in {node.target for node in program.graph.nodes}


def names_in(statement):
    """Return the names in a statement."""
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def test_random_operations_keep_their_state_only_where_needed():
    """The state of the generator is saved before an operation that is computed again."""
    traced = trace(*residual(), measure_workspace=False)
    (dropout,) = (unit for unit in traced.step_graph.operations if unit.is_random)
    once = [Instruction(Op.COMPUTE, k) for k in range(len(traced.graph.nodes))]
    twice = [*once[: dropout.index + 1], once[dropout.index], *once[dropout.index + 1 :]]
    get, put = torch.default_generator.get_state, torch.default_generator.set_state

    def calls(program):
        plan = plan_of_trace(traced, Plan(program=tuple(program), mode="blocking"))
        nodes = StepWriter(traced, plan).write().graph.nodes
        wanted = (get, put, dropout.node.target)
        return [node for node in nodes if node.target in wanted]

    assert [node.target for node in calls(once)] == [dropout.node.target]
    saved, first, now, begin, second, end = calls(twice)
    assert [saved.target, first.target] == [get, dropout.node.target]
    assert [now.target, begin.target, second.target, end.target] == [get, put, first.target, put]
    assert (begin.args, end.args) == ((saved,), (now,))
