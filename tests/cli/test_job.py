"""Limits of a whole job on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.commands import BOARD_FILE, CHAIN, chain, invoke, write_graph

if TYPE_CHECKING:
    from kit.messages import Told


def test_job_gives_the_limits_of_a_step() -> None:
    """10 steps in 70 s and 80 J: 7 s and 8 J each, where a pass takes 6 s and 6 J."""
    options = ("--samples", 10, "--within", "70s", "--battery", "80J", "--ram", 350, "--json")
    document = invoke("solve", "--graph", CHAIN, "--device", BOARD_FILE, *options).json
    assert document["problem"]["deadline_s"] == pytest.approx(7.0)
    assert document["problem"]["energy_budget_j"] == pytest.approx(8.0)
    job = document["job"]
    assert (job["samples"], job["steps"]) == (10, 10)
    assert job["total_s"] == pytest.approx(10 * document["makespan_s"])
    assert job["total_j"] == pytest.approx(10 * document["energy_j"])
    bound = {entry["limit"]: entry["binding"] for entry in job["limits"]}
    assert bound == {"ram": "binds", "time": "slack", "energy": "slack"}


def test_batches_are_counted() -> None:
    """9 samples in batches of 4 are 3 steps."""
    graph = write_graph(Path("b.graph.json"), chain() | {"batch_size": 4})
    options = ("--samples", 9, "--within", "30s", "--json")
    document = invoke("solve", "--graph", graph, "--device", BOARD_FILE, *options).json
    assert document["job"]["steps"] == 3
    assert document["problem"]["deadline_s"] == pytest.approx(10.0)


def test_table_says_time_energy_and_limits() -> None:
    """In words: totals with their share of time and battery, and a line for each limit."""
    options = ("--samples", 10, "--within", "2min", "--battery", "1Wh", "--ram", 350)
    text = invoke("solve", "--graph", CHAIN, "--device", BOARD_FILE, *options).out
    assert "The whole job" in text
    assert "10 steps" in text
    assert "60.04 s" in text
    assert "of the time of 2 min" in text
    assert "of the battery of 3,600 J" in text
    assert "RAM budget" in text
    assert "not at its limit" in text


def test_impossible_job_says_which_limit_is_too_little(told: Told) -> None:
    """A pass takes 6 s; 5 s are too few, and the energy is not what is in the way: exit 3."""
    options = ("--samples", 10, "--within", "50s", "--battery", "80J")
    outcome = invoke("solve", "--graph", CHAIN, "--device", BOARD_FILE, *options)
    assert (outcome.status, outcome.out) == (3, "")
    told(outcome.err)
    assert "the energy budget" not in outcome.err


def test_file_of_a_job_is_a_plain_schedule() -> None:
    """The answer on the job is printed, not written: the file is what `verify` reads."""
    out = Path("s.json")
    where = ("--graph", CHAIN, "--device", BOARD_FILE)
    assert invoke("solve", *where, "--samples", 3, "--within", "1h", "--out", out).status == 0
    assert '"job"' not in out.read_text()
    assert invoke("verify", out, *where).status == 0
