"""Schedules and the simulator with state tensors and in-place operators."""

import json
import re
from dataclasses import replace

import pytest

from kit.closed_form import simulate_in_closed_form
from kit.instances import make_rng, random_graph, random_schedule, random_step
from kit.rotation import parametrize_parts
from kit.worked import bench_device, make_state_node, make_update_node
from poetmodel.device import Costs, Device, Storage, StorageMode
from poetmodel.errors import ScheduleError
from poetmodel.graph import (
    Graph,
    checkpoint_all_peak_bytes,
    checkpoint_all_profile,
    floor,
    operation,
)
from poetmodel.schedule import RELATIONS, GraphIdentity, Schedule, checkpoint_all, simulate

Pairs = tuple[tuple[int, int], ...]


def step():
    """Return x, w, v (never read), y = f(x, w) in place of x, g = b(y, w), w+ = u(w, g)."""
    return Graph(
        name="step",
        nodes=(
            operation("x", output_bytes=10),
            make_state_node("w", 8),
            make_state_node("v", 3),
            operation("y", output_bytes=6, inputs=("x", "w"), in_place={"y": "x"}),
            operation("g", output_bytes=8, inputs=("y", "w")),
            make_update_node("u", "g", w=8),
            operation("z", output_bytes=1, inputs=("x",)),
        ),
    )


X, W, V, Y, G, NEW, Z = range(7)
ONCE = tuple((t, t) for t in range(7))
LAST_X = ((1, X), (2, X), (3, X), (4, X), (5, X), (6, X))


def fetched(**changes):
    """Return `step` with w on storage, dropped after y and read again for g, and v in RAM."""
    usual = {
        "R": ONCE,
        "S_RAM": (*LAST_X, (2, W), (3, W), (4, Y), (5, G), (5, W)),
        "S_AUX": ((2, W), (3, W), (4, W), (5, W)),
        "M_in": ((4, W),),
        "M_out": ((5, NEW),),
        "resident": (V,),
    }
    return Schedule(**usual | changes)


def kept(**changes):
    """Return `step` with all state in RAM."""
    usual = {"R": ONCE, "S_RAM": (*LAST_X, (4, Y), (5, G)), "resident": (W, V)}
    return Schedule(**usual | changes)


def without(name, *pairs):
    """Return a relation of `fetched` less some pairs."""
    return {name: tuple(pair for pair in getattr(fetched(), name) if pair not in pairs)}


def added(name, *pairs, to=None):
    """Return a relation of `fetched`, or of another schedule, and some pairs more."""
    return {name: (*getattr(to or fetched(), name), *pairs)}


def curve(run):
    """Return the memory curve as plain tuples (stage, step, bytes)."""
    return [tuple(point) for point in run.curve]


def costs_of(graph, *, mapped=False, mode="blocking"):
    """Return costs in whole numbers: compute 1+k, page-in 100+i, page-out 1000+i; times alike."""
    device = bench_device(mode=mode, aux_bytes=1000)
    assert device.storage is not None
    storage = replace(
        device.storage, memory_mapped=mapped, endurance_cycles=100, erase_block_bytes=5
    )
    computing = [0 if node.phase == "state" else 1 + k for k, node in enumerate(graph.nodes)]
    count = len(graph.tensors)
    return Costs.from_arrays(
        graph,
        compute_time_s=computing,
        compute_energy_j=computing,
        page_in=[(100 + i, 100 + i) for i in range(count)],
        page_out=[(1000 + i, 1000 + i) for i in range(count)],
        device=replace(device, storage=storage),
    )


