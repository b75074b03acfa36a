"""``poetmodel diff``: two schedules side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kit.commands import BOARD_FILE, CHAIN, invoke, write_solved
from poetmodel.cli import diff as module
from poetmodel.cli.diff import _words
from poetmodel.schedule.decisions import Choice, Decision

if TYPE_CHECKING:
    from kit.commands import Outcome
    from kit.messages import Told


def diff(*options: str, then: tuple[object, ...] = ()) -> Outcome:
    """Run the command on a schedule of 350 B and one with further options."""
    limits = (("--ram", "350"), options)
    paths = [write_solved(f"{'ab'[k]}.json", *limits[k]) for k in (0, 1)]
    return invoke("diff", *paths, "--graph", CHAIN, "--device", BOARD_FILE, *then)


def test_another_budget_changes_one_tensor() -> None:
    """With 404 B x is kept: 4 mJ and 4 ms less, for a peak that is 54 B or more higher."""
    document = diff("--ram", "404", then=("--json",)).json
    a, b = document["schedules"]
    assert (a["ram_budget_bytes"], b["ram_budget_bytes"]) == (350, 404)
    assert (a["energy_j"], b["energy_j"]) == (pytest.approx(6.004), pytest.approx(6.0))
    assert (a["time_s"], b["time_s"]) == (pytest.approx(6.004), pytest.approx(6.0))
    assert b["peak_ram_bytes"] == 404
    assert a["method"] == b["method"] == "optimal"
    (changed,) = document["changed"]
    assert (changed["tensor"], changed["a"]["fate"], changed["b"]["fate"]) == ("x", "paged", "kept")


def test_table_fits_and_shows_the_change(told: Told) -> None:
    """Figures stand side by side with their difference, in 80 columns."""
    outcome = diff("--ram", "350", "--no-paging")
    assert (outcome.status, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    told(outcome.out)


def test_stages_are_shown_where_words_are_the_same() -> None:
    """A tensor that is recomputed at another stage differs; how often is said with the word."""
    decision = Decision(
        tensor=0,
        choice=Choice.RECOMPUTED,
        in_ram=(),
        on_storage=(),
        recomputed=(4,),
        paged_in=(),
        paged_out=(),
        energy_j=1.0,
        time_s=1.0,
        bytes_at_limit=0,
    )
    assert _words(decision, replace(decision, recomputed=(5,))) == (
        "recomputed at 4",
        "recomputed at 5",
    )
    assert _words(decision, replace(decision, recomputed=(4, 5))) == ("recomputed", "recomputed x2")


def test_long_lists_are_cut(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    """The table shows the largest tensors and says how many more there are."""
    monkeypatch.setattr(module, "SHOWN", 0)
    told(diff("--ram", "404").out)


def test_same_schedules_do_not_differ(told: Told) -> None:
    """Nothing is said to change where nothing does."""
    told(diff("--ram", "350").out)
    assert diff("--ram", "350", then=("--json",)).json["changed"] == []
