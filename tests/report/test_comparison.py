"""What earlier methods make of the problem of a report."""

from dataclasses import replace

import pytest

from kit.instances import random_instance, seeded
from kit.report_subjects import subject, training_problem
from kit.worked import skip_problem
from poetmodel.baselines import method
from poetmodel.device import Costs, Device
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import load_model
from poetmodel.planner import verify
from poetmodel.problem import Problem
from poetmodel.report.bars import comparison_bars, overlay_bars
from poetmodel.report.comparison import NAMES, compare, comparison_facts
from poetmodel.report.presenter import share
from poetmodel.solver import solve


def mlp_problem(**limits):
    """Return a network for which some methods keep 70 % of the RAM, and some do not."""
    graph = load_model("mlp")
    stated = {"ram": "70%", **limits}
    return Problem(graph, Costs.estimate(graph, Device.load("mkr1000")), **stated)  # type: ignore[arg-type]


def rivals_of(one):
    """Return the rivals of a schedule by method."""
    (comparison,) = compare([one])
    assert comparison.subjects == (one,)
    return {rival.method: rival for rival in comparison.rivals}


def lines(bars):
    """Return kind and values of each line."""
    return {line.name: (line.kind, [cell.value for cell in line.cells]) for line in bars.lines}


def test_every_method_is_answered():
    """Each has a schedule or a reason, and breaks what the verifier says.

    What a method says of its need is true: at that peak it has a schedule, below it has none.
    """
    one = subject(mlp_problem())
    found = rivals_of(one)
    assert list(found) == list(NAMES)
    for rival in found.values():
        assert (rival.simulation is None) == bool(rival.reason)
    all_kept = found["checkpoint-all"]
    assert all_kept.broken == ("ram",)
    assert all_kept.simulation.peak_ram_bytes == checkpoint_all_peak_bytes(one.graph)
    late = rivals_of(subject(mlp_problem(deadline="100.3%", ram="90%")))
    assert "deadline" in late["offload-all"].broken
    kept = found["offload-all"]
    schedule = method("offload-all").function()(one.problem)
    verdict = verify(one.problem, schedule)
    assert kept.simulation == verdict.simulation
    assert kept.broken == verdict.violations == ()
    problem = mlp_problem()
    chen = rivals_of(subject(problem))["chen-sqrt"]
    assert chen.larger
    assert chen.broken == ("ram",)
    assert chen.simulation.peak_ram_bytes > problem.usable_ram_bytes
    roomy = replace(problem, ram=chen.simulation.peak_ram_bytes)
    again = verify(roomy, method("chen-sqrt").function()(roomy))
    assert again.simulation.energy_j == chen.simulation.energy_j


@pytest.mark.parametrize("seed", range(12))
def test_no_rival_beats_the_optimum(seed):
    """Whoever keeps all limits pays at least the energy that is proven."""
    problem = random_instance(seeded(f"rivals {seed}"))
    result = solve(problem)
    if result.schedule is None:
        return
    for rival in rivals_of(subject(problem)).values():
        if rival.simulation is not None and not rival.broken:
            assert result.minimizes_energy == (result.bound_j is not None)
            least_j = result.baseline_energy_j if result.bound_j is None else result.bound_j
            assert rival.simulation.energy_j >= least_j * (1 - 1e-9)


@pytest.mark.parametrize("ram", [900, 1140])
def test_state_takes_part(ram):
    """Of a whole training step all methods are answered too."""
    one = subject(training_problem(ram))
    found = rivals_of(one)
    assert found["checkpoint-all"].simulation is not None
    assert any(rival.simulation for rival in found.values())


def test_what_is_not_compared_says_why(monkeypatch):
    """What is not run says so.

    Without costs or without a problem nothing is run, and the page says why.
    """
    monkeypatch.setattr("poetmodel.report.comparison.ALL_S", 1e-9)
    (comparison,) = compare([subject(skip_problem())])
    assert [rival.simulation for rival in comparison.rivals] == [None] * len(NAMES)
    assert all(rival.reason.startswith("left out: ") for rival in comparison.rivals)
    one = subject(skip_problem())
    bare = replace(one, document=replace(one.document, problem=None))
    for without, word in ((replace(one, costs=None), "--device"), (bare, "no problem")):
        (comparison,) = compare([without])
        assert word in comparison.reason
        assert comparison.rivals == ()
        assert word in comparison_bars(comparison).lead
        assert comparison_facts(without, [comparison]) == {
            "reason": comparison.reason,
            "methods": [],
        }


def test_schedules_of_the_same_limits_share_a_comparison():
    """Two schedules of one problem are compared once, another budget by itself."""
    one, other = subject(mlp_problem()), subject(mlp_problem(), label="B")
    third = subject(mlp_problem(ram="100%"), label="C")
    found = compare([one, other, third])
    assert [[each.label for each in group.subjects] for group in found] == [["A", "B"], ["C"]]
    assert comparison_facts(third, found) != comparison_facts(one, found)
    assert comparison_facts(one, found) == comparison_facts(other, found)
    assert comparison_facts(one, ()) is None


def test_bars_have_the_figures():
    """Lengths are in proportion to the figures, limits stand where they are."""
    one = subject(mlp_problem())
    (comparison,) = compare([one])
    bars = comparison_bars(comparison)
    simulation = one.simulation
    ratio = simulation.overhead_j / simulation.baseline_energy_j
    kind, values = lines(bars)["this schedule"]
    assert (kind, values) == ("own", [ratio, simulation.peak_ram_bytes, simulation.makespan_s])
    assert lines(bars)["keep-all"][0] == "broken"
    for place, column in enumerate(bars.columns):
        cells = [line.cells[place] for line in bars.lines]
        most = max(cell.value for cell in cells if cell.value is not None)
        for cell in cells:
            assert cell.share == pytest.approx(cell.value / most)
        if column.key == "peak_ram_bytes":
            assert column.limit_share == pytest.approx(one.problem.usable_ram_bytes / most)
            over = {line.name for line in bars.lines if line.cells[place].over}
            assert over == {
                line.name for line in bars.lines if line.cells[place].share > column.limit_share
            }
    best = min(
        rival.simulation.overhead_j
        for rival in comparison.rivals
        if rival.simulation is not None
        and not rival.broken
        and rival.simulation.overhead_j is not None
    )
    assert f"instead of +{share(best / simulation.baseline_energy_j)} by" in bars.lead


def test_schedules_beside_each_other():
    """A line for each, with what it writes; a shared budget is drawn, others are not."""
    one, other = subject(mlp_problem()), subject(mlp_problem(recompute=False), label="B")
    bars = overlay_bars([one, other])
    assert list(lines(bars)) == ["A: x.json", "B: x.json"]
    assert [column.key for column in bars.columns] == [
        "overhead_ratio",
        "peak_ram_bytes",
        "makespan_s",
        "written_bytes",
    ]
    assert bars.columns[1].limit_share is not None
    third = subject(mlp_problem(ram="90%"), label="C")
    assert overlay_bars([one, third]).columns[1].limit_share is None
    assert [column.key for column in overlay_bars([replace(one, costs=None), other]).columns] == [
        "peak_ram_bytes",
        "written_bytes",
    ]
