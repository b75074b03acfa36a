"""One run and its record."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.commands import BOARD, training_step, write_graph
from poetmodel.baselines import run
from poetmodel.bench import Settings, grid, measurement
from poetmodel.bench.measurement import _course, measure
from poetmodel.bench.tables import rows
from poetmodel.errors import BackendUnavailableError, LicenceError
from poetmodel.schedule import RELATIONS


def _run(method, ram="70%"):
    return grid(["mlp"], ["rpi4b"], ram=[ram], methods=[method])[0]


def test_record_says_everything_but_the_relations():
    """Figures, versions, seed and machine are in the record; the schedule is apart from them."""
    one = replace(_run("optimal"), settings=Settings(seed=3))
    record = measure(one.to_dict())
    assert json.loads(json.dumps(record, allow_nan=False)) == json.loads(json.dumps(record))
    assert (record["status"], record["key"]) == ("optimal", one.key)
    assert record["cell"]["settings"]["seed"] == 3
    assert record["result"]["energy_j"] > record["result"]["baseline_energy_j"]
    assert record["machine"]["versions"]["poetmodel"]
    in_checkout = (Path(measurement.__file__).parents[3] / ".git").exists()
    assert re.fullmatch("[0-9a-f]{7,40}" if in_checkout else "None", str(record["commit"]))
    assert record["versions"]["highspy"]
    assert not set(RELATIONS) & set(record["result"])
    assert record["schedule"]["R"]
    assert record["counts"]["paged_in"] == len(record["schedule"]["M_in"])


def test_course_by_hand():
    """Nothing for 1 s, 8 for 2 s, which is half above the last value of 4, then that for 5 s."""
    history = ((0.5, None, 0.0), (1.0, 8.0, 0.0), (2.0, 8.0, 3.0), (3.0, 4.0, 3.0), (8.0, 4.0, 4.0))
    found = _course(SimpleNamespace(simulation=object(), history=history))
    assert found == {"first_schedule_s": 1.0, "primal_integral_s": 1.0 + 2 * 0.5}
    told = SimpleNamespace(simulation=object(), history=(), wall_s=3.0, overhead=1.0)
    once = _course(told)
    assert once == {"first_schedule_s": 3.0, "primal_integral_s": 3.0}
    nothing = _course(SimpleNamespace(simulation=None))
    assert nothing == {"first_schedule_s": None, "primal_integral_s": None}


def test_heuristics_have_records_too():
    """A method without a solver is feasible, with its own figures."""
    record = measure(_run("lru-paging").to_dict())
    assert record["status"] == "feasible"
    assert record["cell"]["backend"] is None
    assert record["counts"]["recomputed"] == 0


def test_start_is_used(monkeypatch):
    """The schedule of a smaller budget starts the solve of a larger one, in methods that solve."""
    small = measure(_run("optimal", "75%").to_dict())
    given = []

    def watched(*arguments, **options):
        given.append(options.get("start"))
        return run(*arguments, **options)

    monkeypatch.setattr("poetmodel.bench.measurement.run_method", watched)
    record = measure(_run("optimal", "85%").to_dict(), small["schedule"])
    assert record["warm_start"] is True
    assert record["status"] == "optimal"
    assert [list(pair) for pair in given[0].R] == small["schedule"]["R"]
    measure(_run("dtr", "85%").to_dict(), small["schedule"])
    assert given[1] is None


def test_homes_of_state_are_in_the_record_and_in_the_start(monkeypatch, tmp_path):
    """The schedule of a record lists what is resident, and starts a solve with it."""
    path = write_graph(tmp_path / "step.graph.json", training_step())
    board = tmp_path / "board.toml"
    board.write_text(BOARD)
    runs = grid([str(path)], [str(board)], ram=["900", "1140"], methods=["optimal"])
    small = measure(runs[0].to_dict())
    assert small["schedule"]["resident"] == [4]
    assert "resident" not in small["result"]
    assert small["state"]["resident_bytes"] == 300
    assert small["state"]["written_back_bytes"] == 200
    assert rows([small])[0]["state_on_storage_bytes"] == 200
    given = []

    def watched(*arguments, **options):
        given.append(options.get("start"))
        return run(*arguments, **options)

    monkeypatch.setattr("poetmodel.bench.measurement.run_method", watched)
    larger = measure(runs[1].to_dict(), small["schedule"])
    assert given[0].resident == (4,)
    assert larger["schedule"]["resident"] == [1, 4]


def test_what_does_not_apply_is_told_apart_from_what_failed():
    """A refusal has its reason; a solver that is not there, and nonsense, are no answers."""
    refused = measure(_run("checkpoint-all", "70%").to_dict())
    assert refused["status"] == "not-applicable"
    assert "checkpoint-all" in refused["reason"]
    assert refused["result"] is None
    broken = measure(replace(_run("optimal"), backend="none").to_dict())
    assert broken["status"] == "failed"
    assert "backend 'none'" in broken["reason"]
    unknown = measure(replace(_run("optimal"), model="none").to_dict())
    assert unknown["status"] == "failed"
    assert "no such model" in unknown["reason"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(LicenceError("too large"), "refused"), (BackendUnavailableError("gone"), "not-installed")],
)
def test_refusal_is_told_apart_from_a_missing_solver(error, status, monkeypatch):
    """Each has a status of its own, the reason, and no result."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(measurement, "run_method", fail)
    record = measure(_run("optimal").to_dict())
    assert (record["status"], record["reason"]) == (status, str(error))
    assert record["result"] is None


@pytest.mark.parametrize("stated", [True, False])
def test_model_that_the_licence_refuses_is_refused_though_time_ran_out_before(stated, monkeypatch):
    """Where the limit passed before the solver was called, the licence is asked afterwards.

    The schedule of such a run is the start's, whether the model had been stated by then or not;
    how long the rest of the solve took does not matter.
    """
    asked = []

    def refusal(_, **sizes):
        asked.append(sizes)
        return LicenceError("too large")

    def too_late(*arguments, **options):
        if stated:
            monkeypatch.setattr("poetmodel.solver.monolithic.ModelProof._ask", lambda *_: None)
            return run(*arguments, **options)
        return run(*arguments, **options | {"time_limit": 1e-6})

    one = replace(_run("optimal"), formulation="compact")
    taken = measure(one.to_dict())
    assert taken["status"] == "optimal"
    monkeypatch.setattr("poetmodel.backends.registry.refusal", refusal)
    assert measure(one.to_dict())["status"] == "optimal"
    assert asked == []
    monkeypatch.setattr(measurement, "run_method", too_late)
    record = measure(one.to_dict())
    assert asked[-1] == {name: taken["statistics"][name] for name in ("columns", "rows")}
    assert (record["status"], record["reason"]) == ("refused", "too large")
    assert record["result"] is None
    assert record["schedule"] is None


def test_loading_is_not_measured(monkeypatch):
    """Before the clock starts the method has solved a small problem by the same solver, once."""
    calls = []

    def watched(problem, name, **options):
        calls.append((problem.graph.name, options.get("backend")))
        return run(problem, name, **options)

    monkeypatch.setattr(measurement, "run_method", watched)
    measurement._warm_up.cache_clear()
    for _ in range(2):
        measure(_run("optimal").to_dict())
    assert calls == [("warm-up", "highs"), ("mlp", "highs"), ("mlp", "highs")]
    measure(_run("lru-paging").to_dict())
    assert calls[3:] == [("warm-up", None), ("mlp", None)]
