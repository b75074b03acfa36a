"""The simulator of plans against figures by hand, a second walk, and the schedule."""

from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

import pytest

import poetmodel as pm
from kit.instances import make_rng
from kit.plans import (
    HELD,
    PAGED,
    STORED,
    alter_plan,
    parse_plan,
    random_plan,
    random_state_plan,
    state_step,
)
from kit.plans import PAGED as PAGED_SKIP
from kit.rotation import parametrize_parts
from kit.worked import bench_device, even_costs, skip_graph
from poetmodel.device import Costs, StorageMode
from poetmodel.errors import PlanError
from poetmodel.plan import InstructionRecord, Op, check_plan
from poetmodel.plan.simulation import false_claims
from poetmodel.plan.stays import list_stays
from poetmodel.schedule import GraphIdentity
from poetmodel.schedule.machine import BEFORE, Content, Origin, Stay


def slow_costs(**more):
    """Return costs with page-ins of 7 s and page-outs of 5 s."""
    return even_costs(skip_graph(), page_in=(7.0, 0.5), page_out=(5.0, 0.25), **more)


BLOCKING = parse_plan(PAGED.replace("w0 ", ""), "blocking")


def test_blocking_program_has_one_clock():
    """Computations of 1 + 2 + 3 + 4 s, a page-out of 5 s and a page-in of 7 s follow each other.

    Idle power of 2 W is drawn over the makespan: 20 s of a dma plan, 22 s of the blocking one.
    Without costs, there are no times, but peak and order.
    """
    check = check_plan(skip_graph(), slow_costs(), BLOCKING)
    assert check.violations == ()
    assert (check.compute_s, check.transfer_s, check.stall_s) == (10.0, 12.0, 0.0)
    assert (check.makespan_s, check.energy_j) == (22.0, 10.75)
    assert check.records[1] == InstructionRecord(1.0, 1.0, 6.0, 4, 4)
    # a + b = 10 when b is computed, b + c = 11 for c, a + c + d = 12 for d.
    assert [record.peak_bytes for record in check.records] == [4, 4, 10, 10, 11, 11, 9, 12, 12, 8]
    assert [record.ram_bytes for record in check.records] == [4, 4, 10, 6, 11, 5, 9, 12, 8, 3]
    assert (check.peak_ram_bytes, check.peak_position) == (12, 7)
    assert (check.aux_used_bytes, check.written_bytes, check.read_bytes) == (4, 4, 4)
    costs = slow_costs(device=bench_device(idle_power_w=2.0))
    assert check_plan(skip_graph(), costs, parse_plan(PAGED)).energy_j == 10.75 + 40
    assert check_plan(skip_graph(), costs, BLOCKING).energy_j == 10.75 + 44
    check = check_plan(skip_graph(), None, parse_plan(PAGED))
    assert (check.valid, check.peak_ram_bytes) == (True, 12)
    assert (check.makespan_s, check.stall_s, check.energy_j) == (None, None, None)


def test_dma_program_overlaps_and_stalls():
    """The page-out lasts from 1 s to 6 s, b to 3 s: 3 s of stall, and 7 s for the page-in."""
    check = check_plan(skip_graph(), slow_costs(), parse_plan(PAGED))
    assert check.violations == ()
    # b ends at 3, the page-out at 6; c 6..9; page-in 9..16; d 16..20.
    assert check.records[1] == InstructionRecord(1.0, 1.0, 6.0, 4, 4)
    assert check.records[3] == InstructionRecord(3.0, 3.0, 6.0, 10, 10)
    assert check.records[7] == InstructionRecord(9.0, 9.0, 16.0, 9, 9)
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
    check = check_plan(skip_graph(), even_costs(skip_graph()), parse_plan(text))
    assert any(words in violation for violation in check.violations), check.violations


def test_order_of_computations():
    """First ones keep the order of the graph; a node with `recomputable` false is computed once."""
    nodes = tuple(pm.operation(name, output_bytes=1) for name in "ab")
    graph = pm.Graph(name="free", nodes=nodes)
    assert check_plan(graph, None, parse_plan("c1 c0")).violations == (
        "instruction 1, compute 0: node 'a' is first computed after 'b', which follows it",
    )
    assert check_plan(graph, None, parse_plan("c0 c1")).valid
    twice = parse_plan("c0 c0 c1 c2 f1 c3 f0 f2")
    check = check_plan(skip_graph(recomputable=False), None, twice)
    assert check.violations == ("instruction 1, compute 0: node 'a' must not be computed again",)
    # The old copy counts beside the new one for that record, and no more after.
    assert check_plan(skip_graph(), None, twice).records[1][3:5] == (8, 4)


def test_budget_and_storage_are_limits():
    """A peak of 12 B and 4 B of storage fit exactly, and not into one byte less.

    Without another limit, the size of the device's storage counts; costs without pages reject every
    transfer.
    """
    graph, costs = skip_graph(), even_costs(skip_graph())
    assert check_plan(graph, costs, parse_plan(PAGED), ram_budget_bytes=12, aux_bytes=4).valid
    tight = check_plan(graph, costs, parse_plan(PAGED), ram_budget_bytes=11, aux_bytes=3)
    assert [violation.partition(":")[0] for violation in tight.violations] == [
        "instruction 9",
        "storage used 4 B is above the limit of 3 B",
    ]
    assert not check_plan(graph, costs, parse_plan(PAGED, ram_budget_bytes=11)).valid
    small = even_costs(graph, device=bench_device(aux_bytes=3))
    assert not check_plan(graph, small, parse_plan(PAGED)).valid
    assert check_plan(graph, small, parse_plan(PAGED), aux_bytes=4).valid
    graph = skip_graph()
    costs = even_costs(graph, page_in=None, page_out=None)
    check = check_plan(graph, costs, parse_plan(PAGED))
    assert sum("no auxiliary storage" in violation for violation in check.violations) == 2


def test_plan_of_another_graph_is_refused():
    """The identity must be that of the graph.

    Stated figures are compared: times within 1e-9, bytes exactly.
    """
    identity = GraphIdentity.from_graph(skip_graph(mask=True))
    with pytest.raises(PlanError, match="give the graph it was made for"):
        check_plan(skip_graph(), None, parse_plan(PAGED, identity=identity))
    graph = skip_graph()
    check = check_plan(graph, even_costs(graph), parse_plan(PAGED))
    stated = {"makespan_s": check.makespan_s, "peak_ram_bytes": 12.0, "energy_j": None}
    assert list(false_claims(check, stated)) == []
    wrong = {"makespan_s": (check.makespan_s or 0) * (1 + 1e-8), "peak_ram_bytes": 11.0}
    assert [fault.partition(":")[0] for fault in false_claims(check, wrong)] == list(wrong)


# -- stays ---------------------------------------------------------------------------------------
X, W, Y, V, G, NEW = range(6)


def ram_in_use(intervals, instructions):
    """Return the bytes in RAM during each instruction, and after it [B]."""
    change = [0] * (2 * instructions + 2)  # during and after each instruction, and the end
    for stay in intervals:
        change[2 * max(stay.begin, 0)] += stay.bytes
        change[min(2 * stay.end + 1, 2 * instructions)] -= stay.bytes - stay.overwritten_bytes
        if stay.overwritten_at is not None:
            change[2 * stay.overwritten_at] -= stay.overwritten_bytes
    levels = list(accumulate(change))
    return tuple(zip(levels[0 : 2 * instructions : 2], levels[1::2], strict=False))


def check_sum(graph, made):
    """Compare the sum of all stays with the plan checker's RAM, during and after everything."""
    check = check_plan(graph, None, made)
    assert check.violations == ()
    found = list_stays(graph, made)
    assert ram_in_use(found, len(made.program)) == tuple(
        (record.peak_bytes, record.ram_bytes) for record in check.records
    )
    return found


