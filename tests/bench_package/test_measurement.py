"""One cell and its record."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from poetmodel.baselines import run
from poetmodel.bench import Settings, grid
from poetmodel.bench.measurement import measure
from poetmodel.schedule import RELATIONS

if TYPE_CHECKING:
    import pytest

    from poetmodel.bench.cells import Cell


def _cell(method: str, ram: str = "70%") -> Cell:
    return grid(["mlp"], ["rpi4b"], ram=[ram], methods=[method])[0]


def test_record_says_everything_but_the_relations() -> None:
    """Figures, versions, seed and machine are in the record; the schedule is apart from them."""
    cell = replace(_cell("optimal"), settings=Settings(seed=3))
    record = measure(cell.to_dict())
    assert json.loads(json.dumps(record, allow_nan=False)) == json.loads(json.dumps(record))
    assert (record["status"], record["key"]) == ("optimal", cell.key)
    assert record["cell"]["settings"]["seed"] == 3
    assert record["result"]["energy_j"] > record["result"]["baseline_energy_j"]
    assert record["machine"]["versions"]["poetmodel"]
    assert record["versions"]["highspy"]
    assert not set(RELATIONS) & set(record["result"])
    assert record["schedule"]["R"]
    assert record["counts"]["paged_in"] == len(record["schedule"]["M_in"])


def test_heuristics_have_records_too() -> None:
    """A method without a solver is feasible, with its own figures."""
    record = measure(_cell("lru-paging").to_dict())
    assert record["status"] == "feasible"
    assert record["cell"]["backend"] is None
    assert record["counts"]["recomputed"] == 0


def test_start_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule of a smaller budget starts the solve of a larger one, in methods that solve."""
    small = measure(_cell("optimal", "75%").to_dict())
    given: list[Any] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        given.append(options.get("start"))
        return run(*arguments, **options)

    monkeypatch.setattr("poetmodel.bench.measurement.run", watched)
    record = measure(_cell("optimal", "85%").to_dict(), small["schedule"])
    assert record["warm_start"] is True
    assert record["status"] == "optimal"
    assert [list(pair) for pair in given[0].R] == small["schedule"]["R"]
    measure(_cell("dtr", "85%").to_dict(), small["schedule"])
    assert given[1] is None


def test_what_does_not_apply_is_told_apart_from_what_failed() -> None:
    """A refusal has its reason; a solver that is not there, and nonsense, are no answers."""
    refused = measure(_cell("checkpoint-all", "70%").to_dict())
    assert refused["status"] == "not-applicable"
    assert "checkpoint-all" in refused["reason"]
    assert refused["result"] is None
    broken = measure(replace(_cell("optimal"), backend="none").to_dict())
    assert broken["status"] in ("failed", "unavailable")
    assert broken["reason"]
    unknown = measure(replace(_cell("optimal"), model="none").to_dict())
    assert unknown["status"] == "failed"
    assert "no such model" in unknown["reason"]
