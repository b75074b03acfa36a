"""Compiled PyTorch steps as files, and schedules beside those of earlier methods."""

import json
from dataclasses import replace

import pytest

from kit.instances import random_instance, seeded
from kit.report_subjects import RESERVED_BYTES, step_values, subject, training_problem
from kit.worked import bench_device, skip_problem
from poetmodel.baselines import method
from poetmodel.device import Costs, Device
from poetmodel.errors import InputError
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import load_model
from poetmodel.planner import verify
from poetmodel.problem import Problem
from poetmodel.report.bars import comparison_bars, overlay_bars
from poetmodel.report.comparison import NAMES, compare, comparison_facts
from poetmodel.report.facts import facts, graph_facts
from poetmodel.report.figures import figures
from poetmodel.report.presenter import share
from poetmodel.report.step_file import parse_step, step_subject
from poetmodel.report.timeline import timeline_chart
from poetmodel.report.wording import answers
from poetmodel.solver import solve


def test_a_step_is_judged_and_planned():
    """Its schedule has the figures of the solve, and all that is known of the step goes along."""
    problem = skip_problem()
    values = step_values(problem)
    found = step_subject(values, source="s.json", label="B")
    assert found.label == "B"
    assert found.verdict.valid
    assert found.simulation.energy_j == pytest.approx(solve(problem).energy_j)
    assert found.graph.sha256 == problem.graph.sha256
    assert found.check.peak_ram_bytes + RESERVED_BYTES == values["plan"]["peak_bytes"]
    (note,) = found.notes
    assert note.startswith("6 B of the step's RAM are reserved: inputs 6 B")
    told = facts(found)["step"]
    assert told == {
        key: value for key, value in values.items() if key not in ("result", "scheduled")
    }
    assert facts(found)["commands"] == [f"step = {values['call']}\nprint(step.verify().summary())"]


def test_the_ram_of_a_step_has_one_value():
    """Budget, peak and keep-all are those of the step in facts, charts and comparison alike."""
    values = step_values(skip_problem()) | {"keep_all_bytes": 20}
    one = step_subject(values, source="s.json")
    budget, peak = values["budget_bytes"], values["plan"]["peak_bytes"]
    found, chart = facts(one), timeline_chart(one)
    assert found["budget_bytes"] == found["problem"]["ram_budget_bytes"] == budget
    assert found["peak_ram_bytes"] == found["plan"]["peak_ram_bytes"] == peak
    assert found["binding"]["ram_bytes"] == peak
    assert graph_facts(one)["checkpoint_all_peak_bytes"] == 20
    assert (chart["budget"], max(chart["during"]), max(chart["ghost"][1])) == (budget, peak, 20)
    held = [sum(stay[1] for stay in chart["stays"] if stay[2] <= p < stay[3]) for p in (0, -1)]
    assert min(held) >= RESERVED_BYTES
    (comparison,) = compare([one])
    methods = {each["method"]: each for each in comparison_facts(one, [comparison])["methods"]}
    assert methods["checkpoint-all"]["peak_ram_bytes"] == 20
    bars = comparison_bars(comparison)
    (place,) = (k for k, column in enumerate(bars.columns) if column.key == "peak_ram_bytes")
    assert bars.lines[0].cells[place].value == peak
    assert bars.columns[place].limit_text == f"{budget} B"


def test_keep_all_in_parts_has_a_name_and_the_peak_is_the_plans():
    """Keep-all of operations in parts takes less than the step as captured, 100 % of a budget.

    The peak is that of the plan, which may hold more than the schedule beside transfers.
    """
    one = step_subject(step_values(skip_problem()) | {"keep_all_bytes": 190}, source="s.json")
    chart, bars = timeline_chart(one), comparison_bars(compare([one])[0])
    assert max(chart["ghost"][1]) == 21
    assert chart["ghost_name"] == "keep-all in parts"
    assert bars.lines[1].name == "keep-all in parts"
    values = step_values(skip_problem())
    one = step_subject(values, source="s.json")
    more = replace(one.check, peak_ram_bytes=one.check.peak_ram_bytes + 3)
    later = replace(one, check=more)
    bars = comparison_bars(compare([later])[0])
    (place,) = (k for k, column in enumerate(bars.columns) if column.key == "peak_ram_bytes")
    peaks = (facts(later)["peak_ram_bytes"], facts(later)["plan"]["peak_ram_bytes"])
    assert {*peaks, bars.lines[0].cells[place].value} == {values["plan"]["peak_bytes"] + 3}


