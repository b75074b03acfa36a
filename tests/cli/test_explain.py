"""``poetmodel explain`` and ``diff``: decisions of schedules, and the cost of a decision."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kit.commands import BOARD_FILE, CHAIN, PROFILE, invoke, write_solved
from poetmodel.cli import diff as module
from poetmodel.cli.diff import _decision_texts
from poetmodel.result import Status
from poetmodel.schedule.decisions import Decision, Treatment
from poetmodel.solver import sensitivity
from poetmodel.solver.sensitivity import Alternative, Forbidden, RamStep
from poetmodel.units import MAX_BYTES


def explain(*arguments, ram="350", tensor=None, limits=(), **due):
    """Solve the chain with options, and explain the schedule."""
    out = write_solved("chain.schedule.json", "--ram", ram, *limits)
    asked = () if tensor is None else (tensor,)
    where = ("--graph", CHAIN, "--device", BOARD_FILE)
    return invoke("explain", out, *asked, *where, *arguments, **due)


def test_schedule_is_explained_in_json():
    """With 350 B x is paged for 4 mJ."""
    outcome = explain("--json")
    assert (outcome.status, outcome.err) == (0, "")
    document = outcome.json
    assert document["energy_j"] == pytest.approx(6.004)
    assert [tensor["fate"] for tensor in document["tensors"]] == [
        "paged",
        "kept",
        "kept",
        "kept",
        "kept",
        "unused",
    ]
    assert document["binding"] == [{"stage": 4, "node": "g2", "ram_bytes": 304}]
    (decision,) = document["decisions"]
    assert decision["tensor"] == "x"
    assert decision["energy_j"] == pytest.approx(0.004)
    assert decision["time_s"] == pytest.approx(0.004)
    assert "alternatives" not in decision
    assert "next_ram_step" not in document


def test_cost_of_a_decision_is_in_json():
    """Without paging, x is recomputed for 1 J; keeping it needs 404 B, which saves the 4 mJ."""
    document = explain("--json", tensor="x").json
    (decision,) = document["decisions"]
    found = {other["without"]: other for other in decision["alternatives"]}
    recomputed, kept = found["paging"], found["recomputation and paging"]
    assert recomputed["extra"] == recomputed["min_extra"] == pytest.approx(1 - 0.004)
    assert recomputed["extra_s"] == pytest.approx(1 - 0.004)
    assert (recomputed["becomes"], recomputed["proven"]) == ("recomputed", True)
    assert (kept["status"], kept["extra"]) == ("infeasible", None)
    step = document["next_ram_step"]
    assert (step["ram_bytes"], step["min_ram_bytes"], step["proven"]) == (404, 404, True)
    assert step["saved"] == pytest.approx(0.004)


def test_costs_of_one_tensor_are_told(told):
    """Of a tensor that is kept, of one without a choice, and of a file without a proof."""
    told(explain(tensor="x", ram="404").out.split("\n\n")[1], "kept")
    told(explain(tensor="g1").out.split("\n\n")[1], "unused")
    path = Path("chain.schedule.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "feasible"}))
    where = ("--graph", CHAIN, "--device", BOARD_FILE)
    told(invoke("explain", path, "x", *where).err, "not proven")


def test_ctrl_c_leaves_the_decision(monkeypatch):
    """The decision is printed without its cost."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sensitivity, "find_ram_step", interrupt)
    ended = explain(tensor="x")
    assert (ended.status, ended.err) == (0, "")
    assert "paged out in stage 0" in ended.out
    assert "What a change costs" not in ended.out


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"status": Status.FEASIBLE, "min_extra": 0.5}, "range"),
        ({"status": Status.FEASIBLE, "min_extra": -0.1}, "at most"),
        ({"status": Status.UNKNOWN, "extra": None, "min_extra": 0.5}, "or more"),
        ({"status": Status.UNKNOWN, "extra": None, "min_extra": -0.1}, "unknown"),
        ({"extra": 1e-9, "min_extra": 1e-9}, "nothing"),
        ({"extra": -0.001, "min_extra": -0.001}, "better"),
    ],
)
def test_what_is_not_proven_is_told(monkeypatch, told, change, name):
    """An unproven cost is a range from bound to value; noise below the gap is 0 J."""
    found = Alternative(
        tensor=0,
        forbidden=Forbidden.PAGING,
        status=Status.OPTIMAL,
        becomes=Treatment.RECOMPUTED,
        extra=1.0,
        min_extra=1.0,
        extra_s=0.5,
    )
    monkeypatch.setattr(
        sensitivity, "find_alternatives", lambda *_, **__: (replace(found, **change),)
    )
    monkeypatch.setattr(sensitivity, "find_ram_step", lambda *_, **__: None)
    told(explain(tensor="x").out.split("\n\n")[1], name)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ({"status": Status.FEASIBLE, "ram_bytes": 410, "min_ram_bytes": 400}, "found"),
        ({"status": Status.FEASIBLE, "ram_bytes": 350, "min_ram_bytes": 300}, "same"),
        ({"status": Status.UNKNOWN, "min_ram_bytes": 400}, "bounded"),
        ({"status": Status.UNKNOWN, "min_ram_bytes": 300}, "unknown"),
    ],
)
def test_step_of_ram_that_is_not_proven_is_told(monkeypatch, told, step, name):
    """An unproven step of RAM is printed with the result and the RAM below which none is better."""
    saved = 0.004 if "ram_bytes" in step else None
    found = RamStep(**step, saved=saved, max_saved=saved)
    monkeypatch.setattr(sensitivity, "find_alternatives", lambda *_, **__: ())
    monkeypatch.setattr(sensitivity, "find_ram_step", lambda *_, **__: found)
    told(explain(tensor="x").out.split("\n\n")[1], name)


