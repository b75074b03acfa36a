"""Kernels of the exported C: how they are written, and that they build."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from kit.kernel_calls import KERNELS, WARNINGS, included, parameters
from kit.programs import needs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

SOURCE_FILES = sorted(KERNELS.glob("*.c"))
BOARD = ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16")


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["cc", "arm-none-eabi-gcc"])
def test_kernels_build_without_warnings(compiler: str, tmp_path: Path) -> None:
    """In float, no kernel has double arithmetic or anything else that a compiler warns of."""
    needs(compiler)
    board = BOARD if compiler.startswith("arm") else ()
    done = subprocess.run(
        [compiler, *board, *WARNINGS, "-std=c11", "-O2", "-c", *included(), *SOURCE_FILES],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SOURCE_FILES, ids=lambda path: path.stem)
def test_kernels_are_written_as_the_exporter_reads_them(path: Path) -> None:
    """A file has one function that is called: results come first, then inputs, then numbers.

    One that has no results returns an answer.
    """
    kinds = [
        0 if re.match(r"(pm_real|int32_t|uint8_t) \*", p) else 1 if "*" in p else 2
        for p in parameters(path.stem)
    ]
    assert kinds == sorted(kinds), parameters(path.stem)
    assert 0 in kinds or f"\nint {path.stem}(" in path.read_text()
