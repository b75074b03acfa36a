"""The simulator of plans against figures worked out by hand, a second one, and the schedule's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import poetmodel as pm
from kit.instances import random_costs, random_graph, random_schedule, seeded
from kit.plans import PAGED, altered, plan, random_plan
from kit.rotation import Part, parts
from kit.worked import bench_device, even_costs, skip_graph
from poetmodel.device import Costs, StorageMode
from poetmodel.errors import PlanError
from poetmodel.plan import Moment, Op, Plan, check_plan
from poetmodel.plan.simulation import false_claims
from poetmodel.planner import make_plan
from poetmodel.schedule import GraphIdentity, simulate

if TYPE_CHECKING:
    from poetmodel.graph import Graph


def test_blocking_program_has_one_clock() -> None:
    """Compute 1 + 2 + 3 + 4 s, a page-out of 5 s and a page-in of 7 s come one after the other."""
    graph = skip_graph()
    costs = even_costs(graph, page_in=(7.0, 0.5), page_out=(5.0, 0.25))
    check = check_plan(graph, costs, plan(PAGED.replace("w0 ", ""), "blocking"))
    assert check.violations == ()
    assert (check.compute_s, check.transfer_s, check.stall_s) == (10.0, 12.0, 0.0)
    assert (check.makespan_s, check.energy_j) == (22.0, 10.75)
    assert check.moments[1] == Moment(1.0, 1.0, 6.0, 4, 4)
    # a + b = 10 when b is computed, b + c = 11 for c, a + c + d = 12 for d.
    assert [moment.high_bytes for moment in check.moments] == [4, 4, 10, 10, 11, 11, 9, 12, 12, 8]
    assert [moment.ram_bytes for moment in check.moments] == [4, 4, 10, 6, 11, 5, 9, 12, 8, 3]
    assert (check.peak_ram_bytes, check.peak_position) == (12, 7)
    assert (check.aux_used_bytes, check.written_bytes, check.read_bytes) == (4, 4, 4)


def test_dma_program_overlaps_and_stalls() -> None:
    """The page-out lasts from 1 s to 6 s, b to 3 s: 3 s of stall, and 7 s for the page-in."""
    graph = skip_graph()
    costs = even_costs(graph, page_in=(7.0, 0.5), page_out=(5.0, 0.25))
    check = check_plan(graph, costs, plan(PAGED))
    assert check.violations == ()
    # b ends at 3, the page-out at 6; c 6..9; page-in 9..16; d 16..20.
    assert check.moments[1] == Moment(1.0, 1.0, 6.0, 4, 4)
    assert check.moments[3] == Moment(3.0, 3.0, 6.0, 10, 10)
    assert check.moments[7] == Moment(9.0, 9.0, 16.0, 9, 9)
    assert (check.stall_s, check.makespan_s, check.energy_j) == (10.0, 20.0, 10.75)


def test_transfers_run_one_at_a_time_in_program_order() -> None:
    """A second transfer begins when the first is done, and the makespan waits for the bus."""
    graph = skip_graph(mask=True)
    costs = even_costs(graph, page_in=(1.0, 0.0), page_out=(20.0, 0.0))
    check = check_plan(graph, costs, plan("c0 o0 c1 c2 f1 o2 c3 w0 f0 w2 f2 f3"))
    assert check.violations == ()
    assert check.moments[1][:3] == (1.0, 1.0, 21.0)
    assert check.moments[5][:3] == (6.0, 21.0, 41.0)
    assert check.makespan_s == 41.0


def test_idle_power_is_drawn_over_the_makespan() -> None:
    """2 W over 20 s of a dma plan, over 22 s of the blocking one."""
    graph = skip_graph()
    costs = even_costs(
        graph, page_in=(7.0, 0.5), page_out=(5.0, 0.25), device=bench_device(idle_power_w=2.0)
    )
    assert check_plan(graph, costs, plan(PAGED)).energy_j == 10.75 + 40
    blocking = plan(PAGED.replace("w0 ", ""), "blocking")
    assert check_plan(graph, costs, blocking).energy_j == 10.75 + 44


def test_without_costs_memory_is_checked() -> None:
    """No costs, no times; peak and order all the same."""
    check = check_plan(skip_graph(), None, plan(PAGED))
    assert (check.valid, check.peak_ram_bytes) == (True, 12)
    assert (check.makespan_s, check.stall_s, check.energy_j) == (None, None, None)


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
def test_each_broken_rule_is_told(text: str, words: str) -> None:
    """A program that breaks one rule is rejected, in words that name place and tensor."""
    check = check_plan(skip_graph(), even_costs(skip_graph()), plan(text))
    assert any(words in violation for violation in check.violations), check.violations


def test_first_computations_keep_the_order_of_the_graph() -> None:
    """Two nodes that do not need each other may not change places."""
    nodes = tuple(pm.operation(name, output_bytes=1) for name in "ab")
    graph = pm.Graph(name="free", nodes=nodes)
    check = check_plan(graph, None, plan("c1 c0"))
    assert check.violations == (
        "instruction 1, compute 0: node 'a' is first computed after 'b', which follows it",
    )
    assert check_plan(graph, None, plan("c0 c1")).valid


def test_node_that_must_not_be_computed_again() -> None:
    """A node with `recomputable` false is computed once."""
    check = check_plan(skip_graph(recomputable=False), None, plan("c0 c0 c1 c2 f1 c3 f0 f2"))
    assert check.violations == ("instruction 1, compute 0: node 'a' must not be computed again",)


def test_old_copy_counts_beside_the_new_one() -> None:
    """Computing `a` again while it is in RAM takes 4 B more for that moment, and no more after."""
    check = check_plan(skip_graph(), None, plan("c0 c0 c1 c2 f1 c3 f0 f2"))
    assert check.moments[1][3:5] == (8, 4)


def test_tensor_on_storage_may_be_read_during_its_page_out() -> None:
    """Computing from a tensor that is being paged out is fine."""
    check = check_plan(skip_graph(), even_costs(skip_graph()), plan("c0 o0 c1 c2 f1 c3 w0 f0 f2"))
    assert check.valid


def test_sample_on_storage_needs_no_page_out() -> None:
    """A node with `on_aux` can be freed and paged in again at once, and takes no storage."""
    graph = skip_graph(on_aux=True)
    check = check_plan(graph, even_costs(graph), plan("c0 c1 f0 c2 f1 i0 w0 c3 f0 f2"), aux_bytes=0)
    assert (check.violations, check.aux_used_bytes) == ((), 0)


def test_budget_and_storage_are_limits() -> None:
    """A peak of 12 B and 4 B of storage fit exactly, and not into one byte less."""
    graph, costs = skip_graph(), even_costs(skip_graph())
    assert check_plan(graph, costs, plan(PAGED), ram_budget_bytes=12, aux_bytes=4).valid
    tight = check_plan(graph, costs, plan(PAGED), ram_budget_bytes=11, aux_bytes=3)
    assert [violation.partition(":")[0] for violation in tight.violations] == [
        "instruction 9",
        "storage used 4 B is above the limit of 3 B",
    ]
    assert not check_plan(graph, costs, plan(PAGED, ram_budget_bytes=11)).valid


def test_storage_limit_is_the_devices_by_default() -> None:
    """Without another limit, the size of the device's storage counts."""
    graph = skip_graph()
    costs = even_costs(graph, device=bench_device(aux_bytes=3))
    assert not check_plan(graph, costs, plan(PAGED)).valid
    assert check_plan(graph, costs, plan(PAGED), aux_bytes=4).valid


