"""The back end as users call it: its arguments, its name, and its reports."""

import io
import re
import subprocess
import sys
import time
import tomllib
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends import registry
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import poetmodel.torch as pmt
from kit.rotation import mark_seeds_except
from poetmodel.errors import BudgetError, InputError
from poetmodel.torch.dynamo import backend as backends
from poetmodel.torch.dynamo import planning, rewriting
from poetmodel.torch.graph.tensors import heap_peak_bytes
from poetmodel.torch.planning.progress import show_phases

GROUP = "torch_dynamo_backends"


def network(depth=4, width=64):
    """Return a chain of layers."""
    layers = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU()))
    return nn.Sequential(*layers, nn.Linear(width, 10))


@pytest.mark.parametrize(
    "options",
    [
        {"ram": "lots"}, {"ram": None}, {"ram": 0.6}, {"ram": True}, {"ram": "-1MiB"}, {"ram": 0},
        {"time_limit": -1}, {"time_limit": "x"}, {"gap": -3}, {"gap": None},
        {"outside": "much"},
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_when_they_are_given(options):
    """Not at the first batch, where PyTorch would wrap the error."""
    with pytest.raises(InputError, match=next(iter(options)).replace("_", " ")):
        pmt.backend(**{"ram": "60%", **options})


def test_what_was_probably_meant_is_asked():
    """A number of bytes that is a percentage; a device that is a place; all faults at once."""
    with pytest.raises(InputError, match=r"did you mean 60% or 60KiB\?"):
        pmt.backend(ram=60)
    with pytest.raises(InputError, match="times are estimated for") as refused:
        pmt.backend(ram="lots", device="cuda:0", gap=-3)
    assert len(refused.value.faults) == 3
    pmt.backend(ram="60B")


@pytest.fixture
def by_name(monkeypatch):
    """Return a function that compiles by the name that the package registers with PyTorch."""
    torch._dynamo.reset()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    ((name, value),) = project["project"]["entry-points"][GROUP].items()
    monkeypatch.setitem(registry._BACKENDS, name, EntryPoint(name, value, GROUP))
    registry.list_backends()  # PyTorch's own
    monkeypatch.delitem(registry._COMPILER_FNS, name, raising=False)
    monkeypatch.setattr(backends, "_NAMED_BACK_ENDS", [])
    yield lambda function, **given: torch.compile(
        function, backend=name, fullgraph=True, dynamic=False, **given
    )
    registry._COMPILER_FNS.pop(name, None)


def test_a_name_and_options_are_a_back_end(by_name):
    """With the bits of eager; equal options are one back end, whose records can be had."""
    model, x = network(2), torch.randn(256, 64)
    for scale in (1, 2):
        options = {"ram": "80%", "cache": False}
        by_name(lambda x, scale=scale: scale * model(x).square().mean(), options=options)(x)
    by_name(model, options={"ram": "90%", "cache": False})(x).square().mean().backward()
    names = [record.name for record in pmt.plans()]
    assert [name.partition(",")[0] for name in names] == ["graph 0", "graph 1", "graph 0"]
    assert re.search(r"<lambda> \(test_backend_options\.py:\d+\) of x 256x64$", names[0])
    assert "Sequential of args[0] 256x64" in names[-1]
    assert pmt.summary().splitlines() == list(map(str, pmt.plans()))
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"options": {"ram": "lots"}}, "ram: expected a size"),
        ({"options": {"rams": "60%"}}, "rams: unknown key; did you mean ram"),
        ({}, "expected a budget"),
        ({"mode": "reduce-overhead"}, "mode: "),
    ],
)
def test_wrong_options_of_the_name_are_refused(by_name, given, told):
    """When PyTorch hands them over."""
    with pytest.raises(BackendCompilerFailed, match=told) as refused:
        by_name(nn.Linear(4, 4), **given)(torch.randn(2, 4))
    assert isinstance(refused.value.inner_exception, InputError)
    assert pmt.plans() == []


