"""The instance library: its files, and the verifier's findings on solutions of others."""

import hashlib
import json
from dataclasses import replace

import pytest

import poetmodel as pm
from poetmodel.device import Cost
from poetmodel.errors import InputError, ScheduleError
from poetmodel.schedule import GraphIdentity
from poetmodel.sweeps.instances import (
    CHECKSUMS,
    BestResults,
    Finding,
    Instance,
    check_solutions,
    read_library,
    write_library,
)


def chain(layers):
    """Return a forward pass of some layers and its backward pass."""
    forward = [pm.operation("f0", output_bytes=400, flops=1_000)]
    for k in range(1, layers):
        node = pm.operation(f"f{k}", output_bytes=400, flops=1_000, inputs=[f"f{k - 1}"])
        forward.append(node)
    nodes, upstream = list(forward), f"f{layers - 1}"
    for k in reversed(range(layers)):
        inputs = tuple(dict.fromkeys((upstream, f"f{k}")))
        nodes.append(
            pm.operation(f"g{k}", output_bytes=400, flops=2_000, inputs=inputs, phase="backward")
        )
        upstream = f"g{k}"
    return pm.Graph(name=f"chain-{layers}", nodes=tuple(nodes))


def problem_of(graph, device="rpi4b", **limits):
    """Return a problem on a shipped device."""
    costs = pm.Costs.estimate(graph, pm.Device.load(device))
    return pm.Problem(graph, costs, **{"ram": "80%", **limits})


def in_order(problem, order):
    """Return the overhead of a computation order."""
    schedule = pm.Schedule.from_order(problem.graph, order)
    verdict = pm.verify(problem, schedule)
    assert verdict.valid, verdict.violations
    return verdict.simulation.overhead_j


@pytest.fixture(scope="module")
def network():
    """Return a chain of four nodes and their backward pass."""
    return chain(4)


@pytest.fixture
def library(tmp_path, network):
    """Return the folder of a library of one problem, and the problem."""
    problem = problem_of(network, ram="100%")
    best = BestResults(overhead=0.0, method="optimal", commit="abc", bound=0.0)
    instance = Instance(name="chain", kind="zoo", problem=problem, best=best)
    write_library([instance], tmp_path / "library")
    return tmp_path / "library", problem


def solution(tmp_path, schedule, name="chain"):
    """Return a folder with the file of a schedule."""
    folder = tmp_path / "solutions"
    folder.mkdir(exist_ok=True)
    schedule.save(folder / f"{name}.schedule.json")
    return folder


def test_library_states_its_problems(library):
    """The problem is read back from graph, costs and limits; checksums and an MPS file exist."""
    folder, problem = library
    (line,) = read_library(folder).values()
    graph = pm.Graph.load(folder / line["graph"])
    assert graph.sha256 == problem.graph.sha256
    costs = pm.Costs.load(folder / line["costs"])
    assert (costs.compute, costs.pages) == (problem.costs.compute, problem.costs.pages)
    assert line["problem"] == problem.to_dict()
    assert line["best"]["method"] == "optimal"
    assert line["graph_sha256"] == graph.sha256
    assert line["costs_sha256"] == problem.costs_sha256
    assert line["schedule"] is None
    assert (folder / line["mps"]["file"]).read_text().startswith("*")
    sums = dict(text.split("  ")[::-1] for text in (folder / CHECKSUMS).read_text().splitlines())
    others = [path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS]
    assert sums == {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in others
    }


def test_problems_without_units_or_with_other_costs_are_refused(tmp_path, network):
    """The index has energies and times only, and one file of costs for a graph and a device."""
    problem, best = problem_of(network), BestResults()
    least = Instance(name="small", kind="zoo", problem=replace(problem, minimize="ram"), best=best)
    with pytest.raises(InputError, match="small: only problems of energy or time"):
        write_library([least], tmp_path / "ram")
    costs = problem.costs
    smaller = replace(costs, device=replace(costs.device, ram_bytes=12345))
    other = replace(problem, costs=smaller)
    with pytest.raises(InputError, match="rpi4b: differs from the shipped one"):
        write_library([Instance(name="x", kind="zoo", problem=other, best=best)], tmp_path / "dev")
    slower = {name: Cost(2 * cost.time_s, cost.energy_j) for name, cost in costs.compute.items()}
    other = replace(problem, costs=replace(costs, compute=slower))
    pair = [
        Instance(name=f"p{k}", kind="zoo", problem=each, best=best)
        for k, each in enumerate((problem, other))
    ]
    with pytest.raises(InputError, match="different costs of one graph and device"):
        write_library(pair, tmp_path / "pair")