# -- hand-computed -----------------------------------------------------------------------------
def test_homes_of_state_by_hand():
    """Of w and v, 11 bytes in total, in RAM from the first step to the last, without cost.

    On storage, the first read is a page-in; w+ is written over w, so that only w counts.
    Readers read memory-mapped state in place; its cost is the page-out of the replacement.
    Costs without storage leave only RAM as home.
    """
    graph = step()
    run = simulate(graph, costs_of(graph), kept())
    assert run.violations == ()
    assert [b for *_, b in curve(run)] == [21, 21, 21, 21 + 6, 21 + 6 + 8, 21 + 8, 21 + 1]
    assert run.peak_tensors == (X, W, V, Y, G)
    assert (run.aux_used_bytes, run.read_bytes, run.written_bytes) == (0, 0, 0)
    assert run.energy_j == run.baseline_energy_j == 1 + 4 + 5 + 6 + 7
    assert run.steps_until_worn is None
    run = simulate(graph, costs_of(graph), fetched())
    assert run.violations == ()
    assert curve(run) == [
        (0, 0, 3 + 10),
        (1, 1, 3 + 10 + 8),
        (2, 2, 3 + 10 + 8),
        (3, 3, 3 + 10 + 8 + 6),
        (4, 1, 3 + 10 + 6 + 8),
        (4, 4, 3 + 10 + 6 + 8 + 8),
        (5, 5, 3 + 10 + 8 + 8),
        (6, 6, 3 + 10 + 1),
    ]
    assert dict(run.page_ins) == {W: 2}
    assert dict(run.page_outs) == {NEW: 1}
    assert (run.aux_used_bytes, run.read_bytes, run.written_bytes) == (8, 16, 8)
    assert run.transfer_s == 2 * 101 + 1005
    assert (run.overhead_j, run.baseline_energy_j) == (run.transfer_s, 23)
    assert run.steps_until_worn == 1000 * 100 / 10  # two erase blocks of five bytes
    schedule = kept(resident=(), M_out=((5, NEW),))
    run = simulate(graph, costs_of(graph, mapped=True), schedule)
    assert run.violations == ()
    assert [b for *_, b in curve(run)] == [10, 10, 10, 16, 24, 18, 11]
    assert (run.aux_used_bytes, run.read_bytes, run.written_bytes) == (11, 0, 8)
    assert run.overhead_j == 1005
    costs = Costs.from_arrays(graph, compute_time_s=[0] * 7, compute_energy_j=[0] * 7)
    assert simulate(graph, costs, kept()).valid
    (fault,) = simulate(graph, costs, kept(resident=(W,))).violations
    assert fault == "state is not resident, but the costs have no auxiliary storage"


# -- each rule, broken alone -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        (
            fetched(**added("S_RAM", (6, W)), **added("S_AUX", (6, NEW))),
            "S_RAM[6,1]: tensor 'w' is state which stage 5 has replaced",
        ),
        (
            fetched(**added("S_AUX", (6, W))),
            "S_AUX[6,1]: tensor 'w' is state which stage 5 has replaced",
        ),
        (
            fetched(**added("M_in", (6, W))),
            "M_in[6,1]: tensor 'w' is state which stage 5 has replaced",
        ),
        (
            kept(**added("R", (6, 3)), **added("S_RAM", to=kept())),
            "R[6,3]: node 'y' reads tensor 'w', which stage 5 has replaced",
        ),
        (
            fetched(**added("M_out", (3, W))),
            "M_out[3,1]: tensor 'w' is state, which is never paged out; only its replacement is",
        ),
        (
            fetched(M_out=()),
            "M_out[5,5]: tensor 'w+' must be paged out where it is made: it replaces tensor 'w', "
            "which is not resident",
        ),
        (
            fetched(**added("M_out", (6, NEW))),
            "M_out[6,5]: tensor 'w+' is paged out where it is made, in stage 5",
        ),
        (
            fetched(**added("S_RAM", (6, NEW))),
            "S_RAM[6,5]: tensor 'w+' replaces tensor 'w' and is not kept in RAM",
        ),
        (
            fetched(**added("S_AUX", (6, NEW)), **added("M_in", (6, NEW))),
            "M_in[6,5]: tensor 'w+' replaces tensor 'w', and nothing reads it in the same step",
        ),
        (
            kept(**added("S_RAM", (3, W), to=kept())),
            "S_RAM[3,1]: tensor 'w' is resident: it is in no other relation",
        ),
        (kept(S_AUX=((3, W),)), "S_AUX[3,1]: tensor 'w' is resident: it is in no other relation"),
        (kept(M_in=((4, W),)), "M_in[4,1]: tensor 'w' is resident: it is in no other relation"),
        (
            kept(M_out=((5, NEW),)),
            "M_out[5,5]: tensor 'w+' replaces tensor 'w', which is resident: it is in no other "
            "relation",
        ),
        (kept(resident=(X, W, V)), "resident[0]: tensor 'x' is no state tensor"),
        (kept(resident=(W, V, 9)), "resident[9]: the graph has no such tensor"),
        (
            fetched(**without("S_RAM", (3, W)), **without("S_AUX", (3, W))),
            "R[3,3]: node 'y' needs 'w' in RAM",
        ),
        (
            fetched(**without("S_AUX", (4, W))),
            "M_in[4,1]: tensor 'w' is not on storage when stage 4 begins",
        ),
        (fetched(**without("S_RAM", (5, W))), "R[5,5]: node 'u' needs 'w' in RAM"),
        (fetched(R=ONCE[:1] + ONCE[2:]), "R[1,1]: node 'w' is not computed in its own stage"),
        (fetched(**added("R", (4, 1))), "R[4,1]: node 'w' must not be computed again"),
    ],
)
def test_each_broken_rule_is_named(schedule, fault):
    """The violation is first or alone, with the entry and the names."""
    violations = simulate(step(), None, schedule).violations
    assert fault in violations, violations