def test_nothing_is_paged_without_storage() -> None:
    """Costs without pages reject every transfer."""
    graph = skip_graph()
    costs = even_costs(graph, page_in=None, page_out=None)
    check = check_plan(graph, costs, plan(PAGED))
    assert sum("no auxiliary storage" in violation for violation in check.violations) == 2


def test_plan_of_another_graph_is_refused() -> None:
    """The identity must be that of the graph."""
    identity = GraphIdentity.of(skip_graph(mask=True))
    with pytest.raises(PlanError, match="give the graph it was made for"):
        check_plan(skip_graph(), None, plan(PAGED, identity=identity))


def test_stated_figures_are_compared() -> None:
    """Times within 1e-9, bytes exactly."""
    graph = skip_graph()
    check = check_plan(graph, even_costs(graph), plan(PAGED))
    stated = {"makespan_s": check.makespan_s, "peak_ram_bytes": 12.0, "energy_j": None}
    assert list(false_claims(check, stated)) == []
    wrong = {"makespan_s": (check.makespan_s or 0) * (1 + 1e-8), "peak_ram_bytes": 11.0}
    assert [fault.partition(":")[0] for fault in false_claims(check, wrong)] == list(wrong)


@pytest.mark.parametrize("seed", range(60))
def test_blocking_plan_has_the_figures_of_its_schedule(seed: int) -> None:
    """Energy, peak and time of a blocking plan are those of the simulator, to the last digit."""
    rng = seeded(f"same/{seed}")
    graph = random_graph(rng, (3, 12))
    costs = random_costs(rng, graph)
    schedule = random_schedule(rng, graph)
    simulation = simulate(graph, costs, schedule, deadline_counts="serial")
    check = check_plan(graph, costs, make_plan(graph, costs, schedule, mode="blocking"))
    assert check.violations == ()
    for key in ("energy_j", "peak_ram_bytes", "makespan_s", "compute_s", "transfer_s"):
        assert getattr(check, key) == getattr(simulation, key), key
    assert check.makespan_s == simulation.time_s
    assert check.aux_used_bytes == simulation.aux_used_bytes