def compiled(model, back):
    """Return a compiled function of a batch, whose result is a loss."""
    torch._dynamo.reset()
    return torch.compile(
        lambda x: model(x).square().mean(), backend=back, fullgraph=True, dynamic=False
    )


@pytest.mark.slow
def test_a_percentage_is_of_the_first_shape(caplog):
    """The same bytes for all later ones; if all was kept, it still is.

    Another function has a budget of its own, and evaluation has that of its peak.
    """
    back, model = pmt.backend("80%", cache=False, gap=0.5), network()
    step = compiled(model, back)
    for rows in (256, 64, 320):
        step(torch.randn(rows, 64)).backward()
    with torch.no_grad():
        step(torch.randn(320, 64))
    compiled(network(3), back)(torch.randn(128, 64)).backward()
    first, smaller, larger, evaluated, other = back.plans
    assert first.ram_budget_bytes == smaller.ram_budget_bytes == larger.ram_budget_bytes
    assert smaller.keep_all_bytes < first.ram_budget_bytes < first.keep_all_bytes
    assert larger.recomputed > first.recomputed > 0 == smaller.recomputed
    assert evaluated.ram_budget_bytes == evaluated.keep_all_bytes
    assert other.ram_budget_bytes == int(0.8 * other.keep_all_bytes)
    back = pmt.backend("100%", cache=False)
    step = compiled(model, back)
    with torch._dynamo.config.patch(recompile_limit=2):
        step(torch.randn(64, 64))
        assert "pad batches" not in caplog.text
        step(torch.randn(128, 64))
    assert "pad batches to few lengths" in caplog.text
    assert [record.recomputed for record in back.plans] == [0, 0]


def test_the_time_limit_is_that_of_the_whole_call(monkeypatch):
    """The solver has only the remaining time; a refusal needs little more."""
    limits, now, solve = [], [0.0], planning.solve

    def solved(problem, *, time_limit, **options):
        limits.append(time_limit)
        now[0] += time_limit
        return replace(solve(problem, time_limit=time_limit, **options), schedule=None)

    monkeypatch.setattr(planning, "monotonic", lambda: now[0])
    monkeypatch.setattr(planning, "solve", solved)
    monkeypatch.setattr(rewriting, "monotonic", lambda: now[0] - 5.0)
    with pytest.raises(BackendCompilerFailed, match="no schedule was found in time"):
        compiled(network(2), pmt.backend("80%", cache=False, time_limit=20))(torch.randn(256, 64))
    assert limits[0] <= 15.0
    assert sum(limits) < 18.0  # a refusal is allowed some seconds of its own


def test_a_terminal_shows_what_takes_long(monkeypatch):
    """The progress is shown after some time, and not before."""
    written = io.StringIO()
    written.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", written)
    with show_phases(after_s=60.0) as tell:
        tell("solving")
    assert written.getvalue() == ""
    with show_phases() as tell:
        tell("solving")
        time.sleep(0.5)
    assert "solving" in written.getvalue()


@pytest.mark.parametrize(
    "outside",
    [
        pytest.param(None, marks=pytest.mark.slow),
        "auto",
        pytest.param("700KiB", marks=pytest.mark.slow),
    ],
)
def test_a_loss_outside_is_told_or_counted(outside, caplog):
    """Its memory between both passes is reserved, as given or measured in the first step.

    Then the budget holds, with eager's bits; the peak is that of a function with its loss.
    """
    torch._dynamo.reset()
    model, x, y = network(), torch.randn(256, 64), torch.randint(0, 300, (256,))
    model[-1] = nn.Linear(64, 300)
    inside, back = pmt.backend("75%", cache=False), pmt.backend("75%", cache=False, outside=outside)

    def compile_(function, back):
        return torch.compile(function, backend=back, fullgraph=True, dynamic=False)

    run = compile_(lambda x: model(x), back)  # noqa: PLW0108 - a bare Sequential is not compiled
    compile_(lambda x: functional.cross_entropy(model(x), y), inside)(x)
    assert "not counted" not in caplog.text

    def once(run=run):
        functional.cross_entropy(run(x), y).backward()

    def gradients(run):
        model.zero_grad()
        once(run)
        return [parameter.grad.clone() for parameter in model.parameters()]

    for _ in range(2):
        once()
    model.zero_grad()
    peak = heap_peak_bytes(once)
    (record,), (whole,) = back.plans, inside.plans
    if outside is None:
        assert peak > record.ram_budget_bytes
        assert caplog.text.count("not counted; compile the function that returns the loss") == 1
        assert "not counted" in back.summary()
    else:
        assert peak <= record.predicted_peak_bytes <= record.ram_budget_bytes
        assert record.keep_all_bytes == pytest.approx(whole.keep_all_bytes, rel=0.2)
        assert "between forward and backward pass" in back.summary()
        assert "not counted" not in back.summary()
    if outside == "auto":
        assert "the first step, which may exceed" in caplog.text
        assert record.keep_all_bytes == pytest.approx(whole.keep_all_bytes, rel=0.01)
        assert record.predicted_peak_bytes <= 1.05 * peak
    assert all(map(torch.equal, gradients(run), gradients(model)))


