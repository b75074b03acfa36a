"""What solves claim about small problems, and what of it does not hold.

Every way to solve a problem is tried against exhaustive search, or, where that takes too long,
against the best schedule that any way has found. `tests/refute.py` looks for faults in thousands.
"""

from __future__ import annotations

import secrets
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyomo.environ as pyo

from kit.instances import (
    random_instance,
    scaled_instance,
    scaled_state_problem,
    seeded,
    state_problem,
)
from kit.oracle import TooManyLabelsError, optimum
from kit.own_rows import own_rows_problem, scaled_and_constrained, state_rows_problem
from poetmodel.backends.registry import backend as back_end
from poetmodel.device import Costs
from poetmodel.errors import LicenceError, PoetModelError
from poetmodel.graph import Graph, Node, Tensor, checkpoint_all_peak_bytes, floor
from poetmodel.heuristics.greedy import page_everything, trivial
from poetmodel.model import build
from poetmodel.model.aggregated import Grouping
from poetmodel.problem import OWN, Problem, Quantity
from poetmodel.problem.infeasibility import obstacle
from poetmodel.result import Status
from poetmodel.schedule import verify
from poetmodel.solver import solve
from poetmodel.solver.lazy import solve_lazily
from poetmodel.solver.lazy.params import CUT_FAMILIES, HEURISTICS, LazyParams
from poetmodel.solver.outcome import accepted, finish, verify_schedule
from poetmodel.solver.request import Request

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from kit.oracle import Optimum
    from poetmodel.result import SolveResult
    from poetmodel.solver.request import SolveProgress


EQUAL: Final = 1e-9
"""What a bound may be above an optimum by rounding, relative to everything that counts."""
RESOLVED: Final = 1e-6
"""What the value of an optimum may be off by, relative to what can be decided."""
LIMIT_S: Final = 60.0
"""Time limit of every solve [s]: no tiny problem may need it."""
MOST_LABELS: Final = 30_000
"""Labels of an exhaustive search; with rewards and own rows a few problems need millions."""
GAPS: Final = (0.0, 1e-6, 1e-4, 0.05)
BACKENDS: Final = tuple(
    name for name in ("highs", "scip", "gurobi") if name == "highs" or back_end(name).available()
)
"""Solvers that are installed; HiGHS has to be."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A claim that does not hold."""

    seed: str
    way: str
    what: str


# -- problems ------------------------------------------------------------------------------------


def with_extremes(problem: Problem, rng: random.Random) -> Problem:
    """Return a problem some of whose costs are powers of two away from the others."""
    graph, table = problem.graph, problem.table

    def column(values: Any) -> list[float]:
        scale = rng.choice((1.0, 1.0, 2.0**-40, 2.0**-20, 2.0**20, 2.0**40))
        single = rng.choice((1.0, 1.0, 2.0**-40, 2.0**-24, 2.0**24))
        at = rng.randrange(len(values))
        return [value * (scale * single if k == at else scale) for k, value in enumerate(values)]

    pages = None, None
    if table.has_storage:
        pages = tuple(
            list(zip(column(times), column(energies), strict=True))
            for times, energies in (
                (table.page_in_time_s, table.page_in_energy_j),
                (table.page_out_time_s, table.page_out_energy_j),
            )
        )
    costs = Costs.from_arrays(
        graph,
        compute_time_s=column(table.compute_time_s),
        compute_energy_j=column(table.compute_energy_j),
        page_in=pages[0],
        page_out=pages[1],
        device=problem.costs.device,
    )
    loose = {"deadline": None, "energy_budget": None}
    return replace(problem, costs=costs, **loose)


