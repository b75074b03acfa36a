"""Every method beside the optimum: what is run, and what the page says of its records."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from compared import (
    CURVES,
    KINDS,
    LAYERED,
    LAYERED_LIMIT_S,
    LIMIT_S,
    MAIN,
    NUMBERS,
    OPTIMAL,
    OWN_ORDER,
    PAPER,
    SAME,
    STEPS,
    TIME,
    ComparedRun,
    layered_graph,
    main,
    measure_method,
    methods_of,
    problems,
    runs,
    smoke_runs,
)
from harness import CORE_SHARE, ThisProcess, within_core
from kit.measured_records import CIRCUMSTANCES
from make_results import ROOT, read_newest
from poetmodel.baselines import METHODS
from poetmodel.bench.measurement import FAILED, NOT_APPLICABLE
from poetmodel.graph import checkpoint_all_peak_bytes
from result_pages.compared import (
    BEST,
    Compared,
    MethodRecord,
    Row,
    chart,
    core_share,
    interval_text,
    lead,
    page,
    problems_of,
    readme_table,
    rows,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kit.messages import Told

# -- what is run -----------------------------------------------------------------------------------


def test_problems_are_many_and_can_be_solved() -> None:
    """At least 170, of six kinds, none below the minimum RAM, none twice."""
    found = problems(MAIN)
    assert len(found) >= 170
    assert len({problem.key for problem in found}) == len(found)
    assert {problem.kind for problem in found} == set(MAIN)
    assert found == problems(MAIN)


def test_every_shipped_method_is_run_on_whole_steps() -> None:
    """All of the registry but one, and more; all runs of a problem come right after each other."""
    assert set(METHODS) - {SAME} < set(methods_of(STEPS))
    chosen = [run for run in runs([STEPS], ["mine.py:mine"]) if run.ram == "least+30%"]
    names = [run.method for run in chosen[: len(methods_of(STEPS)) + 1]]
    assert names == [*methods_of(STEPS), "mine.py:mine"]
    assert len({run.key for run in chosen}) == len(chosen)


def test_quick_runs_have_no_solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are run one after the other in one process, and what they raise comes out."""
    seen: list[ComparedRun] = []
    pools: list[object] = []

    def take(chosen: list[ComparedRun], _store: object, _: object, pool: object, **__: Any) -> int:
        seen.extend(chosen)
        pools.append(pool)
        return 0

    monkeypatch.setattr("compared.run_all", take)
    out = str(tmp_path / "x-compared.jsonl")
    assert main(["--quick", "--kind", STEPS, "--only", "least+30%", "--out", out]) == 0
    solving = {name for name, entry in METHODS.items() if entry.by_solver}
    assert {run.method for run in seen} == set(methods_of(STEPS)) - solving
    (pool,) = pools
    assert isinstance(pool, ThisProcess)
    assert pool.submit(int, "7").result() == 7
    with pytest.raises(ValueError, match="invalid literal"):
        pool.submit(int, "seven").result()


def test_networks_of_the_picture_are_among_the_problems() -> None:
    """Each kind has one, over several budgets."""
    assert [kind for kind, *_ in CURVES] == list(MAIN)
    found = {(run.kind, run.model, run.device, run.ram) for run in problems(MAIN)}
    for kind, model, device, budgets in CURVES:
        assert sum((kind, model, device, ram) in found for ram in budgets) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("run", list(smoke_runs()), ids=lambda run: run.name)
def test_a_record_holds_what_the_page_needs(run: ComparedRun) -> None:
    """Every kind and method at its smallest size; no method fails."""
    found = measure_method(run.to_dict())
    json.dumps(found)
    assert found["status"] != FAILED, found.get("reason")
    assert found["cell"] == run.to_dict()
    if found["status"] == NOT_APPLICABLE:
        assert found["reason"]


