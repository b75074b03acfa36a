"""Problems with random user-defined constraints and objectives, by seed.

Limits are close to the totals of a schedule, so that they bind or are slightly infeasible.
"""

from dataclasses import replace

from kit.instances import (
    make_rng,
    random_instance,
    random_problem,
    random_schedule,
    scaled_instance,
    scarce_problem,
    state_problem,
)
from kit.oracle import optimum
from kit.worked import costs_of
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation
from poetmodel.problem import USER_OBJECTIVE, Constraint, Problem
from poetmodel.schedule import simulate
from poetmodel.solver import solve

_COUNTS = ("recomputations", "page_ins", "page_outs")
_COUNTS_OF_STATE = (*_COUNTS, "resident")
_FIGURES = ("energy_j", "compute_s", "transfer_s")


def own_rows_problem(seed, n=(3, 5), **fixed):
    """Draw a problem with user-defined constraints, mostly with less RAM than keep-all needs."""
    rng = make_rng(f"rows of {seed}")
    if rng.random() < 0.7:
        return add_measured_rows(rng, scarce_problem(seed, n, **fixed))
    return add_measured_rows(rng, random_instance(rng, n, **fixed))


def larger_own_rows_problem(seed, kind):
    """Draw a problem with user-defined constraints that is too large for exhaustive search.

    Its `kind` is "scarce", of 7 to 10 nodes; "alike", such a problem with a deadline whose nodes
    and tensors have few different costs; or "twins", of branches that differ in the constraints
    alone. Half of the problems have no lower limits and no rewards. A problem without a schedule
    has no user-defined constraint.
    """
    rng = make_rng(f"rows of {seed}")
    problem = twins_problem(rng) if kind == "twins" else scarce_problem(seed, (7, 10))
    if kind == "alike":
        problem = equalize_costs(rng, problem)
    rewarded = replace(
        problem, minimize=USER_OBJECTIVE, user_objective=_random_objective(rng, problem)
    )
    measured = rewarded if rng.random() < 0.4 else problem
    schedule = solve(measured, formulation="compact", gap=0.0).schedule
    if schedule is None:
        return problem
    found = add_random_rows(rng, problem, schedule)
    if rng.random() < 0.5:
        return found
    rows = tuple(
        replace(row, lower=None, upper=row.lower if row.upper is None else row.upper)
        for row in found.constraints
        if all(weight >= 0 for weight in row.terms.values())
    )
    if any(weight < 0 for _, weight in found.user_objective):
        return replace(problem, constraints=rows)
    return replace(found, constraints=rows)


def equalize_costs(rng, problem):
    """Return the problem with a deadline, and with random costs of which many are equal."""
    graph = problem.graph
    page = [(1.0, float(rng.choice((1, 2)))) for _ in graph.tensors]
    costs = costs_of(
        graph, [1.0] * len(graph.nodes), [float(rng.choice((2, 5))) for _ in graph.nodes], page
    )
    ram, deadline = problem.ram_budget_bytes, len(graph.nodes) + rng.randint(1, 8)
    return Problem(graph, costs, ram=ram, deadline=deadline, deadline_counts="serial")


def twins_problem(rng):
    """Draw a problem of 2 to 4 equal branches of 1 or 2 nodes, and a node that joins them."""
    branches, depth = rng.randint(2, 4), rng.randint(1, 2)
    sizes, costs = ([rng.randint(1, 5) for _ in range(depth)] for _ in range(2))
    nodes = [operation("x", output_bytes=rng.randint(1, 5))]
    paid = [rng.randint(1, 5)]
    for branch in range(branches):
        for step in range(depth):
            before = nodes[-1].name if step else "x"
            name = f"a{branch}.{step}"
            nodes.append(operation(name, output_bytes=sizes[step], inputs=(before,)))
            paid.append(costs[step])
    read = [node.name for node in nodes[1:]]
    nodes.append(operation("y", output_bytes=rng.randint(1, 6), inputs=("x",)))
    nodes.append(operation("z", output_bytes=1, inputs=(*read, "y")))
    paid += [rng.randint(1, 5), 1]
    graph = Graph(name="twins", nodes=tuple(nodes))
    table = costs_of(
        graph,
        paid,
        [2 * each for each in paid],
        [(each, 1) for each in paid],
        [(1, each) for each in paid],
    )
    low, high = floor(graph).bytes, checkpoint_all_peak_bytes(graph)
    ram = rng.randint(low, max(low, high - 1))
    return random_problem(rng, graph, table, ram=ram, minimize=rng.choice(("energy", "writes")))


