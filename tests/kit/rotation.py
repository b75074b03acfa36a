"""What of a test is quick, and which of the tests marked ``seeds`` a run takes.

Those state a property of quick tests again, on more random problems. A run takes a share that
rotates, and what failed before. The share is that of the commit, or of the day where there is no
git; ``POETMODEL_SEEDS=all`` takes all, a number one share.
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
"""Into how many shares the tests are divided."""
KEPT = Path(__file__).parents[1] / "kept_seeds.txt"
"""The tests that failed once and always run, a name a line."""


def this_share():
    """Return which share it is the turn of; None for all."""
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
    """Add tests that failed to those that always run; return those that are new."""
    before = kept_tests(file)
    added = sorted(set(names).difference(before))
    with file.open("a", encoding="utf-8") as out:
        out.writelines(f"{name}\n" for name in added)
    return added


def chosen(names, share, kept=()):
    """Return what runs of these tests, where each function gives every share its part."""
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
        """Return the instances of this part: one, as many left out as there are other parts."""
        return islice(instances, self.number, None, self.parts)

    def share(self, least):
        """Return what of a number that all instances together have this part must have."""
        return least // self.parts


def parts(count):
    """Return what runs a test for each `Part` of its instances: the first is quick."""
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
    """Return parameters, or tuples of them, marked slow but for those that are chosen."""
    return _mark_unchosen(values, chosen, pytest.mark.slow)


def rotating(values, always):
    """Return parameters, or tuples of them, of a slow test: those that run always, and the rest.

    The rest are the same property once more, of which each run takes a share.
    """
    return _mark_unchosen(values, always, pytest.mark.seeds)


def _mark_unchosen(values, chosen, mark):
    parts = [(v, v if isinstance(v, tuple) else (v,)) for v in values]
    return [v if v in chosen else pytest.param(*own, marks=mark) for v, own in parts]
