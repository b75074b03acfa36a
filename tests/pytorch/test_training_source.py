"""Whole steps as they run, state in RAM and on storage: every bit is eager's, memory as planned."""

import copy
import errno
import gc
import os
import re
from dataclasses import replace
from random import Random

import pytest
import torch

import poetmodel as pm
from kit.eager_steps import compile_keep_all
from kit.networks import ARCHITECTURES, Transformer, residual_step
from kit.optimizer_steps import ADAMW, OPTIMIZERS, Twins, make_runner, plan_in_order
from kit.pages import read_page
from kit.patience import make_system_fault
from kit.rotation import mark_seeds_except
from kit.storage_peaks import storage_peak_bytes
from kit.traced_models import STEPS, residual, row_step
from poetmodel.errors import BudgetError
from poetmodel.graph import Phase
from poetmodel.heuristics.greedy import page_everything
from poetmodel.schedule.relations import checkpoint_all
from poetmodel.torch import CaptureError, PageError
from poetmodel.torch.state.file import StateFile
from poetmodel.torch.state.store import StateStore
from poetmodel.torch.step.scheduled import min_budget_bytes

nn = torch.nn


QUICK = (
    ("amsgrad", None), ("adam, foreach", 0.1), ("nadam", None), ("rmsprop, centered", None),
    ("adagrad, decay", None),
)  # fmt: skip
"""Optimizers and norms of gradients that the quick tests try; those with SGD are slow."""
MEASURED = ("sgd", "nesterov", "adam", "nadam, foreach", "rmsprop", "rmsprop, momentum", "adagrad")
"""Optimizers whose memory is measured."""


UPDATES = [("residual", name, clip) for name in OPTIMIZERS for clip in (None, 0.1)]
KINDS = [(name, "adamw", 0.2) for name in (*STEPS, *ARCHITECTURES) if name != "residual"]


@pytest.mark.parametrize(
    ("step", "name", "clip"),
    [
        *mark_seeds_except(
            UPDATES,
            [("residual", *each) for each in QUICK],
            slow=[
                ("residual", *each) for each in (("adam", 0.1), ("sgd", None), ("nesterov", 0.1))
            ],
        ),
        *mark_seeds_except(KINDS, (), slow=KINDS[::12]),
    ],
)
def test_every_optimizer_and_step_updates_as_eager(step, name, clip):
    """After each of three steps loss, parameters, buffers and moments are eager's, bit for bit.

    So it is for steps of all kinds, with weights that are tied, frozen, unused or changed.
    """
    twins = Twins((ARCHITECTURES | STEPS)[step](), OPTIMIZERS[name], clip=clip)
    traced = twins.trace(measure_workspace=False)
    assert not twins.find_differences(traced, make_runner(traced))


def with_recomputations(graph, random, share):
    """Yield nodes in order, some inputs computed again before they are read."""
    replaced = set()

    def needed(k, depth):
        for i in graph.inputs_of[k]:
            maker = graph.nodes[graph.node_of[i]]
            stale = replaced.intersection(graph.inputs_of[graph.node_of[i]])
            if depth and maker.recomputable and not stale and random.random() < share:
                yield from needed(graph.node_of[i], depth - 1)
        yield k

    state_of = {new: old for old, new in graph.replacement_of.items()}
    for k in range(len(graph.nodes)):
        yield from needed(k, 2)
        replaced |= {state_of[i] for i in graph.outputs_of[k] if i in state_of}


@pytest.mark.parametrize("name", mark_seeds_except(ARCHITECTURES, ("residual",), ("transformer",)))
def test_recomputing_changes_no_bit(name):
    """Programs that recompute random operations have the same updates."""
    twins = Twins(ARCHITECTURES[name](), OPTIMIZERS["nesterov"], clip=0.5)
    traced = twins.trace(measure_workspace=False)
    for seed in range(2):
        computed = list(with_recomputations(traced.graph, Random(seed), 0.4))  # noqa: S311
        assert len(computed) > 1.1 * len(traced.graph.nodes)
        plan = plan_in_order(traced.graph, computed)
        assert not twins.find_differences(traced, make_runner(traced, plan), steps=2)


