"""External programs of tests; tests are skipped if a program is missing."""

import re
import shutil
import subprocess

import pytest

from poetmodel.export.board import Target, list_required_programs

LACKING = re.compile(r"no [\w+-]+( and no [\w+-]+)* on PATH")
"""How the reason of such a skip reads."""


def needs(*names):
    """Skip the test where a program is missing: by its name, or one that a target needs."""
    wanted = [
        p
        for name in names
        for p in (list_required_programs(name) if isinstance(name, Target) else [name])
    ]
    missing = [program for program in dict.fromkeys(wanted) if shutil.which(program) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} on PATH")


def done(command, folder):
    """Run a command in a folder, which must succeed; return what it printed."""
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout
