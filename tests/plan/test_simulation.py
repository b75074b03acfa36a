"""The simulator of plans against figures worked out by hand, a second one, and the schedule's."""

import pytest

import poetmodel as pm
from kit.plans import PAGED, plan
from kit.worked import bench_device, even_costs, skip_graph
from poetmodel.errors import PlanError
from poetmodel.plan import Moment, check_plan
from poetmodel.plan.simulation import false_claims
from poetmodel.schedule import GraphIdentity


def slow_costs(**more):
    """Return costs of which a page-in takes 7 s and a page-out 5 s."""
    return even_costs(skip_graph(), page_in=(7.0, 0.5), page_out=(5.0, 0.25), **more)


BLOCKING = plan(PAGED.replace("w0 ", ""), "blocking")


def test_blocking_program_has_one_clock():
    """Compute 1 + 2 + 3 + 4 s, a page-out of 5 s and a page-in of 7 s come one after the other.

    Idle power of 2 W is drawn over the makespan: 20 s of a dma plan, 22 s of the blocking one.
    Without costs there are no times; peak and order all the same.
    """
    check = check_plan(skip_graph(), slow_costs(), BLOCKING)
    assert check.violations == ()
    assert (check.compute_s, check.transfer_s, check.stall_s) == (10.0, 12.0, 0.0)
    assert (check.makespan_s, check.energy_j) == (22.0, 10.75)
    assert check.moments[1] == Moment(1.0, 1.0, 6.0, 4, 4)
    # a + b = 10 when b is computed, b + c = 11 for c, a + c + d = 12 for d.
    assert [moment.high_bytes for moment in check.moments] == [4, 4, 10, 10, 11, 11, 9, 12, 12, 8]
    assert [moment.ram_bytes for moment in check.moments] == [4, 4, 10, 6, 11, 5, 9, 12, 8, 3]
    assert (check.peak_ram_bytes, check.peak_position) == (12, 7)
    assert (check.aux_used_bytes, check.written_bytes, check.read_bytes) == (4, 4, 4)
    costs = slow_costs(device=bench_device(idle_power_w=2.0))
    assert check_plan(skip_graph(), costs, plan(PAGED)).energy_j == 10.75 + 40
    assert check_plan(skip_graph(), costs, BLOCKING).energy_j == 10.75 + 44
    check = check_plan(skip_graph(), None, plan(PAGED))
    assert (check.valid, check.peak_ram_bytes) == (True, 12)
    assert (check.makespan_s, check.stall_s, check.energy_j) == (None, None, None)


def test_dma_program_overlaps_and_stalls():
    """The page-out lasts from 1 s to 6 s, b to 3 s: 3 s of stall, and 7 s for the page-in."""
    check = check_plan(skip_graph(), slow_costs(), plan(PAGED))
    assert check.violations == ()
    # b ends at 3, the page-out at 6; c 6..9; page-in 9..16; d 16..20.
    assert check.moments[1] == Moment(1.0, 1.0, 6.0, 4, 4)
    assert check.moments[3] == Moment(3.0, 3.0, 6.0, 10, 10)
    assert check.moments[7] == Moment(9.0, 9.0, 16.0, 9, 9)
    assert (check.stall_s, check.makespan_s, check.energy_j) == (10.0, 20.0, 10.75)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("c0 o0 c1 f0 c2 f1 i0 w0 c3 f0 f2", "instruction 3, free 0: tensor 'a' is still under"),
        ("c0 o0 c1 w0 f0 c2 f1 i0 c3 w0 f0 f2", "node 'd' reads tensor 'a' before its page_in is"),
        ("c0 o0 c1 w0 f0 c2 f1 w0 c3 f2", "node 'd' needs tensor 'a' in RAM"),
        ("c0 c1 f0 c2 f1 i0 w0 c3 f0 f2", "instruction 5, page_in 0: tensor 'a' is not on storage"),
        ("c0 o0 w0 i0 w0 c1 c2 f1 c3 f0 f2", "page_in 0: tensor 'a' is in RAM already"),
        ("c0 o0 c1 w0 f0 o0 w0 c2 f1 i0 w0 c3 f0 f2", "page_out 0: tensor 'a' is not in RAM"),
        (
            "c0 o0 o0 c1 c2 f1 c3 w0 f0 f2",
            "page_out 0: tensor 'a' is still under way: its page_out",
        ),
        ("c0 o0 c0 c1 w0 c2 f1 c3 f0 f2", "overwrites tensor 'a' during its page_out"),
        ("c0 w0 c1 c2 f1 c3 f0 f2", "instruction 1, wait 0: tensor 'a' was never moved"),
        ("c0 f0 f0 c0 c1 c2 f1 c3 f0 f2", "instruction 2, free 0: tensor 'a' is not in RAM"),
        ("c0 c1 c2 f1 f0 f2", "node 'd' is never computed"),
        ("c0 c1 c2 f1 c3 f2", "tensor 'a' is still in RAM at the end"),
        ("c0 c1 c2 f1 c9 c3 f0 f2", "instruction 4, compute 9: the graph has no such index"),
        ("c0 c1 c2 f1 f-1 c3 f0 f2", "instruction 4, free -1: the graph has no such index"),
    ],
)
def test_each_broken_rule_is_told(text, words):
    """A program that breaks one rule is rejected, in words that name place and tensor."""
    check = check_plan(skip_graph(), even_costs(skip_graph()), plan(text))
    assert any(words in violation for violation in check.violations), check.violations


