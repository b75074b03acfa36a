"""The budget of a back end over all of its calls that wait for their backward pass."""

import copy
import gc
import random
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import poetmodel.torch as pmt
from kit.rotation import mark_seeds_except
from kit.worked import skip_graph
from poetmodel.errors import BudgetError
from poetmodel.torch.dynamo import compiling
from poetmodel.torch.dynamo.frontier import Frontier
from poetmodel.torch.dynamo.planning import FirstCall, GraphProblem, PassPeaks
from poetmodel.torch.dynamo.steps import Moment, StepPlanner, choose_plans
from poetmodel.torch.graph.tensors import heap_peak_bytes

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it
ROWS, WIDTH = 256, 64
LOSS = "257KiB"
"""What the loss of a tower takes in eager PyTorch: four tensors like its input, and scalars."""
ADVICE = "compile the module that contains the blocks"


class Block(nn.Module):
    """Layers with a residual connection."""

    def __init__(self, depth=2):
        super().__init__()
        layers = (part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        """Return the next activations."""
        return x + self.layers(x)


class Projection(nn.Module):
    """A layer that saves its input alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        """Return a product."""
        return x @ self.weight


class Tower(nn.Module):
    """Equal blocks and a loss."""

    def __init__(self, count=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x):
        """Return a loss."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch(rows=ROWS):
    """Return activations."""
    return torch.randn(rows, WIDTH)


def compiled(function, ram, **options):
    """Return a compiled function and its back end."""
    torch._dynamo.reset()
    back = pmt.backend(ram, cache=False, gap=0.5, **options)
    return torch.compile(function, backend=back, fullgraph=True, dynamic=False), back


def by_block(ram, **options):
    """Return a tower whose blocks were compiled one by one, and the back end."""
    torch._dynamo.reset()
    tower, back = Tower(), pmt.backend(ram, cache=False, gap=0.5, **options)
    for block in tower.blocks:
        block.compile(backend=back, fullgraph=True, dynamic=False)
    return tower, back


def gradients(model):
    """Return copies of the gradients of a model."""
    return [parameter.grad.clone() for parameter in model.parameters()]


def same(a, b):
    """Return whether all tensors have the same bits."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


def peak_and_gradients(model, run):
    """Return the heap's peak of a step, the gradients from none before, and compile first."""
    run().backward()
    model.zero_grad()
    gc.collect()
    peak = heap_peak_bytes(lambda: run().backward())
    return peak, gradients(model)


def fill(run, x):
    """Return the results of calls, made until one is refused beside those that wait."""
    waiting = []
    for _ in range(100):
        try:
            waiting.append(run(x))
        except BudgetError as error:
            assert "that still need a backward pass" in str(error)  # noqa: PT017 - by chance
            return waiting
    raise AssertionError("no call was refused")


def of_eager(tower, x):
    """Return gradients of an eager model with the same weights."""
    eager = Tower()
    eager.load_state_dict(tower.state_dict())
    eager(x).backward()
    return gradients(eager)


@pytest.mark.slow
def test_a_copy_of_a_compiled_module_has_the_budget_of_the_module():
    """It counts its own calls, and computes the same bits."""
    run, _ = compiled(Projection(), "900KiB", outside="300KiB")
    x = batch()
    run(x).sum().backward()
    run_copy = copy.deepcopy(run)
    run_copy.zero_grad()
    waiting_counts = [len(fill(function, x)) for function in (run, run_copy)]
    assert waiting_counts[0] == waiting_counts[1] > 0
    gc.collect()
    run_copy(x).sum().backward()
    assert same(gradients(run_copy), gradients(run))


@pytest.mark.slow
def test_a_copy_of_a_back_end_has_its_settings(tmp_path):
    """Its plans are its own."""
    options = {"outside": "300KiB", "storage": tmp_path}
    back, x = pmt.backend("80%", cache=False, gap=0.5, **options), batch()
    records = []
    for back_end in (back, copy.deepcopy(back)):
        torch._dynamo.reset()
        torch.compile(Tower(2), backend=back_end, fullgraph=True, dynamic=False)(x).backward()
        (record,) = back_end.plans
        records.append(record)
    assert records[0].outside_bytes == records[1].outside_bytes == 300 * 1024
    assert records[0].ram_budget_bytes == records[1].ram_budget_bytes


@pytest.mark.parametrize(
    "ram", mark_seeds_except(["60%", "80%", "900KiB", "1100KiB"], ["60%"], ["900KiB"])
)
def test_blocks_compiled_one_by_one_share_a_budget(ram):
    """From the first step on, with eager's bits; later steps have looser plans, one for each call.

    Blocks of one graph have several plans.
    """
    tower, back = by_block(ram, outside=LOSS)
    x, own = batch().requires_grad_(), []
    expected = of_eager(tower, x)

    def step():
        tower.zero_grad()
        x.grad = None
        tower(x).backward()

    for _ in range(3):
        step()
        own.append(gradients(tower))
    assert all(same(each, expected) for each in own)
    (choice,) = back._steps.choices
    tower.zero_grad()
    x.grad = None
    gc.collect()
    numbers_bytes = 16  # the loss and its gradient
    assert heap_peak_bytes(step) <= choice.peak_bytes + numbers_bytes
    assert choice.peak_bytes <= choice.budget_bytes < choice.keep_all_bytes
    first, *others = back.plans
    assert others
    assert all(record.overhead < first.overhead for record in others)
    assert str(choice) in back.summary()
    assert "waited for their backward pass together: at most" in back.summary()
    back._live.last_steps.clear()  # the calls of the next step are not known, as in the first
    tower.zero_grad()
    x.grad = None
    gc.collect()
    assert heap_peak_bytes(step) <= choice.budget_bytes


@pytest.mark.slow
def test_a_budget_below_the_least_of_all_blocks_is_refused_with_advice_that_works():
    """Before it is exceeded; the summary states that no call ran."""
    tower, back = by_block("460KiB")
    x = batch().requires_grad_()
    found = []

    def refused():
        with pytest.raises(BudgetError, match=ADVICE) as error:
            tower(x)
        found.append(str(error.value))

    refused()
    assert heap_peak_bytes(refused) <= 460 * 1024
    assert back.summary().startswith("nothing ran, because")
    assert found[-1] in back.summary()
    assert "peak" not in back.summary().partition(found[-1])[0]
    whole = Tower()
    run, back = compiled(whole, "460KiB")  # the advice
    peak, own = peak_and_gradients(whole, lambda: run(x))
    assert same(own, of_eager(whole, x))
    (record,) = back.plans
    assert peak <= record.predicted_peak_bytes <= record.ram_budget_bytes
    assert "nothing ran" not in back.summary()


class MaskedBlock(nn.Module):
    """A layer whose mask is never drawn again, in a region of one byte."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """Return activations."""
        with pmt.region(ram=1, name="mask"):
            x = nn.functional.dropout(x, 0.5)
        return self.layer(x)


def test_regions_that_no_plan_keeps_are_refused_for_blocks_too():
    """By name, with the budget of the region."""
    torch._dynamo.reset()
    model = nn.Sequential(MaskedBlock(), MaskedBlock())
    back = pmt.backend("100%", cache=False, time_limit=2)
    for block in model:
        block.compile(backend=back, fullgraph=True, dynamic=False)
    with pytest.raises(
        BackendCompilerFailed, match=r"regions: no plan was found .* meets mask 1 B"
    ):
        model(torch.randn(ROWS, WIDTH))


@pytest.mark.slow
def test_calls_of_other_threads_change_no_choice(monkeypatch):
    """A checkpointed call, begun by another thread between the choice for a call and its pass."""
    tower, back = by_block("900KiB", outside=LOSS)
    x = batch().requires_grad_()
    for _ in range(2):
        tower(x).backward()
    step = back._live.last_step
    assert step
    choose_plan = back.choose_plan
    few = x[:128].detach()
    tower.blocks[0](few).sum().backward()
    tower(x).backward()

    def checkpointed():
        with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value):
            tower.blocks[0](few).sum().backward()

    def choose_beside(*arguments, **options):
        chosen = choose_plan(*arguments, **options)
        if not options["is_pinned"]:
            monkeypatch.undo()
            other = threading.Thread(target=checkpointed)
            other.start()
            other.join()
        return chosen

    monkeypatch.setattr(back, "choose_plan", choose_beside)
    tower(x).backward()
    numbers = [moment.number for moment in back._live.last_step if not moment.is_backward]
    assert numbers == [moment.number for moment in step if not moment.is_backward]


@pytest.mark.slow
def test_a_call_is_planned_as_such_while_another_thread_compiles(monkeypatch):
    """A first call that begins while another thread compiles a further plan of another function."""
    torch._dynamo.reset()
    back = pmt.backend("2MiB", cache=False, gap=0.5, outside=LOSS)
    model, other = Block(), Block(depth=3)
    run, run_other = (
        torch.compile(each, backend=back, fullgraph=True, dynamic=False) for each in (model, other)
    )
    x, begun = batch(), threading.Event()

    def step():
        model.zero_grad()
        (run(x) + run(x)).square().mean().backward()

    def first_call():
        run_other(x).square().mean().backward()

    thread = threading.Thread(target=first_call)
    split, correct = compiling.split_dropout, compiling.correct_fake_strides

    def split_beside(graph):
        if threading.current_thread() is not thread and not begun.is_set():
            thread.start()
            assert begun.wait(timeout=300)
        return split(graph)

    def correct_and_record(inputs):
        """Record that the thread will now wait for the end of this compilation."""
        if threading.current_thread() is thread:
            begun.set()
        return correct(inputs)

    run(x).square().mean().backward()
    monkeypatch.setattr(compiling, "split_dropout", split_beside)
    monkeypatch.setattr(compiling, "correct_fake_strides", correct_and_record)
    step()
    thread.join()
    monkeypatch.undo()
    assert begun.is_set()
    assert all(f"Block of x {ROWS}x{WIDTH}" in record.name for record in back.plans)
    for each, run_each in ((model, step), (other, lambda: None)):
        run_each()
        own = gradients(each)
        each.zero_grad()
        calls = 2 if each is model else 1
        sum(each(x) for _ in range(calls)).square().mean().backward()
        assert same(own, gradients(each))


def test_threads_that_need_one_plan_compile_it_once(monkeypatch):
    """Two calls that begin at once beside one that waits."""
    run, back = compiled(Block(), "4MiB")
    x = batch()
    waiting = [run(x)]
    choose_plan, barrier = back.choose_plan, threading.Barrier(2)

    def choose_at_once(*arguments, **options):
        chosen = choose_plan(*arguments, **options)
        barrier.wait(timeout=300)
        return chosen

    monkeypatch.setattr(back, "choose_plan", choose_at_once)
    with ThreadPoolExecutor(2) as threads:
        waiting += threads.map(run, [x, x])
    assert len(back.plans) == 2
    assert all(torch.equal(result, waiting[0]) for result in waiting)


def test_plans_after_a_step_have_the_time_of_a_call(monkeypatch):
    """The time limit of one search for a step's plans does not apply to later solves."""
    tower, back = by_block("900KiB", outside=LOSS)
    x = batch().requires_grad_()
    for _ in range(2):
        tower(x).backward()
    frontier = next(e.frontier for e in back._live.last_step if e.frontier is not None)
    ends = []
    plan_within = GraphProblem.plan_within

    def record_time(problem, *limits):
        ends.append(problem.call.until_s - time.monotonic())
        return plan_within(problem, *limits)

    monkeypatch.setattr(GraphProblem, "plan_within", record_time)
    keep_all = frontier.keep_all_plan.record.predicted_peak_bytes
    assert frontier.find_plans(keep_all, until_s=time.monotonic() - 100)
    frontier._plan_by_limits.clear()
    del frontier.tight_plan
    assert frontier.tight_plan
    assert ends[-1] > 0


def test_stating_a_problem_changes_no_captured_graph(monkeypatch):
    """Problems of one graph, with other memory between the passes, do not influence each other."""
    tower, _ = by_block("900KiB", outside=LOSS)
    stated, from_joint = [], GraphProblem.from_joint

    def record(joint, *arguments, **options):
        stated.append(from_joint(joint, *arguments, **options))
        return stated[-1]

    monkeypatch.setattr(GraphProblem, "from_joint", record)
    tower(batch().requires_grad_()).backward()
    problem = stated[0]
    outside = problem.call.outside._replace(rest_bytes=0, peak_bytes=1 << 30)
    call = replace(problem.call, outside=outside)
    graph, other = problem.joint.training_graph(), replace(problem, call=call)
    found = other.make_problem(1 << 31, saved_bytes=0).graph
    assert max(node.workspace_bytes for node in found.nodes) > 1 << 29
    assert problem.joint.training_graph() == graph


@pytest.mark.slow
def test_other_calls_than_in_the_step_before_keep_the_budget():
    """More of them, or of another shape: unexpected ones have plans that save least."""
    tower, back = by_block("900KiB", outside=LOSS)
    x = batch().requires_grad_()
    for _ in range(2):
        tower(x).backward()
    few = x[:128].detach()

    def unexpected():
        tower.blocks[1](tower.blocks[0](x)).sum().backward()
        tower(few).backward()
        tower(x).backward()

    unexpected()
    tower.zero_grad()
    x.grad = None
    gc.collect()
    assert heap_peak_bytes(lambda: tower(x).backward()) <= 900 * 1024
    assert "refused" not in back.summary()


@pytest.mark.slow
def test_a_call_without_a_choice_of_plans_may_be_dropped_beside_others():
    """A call under hooks of saved tensors, whose result is deleted without a backward pass."""
    torch._dynamo.reset()
    back = pmt.backend("95%", cache=False)

    def compile_layers(width):
        layers = (layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU()))
        return torch.compile(nn.Sequential(*layers), backend=back, fullgraph=True, dynamic=False)

    wide, narrow = compile_layers(64), compile_layers(32)
    inputs = batch(), batch()[:, :32].contiguous()
    wide(inputs[0]).sum().backward()
    narrow(inputs[1]).sum().backward()
    for _ in range(2):
        results = wide(inputs[0])
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            narrow(inputs[1])
        results.sum().backward()
    assert "refused" not in back.summary()


