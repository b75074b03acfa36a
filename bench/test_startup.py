"""How long people wait before anything is solved, and for a whole command."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS: Final = 7
PYTHON: Final = (sys.executable, "-c")
COMMAND: Final = (sys.executable, "-m", "poetmodel")

STARTS: Final = {
    "python -c pass": (*PYTHON, "pass"),
    "import poetmodel": (*PYTHON, "import poetmodel"),
    "poetmodel --help": (*COMMAND, "--help"),
    "poetmodel models resnet18-cifar": (*COMMAND, "models", "resnet18-cifar"),
}
SOLVES: Final = (
    "poetmodel solve paper/vgg16-cifar --device paper-m4 --ram 50% --deadline-counts compute",
    "poetmodel solve vgg16-cifar --device rpi4b --ram 70%",
)
SMALL: Final = "poetmodel solve mlp --device mkr1000 --ram 70%"


def run(command: tuple[str, ...]) -> None:
    """Run a command to its end."""
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize("name", STARTS)
def test_start(benchmark: Any, name: str, keep: Callable[..., None], *, smoke: bool) -> None:
    """A process from its start to its end, after one that filled the caches."""
    rounds = 1 if smoke else ROUNDS
    benchmark.group = "start"
    benchmark.pedantic(run, args=(STARTS[name],), rounds=rounds, iterations=1, warmup_rounds=1)
    seconds = benchmark.stats.stats.median
    keep("startup", name, seconds=seconds, rounds=rounds)


@pytest.mark.parametrize("name", SOLVES)
def test_command(benchmark: Any, name: str, keep: Callable[..., None], *, smoke: bool) -> None:
    """A whole ``poetmodel solve``, from the shell's point of view."""
    if smoke:
        name = SMALL
    benchmark.group = "command"
    command = (*COMMAND, *name.split()[1:])
    benchmark.pedantic(run, args=(command,), rounds=1, iterations=1)
    keep("startup", name, seconds=benchmark.stats.stats.median, rounds=1)