def test_published_layered_graph_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order, sizes and durations are those of the file."""
    sizes = {0: 100, 1: 10, 2: 100, 3: 100}
    content = {
        "nodes": [{"name": k, "out_cost": size, "duration": k} for k, size in sizes.items()],
        "links": [{"0": a, "1": b} for a, b in ((0, 2), (2, 3), (3, 1), (0, 1))],
        "graph": {"order": [0, 2, 3, 1]},
    }
    (tmp_path / "random_layered_n4.json").write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setenv("MOCCASIN_DATA", str(tmp_path))
    graph = layered_graph("random_layered_n4")
    assert [node.name for node in graph.nodes] == ["v0", "v2", "v3", "v1"]
    assert [node.inputs for node in graph.nodes] == [(), ("v0",), ("v2",), ("v3", "v0")]
    assert (graph.nodes[3].output_bytes, graph.nodes[3].flops) == (10 * 1024, 1_000_000)
    assert "random_layered_n4" in {run.model for run in runs([LAYERED])}


# -- what is on record -----------------------------------------------------------------------------


def on_record() -> list[dict[str, Any]]:
    """Return the records that the page is made of."""
    return read_newest("*-compared.jsonl")[1]


def test_protocol_states_kinds_and_limits() -> None:
    """Its table has a row for each kind, and its limits are those of the runs."""
    protocol = (ROOT / "bench" / "protocol.md").read_text(encoding="utf-8")
    _, _, section = protocol.partition("## Every method beside the optimum\n")
    section, _, _ = section.partition("\n## ")
    assert re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE) == list(KINDS)
    limits = f"{LIMIT_S:g} s of processor time for every method, "
    assert f"{limits}{LAYERED_LIMIT_S:g} s of wall time for layered graphs" in section
    assert f"must have had {CORE_SHARE:g} to {1 / CORE_SHARE:g} times that" in section


def test_records_are_many_and_within_one_limit() -> None:
    """150 problems or more, each by every method; limits do not differ, nor does who meets them.

    A run that met its limit had 0.8 to 1.25 times that in processor time.
    """
    found = problems_of(on_record())
    assert len(found) >= 150
    assert {problem.kind for problem in found} == set(MAIN)
    for problem in (*found, *problems_of(on_record(), [LAYERED], unsolved=True)):
        assert set(methods_of(problem.kind)) <= set(problem.runs)
        layered = problem.kind == LAYERED
        for run in problem.runs.values():
            assert run.record["commit"]
            assert run.cell["limit_s"] == (LAYERED_LIMIT_S if layered else LIMIT_S)
            assert run.status != FAILED
            if not layered and run.record.get("termination") == "time_limit":
                assert CORE_SHARE <= run.cpu_s / LIMIT_S <= 1 / CORE_SHARE


@pytest.mark.parametrize("kind", KINDS)
def test_records_are_of_the_problems_as_they_are(kind: str) -> None:
    """Graphs, costs and budgets have not changed since; Moccasin's graphs are not at hand."""
    optima = [problem.optimum for problem in problems_of(on_record(), [kind], unsolved=True)]
    here = [run for run in optima if kind != LAYERED or NUMBERS in run.cell["model"]]
    assert here
    for run in here:
        problem = ComparedRun(**run.cell).problem()
        assert run["graph_nodes"] == len(problem.graph.nodes)
        assert run["ram_budget_bytes"] == problem.ram_budget_bytes
        assert run["keep_all_bytes"] == checkpoint_all_peak_bytes(problem.graph)
        assert run["baseline_energy_j"] == pytest.approx(problem.baseline_energy_j, rel=1e-9)
        assert run.baseline == pytest.approx(problem.objective.baseline, rel=1e-9)