def drop_in_a_cycle(run, x):
    """Leave a result in an unreachable reference cycle."""
    cycle = [run(x)]
    cycle.append(cycle)


def keep_results(run, x):
    """Keep results without a way back, and one whose backward pass has run."""
    with torch.no_grad():
        kept = [run(x) for _ in range(3)]
    kept += [run(x).detach() for _ in range(3)]
    kept.append(run(x))
    kept[-1].backward()
    run(x).backward()
    return kept


def fail_midway(run, x):
    """Interrupt a backward pass by a hook of the result."""
    loss = run(x)
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()


def fail_behind(run, x):
    """Interrupt a backward pass after that of the compiled function."""
    shifted = x + 1
    shifted.register_hook(lambda _: 1 / 0)
    loss = run(shifted)
    with pytest.raises(ZeroDivisionError):
        loss.backward()


SEQUENTIAL = {
    "accumulate": lambda run, x: [run(x).backward() for _ in range(3)],
    "evaluate": lambda run, x: [torch.no_grad()(run)(x) for _ in range(3)],
    "drop": lambda run, x: [run(x), None][1],
    "drop in a cycle": drop_in_a_cycle,
    "keep results": keep_results,
    "fail midway": fail_midway,
    "fail behind": fail_behind,
    "other shape": lambda run, x: run(x[:64]).backward(),
    "checkpoint": lambda run, x: [
        checkpoint(run, x, use_reentrant=False).backward() for _ in range(2)
    ],
    "thread": lambda run, x: _in_a_thread(lambda: run(x).backward()),
}


