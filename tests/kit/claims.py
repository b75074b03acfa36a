"""Checks of the claims of solves on small problems: values, bounds and statuses.

Each solving method is compared with exhaustive search or, if that takes too long, with the best
schedule of any method. `tests/refute.py` checks thousands of problems.
"""

import secrets
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace

import pyomo.environ as pyo

from kit.instances import (
    make_rng,
    random_instance,
    scaled_instance,
    scaled_state_problem,
    state_problem,
)
from kit.oracle import Optimum, TooManyLabelsError, optimum
from kit.own_rows import (
    own_rows_problem,
    scaled_rows_problem,
    stage_rows_problem,
    state_rows_problem,
)
from kit.relaxation import SOLVER_TOLERANCE, RoundsError, group_all_stages, random_rows, run_rounds
from kit.searches import prove
from kit.worked import costs_of
from poetmodel.backends.registry import backend as back_end
from poetmodel.errors import LicenceError, ModelError, PoetModelError
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation
from poetmodel.heuristics.greedy import keep_all_if_within_budgets, page_everything
from poetmodel.model import build
from poetmodel.model.grouping import Grouping
from poetmodel.problem import USER_OBJECTIVE, Problem, Quantity
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.result import Status
from poetmodel.schedule import check_schedule
from poetmodel.solver import solve
from poetmodel.solver.extended import prove_model
from poetmodel.solver.outcome import make_candidate, make_valid_candidate
from poetmodel.solver.policy import CUT_FAMILIES, HEURISTICS, Policy
from poetmodel.solver.request import Request
from poetmodel.solver.search import Search
from poetmodel.solver.task import Task

EQUALITY_TOLERANCE = 1e-9
"""Tolerance of bounds above the optimum, for rounding, relative to all summed costs."""
RESOLVED = 1e-6
"""Tolerance of optimal values, relative to the costs of decisions."""
LIMIT_S = 60.0
"""Time limit of every solve [s], which no tiny problem may meet."""
MAX_LABELS = 30_000
"""Maximum labels of an exhaustive search; few problems with rewards or user constraints need
millions."""
GAPS = (0.0, 1e-6, 1e-4, 0.05)
"""Gap tolerances, of which solves get a random one."""
BACKENDS = tuple(
    name for name in ("highs", "scip", "gurobi") if name == "highs" or back_end(name).is_available()
)
"""Installed solvers; HiGHS is required."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A false claim of a solve, or an exception."""

    seed: str
    """Seed of the problem."""
    method: str
    """Solving method."""
    error: str
    """The false claim or the exception, as text."""


# -- problems ------------------------------------------------------------------------------------
def scale_costs(problem, rng):
    """Return the problem without deadline and energy budget, with costs times powers of two."""
    graph, table = problem.graph, problem.table

    def column(values):
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
    costs = costs_of(
        graph,
        column(table.compute_time_s),
        column(table.compute_energy_j),
        pages[0],
        pages[1],
        device=problem.costs.device,
    )
    no_limits = {"deadline": None, "energy_budget": None}
    return replace(problem, costs=costs, **no_limits)


def ordinary_problem(rng):
    """Draw a problem of 5 to 8 nodes with large tensors whose sizes may differ by few bytes."""
    unit = rng.choice((64, 256, 1024)) * 2**20
    minimize = rng.choice(("ram", "ram", "energy", "time", "writes"))
    nodes = []
    for k in range(rng.randint(5, 8)):
        inputs = [nodes[-1].name] if nodes else []
        if len(nodes) > 2 and rng.random() < 0.6:
            inputs.append(rng.choice(nodes[:-1]).name)
        size = rng.choice((1, 1, 2, 3)) * unit + rng.choice((0, 0, 4, 8, 64, 256))
        if minimize != "ram":
            size = rng.choice((4, 4, 4096, unit, 2 * unit))
        nodes.append(operation(f"v{k}", output_bytes=size, inputs=tuple(inputs)))
    graph = Graph(name="ordinary", nodes=tuple(nodes))
    sizes = graph.tensor_bytes
    rate_j = [size * rng.choice((2e-10, 5e-10)) for size in sizes]
    times_s = [size * 1e-12 for size in sizes]
    costs = costs_of(
        graph,
        times_s,
        [max(size, 4) * 1e-10 * rng.choice((1, 3, 10)) for size in sizes],
        [(size * 1e-10, energy) for size, energy in zip(sizes, rate_j, strict=True)],
        [(size * 1e-10, size * 5e-10) for size in sizes],
    )
    low, high = floor(graph).bytes, checkpoint_all_peak_bytes(graph)
    ram = high if minimize == "ram" else int(low + (high - low) * rng.choice((0.0, 0.2, 0.5)))
    deadline = sum(times_s) * rng.choice((1.0, 1.5, 3.0, 10.0)) if rng.random() < 0.5 else None
    return Problem(
        graph, costs, ram=ram, deadline=deadline, minimize=minimize, paging=rng.random() < 0.8
    )


