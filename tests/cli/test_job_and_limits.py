"""``poetmodel limits``, and limits of a whole job."""

from dataclasses import replace
from pathlib import Path

import pytest

from kit.commands import BOARD_FILE, CHAIN, chain, invoke, write_graph
from poetmodel.result import Status
from poetmodel.solver import sensitivity as module


def limits(*arguments, **due):
    """Run the command on the chain and the board, with more options."""
    return invoke("limits", "--graph", CHAIN, "--device", BOARD_FILE, *arguments, **due)


def test_table_fits_and_says_what_binds(told):
    """Every line fits 80 columns; each amount is proven, with the step and its tensors."""
    outcome = limits("--ram", "350", "--deadline", "7s", "--energy-budget", "7J")
    assert (outcome.status, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    told(outcome.out)
    assert outcome.out.count("proven: less is infeasible") == 7


def test_budget_below_the_floor_is_answered_all_the_same(told):
    """No deadline is feasible then, with the reason; the required RAM is still printed."""
    document = limits("--ram", "200", "--json").json
    assert document["ram"]["both"]["value"] == 304
    assert document["time"]["status"] == "infeasible"
    assert document["time"]["value"] is None
    assert "304" in document["time"]["reason"]
    outcome = limits("--ram", "200", status=0)
    told(outcome.lines_from("deadline"))


def test_unproven_amounts_come_with_their_gap(monkeypatch, told):
    """Limits that a time limit left unproven are printed with gap, bound, and a remedy."""
    real = module.search_limits

    def unproved(status, bound):
        def find(*arguments, **options):
            last = real(*arguments, **options)[-1]
            overhead_bound_j = bound - last.result.problem.baseline_energy_j
            result = replace(
                last.result, status=status, objective_bound=bound, overhead_bound_j=overhead_bound_j
            )
            return [replace(last, result=result)]

        monkeypatch.setattr(module, "search_limits", find)

    unproved(Status.FEASIBLE, 6.002)
    words = " ".join(limits("--ram", "350").out.split())
    told(limits("--ram", "350").out)
    unproved(Status.OPTIMAL, 6.004 * (1 - 1e-12))
    words = " ".join(limits("--ram", "350").out.split())
    told(limits("--ram", "350").out, "nearly proven")
    assert "--time-limit" not in words


def test_job_gives_the_limits_of_a_step():
    """10 steps in 70 s and 80 J: 7 s and 8 J each; 9 samples in batches of 4 are 3 steps."""
    options = ("--samples", 10, "--within", "70s", "--battery", "80J", "--ram", 350, "--json")
    document = invoke("solve", "--graph", CHAIN, "--device", BOARD_FILE, *options).json
    assert document["problem"]["deadline_s"] == pytest.approx(7.0)
    assert document["problem"]["energy_budget_j"] == pytest.approx(8.0)
    job = document["job"]
    assert (job["samples"], job["steps"]) == (10, 10)
    assert job["total_s"] == pytest.approx(10 * document["makespan_s"])
    assert job["total_j"] == pytest.approx(10 * document["energy_j"])
    states = {entry["quantity"]: (entry["state"], entry["saved"]) for entry in job["limits"]}
    assert states == {
        "ram": ("binds", pytest.approx(0.004)),
        "time": ("slack", 0.0),
        "energy": ("slack", 0.0),
    }
    graph = write_graph(Path("b.graph.json"), chain() | {"batch_size": 4})
    options = ("--samples", 9, "--within", "30s", "--json")
    document = invoke("solve", "--graph", graph, "--device", BOARD_FILE, *options).json
    assert document["job"]["steps"] == 3
    assert document["problem"]["deadline_s"] == pytest.approx(10.0)


def test_table_says_time_energy_and_limits():
    """In words: totals with their share of time and battery, and which limits bind."""
    options = ("--samples", 10, "--within", "2min", "--battery", "1Wh", "--ram", 350)
    text = invoke("solve", "--graph", CHAIN, "--device", BOARD_FILE, *options).out
    assert "The whole job" in text
    assert "10 steps" in text
    assert "60.04 s" in text
    assert "of the time of 2 min" in text
    assert "of the battery of 3,600 J" in text
    assert "RAM budget     binds          40 mJ less without it" in text
    assert "deadline       does not bind" in text
    assert "energy budget  does not bind" in text


def test_impossible_job_says_which_limit_is_too_little(told):
    """A pass takes 6 s; 5 s are too few, and the energy is not the reason: exit 3."""
    options = ("--samples", 10, "--within", "50s", "--battery", "80J")
    outcome = invoke("solve", "--graph", CHAIN, "--device", BOARD_FILE, *options)
    assert (outcome.status, outcome.out) == (3, "")
    told(outcome.err)
    assert "the energy budget" not in outcome.err


def test_file_of_a_job_is_a_plain_schedule():
    """The result for the job is printed, not written: the file is that which `verify` reads."""
    out = Path("s.json")
    where = ("--graph", CHAIN, "--device", BOARD_FILE)
    assert invoke("solve", *where, "--samples", 3, "--within", "1h", "--out", out).status == 0
    assert '"job"' not in out.read_text()
    assert invoke("verify", out, *where).status == 0