def test_tables_fit(told):
    """The tables of a schedule and of a tensor fit 80 columns and have the same figures."""
    whole = explain()
    assert max(map(len, whole.out.splitlines())) <= 80
    told(whole.out)
    one = explain(tensor="x")
    assert max(map(len, one.out.splitlines())) <= 80
    told(one.out, "one")


def test_each_kind_of_answer_is_told(told):
    """Kept, recomputed and unknown tensors have a sentence each."""
    told(explain(tensor="h1").out)
    told(explain(tensor="x", limits=("--no-paging",)).out, "x")
    told(explain(ram="404").out.split("\n\n")[-1], "nothing")
    told(explain(tensor="h11", status=2).err, "unknown")


def test_file_of_bare_relations_is_explained(told):
    """Without a stated problem, the limits of the device hold, and a note states this.

    Without a device, the file is refused.
    """
    explain()
    path = Path("chain.schedule.json")
    document = json.loads(path.read_text())
    del document["problem"]
    path.write_text(json.dumps(document))
    outcome = invoke("explain", path, "--graph", CHAIN, "--device", BOARD_FILE, "--json")
    assert outcome.json["ram_budget_bytes"] == 1_000_000
    told(outcome.err)
    document = json.loads(path.read_text())
    del document["device"]
    path.write_text(json.dumps(document))
    outcome = invoke("explain", path, "--graph", CHAIN, "--profile", PROFILE, "--json", status=0)
    assert outcome.json["ram_budget_bytes"] == MAX_BYTES


@pytest.mark.parametrize(
    "change", [{"S_RAM": []}, {"graph": {"name": "other", "sha256": "0" * 64}}]
)
def test_schedule_that_does_not_hold_is_refused(change, told):
    """An invalid schedule, or one of another graph, is refused: exit 2 names the file."""
    explain()
    path = Path("chain.schedule.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    outcome = invoke("explain", path, "--graph", CHAIN, "--device", BOARD_FILE)
    assert (outcome.status, outcome.out) == (2, "")
    told(outcome.err)
    assert path.name in outcome.err


@pytest.mark.slow
def test_equal_tensors_are_one_row():
    """A row has their number and sum."""
    out = Path("auto.schedule.json")
    where = ("--device", "mkr1000")
    assert invoke("solve", "autoencoder", *where, "--ram", "45%", "--out", out).status == 0
    document = invoke("explain", out, "--graph", "autoencoder", *where, "--json").json
    fates = {tensor["tensor"]: tensor for tensor in document["tensors"]}
    groups = document["groups"]
    several = [group for group in groups if len(group["tensors"]) > 1]
    assert several
    for group in several:
        members = [fates[name] for name in group["tensors"]]
        assert {member["fate"] for member in members} == {group["fate"]}
        assert group["energy_j"] == pytest.approx(sum(member["energy_j"] for member in members))
    words = " ".join(invoke("explain", out, "--graph", "autoencoder", *where).out.split())
    (largest, *_) = several
    assert f"{largest['name']} {len(largest['tensors'])} {largest['fate']}" in words


# -- diff ----------------------------------------------------------------------------------------
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


def test_schedules_of_two_graphs_are_not_compared(tmp_path):
    """Without ``--graph``, each file names its own graph."""
    paths = [tmp_path / f"{batch}.json" for batch in (1, 2)]
    for batch, path in enumerate(paths, 1):
        built = ("mlp", "--batch", str(batch), "--device", BOARD_FILE)
        invoke("solve", *built, "--ram", "100%", "--out", path, status=0)
    done = invoke("diff", *paths, "--device", BOARD_FILE, status=2)
    assert "2.json: a schedule of another graph than " in done.err


def test_table_fits_and_shows_the_change(told, monkeypatch):
    """The table has at most 80 columns; long lists of changed tensors are shortened."""
    outcome = diff("--ram", "350", "--no-paging")
    assert (outcome.status, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    told(outcome.out)
    told(diff("--ram", "350").out.split("\n\n")[-1], "the same")
    assert diff("--ram", "350", then=("--json",)).json["changed"] == []
    monkeypatch.setattr(module, "MAX_TENSORS", 0)
    told(diff("--ram", "404").out.partition("\n\nDifferent")[2], "cut")


def test_stages_are_shown_where_words_are_the_same():
    """A tensor that is recomputed at another stage differs; the word has the number of times."""
    decision = Decision(
        tensor=0,
        treatment=Treatment.RECOMPUTED,
        in_ram=(),
        on_storage=(),
        recomputed=(4,),
        paged_in=(),
        paged_out=(),
        energy_j=1.0,
        time_s=1.0,
        bytes_at_limit=0,
    )
    assert _decision_texts(decision, replace(decision, recomputed=(5,))) == (
        "recomputed at 4",
        "recomputed at 5",
    )
    assert _decision_texts(decision, replace(decision, recomputed=(4, 5))) == (
        "recomputed",
        "recomputed x2",
    )
    paged = replace(decision, treatment=Treatment.PAGED, recomputed=(), paged_in=(4,))
    assert _decision_texts(replace(paged, paged_out=(2,)), replace(paged, paged_out=(3,))) == (
        "paged out at 2",
        "paged out at 3",
    )
    assert _decision_texts(replace(paged, paged_out=(2,)), paged) == (
        "paged out at 2",
        "paged out at no stage",
    )
    both = replace(decision, treatment=Treatment.BOTH, recomputed=(4,), paged_in=(5,))
    assert _decision_texts(both, replace(both, recomputed=(5,), paged_in=(4,))) == (
        "paged and recomputed x2 recomputed at 4",
        "paged and recomputed x2 recomputed at 5",
    )
