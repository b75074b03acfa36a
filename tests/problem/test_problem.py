"""The stated problem: all forms of limits, defaults from the device, and refusals."""

import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.instances import make_rng, random_instance
from kit.worked import bench_device, even_costs, skip_graph
from poetmodel.device import Costs
from poetmodel.errors import BudgetError, CostError, InputError
from poetmodel.graph import Graph, operation
from poetmodel.problem import DeadlineCounts, Problem, Quantity
from poetmodel.problem.job import Job


@pytest.fixture
def graph():
    """Return a chain of 10, 20, 30 and 5 bytes: peak 50 at c; 150 resident bytes."""
    return Graph(
        name="chain",
        nodes=(
            operation("a", output_bytes=10),
            operation("b", output_bytes=20, inputs=("a",), recomputable=False),
            operation("c", output_bytes=30, inputs=("b",)),
            operation("d", output_bytes=5, inputs=("c",)),
        ),
        resident_bytes={"parameters": 100, "gradients": 50},
    )


@pytest.fixture
def costs(graph):
    """Return 1, 2, 3, 4 s and 10 J per node; 0.5 s, 3 J in; 0.25 s, 4 J out; no device."""
    return Costs.from_arrays(
        graph,
        compute_time_s=[1, 2, 3, 4],
        compute_energy_j=[10] * 4,
        page_in=[(0.5, 3)] * 4,
        page_out=[(0.25, 4)] * 4,
    )


# -- RAM ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ram", "size_bytes"), [(40, 40), ("1.5kB", 1500), ("33.3%", 16), ("110%", 55)]
)
def test_ram_in_every_form(graph, costs, ram, size_bytes):
    """Bytes, binary and decimal units, and percent of the keep-all peak, rounded down."""
    problem = Problem(graph, costs, ram=ram)
    assert (problem.ram_budget_bytes, problem.usable_ram_bytes) == (size_bytes, size_bytes)


@pytest.mark.parametrize(
    ("ram", "budget_bytes", "usable_bytes"),
    [("100%", 200, 50), ("80%", 160, 10), ("50%", 100, -50), (175, 175, 25)],
)
def test_resident_bytes_count_on_request(graph, costs, ram, budget_bytes, usable_bytes):
    """With `count_parameters`, 100 % is peak plus resident bytes, which tensors cannot use."""
    problem = Problem(graph, costs, ram=ram, count_parameters=True)
    assert (problem.ram_budget_bytes, problem.usable_ram_bytes) == (budget_bytes, usable_bytes)


@pytest.mark.parametrize(
    ("ram", "words"),
    [
        (0, "ram: expected at least 1 byte, got 0"),
        ("0.9%", "ram: expected at least 1 byte"),
        (-1, "ram: .*not negative, got -1"),
        ("12parsecs", "ram: .*'parsecs'"),
    ],
)
def test_unusable_ram_is_refused(graph, costs, ram, words):
    """The error names the limit, its value and the accepted values."""
    with pytest.raises(BudgetError, match=words):
        Problem(graph, costs, ram=ram)


# -- times, energies, storage ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("deadline", "deadline_s", "energy", "energy_j"),
    [(12.5, 12.5, 40, 40.0), ("10min", 600.0, "1Wh", 3600.0), ("110%", 11.0, "105%", 42.0)],
)
def test_times_and_energies_have_units(graph, costs, deadline, deadline_s, energy, energy_j):
    """SI, units, and percent of one computation of each node, which takes 10 s and 40 J."""
    found = Problem(graph, costs, ram=50, deadline=deadline, energy_budget=energy)
    assert found.deadline_s == pytest.approx(deadline_s, rel=1e-15)
    assert found.energy_budget_j == pytest.approx(energy_j, rel=1e-15)