def _in_a_thread(work):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


@pytest.mark.slow
def test_calls_one_after_another_are_never_refused():
    """At the least budget that is known, with the bits of eager."""
    model, x = Tower(1), batch().requires_grad_()

    def step(x):
        return model(x)

    run, _ = compiled(step, "1B")
    with pytest.raises(BackendCompilerFailed) as refused:
        run(x)
    least = re.search(r"ram=(\d+)", str(refused.value.inner_exception))[1]
    run, back = compiled(step, least)
    for name, use in SEQUENTIAL.items():
        found = []
        for function in (run, step):
            model.zero_grad()
            function(x).backward()
            use(function, x)
            function(x).backward()
            found.append(gradients(model))
        assert same(*found), name
        assert "call was refused" not in back.summary(), name
        assert "nothing ran" not in back.summary(), name
    assert back.plans[0].predicted_peak_bytes == int(least)


@pytest.mark.slow
def test_a_second_call_runs_when_the_first_is_over():
    """Not before its backward pass, in any thread; but once that ran or is impossible."""
    run, back = compiled(Block(), "500KiB")
    x = batch()
    run(x).sum().backward()
    waiting = fill(run, x)
    assert back.summary().splitlines()[-1].startswith("a later call was refused")
    with pytest.raises(BudgetError, match="that still need a backward pass"):
        _in_a_thread(lambda: run(x))
    for result in waiting:
        result.sum().backward()
    del result
    waiting.clear()
    assert "refused" not in back.summary()
    waiting = fill(run, x)
    del waiting
    run(x).sum().backward()
    waiting = fill(run, x)
    waiting.append(waiting)
    del waiting
    gc.disable()  # a cycle is found where it would be refused
    try:
        run(x).sum().backward()
    finally:
        gc.enable()


