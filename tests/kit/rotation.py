"""Selection of the tests marked ``seeds`` that pytest executes, and parameters with this mark.

Tests marked ``seeds`` check properties of other tests on more problems or in more cases. Each
execution of pytest selects one share of them, and the tests that failed before. The commit
determines the share, or the day without git; ``POETMODEL_SEEDS=all`` selects all tests, a number
the share with this number.
"""

import os
import subprocess
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import pytest

SHARES = 32
"""Number of shares into which the tests marked ``seeds`` are divided."""
KEPT = Path(__file__).parents[1] / "kept_seeds.txt"
"""File with the names of tests that failed before, one per line; they are always selected."""


def select_share():
    """Return the number of the share to execute, from the environment, the commit or the day.

    None for all shares.
    """
    setting = os.environ.get("POETMODEL_SEEDS", "")
    if setting:
        return None if setting == "all" else int(setting) % SHARES
    git = ["git", "-C", str(KEPT.parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return int(time.time() // 86_400) % SHARES
    return int(commit[:8], 16) % SHARES


def read_kept_tests(file=KEPT):
    """Return the names of tests that are always selected; empty if there is no file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [line for line in lines if line and not line.startswith("#")]


def add_kept_tests(names, file=KEPT):
    """Append names of failed tests to the file, unless it has them; return the appended names."""
    before = read_kept_tests(file)
    added = sorted(set(names).difference(before))
    with file.open("a", encoding="utf-8") as out:
        out.writelines(f"{name}\n" for name in added)
    return added


def select_tests(names, share, kept=()):
    """Return the names of a share, and those of `kept`; None for `share` selects all names.

    The cases of each test function are divided evenly among the shares.
    """
    always, positions, selected = set(kept), Counter[str](), set[str]()
    for name in names:
        function = name.partition("[")[0]
        position = crc32(function.encode()) + positions[function]
        positions[function] += 1
        if share is None or position % SHARES == share or name in always:
            selected.add(name)
    return selected


class Part(NamedTuple):
    """One of `parts` parts into which the instances of a test are divided, by number from 0."""

    number: int
    parts: int

    def select(self, instances):
        """Return the instances of this part: every n-th of all, where n is the number of parts."""
        return islice(instances, self.number, None, self.parts)

    def divide(self, minimum):
        """Return this part's fraction of a minimum that all instances together must reach."""
        return minimum // self.parts


def parametrize_parts(count):
    """Return a decorator that parametrizes a test by `Part`; all but the first are ``seeds``."""
    return pytest.mark.parametrize(
        "part",
        [
            pytest.param(
                Part(number, count),
                id=f"part {number + 1} of {count}",
                marks=[pytest.mark.seeds] if number else [],
            )
            for number in range(count)
        ],
    )


def mark_seeds_except(values, always, slow=()):
    """Return parameters of a test, or tuples of them, marked ``seeds`` except those in `always`.

    Each execution of pytest selects a share of the marked ones; those in `slow` are marked so.
    """
    pairs = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    marks = {True: pytest.mark.slow, False: pytest.mark.seeds}
    return [
        value if value in always else pytest.param(*arguments, marks=marks[value in slow])
        for value, arguments in pairs
    ]
