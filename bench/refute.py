"""Try to refute what solves claim, on new random problems: ``python bench/refute.py 10000``.

Prints each fault with the seed of its problem, ``kind/number``; with ``--seed`` that one again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit.claims import KINDS, examine, new_seeds


def main() -> int:
    """Look for faults, tell them as they are found, and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--begin", type=int, help="number of the first seed; by default a new one")
    parser.add_argument("--seed", help="one problem, kind/number")
    parser.add_argument("--ways", type=int, default=4, help="ways to solve each problem")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after so many")
    chosen = parser.parse_args()
    console, began_s = Console(soft_wrap=True), time.monotonic()
    counts, faults = Counter[str](), 0
    seeds = [chosen.seed] if chosen.seed else new_seeds(chosen.count, begin=chosen.begin)
    console.print(f"from {seeds[0]}")
    for number, seed in enumerate(seeds, start=1):
        found, more = examine(seed, ways=chosen.ways)
        counts += more
        faults += len(found)
        for fault in found:
            console.print(f"{fault.seed}: {fault.way}: {fault.what}")
        late = time.monotonic() - began_s > 60 * chosen.minutes
        if number % 500 == 0 or number == len(seeds) or late:
            problems = ", ".join(f"{counts[kind]:,} {kind}" for kind in KINDS)
            console.print(
                f"{number:,} problems ({problems}), {counts['searched']:,} searched, "
                f"{counts['solves']:,} solves, "
                f"{counts['left open']:,} left open, {faults:,} faults, "
                f"{time.monotonic() - began_s:.0f} s"
            )
        if late:
            break
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
