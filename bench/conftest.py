"""Command-line options and fixtures of the benchmarks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from harness import make_record
from poetmodel.sweeps.store import RecordFile
from poetmodel.sweeps.tables import rows
from solver_tables import NOTE, align_columns, tabulate_solvers

if TYPE_CHECKING:
    from collections.abc import Callable

SOLVER_RECORDS: Final = pytest.StashKey[list[dict[str, Any]]]()
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
        "--limit", type=float, metavar="SECONDS", help="time limit of each solve by the solvers"
    )
    group.addoption(
        "--record", type=Path, metavar="FILE", help="append a JSON line per measurement to FILE"
    )


@pytest.fixture(scope="session")
def smoke(request: pytest.FixtureRequest) -> bool:
    """Return whether ``--smoke`` restricts benchmarks to their smallest sizes."""
    return bool(request.config.getoption("smoke"))


@pytest.fixture(scope="session")
def store_record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that appends a record to the file of ``--record``; see `make_record`.

    Without the option the function ignores records.
    """
    path: Any = request.config.getoption("record")
    if path is None:
        return lambda *_, **__: None
    store = RecordFile(path, lambda record: (record["kind"], record["name"]))
    return lambda kind, name, **facts: store.add(make_record(kind, name, **facts))


@pytest.fixture(scope="session")
def solver_records(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the list to which solver benchmarks append records, for the tables at the end."""
    return request.config.stash.setdefault(SOLVER_RECORDS, [])


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a table for each problem of the solver comparison at the end of a session."""
    records: list[dict[str, Any]] = config.stash.get(SOLVER_RECORDS, [])
    table_rows = rows(records)
    for table in tabulate_solvers(table_rows):
        terminalreporter.section(table.title, sep="-")
        for line in align_columns(table):
            terminalreporter.write_line(line)
    if table_rows:
        terminalreporter.write_line("")
        terminalreporter.write_line(NOTE)


@pytest.fixture(autouse=True)
def _collect_garbage() -> None:
    """Collect garbage before each benchmark."""
    gc.collect()