def add_random_rows(rng, problem, schedule, *, rows=(1, 3), objective=0.3):
    """Return the problem with random user-defined constraints and, at times, such an objective.

    `rows` is the number of rules, or its range; some rules are a row for every node or tensor.
    Limits are close to the totals of `schedule`. `objective` is the probability of an objective.
    """
    count = rows if isinstance(rows, int) else rng.randint(*rows)
    found = [row for number in range(count) for row in _random_rule(rng, problem, schedule, number)]
    changed = replace(problem, constraints=(*problem.constraints, *found))
    if rng.random() < objective:
        changed = replace(
            changed, minimize=USER_OBJECTIVE, user_objective=_random_objective(rng, problem)
        )
    return changed


def add_measured_rows(rng, problem):
    """Return the problem with random constraints close to the totals of one of its schedules.

    An exhaustive search finds that schedule; see `_measured_schedule`.
    """
    return add_random_rows(rng, problem, _measured_schedule(rng, problem, 0.6))


def _measured_schedule(rng, problem, rewarded):
    """Return an optimal schedule, for a random objective with probability `rewarded`.

    Returns a random schedule if the problem is infeasible.
    """
    best = optimum(problem)
    if best is not None and rng.random() < rewarded:
        own = _random_objective(rng, problem)
        best = optimum(replace(problem, minimize=USER_OBJECTIVE, user_objective=own))
    if best is not None:
        return best.schedule
    choices = {"recompute": problem.recompute, "paging": problem.can_page}
    while True:
        schedule = random_schedule(rng, problem.graph, **choices)
        if schedule is not None:
            return schedule


def _random_rule(rng, problem, schedule, number):
    """Draw the rows of one rule, with limits close to the totals of a schedule."""
    done = simulate(problem.graph, problem.costs, schedule, deadline_counts=problem.deadline_counts)
    kind = rng.choice(("named", "each", "sum", "pair", "bytes", "figure", "mixed", "mixed"))
    used = [
        key
        for count in _list_counts(problem)
        for key in _list_keys(problem, count)
        if done.total(problem.graph, ((key, 1),))
    ]
    sums = [_random_terms(rng, problem, kind, used)]
    if kind == "each":
        sums = [((key, 1),) for key in _list_keys(problem, rng.choice(_list_counts(problem)))]
    sides = rng.choice(("upper", "upper", "lower", "both", "range"))
    tighter = rng.choice((0, 0, 1, 1, -1))
    share = rng.choice((1.0, 1.0, 0.75, 0.5))
    found = []
    for place, terms in enumerate(sums):
        value = done.total(problem.graph, terms)
        if kind in ("bytes", "figure"):
            single = {"energy_j": problem.baseline_energy_j, "compute_s": problem.pass_time_s}
            paid = single.get(terms[0][0], 0)
            value = paid + int((value - paid) * share) if share < 1.0 else value
        least, most = value + max(0, tighter), value - tighter
        if kind in ("named", "each", "sum"):
            most = max(0, most)  # no count is negative
        width = rng.randint(0, 2)
        lower, upper = {
            "upper": (None, most),
            "lower": (least, None),
            "both": (value, value),
            "range": (least, least + width),
        }[sides]
        name = f"own{number}[{place}]" if kind == "each" else f"own{number}"
        found.append(Constraint(name=name, terms=dict(terms), lower=lower, upper=upper))
    return found