def test_copies_of_a_plan_that_pages():
    """Tensor a is there twice, and between the two on storage; b has a workspace."""
    found = check_sum(skip_graph(workspace=True), parse_plan(PAGED_SKIP))
    copies = [s for s in found if s.content == Content.OUTPUT]
    assert [(s.index, s.origin, s.begin, s.end) for s in copies] == [
        (0, Origin.COMPUTED, 0, 4),
        (1, Origin.COMPUTED, 2, 6),
        (2, Origin.COMPUTED, 5, 11),
        (0, Origin.PAGED_IN, 7, 10),
        (3, Origin.COMPUTED, 9, 12),
    ]
    first, _, workspace, *_, again, _ = found
    assert (first.reads, first.paged_out, again.reads, again.paged_out) == ((2,), True, (9,), False)
    assert workspace == Stay(
        content=Content.WORKSPACE, index=1, origin=Origin.COMPUTED, bytes=1, begin=2, end=2
    )


def test_outputs_in_place_and_replacements_take_no_byte_twice():
    """Of x, 10 B, y uses 6 B; w+ has the memory of w, until it is paged out and freed."""
    found = check_sum(state_step(), parse_plan(STORED, "blocking", resident=()))
    by_begin = {(s.index, s.begin): s for s in found}
    assert (
        by_begin[X, 0].overwritten_at,
        by_begin[X, 0].overwritten_bytes,
        by_begin[X, 0].end,
    ) == (2, 6, 3)
    again = by_begin[W, 5]
    assert (again.origin, again.replaced_by, again.paged_out, again.end) == (
        Origin.PAGED_IN,
        NEW,
        True,
        13,
    )
    assert not any(s.index == NEW for s in found)


def test_resident_state_is_there_from_before_to_after():
    """Resident state has no instruction; memory-mapped state is not in RAM.

    A plan of another graph is refused.
    """
    found = check_sum(state_step(), parse_plan(HELD, "blocking", resident=(W, V)))
    assert [(s.index, s.origin, s.begin, s.end) for s in found[:2]] == [
        (W, Origin.RESIDENT, BEFORE, 9),
        (V, Origin.RESIDENT, BEFORE, 9),
    ]
    mapped = parse_plan(f"{HELD} o5 f5", "blocking", resident=(), memory_mapped=True)
    assert {s.index for s in check_sum(state_step(), mapped)} == {X, Y, G}
    other = replace(parse_plan(PAGED_SKIP), identity=GraphIdentity.from_graph(state_step()))
    with pytest.raises(PlanError, match="sha256"):
        list_stays(skip_graph(), other)


@pytest.mark.parametrize("mode", ["blocking", "dma"])
@pytest.mark.parametrize("with_state", [False, True], ids=["no state", "state"])
@parametrize_parts(3)
def test_the_sum_is_the_ram_of_the_plan_checker(part, mode, *, with_state):
    """During and after every instruction of random plans, some memory-mapped, some in place."""
    shared = mapped = again = 0
    for seed in part.select(range(120)):
        rng = make_rng(f"stays/{mode}/{with_state}/{seed}")
        graph, _, made = random_state_plan(rng, mode) if with_state else random_plan(rng, mode)
        found = check_sum(graph, made)
        shared += any(s.overwritten_bytes for s in found)
        mapped += made.memory_mapped
        again += any(s.origin == Origin.RECOMPUTED for s in found)
    assert again > part.divide(10)
    assert not with_state or min(shared, mapped) > part.divide(10)


# -- state ---------------------------------------------------------------------------------------
X, W, Y, V, G, NEW = range(6)

BESIDE = "c0 c1 w1 c2 f0 f1 c3 i1 w3 w1 c4 f2 f3 c5 f4 o5 w5 f5"
"""`STORED` for dma."""


def costs_of(graph, device=None):
    """Return integer costs: node k takes 1 + k seconds, page-ins 100, page-outs 1000."""
    compute = [0 if node.is_state else 1 + k for k, node in enumerate(graph.nodes)]
    return Costs.from_arrays(
        graph,
        compute_time_s=compute,
        compute_energy_j=compute,
        page_in=[(100, 10)] * len(graph.tensors),
        page_out=[(1000, 20)] * len(graph.tensors),
        device=device,
    )


def mapped_device():
    """Return one whose storage the core reads like RAM."""
    device = bench_device()
    return replace(device, storage=replace(device.storage, memory_mapped=True))