def _extreme_problem(seed):
    rng = make_rng(seed)
    return scale_costs(random_instance(rng, (3, 5)), rng)


KINDS = {
    "plain": lambda seed: random_instance(make_rng(seed), (3, 5)),
    "scaled": lambda seed: scaled_instance(make_rng(seed)),
    "extreme": _extreme_problem,
    "ordinary": lambda seed: ordinary_problem(make_rng(seed)),
    "larger": lambda seed: random_instance(make_rng(seed), (6, 8)),
    "rows": own_rows_problem,
    "scaled rows": lambda seed: scaled_rows_problem(make_rng(seed)),
    "state": state_problem,
    "state rows": state_rows_problem,
    "stage rows": stage_rows_problem,
    "scaled state": scaled_state_problem,
}
"""Function that returns a problem of each kind from a seed."""
UNSEARCHED = frozenset({"ordinary", "larger"})
"""Kinds of problems that are too large for exhaustive search."""


# -- solving methods -----------------------------------------------------------------------------
DRAWN = {
    "greedy_time_ratio": (0.0, 0.1),
    "max_greedy_time_ratio": (0.0, 0.5),
    "min_units": (1e-6, 1.0, 1e3),
    "max_units": (1e4, 1e5),
    "small_gap_ratio": (0.0, 0.01, 1.0),
    "wide_gap_ratio": (0.0, 0.03, 1.0),
    "far_gap_ratio": (0.0, 0.1, 1.0),
    "cut_rounds": (1, 5, 30),
    "cuts_per_round": (1, 10, 400),
    "cut_violation": (0.0, 1e-5, 1e-3),
    "cut_gain_ratio": (0.0, 1e-3),
    "row_gain_ratio": (0.0, 4e-3),
    "linear_rows": (1, 4, 100),
    "linear_growth_ratio": (0.0, 0.5, 1.0),
    "tight_ratio": (0.0, 0.5, 0.97, 1.0),
    "large_columns": (1, 5000),
    "rounds_without_gain": (1, 3),
    "max_sums": (1, 16, 1 << 20),
    "easy_growth_ratio": (0.0, 0.5, 1.0),
    "single_row_gain_ratio": (0.0, 0.02, 1.0),
    "few_rows": (1, 2),
    "wide_gap_rows": (1, 3),
    "min_solve_s": (0.01, 5.0),
    "wide_gap_time_ratio": (0.0, 0.75, 1.0),
    "far_gap_time_ratio": (0.0, 0.3, 1.0),
    "idle_root_time_ratio": (0.0, 0.1, 1.0),
    "counted_use_ratio": (0.0, 0.02, 1.0),
    "repair_s": (0.0, 1.0),
    "search_s": (0.0, 3.0),
    "idle_iterations_per_column": (0.0, 0.01, 0.1),
    "iterations_per_offer": (1, 100),
    "search_time_ratio": (0.0, 0.5, 1.0),
    "far_search_time_ratio": (0.0, 0.8, 1.0),
    "without_schedule_time_ratio": (0.0, 1 / 6, 1.0),
    "fastest_time_ratio": (0.1, 0.8),
    "worker_start_s": (0.0, 0.5),
    "drops_dominated_keeps": (True, True, False),
}
DRAWN_APART = {
    "relaxation_time_ratio": (0.1, 0.5, 1.0),
    "surrogate_time_ratio": (0.1, 0.5, 1.0),
    "least_makespan_time_ratio": (0.0, 0.25, 1.0),
    "min_weight_step": (1 / 64, 1 / 4, 1.0),
    "time_weights": ((1 / 1024, 1 / 256, 1 / 64, 1 / 8, 1.0), (1.0, 0.5), ()),
}
"""Values of the fields of a policy, also poor ones; none may cause a false claim.

Those of makespans, and new ones, are drawn apart, so that recorded seeds keep their problems; a
new family of cuts or heuristic changes them.
"""


def random_policy(rng):
    """Draw a policy: its enabled phases, and a value of each number."""
    drawn = Policy(
        cuts=frozenset(family for family in sorted(CUT_FAMILIES) if rng.random() < 0.8),
        heuristics=frozenset(name for name in sorted(HEURISTICS) if rng.random() < 0.35),
        **{name: rng.choice(values) for name, values in DRAWN.items()},
    )
    apart = make_rng(str([getattr(drawn, name) for name in DRAWN]))
    return replace(drawn, **{name: apart.choice(values) for name, values in DRAWN_APART.items()})


def random_grouping(rng, n):
    """Draw the rows that a lazy solve enforces first, or None for the default rows."""
    if rng.random() < 0.3:
        return None
    rows, steps = rng.choice((0.0, 0.2, 0.5, 1.0)), rng.choice((0.0, 0.0, 0.1, 0.3))
    return Grouping(n).with_rows(
        [t for t in range(n) if rng.random() < rows],
        [(t, k) for t in range(n) for k in range(t) if rng.random() < steps],
    )


METHODS = ("lazy", "compact", "built", "unreduced")
"""Methods of `answer` that solve any problem by any back end."""
BUILDS = ("built", "unreduced", "by hand", "bare", "bare unreduced")
"""Methods of `answer` that call `build`, which refuses costs beyond the range of solvers."""
MAX_COST_PASSES = 1e8
"""Multiple of a single pass up to which `build` accepts every cost."""


def _solve_lazily(problem, *, rng, backend, gap):
    """Solve with a random policy: the whole task, or the proof from random rows and a poor start.

    The proof may also begin without a start.
    """
    request = Request(
        backend=backend,
        time_limit_s=LIMIT_S,
        gap=gap,
        seed=rng.randint(0, 3),
        policy=random_policy(rng),
    )
    if rng.random() < 0.3:
        search = Search(problem=problem, request=request)
        Task(problem=problem, formulation="lazy").solve(search, None)
        return search.result(formulation="lazy")
    start = None
    if rng.random() < 0.4:
        start = make_valid_candidate(
            problem, rng.choice((keep_all_if_within_budgets, page_everything))(problem)
        )
    first = random_grouping(rng, len(problem.graph.nodes))
    search = prove(problem, request, start=start, first_grouping=first)
    return search.result(formulation="lazy")


def solve_by_several(problem, rng, count):
    """Solve by `count` random methods; return the name, the gap tolerance and the result of each.

    The first is "lazy" by HiGHS. The result is the text of an exception if one was raised. Methods
    without a licence of their solver are omitted.
    """
    ways = dict.fromkeys(METHODS, answer)
    if infeasibility_reason(problem) is None and not problem.is_overlapping:
        ways["drawn"] = _solve_lazily
    chosen = [(label, name) for label in ways for name in BACKENDS]
    found = []
    for label, backend in [("lazy", "highs"), *rng.sample(chosen, count - 1)]:
        gap = rng.choice(GAPS)
        name = f"{label} with {backend}, gap {gap:g}"
        try:
            given = {"rng": rng} if label == "drawn" else {"way": label, "time_limit": LIMIT_S}
            found.append((name, gap, ways[label](problem, backend=backend, gap=gap, **given)))
        except LicenceError:
            continue
        except Exception as error:  # noqa: BLE001 - any other one is a fault
            if is_refusal(error, label):
                continue
            found.append((name, gap, f"{type(error).__name__}: {error}"))
    return found


def is_refusal(error, way):
    """Return whether a build was refused, because a cost is beyond the range of solvers.

    A problem that is passed to `solve` is never refused.
    """
    refused = isinstance(error, ModelError) and "the range of solvers" in str(error)
    return refused and way in BUILDS


def may_be_refused(problem):
    """Return whether `build` may refuse the problem: a cost exceeds 100 million single passes."""
    objective = problem.objective
    most = max(abs(cost) for costs in objective.coefficients for cost in costs)
    return most > MAX_COST_PASSES * abs(objective.baseline)