def ordinary_problem(rng: random.Random) -> Problem:
    """Make a problem of five to eight nodes with tensors of ordinary sizes, bytes apart."""
    unit = rng.choice((64, 256, 1024)) * 2**20
    minimize = rng.choice(("ram", "ram", "energy", "time", "writes"))
    nodes: list[Node] = []
    for k in range(rng.randint(5, 8)):
        inputs = [nodes[-1].name] if nodes else []
        if len(nodes) > 2 and rng.random() < 0.6:
            inputs.append(rng.choice(nodes[:-1]).name)
        size = rng.choice((1, 1, 2, 3)) * unit + rng.choice((0, 0, 4, 8, 64, 256))
        if minimize != "ram":
            size = rng.choice((4, 4, 4096, unit, 2 * unit))
        nodes.append(
            Node(
                name=f"v{k}",
                op="op",
                phase="forward",
                inputs=tuple(inputs),
                outputs=(Tensor(name=f"v{k}", bytes=size),),
            )
        )
    graph = Graph(name="ordinary", nodes=tuple(nodes))
    sizes = graph.tensor_bytes
    rate_j = [size * rng.choice((2e-10, 5e-10)) for size in sizes]
    times_s = [size * 1e-12 for size in sizes]
    costs = Costs.from_arrays(
        graph,
        compute_time_s=times_s,
        compute_energy_j=[max(size, 4) * 1e-10 * rng.choice((1, 3, 10)) for size in sizes],
        page_in=[(size * 1e-10, energy) for size, energy in zip(sizes, rate_j, strict=True)],
        page_out=[(size * 1e-10, size * 5e-10) for size in sizes],
    )
    low, high = floor(graph).bytes, checkpoint_all_peak_bytes(graph)
    ram = high if minimize == "ram" else int(low + (high - low) * rng.choice((0.0, 0.2, 0.5)))
    deadline = sum(times_s) * rng.choice((1.0, 1.5, 3.0, 10.0)) if rng.random() < 0.5 else None
    return Problem(
        graph, costs, ram=ram, deadline=deadline, minimize=minimize, paging=rng.random() < 0.8
    )


def _extreme(seed: str) -> Problem:
    rng = seeded(seed)
    return with_extremes(random_instance(rng, (3, 5)), rng)


KINDS: Final[dict[str, Callable[[str], Problem]]] = {
    "plain": lambda seed: random_instance(seeded(seed), (3, 5)),
    "scaled": lambda seed: scaled_instance(seeded(seed)),
    "extreme": _extreme,
    "ordinary": lambda seed: ordinary_problem(seeded(seed)),
    "larger": lambda seed: random_instance(seeded(seed), (6, 8)),
    "rows": own_rows_problem,
    "scaled rows": lambda seed: scaled_and_constrained(seeded(seed)),
    "state": state_problem,
    "state rows": state_rows_problem,
    "scaled state": scaled_state_problem,
}
"""What makes a problem of each kind from a seed."""
UNSEARCHED: Final = frozenset({"ordinary", "larger"})
"""Kinds of problems that are too large for exhaustive search."""


# -- ways ----------------------------------------------------------------------------------------


def random_params(rng: random.Random) -> LazyParams:
    """Draw parameters of a lazy solve, sensible or not: none may change what is true."""
    return LazyParams(
        cuts=frozenset(family for family in sorted(CUT_FAMILIES) if rng.random() < 0.8),
        heuristics=frozenset(name for name in sorted(HEURISTICS) if rng.random() < 0.35),
        small_gap_ratio=rng.choice((0.0, 0.01, 1.0)),
        wide_gap_ratio=rng.choice((0.0, 0.03, 1.0)),
        very_wide_gap_ratio=rng.choice((0.0, 0.1, 1.0)),
        cut_rounds=rng.choice((1, 5, 30)),
        cuts_per_round=rng.choice((1, 10, 400)),
        cut_violation=rng.choice((0.0, 1e-5, 1e-3)),
        cut_gain_ratio=rng.choice((0.0, 1e-3)),
        row_gain_ratio=rng.choice((0.0, 4e-3)),
        linear_rows=rng.choice((1, 4, 100)),
        linear_growth_ratio=rng.choice((0.0, 0.5, 1.0)),
        tight_ratio=rng.choice((0.0, 0.5, 0.97, 1.0)),
        large_columns=rng.choice((1, 5000)),
        rounds_without_gain=rng.choice((1, 3)),
        most_sums=rng.choice((1, 16, 1 << 20)),
        easy_growth_ratio=rng.choice((0.0, 0.5, 1.0)),
        single_row_gain_ratio=rng.choice((0.0, 0.02, 1.0)),
        few_rows=rng.choice((1, 2)),
        wide_gap_rows=rng.choice((1, 3)),
        counted_part_ratio=rng.choice((0.0, 0.02, 1.0)),
    )


