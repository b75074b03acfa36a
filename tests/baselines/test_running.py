"""The result that `run` makes of a schedule, and that all executions give valid schedules."""

from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest

from kit.instances import make_rng, random_graph, random_training_graph
from kit.oracle import optimum
from kit.worked import chain_costs, training_chain
from poetmodel.baselines import METHODS, StateHomes, method_names, own, run
from poetmodel.baselines import running as home
from poetmodel.baselines.engine import fit_budget, select_best_schedule
from poetmodel.baselines.homes import schedule_with_homes
from poetmodel.baselines.saved_sets import chen_sqrt, keep_all
from poetmodel.clock import check_time_limit, limit_time
from poetmodel.errors import InputError, MethodNotApplicableError, TimeLimitError, VerificationError
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation
from poetmodel.heuristics.execution import Execution
from poetmodel.planner import verify
from poetmodel.problem import Problem
from poetmodel.result import Status, Termination
from poetmodel.schedule import Schedule, checkpoint_all, simulate


def problem_of(ram, **limits):
    """Return a problem over a chain of six layers."""
    graph = training_chain([3] * 7)
    return Problem(graph, chain_costs(graph), ram=ram, deadline_counts="serial", **limits)


def test_schedule_without_overhead_is_optimal():
    """A schedule of a method without overhead is optimal.

    Otherwise, only the baseline is proven; the file names the method and no solver.
    """
    result = run(problem_of("100%"), "checkpoint-all")
    assert (result.status, result.gap, result.method) == (Status.OPTIMAL, 0.0, "checkpoint-all")
    graph = training_chain([3, 3])  # whose peak is the minimum RAM, the bound of all peaks
    least = Problem(graph, chain_costs(graph), ram="100%", minimize="ram")
    assert run(least, "checkpoint-all").status == Status.OPTIMAL
    result = run(problem_of("75%"), "chen-sqrt")
    assert (result.status, result.gap) == (Status.FEASIBLE, 1.0)
    assert result.bound_j == result.problem.baseline_energy_j
    stated = result.to_dict()["problem"]
    assert (stated["method"], stated["backend"], stated["formulation"]) == ("chen-sqrt", "", "")


def test_impossible_limits_are_infeasible_for_every_method():
    """Below the minimum RAM, all methods report that the problem is infeasible."""
    problem = problem_of("10%")
    for name in ("checkpoint-all", "rotor", "checkmate", "optimal"):
        assert run(problem, name).status == Status.INFEASIBLE
    assert run(problem_of("10%", paging=False), "paging-only").status == Status.INFEASIBLE
    with pytest.raises(MethodNotApplicableError, match=r"^paging-only: "):
        run(problem_of("75%", paging=False), "paging-only")


def test_reason_names_the_method_and_the_limit():
    """A schedule above the budget is not returned."""
    with pytest.raises(MethodNotApplicableError, match=r"checkpoint-all: .*peak RAM 23 B"):
        run(problem_of("75%"), "checkpoint-all")
    with pytest.raises(MethodNotApplicableError, match="no recomputation"):
        run(problem_of("75%", recompute=False), "chen-sqrt")
    with pytest.raises(MethodNotApplicableError, match=r"checkmate: .* above the deadline"):
        run(problem_of("75%", deadline="101%"), "checkmate")


def test_broken_schedule_is_a_bug_and_said_so(monkeypatch):
    """A method that violates a rule of execution raises another error than an inapplicable one."""
    broken = SimpleNamespace(
        name="broken",
        uses_solver=False,
        user_function=None,
        function=lambda: lambda _: Schedule(R=((0, 0),)),
    )
    monkeypatch.setattr(home, "method", lambda _: broken)
    with pytest.raises(VerificationError, match="not computed in its own stage"):
        run(problem_of("100%"), "broken")


def test_options_of_the_solver_are_refused_where_there_is_none():
    """Formulations and starts are refused for heuristics; the error for unknown names lists all.

    A field of a request is no option; the error lists the options.
    """
    with pytest.raises(InputError, match=r"^formulation: "):
        run(problem_of("100%"), "rotor", formulation="compact")
    with pytest.raises(InputError, match=r"^gap: "):
        run(problem_of("100%"), "rotor", gap=-1.0)
    with pytest.raises(InputError, match="expected one of optimal, paging-only"):
        run(problem_of("100%"), "nope")
    for name in ("rotor", "optimal", "checkmate"):
        with pytest.raises(
            TypeError, match=r"unexpected keyword argument 'time_limit_s'; expected form"
        ):
            run(problem_of("100%"), name, time_limit_s=5.0)


