"""Commits: their cost is in all values, limits and bounds, for all homes of the state."""

from dataclasses import replace

import pytest

from kit.claims import find_faults
from kit.instances import make_rng, state_problem
from kit.own_rows import state_rows_problem
from kit.worked import make_state_node, make_update_node
from poetmodel import planner
from poetmodel.device import Costs, Device
from poetmodel.device.generation import GenerationLayout
from poetmodel.device.hardware import Compute, Flash, Storage, StorageMode, Transfer
from poetmodel.errors import InputError
from poetmodel.graph import Graph, operation
from poetmodel.plan import check_plan
from poetmodel.problem import Problem
from poetmodel.schedule import check_schedule
from poetmodel.solver import solve

FLASH = Flash(
    size_bytes=1 << 20,
    write_unit_bytes=8,
    erase_block_bytes=64,
    erase_s=2.0,
    write_bytes_per_s=4.0,
    power_w=3.0,
    endurance_cycles=1000,
    storage_bytes=4096,
)


def committing(problem, seed):
    """Return a problem whose steps commit; its storage may lie in the program's flash."""
    rng = make_rng(f"commit/{seed}")
    device = problem.costs.device
    costs = problem.costs
    if rng.random() < 0.6:
        device = replace(device, flash=FLASH, aux_bytes=FLASH.storage_bytes)
        if rng.random() < 0.3:
            device = replace(device, storage=replace(device.storage, volatile=True))
        costs = replace(costs, device=device)
    commit = rng.choice((1, 1, 1, 2, 5))
    counts = rng.choice(("serial", "serial", "compute"))
    changes = {"commit": commit, "costs": costs, "deadline_counts": counts}
    stated = replace(problem.without_limits("time"), **changes)
    if rng.random() < 0.4:
        stated = replace(stated, deadline=rng.choice(("100%", "110%", "150%")))
    return stated


SEEDS = [f"c/{i}" for i in range(400)]


@pytest.mark.parametrize(
    ("way", "make", "seeds"),
    [
        ("lazy", state_problem, SEEDS[:40]),
        pytest.param("compact", state_rows_problem, SEEDS[40:60], marks=pytest.mark.slow),
        pytest.param("compact", state_problem, SEEDS[:40], marks=pytest.mark.slow),
        pytest.param("lazy", state_rows_problem, SEEDS[40:60], marks=pytest.mark.slow),
        *(
            pytest.param(way, make, SEEDS[begin : begin + 30], marks=pytest.mark.seeds)
            for way, make in (("lazy", state_problem), ("compact", state_rows_problem))
            for begin in range(60, 360, 40)
        ),
    ],
)
def test_commits_are_exact(way, make, seeds):
    """All methods find the exhaustive optimum, with user constraints, and claim no more."""
    assert not find_faults(seeds, lambda seed: committing(make(seed), seed), way)


# -- by hand -----------------------------------------------------------------------------------
def small_step():
    """Return a step that updates a weight of 100 B and a counter of 4 B, and reads one of 40 B."""
    nodes = (
        make_state_node("w", 100),
        make_state_node("n", 4),
        make_state_node("f", 40),
        operation("y", output_bytes=20, inputs=("w", "f"), flops=1000),
        make_update_node("step", "y", w=100, n=4),
    )
    return Graph(name="small", nodes=nodes)


def storage(**more):
    """Return a storage without latency."""
    way = Transfer(latency_s=0.0, bytes_per_s=10.0, power_w=1.0)
    return Storage(page_in=way, page_out=way, **{"mode": StorageMode.BLOCKING, **more})


def board(**more):
    """Return a board whose storage lies in `FLASH`."""
    given = {"storage": storage(memory_mapped=True), "flash": FLASH, "aux_bytes": 4096} | more
    return Device(
        name="board", ram_bytes=1000, compute=Compute(flops_per_s=1000.0, power_w=2.0), **given
    )


def stated(device, commit, **limits):
    """Return the problem of the small step on a board."""
    graph = small_step()
    return Problem(graph, Costs.estimate(graph, device), ram=1000, commit=commit, **limits)


def test_a_commit_costs_what_flash_takes():
    """Tensors and sums in units of 8 B, a record of 32 B, a seal of 8 B; each block erased."""
    problem = stated(board(), 1)
    written = 32 + (104 + 8) + (8 + 8) + 8
    commit_s = written / 4.0 + 3 * 2.0  # 168 B lie in three blocks of 64
    assert GenerationLayout(8, 64).size_bytes([100, 4]) == written
    result = solve(problem, gap=0.0)
    assert result.status == "optimal"
    assert result.simulation.time_s == pytest.approx(1.0 + commit_s)
    assert result.energy_j == pytest.approx(2.0 + 3.0 * commit_s)
    assert (result.overhead_j, result.simulation.written_bytes) == (0.0, written)
    assert problem.baseline_energy_j == pytest.approx(result.energy_j)
    assert problem.pass_time_s == pytest.approx(result.simulation.time_s)
    assert result.simulation.steps_until_worn == pytest.approx(4096 * 1000 / (3 * 64))


