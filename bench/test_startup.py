"""Benchmark of startup: importing the package, and whole commands."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

ROUNDS: Final = 7
START_COMMANDS: Final = (
    "python -c pass",
    "python -c import poetmodel",
    "poetmodel --help",
    "poetmodel models resnet18-cifar",
)
SOLVE_COMMANDS: Final = (
    "poetmodel solve paper/vgg16-cifar --device paper-m4 --ram 50% --deadline-counts compute",
    "poetmodel solve vgg16-cifar --device rpi4b --ram 70%",
)
SMOKE_COMMAND: Final = "poetmodel solve mlp --device mkr1000 --ram 70%"


def run_command(command_line: str) -> None:
    """Execute a command; raise `CalledProcessError` if it fails."""
    program, *arguments = command_line.split(
        maxsplit=2 if command_line.startswith("python") else -1
    )
    module = () if program == "python" else ("-m", "poetmodel")
    subprocess.run((sys.executable, *module, *arguments), check=True, capture_output=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the benchmark with its commands; a smoke run solves the smallest network."""
    smoke = metafunc.config.option.smoke
    metafunc.parametrize(
        "name", [*START_COMMANDS, *((SMOKE_COMMAND,) if smoke else SOLVE_COMMANDS)]
    )


def test_start(
    benchmark: Any, name: str, store_record: Callable[..., None], *, smoke: bool
) -> None:
    """Time a process. Starts are repeated, after one that fills the caches; solves are not."""
    is_repeated = name in START_COMMANDS and not smoke
    rounds = ROUNDS if is_repeated else 1
    benchmark.group = "command" if name.startswith("poetmodel solve") else "start"
    benchmark.pedantic(
        run_command, args=(name,), rounds=rounds, iterations=1, warmup_rounds=int(is_repeated)
    )
    name = name.removeprefix("python -c ") if "import" in name else name
    store_record("startup", name, seconds=benchmark.stats.stats.median, rounds=rounds)