@pytest.mark.parametrize("ram", mark_seeds_except(["60%", "100%"], ["60%"]))
def test_a_percentage_is_of_the_step(ram):
    """Not of one call: a model called twice before its backward pass has a budget for both calls.

    An evaluation without gradients between them adds its peak, of which no percentage can be met.
    """
    model = nn.Sequential(*(Block() for _ in range(2)))
    run, back = compiled(model, ram, outside=LOSS)
    x, y = batch(), batch()

    def step():
        model.zero_grad()
        result = run(x)
        with torch.no_grad():
            assert not run(y).requires_grad
        (result - run(y)).square().mean().backward()

    for _ in range(3):
        step()
    assert "refused" not in back.summary()
    (choice,) = back._steps.choices
    assert choice.budget_bytes == int(float(ram[:-1]) / 100 * choice.keep_all_bytes)
    own = gradients(model)
    model.zero_grad()
    (model(x) - model(y)).square().mean().backward()
    assert same(own, gradients(model))


def test_a_percentage_below_the_least_of_the_first_call_is_refused_with_advice():
    """Its bytes are not known before the other calls, and a budget in bytes works."""
    x = batch()
    run, _ = compiled(Block(), "30%", outside=LOSS)
    with pytest.raises(BackendCompilerFailed, match=r"30% is of the first call alone.* bytes"):
        run(x)
    run, back = compiled(Block(), "2MiB", outside=LOSS)
    (run(x) - run(x)).square().mean().backward()
    assert back.plans