def test_order_of_computations():
    """First ones keep the order of the graph; a node with `recomputable` false is computed once."""
    nodes = tuple(pm.operation(name, output_bytes=1) for name in "ab")
    graph = pm.Graph(name="free", nodes=nodes)
    assert check_plan(graph, None, plan("c1 c0")).violations == (
        "instruction 1, compute 0: node 'a' is first computed after 'b', which follows it",
    )
    assert check_plan(graph, None, plan("c0 c1")).valid
    twice = plan("c0 c0 c1 c2 f1 c3 f0 f2")
    check = check_plan(skip_graph(recomputable=False), None, twice)
    assert check.violations == ("instruction 1, compute 0: node 'a' must not be computed again",)
    # The old copy counts beside the new one for that moment, and no more after.
    assert check_plan(skip_graph(), None, twice).moments[1][3:5] == (8, 4)


def test_budget_and_storage_are_limits():
    """A peak of 12 B and 4 B of storage fit exactly, and not into one byte less.

    Without another limit, the size of the device's storage counts; costs without pages reject every
    transfer.
    """
    graph, costs = skip_graph(), even_costs(skip_graph())
    assert check_plan(graph, costs, plan(PAGED), ram_budget_bytes=12, aux_bytes=4).valid
    tight = check_plan(graph, costs, plan(PAGED), ram_budget_bytes=11, aux_bytes=3)
    assert [violation.partition(":")[0] for violation in tight.violations] == [
        "instruction 9",
        "storage used 4 B is above the limit of 3 B",
    ]
    assert not check_plan(graph, costs, plan(PAGED, ram_budget_bytes=11)).valid
    small = even_costs(graph, device=bench_device(aux_bytes=3))
    assert not check_plan(graph, small, plan(PAGED)).valid
    assert check_plan(graph, small, plan(PAGED), aux_bytes=4).valid
    graph = skip_graph()
    costs = even_costs(graph, page_in=None, page_out=None)
    check = check_plan(graph, costs, plan(PAGED))
    assert sum("no auxiliary storage" in violation for violation in check.violations) == 2


def test_plan_of_another_graph_is_refused():
    """The identity must be that of the graph.

    Stated figures are compared: times within 1e-9, bytes exactly.
    """
    identity = GraphIdentity.of(skip_graph(mask=True))
    with pytest.raises(PlanError, match="give the graph it was made for"):
        check_plan(skip_graph(), None, plan(PAGED, identity=identity))
    graph = skip_graph()
    check = check_plan(graph, even_costs(graph), plan(PAGED))
    stated = {"makespan_s": check.makespan_s, "peak_ram_bytes": 12.0, "energy_j": None}
    assert list(false_claims(check, stated)) == []
    wrong = {"makespan_s": (check.makespan_s or 0) * (1 + 1e-8), "peak_ram_bytes": 11.0}
    assert [fault.partition(":")[0] for fault in false_claims(check, wrong)] == list(wrong)