# -- limits in processor time ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy_s", "attempts"), [((0.4, 1.0), 2), ((1.0,), 1), ((0.2, 0.3, 0.9), 3)]
)
def test_run_without_its_processor_time_is_repeated(
    busy_s: tuple[float, ...], attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that met its limit of 1 s with less than 0.8 s is made again, with more wall time."""
    clock = SimpleNamespace(wall_s=0.0, cpu_s=0.0)
    monkeypatch.setattr(
        "harness.time",
        SimpleNamespace(perf_counter=lambda: clock.wall_s, process_time=lambda: clock.cpu_s),
    )
    limits: list[float] = []

    def measure(wall_s: float) -> dict[str, Any]:
        clock.cpu_s += busy_s[len(limits)]
        limits.append(wall_s)
        clock.wall_s += wall_s
        return {"status": "unknown", "termination": "time_limit"}

    found = within_core(1.0, measure)
    assert (found["attempts"], found["cpu_s"]) == (attempts, pytest.approx(busy_s[-1]))
    assert limits == sorted(limits)


def test_run_that_never_has_a_core_fails() -> None:
    """It is repeated when the record is resumed; one that ended by itself needs no more."""
    found = within_core(1e6, lambda _: {"status": "unknown", "termination": "time_limit"})
    assert found["status"] == FAILED
    done = within_core(1e6, lambda _: {"status": "feasible", "termination": "stalled"})
    assert (done["status"], done["attempts"]) == ("feasible", 1)


# -- what is said of the records -------------------------------------------------------------------


def record(method: str, overhead_j: float | None, **changes: Any) -> dict[str, Any]:
    """Return the record of a method on a problem whose single pass takes 1 J."""
    cell = {
        "kind": changes.pop("kind", KINDS[0]),
        "model": changes.pop("model", "paper/vgg16-cifar"),
        "device": "paper-a72",
        "ram": changes.pop("ram", "50%"),
        "method": method,
        "limit_s": 15.0,
        "seed": 0,
    }
    ended = "not-applicable" if overhead_j is None else "feasible"
    return {
        **CIRCUMSTANCES,
        "kind": "compared",
        "name": " | ".join(map(str, cell.values())),
        "cell": cell,
        "seconds": 0.5,
        "status": ended,
        "graph_nodes": 81,
        "ram_budget_bytes": 500,
        "keep_all_bytes": 1000,
        "baseline_energy_j": 1.0,
        "overhead_j": overhead_j,
        "overhead_bound_j": 0.0,
        "gap": None if overhead_j is None else 1.0,
        **changes,
    }


def optimum(overhead_j: float, bound_j: float, **changes: Any) -> dict[str, Any]:
    """Return the record of the optimum between two figures [J]."""
    gap = (overhead_j - bound_j) / overhead_j if overhead_j else 0.0
    return record(OPTIMAL, overhead_j, **{"overhead_bound_j": bound_j, "gap": gap} | changes)


def one(*records: dict[str, Any]) -> Compared:
    """Return the one problem of some records."""
    (found,) = problems_of(records)
    return found


def test_ratio_to_a_proved_optimum_is_a_number() -> None:
    """What is proved to 1 % counts as the least."""
    problem = one(optimum(2.0, 1.99), record("dtr", 5.0))
    assert problem.ratio(problem.runs["dtr"]) == (2.5, 2.5)
    assert (problem.ties(problem.runs["dtr"]), problem.ties(problem.optimum)) == (False, True)


def test_ratio_without_a_proof_is_an_interval() -> None:
    """The least lies between the bound and the best schedule of any method."""
    problem = one(optimum(2.0, 0.5), record("dtr", 1.0))
    assert problem.ratio(problem.optimum) == (2.0, 4.0)
    assert problem.ratio(problem.runs["dtr"]) == (1.0, 2.0)
    assert (problem.ties(problem.runs["dtr"]), problem.ties(problem.optimum)) == (True, False)
    unbounded = one(optimum(2.0, 0.0), record("dtr", 4.0))
    assert interval_text(unbounded.ratio(unbounded.runs["dtr"])) == "at least 2.00"


def test_ratio_to_nothing_is_one_or_infinite() -> None:
    """Where the least overhead is 0, a method pays nothing too, or infinitely more."""
    problem = one(optimum(0.0, 0.0), record("dtr", 0.0), record("rotor", 1.0))
    assert problem.ratio(problem.runs["dtr"]) == (1.0, 1.0)
    assert problem.ratio(problem.runs["rotor"]) == (math.inf, math.inf)


def test_best_of_the_earlier_heuristics_is_chosen_for_each_problem() -> None:
    """Methods by a solver, the greedy start and own methods are not among them."""
    problem = one(
        optimum(1.0, 1.0),
        record("checkmate", 1.0),
        record("greedy", 1.1),
        record("mine.py:mine", 1.2),
        record("dtr", 3.0),
        record("selective", 2.0),
        record("rotor", None),
    )
    assert problem.best() == problem.runs["selective"]
    row = Row(BEST, [problem])
    assert (len(row.runs), row.tried, row.median, row.worst) == (1, 1, "2.00", "2.00")


def test_rows_have_most_solved_first_and_the_optimum_before_all() -> None:
    """A method that was not tried on a problem is not blamed for it."""
    records = [
        optimum(1.0, 1.0),
        record("dtr", 2.0),
        record("rotor", 1.5),
        optimum(1.0, 1.0, ram="70%"),
        record("dtr", 4.0, ram="70%"),
        record("rotor", None, ram="70%"),
    ]
    found = rows(problems_of(records))
    assert [row.method for row in found] == [OPTIMAL, "dtr", "rotor"]
    assert [(len(row.runs), row.tried) for row in found] == [(2, 2), (2, 2), (1, 2)]
    assert (found[1].median, found[1].worst, found[1].ties) == ("3.00", "4.00", 0)


def test_problem_counts_once_the_optimum_is_on_record() -> None:
    """A run that was cut short, and a problem that nothing solves, are left out."""
    unsolved = [optimum(1.0, 1.0, ram="20%") | {"overhead_j": None}, record("dtr", None, ram="20%")]
    records = [record("dtr", 1.0, ram="30%"), *unsolved]
    assert problems_of(records) == []
    assert [problem.ram for problem in problems_of(records, unsolved=True)] == ["20%"]
    assert MethodRecord(unsolved[0]).proved is False


def test_limits_that_differ_are_all_named() -> None:
    """A page of runs with several limits does not pass for one with one."""
    records = [optimum(1.0, 1.0), optimum(1.0, 1.0, ram="70%")]
    assert "Every method had 15 s of processor time." in page(records, "x.jsonl")
    records[1]["cell"]["limit_s"] = 60.0
    assert "Every method had 15 s or 60 s of processor time." in page(records, "x.jsonl")


def test_schedule_that_the_published_program_began_with_is_not_its_own() -> None:
    """It counts where its solver has a solution, which the gap of its model tells."""
    own, start = (record(PAPER, 2.0, model_gap=gap) for gap in (0.5, None))
    assert (MethodRecord(own).overhead, MethodRecord(start).overhead) == (2.0, None)


def test_time_counts_where_it_is_minimized() -> None:
    """Overhead, bound and baseline are then those of time, whatever the energy is."""
    fields = {"overhead": 3.0, "overhead_bound": 3.0, "baseline": 6.0, "gap": 0.0}
    problem = one(
        optimum(1.0, 1.0, kind=TIME, **fields),
        record("dtr", 1.0, kind=TIME, **fields | {"overhead": 4.5}),
    )
    assert problem.ratio(problem.runs["dtr"]) == (1.5, 1.5)
    assert problem.optimum.baseline == 6.0


def test_runs_in_their_own_order_count_as_earlier_work() -> None:
    """What DTR's runtime does is simulated as a program, and is one of the heuristics."""
    problem = one(optimum(1.0, 1.0), record("dtr", None), record(OWN_ORDER, 1.5))
    assert problem.best() == problem.runs[OWN_ORDER]


def test_unsolved_problems_of_checkmate_are_proofs_or_time_outs() -> None:
    """The page says how many are which."""
    records = [
        optimum(1.0, 1.0),
        record("checkmate", None),
        optimum(1.0, 1.0, ram="70%"),
        record("checkmate", None, ram="70%", status="unknown", termination="time_limit"),
    ]
    assert "1 are proofs that recomputation alone does not suffice, and 1 are time-outs" in page(
        records, "x.jsonl"
    )


def test_time_is_that_of_the_processor() -> None:
    """Processor time where it is on record, and the share of a core that long runs had."""
    records = [optimum(1.0, 1.0, seconds=2.0, cpu_s=0.5), record("dtr", 2.0, cpu_s=0.1)]
    (problem,) = problems_of(records)
    assert [run.cpu_s for run in problem.runs.values()] == [0.5, 0.1]
    assert MethodRecord(record("rotor", None)).cpu_s == 0.5
    assert core_share(records) == 0.25
    assert core_share(records[1:]) is None


def test_chart_writes_all_digits_of_its_ticks(tmp_path: Path) -> None:
    """Small overheads have their own ticks, and few decades have more than one."""
    pytest.importorskip("matplotlib")
    curve = [(f"{share}0%", 10.0 ** -(share - 2)) for share in (5, 7)]
    records = [optimum(paid, paid, ram=ram) for ram, paid in curve]
    file = tmp_path / "chart.svg"
    chart(records).write(file)
    ticks = re.findall(r">([\d.]+) %<", file.read_text(encoding="utf-8"))
    assert {"0.001", "0.01", "0.1"} <= set(ticks)
    close = [optimum(paid, paid, ram=ram) for ram, paid in (("50%", 0.08), ("70%", 0.03))]
    chart(close).write(file)
    ticks = re.findall(r">([\d.]+) %<", file.read_text(encoding="utf-8"))
    assert {"1", "2", "5"} <= set(ticks)


def test_page_and_readme(told: Told) -> None:
    """All of the words, of two kinds of problems and of layered graphs."""
    layered = {"kind": LAYERED, "model": "100, 0", "ram": "90%"}
    published = layered | {"model": "random_layered_n100"}
    records = [
        optimum(1.0, 1.0),
        record("greedy", 1.0),
        record("dtr", 2.0),
        record("rotor", None),
        record(OPTIMAL, None, ram="10%"),
        optimum(1.0, 0.5, kind=STEPS, model="resnet8", ram="least+30%"),
        record("dtr", 3.0, kind=STEPS, model="resnet8", ram="least+30%"),
        optimum(0.05, 0.05, **layered),
        record("greedy", 0.06, **layered),
        optimum(0.05, 0.02, **published),
        record(OPTIMAL, None, overhead_bound_j=0.03, **layered | {"ram": "80%"}),
    ]
    told(page(records, "2026-01-01-compared.jsonl"))
    told(readme_table(records), "readme")
    assert lead(records) in readme_table(records)
    shown = chart(records).shown
    assert shown["published: vgg16-cifar on paper-a72"]["lines"]["dtr"] == [[50.0, 200.0]]
