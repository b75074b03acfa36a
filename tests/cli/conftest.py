"""Files that the tests of the command line read, by names without a folder: tables have those."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.commands import BOARD, chain, profile_rows, write_csv, write_graph


@pytest.fixture
def chain_file() -> Path:
    """Return the file of `chain`."""
    return write_graph(Path("chain.graph.json"), chain())


@pytest.fixture
def board_file() -> Path:
    """Return the file of a blocking board: 1 s and 1 J a node, 2 ms a transfer of 100 B."""
    path = Path("board.toml")
    path.write_text(BOARD)
    return path


@pytest.fixture
def profile_file() -> Path:
    """Return the file of `profile_rows`."""
    return write_csv(Path("chain.csv"), profile_rows())


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in the folder of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print as in a terminal of 80 columns; a pipe has no edge at which tables could be wrapped."""
    monkeypatch.setenv("COLUMNS", "80")