def random_grouping(rng: random.Random, n: int) -> Grouping | None:
    """Draw rows that a lazy solve enforces from the beginning; None for its own choice."""
    if rng.random() < 0.3:
        return None
    rows, steps = rng.choice((0.0, 0.2, 0.5, 1.0)), rng.choice((0.0, 0.0, 0.1, 0.3))
    return Grouping(n).add(
        [t for t in range(n) if rng.random() < rows],
        [(t, k) for t in range(n) for k in range(t) if rng.random() < steps],
    )


WAYS: Final[dict[str, Callable[..., SolveResult]]] = {
    "lazy": partial(solve, time_limit=LIMIT_S),
    "compact": partial(solve, formulation="compact", time_limit=LIMIT_S),
    "built": lambda problem, **more: solve(build(problem), time_limit=LIMIT_S, **more),
    "open": lambda problem, **more: solve(
        build(problem, reductions=False), time_limit=LIMIT_S, **more
    ),
}
"""What solves a problem, by name; takes a back end and a gap, too."""


def _lazily(problem: Problem, *, rng: random.Random, backend: str, gap: float) -> SolveResult:
    """Solve lazily with random parameters, from a poor schedule or none."""
    request = Request(backend=backend, time_limit_s=LIMIT_S, gap=gap, seed=rng.randint(0, 3))
    start = None
    if rng.random() < 0.4:
        start = accepted(problem, rng.choice((trivial, page_everything))(problem))
    first = random_grouping(rng, len(problem.graph.nodes))
    outcome = solve_lazily(problem, request, start=start, first=first, params=random_params(rng))
    return finish(problem, request, outcome, formulation="lazy")


def answers(
    problem: Problem, rng: random.Random, most: int
) -> list[tuple[str, float, SolveResult | str]]:
    """Return what several ways answer: what they are, the gap that each may leave, the answer.

    An exception is given in words.
    """
    ways = dict(WAYS)
    if obstacle(problem) is None and not problem.is_overlapping:
        ways["drawn"] = partial(_lazily, rng=rng)
    chosen = [(label, name) for label in ways for name in BACKENDS]
    found: list[tuple[str, float, SolveResult | str]] = []
    for label, backend in [("lazy", "highs"), *rng.sample(chosen, most - 1)]:
        gap = rng.choice(GAPS)
        name = f"{label} with {backend}, gap {gap:g}"
        try:
            found.append((name, gap, ways[label](problem, backend=backend, gap=gap)))
        except LicenceError:
            continue
        except Exception as error:  # noqa: BLE001 - any one is a fault
            found.append((name, gap, f"{type(error).__name__}: {error}"))
    return found


# -- claims --------------------------------------------------------------------------------------


def wrong_claims(
    problem: Problem, result: SolveResult, least: float | None, gap: float, *, sharp: bool = False
) -> str:
    """Return what of a result does not hold, `least` being the best value; None if infeasible.

    What is `sharp` is held to what can be decided alone: rounding of what every schedule pays
    excuses no value, and there is a bound.
    """
    if result.schedule is not None:
        found = verify_schedule(problem, result.schedule)
        if found.violations:
            return f"a schedule with violations {found.violations}"
        if least is None:
            return "a schedule, where there is none"
    if result.status == Status.INFEASIBLE:
        return "" if least is None else f"infeasible, optimum {least!r}"
    if result.schedule is None or least is None:
        return "" if least is None else f"{result.status} ({result.termination})"
    objective = problem.objective
    best, exact = objective.baseline + least, objective.in_bytes
    sizes = abs(objective.baseline), abs(best if sharp else least)
    whole = 0.0 if exact else EQUAL * (max(sizes) if sharp else sum(sizes))
    bound = result.objective_bound
    if (sharp and bound is None) or (bound is not None and bound > best + whole):
        return f"bound {bound!r}, optimum {best!r}"
    energy = problem.minimize == Quantity.ENERGY
    if sharp and energy and result.overhead_bound_j > least * (1 + RESOLVED):
        return f"bound of the overhead {result.overhead_bound_j!r}, least {least!r}"
    if result.status != Status.OPTIMAL:
        return ""
    resolved = 0.0 if exact else RESOLVED * abs(least)
    allowed = gap * found.value + resolved + whole
    if sharp:
        allowed = max(gap * found.value, resolved)
    missing = found.value - least
    return "" if missing <= allowed else f"optimal at {found.value!r}, optimum {least!r}"


