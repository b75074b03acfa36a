"""What warm starts along the RAM axis save: the same sweep with and without them.

``python bench/warm_starts.py --out FOLDER`` solves each run both ways and compares the CPU time of
those that were solved to the gap in both, so that time limits decide nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.bench import Settings, grid, sweep

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SHIFT_S: Final = 0.1
"""Shift of the geometric mean [s]."""

MODELS: Final = ("paper/vgg16-cifar", "paper/resnet18-cifar")
DEVICES: Final = ("paper-m4", "paper-a72")
BUDGETS: Final = ("30%", "40%", "50%", "60%", "70%", "80%")


def compared(
    cold: Iterable[dict[str, Any]], warm: Iterable[dict[str, Any]]
) -> list[tuple[str, float, float]]:
    """Return name and CPU seconds, cold and warm, of the runs that a start could help.

    That are those that had a start, and were solved to the gap with and without it.
    """
    by_key = {record["key"]: record for record in cold}
    return [
        (record["name"], by_key[record["key"]]["cpu_s"], record["cpu_s"])
        for record in warm
        if record["warm_start"]
        and {record["status"], by_key[record["key"]]["status"]} == {"optimal"}
    ]


def ratio(pairs: Sequence[tuple[str, float, float]]) -> float:
    """Return the shifted geometric mean of warm over cold; 1 where nothing is compared."""
    if not pairs:
        return 1.0
    logs = [math.log((warm_s + SHIFT_S) / (cold_s + SHIFT_S)) for _, cold_s, warm_s in pairs]
    return math.exp(sum(logs) / len(logs))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both sweeps and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the two sweeps")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--devices", nargs="+", default=DEVICES)
    parser.add_argument("--ram", nargs="+", default=BUDGETS)
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds of a run")
    parser.add_argument("--gap", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    settings = Settings(time_limit_s=options.time_limit, gap=options.gap, seed=options.seed)
    runs = grid(options.models, options.devices, ram=options.ram, settings=settings)
    cold = sweep(runs, options.out / "cold", warm=False)
    pairs = compared(cold, sweep(runs, options.out / "warm"))
    for name, cold_s, warm_s in pairs:
        sys.stdout.write(f"{name}: {cold_s:.2f} s cold, {warm_s:.2f} s warm\n")
    cold_s = sum(seconds for _, seconds, _ in pairs)
    warm_s = sum(seconds for _, _, seconds in pairs)
    sys.stdout.write(
        f"{len(pairs)} runs, {cold_s:.2f} s cold, {warm_s:.2f} s warm, ratio {ratio(pairs):.2f} "
        f"(geometric mean, shift {SHIFT_S} s)\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