@pytest.mark.parametrize("name", ["rotor", "pofo", "griewank-walther"])
def test_forward_node_behind_a_backward_one_is_no_chain(name):
    """The method does not apply, and names the node."""
    chain = training_chain([300] * 4)
    late = operation("metric", output_bytes=8, inputs=("g3", "f2"), phase="forward")
    graph = replace(chain, nodes=(*chain.nodes, late))
    problem = Problem(graph, chain_costs(graph), ram="95%")
    with pytest.raises(MethodNotApplicableError, match="forward node 'metric' follows a backward"):
        run(problem, name)


HEURISTICS = tuple(name for name in method_names() if not METHODS[name].uses_solver)


@pytest.mark.parametrize("name", HEURISTICS)
def test_time_limit_ends_every_method_with_its_reason(name):
    """After the time limit, there is no schedule, and the reason names the method and the limit."""
    result = run(problem_of("75%"), name, time_limit=1e-6)
    assert (result.status, result.termination) == (Status.UNKNOWN, Termination.TIME_LIMIT)
    assert result.reason.startswith(f"{name}: it did not finish within the time limit of ")
    assert result.time_limit_s == 1e-6
    assert result.to_dict()["problem"]["time_limit_s"] == 1e-6


OF_RULES = (
    "capuchin",
    "checkmate-rounding",
    "dtr-paging",
    "lower-sets",
    "offload-all",
    "pofo",
)


OF_REQUEST = 6
"""Reads of the clock by the request itself, before and after a method."""


