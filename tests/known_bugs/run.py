"""Insert known bugs one at a time, and report which of them the tests find.

``python tests/known_bugs/run.py [NAME...]`` applies each patch of this folder to a copy of the
checkout and runs the tests that its line ``Tests:`` names until the first failure; where these
pass, it runs all quick tests, then the slow ones. It ends with 1 if a bug is not found.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
_LEFT_OUT = (".git", ".tox", ".venv*", ".*_cache", "__pycache__", "*.egg-info", "build", "dist")
_ENDED = re.compile(r"^(FAILED|ERROR) (?P<test>\S+::.*?)( - |$)", re.MULTILINE)


def patches():
    """Return the patches, in order of their names."""
    return sorted(FOLDER.glob("*.patch"))


def suites_of(patch):
    """Return the folders and files of tests that a patch names, relative to ``tests/``."""
    text = patch.read_text(encoding="utf-8")
    return next(line for line in text.splitlines() if line.startswith("Tests: ")).split()[1:]


def apply(patch, folder, *options):
    """Apply a patch to a checkout, or with ``--check`` only see whether it applies.

    Raises
    ------
    subprocess.CalledProcessError
        If it does not apply.
    """
    command = ["git", "apply", "--whitespace=nowarn", *options, str(patch)]
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(command, cwd=folder, env=alone, check=True, capture_output=True, text=True)


def _rounds(patch):
    yield [f"tests/{name}" for name in suites_of(patch)]
    # The tests of the patches themselves fail where one is applied.
    quick = ["-n", "auto", "--maxprocesses", "4", "--ignore", "tests/known_bugs", "tests"]
    yield quick
    yield [*quick, "-m", "slow and not browser and not large"]


def _failed(folder, arguments):
    """Return the first test that fails in a checkout, or None."""
    command = [sys.executable, "-m", "pytest", "-qx", "--timeout", "300", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    ran = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    failed = _ENDED.search(ran.stdout)
    if ran.returncode and failed is None:
        raise SystemExit(f"pytest ended with {ran.returncode}\n{ran.stdout}{ran.stderr}")
    return failed["test"] if failed else ""


def found_by(patch):
    """Return the first test that fails with a bug and not without it, or None."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / ROOT.name
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        apply(patch, folder)
        test = next(filter(None, (_failed(folder, each) for each in _rounds(patch))), "")
        if test:
            apply(patch, folder, "--reverse")
            if _failed(folder, [test, "-m", ""]):
                raise SystemExit(f"{test} fails without {patch.stem}, too")
    return test


def main(names):
    """Run the patches with these names, or all, and return the exit status."""
    missed = []
    for patch in [patch for patch in patches() if not names or patch.stem in names]:
        begin = time.monotonic()
        test = found_by(patch)
        missed += [] if test else [patch.stem]
        took_s = time.monotonic() - begin
        print(f"{patch.stem}: {test or 'not found'} ({took_s:.0f} s)", flush=True)  # noqa: T201
    return len(missed) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