# -- claims --------------------------------------------------------------------------------------
def find_wrong_claim(problem, result, least, gap, *, sharp=False, settled=True):
    """Return an error in a result, or an empty text.

    `least` is the optimum without the baseline, None if infeasible. With `sharp`, tolerances are
    relative to the costs of decisions only, a bound is required, and no value may be below `least`.
    Without `settled`, the solve may have ended early, without a claim.
    """
    value = None
    if result.schedule is not None:
        found = make_candidate(problem, result.schedule)
        if found.violations:
            return f"a schedule with violations {found.violations}"
        if least is None:
            return "a schedule, where there is none"
        value = found.value
    if least is None:
        return ""
    if result.status == Status.INFEASIBLE or (value is None and settled):
        return f"{result.status} ({result.termination}), optimum {least!r}"
    objective = problem.objective
    best, exact = objective.baseline + least, objective.is_in_bytes
    sizes = abs(objective.baseline), abs(best if sharp else least)
    whole = 0.0 if exact else EQUALITY_TOLERANCE * (max(sizes) if sharp else sum(sizes))
    bound = result.objective_bound
    lacking = sharp and bound is None and result.model_objective is None
    if lacking or (bound is not None and bound > best + whole):
        return f"bound {bound!r}, optimum {best!r}"
    if value is None:
        return ""
    resolved = 0.0 if exact else RESOLVED * abs(least)
    allowed = max(gap * value, resolved) if sharp else gap * value + resolved + whole
    return _find_wrong_value(problem, result, value, least, allowed, sharp=sharp)


def _find_wrong_value(problem, result, value, least, allowed, *, sharp):
    """Return an error in a result's value or its bound on the overhead, or an empty text."""
    energy = problem.minimize == Quantity.ENERGY
    if sharp and energy and result.overhead_bound_j > least * (1 + RESOLVED):
        return f"bound of the overhead {result.overhead_bound_j!r}, least {least!r}"
    if sharp and value < least - value_tolerance(least):
        return f"{value!r} is better than the optimum {least!r}"
    too_much = result.status == Status.OPTIMAL and value - least > allowed
    return f"optimal at {value!r}, optimum {least!r}" if too_much else ""


def find_wrong_end(problem, best, result, gap, *, settled=True, proved=True):
    """Return an error in a result, compared with the optimum `best`, or an empty text.

    Without `settled`, the solve may have ended early, without a claim. Without `proved`, an optimal
    value is sufficient, without a proof.
    """
    least = None if best is None else make_candidate(problem, best.schedule).value
    error = find_wrong_claim(problem, result, least, gap, sharp=settled, settled=settled)
    if error:
        return error
    value = None
    if result.schedule is not None:
        found = check_schedule(problem, result.schedule)
        value, known = problem.objective.value_of(found.simulation), result.to_dict()["objective"]
        if abs(value - known["value"]) > value_tolerance(value):
            return f"value {value}, said {known['value']}"
        if known["bound"] is None or known["bound"] > best.value + value_tolerance(best.value):
            return f"bound {known['bound']}, optimum {best.value}"
    wanted = Status.INFEASIBLE if best is None else Status.OPTIMAL
    if result.status == wanted or not settled:
        return ""
    if value is None or proved:
        return f"expected {wanted}, got {result.status} ({result.reason})"
    return "" if value - best.value <= RESOLVED * value else f"{value}, optimum {best.value}"


def value_tolerance(value):
    """Return the absolute tolerance of a value."""
    return RESOLVED * max(1.0, abs(value))


class Watch:
    """Progress callback that records in `fault` a bound above the optimum, or a value below it."""

    def __init__(self, problem, best):
        baseline = problem.objective.baseline if problem.minimize != "ram" else 0.0
        self.most = None if best is None else best.value - baseline
        self.fault = ""

    def __call__(self, progress):
        """Check one progress report."""
        bound, value = progress.overhead_bound, progress.overhead
        if self.most is None:
            if value is not None:
                self.fault = f"infeasible, incumbent {value}"
        elif bound is not None and bound > self.most + value_tolerance(self.most):
            self.fault = f"optimum {self.most}, bound {bound} on the way"
        elif value is not None and value < self.most - value_tolerance(self.most):
            self.fault = f"optimum {self.most}, incumbent {value} on the way"


def solve_by_compact(problem):
    """Return the optimum of a problem by ``compact``, for large problems; None if infeasible.

    If the first solver's tolerance leaves a gap, the second solver is used, which must close it.
    """
    for backend in BACKENDS[:2]:
        options = {"formulation": "compact", "backend": backend, "gap": 0.0}
        result = solve(problem, time_limit=600.0, **options)
        if result.status == Status.INFEASIBLE:
            return None
        if result.status == Status.OPTIMAL:
            break
    assert result.status == Status.OPTIMAL
    found = check_schedule(problem, result.schedule)
    return Optimum(problem.objective.value_of(found.simulation), result.schedule)


