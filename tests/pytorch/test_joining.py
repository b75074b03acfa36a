"""Joining: what one operation alone reads, and is worth nothing to keep, is no decision."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kit.strategies import costs_for, graphs  # noqa: E402
from poetmodel.device import FREE, Cost, Costs, PageCost, StorageMode  # noqa: E402
from poetmodel.graph import Graph, Node, Phase, Tensor, floor  # noqa: E402
from poetmodel.heuristics.greedy import construct  # noqa: E402
from poetmodel.plan import Instruction, Op, Plan, check_plan  # noqa: E402
from poetmodel.planner import make_plan  # noqa: E402
from poetmodel.problem import Problem  # noqa: E402
from poetmodel.torch import compile  # noqa: E402
from poetmodel.torch.step.joining import EXTRA_SHARE, JOINED_SHARE, joined  # noqa: E402
from poetmodel.torch.step.trace import Coarse  # noqa: E402

pytestmark = pytest.mark.torch

MUCH: int = 10**6
"""A budget that keeps nothing from being joined [B]."""


def coarse_of(graph: Graph) -> Coarse:
    """Return a graph all of whose tensors are scheduled."""
    return Coarse(
        graph=graph,
        numbers=tuple(range(len(graph.tensors))),
        steps=tuple((Instruction(Op.COMPUTE, k),) for k in range(len(graph.nodes))),
        threshold_bytes=0,
        reserves=(),
    )


def operation(name: str, size_bytes: int, *inputs: str, workspace_bytes: int = 0) -> Node:
    """Return an operation with one output of its name."""
    made = (Tensor(name=name, bytes=size_bytes),)
    return Node(
        name=name, op=name.upper(), phase=Phase.FORWARD, inputs=inputs, outputs=made,
        workspace_bytes=workspace_bytes, flops=1, bytes_moved=size_bytes,
    )  # fmt: skip


def chain(*others: Node) -> Graph:
    """Return x, three operations one after the other, and a reader of x and the last of them."""
    return Graph(
        name="chain",
        nodes=(
            operation("x", 8),
            operation("a", 6, "x", workspace_bytes=1),
            operation("b", 4, "a"),
            operation("c", 4, "b", "x", workspace_bytes=3),
            *others,
            operation("y", 9, "c", "x"),
        ),
    )


def costs_of(graph: Graph) -> Costs:
    """Return costs of one second each, and free pages."""
    pages = {tensor.name: PageCost(FREE, FREE) for tensor in graph.tensors}
    return Costs(compute={node.name: Cost(1.0, 2.0) for node in graph.nodes}, pages=pages)


def names_of(coarse: Coarse) -> list[str]:
    """Return the names of the nodes of a coarse graph."""
    return [node.name for node in coarse.graph.nodes]


def test_a_chain_becomes_one_node() -> None:
    """What it needs is counted with its input held: 8 of x, at most 11 of a and b or b and c."""
    graph = chain()
    found, costs = joined(coarse_of(graph), costs_of(graph), results=(), budget_bytes=MUCH)
    assert names_of(found) == ["x", "c", "y"]
    node = found.graph.nodes[1]
    assert (node.op, node.inputs, node.flops, node.bytes_moved) == ("A+B+C", ("x",), 3, 14)
    # a: 6 + 1; b: 6 + 4; c: 4 + 4 + 3. Beside x and c itself 7 are left.
    assert node.workspace_bytes == 11 - 4
    assert (costs.compute["c"].time_s, costs.compute["c"].energy_j) == (3.0, 6.0)
    assert set(costs.pages or ()) == {"x", "c", "y"}


def test_a_joined_node_runs_its_operations_and_frees_what_is_inside() -> None:
    """Each tensor inside goes when its reader has run."""
    graph = chain()
    found, _ = joined(coarse_of(graph), costs_of(graph), results=(), budget_bytes=MUCH)
    program = found.expanded((Instruction(Op.COMPUTE, 0), Instruction(Op.COMPUTE, 1)))
    told = [
        (str(op), graph.nodes[i].name if op == Op.COMPUTE else graph.tensors[found.numbers[i]].name)
        for op, i in program
    ]
    assert told == [
        *(("compute", name) for name in "xab"),
        ("free", "a"),
        ("compute", "c"),
        ("free", "b"),
    ]


def changed(graph: Graph, name: str, **values: object) -> Graph:
    """Return a graph with other values of one node."""
    nodes = (replace(n, **values) if n.name == name else n for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("graph", "results", "budget_bytes", "expected"),
    [
        pytest.param(chain(), (1,), MUCH, ["x", "a", "c", "y"], id="a result"),
        pytest.param(chain(operation("z", 1, "b")), (), MUCH, list("xbczy"), id="two readers"),
        pytest.param(
            changed(chain(), "b", outputs=(Tensor(name="b", bytes=7),)), (), MUCH,
            ["x", "a", "c", "y"], id="a larger one",
        ),
        pytest.param(
            changed(chain(), "b", recomputable=False), (), MUCH, list("xabcy"), id="once only"
        ),
        # a and b need 8 + 6 + 4, with c 8 + 11.
        pytest.param(chain(), (), int(18 / JOINED_SHARE), list("xbcy"), id="a small budget"),
        pytest.param(chain(), (), int(17 / JOINED_SHARE), list("xabcy"), id="a smaller one"),
        # a alone needs 14, and with b 4 more.
        pytest.param(
            changed(chain(), "a", workspace_bytes=0), (), int(4 / EXTRA_SHARE) - 1, list("xabcy"),
            id="much more than its parts",
        ),
        pytest.param(
            changed(chain(), "a", workspace_bytes=0), (), int(4 / EXTRA_SHARE), ["x", "c", "y"],
            id="not too much more",
        ),
    ],
)  # fmt: skip
def test_what_may_be_kept_or_has_no_room_is_not_joined(
    graph: Graph, results: tuple[int, ...], budget_bytes: int, expected: list[str]
) -> None:
    """Results, tensors of several readers or smaller than what is made of them, and large nodes."""
    found, _ = joined(coarse_of(graph), costs_of(graph), results=results, budget_bytes=budget_bytes)
    assert names_of(found) == expected


@given(data=st.data())
def test_a_plan_of_joined_nodes_is_one_of_the_operations(data: st.DataObject) -> None:
    """Expanded, it breaks no rule of the whole graph, and its peak is no higher than stated."""
    graph = data.draw(graphs(min_nodes=2))
    costs = data.draw(costs_for(graph))
    results = data.draw(st.sets(st.integers(0, len(graph.tensors)), max_size=2))
    found, own = joined(coarse_of(graph), costs, results=results, budget_bytes=MUCH)
    ram = floor(found.graph).bytes + data.draw(st.integers(0, 16))
    if not ram:
        return
    schedule = construct(Problem(found.graph, own, ram=ram))
    if schedule is None:
        return
    plan = make_plan(found.graph, own, schedule, mode=StorageMode.BLOCKING, ram_budget_bytes=ram)
    stated = check_plan(found.graph, own, plan, ram_budget_bytes=ram)
    program = tuple(
        each if each.op == Op.COMPUTE else Instruction(each.op, found.numbers[each.index])
        for each in found.expanded(plan.program)
    )
    check = check_plan(graph, costs, Plan(program=program, mode=plan.mode), ram_budget_bytes=ram)
    assert not check.violations
    assert check.peak_ram_bytes <= stated.peak_ram_bytes
    assert check.compute_s == stated.compute_s


class Wide(torch.nn.Module):
    """A perceptron with an activation of several operations, some of which nobody else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows, passed through."""
        y = self.wide(x)
        y = 0.5 * y * (1 + torch.tanh(y + 0.04 * y.pow(3)))
        return x + self.narrow(torch.nn.functional.dropout(y, 0.1))


def test_a_joined_step_computes_what_pytorch_does() -> None:
    """Operations that are one for the solver are computed again, in the budget, bit for bit."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(Wide() for _ in range(4)))
    inputs = torch.randn(256, 16), torch.randn(256, 16)
    with compile(model, torch.nn.functional.mse_loss, inputs, ram="50%", device="rpi4b") as step:
        certificate, found = step.verify(), step.compiled
        several = {k for k, steps in enumerate(found.coarse.steps) if len(steps) > 1}
        computed = [index for op, index in step.plan.program if op == Op.COMPUTE]
    assert certificate.equal
    assert certificate.within_budget
    assert any(computed.count(k) > 1 for k in several)