def peak_beside(graph, schedule):
    """Return the peak of the simulator, minus the memory before the step."""
    there = (Phase.STATE, Phase.INPUT)
    nothing = {t.name for node in graph.nodes if node.phase in there for t in node.outputs}
    nodes = [
        replace(
            node,
            outputs=tuple(
                replace(t, bytes=0) if t.name in nothing or t.replaces in nothing else t
                for t in node.outputs
            ),
        )
        for node in graph.nodes
    ]
    simulation = pm.simulate(replace(graph, nodes=tuple(nodes)), None, schedule)
    assert simulation.valid
    return simulation.peak_ram_bytes


def wide():
    """Return a step whose largest tensors are activations that die at once."""

    def through(parts, x):
        return (parts[0](x) * 2 + 1).neg()

    step = row_step(nn.Linear(8, 8, bias=False), by=through)
    return step[0], lambda y, t: (y * t).sum(), (torch.randn(512, 8), torch.randn(512, 8))


def deep():
    """Return a step whose largest tensors are gradients of weights."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    return model, nn.functional.mse_loss, (torch.randn(2, 64), torch.randn(2, 64))


@pytest.mark.parametrize(
    ("name", "clip"),
    mark_seeds_except(
        [(name, clip) for name in MEASURED for clip in (None, 0.1)],
        [("adam", None), ("rmsprop, momentum", 0.1)],
        [("nadam, foreach", None), ("nesterov", 0.1)],
    ),
)
@pytest.mark.parametrize("make", [wide, deep])
def test_memory_is_what_the_simulator_says(make, name, clip):
    """The peak of the tensors of a step is the simulator's, operators in place included."""
    twins = Twins(make(), OPTIMIZERS[name], clip=clip)
    traced = twins.trace(measure_workspace=False)
    run = make_runner(traced)
    assert not twins.find_differences(traced, run, steps=1)  # moments are there afterwards
    held = twins.optimizers[0].state_dict()["state"].values()
    known = [*twins.model.parameters(), *twins.inputs]
    known += [value for moments in held for value in moments.values()]
    flat = traced.joint.flat_inputs(twins.inputs)
    measured = storage_peak_bytes(lambda: run(flat), known)
    promised = peak_beside(traced.graph, checkpoint_all(traced.graph))
    # Beside it: the loss and what is a number, such as learning rate, tangent, and norms.
    assert promised <= measured <= promised + 64
    if make is wide:
        nodes = tuple(replace(node, in_place=()) for node in traced.graph.nodes)
        graph = replace(traced.graph, nodes=nodes)
        assert peak_beside(graph, checkpoint_all(graph)) > 1.9 * promised