def searched(problem: Problem) -> float | None:
    """Return the best value by exhaustive search, beyond what every schedule pays, or None."""
    best = optimum(problem)
    return None if best is None else verify_schedule(problem, best.schedule).value


def wrongly_ended(
    problem: Problem, solved: Callable[[], SolveResult], gap: float, *, rounded: bool = False
) -> str:
    """Return what of a solve to the end is wrong against exhaustive search, or nothing.

    Bytes of a user's model are bounded to a tolerance only: a value so `rounded` may be left
    without a proof.
    """
    least = searched(problem)
    try:
        result = solved()
    except PoetModelError as error:
        return f"{type(error).__name__}: {error}"
    wanted = Status.INFEASIBLE if least is None else Status.OPTIMAL
    said = wrong_claims(problem, result, least, gap, sharp=True)
    if said or result.status == wanted:
        return said
    if least is None or result.schedule is None or not rounded or not problem.objective.in_bytes:
        return f"expected {wanted}, got {result.status}"
    value = verify_schedule(problem, result.schedule).value
    return "" if value - least <= RESOLVED * value else f"{value}, optimum {least}"


def examine(seed: str, *, ways: int = 4) -> tuple[list[Fault], Counter[str]]:
    """Solve the problem of a seed, ``kind/number``, in several ways; return faults and counts."""
    kind = seed.partition("/")[0]
    problem = KINDS[kind](seed)
    rng = seeded(f"ways of {seed}")
    given = answers(problem, rng, ways)
    results = [(name, gap, one) for name, gap, one in given if not isinstance(one, str)]
    faults = [Fault(seed, name, one) for name, _, one in given if isinstance(one, str)]
    counts = Counter({kind: 1, "solves": len(given)})
    schedules = [one.schedule for _, _, one in results if one.schedule is not None]
    if kind not in UNSEARCHED:
        with suppress(TooManyLabelsError):
            best = optimum(problem, most_labels=MOST_LABELS)
            schedules = [] if best is None else [best.schedule]
            counts["searched"] += 1
    values = [made.value for each in schedules if (made := accepted(problem, each)) is not None]
    least = min(values, default=None)
    for name, gap, result in results:
        what = wrong_claims(problem, result, least, gap)
        if result.status == Status.UNKNOWN and name.startswith("drawn"):
            counts["left open"] += 1  # `solve` goes on by stage where this ends
        elif what:
            faults.append(Fault(seed, name, what))
        elif result.status not in (Status.OPTIMAL, Status.INFEASIBLE):
            counts["left open"] += 1
    return faults, counts


def new_seeds(count: int, *, begin: int | None = None) -> list[str]:
    """Return seeds of all kinds in turn that no run has had, or those from a number on."""
    first = secrets.randbelow(2**40) if begin is None else begin
    kinds = list(KINDS)
    return [f"{kinds[k % len(kinds)]}/{first + k}" for k in range(count)]


ROW_WAYS: Final = ("lazy", "compact", "unreduced", "built", "by hand")
"""Three formulations, a model that `build` made of the problem, and a model of the problem without
its own constraints and objective, to which a user adds them."""
EXACT: Final = 1e-6
"""What figures may be off by: the instances have small numbers, in quarters at the finest."""