def test_state_on_storage_is_read_by_its_node_and_written_back():
    """100 s for each of w, w again and v, 1000 s for w+; 22 s of computations."""
    graph = state_step()
    check = check_plan(graph, costs_of(graph), parse_plan(STORED, "blocking", resident=()))
    assert check.violations == ()
    assert (check.compute_s, check.transfer_s, check.makespan_s) == (15.0, 1300.0, 1315.0)
    assert check.energy_j == 15 + 3 * 10 + 20
    assert check.records[1] == InstructionRecord(1.0, 1.0, 101.0, 18, 18)
    # y takes over 6 of the 10 B of x, and the other 4 go with it; w+ lies where w lay.
    assert [record.peak_bytes for record in check.records] == [
        *(10, 18, 18, 18, 14, 14),
        *(17, 26, 26, 20, 17, 17, 8, 8),
    ]
    assert [record.ram_bytes for record in check.records] == [
        *(10, 18, 18, 14, 6, 14),
        *(17, 26, 20, 17, 17, 8, 8, 0),
    ]
    assert (check.aux_used_bytes, check.written_bytes, check.read_bytes) == (11, 8, 19)


def test_memory_mapped_state_is_read_where_it_lies():
    """No RAM and no page-in; the page-out of w+ has its cost."""
    graph = state_step()
    made = replace(parse_plan(f"{HELD} o5 f5", "blocking", resident=()), memory_mapped=True)
    check = check_plan(graph, costs_of(graph, mapped_device()), made)
    assert (check.violations, check.peak_ram_bytes) == ((), 15)
    assert (check.transfer_s, check.aux_used_bytes, check.read_bytes) == (1000.0, 11, 0)
    for device, words in (
        (bench_device(), "in place, and the storage of bench is not memory-mapped"),
        (mapped_device(), "into RAM, and the storage of bench is memory-mapped"),
    ):
        other = made if "not" in words else parse_plan(STORED, "blocking", resident=())
        (fault,) = check_plan(graph, costs_of(graph, device), other).violations
        assert words in fault


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"text": STORED.replace("c1 c2", "c2 c1")}, "node 'y' needs tensor 'w' in RAM"),
        ({"text": STORED.replace("i1 ", "")}, "node 'g' needs tensor 'w' in RAM"),
        ({"text": STORED.replace("i1 ", "c1 ")}, "node 'w' must not be computed again"),
        ({"text": STORED.replace("c1 ", "i1 ", 1)}, "the compute of its node reads for the first"),
        (
            {"text": STORED.replace("f1 i1", "o1 f1 i1")},
            "page_out 1: tensor 'w' is state, which is",
        ),
        ({"text": STORED.replace("o5 f5", "f5")}, "must be paged out before it is freed"),
        ({"text": STORED.replace("o5 f5", "")}, "tensor 'w+' is never paged out: it replaces"),
        ({"text": STORED.replace("o5", "o5 o5")}, "replaces tensor 'w' and was paged out already"),
        ({"text": f"{STORED} i5"}, "page_in 5: tensor 'w+' replaces tensor 'w', and nothing reads"),
        ({"text": f"{STORED} i1"}, "page_in 1: tensor 'w' is state which 'u' has replaced"),
        ({"text": STORED.replace("c5", "c5 f1")}, "free 1: tensor 'w' is state which 'u' has"),
        ({"text": STORED.replace("o5", "c4 o5")}, "node 'g' reads tensor 'w', which 'u'"),
        ({"text": STORED.replace("c3 ", "").replace(" f3", "")}, "node 'v' is never computed"),
        ({"text": STORED.replace("f3 ", "")}, "tensor 'v' is still in RAM at the end"),
        ({"text": f"{HELD} i1", "resident": (W, V)}, "page_in 1: tensor 'w' is resident state"),
        ({"text": f"{HELD} f3", "resident": (W, V)}, "free 3: tensor 'v' is resident state"),
        ({"text": f"{HELD} o5", "resident": (W, V)}, "page_out 5: tensor 'w+' replaces tensor"),
        ({"text": f"{HELD} c4", "resident": (W, V)}, "node 'g' reads tensor 'w', which 'u' has"),
        ({"text": HELD.replace("c1 c2", "c2 c1"), "resident": (W, V)}, "is first computed after"),
        ({"text": f"{HELD} o5 i3", "memory_mapped": True}, "'v' is state on memory-mapped storage"),
        ({"text": f"{HELD}", "memory_mapped": True}, "tensor 'w+' is never paged out"),
        ({"text": HELD, "resident": (W, V, X)}, "resident[0]: tensor 'x' is no state tensor"),
        ({"text": HELD, "resident": (W, V, 9)}, "resident[9]: the graph has no such tensor"),
        ({"text": BESIDE.replace("w1 c2", "c2"), "mode": "dma"}, "before its page_in is done"),
        ({"text": BESIDE.replace("w3 ", ""), "mode": "dma"}, "before its page_in is done"),
        ({"text": BESIDE.replace("w5 ", ""), "mode": "dma"}, "still under way: its page_out"),
    ],
)
def test_each_broken_rule_of_state_is_told(made, words):
    """A program that breaks one rule is rejected, in words that name place and tensor."""
    keys = {"resident": (), **made}
    case = parse_plan(keys.pop("text"), keys.pop("mode", "blocking"), **keys)
    check = check_plan(state_step(), None, case)
    assert any(words in violation for violation in check.violations), check.violations


