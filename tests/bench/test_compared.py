"""Every method beside the optimum: what is run, and what is on record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import charts
from compared import (
    CURVES,
    KINDS,
    LAYERED,
    LAYERED_LIMIT_S,
    LIMIT_S,
    MAIN,
    NUMBERS,
    OPTIMAL,
    PAPER,
    SAME,
    STEPS,
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
from measured import records
from poetmodel.baselines import METHODS
from poetmodel.bench.measurement import FAILED, NOT_APPLICABLE
from poetmodel.graph import checkpoint_all_peak_bytes

if TYPE_CHECKING:
    from poetmodel.bench.measurement import Record

ROOT = Path(__file__).resolve().parents[2]

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
    assert [curve[:3] for curve in CURVES] == list(charts.CURVES)
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


CUT_SHORT = {PAPER, "checkmate", "rotor", "paging-only", "resident"}
"""Methods of which the protocol says that some runs are missing; none that needs no solver, but the
one run of rotor that met an earlier limit."""

# -- what is on record -----------------------------------------------------------------------------


def on_record(*kinds: str) -> dict[tuple[str, ...], dict[str, Record]]:
    """Return the records of some kinds of problems, by problem and method."""
    found: dict[tuple[str, ...], dict[str, Record]] = {}
    for record in records("compared"):
        cell = record["cell"]
        if cell["kind"] in kinds:
            problem = tuple(cell[name] for name in ("kind", "model", "device", "ram"))
            found.setdefault(problem, {})[cell["method"]] = record
    return found


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
    assert len(on_record(*MAIN)) >= 150
    assert {kind for kind, *_ in on_record(*MAIN)} == set(MAIN)
    for (kind, *_), of_problem in on_record(*KINDS).items():
        assert set(methods_of(kind)) - set(of_problem) <= CUT_SHORT
        layered = kind == LAYERED
        for run in of_problem.values():
            assert run["cell"]["limit_s"] == (LAYERED_LIMIT_S if layered else LIMIT_S)
            assert run["status"] != FAILED
            if not layered and run.get("termination") == "time_limit":
                assert CORE_SHARE <= run.get("cpu_s", run["seconds"]) / LIMIT_S <= 1 / CORE_SHARE


@pytest.mark.parametrize("kind", KINDS)
def test_records_are_of_the_problems_as_they_are(kind: str) -> None:
    """Graphs, costs and budgets have not changed since; Moccasin's graphs are not at hand."""
    optima = [of_problem[OPTIMAL] for of_problem in on_record(kind).values()]
    here = [run for run in optima if kind != LAYERED or NUMBERS in run["cell"]["model"]]
    assert here
    for run in here:
        problem = ComparedRun(**run["cell"]).problem()
        assert run["graph_nodes"] == len(problem.graph.nodes)
        assert run["ram_budget_bytes"] == problem.ram_budget_bytes
        assert run["keep_all_bytes"] == checkpoint_all_peak_bytes(problem.graph)
        assert run["baseline_energy_j"] == pytest.approx(problem.baseline_energy_j, rel=1e-9)
        baseline = run.get("baseline", run["baseline_energy_j"])
        assert baseline == pytest.approx(problem.objective.baseline, rel=1e-9)


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