POLICIES = [
    ({"addmm": CheckpointPolicy.MUST_SAVE}, "75%", {"addmm": (3, 3), "gelu": (4, 6)}),
    ({"addmm": CheckpointPolicy.MUST_RECOMPUTE}, "100%", {"addmm": (6, 6), "gelu": (3, 3)}),
    pytest.param(
        {"gelu": CheckpointPolicy.PREFER_RECOMPUTE},
        "100%",
        {"addmm": (3, 3), "gelu": (3, 3)},
        marks=pytest.mark.slow,
    ),
    ({"addmm": CheckpointPolicy.PREFER_SAVE}, "62%", {"addmm": (4, 6), "gelu": (3, 6)}),
    ({"addmm": getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", None)}, "75%", None),
]
"""Policies by operator, a budget, and how often operators then run, at least and at most."""


@pytest.mark.parametrize(("policies", "ram", "expected"), POLICIES)
def test_policies_of_selective_checkpoints_bind(policies, ram, expected):
    """Those that must; the plan chooses where a policy prefers."""

    def policy(_context, operator, *_arguments, **_keywords):
        name = operator.overloadpacket.__name__
        return policies.get(name, CheckpointPolicy.PREFER_RECOMPUTE)

    contexts = partial(create_selective_checkpoint_contexts, policy)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
    model, x = nn.ModuleList(layers), torch.randn(256, 64)

    def step(x, own=lambda layer, x: layer(x)):
        for layer in model:
            x = own(layer, x)
        return x.square().mean()

    def checkpointed(x):
        return step(x, lambda *given: checkpoint(*given, use_reentrant=False, context_fn=contexts))

    torch._dynamo.reset()
    back = pmt.backend(ram, cache=False, gap=0.001)
    run = torch.compile(checkpointed, backend=back, fullgraph=True, dynamic=False)
    if expected is None:
        with pytest.raises(BackendCompilerFailed, match="MUST_CPU_OFFLOAD"):
            run(x)
        return
    run(x).backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    step(x).backward()
    assert all(map(torch.equal, found, (parameter.grad for parameter in model.parameters())))
    with torch.profiler.profile() as seen:
        run(x).backward()
    counts = Counter(event.name.removeprefix("aten::") for event in seen.events())
    for name, (least, most) in expected.items():
        assert least <= counts[name] <= most


@pytest.mark.slow
def test_results_beside_the_loss_may_lead_nowhere_back():
    """Then they have no gradients of zeros, and one that reaches them is an error."""
    model, x = network(), torch.randn(256, 64)
    model[-1] = nn.Linear(64, 300)
    y = torch.randint(300, (256,))

    def outputs(x):
        logits = model(x)
        return {"loss": functional.cross_entropy(logits, y), "logits": logits}

    def compiled_outputs(*, loss_only):
        torch._dynamo.reset()
        back = pmt.backend("100%", cache=False, loss_only=loss_only)
        return back, torch.compile(outputs, backend=back, fullgraph=True, dynamic=False)

    found = []
    for loss_only in (False, True):
        back, run = compiled_outputs(loss_only=loss_only)
        model.zero_grad()
        results = run(x)
        assert torch.equal(results["logits"], model(x))
        results["loss"].backward()
        del results
        found += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        peak = heap_peak_bytes(lambda run=run: run(x)["loss"].backward())
        found.append(back.plans[0].predicted_peak_bytes)
        assert peak <= found[-1]
    half = len(found) // 2
    assert all(torch.equal(a, b) for a, b in zip(found[: half - 1], found[half:-1], strict=True))
    assert found[-1] <= found[half - 1] - 4 * 256 * 300
    with pytest.raises(pmt.CaptureError, match=r"loss_only: a gradient of shape \(256, 300\)"):
        run(x)["logits"].sum().backward()
    with torch.no_grad():
        assert not run(x)["logits"].requires_grad


@pytest.mark.slow
def test_what_is_outside_is_measured_in_the_first_step_that_is_gone_back_through():
    """Not during profiling, not without gradients, and not without a backward pass."""
    model, x = network(), torch.randn(256, 64)
    torch._dynamo.reset()
    back = pmt.backend("100%", cache=False, outside="auto")
    run = torch.compile(lambda x: model(x).square(), backend=back, fullgraph=True, dynamic=False)
    run(x)
    with torch.profiler.profile():
        run(x).mean().backward()
    for _ in range(2):
        run(x)  # which nobody goes back through
    with torch.no_grad():
        run(x)
    assert [record.outside_bytes for record in back.plans] == [None, None]
    for _ in range(2):
        run(x).mean().backward()
    assert [record.outside_bytes is None for record in back.plans] == [False, True]


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_measurement_gives_way_to_others(fails):
    """After a first call that fails, no profiler is on; after one alone, others may measure."""
    torch._dynamo.reset()
    table, layer = nn.Embedding(10, 64), nn.Linear(64, 64)
    back = pmt.backend("100%", cache=False, outside="auto")
    run = torch.compile(lambda i: layer(table(i)), backend=back, fullgraph=True, dynamic=False)
    rows = torch.full((32,), 99 if fails else 9)
    if fails:
        with pytest.raises(IndexError):
            run(rows)
        with torch.profiler.profile():
            torch.ones(3)
    else:
        run(rows)
    assert heap_peak_bytes(lambda: torch.ones(1 << 10)) >= 1 << 12
    for _ in range(2):
        run(torch.zeros_like(rows)).mean().backward()
    assert [record.outside_bytes is None for record in back.plans] == [False]


@pytest.mark.slow
def test_measurements_of_memory_write_no_lines():
    """PyTorch's profiler prints messages, which are suppressed without a request."""
    source = (
        "import torch\n"
        "from poetmodel.torch.graph.tensors import heap_peak_bytes\n"
        "assert heap_peak_bytes(lambda: torch.ones(1024)) >= 4096\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    assert (found.stdout, found.stderr) == ("", "")


def test_the_peak_of_eager_includes_measured_memory_outside():
    """The second step plans the graph again, with a budget that includes this memory."""
    model, x = network(1), torch.randn(256, 64)
    torch._dynamo.reset()
    back = pmt.backend("eager", cache=False, outside="auto")
    run = torch.compile(model, backend=back, fullgraph=True, dynamic=False)
    budgets = []
    for _ in range(2):
        run(x).square().mean().backward()
        budgets.append(back.plans[0].ram_budget_bytes)
    (record,) = back.plans
    assert record.outside_bytes > 0
    assert record.predicted_peak_bytes <= record.ram_budget_bytes == record.keep_all_bytes
    assert budgets[0] <= budgets[1]


class Checkpointed(nn.Module):
    """Blocks that checkpoint themselves."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(network(2) for _ in range(5))
        self.ends = nn.ModuleList(nn.Linear(10, 64) for _ in range(5))

    def forward(self, x):
        """Return a loss."""
        for block, end in zip(self.blocks, self.ends, strict=True):
            x = checkpoint(
                lambda x, block=block, end=end: x + end(block(x)), x, use_reentrant=False
            )
        return x.square().mean()


@pytest.mark.slow
def test_a_model_that_checkpoints_itself_takes_no_more_than_by_itself(caplog):
    """With ``eager``; a percentage is of keep-all, which the report states."""
    model, x = Checkpointed(), torch.randn(256, 64)

    def peak_bytes(run):
        run(x).backward()
        model.zero_grad()
        peak = heap_peak_bytes(lambda: run(x).backward())
        model.zero_grad()
        return peak

    eager, peaks, records = peak_bytes(model), [], []
    for ram in ("eager", "80%"):
        torch._dynamo.reset()
        back = pmt.backend(ram, cache=False)
        peaks.append(peak_bytes(torch.compile(model, backend=back, fullgraph=True, dynamic=False)))
        records += back.plans
        assert (ram == "80%") == ("its model checkpoints itself" in caplog.text)
    assert peaks[0] <= records[0].ram_budget_bytes == records[0].eager_bytes
    assert 0.9 * eager <= records[0].eager_bytes <= eager
    assert records[1].ram_budget_bytes > records[1].eager_bytes == records[0].eager_bytes
    plain = pmt.backend("eager", cache=False)
    compiled(network(), plain)(x)
    assert plain.plans[0].ram_budget_bytes == plain.plans[0].keep_all_bytes
    assert plain.plans[0].eager_bytes is None


@pytest.mark.slow
def test_a_refusal_says_what_the_budget_is_for():
    """Gradients that are handed over, results and their gradients, and inputs by name."""
    torch._dynamo.reset()
    model, x = network(), torch.randn(4, 64)
    back = pmt.backend("50%", cache=False)
    with pytest.raises(BackendCompilerFailed) as refused:
        torch.compile(lambda x: -model(x), backend=back, fullgraph=True, dynamic=False)(x)
    gradients = 4 * sum(parameter.numel() for parameter in model.parameters())
    text = str(refused.value.inner_exception)
    assert "320 B of it are reserved: 160 B results + 160 B their gradients" in text
    assert f"returned gradients take {gradients:,} B" in text
    assert re.match(r"ram: [\d.]+ KiB \(50%\) is too little", text)
    enough = re.search(r"ram=(\d+) \(([\d.]+)%\)", text)
    torch._dynamo.reset()
    for ram in (int(enough[1]), f"{enough[2]}%"):
        torch._dynamo.reset()
        again = pmt.backend(ram, cache=False)
        torch.compile(lambda x: -model(x), backend=again, fullgraph=True, dynamic=False)(x)
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match=r"batch\.size\(\)\[0\]: its sizes are unknown"):
        torch.compile(lambda batch: -model(batch), backend=back, fullgraph=True, dynamic=True)(x)


def test_a_refusal_says_what_is_for_others():
    """Reserved memory for outer tensors counts in the minimum budget, too."""
    torch._dynamo.reset()
    told = "between both passes 1,048,576 B are for memory outside of the function"
    back = pmt.backend("256KiB", cache=False, outside="1MiB")
    with pytest.raises(BackendCompilerFailed, match=told):
        compiled(network(1), back)(torch.randn(64, 64))


def test_a_size_from_values_is_refused_with_its_line():
    """And with the way in that can train it."""
    torch._dynamo.reset()
    layer = nn.Linear(8, 8)

    def loss(x, lengths):
        longest = int(lengths.max())
        mask = torch.arange(longest).expand(2, longest) >= lengths[:, None]
        return layer(x).masked_fill(mask[..., None], 0).square().mean()

    run = torch.compile(
        loss, backend=pmt.backend("100%", cache=False), fullgraph=True, dynamic=False
    )
    told = r"test_backend_options\.py:\d+ \(longest = int\(lengths.max\(\)\)\).*use pmt\.compile"
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(BackendCompilerFailed, match=told) as refused,
    ):
        run(torch.randn(2, 6, 8), torch.tensor([6, 4]))
    assert isinstance(refused.value.inner_exception, pmt.CaptureError)


class TwoParts(nn.Module):
    """An encoder, and a decoder that may have a budget of its own."""

    def __init__(self, block=None, dropout=0.0):
        super().__init__()
        self.encoder, self.decoder = network(2, 32)[:-1], network(2, 32)[:-1]
        self.block, self.dropout = block or nullcontext, nn.Dropout(dropout)

    def forward(self, x):
        """Return a loss."""
        for layer in self.encoder:
            x = layer(x)
        with self.block():
            for layer in self.decoder:
                x = layer(x)
            x = self.dropout(x)
        return x.square().mean()


def saved_bytes(run, x, model):
    """Return the additional bytes that a forward pass leaves for the backward pass."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters())}
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run(x)
    assert kept.requires_grad
    return sum(sizes.values())


@pytest.mark.slow
def test_regions_keep_budgets_of_their_own():
    """By names of modules, and inside of a model; with eager's bits, and proved."""
    x = torch.randn(256, 32)

    def budgeted():
        return pmt.region(ram="50%", name="decoding")

    plain, marked = TwoParts(), TwoParts(budgeted)
    marked.load_state_dict(plain.state_dict())
    results = {}
    for name, model, regions in (
        ("none", plain, None), ("modules", plain, {"encoder.*": "50%"}), ("block", marked, None),
        ("both", marked, {"encoder.*": "50%"}),
    ):  # fmt: skip
        torch._dynamo.reset()
        back = pmt.backend("100%", cache=False, regions=regions, device="rpi4b")
        run = torch.compile(model, backend=back, fullgraph=True, dynamic=False)
        results[name] = saved_bytes(run, x, model)
        model.zero_grad()
        run(x).backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        plain.zero_grad()
        plain(x).backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(found, plain.parameters(), strict=True))
        (record,) = back.plans
        assert len(record.regions) == (regions is not None) + (model is marked)
        assert ("for the backward pass" in back.summary()) == bool(record.regions)
        assert record.status == "optimal"
        assert (record.recomputed > 0) == bool(record.regions)
    assert results["both"] < min(results["modules"], results["block"]) < results["none"]


def annotated(**budget):
    """Return what makes a block with an annotation of its operations."""
    return lambda: torch.fx.traceback.annotate(budget)


PYTORCH_BUDGETS = {"annotated": annotated(memory_budget=0.5)}
if hasattr(torch.autograd.graph, "region_activation_memory_budget"):
    PYTORCH_BUDGETS["stated"] = lambda: torch.autograd.graph.region_activation_memory_budget(0.5)


def plan_of_block(block):
    """Return the record of a plan of a model whose decoder is in a block."""
    torch._dynamo.reset()
    back = pmt.backend("100%", cache=False, device="rpi4b")
    run = torch.compile(TwoParts(block), backend=back, fullgraph=True, dynamic=False)
    run(torch.randn(256, 32)).backward()
    torch._dynamo.reset()
    (record,) = back.plans
    return record


@pytest.fixture(scope="module")
def plan_of_region():
    """Return the record of a plan with a region of half of what it makes."""
    return plan_of_block(lambda: pmt.region(ram="50%"))


@pytest.mark.parametrize("block", PYTORCH_BUDGETS.values(), ids=PYTORCH_BUDGETS)
def test_memory_budgets_of_pytorch_are_regions(block, plan_of_region):
    """A fraction keeps what `region` keeps with the percentage."""
    found = plan_of_block(block)
    assert found.regions == (plan_of_region.regions[0].replace("region", "memory_budget 0.5"),)
    assert found.recomputed == plan_of_region.recomputed > 0


@pytest.mark.parametrize(
    "value", mark_seeds_except([1.5, "50%", -0.1, True], [1.5], ["50%", -0.1, True])
)
def test_memory_budgets_that_are_no_fraction_are_refused(value):
    """With what a fraction is of, and how a size is stated."""
    torch._dynamo.reset()
    model = TwoParts(annotated(memory_budget=value))
    run = torch.compile(model, backend=pmt.backend("100%"), fullgraph=True, dynamic=False)
    words = "memory_budget: expected a fraction from 0 to 1"
    with pytest.raises(BackendCompilerFailed, match=words) as refused:
        run(torch.randn(256, 32))
    assert isinstance(refused.value.inner_exception, BudgetError)


@pytest.mark.slow
def test_a_large_graph_has_a_bound_of_what_is_computed_again():
    """And a schedule that keeps its regions, found without a model of its rows."""
    torch._dynamo.reset()
    model = TwoParts()
    model.encoder = network(30, 32)[:-1]
    back = pmt.backend(
        "100%", cache=False, regions={"encoder.*": "50%"}, device="rpi4b", time_limit=2
    )
    run = torch.compile(model, backend=back, fullgraph=True, dynamic=False)
    run(torch.randn(256, 32)).backward()
    (record,) = back.plans
    assert record.recomputed > 0
    assert record.gap < 0.5


def test_a_region_has_what_regions_inside_of_it_make():
    """Of each name one budget, whichever is the innermost."""
    x = torch.randn(256, 32)

    @contextmanager
    def nested():
        with pmt.region(ram="40KiB", name="outer"), pmt.region(ram="32KiB", name="inner"):
            yield

    back = pmt.backend("100%", cache=False, device="rpi4b")
    torch.compile(TwoParts(nested), backend=back, fullgraph=True, dynamic=False)(x).backward()
    (record,) = back.plans
    assert {told.split()[0] for told in record.regions} == {"outer", "inner"}


def test_a_region_may_keep_nothing():
    """Also if the first operation of the backward pass reads its results."""
    first, region = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    back = pmt.backend("2MiB", cache=False, regions={"1.*": "0%"})
    model = nn.Sequential(first, region)
    run = torch.compile(lambda x: model(x).sum(), backend=back, fullgraph=True, dynamic=False)
    run(torch.randn(256, 64)).backward()
    assert "0 B of 0 B" in back.summary()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN's kernels")
def test_an_lstm_by_onednn_is_refused():
    """The error has a remedy: its kernel cannot run apart from its graph."""
    rnn = nn.LSTM(8, 8, batch_first=True)
    run = torch.compile(
        lambda x: rnn(x)[0].sum(), backend=pmt.backend("100%"), fullgraph=True, dynamic=False
    )
    allowed = torch._dynamo.config.patch(allow_rnn=True)
    with allowed, pytest.raises(BackendCompilerFailed, match=r"mkldnn\.enabled = False"):
        run(torch.randn(2, 3, 8))


def test_a_summary_says_that_nothing_was_compiled():
    """As where PyTorch leaves a frame to Python."""
    assert "no graph was compiled" in pmt.backend("1%").summary()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"regions": ["encoder"]}, "expected budgets by module"),
        ({"regions": {"encoder.*": "much"}}, "expected a size"),
        ({"regions": {"encoder.*": "1MiB"}, "kernels": "inductor"}, "regions: needs kernels"),
    ],
)
def test_wrong_budgets_of_regions_are_refused(given, told):
    """At their construction."""
    with pytest.raises(InputError, match=told):
        pmt.backend("60%", **given)


@pytest.mark.parametrize(
    ("regions", "told"),
    [
        ({"encodr.*": "1MiB"}, r"encodr.* is no module that makes a tensor; modules are .*encoder"),
        ({"dropout": "1B"}, "no plan was found for graph 0.* that meets dropout 1 B"),
    ],
)
def test_regions_that_cannot_be_kept_are_refused(regions, told):
    """A name that is none; a mask that is never drawn again."""
    torch._dynamo.reset()
    back = pmt.backend("100%", cache=False, regions=regions, time_limit=5)
    run = torch.compile(TwoParts(dropout=0.5), backend=back, fullgraph=True, dynamic=False)
    with pytest.raises(BackendCompilerFailed, match=told) as refused:
        run(torch.randn(256, 32))
    assert isinstance(refused.value.inner_exception, InputError)
