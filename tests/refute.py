"""Search for wrong claims of solves on new random problems: ``python tests/refute.py 10000``.

Prints each fault with the seed of its problem, ``kind/number``; ``--seed`` repeats one.
"""

import argparse
import sys
import time
from collections import Counter

from kit.claims import examine, new_seeds


def main():
    """Print faults as they are found, and counts; return 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--begin", type=int, help="number of the first seed; by default a new one")
    parser.add_argument("--seed", help="one problem, kind/number")
    parser.add_argument("--ways", type=int, default=4, help="ways to solve each problem")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after so many")
    chosen = parser.parse_args()
    counts, began_s = Counter[str](), time.monotonic()
    seeds = [chosen.seed] if chosen.seed else new_seeds(chosen.count, begin=chosen.begin)
    sys.stdout.write(f"from {seeds[0]}\n")
    for number, seed in enumerate(seeds, start=1):
        found, more = examine(seed, ways=chosen.ways)
        counts += more + Counter(faults=len(found))
        for fault in found:
            sys.stdout.write(f"{fault.seed}: {fault.method}: {fault.error}\n")
        late = time.monotonic() - began_s > 60 * chosen.minutes
        if number % 500 == 0 or number == len(seeds) or late:
            shown = ", ".join(f"{count:,} {what}" for what, count in counts.items())
            sys.stdout.write(f"{number:,} problems, {time.monotonic() - began_s:.0f} s: {shown}\n")
            sys.stdout.flush()
        if late:
            break
    return int(counts["faults"] > 0)


if __name__ == "__main__":
    sys.exit(main())