@pytest.mark.slow
def test_evaluation_counts_beside_a_call_that_waits():
    """It runs where both fit, and its results count as long as that call waits."""
    model, x = Block(), batch()
    run, back = compiled(model, "1MiB")
    waiting = run(x)
    with torch.no_grad():
        run(x)
    kept = []

    def evaluate():
        with torch.no_grad():
            for _ in range(20):
                kept.append(run(x))

    def keep():
        with pytest.raises(BudgetError, match=ADVICE):
            evaluate()

    peak = heap_peak_bytes(keep)
    assert 2 < len(kept) < 20
    held = back._graph_plans[0].peaks.held_bytes
    assert peak + held <= back.plans[0].ram_budget_bytes
    with pytest.raises(BudgetError, match=r"takes .* beside results and gradients"):
        waiting.sum().backward()
    kept.clear()
    waiting = run(x)
    waiting.sum().backward()
    with torch.no_grad():
        kept += [run(x) for _ in range(20)]


@pytest.mark.slow
def test_another_function_of_the_back_end_counts():
    """And one of another back end does not."""
    x = batch()
    torch._dynamo.reset()
    back, other = (pmt.backend("600KiB", cache=False, gap=0.5) for _ in range(2))
    first, second, third = (
        torch.compile(model, backend=own, fullgraph=True, dynamic=False)
        for model, own in ((Block(2), back), (Block(3), back), (Block(3), other))
    )
    waiting = fill(first, x)
    with pytest.raises(BudgetError, match=r"Block.* beside .* of graph 0, Block"):
        second(x)
    third(x).sum().backward()
    for result in waiting:
        result.sum().backward()
    del result
    waiting.clear()
    second(x).sum().backward()


@pytest.mark.slow
@functorch.patch(donated_buffer=False)  # PyTorch refuses it with these
def test_a_backward_pass_that_keeps_its_graph_is_counted():
    """Tensors that the plan frees stay: refused if they do not fit, else within stated bytes."""
    model, x = Tower(3), batch()
    for ram, is_refused in (("60%", True), ("4MiB", False)):
        run, back = compiled(model, ram)
        run(x).backward()
        model.zero_grad()
        loss = run(x)
        if is_refused:
            with pytest.raises(
                BudgetError, match=r"retain_graph=True takes.*call backward\(\) once"
            ):
                loss.backward(retain_graph=True)
            continue
        del loss
        own = []

        def twice(run=run, own=own):
            loss = run(x)
            loss.backward(retain_graph=True)
            own.append(gradients(model)[0])
            loss.backward()

        gc.collect()
        peaks, (record,) = back._graph_plans[0].peaks, back.plans
        peak = heap_peak_bytes(twice) - own[0].nbytes
        assert (
            record.predicted_peak_bytes
            < peak
            <= peaks.retained_bytes + sum(parameter.nbytes for parameter in model.parameters())
        )
        assert torch.equal(2 * own[0], gradients(model)[0])