def test_every_nth_step_pays_its_share_and_keeps_state_in_ram():
    """A quarter of time, energy, bytes and erases; a home on storage is refused."""
    whole, fourth = stated(board(), 1), stated(board(), 4)
    paid = [solve(problem, gap=0.0).simulation for problem in (whole, fourth)]
    assert [run.committed_bytes for run in paid] == [168, 42]
    assert paid[1].steps_until_worn == pytest.approx(4 * paid[0].steps_until_worn)
    for name in ("time_s", "energy_j"):
        paid = getattr(whole.commit_cost, name) / 4
        assert getattr(fourth.commit_cost, name) == pytest.approx(paid)
    schedule = solve(stated(board(), None, minimize="ram"), gap=0.0).require_schedule()
    assert len(schedule.resident) < 2
    assert check_schedule(whole, schedule).valid
    assert "in RAM between commits" in "".join(check_schedule(fourth, schedule).violations)
    assert {0, 1} <= set(solve(replace(fourth, minimize="ram")).require_schedule().resident)


def test_commits_of_storage_that_forgets_go_to_flash():
    """Replaced state is written there, in addition to page-outs of homes on the storage.

    Flash needs two generations: less is infeasible, for any schedule.
    """
    forgets = board(storage=storage(volatile=True), aux_bytes=None)
    problem = stated(forgets, 1)
    assert problem.commit_cost.time_s == pytest.approx(168 / 4.0 + 3 * 2.0)
    on_storage = solve(replace(problem, minimize="ram"), gap=0.0)
    sizes = problem.graph.tensor_bytes
    paged = {i for _, i in on_storage.require_schedule().M_out}
    assert paged
    assert on_storage.simulation.written_bytes == 168 + sum(sizes[i] for i in paged)
    never = stated(forgets, None)
    assert problem.table.page_out_time_s == never.table.page_out_time_s
    problem = stated(board(), 1, aux_bytes=6 * 64)
    schedule = solve(problem).require_schedule()
    short = replace(problem, aux_bytes=6 * 64 - 1)
    assert solve(short).status == "infeasible"
    assert check_schedule(problem, schedule).valid
    assert "two generations" in "".join(check_schedule(short, schedule).violations)


@pytest.mark.parametrize("resident", [True, False])
def test_a_plan_takes_what_its_schedule_says(resident):
    """Wherever the homes are, blocking or beside the computing."""
    for mode in StorageMode:
        device = board(storage=storage(mode=mode, memory_mapped=True))
        problem = stated(device, 1, minimize="time" if resident else "ram")
        result = solve(problem, gap=0.0)
        plan = planner.make_plan(problem.graph, problem.costs, result.require_schedule(), mode=mode)
        assert plan.commit == 1
        check = check_plan(problem.graph, problem.costs, plan)
        assert not check.violations
        assert check.written_bytes == result.simulation.written_bytes
        assert check.makespan_s == pytest.approx(result.simulation.makespan_s)
        assert check.energy_j == pytest.approx(result.energy_j)


@pytest.mark.parametrize(
    "seeds", [SEEDS[:6], pytest.param(SEEDS[6:40], marks=pytest.mark.slow)], ids=len
)
def test_transfers_beside_the_computing_leave_a_tail(seeds):
    """State in RAM is written after all else; no bound is above a plan of any schedule."""
    checked = 0
    for seed in seeds:
        problem = committing(state_problem(seed), seed)
        device = problem.costs.device
        device = replace(device, storage=replace(device.storage, mode=StorageMode.DMA))
        costs = replace(problem.costs, device=device)
        try:
            problem = Problem(
                problem.graph, costs, ram=problem.ram, minimize="time", commit=problem.commit
            )
        except InputError:
            continue
        if problem.table.commit is None:
            continue
        result = solve(problem, gap=0.0, time_limit=20)
        other = solve(replace(problem, minimize="energy"), gap=0.0, time_limit=20)
        for each in (result, other):
            if each.schedule is None:
                continue
            verdict = planner.verify(problem, each.schedule)
            tail_s = problem.table.commit_totals(verdict.simulation.page_outs).time_s
            assert verdict.valid
            assert verdict.simulation.time_s >= problem.pass_compute_s + tail_s - 1e-9
            assert result.proven_bound <= verdict.simulation.time_s + 1e-9
            checked += 1
    assert checked > len(seeds) // 2


@pytest.mark.parametrize("commit", [0, -1, True, 1.5, "daily"])
def test_other_numbers_of_steps_are_refused(commit):
    """The number of steps between commits is a whole number."""
    with pytest.raises(InputError, match="commit"):
        stated(board(), commit)