def test_files_are_shared_by_problems(tmp_path, network):
    """Two budgets of a graph on a device have one graph, one table of costs and one device."""
    best = BestResults()
    instances = [
        Instance(name=ram, kind="zoo", problem=problem_of(network, ram=ram), best=best)
        for ram in ("90%", "100%")
    ]
    first, second = write_library(instances, tmp_path)
    for key in ("graph", "costs", "device"):
        assert first[key] == second[key]
    assert first["problem"] != second["problem"]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (BestResults(overhead=0.0), Finding.WORSE),
        (BestResults(overhead=1e3), Finding.BETTER),
        (BestResults(), Finding.BETTER),
        (BestResults(overhead=1e3, bound=1e3), Finding.BELOW_BOUND),
        (BestResults(infeasible=True), Finding.BELOW_BOUND),
    ],
)
def test_solution_is_compared_with_the_best(tmp_path, network, stated, expected):
    """A valid schedule with one recomputation, beside the value in the library."""
    problem = problem_of(network, ram="100%")
    order = [0, 1, 0, *range(2, len(network.nodes))]
    instance = Instance(name="chain", kind="zoo", problem=problem, best=stated)
    write_library([instance], tmp_path / "library")
    folder = tmp_path / "solutions"
    folder.mkdir()
    (folder / "chain.order.json").write_text(json.dumps(order))
    (found,) = check_solutions(tmp_path / "library", folder)
    assert found.finding == expected
    assert found.overhead == pytest.approx(in_order(problem, order))
    assert found.overhead > 0


def test_equal_solution_is_found_equal(tmp_path, library):
    """The single pass, as a schedule file."""
    folder, problem = library
    once = pm.Schedule.from_order(problem.graph, range(len(problem.graph.nodes)))
    (found,) = check_solutions(folder, solution(tmp_path, once))
    assert (found.finding, found.overhead) == (Finding.EQUAL, 0.0)


def relations_of(schedule):
    """Return the relations as JSON values."""
    return {name: getattr(schedule, name) for name in ("R", "S_RAM")}


def test_relations_alone_are_a_solution(tmp_path, library):
    """Other solvers state relations, and perhaps the problem and their value, which must be true.

    The digest of the graph is in the index; another one, and a later format, are refused.
    """
    folder, problem = library
    once = pm.Schedule.from_order(problem.graph, range(len(problem.graph.nodes)))
    bare, path = relations_of(once), tmp_path / "solutions" / "chain.schedule.json"
    path.parent.mkdir()
    (line,) = read_library(folder).values()
    digest = line["graph_sha256"]
    for more, finding, reason in (
        ({}, Finding.EQUAL, ""),
        ({"instance": "chain", "overhead": 0, "solver": "mine"}, Finding.EQUAL, ""),
        ({"graph": {"name": "x", "sha256": digest}}, Finding.EQUAL, ""),
        ({"overhead": 1.0}, Finding.INVALID, "overhead: the file says 1.0, the simulation gives"),
        ({"instance": "chian"}, Finding.INVALID, "instance: expected 'chain', got 'chian'"),
        ({"graph": {"name": "x", "sha256": "0" * 64}}, Finding.INVALID, "graph.sha256: expected"),
        ({"version": 2}, Finding.INVALID, "version: expected 1, got 2"),
        ({"R": None}, Finding.INVALID, "R: expected a valid list"),
    ):
        path.write_text(json.dumps(bare | more))
        (found,) = check_solutions(folder, path.parent)
        assert (found.finding, found.reason[: len(reason)]) == (finding, reason)
    path.unlink()
    (path.parent / "mine.schedule.json").write_text(json.dumps(bare | {"instance": "chain"}))
    (found,) = check_solutions(folder, path.parent)
    assert (found.name, found.finding) == ("chain", Finding.EQUAL)


def test_library_has_best_schedules(tmp_path, network):
    """They are solutions of it; one that is not as good as stated is refused."""
    problem = problem_of(network, ram="100%")
    once = pm.Schedule.from_order(network, range(len(network.nodes)))
    best = BestResults(overhead=0.0)
    instance = Instance(name="chain", kind="zoo", problem=problem, best=best, schedule=once)
    (line,) = write_library([instance], tmp_path / "library")
    assert line["schedule"] == "schedules/chain.schedule.json"
    (found,) = check_solutions(tmp_path / "library", tmp_path / "library" / "schedules")
    assert found.finding == Finding.EQUAL
    order = [0, 1, 0, *range(2, len(network.nodes))]
    worse = replace(instance, schedule=pm.Schedule.from_order(network, order))
    with pytest.raises(InputError, match="chain: the best schedule on record fails: overhead"):
        write_library([worse], tmp_path / "worse")