class Patterns:
    """Random calls of several functions of one back end."""

    def __init__(self, seed):
        self.draw = random.Random(seed)  # noqa: S311 - a test
        torch.manual_seed(seed)
        torch._dynamo.reset()
        self.back = pmt.backend(
            self.draw.choice(("500KiB", "700KiB", "900KiB", "1300KiB")), cache=False, gap=0.5
        )
        models = Block(2), Block(3), Projection(), Block(2)
        self.functions = [
            torch.compile(model, backend=self.back, fullgraph=True, dynamic=False)
            for model in models
        ]
        self.tensors = [parameter for model in models for parameter in model.parameters()]
        self.x, self.ones = batch().requires_grad_(), torch.ones(ROWS, WIDTH)
        self.constant = self.x.detach()
        self.tensors.append(self.x)
        for function in self.functions:
            with torch.no_grad():
                function(self.constant)
            function(self.constant).backward(self.ones)
            function(self.x).backward(self.ones)
        for tensor in self.tensors:
            tensor.grad = None

    def run(self):
        """Run calls, forward and backward; return how many ran, and how many were refused."""
        counts, live, kept = [0, 0], [], []
        for _ in range(self.draw.randrange(6, 16)):
            try:
                self._act(live, kept)
            except BudgetError:
                counts[1] += 1
            except RuntimeError as error:
                assert "second time" in str(error)  # noqa: PT017 - of PyTorch
            else:
                counts[0] += 1
            self.counts = counts
            if not live:  # what was handed over before a step is not the step's
                kept.clear()
                for tensor in self.tensors:
                    tensor.grad = None
        return counts

    def _act(self, live, kept):
        function = self.draw.choice(self.functions)
        others = ("evaluate", "again", "drop")
        action = self.draw.choice(("forward",) * 4 + ("backward",) * 3 + others)
        if action == "forward":
            is_chained = live and self.draw.random() < 0.5
            live.append(function(live[-1] if is_chained else self.constant))
        elif action == "backward" and live:
            position = self.draw.randrange(len(live))
            result = live[position]
            del live[position:]
            result.backward(self.ones, retain_graph=self.draw.random() < 0.2)
        elif action == "evaluate":
            with torch.no_grad():
                kept.append(function(self.constant))
        elif action == "again":
            checkpoint(function, self.x, use_reentrant=False).backward(self.ones)
        elif action == "drop" and live:
            live.pop()


@pytest.mark.slow
@pytest.mark.parametrize("seed", mark_seeds_except(range(16), range(1)))
@functorch.patch(donated_buffer=False)  # PyTorch refuses retain_graph=True with these
def test_no_pattern_of_calls_exceeds_the_budget(seed):
    """With any calls that wait, are dropped, evaluated, checkpointed or differentiated twice."""
    patterns = Patterns(seed)
    gc.collect()
    peak = heap_peak_bytes(patterns.run)
    assert peak <= patterns.back.plans[0].ram_budget_bytes
    assert patterns.counts[0] > 0


def inductor(test):
    """Mark a test that compiles with Inductor."""
    test = pytest.mark.filterwarnings("ignore::DeprecationWarning")(test)  # what it says of PyTorch
    found = shutil.which("g++")
    return pytest.mark.slow(pytest.mark.skipif(not found, reason="Inductor: no g++ on PATH")(test))