@pytest.mark.parametrize("name", ["S_RAM", "M_in"])
def test_memory_mapped_state_is_in_no_relation_of_ram(name):
    """The core reads it where it lies; to keep it in RAM is to make it resident."""
    graph = step()
    schedule = kept(
        resident=(V,), M_out=((5, NEW),), S_AUX=((3, W),), **added(name, (3, W), to=kept())
    )
    (fault,) = simulate(graph, costs_of(graph, mapped=True), schedule).violations
    assert fault == (
        f"{name}[3,1]: tensor 'w' is state on memory-mapped storage, where the core reads it"
    )


# -- a second opinion --------------------------------------------------------------------------
def flagged(run, *, first=False):
    """Return the entries that the violations name, or the first of them, as in `Blunt`."""
    found = set()
    for violation in run.violations[: 1 if first else None]:
        match = re.match(r"(\w+)\[(?:(-?\d+),)?(-?\d+)\]: ", violation)
        assert match, violation
        found.add((match[1], int(match[2] or -1), int(match[3])))
    return found


def check(graph, schedule, *, mapped):
    """Hold the simulator against the blunt one; return whether the schedule is valid."""
    run = simulate(graph, costs_of(graph, mapped=mapped), schedule)
    told = simulate_in_closed_form(graph, schedule, mapped=mapped)
    if told.violations:
        assert flagged(run, first=True) <= told.violations, (told.violations, run.violations)
        return False
    assert run.violations == ()
    assert {(p.stage, p.node): p.ram_bytes for p in run.curve} == told.curve
    assert run.peak_tensors == told.held[run.peak[:2]]
    assert run.aux_used_bytes == told.storage_bytes
    sizes = [tensor.bytes for node in graph.nodes for tensor in node.outputs]
    assert run.read_bytes == sum(sizes[i] * times for i, times in told.reads.items())
    assert run.written_bytes == sum(sizes[i] * times for i, times in told.writes.items())
    transfer = sum((100 + i) * times for i, times in told.reads.items())
    transfer += sum((1000 + i) * times for i, times in told.writes.items())
    assert run.transfer_s == transfer
    single = sum(1 + k for k, node in enumerate(graph.nodes) if node.phase != "state")
    again = sum(1 + k for t, k in schedule.R if k < t)
    assert (run.baseline_energy_j, run.overhead_j) == (single, again + transfer)
    assert run.energy_j == single + again + transfer
    return True


def drawn(rng):
    """Return a graph, with state or without, a schedule, and whether storage is memory-mapped."""
    while rng.random() < 0.7:
        graph, mapped = random_step(rng), rng.random() < 0.3
        schedule = random_schedule(rng, graph, mapped=mapped)
        if schedule is not None:
            return graph, schedule, mapped
    graph = random_graph(rng, (2, 8))
    return graph, random_schedule(rng, graph), False


def changed(rng, graph, schedule):
    """Change an entry, or the home of a tensor."""
    n, m = len(graph.nodes), len(graph.tensors)
    name = rng.choice((*RELATIONS, "resident"))
    if name == "resident":
        return replace(schedule, resident=tuple({*schedule.resident} ^ {rng.randrange(m)}))
    pairs = set(getattr(schedule, name))
    if pairs and rng.random() < 0.5:
        pairs.remove(rng.choice(sorted(pairs)))
    if rng.random() < 0.7:
        pairs ^= {(rng.randrange(n), rng.randrange(n if name == "R" else m))}
    return replace(schedule, **{name: tuple(pairs)})


