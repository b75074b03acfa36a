"""``poetmodel limits``: what it prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kit.commands import BOARD_FILE, CHAIN, chain, invoke, write_graph
from poetmodel.result import Status
from poetmodel.solver import sensitivity as module

if TYPE_CHECKING:
    from kit.commands import Outcome
    from kit.messages import Told


def limits(*arguments: object) -> Outcome:
    """Run the command on the chain and the board, with more options."""
    return invoke("limits", "--graph", CHAIN, "--device", BOARD_FILE, *arguments)


def test_limits_of_the_chain() -> None:
    """Kept it takes 404 B at g2; the floor of 304 B is reached by paging x, for 4 ms and 4 mJ."""
    document = limits("--ram", "350", "--json").json
    assert document["floor_bytes"] == 304
    assert document["floor_node"] == "g2"
    assert {name: answer["value"] for name, answer in document["ram"].items()} == {
        "keep_all": 404,
        "recompute": 304,
        "page": 304,
        "both": 304,
    }
    assert document["ram"]["keep_all"]["node"] == "g2"
    assert document["ram"]["keep_all"]["tensors"] == ["x", "h1", "h2", "loss", "g2"]
    assert document["time"]["value"] == pytest.approx(6.004)
    assert document["energy"]["value"] == pytest.approx(6.004)
    assert all(answer["proven"] for answer in document["ram"].values())


def test_table_fits_and_says_what_binds(told: Told) -> None:
    """Every line fits 80 columns; each amount is proven, with the step and its tensors."""
    outcome = limits("--ram", "350", "--deadline", "7s", "--energy-budget", "7J")
    assert (outcome.status, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    told(outcome.out)
    assert outcome.out.count("proven: less is infeasible") == 7


def test_budget_below_the_floor_is_answered_all_the_same(told: Told) -> None:
    """No deadline will do then, with the reason; what RAM it takes is still said."""
    document = limits("--ram", "200", "--json").json
    assert document["ram"]["both"]["value"] == 304
    assert document["time"]["status"] == "infeasible"
    assert document["time"]["value"] is None
    assert "304" in document["time"]["reason"]
    outcome = limits("--ram", "200")
    assert outcome.status == 0
    told(outcome.out)


def test_forbidden_ways_and_resident_bytes_count() -> None:
    """--no-paging leaves two lines on RAM; with --count-parameters amounts are whole budgets."""
    path = write_graph(Path("heavy.graph.json"), chain() | {"resident_bytes": {"parameters": 1000}})
    document = invoke(
        "limits", path, "--device", BOARD_FILE, "--no-paging", "--count-parameters", "--json"
    ).json
    assert {name: answer["value"] for name, answer in document["ram"].items()} == {
        "keep_all": 1404,
        "recompute": 1304,
    }


def test_unproven_amounts_come_with_their_gap(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    """What a time limit left open is said with gap and bound, and how to get closer."""
    real = module.find_limits

    def unproved(status: Status, bound: float) -> None:
        def find(*arguments: Any, **options: Any) -> list[module.Limit]:
            last = real(*arguments, **options)[-1]
            overhead_bound_j = bound - last.result.baseline_energy_j
            result = replace(
                last.result,
                status=status,
                objective_bound=bound,
                overhead_bound_j=overhead_bound_j,
            )
            return [replace(last, result=result)]

        monkeypatch.setattr(module, "find_limits", find)

    unproved(Status.FEASIBLE, 6.002)
    words = " ".join(limits("--ram", "350").out.split())
    told(limits("--ram", "350").out)
    unproved(Status.OPTIMAL, 6.004 * (1 - 1e-12))
    words = " ".join(limits("--ram", "350").out.split())
    told(limits("--ram", "350").out, "nearly proven")
    assert "--time-limit" not in words


def test_missing_graph_is_told(told: Told) -> None:
    """Without a graph there is one sentence and status 2."""
    outcome = invoke("limits", "--device", BOARD_FILE)
    assert (outcome.status, outcome.out) == (2, "")
    told(outcome.err)