# -- own rows: answers ---------------------------------------------------------------------------


def answer(problem: Problem, way: str, **options: Any) -> SolveResult:
    """Solve a problem one of the ways."""
    if way == "unreduced":
        return solve(build(problem, reductions=False), **options)
    if way == "built":
        return solve(build(problem), **options)
    if way == "by hand":
        return solve(built_by_hand(problem), **options)
    return solve(problem, formulation=way, **options)


def built_by_hand(problem: Problem) -> pyo.ConcreteModel:
    """Return a model whose own constraints a user states over the relations."""
    plain = problem.minimize if problem.minimize != OWN else "energy"
    model = build(
        replace(problem, constraints=(), own_objective=(), minimize=plain), reductions=False
    )
    graph = problem.graph
    model.out_once = pyo.Constraint(
        range(len(graph.tensors)), rule=lambda m, i: _count(m, problem, "page_outs", i) <= 1
    )
    model.own = pyo.ConstraintList()
    for row in problem.constraints:
        # Pyomo takes no relation between numbers, which a sum may be: what is made last.
        body = total(model, problem, row.terms.items()) + model.R[0, 0] - model.R[0, 0]
        near = max(map(abs, (row.lower or 0, row.upper or 0)))
        slack = 0.0 if _is_whole(row.terms.items()) else 1e-9 * near
        if row.upper is not None:
            model.own.add(body <= row.upper + slack)
        if row.lower is not None:
            model.own.add(body >= row.lower - slack)
    if problem.minimize == OWN:
        model.objective.deactivate()
        model.mine = pyo.Objective(expr=total(model, problem, problem.own_objective))
    return model


def _is_whole(terms: Iterable[tuple[str, float]]) -> bool:
    figures = ("energy_j", "compute_s", "transfer_s")
    return all(isinstance(value, int) and key not in figures for key, value in terms)


def _count(m: pyo.ConcreteModel, problem: Problem, count: str, index: int) -> Any:
    graph = problem.graph
    stages = range(len(graph.nodes))
    if count == "recomputations":
        return sum(m.R[t, index] for t in stages if t > index)
    if count == "resident":
        return m.resident[index]
    first = graph.node_of[index]
    if count == "page_ins":
        # The first read of state on storage is no entry of M_in.
        is_read = index in graph.state_tensors and not problem.reads_in_place
        home = 1 - m.resident[index] if is_read else 0
        return home + sum(m.M_in[t, index] for t in stages if t > first)
    return sum(m.M_out[t, index] for t in stages if t >= first)


def total(m: pyo.ConcreteModel, problem: Problem, terms: Iterable[tuple[str, float]]) -> Any:
    """Return a sum of totals over the relations of a model."""
    graph, table = problem.graph, problem.table
    device = problem.costs.device
    idle_w = device.idle_power_w if device is not None else 0.0
    moving_w = idle_w if problem.deadline_counts == "serial" else 0.0
    none = [0.0] * len(graph.tensors)
    in_s, out_s = table.page_in_time_s or none, table.page_out_time_s or none
    in_j, out_j = table.page_in_energy_j or none, table.page_out_energy_j or none
    compute_s, compute_j = table.compute_time_s, table.compute_energy_j
    passed = [j + idle_w * s for j, s in zip(compute_j, compute_s, strict=True)]
    moved_in = [j + moving_w * s for j, s in zip(in_j, in_s, strict=True)]
    moved_out = [j + moving_w * s for j, s in zip(out_j, out_s, strict=True)]
    sizes = graph.tensor_bytes
    sums: dict[str, tuple[Any, Any, Any]] = {
        "energy_j": (passed, moved_in, moved_out),
        "compute_s": (compute_s, none, none),
        "transfer_s": ([0.0] * len(graph.nodes), in_s, out_s),
        "bytes_read": ([0] * len(graph.nodes), sizes, none),
        "bytes_written": ([0] * len(graph.nodes), none, sizes),
    }
    expression: Any = 0
    for key, weight in terms:
        kind, _, name = key.partition(":")
        if key == "constant":
            expression += weight
        elif key in sums:
            compute, page_in, page_out = sums[key]
            single = sum(compute) if key in ("energy_j", "compute_s") else 0
            counted = (
                ("recomputations", compute), ("page_ins", page_in), ("page_outs", page_out)
            )  # fmt: skip
            expression += weight * (
                single
                + sum(
                    value * _count(m, problem, count, index)
                    for count, values in counted
                    for index, value in enumerate(values)
                    if value
                )
            )
        else:
            index = graph.node_index if kind == "recomputations" else graph.tensor_index
            expression += weight * _count(m, problem, kind, index[name])
    return expression