def test_homes_count_as_storage_used():
    """11 B of state, and paged-out tensors beside it; the replacement needs no bytes.

    Without page costs, the first read and the page-out are violations.
    """
    graph = state_step()
    assert check_plan(graph, None, parse_plan(STORED, "blocking", resident=()), aux_bytes=11).valid
    (fault,) = check_plan(
        graph, None, parse_plan(STORED, "blocking", resident=()), aux_bytes=10
    ).violations
    assert fault == "storage used 11 B is above the limit of 10 B"
    more = check_plan(
        graph, None, parse_plan(STORED.replace("c2", "o0 c2"), "blocking", resident=())
    )
    assert (more.violations, more.aux_used_bytes, more.written_bytes) == ((), 21, 18)
    costs = Costs.from_arrays(graph, compute_time_s=[0] * 6, compute_energy_j=[0] * 6)
    faults = check_plan(graph, costs, parse_plan(STORED, "blocking", resident=())).violations
    assert sum("no auxiliary storage" in fault for fault in faults) == 4
    assert check_plan(graph, costs, parse_plan(HELD, "blocking", resident=(W, V))).valid


# -- a second walk -----------------------------------------------------------------------------
def walked(  # noqa: C901, PLR0915 - one rule after the other
    graph, costs, made
):
    """Simulate a plan by each rule: makespan, stall, peak and storage.

    A violated rule is an `AssertionError`. Bytes in RAM are summed at each instruction.
    """
    table, dma = costs.table(graph), made.mode == StorageMode.DMA
    names = [tensor.name for tensor in graph.tensors]
    size = [tensor.bytes for tensor in graph.tensors]
    maker = [k for k, node in enumerate(graph.nodes) for _ in node.outputs]
    is_state = [graph.nodes[k].phase == "state" for k in maker]
    home = {i for i in made.resident or () if is_state[i]}
    there = {i for i, held in enumerate(is_state) if held and i not in home}
    lies = home | (there if made.memory_mapped else set())
    old = {i: names.index(t.replaces) for i, t in enumerate(graph.tensors) if t.replaces}
    weight = [0 if made.memory_mapped and old.get(i) in there else b for i, b in enumerate(size)]
    stored = there | {i for i, k in enumerate(maker) if graph.nodes[k].on_aux}
    free_room = set(stored)
    core = bus = stall = 0.0
    ram = set()
    flying = {}
    done = {}
    gone = set()
    written = set()
    seen = []
    peak = 0

    def held():
        return sum(size[i] for i in home) + sum(weight[i] for i in ram)

    def moved(i, time, word):
        nonlocal core, bus
        bus = done[i] = max(core, bus) + time
        if dma:
            flying[i] = word
        else:
            core = bus

    for place, (op, x) in enumerate(made.program):
        if op == Op.COMPUTE:
            node = graph.nodes[x]
            reads = {names.index(name) for name in node.inputs}
            makes = {i for i, k in enumerate(maker) if k == x}
            assert x not in seen or node.recomputable
            if node.phase == "state":
                (w,) = makes
                if w in there and not made.memory_mapped:
                    assert w not in gone
                    ram.add(w)
                    moved(w, table.page_in_time_s[w], "in")
                seen.append(x)
                peak = max(peak, held())
                continue
            assert not reads & gone
            assert all(i in ram and flying.get(i) != "in" for i in reads - lies)
            assert not makes & flying.keys()
            follow = set()
            for other, i in made.program[place + 1 :]:
                if other != Op.FREE:
                    break
                follow.add(i)
            saved = sum(
                min(weight[names.index(a)], weight[names.index(b)])
                for a, b in dict(node.in_place).items()
                if names.index(b) in follow & ram - flying.keys()
            )
            plain = [i for i in makes if i not in old]
            peak = max(peak, held() + sum(size[i] for i in plain) + node.workspace_bytes - saved)
            ram |= set(plain)
            for i in makes & old.keys():
                gone.add(old[i])
                if old[i] in there:
                    ram.discard(old[i])
                    ram.add(i)
            seen.append(x)
            core += table.compute_time_s[x]
            continue
        assert x not in lies | gone
        assert old.get(x) not in home
        if op == Op.PAGE_IN:
            assert x in stored - ram - old.keys()
            assert not is_state[x] or maker[x] in seen
            ram.add(x)
            moved(x, table.page_in_time_s[x], "in")
            peak = max(peak, held())
        elif op == Op.PAGE_OUT:
            assert x in ram - written - flying.keys()
            assert not is_state[x]
            stored.add(x)
            written |= {x} & old.keys()
            moved(x, table.page_out_time_s[x], "out")
        elif op == Op.WAIT:
            assert x in done
            stall += max(0.0, done[x] - core)
            core = max(core, done[x])
            flying.pop(x, None)
        else:
            assert x in ram - flying.keys()
            assert x in written or x not in old
            ram.remove(x)
    anywhere = {maker[i] for i in there - lies}
    first = [k for k in dict.fromkeys(seen) if k not in anywhere]
    assert first == sorted(first)
    assert set(seen) == set(range(len(graph.nodes)))
    assert not any(names[i] in node.inputs for i in ram for node in graph.nodes)
    assert all(i in written for i in old if old[i] in there)
    storage = sum(size[i] for i in there) + sum(size[i] for i in stored - free_room - old.keys())
    return max(core, bus), stall, peak, storage