def _list_counts(problem):
    """Return the names of counts by node or tensor that a problem has."""
    return _COUNTS_OF_STATE if problem.graph.state_tensors else _COUNTS


def _list_keys(problem, count):
    """Return the keys of a count for every node or tensor."""
    if count == "resident":
        return [f"{count}:{problem.graph.tensors[i].name}" for i in problem.graph.state_tensors]
    of_nodes = count == "recomputations"
    index = problem.graph.node_index if of_nodes else problem.graph.tensor_index
    return [f"{count}:{name}" for name in index]


def _random_terms(rng, problem, kind, used):
    """Draw the terms of one row, with decisions of `used` in particular, which a schedule makes."""
    counts = [key for count in _list_counts(problem) for key in _list_keys(problem, count)]
    if kind == "named":
        return ((rng.choice(used if used and rng.random() < 0.6 else counts), 1),)
    if kind == "sum":
        return tuple((key, 1) for key in _list_keys(problem, rng.choice(_list_counts(problem))))
    if kind == "pair":
        one = rng.choice(used or counts)
        other = rng.choice([key for key in counts if key != one])
        return ((one, 1), (other, -1))
    if kind == "bytes":
        return ((rng.choice(("bytes_written", "bytes_read")), 1),)
    if kind == "figure":
        return ((rng.choice(_FIGURES), 1),)
    keys = rng.sample(counts, min(len(counts), rng.randint(1, 4)))
    keys = list(dict.fromkeys([*keys, *rng.sample(used, min(len(used), 2))]))
    keys += rng.sample((*_FIGURES, "bytes_written", "bytes_read"), rng.choice((0, 0, 1, 2)))
    weights = rng.choice(((1, 2, 3), (-2, -1, 1, 2, 3), (0.5, 1.5, -0.25, 2)))
    return tuple((key, rng.choice(weights)) for key in keys)


def _random_objective(rng, problem):
    """Draw a user-defined objective of energy, time and bytes, of counts, or with rewards."""
    counts = [key for count in _list_counts(problem) for key in _list_keys(problem, count)]
    kind = rng.choice(("weighed", "counts", "rewards", "rewards"))
    if kind == "weighed":
        figures = rng.sample((*_FIGURES, "bytes_written", "bytes_read"), rng.randint(1, 4))
        return tuple((key, rng.choice((1, 2, 0.25))) for key in figures)
    if kind == "counts":
        chosen = _list_keys(problem, rng.choice(_list_counts(problem))) + rng.sample(counts, 2)
        return (*((key, rng.randint(1, 3)) for key in dict.fromkeys(chosen)), ("constant", 5))
    some = rng.sample(counts, min(len(counts), rng.randint(1, 4)))
    return (("energy_j", rng.choice((0, 1, 0.5))), *((key, rng.randint(-4, 2)) for key in some))


def scaled_rows_problem(rng, n=(3, 5)):
    """Draw a problem of `scaled_instance` with user-defined constraints at any scale.

    Limits differ by at most one unit, or mostly a millionth, from the total of a schedule.
    Coefficients of a row may differ by a factor of 10**9 or more, and in sign.
    """
    problem = scaled_instance(rng, n)
    schedule = _measured_schedule(rng, problem, 0.5)
    done = simulate(problem.graph, problem.costs, schedule, deadline_counts=problem.deadline_counts)
    rows = []
    for number in range(rng.randint(1, 3)):
        terms, exact = _scaled_terms(rng, problem)
        value = done.total(problem.graph, terms)
        near = rng.choice((1.0, 1.0, 1.0, 1.0 - 1e-6, 1.0 + 1e-6, 1.1))
        at = value + rng.choice((-1, 0, 0, 1)) if exact else value * near
        sides = rng.choice(((None, at), (None, at), (at, None), (at, at)))
        rows.append(
            Constraint(name=f"own{number}", terms=dict(terms), lower=sides[0], upper=sides[1])
        )
    changed = replace(problem, constraints=tuple(rows))
    if rng.random() < 0.3:
        terms, _ = _scaled_terms(rng, problem)
        changed = replace(changed, minimize=USER_OBJECTIVE, user_objective=terms)
    return changed


