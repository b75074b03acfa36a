"""Selection of quick parameters, and of the tests marked ``seeds`` that a test run executes.

Tests marked ``seeds`` check properties of quick tests on more random problems. A test run executes
a rotating share of them, and tests that failed before. The commit selects the share, or the day
without git; ``POETMODEL_SEEDS=all`` selects all, a number one share.
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

SHARES = 16
"""Number of shares into which the tests are divided."""
KEPT = Path(__file__).parents[1] / "kept_seeds.txt"
"""File with the tests that failed before and always run, one name per line."""


def this_share():
    """Return the number of the share to execute; None for all."""
    asked = os.environ.get("POETMODEL_SEEDS", "")
    if asked:
        return None if asked == "all" else int(asked) % SHARES
    git = ["git", "-C", str(KEPT.parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return int(time.time() // 86_400) % SHARES
    return int(commit[:8], 16) % SHARES


def kept_tests(file=KEPT):
    """Return the names of the tests that always run."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [line for line in lines if line and not line.startswith("#")]


def keep(names, file=KEPT):
    """Add failed tests to those that always run; return the new ones."""
    before = kept_tests(file)
    added = sorted(set(names).difference(before))
    with file.open("a", encoding="utf-8") as out:
        out.writelines(f"{name}\n" for name in added)
    return added


def chosen(names, share, kept=()):
    """Return the tests to execute; each test function is divided evenly among the shares."""
    always, places, taken = set(kept), Counter[str](), set[str]()
    for name in names:
        function = name.partition("[")[0]
        place = crc32(function.encode()) + places[function]
        places[function] += 1
        if share is None or place % SHARES == share or name in always:
            taken.add(name)
    return taken


class Part(NamedTuple):
    """One of the parts into which the instances of a test are divided."""

    number: int
    parts: int

    def of(self, instances):
        """Return every n-th instance, n being the number of parts."""
        return islice(instances, self.number, None, self.parts)

    def share(self, least):
        """Return this part's share of a minimum that all instances must reach together."""
        return least // self.parts


def parts(count):
    """Return the decorator that parametrizes a test by each `Part`; only the first is quick."""
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


def quick(values, chosen):
    """Return parameters, or tuples of them, marked slow except the chosen ones."""
    return _mark_unchosen(values, chosen, pytest.mark.slow)


def rotating(values, always):
    """Return parameters, or tuples of them, of a slow test, marked ``seeds`` except `always`.

    Each test run executes a share of those marked.
    """
    return _mark_unchosen(values, always, pytest.mark.seeds)


def _mark_unchosen(values, chosen, mark):
    parts = [(v, v if isinstance(v, tuple) else (v,)) for v in values]
    return [v if v in chosen else pytest.param(*own, marks=mark) for v, own in parts]