@inductor
def test_kernels_of_inductor_are_counted_too():
    """Blocks compiled one by one, and calls without gradients, which are not planned."""
    x = batch().requires_grad_()
    tower, back = by_block("100%", kernels="inductor")
    with pytest.raises(BudgetError, match=ADVICE):
        tower(x)
    assert back.summary().startswith("nothing ran, because")
    tower, back = by_block("4MiB", kernels="inductor")
    peak, _ = peak_and_gradients(tower, lambda: tower(x))
    assert peak <= back.plans[0].ram_budget_bytes
    with torch.no_grad():
        tower(x)
    run, back = compiled(Tower(), "64KiB", kernels="inductor")
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="for a call without") as error:
        run(x)
    enough = re.search(r"ram=(\d+) is enough", str(error.value.inner_exception))[1]
    run, back = compiled(Tower(), enough, kernels="inductor")
    with torch.no_grad():
        run(x)
        gc.collect()
        assert heap_peak_bytes(lambda: run(x)) <= int(enough)
    line = r"a call without gradients, Tower of .* 256x64: peak (.*) of \1, without a plan"
    assert re.fullmatch(line, back.summary())
    assert back.was_called


@inductor
def test_a_partitioner_takes_one_graph_alone():
    """After a graph break each part would have all of the budget."""
    torch._dynamo.reset()
    split = pmt.partitioner("60%", cache=False)
    run = torch.compile(Tower(), dynamic=False)
    with (
        fresh_cache(),
        inductor_config.patch(custom_partitioner_fn=split),
        pytest.raises(BackendCompilerFailed, match="pass fullgraph=True"),
    ):
        run(batch())
    assert split.graphs.summary().startswith("nothing ran, because")


# -- plans to choose from -------------------------------------------------------------------------
def plan_with(time_s, peak_bytes, saved_bytes):
    """Return the time and the sizes of a plan, with equal peaks of both passes."""
    peaks = PassPeaks(peak_bytes, saved_bytes=saved_bytes, backward_bytes=peak_bytes)
    record = SimpleNamespace(predicted_peak_bytes=peak_bytes)
    return SimpleNamespace(time_s=time_s, peaks=peaks, record=record)


@dataclass(frozen=True)
class TwoPlans:
    """A graph with one plan that saves nothing, and one that may save tensors."""

    tight_plan: Any
    keep_all_plan: Any
    call: FirstCall

    graph = skip_graph()
    n_forward_operations = 2
    keep_all_bytes = 10
    extra_bytes = 0
    settings = SimpleNamespace(time_limit_s=60)

    def plan_within(self, peak_bytes, saved_bytes):
        """Return a plan; its peak does not depend on the limits."""
        assert peak_bytes <= self.keep_all_bytes
        return self.keep_all_plan if saved_bytes else self.tight_plan


@pytest.mark.parametrize(
    ("tight", "keep_all", "remaining"),
    [((1, 9, 5), (1, 7, 5), [7]), ((1, 7, 5), (1, 9, 5), [7]), ((2, 7, 0), (1, 9, 5), [9, 7])],
)
def test_plans_that_another_one_dominates_are_no_choice(tight, keep_all, remaining):
    """Of two plans with equal time and saved bytes only the one with the lower peak is left."""
    call = FirstCall(function=None, first_keep_all_bytes={}, until_s=inf, outside=None)
    frontier = Frontier(TwoPlans(plan_with(*tight), plan_with(*keep_all), call))
    frontier.min_peak_bytes = 7
    found = frontier.find_plans(10, inf)
    assert [plan.peaks.forward_bytes for plan in found] == remaining


@pytest.mark.parametrize("others", [[], [[plan_with(1, 2, 1)]]])
def test_there_is_no_choice_for_a_call_without_plans(others):
    """Whether the calls beside it have plans or not."""
    assert choose_plans([Moment(None, 0, False, (), 0)], [[], *others], 10) is None


def test_a_step_is_posted_when_its_bytes_change():
    """For other processes of a group; a process alone does not even read the step."""
    call = FirstCall(
        function=None, first_keep_all_bytes={}, until_s=inf, outside=None, has_concurrent_calls=True
    )
    frontier = Frontier(TwoPlans(None, None, call))
    planner, posts = StepPlanner(1.0, None), []
    step = iter([Moment(frontier, 0, True, (), 1)])
    planner.tell(step, (), SimpleNamespace(is_alone=True))
    assert next(step, None) is not None
    group = SimpleNamespace(is_alone=False, post=lambda *post: posts.append(post))
    for size in (1, 1, 2, 2, 1):
        planner.tell([Moment(frontier, 0, True, (), size)], (), group)
    assert [sizes for _, sizes in posts] == [[1], [2], [1]]
    assert len({key for key, _ in posts}) == 1
