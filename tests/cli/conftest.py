"""Files that the tests of the command line read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.commands import BOARD, chain, profile_rows, write_csv, write_graph

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def chain_file(tmp_path: Path) -> Path:
    """Return the file of `chain`."""
    return write_graph(tmp_path / "chain.graph.json", chain())


@pytest.fixture
def board_file(tmp_path: Path) -> Path:
    """Return the file of a blocking board: 1 s and 1 J a node, 2 ms a transfer of 100 B."""
    path = tmp_path / "board.toml"
    path.write_text(BOARD)
    return path


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    """Return the file of `profile_rows`."""
    return write_csv(tmp_path / "chain.csv", profile_rows())


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print as in a terminal of 80 columns; a pipe has no edge at which tables could be wrapped."""
    monkeypatch.setenv("COLUMNS", "80")