def measured(problem):
    """Return a problem with the same costs as if they were measured here, to take least time."""
    costs = replace(problem.costs, device=None)
    return replace(problem, costs=costs, minimize="time")


def test_a_step_that_takes_least_time_speaks_of_time():
    """Nobody asked for energies: answers, comparison, figures and table are about seconds.

    Energies are told as the objective, as a limit, or of a device, then behind the time.
    """
    one = step_subject(step_values(measured(skip_problem())), source="s.json")
    found = facts(one)
    assert not found["asks_energy"]
    price = answers(found)[2]
    share_of = found["makespan_s"] / found["pass_s"] - 1
    assert price.word == f"+{share(share_of)} time"
    assert " J" not in price.text
    bars = comparison_bars(compare([one])[0])
    assert bars.columns[0].name == "time above a single pass"
    assert bars.lines[0].cells[0].value == pytest.approx(share_of)
    assert not any(row[0].key.endswith("_j") for _, rows in figures([found]) for row in rows)
    problem = skip_problem()
    timed = measured(problem)
    assert answers(facts(step_subject(step_values(problem), source="")))[2].word.endswith("energy")
    for asked in (
        replace(timed, energy_budget=100.0),
        replace(timed, costs=replace(timed.costs, device=bench_device())),
    ):
        price = answers(facts(step_subject(step_values(asked), source="s.json")))[2]
        if asked.energy_budget is not None:
            assert price.word.endswith("time")
            assert " J, " in price.text
        assert asked.asks_energy


def test_a_step_survives_json():
    """Written and read again it is the same; another object is none."""
    values = step_values(skip_problem())
    assert parse_step(json.dumps(values)) == values
    assert parse_step(json.dumps(values | {"format": "poetmodel-step", "version": 1})) == values
    for version in (True, 1.0, 2):  # what only equals the number is left for the check
        former = values | {"format": "poetmodel-step", "version": version}
        assert parse_step(json.dumps(former)) == former
    assert parse_step(json.dumps(values["result"])) is None
    assert parse_step(json.dumps({"format": "poetmodel-step", "version": 1})) is None
    assert parse_step("[]") is None
    assert parse_step("{") is None


def test_a_broken_schedule_or_another_peak_is_told():
    """The verifier does not believe the file.

    The page says so where its plan is not the one that ran.
    """
    values = step_values(skip_problem())
    values["result"]["R"] = values["result"]["R"][:-1]
    found = step_subject(values, source="s.json")
    assert not found.verdict.valid
    assert found.plan is None
    values = step_values(skip_problem())
    values["plan"]["peak_bytes"] += 1
    notes = step_subject(values, source="s.json").notes
    assert any("another peak than the one that ran" in note for note in notes)


def changed(values, path, *value):
    """Set what is at a path, or delete it where there is no value."""
    *outer, last = path.split()
    for key in outer:
        values = values[key]
    if value:
        values[last] = value[0]
    else:
        del values[last]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param("torch", (), id="no torch"),
        pytest.param("surprise", (1,), id="surprise"),
        pytest.param("version", (3,), id="newer"),
        pytest.param("plan mode", ("later",), id="mode"),
        pytest.param("compile_s", (float("nan"),), id="compile_s"),
        pytest.param("certificate equal", (), id="no equal"),
        pytest.param("scheduled graph nodes", (), id="no nodes"),
        pytest.param("result problem", (), id="no problem"),
        pytest.param("result graph sha256", ("0" * 64,), id="another graph"),
        pytest.param("scheduled costs compute_time_s", ([-1.0] * 4,), id="times below 0"),
        pytest.param("scheduled costs page_in_time_s", ([1.0],), id="one page-in"),
    ],
)
def test_what_is_no_step_is_refused(path, value, told):
    """The file and the key are named."""
    values = step_values(skip_problem())
    changed(values, path, *value)
    with told.raises(InputError):
        step_subject(values, source="s.json")


# -- comparison ----------------------------------------------------------------------------------
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
