"""Whole steps as they run: every bit is that of eager PyTorch, and memory that of the simulator."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel as pm  # noqa: E402
from kit.networks import ARCHITECTURES, residual_step  # noqa: E402
from kit.optimizer_steps import OPTIMIZERS, SGD, Twins, grouped, in_order, runner  # noqa: E402
from kit.rotation import quick  # noqa: E402
from kit.traced_models import STEPS, residual, rows  # noqa: E402
from poetmodel.graph import Graph, Phase  # noqa: E402
from poetmodel.schedule import Schedule  # noqa: E402
from poetmodel.torch import CaptureError  # noqa: E402
from poetmodel.torch.capturing.replay import storage_peak_bytes  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

nn = torch.nn
pytestmark = pytest.mark.torch

QUICK = (
    ("sgd", None), ("nesterov", 0.1), ("amsgrad", None), ("adam, foreach", 0.1),
    ("nadam", None), ("rmsprop, centered", None), ("adagrad, decay", None),
)  # fmt: skip
"""Optimizers and norms of gradients that the quick tests try."""
MEASURED = ("sgd", "nesterov", "adam", "nadam, foreach", "rmsprop", "rmsprop, momentum", "adagrad")
"""Optimizers whose memory is measured."""


@pytest.mark.parametrize(
    ("name", "clip"),
    quick([(name, clip) for name in OPTIMIZERS for clip in (None, 0.1)], QUICK),
)
def test_every_optimizer_updates_as_eager(name: str, clip: float | None) -> None:
    """After each of three steps loss, parameters, buffers and moments are eager's, bit for bit."""
    torch.manual_seed(1)
    twins = Twins(residual(), OPTIMIZERS[name], clip=clip)
    traced = twins.trace(measure_workspace=False)
    assert not twins.differing(traced, runner(traced))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STEPS, *ARCHITECTURES])
def test_every_step_updates_as_eager(name: str) -> None:
    """So it is for steps of all kinds, with weights that are tied, frozen, unused or changed."""
    torch.manual_seed(1)
    twins = Twins((STEPS | ARCHITECTURES)[name](), OPTIMIZERS["adamw"], clip=0.2)
    traced = twins.trace(measure_workspace=False)
    assert not twins.differing(traced, runner(traced))


def test_comparison_notices_other_updates() -> None:
    """The test above would fail: with another learning rate, another decay, and no clipping."""
    torch.manual_seed(1)
    for key, value in (("lr", 0.09), ("weight_decay", 0.03)):
        twins = Twins(rows(nn.Linear(4, 4)), OPTIMIZERS["nesterov"])
        traced = twins.trace(measure_workspace=False)
        twins.optimizers[1].param_groups[0][key] = value
        assert "0: 0.weight" in twins.differing(traced, runner(traced))
    twins = Twins(rows(nn.Linear(4, 4)), OPTIMIZERS["sgd"], clip=0.01)
    traced = twins.trace(measure_workspace=False)
    twins.clip = None
    assert "0: 0.weight" in twins.differing(traced, runner(traced))


def test_groups_have_their_own_settings() -> None:
    """Each group has its rule and its learning rate, which are read in each step."""
    torch.manual_seed(1)
    twins = Twins(residual(), lambda p: SGD(grouped(p), lr=0.1, momentum=0.9))
    traced = twins.trace(measure_workspace=False)
    assert {"lr[0]", "lr[1]"} <= traced.graph.tensor_index.keys()
    assert not twins.differing(traced, runner(traced))


