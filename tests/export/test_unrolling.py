"""Loops of kernels that GCC unrolls: the same bits, and no effect on other compilers."""

import subprocess

import pytest

from kit.digits import build_and_run, digit_batches, exporter
from kit.programs import require_programs
from poetmodel.export.board import Target
from poetmodel.lowered.kernels import SOURCES

LOOP = "PM_UNROLL(4)\nfor (int k = 0; k < 8; k++) { x(k); }"
OTHERS = ("__clang__", "__INTEL_COMPILER")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function that exports the step of the tutorial."""
    return exporter(tmp_path_factory, {"plain": {}})


def preprocessed(*options):
    """Return the text of a loop that the compiler sees, all warnings being errors."""
    command = ["cc", "-E", "-P", "-Wall", "-Wextra", "-Wpedantic", "-Werror", *options]
    return subprocess.run(
        [*command, f"-I{SOURCES / 'src'}", "-include", "pm_real.h", "-xc", "-"],
        input=LOOP, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def test_other_compilers_see_no_pragma():
    """GCC gets the number of repetitions; a compiler with another name does not."""
    require_programs("cc")
    assert "#pragma GCC unroll 4" in preprocessed()
    for name in OTHERS:
        text = preprocessed(f"-D{name}=1")
        assert "for (int k = 0" in text
        assert "#pragma GCC unroll" not in text
        assert "PM_UNROLL" not in text


@pytest.mark.parametrize("target", [Target.HOST, pytest.param(Target.M4, marks=pytest.mark.slow)])
def test_repeated_loops_have_the_same_bits(folder, target):
    """Losses and state are those of loops that are not unrolled, with fewer instructions."""
    require_programs(target)
    given = {"inputs": digit_batches(3, seed=7), "steps": 3}
    repeated = build_and_run(folder("plain"), target, settings=("EXTRA=-O2",), **given)
    plain = build_and_run(folder("plain"), target, settings=("EXTRA=-D__clang__=1",), **given)
    assert (repeated.losses, repeated.state) == (plain.losses, plain.state)
    if target.is_board:
        counts = [done.metrics["step_instructions"] for done in (repeated, plain)]
        assert counts[0] < counts[1]
