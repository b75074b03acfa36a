"""Command-line options and fixtures of the benchmarks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from harness import record
from poetmodel.sweeps.store import RecordFile
from poetmodel.sweeps.tables import rows
from solver_tables import NOTE, aligned, comparison

if TYPE_CHECKING:
    from collections.abc import Callable

SOLVED: Final = pytest.StashKey[list[dict[str, Any]]]()
"""Key under which a pytest session stores the records of the solver comparison."""
# Collect no doctests: there are none, and importing the modules needs optional packages.
collect_ignore = [
    str(path) for path in Path(__file__).parent.rglob("*.py") if not path.name.startswith("test_")
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this folder."""
    group = parser.getgroup("poetmodel")
    group.addoption(
        "--smoke", action="store_true", help="every kind of case once, at its smallest size"
    )
    group.addoption(
        "--record", type=Path, metavar="FILE", help="append a JSON line per measurement to FILE"
    )


@pytest.fixture(scope="session")
def smoke(request: pytest.FixtureRequest) -> bool:
    """Return whether ``--smoke`` restricts benchmarks to their smallest sizes."""
    return bool(request.config.getoption("smoke"))


@pytest.fixture(scope="session")
def keep(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return the function that stores a record if an output file is set; see `record`."""
    path: Any = request.config.getoption("record")
    if path is None:
        return lambda *_, **__: None
    store = RecordFile(path, lambda record: (record["kind"], record["name"]))
    return lambda kind, name, **facts: store.add(record(kind, name, **facts))


@pytest.fixture(scope="session")
def solved(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the list of the solver comparison's records, for the tables at the end."""
    return request.config.stash.setdefault(SOLVED, [])


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a table for each problem of the solver comparison at the end of a session."""
    solved: list[dict[str, Any]] = config.stash.get(SOLVED, [])
    found = rows(solved)
    for table in comparison(found):
        terminalreporter.section(table.title, sep="-")
        for line in aligned(table):
            terminalreporter.write_line(line)
    if found:
        terminalreporter.write_line("")
        terminalreporter.write_line(NOTE)


@pytest.fixture(autouse=True)
def _collect_garbage() -> None:
    """Collect garbage before each benchmark."""
    gc.collect()