@pytest.mark.parametrize("mode", ["blocking", "dma"])
@pytest.mark.parametrize("with_state", [False, True])
@parametrize_parts(3)
def test_agrees_with_a_second_walk(part, mode, *, with_state):
    """Plans, and plans with one instruction altered, have the figures of a second walk."""
    verdicts = {True: 0, False: 0}
    for seed in part.select(range(120)):
        rng = make_rng(f"walk/{with_state}/{mode}/{seed}")
        graph, costs, made = random_state_plan(rng, mode) if with_state else random_plan(rng, mode)
        for number, case in enumerate((made, *(alter_plan(rng, graph, made) for _ in range(8)))):
            check = check_plan(graph, costs, case, aux_bytes=2**53)
            found = None
            with suppress(AssertionError):
                found = walked(graph, costs, case)
            assert check.valid == (found is not None), (seed, case.program, check.violations)
            assert check.valid or number
            verdicts[check.valid] += 1
            if found is not None:
                makespan_s, stall_s, peak_bytes, storage_bytes = found
                assert check.makespan_s == pytest.approx(makespan_s, rel=1e-12)
                assert check.stall_s == pytest.approx(stall_s, rel=1e-12)
                assert check.peak_ram_bytes == peak_bytes
                assert check.aux_used_bytes == storage_bytes
    assert min(verdicts.values()) > part.divide(150)