def second_simulation(graph: Graph, costs: Costs, plan: Plan) -> tuple[bool, float, float, int]:
    """Walk a plan as the contract's table says: valid, makespan, stall, peak; stops when broken."""
    table, size, dma = costs.table(graph), graph.tensor_bytes, plan.mode == StorageMode.DMA
    core = bus = stall = 0.0
    ram: set[int] = set()
    stored = {i for i, k in enumerate(graph.node_of) if graph.nodes[k].on_aux}
    flying: dict[int, Op] = {}
    done: dict[int, float] = {}
    seen: list[int] = []
    peak = 0
    for op, x in plan.program:
        fine = True
        if op == Op.COMPUTE:
            fine = all(i in ram and flying.get(i) != Op.PAGE_IN for i in graph.inputs_of[x])
            fine &= not any(i in flying for i in graph.outputs_of[x])
            fine &= x not in seen or graph.nodes[x].recomputable
            seen += [] if x in seen else [x]
            node = graph.nodes[x]
            peak = max(peak, sum(size[i] for i in ram) + node.output_bytes + node.workspace_bytes)
            ram |= set(graph.outputs_of[x])
            core += table.compute_time_s[x]
        elif op in (Op.PAGE_IN, Op.PAGE_OUT):
            into = op == Op.PAGE_IN
            fine = (x in stored and x not in ram) if into else (x in ram and x not in flying)
            time = (table.page_in_time_s if into else table.page_out_time_s)[x]
            (ram if into else stored).add(x)
            if dma:
                bus = done[x] = max(core, bus) + time
                flying[x] = op
            else:
                core = bus = done[x] = core + time
        elif op == Op.WAIT:
            fine = x in done
            stall += max(0.0, done.get(x, 0.0) - core)
            core = max(core, done.get(x, 0.0))
            flying.pop(x, None)
        else:
            fine = x in ram and x not in flying
            ram.discard(x)
        peak = max(peak, sum(size[i] for i in ram))
        if not fine:
            return False, 0, 0, 0
    valid = seen == list(range(len(graph.nodes))) and not any(graph.users_of[i] for i in ram)
    return valid, max(core, bus), stall, peak


@pytest.mark.parametrize("mode", ["blocking", "dma"])
@parts(2)
def test_agrees_with_a_second_simulation(part: Part, mode: str) -> None:
    """Plans, and plans with one instruction altered, have the figures of a second simulation."""
    verdicts = {True: 0, False: 0}
    for seed in part.of(range(80)):
        rng = seeded(f"walk/{mode}/{seed}")
        graph, costs, made = random_plan(rng, mode)
        for case in (made, *(altered(rng, graph, made) for _ in range(6))):
            check = check_plan(graph, costs, case, aux_bytes=2**53)
            valid, makespan_s, stall_s, peak_bytes = second_simulation(graph, costs, case)
            assert check.valid == valid, (seed, case.program, check.violations)
            verdicts[valid] += 1
            if valid:
                assert check.makespan_s == pytest.approx(makespan_s, rel=1e-12)
                assert check.stall_s == pytest.approx(stall_s, rel=1e-12)
                assert check.peak_ram_bytes == peak_bytes
        assert check_plan(graph, costs, made, aux_bytes=2**53).valid
    assert min(verdicts.values()) > part.share(100)


def test_public_names() -> None:
    """The simulator and the plan are among the package's names."""
    assert pm.check_plan is check_plan
    assert pm.Plan is Plan