@pytest.mark.parametrize("name", ["dampening", "amsgrad"])
def test_steps_of_eager_and_of_a_plan_may_follow_each_other(name: str) -> None:
    """Moments of eager steps are gone on with, and the other way round."""
    torch.manual_seed(1)
    twins = Twins(residual(), OPTIMIZERS[name])
    traced = twins.trace(measure_workspace=False)
    run = runner(traced)
    for model, optimizer in zip((twins.model, twins.twin), twins.optimizers, strict=True):
        torch.manual_seed(2)
        twins.loss_fn(model(*twins.inputs[:-1]), twins.inputs[-1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not twins.differing(traced, run)
    for model, optimizer in zip((twins.model, twins.twin), twins.optimizers, strict=True):
        optimizer.zero_grad()
        torch.manual_seed(2)
        twins.loss_fn(model(*twins.inputs[:-1]), twins.inputs[-1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not twins.differing(traced, run)


def with_recomputations(graph: Graph, random: Random, share: float) -> Iterator[int]:
    """Yield nodes in order, some inputs computed again before they are read."""
    replaced: set[int] = set()

    def needed(k: int, depth: int) -> Iterator[int]:
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


@pytest.mark.parametrize("name", quick(ARCHITECTURES, ("residual", "transformer")))
def test_recomputing_changes_no_bit(name: str) -> None:
    """Programs that compute at random again what they may give the same updates."""
    torch.manual_seed(1)
    twins = Twins(ARCHITECTURES[name](), OPTIMIZERS["nesterov"], clip=0.5)
    traced = twins.trace(measure_workspace=False)
    for seed in range(2):
        computed = list(with_recomputations(traced.graph, Random(seed), 0.4))  # noqa: S311
        assert len(computed) > 1.1 * len(traced.graph.nodes)
        plan = in_order(traced.graph, computed)
        assert not twins.differing(traced, runner(traced, plan), steps=2)


def peak_beside(graph: Graph, schedule: Schedule) -> int:
    """Return the peak of the simulator, less what is there before the step."""
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


def keep_all(graph: Graph) -> Schedule:
    """Return the schedule that keeps every tensor to its last use, with all state in RAM."""
    state = {*graph.state_tensors, *graph.replacement_of.values()}
    last = [max(graph.users_of[i], default=k) for i, k in enumerate(graph.node_of)]
    kept = [
        (t, i)
        for i, k in enumerate(graph.node_of)
        if i not in state
        for t in range(k + 1, last[i] + 1)
    ]
    computed = tuple((k, k) for k in range(len(graph.nodes)))
    return Schedule(R=computed, S_RAM=tuple(kept), resident=graph.state_tensors)


def wide() -> Any:
    """Return a step whose largest tensors are activations that die at once."""

    def through(parts: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return (parts[0](x) * 2 + 1).neg()

    step = rows(nn.Linear(8, 8, bias=False), by=through)
    return step[0], lambda y, t: (y * t).sum(), (torch.randn(512, 8), torch.randn(512, 8))


def deep() -> Any:
    """Return a step whose largest tensors are gradients of weights."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    return model, nn.functional.mse_loss, (torch.randn(2, 64), torch.randn(2, 64))


@pytest.mark.parametrize(
    ("name", "clip"),
    quick(
        [(name, clip) for name in MEASURED for clip in (None, 0.1)],
        [("nesterov", 0.1), ("adam", None), ("nadam, foreach", None), ("rmsprop, momentum", 0.1)],
    ),
)
@pytest.mark.parametrize("make", [wide, deep])
def test_memory_is_what_the_simulator_says(make: Any, name: str, clip: float | None) -> None:
    """The peak of the tensors of a step is the simulator's, operators in place included."""
    torch.manual_seed(1)
    twins = Twins(make(), OPTIMIZERS[name], clip=clip)
    traced = twins.trace(measure_workspace=False)
    run = runner(traced)
    assert not twins.differing(traced, run, steps=1)  # moments are there afterwards
    held = twins.optimizers[0].state_dict()["state"].values()
    known = [*twins.model.parameters(), *twins.inputs]
    known += [value for moments in held for value in moments.values()]
    flat = traced.joint.flat_inputs(twins.inputs)
    measured = storage_peak_bytes(lambda: run(flat), known)
    promised = peak_beside(traced.graph, keep_all(traced.graph))
    # Beside it: the loss and what is a number, such as learning rate, tangent, and norms.
    assert promised <= measured <= promised + 64
    if make is wide:
        nodes = tuple(replace(node, in_place=()) for node in traced.graph.nodes)
        graph = replace(traced.graph, nodes=nodes)
        assert peak_beside(graph, keep_all(graph)) > 1.9 * promised


CHANGES: dict[str, tuple[Callable[[Twins], Any], str]] = {
    "rule": (
        lambda t: t.optimizers[0].param_groups[0].update(momentum=0.5),
        "its groups or their settings were changed",
    ),
    # As an eager step leaves them.
    "gradients": (
        lambda t: t.loss_fn(t.model(*t.inputs[:-1]), t.inputs[-1]).backward(),
        "has a gradient already.*zero_grad",
    ),
    "parameter": (
        lambda t: setattr(t.model[0], "weight", nn.Parameter(torch.zeros(4, 4))),
        "parameter 0.weight is another tensor now",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_the_updates_do_not_hold_for_is_refused(kind: str) -> None:
    """Where eager would do something else now, a step raises and changes nothing."""
    change, message = CHANGES[kind]
    torch.manual_seed(1)
    twins = Twins(rows(nn.Linear(4, 4)), OPTIMIZERS["momentum"])
    traced = twins.trace(measure_workspace=False)
    run = runner(traced)
    change(twins)
    before = {key: value.clone() for key, value in twins.model.state_dict().items()}
    with pytest.raises(CaptureError, match=message):
        run(traced.joint.flat_inputs(twins.inputs))
    after = twins.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not twins.optimizers[0].state


def test_schedulers_of_the_learning_rate_go_with_steps() -> None:
    """A scheduler sees that the optimizer has made a step, and its learning rate counts."""
    torch.manual_seed(1)
    twins = Twins(residual_step(), OPTIMIZERS["sgd"])
    traced = twins.trace(measure_workspace=False)
    run = runner(traced)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in twins.optimizers]
    for _ in range(2):
        assert not twins.differing(traced, run, steps=1)
        for scheduler in schedulers:
            scheduler.step()  # warnings are errors


def test_a_failing_step_says_that_updates_may_be_torn() -> None:
    """What fails in the middle of a step says that some parameters may be new already."""
    twins = Twins(rows(nn.Linear(4, 4)), OPTIMIZERS["sgd"])
    traced = twins.trace(measure_workspace=False)
    run = runner(traced)
    run.generated.function = _failing
    with pytest.raises(MemoryError) as caught:
        run(traced.joint.flat_inputs(twins.inputs))
    assert "may have been updated" in caught.value.__notes__[0]


def _failing(*_: Any) -> Any:
    raise MemoryError
