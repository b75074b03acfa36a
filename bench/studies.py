"""The studies that ``python -m bench`` runs."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

from harness import run_study

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness import Study

STUDIES: Final = {
    "grid": "grid:STUDY",
    "ablate": "ablate:STUDY",
    "against": "against:STUDY",
    "compared": "compared:STUDY",
    "solvers": "solver_runs:STUDY",
    "mcu": "mcu.boards:STUDY",
    "aifes": "mcu.aifes:STUDY",
    "tiled": "tiled:STUDY",
    "fronts": "mcu.fronts:STUDY",
    "cmsis-nn": "mcu.cmsis_nn:STUDY",
    "int8-training": "pytorch.int8_training:STUDY",
    "int8-steps": "mcu.int8_steps:STUDY",
    "training": "pytorch.compare:TRAINING",
    "fused": "pytorch.compare:FUSED",
    "library": "pytorch.compare:LIBRARY",
    "coverage": "pytorch.coverage:STUDY",
    "processes": "pytorch.processes:STUDY",
    "floors": "pytorch.floors:STUDY",
}
"""Location of each study as ``MODULE:NAME``. The studies from ``mcu`` on need PyTorch."""


def load_study(name: str) -> Study:
    """Import the module of a study; return the study.

    Raises ImportError if a package is missing.
    """
    module, _, attribute = STUDIES[name].partition(":")
    study: Study = getattr(import_module(module), attribute)
    return study


def main(arguments: Sequence[str]) -> int:
    """Run the study that the first argument names; return the exit status, 2 for unknown names."""
    if not arguments or arguments[0] not in STUDIES:
        sys.stderr.write(f"usage: python -m bench STUDY --out FILE\n{', '.join(STUDIES)}\n")
        return 2
    return run_study(load_study(arguments[0]), arguments[1:])
