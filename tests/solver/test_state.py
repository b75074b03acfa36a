"""Training steps with state and operators in place against exhaustive search, every way.

What a result claims must hold: its schedule is valid and the best there is, no bound is above the
optimum, and "infeasible" is said only where the search finds nothing. The search tries every set of
resident state; what it finds is simulated. Every instance has its seed in its name.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import pytest

from kit.claims import answer, row_faults
from kit.instances import scaled_state_problem, seeded, state_problem
from kit.oracle import optimum
from kit.own_rows import state_rows_problem
from kit.relaxation import RoundsError, no_rows, random_rows, run_rounds
from kit.rotation import Part, parts
from poetmodel.backends.registry import backend
from poetmodel.model.events import find_events, recomputable_nodes
from poetmodel.problem.infeasibility import obstacle
from poetmodel.schedule import verify
from poetmodel.solver.lazy import solve_lazily
from poetmodel.solver.outcome import finish
from poetmodel.solver.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.problem import Problem

BACKENDS: Final = tuple(
    pytest.param(name, marks=pytest.mark.skipif(not backend(name).available(), reason="missing"))
    for name in ("scip", "gurobi")
)
FORMULATIONS: Final = ("lazy", "compact", "unreduced")
WAYS: Final = (*FORMULATIONS, "built", "by hand")
QUICK, BATCH, ALL = 60, 100, 8
"""Instances of a quick test and of a slow one, and how many slow ones there are each way."""


def seeds(number: int, count: int) -> list[str]:
    """Return the seeds of one batch."""
    return [f"{number}/{i}" for i in range(count)]


def of_six(seed: str) -> Problem:
    """Make a problem of up to six nodes, state included."""
    return state_problem(seed, (4, 6))


# -- exhaustive search, simulated ----------------------------------------------------------------


@parts(4)
def test_what_the_search_finds_is_simulated(part: Part) -> None:
    """Its schedules are valid, own constraints included, and come to the value that it claims."""
    checked = 0
    for seed in part.of(seeds(0, QUICK)):
        for make in (state_problem, state_rows_problem):
            problem = make(seed)
            found = optimum(problem)
            if found is None:
                continue
            verdict = verify(problem, found.schedule)
            assert verdict.violations == (), seed
            measured = problem.objective.measured(verdict.simulation)
            assert measured == pytest.approx(found.value, abs=1e-9), seed
            checked += 1
    assert checked > part.share(40)


@pytest.mark.slow
def test_fewer_bytes_than_the_least_are_impossible() -> None:
    """What must be below a value of peak RAM or bytes written: just that, homes or not."""
    checked = 0
    for seed in seeds(6, QUICK):
        for minimize in ("writes", "ram"):
            problem = state_problem(seed, minimize=minimize)
            best = optimum(problem)
            if best is None or best.value == 0:
                continue
            assert optimum(problem.below_bytes(int(best.value))) is None, seed
            same = optimum(problem.below_bytes(int(best.value) + 1))
            assert same is not None, seed
            assert same.value == best.value, seed
            checked += minimize == "writes"
    assert checked > 5


@parts(4)
def test_what_is_ruled_out_before_solving_is_infeasible(part: Part) -> None:
    """The reasons that need no solver are true: the search finds nothing either."""
    count = 0
    for seed in part.of(seeds(7, QUICK)):
        for make in (state_problem, state_rows_problem):
            problem = make(seed)
            if obstacle(problem) is not None:
                assert optimum(problem) is None, seed
                count += 1
    assert count > part.share(5)


# -- every way to an answer ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", FORMULATIONS)
def test_state_is_exact(way: str) -> None:
    """Thirty instances each way."""
    assert not row_faults(seeds(0, QUICK // 2), way, state_problem)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_own_rows_on_state_are_exact(way: str) -> None:
    """Fifteen instances each way, with rows on homes, first reads and write-backs."""
    assert not row_faults(seeds(1, QUICK // 4), way, state_rows_problem)


@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_bytes_of_every_scale_are_exact(way: str) -> None:
    """To the byte, from 1 to 2**50 of them: ten."""
    assert not misses(range(10), way)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_state_is_exact_by_other_solvers(way: str, name: str) -> None:
    """Twelve of each kind."""
    count = QUICK // 5
    assert not row_faults(seeds(2, count), way, state_problem, backend=name)
    assert not row_faults(seeds(2, count), way, state_rows_problem, backend=name)


@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_no_bound_is_above_an_optimum(way: str) -> None:
    """Not with hardly any time, and not where a wide gap ends the search."""
    for make in (state_problem, state_rows_problem):
        assert not row_faults(seeds(3, QUICK // 10), way, make, time_limit=0.02)
        assert not row_faults(seeds(3, QUICK // 10), way, make, gap=0.5)


def test_two_threads_change_no_answer() -> None:
    """Six."""
    assert not row_faults(seeds(4, 6), "lazy", state_problem, threads=2)


# -- merged stages -------------------------------------------------------------------------------


def failures_of_rounds(
    problems: Iterable[tuple[str, Problem]], *, at_random: bool
) -> dict[str, str]:
    """Return the instances on which bare rounds, and the driver from their first rows, are wrong.

    They begin with nothing enforced, or with random rows of stages and steps.
    """
    found = {}
    for seed, problem in problems:
        if obstacle(problem) is not None:
            continue
        best = optimum(problem)
        wanted = None if best is None else best.value - problem.objective.baseline
        first = no_rows(problem)
        if at_random:
            first = random_rows(seeded(f"rows of {seed}"), problem)
        try:
            value = run_rounds(problem, first).value
        except RoundsError as error:
            found[seed] = str(error)
            continue
        request = Request(gap=0.0, time_limit_s=600.0)
        outcome = solve_lazily(problem, request, start=None, first=first)
        result = finish(problem, request, outcome, formulation="lazy")
        said = result.objective_value
        driver = None if said is None else said - problem.objective.baseline
        near = pytest.approx(wanted, abs=1e-6)
        if value != near or driver != near:
            found[seed] = f"optimum {wanted}, rounds {value}, driver {driver}"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("at_random", [False, True])
def test_merged_stages_are_exact(at_random: bool) -> None:
    """From nothing that is enforced, and from rows for no reason: sixty each."""
    problems = [(seed, state_problem(seed)) for seed in seeds(5, QUICK)]
    assert not failures_of_rounds(problems, at_random=at_random)


# -- rare cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "paging", "value"),
    [
        # Homes count once where a reader is recomputed; an input in place lives on beside it.
        pytest.param(277, False, 48.0, id="recomputed-beside-homes"),
        pytest.param(1018, True, 38.0, id="recomputed-reader-of-resident-state"),
        # What reads state could be of use after the replacement.
        pytest.param(254, True, 33.0, id="reader-before-a-replacement"),
    ],
)
@pytest.mark.parametrize("way", FORMULATIONS)
def test_rare_terms_decide(way: str, number: int, paging: bool, value: float) -> None:
    """Steps of which the answer is another where a term is missing from the rows."""
    free = {"deadline": None, "energy_budget": None, "aux_bytes": None, "recompute": True}
    problem = state_problem(f"hunt/{number}", (6, 9), minimize="energy", paging=paging, **free)
    result = answer(problem, way, gap=0.0)
    assert result.status == "optimal"
    assert result.objective_value == pytest.approx(value)
    assert result.objective_bound == pytest.approx(value)


# -- larger ones ---------------------------------------------------------------------------------


def disagreements(numbers: range, n: tuple[int, int] = (7, 11)) -> dict[str, str]:
    """Return the larger instances on which the formulations differ, by seed."""
    found = {}
    for number in numbers:
        problem = state_problem(f"large/{number}", n)
        results = [answer(problem, way, gap=0.0) for way in FORMULATIONS]
        values = [result.objective_value for result in results]
        near = pytest.approx(values[1], abs=1e-6)
        if len({result.status for result in results}) > 1 or values != [near] * len(values):
            found[str(number)] = "; ".join(result.summary() for result in results)
    return found


def test_formulations_agree_on_larger_steps() -> None:
    """Where nobody can search exhaustively: four."""
    assert not disagreements(range(4))


def misses(numbers: range, way: str) -> dict[str, str]:
    """Return the instances of large bytes on which search and a way differ, by seed."""
    found = {}
    for number in numbers:
        problem = scaled_state_problem(f"{number}")
        best, result = optimum(problem), answer(problem, way, gap=0.0)
        wanted = "infeasible" if best is None else "optimal"
        value = None if best is None else best.value
        exact = value is None or problem.objective.in_bytes
        near = value if exact else pytest.approx(value, rel=1e-6)
        if result.status != wanted or result.objective_value != near:
            found[str(number)] = f"optimum {value}, got {result.summary()}"
        elif value is not None and result.objective_bound > value * (1 + 1e-9):
            found[str(number)] = f"optimum {value}, bound {result.objective_bound}"
    return found


# -- more of them --------------------------------------------------------------------------------


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(10, 10 + ALL))
@pytest.mark.parametrize("way", FORMULATIONS)
def test_state_is_exact_on_more(way: str, number: int) -> None:
    """Eight hundred more each way."""
    assert not row_faults(seeds(number, BATCH), way, state_problem)


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(20, 20 + ALL // 2))
@pytest.mark.parametrize("way", WAYS)
def test_own_rows_on_state_are_exact_on_more(way: str, number: int) -> None:
    """Four hundred more each way."""
    assert not row_faults(seeds(number, BATCH), way, state_rows_problem)


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(30, 30 + ALL // 2))
@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_state_is_exact_on_six_nodes(way: str, number: int) -> None:
    """Two hundred."""
    assert not row_faults(seeds(number, BATCH // 2), way, of_six)


@pytest.mark.seeds
@pytest.mark.parametrize("at_random", [False, True])
@pytest.mark.parametrize("number", range(40, 40 + ALL))
def test_merged_stages_are_exact_on_more(number: int, at_random: bool) -> None:
    """Four hundred of up to six nodes each."""
    problems = [(seed, of_six(seed)) for seed in seeds(number, BATCH // 2)]
    assert not failures_of_rounds(problems, at_random=at_random)


@pytest.mark.seeds
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_state_is_exact_by_other_solvers_on_more(way: str, name: str) -> None:
    """A hundred of each kind."""
    assert not row_faults(seeds(50, BATCH), way, state_problem, backend=name)
    assert not row_faults(seeds(50, BATCH), way, state_rows_problem, backend=name)


@pytest.mark.seeds
@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_no_bound_is_above_an_optimum_on_more(way: str) -> None:
    """A hundred each."""
    for make in (state_problem, state_rows_problem):
        assert not row_faults(seeds(51, BATCH), way, make, time_limit=0.02)
        assert not row_faults(seeds(52, BATCH), way, make, time_limit=0.1)
        assert not row_faults(seeds(53, BATCH), way, make, gap=0.5)


@pytest.mark.seeds
def test_two_threads_change_no_answer_on_more() -> None:
    """Sixty."""
    assert not row_faults(seeds(54, QUICK), "lazy", state_problem, threads=2)


@pytest.mark.seeds
@pytest.mark.parametrize("way", ["lazy", "compact"])
@pytest.mark.parametrize("number", range(5))
def test_bytes_of_every_scale_are_exact_on_more(number: int, way: str) -> None:
    """Five hundred."""
    assert not misses(range(100 * number, 100 * number + 100), way)


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(5))
def test_formulations_agree_on_more_larger_steps(number: int) -> None:
    """Two hundred."""
    assert not disagreements(range(40 * number, 40 * number + 40))


# -- what the instances cover --------------------------------------------------------------------


def is_of_use_after(problem: Problem) -> bool:
    """Return whether what reads state may be recomputed for use after the state is replaced."""
    graph, offered = problem.graph, recomputable_nodes(problem)
    found = find_events(problem, range(len(graph.nodes)), recomputable=offered)
    return any(
        offered[k] and found.uses[i] and found.uses[i][-1] > last
        for k, last in enumerate(graph.last_stages)
        for i in graph.outputs_of[k]
    )


@pytest.mark.slow
def test_instances_cover_every_case() -> None:
    """The seeds of the quick run, and those with own rows, reach each case many times."""
    seen: Counter[str] = Counter()
    made = [state_problem(seed) for seed in [*seeds(0, QUICK), *seeds(10, BATCH // 2)]]
    rowed = [state_rows_problem(seed) for seed in seeds(1, QUICK // 2)]
    for problem in [*made, *rowed]:
        graph, best = problem.graph, optimum(problem)
        state, pairs = set(graph.state_tensors), [*enumerate(graph.in_place_of)]
        keys = [key for row in problem.constraints for key in row.terms]
        homes = None if best is None else set(best.schedule.resident)
        late = {
            x for k, of in pairs for _, x in of if graph.users_of[x] and max(graph.users_of[x]) > k
        }
        seen.update(
            {
                f"minimize {problem.minimize}": True,
                f"deadline {problem.deadline_counts}": problem.deadline_s is not None,
                "storage limit": problem.aux_limit_bytes is not None and problem.can_page,
                "energy budget": problem.energy_budget_j is not None,
                "no paging": not problem.paging,
                "no recomputation": not problem.recompute,
                "memory-mapped": problem.reads_in_place,
                "infeasible": best is None,
                "overhead": best is not None
                and best.value > problem.objective.baseline + 1e-9
                and problem.minimize != "ram",
                "some homes in RAM": bool(homes) and homes != state,
                "no home in RAM": homes == set() and bool(state),
                "page-in of state": best is not None
                and any(i in state for _, i in best.schedule.M_in),
                "in place": any(of for _, of in pairs),
                "of other bytes": any(
                    graph.tensor_bytes[y] != graph.tensor_bytes[x] for _, of in pairs for y, x in of
                ),
                "read later": bool(late),
                "two replacements": any(
                    sum(i in graph.replacement_of.values() for i in outputs) > 1
                    for outputs in graph.outputs_of
                ),
                "recomputed before a replacement for after": is_of_use_after(problem),
                "rows on homes": any(key.startswith("resident") for key in keys),
            }
        )
    assert len(seen) == 23, seen
    assert min(seen.values()) >= 5, seen
