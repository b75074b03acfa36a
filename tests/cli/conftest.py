"""A folder for each test of the command line, with the files that most of them read."""

import pytest

from kit.commands import (
    BOARD,
    BOARD_FILE,
    CHAIN,
    PROFILE,
    chain,
    profile_rows,
    write_csv,
    write_graph,
)


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    """Work in the folder of the test: names without a folder are stable, and break no table."""
    monkeypatch.chdir(tmp_path)
    write_graph(CHAIN, chain())
    BOARD_FILE.write_text(BOARD)
    write_csv(PROFILE, profile_rows())


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    """Print as in a terminal of 80 columns; a pipe has no edge at which tables could be wrapped."""
    monkeypatch.setenv("COLUMNS", "80")