@pytest.mark.parametrize("name", HEURISTICS)
def test_every_method_looks_at_the_clock_as_it_goes(name, monkeypatch):
    """Wherever the time ends, the method ends: it looks at least once for every node.

    A method of several rules may have a schedule by then.
    """
    looks = 0

    def look():
        nonlocal looks
        looks += 1
        return float(looks)

    monkeypatch.setattr("poetmodel.clock.time", SimpleNamespace(monotonic=look))
    problem = problem_of("75%")

    def ends_in_time(limit):
        nonlocal looks
        looks = 0
        try:
            ended = run(problem, name, time_limit=limit).termination != Termination.TIME_LIMIT
        except MethodNotApplicableError:
            ended = True
        return ended

    assert ends_in_time(1e9)
    needed = looks
    assert needed > len(problem.graph.nodes)
    for limit in range(1, needed - OF_REQUEST, 1 + needed // 8):
        assert not ends_in_time(limit) or name in OF_RULES
        assert looks <= limit + 6 + OF_REQUEST


@pytest.mark.parametrize("name", ["optimal", "paging-only", "recompute-only", "checkmate"])
def test_limit_of_a_program_leaves_no_error(name):
    """A method that solves a program raises no error at its time limit."""
    result = run(problem_of("75%"), name, time_limit=1e-3)
    assert result.status in (Status.FEASIBLE, Status.UNKNOWN, Status.OPTIMAL)
    if result.schedule is None:
        assert result.termination == Termination.TIME_LIMIT


@pytest.mark.parametrize("seed", range(6))
def test_checkmate_is_the_quickest_recomputation(seed):
    """Its compute time is that of an exhaustive search without paging, or both are infeasible."""
    graph = random_training_graph(make_rng(f"checkmate/{seed}"), 4)
    ram = (floor(graph).bytes + checkpoint_all_peak_bytes(graph)) // 2
    problem = Problem(graph, chain_costs(graph), ram=ram, deadline_counts="serial")
    best = optimum(replace(problem, paging=False, minimize="time", deadline_counts="compute"))
    if best is None:
        with pytest.raises(MethodNotApplicableError, match=r"^checkmate: "):
            run(problem, "checkmate", gap=0.0)
        return
    result = run(problem, "checkmate", gap=0.0)
    assert result.simulation.compute_s == pytest.approx(best.value)
    assert result.method == "checkmate"


def test_bound_of_a_restriction_is_not_claimed():
    """A bound that is proven without paging is none for the problem: the bound is the baseline."""
    graph = training_chain([3] * 6)
    problem = Problem(graph, chain_costs(graph), ram="80%", deadline_counts="serial")
    result = run(problem, "recompute-only")
    assert (result.status, result.bound_j) == (Status.FEASIBLE, result.problem.baseline_energy_j)
    assert result.statistics["restricted_status"] == "optimal"
    assert result.problem is problem


# -- the engine ----------------------------------------------------------------------------------
class Wanderer(Execution):
    """Computes a graph on demand; frees tensors at random in between."""

    def __init__(self, rng, graph):
        super().__init__(graph)
        self.rng = rng
        self.done = []

    def run(self):
        """Do all nodes in order."""
        for k in range(len(self.graph.nodes)):
            self.supply(k, frozenset())
            self.lose_some(frozenset(), 0.2)

    def supply(self, k, needed):
        """Compute a node and its missing inputs; its inputs stay."""
        pinned = needed | set(self.graph.inputs_of[k])
        for i in self.graph.inputs_of[k]:
            if i not in self.ram:
                self.fetch(i, pinned)
        self.lose_some(pinned, 0.3)
        self.compute(k)
        self.done.append(k)

    def fetch(self, i, needed):
        """Page a tensor in or recompute it."""
        k = self.graph.node_of[i]
        if not self.graph.nodes[k].recomputable or self.rng.random() < 0.4:
            self.page_in(i)
        else:
            self.supply(k, needed)

    def lose_some(self, pinned, chance):
        """Free some tensors."""
        for i in sorted(self.ram - pinned):
            if self.rng.random() < chance:
                self.free(i)


@pytest.mark.parametrize("seed", range(60))
def test_recorded_schedules_are_valid(seed):
    """Whatever is freed, paged in and recomputed on demand, the simulator finds no violation."""
    rng = make_rng(f"trace/{seed}")
    graph = random_graph(rng, (3, 9))
    wanderer = Wanderer(rng, graph)
    wanderer.run()
    schedule = wanderer.schedule()
    assert simulate(graph, None, schedule).violations == ()
    assert {k for _, k in schedule.R} == set(wanderer.done)
    assert len(schedule.R) <= len(wanderer.done)


def test_keeping_everything_is_keep_all():
    """Computations alone, with or without frees at last uses, compute each node once.

    A tensor that a stage frees without a read, after a recomputation, is not in RAM at its
    beginning.
    """
    graph = training_chain([2, 3, 1])
    plain, freeing = Execution(graph), Execution(graph)
    for k in range(len(graph.nodes)):
        plain.compute(k)
        freeing.compute(k)
        for i in sorted(i for i in freeing.ram if max(graph.users_of[i], default=0) <= k):
            freeing.free(i)
    assert plain.schedule().R == checkpoint_all(graph).R
    assert freeing.schedule() == checkpoint_all(graph)
    graph = training_chain([1, 1, 1], loss=False)
    f1, f2 = graph.tensor_index["f1"], graph.tensor_index["f2"]
    execution = Execution(graph)
    for k in (0, 1, 2, 3):
        execution.compute(k)
    execution.free(f1)
    execution.compute(1)
    execution.free(f2)
    execution.compute(4)
    schedule = execution.schedule()
    assert (4, 1) in schedule.R
    assert {i for t, i in schedule.S_RAM if t == 4} == {0, graph.tensor_index["g2"]}
    assert simulate(graph, None, schedule).valid


def test_room_is_made_by_evictions_and_refused_without_a_victim():
    """The step and the bytes are in the reason; RAM is counted with every compute and free."""
    execution = Execution(training_chain([4, 3, 1]), limit_bytes=9)
    execution.compute(0)
    execution.compute(1)
    assert execution.ram_bytes == 7
    execution.evict_until_fits(2, 2)
    with pytest.raises(MethodNotApplicableError, match="'f2' takes 3 B more, 7 B of 9 B"):
        execution.evict_until_fits(3, 2)
    execution.evict(0)
    execution.evict_until_fits(3, 2)
    assert execution.ram_bytes == 3


def test_fitted_gives_a_method_less_until_the_budget_is_kept():
    """A method that needs two bytes too many gets two bytes less."""
    graph = training_chain([1] * 5)
    costs = chain_costs(graph)
    peak = simulate(graph, None, checkpoint_all(graph)).peak_ram_bytes
    tight = Problem(graph, costs, ram=peak - 2)
    given = []

    def run(ram_bytes):
        given.append(ram_bytes)
        return checkpoint_all(graph)

    with pytest.raises(MethodNotApplicableError, match=f"needs {peak} B"):
        fit_budget(tight, run)  # type: ignore[arg-type]
    assert given[:3] == [peak - 2, peak - 4, peak - 6]
    loose = Problem(graph, costs, ram=peak)
    assert fit_budget(loose, run) == checkpoint_all(graph)  # type: ignore[arg-type]


def endless():
    """Run until the time limit stops it."""
    while True:
        check_time_limit()


def test_cheapest_keeps_what_was_found_before_the_time_limit(monkeypatch):
    """An endless variant loses neither an earlier schedule nor the time to verify it.

    The clock advances by 1 s with each reading.
    """
    looks = map(float, count())
    monkeypatch.setattr("poetmodel.clock.time", SimpleNamespace(monotonic=lambda: next(looks)))
    graph = training_chain([1] * 5)
    problem = Problem(graph, chain_costs(graph), ram="100%")

    rules = (partial(keep_all, problem), endless)
    with limit_time(1000):
        schedule = select_best_schedule(problem, rules)
        assert verify(problem, schedule).valid
    with limit_time(1000), pytest.raises(TimeLimitError):
        select_best_schedule(problem, reversed(rules))


@pytest.mark.parametrize(
    ("ram", "rules", "status", "termination"),
    [
        ("100%", "keep_all endless", Status.OPTIMAL, Termination.PROVED),
        ("75%", "chen_sqrt endless", Status.FEASIBLE, Termination.TIME_LIMIT),
        ("75%", "chen_sqrt keep_all", Status.FEASIBLE, Termination.STALLED),
        ("75%", "keep_all endless", Status.UNKNOWN, Termination.TIME_LIMIT),
    ],
)
def test_method_whose_rules_were_cut_short_met_its_time_limit(ram, rules, status, termination):
    """After an interrupted variant, the method ends by time limit, unless a schedule is optimal.

    A schedule of an earlier variant is returned.
    """
    known = {"keep_all": keep_all, "chen_sqrt": chen_sqrt, "endless": lambda _: endless()}

    @own.method("cut-short")
    def rule_by_rule(problem):
        return select_best_schedule(
            problem, [partial(known[name], problem) for name in rules.split()]
        )

    result = run(problem_of(ram), "cut-short", time_limit=0.2)
    assert (result.status, result.termination) == (status, termination)


def test_inputs_are_overwritten_as_a_last_resort():
    """A method without a schedule that may overwrite inputs runs again; others do not."""
    graph = Graph(
        name="in place",
        nodes=(
            operation("x", output_bytes=4),
            operation("y", output_bytes=4, inputs=("x",), in_place={"y": "x"}),
        ),
    )
    plain = replace(graph, nodes=(graph.nodes[0], replace(graph.nodes[1], in_place=())))

    def attempts(graph, needs, **options):
        """Return the schedule of a method that `needs` to overwrite, or its error; its attempts."""
        answers = []

        def method(problem, *, overwrites=False):
            answers.append(overwrites)
            if needs > overwrites:
                raise MethodNotApplicableError(f"too little room in attempt {len(answers)}")
            return checkpoint_all(problem.graph)

        try:
            problem = Problem(graph, chain_costs(graph), ram="100%")
            return schedule_with_homes(StateHomes.RAM, problem, (method,), **options), answers
        except MethodNotApplicableError as error:
            return str(error), answers

    found, first_error = checkpoint_all(graph), "too little room in attempt 1"
    assert attempts(graph, 0, may_overwrite=True) == (found, [False])
    assert attempts(graph, 1, may_overwrite=True) == (found, [False, True])
    assert attempts(graph, 2, may_overwrite=True) == (first_error, [False, True])
    assert attempts(graph, 1) == (first_error, [False])
    assert attempts(plain, 1, may_overwrite=True) == (first_error, [False])