# -- own rows: claims ------------------------------------------------------------------------------


def row_fault(
    problem: Problem, best: Optimum | None, result: SolveResult, *, settled: bool = True
) -> str:
    """Return what of a result is wrong against exhaustive search, or nothing.

    Without `settled` the solve may have ended before it could say much.
    """
    if best is None:
        honest = (Status.INFEASIBLE,) if settled else (Status.INFEASIBLE, Status.UNKNOWN)
        return "" if result.status in honest else f"infeasible, got {result.status}"
    if result.status == Status.INFEASIBLE or (settled and result.status != Status.OPTIMAL):
        return f"optimum {best.value}, got {result.status} ({result.reason})"
    known = result.to_dict()["objective"]
    bounds = [result.objective_bound if result.own_objective is None else None, known["bound"]]
    for bound in bounds:
        if bound is not None and bound > best.value + _off(best.value):
            return f"optimum {best.value}, bound {bound}"
    if result.schedule is None:
        return ""
    verdict = verify(problem, result.schedule)
    if verdict.violations:
        return f"violations {verdict.violations}"
    value = problem.objective.measured(verdict.simulation)
    if abs(value - known["value"]) > _off(value):
        return f"value {value}, said {known['value']}"
    beyond = value - best.value
    if beyond < -_off(value):
        return f"the search found {best.value}, and {value} is better"
    above = value - problem.objective.baseline
    scale = above if result.own_objective is None else abs(value)
    if result.status == Status.OPTIMAL and beyond > result.requested_gap * scale + _off(value):
        return f"called optimal at {value}, optimum {best.value}"
    return ""


def _off(value: float) -> float:
    return EXACT * max(1.0, abs(value))


class Watch:
    """Follows a solve, and notes bounds above the optimum on the way."""

    def __init__(self, problem: Problem, best: Optimum | None) -> None:
        baseline = problem.objective.baseline if problem.minimize != "ram" else 0.0
        self.most = None if best is None else best.value - baseline
        self.fault = ""
        self.calls = 0

    def __call__(self, progress: SolveProgress) -> None:
        """Note what is reported."""
        self.calls += 1
        if self.most is None:
            if progress.incumbent is not None:
                self.fault = f"infeasible, incumbent {progress.incumbent}"
            return
        if progress.bound is not None and progress.bound > self.most + _off(self.most):
            self.fault = f"optimum {self.most}, bound {progress.bound} on the way"
        if progress.incumbent is not None and progress.incumbent < self.most - _off(self.most):
            self.fault = f"optimum {self.most}, incumbent {progress.incumbent} on the way"


def row_faults(
    seeds: Iterable[str],
    way: str,
    make: Callable[[str], Problem] = own_rows_problem,
    **options: Any,
) -> dict[str, str]:
    """Return the instances on which search and a way differ, by seed."""
    found = {}
    for seed in seeds:
        problem = make(seed)
        best = optimum(problem)
        watch = Watch(problem, best)
        watched = {} if way == "by hand" else {"on_progress": watch}
        settled = options.get("time_limit", 60.0) >= 60.0
        try:
            result = answer(problem, way, **{"gap": 0.0, **watched, **options})
            what = row_fault(problem, best, result, settled=settled) or watch.fault
        except PoetModelError as error:
            what = f"{type(error).__name__}: {error}"
        if what:
            found[seed] = what
    return found
