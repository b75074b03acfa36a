"""``--constraints``: own rows and objectives, from their file to the files that commands write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from commands import Outcome, invoke

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WEAR = '[[constraint]]\nname = "wear"\nsum = {"bytes_written" = 1}\nat_most = "0.1kB"\n'
"""At most one of the tensors of 100 B may be written."""


@pytest.fixture
def solve(chain_file: Path, board_file: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Return the command on the chain and the board, given the text of a file of constraints."""

    def run(text: str, *arguments: object) -> Outcome:
        path = tmp_path / "rows.toml"
        path.write_text(text)
        problem = ("--graph", chain_file, "--device", board_file, "--constraints", path)
        return invoke("solve", *problem, *arguments)

    return run


def test_json_has_the_rows(solve: Callable[..., Outcome]) -> None:
    """Each row with its name, its terms and its limits."""
    document = solve(WEAR, "--ram", "350", "--json").json
    assert document["problem"]["constraints"] == [
        {"name": "wear", "terms": {"bytes_written": 1}, "lower": None, "upper": 100}
    ]
    assert "weights" not in document["problem"]


def test_faults_of_the_file_end_with_status_2(
    solve: Callable[..., Outcome], tmp_path: Path
) -> None:
    """A line for each, with the file and the place, and no traceback."""
    outcome = solve('[[constraint]]\nname = "wear"\nsum = {"byte_written" = 1}\nmost = 3\n')
    assert (outcome.status, outcome.out) == (2, "")
    file = tmp_path / "rows.toml"
    assert outcome.err.splitlines() == [
        f"error: {file}: constraint[0] ('wear').most: unknown key; did you mean at_most?",
        f"error: {file}: constraint[0] ('wear').sum: 'byte_written': did you mean bytes_written?",
        f"error: {file}: constraint[0] ('wear'): expected at_most, at_least or both, or equals "
        "alone; got none",
    ]


def test_a_file_that_is_missing_ends_with_status_2(chain_file: Path, board_file: Path) -> None:
    """The sentence is that of every other file."""
    problem = ("--graph", chain_file, "--device", board_file)
    outcome = invoke("solve", *problem, "--constraints", "nowhere.toml")
    assert (outcome.status, outcome.err) == (2, "error: nowhere.toml: no such file\n")


def test_the_file_is_not_written_over(solve: Callable[..., Outcome], tmp_path: Path) -> None:
    """--out on the file of constraints is refused."""
    outcome = solve(WEAR, "--ram", "350", "--out", tmp_path / "rows.toml")
    assert outcome.status == 2
    assert "this is an input file" in outcome.err
    assert (tmp_path / "rows.toml").read_text() == WEAR


def test_an_objective_excludes_minimize(solve: Callable[..., Outcome], tmp_path: Path) -> None:
    """Two of them would contradict each other, also where the option names the default."""
    text = '[objective]\nsum = {"energy_j" = 1, "bytes_written" = 1e-6}\n'
    outcome = solve(text, "--minimize", "energy")
    assert outcome.status == 2
    assert outcome.err == (
        f"error: --minimize energy: {tmp_path / 'rows.toml'} has an [objective] of its own; leave "
        "out one of them\n"
    )
    document = solve(text, "--ram", "400", "--json").json
    assert document["problem"]["minimize"] == "own"
    assert document["problem"]["weights"] == {"energy_j": 1, "bytes_written": 1e-06}
    assert document["objective"]["minimize"] == "own"