@pytest.mark.parametrize(("aux", "limit"), [(None, None), (0, 0), ("1KiB", 1024), ("50%", 25)])
def test_storage_in_every_form(graph, costs, aux, limit):
    """Without a device and a limit, storage is unlimited; none at all is a limit of 0."""
    assert Problem(graph, costs, ram=50, aux_bytes=aux).aux_limit_bytes == limit


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"deadline": 0}, "deadline: expected a time above 0"),
        ({"deadline": "0s"}, "deadline: expected a time above 0"),
        ({"deadline": "12"}, "deadline: .*no unit"),
        ({"deadline": -1}, "deadline: .*not negative"),
        ({"deadline": "1.5J"}, "deadline: .*'J'"),
        ({"deadline": float("nan")}, "deadline: "),
        ({"deadline": "1e999s"}, "deadline: "),
        ({"deadline": False}, "deadline: "),
        ({"energy_budget": 0}, "energy budget: expected an energy above 0"),
        ({"energy_budget": "5"}, "energy budget: .*no unit"),
        ({"energy_budget": "5s"}, "energy budget: .*'s'"),
        ({"energy_budget": float("inf")}, "energy budget: "),
        ({"aux_bytes": -1}, "aux: "),
        ({"aux_bytes": "1.5"}, "aux: "),
        ({"aux_bytes": 2**54}, "aux: .*2\\^53"),
    ],
)
def test_unusable_limits_are_refused(graph, costs, limits, words):
    """The error names the limit and the accepted values."""
    with pytest.raises(BudgetError, match=words):
        Problem(graph, costs, ram=50, **limits)


def test_free_work_may_have_a_limit_of_nothing(graph):
    """If a pass takes no time and no energy, 0 is a feasible limit."""
    free = Costs.from_arrays(graph, compute_time_s=[0] * 4, compute_energy_j=[0] * 4)
    problem = Problem(graph, free, ram=50, deadline=0, energy_budget="0J")
    assert (problem.deadline_s, problem.energy_budget_j) == (0.0, 0.0)


def test_all_faults_come_together(graph, costs):
    """Four unusable limits are four faults of one error."""
    with pytest.raises(BudgetError) as raised:
        Problem(graph, costs, ram=0, deadline="soon", aux_bytes="much", energy_budget="little")
    assert [fault.split(":")[0] for fault in raised.value.faults] == [
        "ram", "deadline", "aux", "energy budget",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"minimize": "speed"}, "minimize: expected one of energy, time, ram, writes, got 'speed'"),
        ({"minimize": None}, "minimize: expected one of energy, time, ram, writes, got nothing"),
        (
            {"deadline_counts": "wall"},
            "deadline_counts: expected one of compute, serial, overlap, got 'wall'",
        ),
        ({"recompute": "no"}, "recompute: expected True or False, got 'no'"),
        ({"paging": 0}, "paging: expected True or False, got 0"),
        ({"count_parameters": None}, "count_parameters: expected True or False, got nothing"),
    ],
)
def test_unknown_choices_are_refused(graph, costs, choices, words):
    """The error lists the choices."""
    with pytest.raises(InputError) as raised:
        Problem(graph, costs, ram=50, **choices)
    assert raised.value.faults == (words,)


def test_costs_must_fit_the_graph(graph, costs):
    """A problem checks the costs against its graph; a name is no graph and no device."""
    other = Graph(name="other", nodes=(*graph.nodes, operation("e", output_bytes=1)))
    with pytest.raises(CostError, match="'e' of graph 'other'"):
        Problem(other, costs, ram=50)
    board = bench_device()
    wrong = board
    with pytest.raises(InputError, match=r"^costs: expected Costs, got Device.*Costs.estimate"):
        Problem(graph, wrong, ram=100)
    wrong = "mlp"
    with pytest.raises(InputError, match=r"^graph: "):
        Problem(wrong, costs, ram=100)
    with pytest.raises(InputError, match=r"^graph: "):
        Costs.estimate(wrong, board)
    with pytest.raises(InputError, match=r"^device: expected a Device, got 'mlp'; Device.load"):
        Costs.estimate(graph, wrong)
    with pytest.raises(InputError, match=r"^constraints: "):
        Problem(graph, costs, ram=100, constraints=wrong)
    wrong = (abs,)
    with pytest.raises(InputError, match=r"^constraints\[0\]: .*subject_to"):
        Problem(graph, costs, ram=100, constraints=wrong)


# -- defaults ----------------------------------------------------------------------------------
def test_device_gives_ram_storage_and_idle_power(graph, costs):
    """Limits that the problem does not state are those of the device of the costs.

    A profile alone, or a device without storage, counts serially.
    """
    device = bench_device(ram_bytes=4096, aux_bytes=123, idle_power_w=0.5)
    problem = Problem(graph, replace(costs, device=device))
    assert (problem.ram_budget_bytes, problem.aux_limit_bytes) == (4096, 123)
    assert problem.idle_power_w == 0.5
    stated = Problem(graph, replace(costs, device=device), ram=60, aux_bytes=7)
    assert (stated.deadline_s, stated.energy_budget_j) == (None, None)
    assert (stated.ram_budget_bytes, stated.aux_limit_bytes) == (60, 7)
    assert Problem(graph, costs, ram=50).deadline_counts is DeadlineCounts.SERIAL
    device = bench_device(has_storage=False)
    assert Problem(graph, replace(costs, device=device)).deadline_counts is DeadlineCounts.SERIAL


