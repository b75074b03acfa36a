"""``poetmodel diff``: two schedules side by side."""

from dataclasses import replace

import pytest

from kit.commands import BOARD_FILE, CHAIN, invoke, write_solved
from poetmodel.cli import diff as module
from poetmodel.cli.diff import _words
from poetmodel.schedule.decisions import Decision, Treatment


def diff(*options, then=()):
    """Run the command on a schedule of 350 B and one with further options."""
    limits = (("--ram", "350"), options)
    paths = [write_solved(f"{'ab'[k]}.json", *limits[k]) for k in (0, 1)]
    return invoke("diff", *paths, "--graph", CHAIN, "--device", BOARD_FILE, *then)


def test_another_budget_changes_one_tensor():
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


def test_table_fits_and_shows_the_change(told, monkeypatch):
    """Figures stand side by side in 80 columns; equal ones say so, and long lists are cut."""
    outcome = diff("--ram", "350", "--no-paging")
    assert (outcome.status, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    told(outcome.out)
    told(diff("--ram", "350").out.split("\n\n")[-1], "the same")
    assert diff("--ram", "350", then=("--json",)).json["changed"] == []
    monkeypatch.setattr(module, "SHOWN", 0)
    told(diff("--ram", "404").out.partition("\n\nDifferent")[2], "cut")


def test_stages_are_shown_where_words_are_the_same():
    """A tensor that is recomputed at another stage differs; how often is said with the word."""
    decision = Decision(
        tensor=0,
        choice=Treatment.RECOMPUTED,
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