def find_fault(problem, way, *, seed="", reference=optimum, gap=0.0, watched=True, **options):
    """Solve a problem by one method of `answer`; return an error in its result, or an empty text.

    `reference` returns the optimum. Unless `watched`, progress reports are not checked, because
    their values have the solver's tolerances. ``unreduced`` needs no proof if bytes are minimized,
    ``driver`` none if there is state, for which `solve` falls back to ``compact``.
    """
    if way not in EVERY_PROBLEM and infeasibility_reason(problem) is not None:
        return ""  # proven infeasible before a solve
    best = reference(problem)
    if way.startswith("rounds"):
        return _find_wrong_rounds(problem, best, initial_grouping(problem, way, seed))
    watch = Watch(problem, best)
    callback = {"on_progress": watch} if watched and way != "by hand" else {}
    settled = options.get("time_limit", LIMIT_S) >= LIMIT_S
    options = {"time_limit": 10 * LIMIT_S, "gap": gap, **callback, **options}
    try:
        result = answer(problem, way, seed=seed, **options)
    except PoetModelError as error:
        return "" if is_refusal(error, way) else f"{type(error).__name__}: {error}"
    proved = not (way == "unreduced" and problem.objective.is_in_bytes)
    proved = proved and not (way.startswith("driver") and problem.graph.state_tensors)
    error = find_wrong_end(problem, best, result, gap, settled=settled, proved=proved)
    if way.startswith("bare") and not error and result.schedule is not None:
        error = _find_wrong_model_value(problem, result)
    return error or watch.fault


def _find_wrong_rounds(problem, best, first):
    """Return an error in the result of `run_rounds`, or an empty text."""
    wanted = None if best is None else best.value - problem.objective.baseline
    try:
        value = run_rounds(problem, first).value
    except RoundsError as error:
        return str(error)
    if None in (value, wanted):
        return "" if value == wanted else f"optimum {wanted}, rounds {value}"
    return "" if abs(value - wanted) <= SOLVER_TOLERANCE else f"optimum {wanted}, rounds {value}"


def _find_wrong_model_value(problem, result):
    """Return an error in the model's value, which may exceed the verifier's only for peak RAM."""
    value = result.value
    said = problem.objective.baseline + result.statistics["model_value"]
    wrong = said < value - value_tolerance(value) or (
        problem.minimize != "ram" and said > value + value_tolerance(value)
    )
    return f"the model says {said}, the verifier {value}" if wrong else ""


def find_faults(seeds, make, way, **options):
    """Return the errors of a method on the problems `make(seed)`, by seed, without correct ones."""
    found = {seed: find_fault(make(seed), way, seed=seed, **options) for seed in seeds}
    return {seed: error for seed, error in found.items() if error}


def examine(seed, *, ways=4):
    """Solve the problem of a seed, ``kind/number``, by `ways` methods; return faults and counts.

    Counts are problems by kind, "solves", "searched" problems, and solves "left open".
    """
    kind = seed.partition("/")[0]
    problem = KINDS[kind](seed)
    rng = make_rng(f"ways of {seed}")
    given = solve_by_several(problem, rng, ways)
    results = [(name, gap, one) for name, gap, one in given if not isinstance(one, str)]
    faults = [Fault(seed, name, one) for name, _, one in given if isinstance(one, str)]
    counts = Counter({kind: 1, "solves": len(given)})
    schedules = [one.schedule for _, _, one in results if one.schedule is not None]
    if kind not in UNSEARCHED:
        with suppress(TooManyLabelsError):
            best = optimum(problem, max_labels=MAX_LABELS)
            schedules = [] if best is None else [best.schedule]
            counts["searched"] += 1
    values = [
        made.value
        for each in schedules
        if (made := make_valid_candidate(problem, each)) is not None
    ]
    least = min(values, default=None)
    for name, gap, result in results:
        error = find_wrong_claim(problem, result, least, gap)
        if result.status == Status.UNKNOWN and name.startswith("drawn"):
            counts["left open"] += 1  # `solve` then falls back to ``compact``
        elif error:
            faults.append(Fault(seed, name, error))
        elif result.status not in (Status.OPTIMAL, Status.INFEASIBLE):
            counts["left open"] += 1
    return faults, counts


