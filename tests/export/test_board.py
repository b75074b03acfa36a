"""What is said where a compiler or the emulator is missing, refuses, or takes too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.programs import needs
from poetmodel.errors import MissingExtraError
from poetmodel.export import board
from poetmodel.export.board import ProgramRun, Target, ToolchainError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Look for programs where there are none."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_programs")
@pytest.mark.parametrize(
    ("target", "package"),
    [
        (Target.HOST, "apt-get install make gcc"),
        (Target.M4, "apt-get install make gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system"),
    ],
)
def test_missing_programs_are_named_with_their_packages(target: Target, package: str) -> None:
    """One sentence says what is missing and how Debian calls it."""
    with pytest.raises(MissingExtraError, match=package):
        board.require(target)


@pytest.mark.usefixtures("no_programs")
def test_emulator_is_not_needed_to_build() -> None:
    """Who flashes a board has no use for QEMU."""
    assert board.missing_programs(Target.M7, emulate=False) == ("make", "arm-none-eabi-gcc")
    assert "qemu-system-arm" in board.missing_programs(Target.M7)


def test_errors_of_the_compiler_are_shown(tmp_path: Path) -> None:
    """What make could not do is said in its own words."""
    needs(Target.HOST)
    (tmp_path / "Makefile").write_text(
        "host:\n\t@echo 'step.c:3: error: no such thing' >&2; false\n"
    )
    with pytest.raises(ToolchainError, match=r"make host failed: step\.c:3: error: no such"):
        board.build(tmp_path, Target.HOST)


def test_work_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """A time limit holds for every program."""
    with pytest.raises(ToolchainError, match=r"sleep: expected to end within 0.1 s"):
        board.execute(["sleep", "60"], tmp_path, time_limit_s=0.1)


def test_run_that_failed_says_why() -> None:
    """The status, and the first of what the program said."""
    failed = ProgramRun(
        status=12,
        losses={},
        state=b"",
        figures={},
        node_instructions={},
        messages="pm_run: step 3: error 2\n",
    )
    assert failed.error == 2
    with pytest.raises(ToolchainError, match="status 12: pm_run: step 3: error 2"):
        failed.require_success()
