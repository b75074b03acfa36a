"""External programs of tests; tests are skipped if a program is missing."""

import re
import shutil
import subprocess

import pytest

from poetmodel.export.board import Target, list_required_programs

SKIP_REASON = re.compile(r"no [\w+-]+( and no [\w+-]+)* on PATH")
"""The reason of a test that `require_programs` skips."""


def require_programs(*names):
    """Skip the test if a program is not on PATH.

    A name is a program, or a `Target`, which stands for all programs that it requires.
    """
    required = [
        p
        for name in names
        for p in (list_required_programs(name) if isinstance(name, Target) else [name])
    ]
    missing = [program for program in dict.fromkeys(required) if shutil.which(program) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} on PATH")


def run_command(command, folder):
    """Execute a command in a folder; return its stdout. Fail if its exit status is not 0."""
    outcome = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout[-2000:] + outcome.stderr[-4000:]
    return outcome.stdout
