"""Benchmark of startup: importing the package, and whole commands."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

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


@pytest.mark.parametrize("name", [*START_COMMANDS, *SOLVE_COMMANDS])
def test_start(
    benchmark: Any, name: str, store_record: Callable[..., None], *, smoke: bool
) -> None:
    """Time a process. Starts are repeated, after one that fills the caches; solves are not."""
    rounds = 1 if smoke or name in SOLVE_COMMANDS else ROUNDS
    if smoke and name in SOLVE_COMMANDS:
        name = SMOKE_COMMAND
    benchmark.group = "command" if name.startswith("poetmodel solve") else "start"
    warmups = int(name in START_COMMANDS)
    benchmark.pedantic(
        run_command, args=(name,), rounds=rounds, iterations=1, warmup_rounds=warmups
    )
    name = name.removeprefix("python -c ") if "import" in name else name
    store_record("startup", name, seconds=benchmark.stats.stats.median, rounds=rounds)