def new_seeds(count, *, begin=None):
    """Return `count` seeds of all kinds in turn, numbered from `begin` on, by default at random."""
    first = secrets.randbelow(2**40) if begin is None else begin
    kinds = list(KINDS)
    return [f"{kinds[k % len(kinds)]}/{first + k}" for k in range(count)]


# -- methods ------------------------------------------------------------------------------------
EVERY_PROBLEM = (*METHODS, *BUILDS)
"""Methods that prove infeasibility themselves; `solve` checks it before all other methods."""


def answer(problem, way, *, seed="", **options):
    """Solve a problem by one of the methods; return the result.

    ``lazy``, ``compact`` and ``paper`` are formulations of `solve`. ``built`` and ``unreduced``
    solve a model that `build` returns; for ``by hand`` user-defined constraints and objective are
    added to it. ``bare`` methods prove a model without a start and postprocessing. The ``driver``
    of ``lazy`` has no start, and initial rows only if its name ends with "from random rows".
    """
    models = {
        "unreduced": lambda: build(problem, reductions=False),
        "built": lambda: build(problem),
    }
    models["by hand"] = lambda: build_by_hand(problem)
    if way in models:
        return solve(models[way](), **options)
    if way in ("lazy", "compact", "paper"):
        return solve(problem, formulation=way, **options)
    request = Request(time_limit_s=options.pop("time_limit"), **options)
    if way.startswith("bare"):
        model = build(problem, reductions=way == "bare")
        search = Search(problem=problem, request=request)
        prove_model(model, search, start=None)
        return search.result(formulation="compact")
    first = initial_grouping(problem, way, seed)
    return prove(problem, request, first_grouping=first).result(formulation="lazy")


def initial_grouping(problem, way, seed):
    """Return the initial grouping of a method: random rows by its name, otherwise none."""
    at_random = way.endswith("from random rows")
    return (
        random_rows(make_rng(f"rows of {seed}"), problem)
        if at_random
        else group_all_stages(problem)
    )


def build_by_hand(problem):
    """Return a model with user-defined constraints and objective added over its relations."""
    plain = problem.minimize if problem.minimize != USER_OBJECTIVE else "energy"
    model = build(
        replace(problem, constraints=(), user_objective=(), minimize=plain), reductions=False
    )
    graph = problem.graph
    model.out_once = pyo.Constraint(
        range(len(graph.tensors)), rule=lambda m, i: _count(m, problem, "page_outs", i) <= 1
    )
    model.own = pyo.ConstraintList()
    for row in problem.constraints:
        # Without variables, Pyomo refuses a comparison: `R[0, 0] - R[0, 0]` adds one.
        body = sum_totals(model, problem, row.terms.items()) + model.R[0, 0] - model.R[0, 0]
        near = max(map(abs, (row.lower or 0, row.upper or 0)))
        slack = 0.0 if _is_whole(row.terms.items()) else 1e-9 * near
        if row.upper is not None:
            model.own.add(body <= row.upper + slack)
        if row.lower is not None:
            model.own.add(body >= row.lower - slack)
    if problem.minimize == USER_OBJECTIVE:
        model.objective.deactivate()
        model.mine = pyo.Objective(expr=sum_totals(model, problem, problem.user_objective))
    return model


def _is_whole(terms):
    figures = ("energy_j", "compute_s", "transfer_s")
    return all(isinstance(value, int) and key not in figures for key, value in terms)


def _count(m, problem, count, index):
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


def sum_totals(m, problem, terms):
    """Return the weighted sum of totals `terms` as an expression over a model's relations."""
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
    sums = {
        "energy_j": (passed, moved_in, moved_out),
        "compute_s": (compute_s, none, none),
        "transfer_s": ([0.0] * len(graph.nodes), in_s, out_s),
        "bytes_read": ([0] * len(graph.nodes), sizes, none),
        "bytes_written": ([0] * len(graph.nodes), none, sizes),
    }
    expression = 0
    for key, weight in terms:
        kind, _, name = key.partition(":")
        kind, at, stage = kind.partition("@")
        if key == "constant":
            expression += weight
        elif at:
            again = kind == "recomputations"
            relation, index = (m.R, graph.node_index) if again else (m.M_in, graph.tensor_index)
            place = (int(stage), index[name])
            is_first = again and place[0] == place[1]
            expression += 0 if is_first or place not in relation else weight * relation[place]
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