@pytest.mark.parametrize(
    ("mode", "meaning"), [("blocking", DeadlineCounts.SERIAL), ("dma", DeadlineCounts.OVERLAP)]
)
def test_meaning_of_the_deadline_follows_the_storage(graph, costs, mode, meaning):
    """Storage that blocks the core counts serially, DMA overlaps; a stated value has precedence."""
    device = bench_device(mode=mode)
    assert Problem(graph, replace(costs, device=device)).deadline_counts is meaning
    stated = Problem(graph, replace(costs, device=device), deadline_counts="compute")
    assert stated.deadline_counts is DeadlineCounts.COMPUTE


# -- what is allowed, and what it costs ----------------------------------------------------------
def test_choices_and_what_they_allow(graph, costs):
    """Without page costs, or with paging off, no tensor is paged; 0 bytes of storage are storage.

    Node b may not be recomputed; none if recomputation is off. Quantities may be words; the
    problem has members, energy by default. Without a budget and a device, the error shows the
    form of a budget. 2 W over one pass of 10 s are part of the baseline.
    """
    assert Problem(graph, costs, ram=50).can_page
    assert Problem(graph, costs, ram=50, aux_bytes=0).can_page
    assert not Problem(graph, costs, ram=50, paging=False).can_page
    assert not Problem(graph, replace(costs, pages=None), ram=50).can_page
    problem = Problem(graph, costs, ram=50)
    assert [problem.may_recompute(k) for k in range(4)] == [True, False, True, True]
    problem = Problem(graph, costs, ram=50, recompute=False)
    assert not any(problem.may_recompute(k) for k in range(4))
    assert Problem(graph, costs, ram=50).minimize is Quantity.ENERGY
    assert Problem(graph, costs, ram=50, minimize="writes").minimize is Quantity.WRITES
    with pytest.raises(BudgetError, match=r"ram: .*256KiB or 50%"):
        Problem(graph, costs)
    idle = replace(costs, device=bench_device(idle_power_w=2.0))
    problem = Problem(graph, idle, energy_budget="110%")
    assert problem.baseline_energy_j == 60.0
    assert problem.energy_budget_j == pytest.approx(66.0, rel=1e-15)


@pytest.mark.parametrize(
    ("counts", "compute_j", "page_in_j", "page_out_j"),
    [("compute", 16.0, 3.0, 4.0), ("serial", 16.0, 4.0, 4.5), ("overlap", 10.0, 3.0, 4.0)],
)
def test_charges_include_idle_power_over_the_time_that_counts(
    graph, costs, counts, compute_j, page_in_j, page_out_j
):
    """At 2 W: 3 s of node c cost 6 J more, a page-in 1 J, a page-out 0.5 J, where time counts."""
    idle = replace(costs, device=bench_device(idle_power_w=2.0))
    problem = Problem(graph, idle, deadline_counts=counts)
    energy = problem.energy.coefficients
    assert (energy.compute[2], energy.page_in[0], energy.page_out[0]) == (
        compute_j, page_in_j, page_out_j,
    )  # fmt: skip
    assert problem.counts_transfers == (counts == "serial")
    assert (problem.baseline_energy_j, problem.pass_time_s) == (60.0, 10.0)


# -- as a value --------------------------------------------------------------------------------
def test_limits_are_told_in_plain_values(graph, costs):
    """`to_dict` has the content of a schedule file about a problem, in SI."""
    problem = Problem(
        graph, costs, ram="1KiB", deadline="20s", deadline_counts="compute", aux_bytes=64,
        recompute=False, paging=True, minimize="time", energy_budget="200%", count_parameters=True,
    )  # fmt: skip
    found = problem.to_dict()
    assert found == {
        "ram_budget_bytes": 1024,
        "deadline_s": 20.0,
        "deadline_counts": "compute",
        "recompute": False,
        "paging": True,
        "minimize": "time",
        "energy_budget_j": 80.0,
        "aux_bytes": 64,
        "count_parameters": True,
    }
    assert {type(value) for value in found.values()} == {int, float, str, bool}


@given(seed=st.integers(min_value=0, max_value=2**32))
@settings(deadline=None)
def test_problems_travel_between_processes(seed):
    """A pickled problem states the same."""
    problem = random_instance(make_rng(seed), (1, 5), resident=True)
    copy = pickle.loads(pickle.dumps(problem))  # noqa: S301 - made on the line itself
    assert copy.to_dict() == problem.to_dict()
    assert (copy.graph, copy.table) == (problem.graph, problem.table)
    assert copy.idle_power_w == problem.idle_power_w


