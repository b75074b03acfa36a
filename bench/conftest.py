"""Options of a benchmark run, and what every benchmark starts from."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cases import CASES, smoke_cases
from grid import smoke_cells
from records import Recorder

# What compares with PyTorch; doctests are looked for in every module.
collect_ignore_glob = [] if find_spec("torch") else ["pytorch/*"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this folder."""
    group = parser.getgroup("poetmodel")
    group.addoption(
        "--smoke", action="store_true", help="every kind of case once, at its smallest size"
    )
    group.addoption(
        "--record", type=Path, metavar="FILE", help="append a JSON line per measurement to FILE"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every benchmark of a case the registry, or its small stand-ins."""
    if "case" in metafunc.fixturenames:
        chosen = smoke_cases() if metafunc.config.getoption("smoke") else CASES
        metafunc.parametrize("case", chosen, ids=[case.name for case in chosen])
    if "cell" in metafunc.fixturenames:
        cells = smoke_cells()
        metafunc.parametrize("cell", cells, ids=[cell.name for cell in cells])


@pytest.fixture(scope="session")
def smoke(request: pytest.FixtureRequest) -> bool:
    """Return whether only the smallest sizes are run."""
    return bool(request.config.getoption("smoke"))


@pytest.fixture(scope="session")
def recorder(request: pytest.FixtureRequest) -> Recorder:
    """Return what keeps the records of this run."""
    path: Any = request.config.getoption("record")
    return Recorder(path)


@pytest.fixture(autouse=True)
def _collected() -> None:
    """Begin every benchmark without the garbage of the one before."""
    gc.collect()


@pytest.fixture(scope="session")
def warm() -> None:
    """Load solver and modelling library once, so that no measurement pays for it."""
    from poetmodel import solve

    for case in smoke_cases():
        if case.group == "zoo":
            solve(case.problem(), time_limit=case.limit_s)
