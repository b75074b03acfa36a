"""The facts of a report: the commands that reproduce it."""

from __future__ import annotations

import shlex
from dataclasses import replace

from poetmodel.report.facts import commands
from report_subjects import subject
from worked import skip_problem


def test_commands_state_the_whole_problem() -> None:
    """Every limit with all digits, every choice that is not the default; names are quoted."""
    limits = {"deadline": 33.1, "energy_budget": 20.7, "aux_bytes": 50, "recompute": False}
    solve, verify = commands(subject(skip_problem(**limits)))
    words = shlex.split(solve)
    assert words[:3] == ["poetmodel", "solve", "skip.json"]
    for option, value in (
        ("--profile", "skip costs.csv"),
        ("--ram", "13"),
        ("--deadline", "33.1s"),
        ("--deadline-counts", "serial"),
        ("--energy-budget", "20.7J"),
        ("--aux", "50"),
        ("--backend", "highs"),
        ("--out", "x.json"),
    ):
        assert words[words.index(option) + 1] == value
    assert "--no-recompute" in words
    assert "--no-paging" not in words
    assert "--minimize" not in words
    assert shlex.split(verify)[:5] == ["poetmodel", "verify", "x.json", "--graph", "skip.json"]


def test_bare_relations_can_only_be_judged() -> None:
    """A file that states no problem has nothing to solve."""
    one = subject(skip_problem())
    bare = replace(one, document=replace(one.document, problem=None))
    assert [command.split()[1] for command in commands(bare)] == ["verify"]
