"""Records as the runners of measurements write them, and pages that are made of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import make_results

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

CIRCUMSTANCES: Final = {
    "recorded": "2026-01-02T03:04:05+00:00",
    "load_average": 0.5,
    "machine": {
        "cpu": "A processor",
        "cores": 2,
        "system": "Linux",
        "python": "3.11.7",
        "versions": {"poetmodel": "0.1.0"},
    },
}
"""When and where a record was made."""
KEY: Final = ("paper/vgg16-cifar", "paper-m4", "50%")
"""Model, device and budget of `solve_record`."""


def solve_record(method: str, seconds: float, *, group: str = "main", **changes: Any) -> Any:
    """Return the record of a solve that proved an overhead of 1 % of the baseline."""
    result = {
        "problem": {"gap": 1e-4, "formulation": "compact"},
        "status": "optimal",
        "gap": 0.0,
        "violations": [],
        "overhead_j": 0.01,
        "baseline_energy_j": 1.0,
        "peak_ram_bytes": 2048,
    }
    model, device, ram = KEY
    ram = changes.pop("ram", ram)
    case = {"group": group, "model": model, "device": device, "ram": ram}
    return {
        "kind": "solve",
        "name": f"{group}-{method}-{seconds}",
        "seconds": seconds,
        **CIRCUMSTANCES,
        "case": case | {"method": {"name": method}, "limit_s": 60, "expected_overhead_ratio": None},
        "model_gap": changes.pop("model_gap", 0.0),
        "counts": {"recomputed": 1, "paged_out": 2, "paged_in": 3},
        "result": result | changes,
    }


def grid_record(**changes: Any) -> dict[str, Any]:
    """Return the record of an instance that was proved in two seconds, with some fields changed."""
    cell: dict[str, Any] = {
        "goal": 1,
        "model": "paper/bert",
        "device": "paper-m4",
        "ram": "40%",
        "deadline": None,
        "method": "default",
        "limit_s": 60.0,
        "seed": 0,
    }
    cell |= {name: changes.pop(name) for name in tuple(changes) if name in cell}
    found: dict[str, Any] = {
        "kind": "cell",
        "name": " | ".join(map(str, cell.values())),
        "cell": cell,
        "seconds": 2.0,
        "workers": 2,
        "threads": 1,
        **CIRCUMSTANCES,
        "status": "optimal",
        "reason": "",
        "gap": 0.0,
        "requested_gap": 1e-4,
        "gaps": [[0.5, 0.4], [1.0, 0.009], [2.0, 0.0]],
        "first_schedule_s": 0.5,
        "overhead_j": 0.01,
        "baseline_energy_j": 1.0,
        "ram_budget_bytes": 100,
        "floor_bytes": 50,
        "graph_nodes": 195,
        "peak_memory_bytes": 2**20,
        "violations": 0,
        "statistics": {"columns": 300, "rows": 400, "rounds": 2},
    }
    return found | changes


def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let records be read from a folder and pages be written into it; return the README."""
    readme = folder / "README.md"
    readme.write_text("A\n<!-- begin results -->\n<!-- end results -->\nB\n")
    names = ("figure2", "figure3", "figure4", "figure5", "table3", "solvers")
    blocks = "".join(f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in names)
    (folder / "paper-figures.md").write_text(f"words\n{blocks}")
    (folder / "tested.md").write_text("words\n")
    (folder / "index.md").write_text("<!-- begin claims -->\n<!-- end claims -->\n")
    places = {
        "RESULTS": "",
        "README": "README.md",
        "PAGE": "results.md",
        "GRID_PAGE": "results-grid.md",
        "FIGURES_PAGE": "paper-figures.md",
        "TRAINS_PAGE": "what-trains-where.md",
        "INDEX": "index.md",
        "TESTED_PAGE": "tested.md",
        "BOARDS_PAGE": "on-a-microcontroller.md",
    }
    for name, place in places.items():
        monkeypatch.setattr(make_results, name, folder / place)
    return readme


def write_records(folder: Path, name: str, *records: Any) -> None:
    """Write a file of records."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{name}.jsonl").write_text(text)
