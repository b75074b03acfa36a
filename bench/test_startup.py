"""Benchmark of startup: importing the package, and whole commands."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS: Final = 7
STARTS: Final = (
    "python -c pass",
    "python -c import poetmodel",
    "poetmodel --help",
    "poetmodel models resnet18-cifar",
)
SOLVES: Final = (
    "poetmodel solve paper/vgg16-cifar --device paper-m4 --ram 50% --deadline-counts compute",
    "poetmodel solve vgg16-cifar --device rpi4b --ram 70%",
)
SMALL: Final = "poetmodel solve mlp --device mkr1000 --ram 70%"


def run(line: str) -> None:
    """Execute a command; raise `CalledProcessError` if it fails."""
    program, *words = line.split(maxsplit=2 if line.startswith("python") else -1)
    module = () if program == "python" else ("-m", "poetmodel")
    subprocess.run((sys.executable, *module, *words), check=True, capture_output=True)


@pytest.mark.parametrize("name", [*STARTS, *SOLVES])
def test_start(benchmark: Any, name: str, keep: Callable[..., None], *, smoke: bool) -> None:
    """A process from its start to its end; starts are repeated, with the caches filled."""
    rounds = 1 if smoke or name in SOLVES else ROUNDS
    if smoke and name in SOLVES:
        name = SMALL
    benchmark.group = "command" if name.startswith("poetmodel solve") else "start"
    warmups = int(name in STARTS)
    benchmark.pedantic(run, args=(name,), rounds=rounds, iterations=1, warmup_rounds=warmups)
    name = name.removeprefix("python -c ") if "import" in name else name
    keep("startup", name, seconds=benchmark.stats.stats.median, rounds=rounds)