def test_schedule_that_breaks_a_limit_is_not_valid(tmp_path, network):
    """Keep-all in 80 % of its RAM; the reason names the budget."""
    problem = problem_of(network)
    instance = Instance(name="chain", kind="zoo", problem=problem, best=BestResults())
    write_library([instance], tmp_path / "library")
    once = pm.Schedule.from_order(network, range(len(network.nodes)))
    (found,) = check_solutions(tmp_path / "library", solution(tmp_path, once))
    assert (found.finding, found.overhead) == (Finding.INVALID, None)
    assert "RAM" in found.reason


def test_unreadable_solution_is_not_valid(tmp_path, library):
    """A file that is cut short and a schedule of another graph, each with its reason."""
    folder, _ = library
    other = chain(3)
    once = pm.Schedule.from_order(other, range(len(other.nodes)))
    solutions = solution(tmp_path, once)
    (found,) = check_solutions(folder, solutions)
    assert found.finding == Finding.INVALID
    path = solutions / "chain.schedule.json"
    path.write_text(path.read_text()[:40])
    (found,) = check_solutions(folder, solutions)
    assert found.finding == Finding.INVALID
    assert found.reason


def test_faults_are_named(tmp_path, library, told):
    """A full folder, unknown names, no solutions, two of one problem, and no library."""
    folder, problem = library
    once = pm.Schedule.from_order(problem.graph, range(len(problem.graph.nodes)))
    solutions = solution(tmp_path, once, name="chian")
    instance = Instance(name="chain", kind="zoo", problem=problem, best=BestResults())
    empty, twice = tmp_path / "empty", tmp_path / "twice"
    for each in (empty, twice):
        each.mkdir()
    for end in ("schedule", "order"):
        (twice / f"chain.{end}.json").write_text("[]")
    calls = {
        "folder": lambda: write_library([instance], folder),
        "mps": lambda: write_library([instance], tmp_path / "new", mps=["chian"]),
        "name": lambda: check_solutions(folder, solutions),
        "none": lambda: check_solutions(folder, empty),
        "twice": lambda: check_solutions(folder, twice),
        "library": lambda: check_solutions(empty, solutions),
    }
    for name, call in calls.items():
        with told.raises(InputError, name):
            call()


def test_file_outside_the_library_is_refused(tmp_path, library):
    """An index that names another place of the disk."""
    folder, problem = library
    index = folder / "instances.jsonl"
    line = json.loads(index.read_text())
    index.write_text(json.dumps(line | {"graph": "../other.graph.json"}) + "\n")
    problem.graph.save(tmp_path / "other.graph.json")
    once = pm.Schedule.from_order(problem.graph, range(len(problem.graph.nodes)))
    with pytest.raises(InputError, match="outside"):
        check_solutions(folder, solution(tmp_path, once))


# -- execution orders ------------------------------------------------------------------------------
def test_order_of_a_solved_schedule_gives_it_back(network):
    """Recomputations without paging: same overhead and peak."""
    problem = replace(problem_of(network, ram="85%"), paging=False)
    solved = pm.solve(problem)
    order = [k for _, k in solved.require_schedule().R]
    assert len(order) > len(network.nodes)
    again = pm.Schedule.from_order(network, order)
    assert again.identity == GraphIdentity.from_graph(network)
    verdict = pm.verify(problem, again)
    assert verdict.valid
    assert verdict.simulation.overhead_j == pytest.approx(solved.overhead_j)
    assert verdict.simulation.peak_ram_bytes <= solved.peak_ram_bytes


def test_faults_of_orders_are_named(told):
    """Each is refused with the nodes that it is about."""
    graph = chain(2)
    count = len(graph.nodes)
    orders = {
        "missing": [0],
        "unknown": [0, count],
        "early": [1],
        "late": [*range(count), 0],
        "backwards": [0, 1, 1, 0, *range(2, count)],
    }
    for name, order in orders.items():
        with told.raises(ScheduleError, name):
            pm.Schedule.from_order(graph, order)
