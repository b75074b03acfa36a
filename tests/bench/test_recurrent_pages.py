"""What the page of exports says of recurrent networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from result_pages.recurrent import block

if TYPE_CHECKING:
    from kit.messages import Told


def run(share: int, *, apart: bool, **changes: Any) -> dict[str, Any]:
    """Return the record of an export that takes more energy as captured."""
    return {
        "recorded": "2026-11-26T10:00:00+00:00",
        "machine": {
            "cpu": "cpu",
            "cores": 2,
            "python": "3.11.7",
            "versions": {"highspy": "1.15.1"},
        },
        "load_average": 1.0,
        "cell": {"network": "GRU", "share": share, "apart": apart},
        "ram_bytes": 500 * share,
        "keep_all_bytes": 40_000 if apart else 50_000,
        "least_bytes": 6_000 if apart else 30_000,
        "nodes": 700 if apart else 600,
        "status": "optimal",
        "gap": 0.0,
        "energy_j": 0.0098 if apart else 0.0125,
        "baseline_j": 0.0098 if apart else 0.01,
        "seconds": 1.5,
        "limit_s": 60.0,
        **changes,
    }


def test_the_page_has_both_exports_in_a_row(told: Told) -> None:
    """What was not proved has a star, what was not found a dash; an export alone has no row."""
    failed = {"status": "failed", "gap": None, "energy_j": None, "baseline_j": None}
    records = [
        run(80, apart=False, status="feasible", gap=0.99),
        run(80, apart=True),
        run(50, apart=False, **failed),
        run(50, apart=True),
        run(40, apart=True),
    ]
    told(block(records, "x-recurrent.jsonl"))
