"""Options of a benchmark run, and what every benchmark starts from."""

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
"""Where a run keeps what the solvers did."""
# Other modules have no doctests; a search would need every package that one of them imports.
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
    """Return whether only the smallest sizes are run."""
    return bool(request.config.getoption("smoke"))


@pytest.fixture(scope="session")
def keep(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return what keeps the record of a measurement, if they are to be kept: see `record`."""
    path: Any = request.config.getoption("record")
    if path is None:
        return lambda *_, **__: None
    store = RecordFile(path, lambda record: (record["kind"], record["name"]))
    return lambda kind, name, **facts: store.add(record(kind, name, **facts))


@pytest.fixture(scope="session")
def solved(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return where the comparison of solvers keeps its records, for the tables at the end."""
    return request.config.stash.setdefault(SOLVED, [])


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """End a run of the comparison of solvers with a table for each problem."""
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
    """Begin every benchmark without the garbage of the one before."""
    gc.collect()