CHANGES = {
    "rule": (lambda t: t.optimizers[0].param_groups[0].update(momentum=0.5),
        "its groups or their settings have changed"),
    # As an eager step leaves them.
    "gradients": (lambda t: t.loss_fn(t.model(*t.inputs[:-1]), t.inputs[-1]).backward(),
        "already has a gradient.*zero_grad"),
    "parameter": (lambda t: setattr(t.model[0], "weight", nn.Parameter(torch.zeros(4, 4))),
        "parameter 0.weight is another tensor now"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_what_the_updates_do_not_hold_for_is_refused(kind):
    """If eager would compute other updates now, a step raises an error, without changes."""
    change, message = CHANGES[kind]
    twins = Twins(row_step(nn.Linear(4, 4)), OPTIMIZERS["momentum"])
    traced = twins.trace(measure_workspace=False)
    run = make_runner(traced)
    change(twins)
    before = {key: value.clone() for key, value in twins.model.state_dict().items()}
    with pytest.raises(CaptureError, match=message):
        run(traced.joint.flat_inputs(twins.inputs))
    after = twins.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not twins.optimizers[0].state


def test_schedulers_of_the_learning_rate_go_with_steps():
    """A scheduler sees that the optimizer has made a step, and its learning rate counts."""
    twins = Twins(row_step(nn.Linear(4, 4)), OPTIMIZERS["sgd"])
    traced = twins.trace(measure_workspace=False)
    run = make_runner(traced)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in twins.optimizers]
    for _ in range(2):
        assert not twins.find_differences(traced, run, steps=1)
        for scheduler in schedulers:
            scheduler.step()  # warnings are errors


def test_a_failing_step_says_that_updates_may_be_torn():
    """An error in the middle of a step states that some parameters may be updated already."""
    twins = Twins(row_step(nn.Linear(4, 4)), OPTIMIZERS["sgd"])
    traced = twins.trace(measure_workspace=False)
    run = make_runner(traced)
    run.program = replace(run.program, function=_failing)
    with pytest.raises(MemoryError) as caught:
        run(traced.joint.flat_inputs(twins.inputs))
    assert "may have been updated" in caught.value.__notes__[0]


def _failing(*_):
    raise MemoryError


# -- compiled steps --------------------------------------------------------------------------------
def large(name, clip=None):
    """Return a step whose activations need more than its state and workspaces."""
    torch.manual_seed(1)
    return Twins(residual_step(batch=16, size=16), OPTIMIZERS[name], clip=clip)


WAYS = {
    "everything": {},
    "recomputing": {"ram": "80%"},
    "paging": {"ram": "60%", "recompute": False, "storage": "pages"},
    "both": {"ram": "55%", "storage": "pages"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    mark_seeds_except([(n, w) for n in ("nesterov", "adamw") for w in WAYS],
             [("adamw", "both"), ("nesterov", "recomputing")]),
)  # fmt: skip
def test_steps_keep_the_budget_and_are_eagers(name, way, tmp_path, monkeypatch):
    """Measured memory is within a budget that counts everything; every step is eager's."""
    monkeypatch.chdir(tmp_path)
    twins = large(name, clip=0.5)
    with twins.compile(**WAYS[way], time_limit=10) as step:
        certificate = step.verify()
        assert certificate.equal, certificate.summary()
        assert certificate.within_budget, certificate.summary()
        assert certificate.heap_peak_bytes <= step.compiled.peak_bytes
        assert "(loss, parameters, optimizer state, buffers)" in certificate.summary()
        program = step.plan.program
        assert ("paging" in way or way == "both") == bool(certificate.written_bytes)
        nodes = len(step.compiled.scheduled.graph.nodes)
        recomputed = sum(op == "compute" for op, _ in program) - nodes
        assert step.report()["plan"]["recomputed"] == recomputed
        assert recomputed > 0 or way != "recomputing"
        assert not twins.find_compiled_differences(step)


def test_tied_weights_and_dropout_train_as_eager():
    """So does a transformer with a tied weight, with costs that are measured here."""
    twins = Twins(tied(), OPTIMIZERS["adam"])
    step = twins.compile(device=None)
    assert step.verify().equal
    assert not twins.find_compiled_differences(step)


@pytest.mark.parametrize(
    "name",
    mark_seeds_except(["nesterov", "adamw", "rmsprop"], ["adamw"], ["nesterov", "rmsprop"]),
)
def test_numbers_that_updates_multiply_with_count(name):
    """Where the update of the largest parameter is the peak, it is kept to the byte."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    own = model, nn.functional.mse_loss, (torch.randn(4, 16), torch.randn(4, 4))
    step = Twins(own, OPTIMIZERS[name]).compile()
    assert step.verify().heap_peak_bytes <= step.compiled.peak_bytes == step.budget_bytes


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Muon(p, lr=0.1),
        pytest.param(
            lambda p: torch.optim.Muon(p, lr=0.1, nesterov=False, adjust_lr_fn="match_rms_adamw"),
            marks=pytest.mark.slow,
        ),
        OPTIMIZERS["adam, fused"],
        pytest.param(OPTIMIZERS["sgd, fused"], marks=pytest.mark.slow),
    ],
    ids=["muon", "muon, plain", "adam, fused", "sgd, fused"],
)
def test_what_kernels_of_updates_take_counts(make):
    """Matrices in half precision, and copies of gradients that lie as a transposed parameter."""
    model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.ReLU(), nn.Linear(64, 24, bias=False))
    for parameter in model.parameters():
        parameter.data = parameter.data.t().contiguous().t()
    own = model, nn.functional.mse_loss, (torch.randn(4, 16), torch.randn(4, 24))
    twins = Twins(own, make)
    step = twins.compile()
    certificate = step.verify()
    assert certificate.equal
    assert certificate.heap_peak_bytes <= step.compiled.peak_bytes <= step.budget_bytes
    assert not twins.find_compiled_differences(step)


def test_several_optimizers_are_one_step():
    """Each updates its own parameters, with its own rate, after one norm of all gradients."""

    def optimizers(model):
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
        return torch.optim.Muon(matrices, lr=0.02), ADAMW(others, lr=0.01, fused=True)

    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
    twin = copy.deepcopy(model)
    inputs = torch.randn(4, 16), torch.randn(4, 4)
    ours, theirs = optimizers(model), optimizers(twin)
    step = compile_keep_all(
        model, nn.functional.mse_loss, inputs, optimizer=ours, clip_grad_norm=0.1, time_limit=60
    )
    assert step.verify().equal
    for _ in range(3):
        step(*inputs)
        nn.functional.mse_loss(twin(inputs[0]), inputs[1]).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        for mine, other in zip(ours, theirs, strict=True):
            other.step()
            other.zero_grad()
            mine.param_groups[0]["lr"] *= 0.5
            other.param_groups[0]["lr"] *= 0.5
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert all(mine.state_dict()["state"].keys() == other.state_dict()["state"].keys()
               for mine, other in zip(ours, theirs, strict=True))  # fmt: skip
    with pytest.raises(CaptureError, match="a parameter belongs to two optimizers"):
        compile_keep_all(
            model, nn.functional.mse_loss, inputs, optimizer=[*ours, ADAMW(model.parameters())]
        )


@pytest.mark.parametrize("p", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_mask_of_dropout_counts_in_the_type_of_the_gradient(p):
    """It is multiplied with where the gradient lies, in place."""
    layers = [layer for _ in range(4) for layer in (nn.Tanh(), nn.Dropout(p))]
    own = nn.Sequential(nn.Linear(8, 8), *layers), lambda y, _: (y**3).sum(), None
    inputs = (torch.randn(512, 8), torch.zeros(()))
    twins = Twins((*own[:2], inputs), OPTIMIZERS["sgd"])
    nodes = twins.trace().graph.nodes
    backward = [node for node in nodes if node.op == "native_dropout_backward"]
    assert any(node.in_place for node in backward)
    for node in backward:
        if node.in_place:
            assert node.workspace_bytes >= node.output_bytes
    unmeasured = twins.trace(measure_workspace=False).graph.nodes
    assert all(not node.workspace_bytes for node in unmeasured if "dropout" in node.op)
    step = twins.compile()
    assert step.verify().heap_peak_bytes <= step.compiled.peak_bytes


def test_the_budget_counts_state_and_inputs():
    """Another moment needs that much more; a budget without room for state names the reason."""
    sizes = {}
    for name in ("sgd", "momentum"):
        twins = Twins(residual(), OPTIMIZERS[name])
        sizes[name] = twins.compile().compiled.keep_all_bytes
    parameters = sum(p.nbytes for p in twins.model.parameters())
    assert sizes["momentum"] - sizes["sgd"] == parameters
    with pytest.raises(BudgetError, match="parameters, buffers, and optimizer state"):
        twins.compile(ram=1_000)


@pytest.mark.parametrize("minimize", mark_seeds_except(["writes", "ram", "energy"], ["writes"]))
def test_all_state_is_in_ram_whatever_is_minimized(minimize, tmp_path):
    """A home on storage costs no written byte if state is reserved; it is RAM all the same."""
    twins = Twins(residual(), OPTIMIZERS["momentum"])
    with twins.compile(minimize=minimize, storage=tmp_path) as step:
        assert step.plan.resident == step.compiled.scheduled.graph.state_tensors
        assert not twins.find_compiled_differences(step)


# -- state on storage ------------------------------------------------------------------------------
def perceptron():
    """Return a step whose state needs much more than its activations."""
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)]
    layers += [nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    inputs = (torch.randn(4, 32), torch.randint(0, 10, (4,)))
    return nn.Sequential(*layers), nn.functional.cross_entropy, inputs


def convolutions():
    """Return a step with batch norm and dropout, and a layer without use."""
    step = residual_step(widths=(16, 32), batch=2)
    step[0][0].unused = nn.Linear(2, 2)
    return step


def tied():
    """Return a step of a small language model whose classifier's weight is its embedding's."""
    words = torch.randint(0, 20, (2, 4))
    return Transformer(32), nn.functional.cross_entropy, (words, words.flatten())


NETWORKS = {
    "perceptron": (perceptron, "55%"),
    "convolutions": (convolutions, "58%"),
    "tied": (tied, "60%"),
}
"""Steps, and a budget below what parameters and moments of Adam take."""


def twins_of(network, optimizer="adamw", clip=None):
    """Return a step and the same one in PyTorch."""
    torch.manual_seed(1)
    return Twins(NETWORKS[network][0](), OPTIMIZERS[optimizer], clip=clip)


def on_storage(step):
    """Return the names of state that has its home on storage."""
    graph = step.compiled.scheduled.graph
    away = set(graph.state_tensors).difference(step.plan.resident or ())
    return {graph.tensors[i].name for i in away}


LONG = [(n, name) for n in NETWORKS for name in ("adamw", "nesterov", "amsgrad")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "optimizer"), mark_seeds_except(LONG, [("perceptron", "adamw")])
)
def test_steps_below_the_size_of_state_are_eagers(network, optimizer, tmp_path):
    """With a budget below parameters and moments 60 steps are eager's, and memory is within it.

    Batches and rates are others in each.
    """
    twins = twins_of(network, optimizer, clip=None if optimizer == "adamw" else 0.5)
    ram = NETWORKS[network][1] if optimizer == "adamw" else "75%"
    with twins.compile(storage=tmp_path, ram=ram) as step:
        if optimizer == "adamw":
            assert on_storage(step)
            assert step.budget_bytes < step.compiled.trace.graph.state_bytes
        assert not twins.find_compiled_differences(step, 60)
        certificate = step.verify()
        assert certificate.equal, certificate.summary()
        assert certificate.within_budget, certificate.summary()
        assert certificate.heap_peak_bytes <= step.compiled.peak_bytes
        assert certificate.written_bytes == certificate.plan_written_bytes
        assert certificate.read_bytes == certificate.plan_read_bytes
        assert certificate.read_bytes > 0 or optimizer != "adamw"
        assert not twins.find_compiled_differences(step, 1)
    assert not list(tmp_path.iterdir())
    assert not twins.find_state_differences()


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    mark_seeds_except(
        [("sgd", None), ("nesterov", 0.1), ("adam, weight decay", None), ("amsgrad", 0.1)],
        [("amsgrad", 0.1)],
        [("sgd", None)],
    ),
)
def test_every_optimizer_updates_state_on_storage(optimizer, clip, tmp_path):
    """With the least RAM bits are eager's, with and without clipping."""
    twins = twins_of("perceptron", optimizer, clip)
    least = min_budget_bytes(twins.trace(), decide_homes=True)
    with twins.compile(storage=tmp_path, ram=least) as step:
        assert len(on_storage(step)) >= 3
        assert not twins.find_compiled_differences(step, 3)


@pytest.mark.slow
def test_what_has_room_stays_in_ram(tmp_path):
    """Less state is paged with more room, and none where all has room."""
    moved = []
    for ram in ("55%", "80%", "100%"):
        twins = twins_of("perceptron")
        with twins.compile(storage=tmp_path, ram=ram) as step:
            graph, away = step.compiled.trace.graph, on_storage(step)
            moved.append(sum(graph.tensor_bytes[graph.tensor_index[name]] for name in away))
    assert moved[0] > moved[1] > moved[2] == 0


def both(change):
    """Return a function that changes model and optimizer, and those that eager trains."""

    def change_both(twins, *_):
        for model, optimizer in zip((twins.model, twins.twin), twins.optimizers, strict=True):
            with torch.no_grad():
                change(model, optimizer)

    return change_both


def loaded(twins, _, saved):
    """Load states of the beginning, of a model that eager trained."""
    for model, optimizer in zip((twins.model, twins.twin), twins.optimizers, strict=True):
        model.load_state_dict(copy.deepcopy(saved[0]))
        optimizer.load_state_dict(copy.deepcopy(saved[1]))


def verified(_, step, __):
    """Verify a step; the read bytes are those of the plan."""
    found = step.verify()
    assert found.equal
    assert found.read_bytes >= found.plan_read_bytes
    # Where the system does not tell which pages were written, or memory is shared, all is read.
    if found.mirrored_bytes and os.pread.__name__ != "fail":
        assert found.read_bytes == found.plan_read_bytes


def another_batch(twins, *_):
    """Go on with fewer images, or with all again."""
    x, y = twins.inputs
    twins.inputs = (x[:1], y[:1]) if len(x) > 1 else (torch.cat((x, x)), torch.cat((y, y)))


def broken_medium(twins, step, _):
    """Let two steps fail that cannot write to the medium; they change no state."""
    both(lambda m, _: m[0].weight[2].fill_(0.6))(twins)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", make_system_fault(errno.EIO))
        for _ in range(2):
            with pytest.raises(PageError):
                step(*twins.inputs)
            assert not twins.find_state_differences()


EVENTS = {
    "elements": both(lambda m, _: m[0].weight[3].fill_(0.7)),
    "data": both(lambda m, _: setattr(m[0].weight, "data", m[0].weight * 0.5)),
    "buffer": both(lambda m, _: setattr(m[1].running_mean, "data", torch.full((16,), 0.3))),
    "moment": both(lambda _, o: [v.mul_(0.5) for k in o.state.values() for v in k.values()]),
    "shared memory": both(lambda m, _: m.share_memory()),
    "anew": both(lambda _, o: o.state.clear()),
    "eager": lambda twins, *_: twins.run_both_eager(),
    "loaded": loaded,
    "verified": verified,
    "another batch": another_batch,
    "broken": broken_medium,
}
"""What happens between steps."""
USES = {
    "paged": {"storage": "pages"},
    "without rollback": {"storage": "pages", "rollback": False},
    "in RAM": {"ram": "100%", "storage": "pages"},
    "without a folder": {"ram": "100%"},
}


@pytest.mark.parametrize(
    ("use", "seed"),
    mark_seeds_except(
        [(use, s) for s in range(4) for use in USES],
        (),
        [("without rollback", 1), ("paged", 0)],
    ),
)
def test_what_happens_between_steps_counts(use, seed, tmp_path, monkeypatch):
    """In any order, from before the first step on: bitwise as in eager PyTorch.

    This holds also if the system does not report written pages: contents are compared then.
    """
    monkeypatch.chdir(tmp_path)
    draw = Random(seed)  # noqa: S311
    twins = twins_of("convolutions", ("adamw", "adagrad, decay")[seed % 2])
    least = {"ram": min_budget_bytes(twins.trace(), decide_homes=True)}
    other = twins_of("convolutions", ("adamw", "adagrad, decay")[seed % 2])
    other.run_eager()
    saved = other.twin.state_dict(), other.optimizers[1].state_dict()
    if seed % 2:
        monkeypatch.setattr(os, "pread", make_system_fault(errno.EPERM))
    events = EVENTS.keys() - ({"broken"} if use in ("without rollback", "without a folder") else ())
    step = twins.compile(**least | USES[use], dynamic="retrace")
    for event in draw.sample(sorted(events), len(events)):
        EVENTS[event](twins, step, saved)
        assert not twins.find_state_differences(), event
        address = twins.model[3].conv1.weight.data_ptr()
        assert not twins.find_compiled_differences(step, 1), event
        assert twins.model[3].conv1.weight.data_ptr() == address or event == "shared memory"
    if seed:
        step.close()
        if "storage" in USES[use]:
            with pytest.raises(PageError, match="closed"):
                step(*twins.inputs)
    else:
        del step
        gc.collect()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not twins.find_state_differences()  # ordinary tensors, for eager PyTorch too
    twins.run_both_eager()
    assert not twins.find_state_differences()


class Broken:
    """A state file of whose transfers one fails."""

    def __init__(self, monkeypatch, name):
        self.left = None
        real = getattr(StateFile, name)

        def move(file, *given, **named):
            if self.left is not None:
                self.left -= 1
                if self.left == -1:
                    raise PageError("the medium is failing")
            real(file, *given, **named)

        monkeypatch.setattr(StateFile, name, move)


@pytest.mark.parametrize(
    ("name", "after"), mark_seeds_except([("read", 5), ("write", 5), ("commit", 0)], [("write", 5)])
)
def test_a_step_that_fails_leaves_the_state_of_before(name, after, tmp_path, monkeypatch):
    """Wherever a transfer of state fails, parameters, moments, buffers and generator are as before.

    In the first step too, which makes the moments.
    """
    twins = twins_of("convolutions")
    broken = Broken(monkeypatch, name)
    with twins.compile(storage=tmp_path, ram="58%") as step:
        for _ in range(2):
            for count in {0, after}:
                random = torch.get_rng_state()
                broken.left = count
                with pytest.raises(PageError) as caught:
                    step(*twins.inputs)
                assert not getattr(caught.value, "__notes__", [])  # nothing is torn
                assert torch.equal(random, torch.get_rng_state())
                assert not twins.find_state_differences()
            broken.left = None
            assert not twins.find_compiled_differences(step, 2)


def test_without_rollback_a_failed_step_says_that_it_is_torn(tmp_path, monkeypatch):
    """One generation needs half of the storage, and a failed step may leave state half new."""
    twins = twins_of("perceptron")
    broken = Broken(monkeypatch, "write")
    with twins.compile(storage=tmp_path, ram="55%", rollback=False) as step:
        assert not twins.find_compiled_differences(step, 3)
        assert step.verify().equal
        assert not twins.find_compiled_differences(step, 1)
        broken.left = 2
        with pytest.raises(PageError) as caught:
            step(*twins.inputs)
        assert "updated" in str(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("rollback", [True, False])
def test_each_state_tensor_is_written_once_at_first(tmp_path, rollback):
    """Without a rollback only those with their home on storage are in the file."""
    traced = twins_of("perceptron").trace(measure_workspace=False)
    storages = traced.step_graph.storages
    sizes = {
        key: storages[index].bytes
        for index, (key, _) in traced.state.items()
        if storages[index].name.endswith("weight")
    }
    store = StateStore(traced, sizes, folder=tmp_path, rollback=rollback)
    file = store.file
    assert all(map(file.is_tracked, sizes))
    all_sizes = {key: tensor.bytes for key, tensor in file.format.tensors.items()}
    written = filter(file.contains, all_sizes) if rollback else sizes
    assert file.written_bytes == sum(all_sizes[key] for key in written) > 0
    store.close()


@pytest.mark.slow
def test_too_little_ram_says_how_much_is_needed(tmp_path):
    """The message has the least budget, by which the step runs; without a folder it is larger."""
    twins = twins_of("perceptron")
    needed = []
    for folder in (tmp_path, None):
        with pytest.raises(BudgetError, match=r"is too little .* ram=\d+ ") as caught:
            twins.compile(storage=folder, ram=2_000)
        needed.append(int(re.search(r"ram=(\d+)", str(caught.value))[1]))
    assert needed[0] < 0.7 * needed[1]
    with twins.compile(storage=tmp_path, ram=needed[0]) as step:
        assert not twins.find_compiled_differences(step, 2)


@pytest.mark.slow
def test_reports_tell_state_on_storage(tmp_path):
    """The values state the bytes on storage, and those that a step writes for a rollback.

    The page of a step with updates has its certificate, and its schedule verified.
    """
    twins = twins_of("perceptron")
    with twins.compile(storage=tmp_path, ram="55%") as step:
        certificate = step.verify()
        assert certificate.mirrored_bytes > 0
        assert "rollback" in certificate.summary()
        assert step.report()["certificate"]["mirrored_bytes"] == certificate.mirrored_bytes
    with twins.compile(storage=tmp_path, ram="55%", rollback=False) as step:
        assert step.verify().mirrored_bytes == 0
        assert "rollback" not in step.verify().summary()
    with twins.compile(storage=tmp_path, ram="100%", rollback=False) as step:
        assert not list(tmp_path.iterdir())
        assert not step.verify().mirrored_bytes
    twins = Twins(residual(), OPTIMIZERS["adamw"], clip=1.0)
    step = twins.compile()
    step.verify()
    found = step.report()
    assert found["certificate"]["updates"]
    assert "optimizer=optimizer, clip_grad_norm=1.0" in found["call"]
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    page = tmp_path / "step.html"
    step.report(page)
    assert read_page(page.read_text(encoding="utf-8")).values["A", "valid"] is True


@pytest.mark.parametrize("rollback", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_state_moves_where_another_plan_has_other_homes(tmp_path, rollback):
    """After a change of plans between steps, state is in its new homes, also for verification."""
    twins = twins_of("perceptron")
    with twins.compile(storage=tmp_path, ram="60%", rollback=rollback) as step:
        assert not twins.find_compiled_differences(step, 2)
        now, before = step.compiled, on_storage(step)
        paged = page_everything(now.result.problem)
        assert paged is not None
        now.plan, now.check = now._make_plan(replace(now.result, schedule=paged))
        old, now.runner = now.runner, now._make_runner(now.plan)
        assert on_storage(step) > before
        assert step.verify().equal
        assert not twins.find_compiled_differences(step, 2)
        now.runner = old
        assert not twins.find_compiled_differences(step, 2)
