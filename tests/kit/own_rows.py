"""Random user-defined constraints and objectives, by seed, that bind or are slightly infeasible."""

from dataclasses import replace

from kit.instances import (
    random_instance,
    random_problem,
    random_schedule,
    scaled_instance,
    scarce_problem,
    seeded,
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
    """Make a problem with user constraints; two of three have less RAM than keep-all needs."""
    rng = seeded(f"rows of {seed}")
    if rng.random() < 0.7:
        return constrained(rng, scarce_problem(seed, n, **fixed))
    return constrained(rng, random_instance(rng, n, **fixed))


def larger_own_rows_problem(seed, kind):
    """Make a problem with own constraints that is too large to be searched.

    Of 7 to 10 nodes ('scarce'); under a deadline, of nodes and tensors that cost the same
    ('alike'); or of branches that nothing but the rows tells apart ('twins'). Half the times it has
    upper limits and no rewards only.
    """
    rng = seeded(f"rows of {seed}")
    problem = twins(rng) if kind == "twins" else scarce_problem(seed, (7, 10))
    if kind == "alike":
        problem = alike(rng, problem)
    rewarded = replace(
        problem, minimize=USER_OBJECTIVE, user_objective=_random_objective(rng, problem)
    )
    measured = rewarded if rng.random() < 0.4 else problem
    schedule = solve(measured, formulation="compact", gap=0.0).schedule
    if schedule is None:
        return problem
    found = with_random_rows(rng, problem, schedule)
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


def alike(rng, problem):
    """Return a problem under a deadline in which many nodes and tensors cost the same."""
    graph = problem.graph
    page = [(1.0, float(rng.choice((1, 2)))) for _ in graph.tensors]
    costs = costs_of(
        graph, [1.0] * len(graph.nodes), [float(rng.choice((2, 5))) for _ in graph.nodes], page
    )
    ram, deadline = problem.ram_budget_bytes, len(graph.nodes) + rng.randint(1, 8)
    return Problem(graph, costs, ram=ram, deadline=deadline, deadline_counts="serial")


def twins(rng):
    """Make a problem of two to four equal branches of one or two nodes, and a node to join them."""
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


def with_random_rows(rng, problem, schedule, *, rows=(1, 3), objective=0.3):
    """Return a problem with random own constraints, and now and then an own objective.

    Some rules state a row for every node or tensor. Their limits are
    near what a schedule takes, be it wasteful, so that they bind or just cannot be kept.
    """
    count = rows if isinstance(rows, int) else rng.randint(*rows)
    found = [row for number in range(count) for row in _random_rule(rng, problem, schedule, number)]
    changed = replace(problem, constraints=(*problem.constraints, *found))
    if rng.random() < objective:
        changed = replace(
            changed, minimize=USER_OBJECTIVE, user_objective=_random_objective(rng, problem)
        )
    return changed


def constrained(rng, problem):
    """Return a problem with random own constraints, and now and then an own objective.

    It is searched for the schedules that rows are measured by: the best one, or one that wastes.
    """
    return with_random_rows(rng, problem, _measured_schedule(rng, problem, 0.6))


def _measured_schedule(rng, problem, rewarded):
    """Return a best schedule, with this chance for a random objective; a random one without."""
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
    """Draw the rows of one rule."""
    done = simulate(problem.graph, problem.costs, schedule, deadline_counts=problem.deadline_counts)
    kind = rng.choice(("named", "each", "sum", "pair", "bytes", "figure", "mixed", "mixed"))
    used = [
        key
        for count in _counts(problem)
        for key in _keys(problem, count)
        if done.total(problem.graph, ((key, 1),))
    ]
    sums = [_random_terms(rng, problem, kind, used)]
    if kind == "each":
        sums = [((key, 1),) for key in _keys(problem, rng.choice(_counts(problem)))]
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


def _counts(problem):
    """Return the kinds of counts that a problem permits for nodes or tensors."""
    return _COUNTS_OF_STATE if problem.graph.state_tensors else _COUNTS


def _keys(problem, count):
    """Return the keys of a count of every node or tensor."""
    if count == "resident":
        return [f"{count}:{problem.graph.tensors[i].name}" for i in problem.graph.state_tensors]
    of_nodes = count == "recomputations"
    index = problem.graph.node_index if of_nodes else problem.graph.tensor_index
    return [f"{count}:{name}" for name in index]


def _random_terms(rng, problem, kind, used):
    """Draw the terms of one row, preferably decisions that a schedule makes."""
    counts = [key for count in _counts(problem) for key in _keys(problem, count)]
    if kind == "named":
        return ((rng.choice(used if used and rng.random() < 0.6 else counts), 1),)
    if kind == "sum":
        return tuple((key, 1) for key in _keys(problem, rng.choice(_counts(problem))))
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
    """Draw an own objective: weighed energy, wear and time, counts, or rewards among them."""
    counts = [key for count in _counts(problem) for key in _keys(problem, count)]
    kind = rng.choice(("weighed", "counts", "rewards", "rewards"))
    if kind == "weighed":
        figures = rng.sample((*_FIGURES, "bytes_written", "bytes_read"), rng.randint(1, 4))
        return tuple((key, rng.choice((1, 2, 0.25))) for key in figures)
    if kind == "counts":
        chosen = _keys(problem, rng.choice(_counts(problem))) + rng.sample(counts, 2)
        return (*((key, rng.randint(1, 3)) for key in dict.fromkeys(chosen)), ("constant", 5))
    some = rng.sample(counts, min(len(counts), rng.randint(1, 4)))
    return (("energy_j", rng.choice((0, 1, 0.5))), *((key, rng.randint(-4, 2)) for key in some))


def scaled_and_constrained(rng, n=(3, 5)):
    """Make a problem of `scaled_instance` with own constraints, to a byte or to a millionth.

    Coefficients are up to a thousand million times each other, and sums of both signs nearly
    cancel.
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
    """Draw a sum of totals at any scale, and say whether it is whole."""
    kind = rng.choice(("bytes", "bytes", "counts", "counts", "figure", "figure", "both"))
    if kind == "bytes":
        moved = rng.choice((("bytes_written",), ("bytes_read",), ("bytes_written", "bytes_read")))
        return tuple((key, rng.choice((1, 1, 3, -1))) for key in moved), True
    if kind == "counts":
        counts = [key for count in _counts(problem) for key in _keys(problem, count)]
        weights = rng.choice(((1, 10**9), (1, 7, 2**40), (1, -1, 10**9, -(10**9)), (3, 2**50)))
        chosen = rng.sample(counts, min(len(counts), rng.randint(2, 6)))
        return tuple((key, rng.choice(weights)) for key in chosen), True
    if kind == "figure":
        return ((rng.choice(_FIGURES), rng.choice((1, 0.1, 1e-9, 1e6))),), False
    share = problem.baseline_energy_j / max(1, sum(problem.graph.tensor_bytes))
    return (("energy_j", 1), ("bytes_written", share or 1.0)), False


def stage_rows_problem(seed, n=(4, 5), *, searched=True, **fixed):
    """Make a problem with upper limits on what happens in stages, each broken by the best before.

    Half of them have state; now and then there is a constraint on totals beside them. Those that
    are not to be `searched` may be larger.
    """
    rng = seeded(f"stage rows of {seed}")
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
            problem = with_random_rows(rng, problem, best.schedule, rows=1)
    return problem


def _stage_row(rng, problem, schedule, name):
    """Draw a per-stage limit that a schedule slightly exceeds; None without such decisions."""
    graph = problem.graph
    again = [("recomputations", t, graph.nodes[k].name) for t, k in schedule.R if k < t]
    paged = [("page_ins", t, graph.tensors[i].name) for t, i in schedule.M_in]
    if not again + paged:
        return None
    chosen = rng.sample(again + paged, rng.randint(1, len(again + paged)))
    weights = dict.fromkeys(chosen, 1)
    if rng.random() < 0.5:  # whatever is done of one kind in some stages
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
    """Make such a problem with own constraints, of homes too, and now and then an own objective."""
    return constrained(seeded(f"rows of state/{seed}"), state_problem(seed, n, **fixed))