@parametrize_parts(64)
def test_simulator_agrees_with_the_blunt_one(part):
    """20,000 schedules as drawn and after some changes: equal figures, or both find a fault."""
    counts = {True: 0, False: 0}
    saving = paging = 0
    for seed in part.select(range(20_000)):
        rng = make_rng(f"agree/{seed}")
        graph, schedule, mapped = drawn(rng)
        plain = replace(graph, nodes=tuple(replace(n, in_place=()) for n in graph.nodes))
        apart = simulate_in_closed_form(plain, schedule, mapped=mapped).curve
        saving += apart != simulate_in_closed_form(graph, schedule, mapped=mapped).curve
        paging += len(schedule.resident) < len(graph.state_tensors)
        for change in range(rng.choice((0, 1, 1, 1, 2, 4)) + 1):
            schedule = changed(rng, graph, schedule) if change else schedule
            counts[check(graph, schedule, mapped=mapped)] += 1
    assert min(counts.values()) > part.divide(15_000), counts
    assert saving > part.divide(2000), saving
    assert paging > part.divide(4000), paging


def test_keep_all_has_the_profile_of_the_graph():
    """The keep-all schedule of any step is valid, with all state in RAM, and has its peak."""
    for seed in range(400):
        graph = random_step(make_rng(f"keep-all/{seed}"))
        schedule = checkpoint_all(graph)
        run = simulate(graph, None, schedule)
        assert run.violations == ()
        assert schedule.resident == graph.state_tensors
        assert tuple(b for *_, b in curve(run)) == checkpoint_all_profile(graph)
        assert run.peak_ram_bytes == checkpoint_all_peak_bytes(graph)


# -- the sixth relation in files ---------------------------------------------------------------
def schedules(name, count):
    """Yield random graphs with random schedules that are meant to be valid."""
    found = seed = 0
    while found < count:
        rng = make_rng(f"{name}/{seed}")
        seed += 1
        graph, mapped = random_step(rng), rng.random() < 0.3
        schedule = random_schedule(rng, graph, mapped=mapped)
        if schedule is not None:
            found += 1
            yield graph, schedule, mapped


@parametrize_parts(3)
def test_no_valid_schedule_is_below_the_floor(part):
    """Not with state on storage, in place or on memory-mapped storage either."""
    for graph, schedule, mapped in part.select(schedules("floor", 1000)):
        run = simulate(graph, costs_of(graph, mapped=mapped), schedule)
        assert run.peak_ram_bytes >= floor(graph, memory_mapped=mapped).bytes


def test_resident_is_in_the_file_where_there_is_some(tmp_path):
    """It is sorted, without duplicates; without any, the file is unchanged."""
    graph = step()
    identity = GraphIdentity.from_graph(graph)
    schedule = kept(resident=(V, W, V), identity=identity)
    assert schedule.resident == (W, V)
    path = tmp_path / "kept.schedule.json"
    document = schedule.to_dict()
    assert document["resident"] == [W, V]
    usual = dict.fromkeys(("problem", "status"))
    path.write_text(json.dumps(document | usual))
    assert Schedule.load(path) == schedule
    schedule.save(path)
    assert Schedule.load(path) == schedule
    assert schedule != replace(schedule, resident=())
    assert "resident" not in replace(schedule, resident=()).to_dict()
    rows = [[k] for k in range(7)]
    assert Schedule.from_stages(identity=identity, R=rows, resident=[V, W]).resident == (W, V)


@pytest.mark.parametrize("entry", ["w", 1.5, None, [1, 2]])
def test_what_is_no_list_of_tensors_is_refused(tmp_path, entry):
    """In Python and in a file."""
    graph = step()
    with pytest.raises(ScheduleError, match="resident: expected whole numbers"):
        kept(resident=[entry])
    document = kept(identity=GraphIdentity.from_graph(graph)).to_dict() | {"resident": [entry]}
    path = tmp_path / "bad.schedule.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ScheduleError, match=r"resident\[0\]: expected"):
        Schedule.load(path)


def test_wear_counts_whole_blocks():
    """A device without endurance, size or writes never wears out."""
    device = costs_of(step()).device
    assert isinstance(device, Device)
    assert device.steps_until_worn([(8, 1), (1, 2)]) == 1000 * 100 / (10 + 2 * 5)
    assert device.steps_until_worn([]) is None
    assert replace(device, aux_bytes=None).steps_until_worn([(8, 1)]) is None
    storage = device.storage
    assert isinstance(storage, Storage)
    assert storage.mode == StorageMode.BLOCKING
    fine = replace(device, storage=replace(storage, erase_block_bytes=None))
    assert fine.steps_until_worn([(8, 1)]) == 12500
    plain = replace(device, storage=replace(storage, endurance_cycles=None))
    assert plain.steps_until_worn([(8, 1)]) is None