def _scaled_terms(rng, problem):
    """Draw the terms of a row at any scale; return them, and whether their sum is an integer."""
    kind = rng.choice(("bytes", "bytes", "counts", "counts", "figure", "figure", "both"))
    if kind == "bytes":
        moved = rng.choice((("bytes_written",), ("bytes_read",), ("bytes_written", "bytes_read")))
        return tuple((key, rng.choice((1, 1, 3, -1))) for key in moved), True
    if kind == "counts":
        counts = [key for count in _list_counts(problem) for key in _list_keys(problem, count)]
        weights = rng.choice(((1, 10**9), (1, 7, 2**40), (1, -1, 10**9, -(10**9)), (3, 2**50)))
        chosen = rng.sample(counts, min(len(counts), rng.randint(2, 6)))
        return tuple((key, rng.choice(weights)) for key in chosen), True
    if kind == "figure":
        return ((rng.choice(_FIGURES), rng.choice((1, 0.1, 1e-9, 1e6))),), False
    share = problem.baseline_energy_j / max(1, sum(problem.graph.tensor_bytes))
    return (("energy_j", 1), ("bytes_written", share or 1.0)), False


def stage_rows_problem(seed, n=(4, 5), *, searched=True, **fixed):
    """Draw a problem with per-stage constraints, each violated by the best schedule so far.

    Half of the problems have state, some a constraint on totals too. Unless `searched`, a solver
    finds the best schedules, so that problems may be larger.
    """
    rng = make_rng(f"stage rows of {seed}")
    make = rng.choice((scarce_problem, state_problem))
    problem = make(seed, n, **fixed)
    rows = rng.randint(1, 4)
    for number in range(rows):
        best = optimum(problem) if searched else solve(problem, formulation="compact", gap=0.0)
        if best is None or best.schedule is None:
            break
        row = _stage_row(rng, problem, best.schedule, f"stage{number}")
        if row is None:
            break
        problem = replace(problem, constraints=(*problem.constraints, row))
        if number == rows - 1 and rng.random() < 0.2:
            problem = add_random_rows(rng, problem, best.schedule, rows=1)
    return problem


def _stage_row(rng, problem, schedule, name):
    """Draw a per-stage limit that a schedule exceeds; None if it has no counted decisions."""
    graph = problem.graph
    again = [("recomputations", t, graph.nodes[k].name) for t, k in schedule.R if k < t]
    paged = [("page_ins", t, graph.tensors[i].name) for t, i in schedule.M_in]
    if not again + paged:
        return None
    chosen = rng.sample(again + paged, rng.randint(1, len(again + paged)))
    weights = dict.fromkeys(chosen, 1)
    if rng.random() < 0.5:  # all decisions of one kind in some stages
        kind, t, _ = rng.choice(chosen)
        names = graph.node_index if kind == "recomputations" else graph.tensor_index
        stages = range(t, min(len(graph.nodes), t + rng.randint(1, 3)))
        weights = {(kind, s, name): 1 for s in stages for name in names}
    elif rng.random() < 0.4:
        weights = {act: rng.choice((1, 2, 0.5)) for act in chosen}
    done = sum(weights.get(act, 0) for act in again + paged)
    upper = done - min(weights.values()) if rng.random() < 0.6 else 0
    terms = {f"{kind}@{t}:{item}": weight for (kind, t, item), weight in weights.items()}
    return Constraint(name=name, terms=terms, upper=upper)


def state_rows_problem(seed, n=(3, 5), **fixed):
    """Draw a problem with state and user-defined constraints, also on homes."""
    return add_measured_rows(make_rng(f"rows of state/{seed}"), state_problem(seed, n, **fixed))