def test_problem_is_changed_by_replacing(graph, costs):
    """`dataclasses.replace` changes only the named fields.

    `without` gives RAM for all tensors (resident bytes if they count), storage for all tensors,
    and no times. A percentage refers to the new whole; a number stays.
    """
    problem = Problem(graph, costs, ram="50%", deadline="120%", minimize="ram")
    other = replace(problem, ram="100%")
    assert other.to_dict() == {**problem.to_dict(), "ram_budget_bytes": 50}
    problem = Problem(
        graph, costs, ram=190, deadline=12, energy_budget=50, aux_bytes=3, count_parameters=True
    )
    loose = problem.without_limits(Quantity.RAM, Quantity.WRITES)
    assert (loose.ram_budget_bytes, loose.aux_limit_bytes) == (50 + 150, 65)
    assert (loose.deadline_s, loose.energy_budget_j) == (12.0, 50.0)
    timeless = problem.without_limits(Quantity.TIME, Quantity.ENERGY, minimize="time")
    assert (timeless.deadline_s, timeless.energy_budget_j) == (None, None)
    assert (timeless.ram_budget_bytes, timeless.minimize) == (190, Quantity.TIME)
    stated = Problem(graph, costs, ram="50%", deadline="120%", energy_budget="150%")
    fixed = stated.resolved()
    assert fixed.to_dict() == stated.to_dict()
    assert replace(stated, count_parameters=True).ram_budget_bytes == 100
    assert replace(fixed, count_parameters=True).ram_budget_bytes == 25


# -- jobs ----------------------------------------------------------------------------------------
def batch_of(size):
    """Return a graph that trains on batches of a size."""
    return Graph(name="one", nodes=(operation("a", output_bytes=1),), batch_size=size)


def test_limits_are_split_over_the_steps():
    """500 samples in batches of 8 are 63 steps, the last one half full, at the same cost."""
    job, graph = Job(samples=500, within="6h", battery="1.2Wh"), batch_of(8)
    assert job.steps(graph) == 63
    assert job.deadline_s(graph) == pytest.approx(21600 / 63, rel=1e-12)
    assert job.energy_budget_j(graph) == pytest.approx(4320 / 63, rel=1e-12)
    whole = Job(samples=16)
    assert (whole.steps(batch_of(8)), whole.steps(batch_of(1))) == (2, 16)
    assert (whole.deadline_s(graph), whole.energy_budget_j(graph)) == (None, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"samples": 0}, "samples: expected a whole number from 1, got 0"),
        ({"samples": True}, "samples: .* got true"),
        ({"samples": 1, "within": "0s"}, "within: expected more than 0, got '0s'"),
        ({"samples": 1, "within": "6 moons"}, "within: .*moons"),
        ({"samples": 1, "within": "50%"}, "within: a percentage has no meaning"),
        ({"samples": 1, "battery": "-1J"}, "battery: .*'-1J'"),
    ],
)
def test_nonsense_is_refused_with_its_field(given, words):
    """The message names the field and its value."""
    with pytest.raises(BudgetError, match=words):
        Job(**given)


def test_all_faults_are_told_at_once():
    """Three wrong fields, three faults."""
    with pytest.raises(BudgetError) as caught:
        Job(samples=-1, within="soon", battery="full")
    assert len(caught.value.faults) == 3


def test_a_replaced_field_is_resolved_anew():
    """Percentages refer to the new graph; choices and numbers are members and floats."""
    graph = skip_graph()
    costs = even_costs(graph, device=bench_device())
    problem = Problem(graph, costs, ram="50%", deadline="150%", minimize="time")
    assert (problem.minimize, problem.deadline_counts) == ("time", "serial")
    again = replace(problem, ram="100%", deadline_counts="compute")
    assert (problem.ram_budget_bytes, again.ram_budget_bytes) == (7, 15)
    assert (problem.deadline_s, again.deadline_s) == (15.0, 15.0)
    with pytest.raises(InputError, match="minimize"):
        replace(problem, minimize="beauty")


def test_limits_may_be_stated_by_position():
    """Problems compare by identity, although their limits compare by value."""
    graph = skip_graph()
    costs = even_costs(graph, device=bench_device())
    problem = Problem(graph, costs, "50%", "150%")
    assert (problem.ram, problem.deadline) == ("50%", "150%")
    assert problem != replace(problem)
