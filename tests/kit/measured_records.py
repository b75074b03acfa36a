"""Records as the runners of measurements write them, and pages that are made of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import constraints
import make_results
import what_trains_where
from mcu import boards

if TYPE_CHECKING:
    from collections.abc import Iterable
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
KIB: Final = 1024
MEBI: Final = 2**20
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


def _taken(fields: dict[str, Any], changes: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return fields with the changes of some names, which are taken out of the changes."""
    return fields | {name: changes.pop(name) for name in names if name in changes}


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
    cell = _taken(cell, changes, tuple(cell))
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


def own_record(form: str, own: str = "few", **changes: Any) -> dict[str, Any]:
    """Return the record of a solve with a constraint, or without it, proved in two seconds."""
    found = grid_record(**{"requested_gap": 0.01, "stated_s": 0.25, "build_s": 0.5} | changes)
    found["cell"] |= {"own": own, "text": "", "form": form}
    return found | {"kind": constraints.KIND, "name": f"{found['name']} | {own} | {form}"}


def step_record(part: str = what_trains_where.BOARDS, **changes: Any) -> dict[str, Any]:
    """Return the record of a step that was proved in two seconds, with some fields changed."""
    fields = {
        "network": "resnet8",
        "graph": what_trains_where.TILES,
        "device": what_trains_where.MAPPED,
    }
    names = set(what_trains_where.StepRun.__dataclass_fields__) - {"gap"}
    fields = _taken(fields, changes, names)
    run = what_trains_where.StepRun(part=part, **fields)
    found: dict[str, Any] = {
        "kind": what_trains_where.KIND,
        "name": run.name,
        "cell": run.to_dict(),
        **CIRCUMSTANCES,
        "seconds": 2.0,
        "cpu_s": 1.5,
        "status": "optimal",
        "reason": "",
        "gap": 0.0,
        "objective_value": 200 * KIB,
        "objective_bound": 200 * KIB,
        "overhead_j": 0.5,
        "baseline_energy_j": 1.0,
        "energy_j": 1.5,
        "time_s": 6.0,
        "pass_s": 2.0,
        "peak_ram_bytes": 190 * KIB,
        "written_bytes": 80 * KIB,
        "steps_until_worn": 1_500_000.0,
        "ram_budget_bytes": 300 * KIB,
        "floor_bytes": 180 * KIB,
        "keep_all_bytes": 900 * KIB,
        "state_bytes": 300 * KIB,
        "graph_nodes": 182,
    }
    return found | changes


def board_record(part: str = boards.BOARD, **changes: Any) -> dict[str, Any]:
    """Return the record of a network that trains, with some fields changed."""
    fields = {
        "network": "ds-cnn",
        "board": "nrf52840",
        "ram": None if part == boards.BOARD else boards.ROOMY,
    }
    fields = _taken(fields, changes, tuple(fields))
    run = boards.BoardRun(part=part, **fields)
    found: dict[str, Any] = {
        "kind": boards.KIND,
        "name": run.name,
        "cell": run.to_dict(),
        **CIRCUMSTANCES,
        "seconds": 2.0,
        "tools": {"a compiler": "its version"},
        "status": boards.YES,
        "reason": "",
        "tried": [{"tile": None, "answer": boards.YES, "reason": "", "seconds": 1.0}],
        "gap": 0.25,
        "recomputations": 7,
        "read_bytes": 3 * KIB,
        "written_bytes": 5 * KIB,
        "transfer_s": 0.5,
        "transfer_j": 0.02,
        "steps_until_worn": None,
        "resident_state_bytes": 90 * KIB,
        "arena_bytes": 200 * KIB,
        "arena_bound_bytes": 160 * KIB,
        "ram_bytes": 210 * KIB,
        "stack_bytes": KIB,
        "stack_limit_bytes": 2 * KIB,
        "input_bytes": 6 * KIB,
        "runtime_bytes": 2 * KIB,
        "flash_bytes": 140 * KIB,
        "weight_bytes": 100 * KIB,
        "state_sha256": "a",
        "instructions": 64_000_000,
        "clock_hz": 64e6,
        "power_w": 0.01,
        "nodes": [
            {"node": "a", "kernel": "pm_mm", "macs": 100, "instructions": 500},
            {"node": "b", "kernel": "pm_mm", "macs": 300, "instructions": 3900},
        ],
    }
    return found | changes


def aifes_record(**changes: Any) -> dict[str, Any]:
    """Return the record of AIfES beside exported steps, with some fields changed."""
    ours = {
        "instructions": 25_000,
        "ram_bytes": 4 * KIB,
        "stack_bytes": 480,
        "flash_bytes": 9 * KIB,
        "losses": [1.5, 1.25],
        "arena_bytes": 3 * KIB,
        "solved": "optimal",
        "gap": 0.0,
    }
    theirs = {"instructions": 100_000, "ram_bytes": 10 * KIB, "stack_bytes": 2 * KIB}
    network = changes.pop("network", "perceptron")
    found: dict[str, Any] = {
        "kind": "aifes",
        "name": network,
        "cell": {"network": network},
        **CIRCUMSTANCES,
        "seconds": 2.0,
        "limit_s": 60.0,
        "batch": 1,
        "input_shape": [3, 4],
        "layers": ["dense 2"],
        "parameters": 26,
        "step_macs": 5000,
        "steps": 2,
        "loss_difference": 1.25e-7,
        "programs": {
            "keep_all": ours,
            "least_ram": ours | {"instructions": 30_000, "ram_bytes": 2 * KIB},
            "aifes": theirs | {"flash_bytes": 8 * KIB, "losses": [1.5, 1.25]},
        },
        "aifes": {"version": "2.2.0", "sha256": "a"},
        "tools": {"a compiler": "its version"},
    }
    return found | changes


def training_record(
    method: str = "both", share: float | None = None, **changes: Any
) -> dict[str, Any]:
    """Return the record of a compiled step that took as long as eager, with some fields changed."""
    cell = {
        "network": "unet-b8",
        "method": method,
        "share": share,
        "limit_s": 30.0,
        "pairs": 3,
        "seed": 0,
        "slack": 0.0,
    }
    found: dict[str, Any] = {
        "kind": "training",
        "name": f"unet-b8 | {method} | {share}",
        "cell": cell,
        "seconds": 9.0,
        "torch": "2.9.0+cpu",
        **CIRCUMSTANCES,
        "status": "optimal",
        "reason": "",
        "gap": 0.005,
        "solve_s": 1.5,
        "heap_peak_bytes": 20 * MEBI,
        "eager_heap_peak_bytes": 40 * MEBI,
        "keep_all_bytes": 40 * MEBI,
        "budget_bytes": 20 * MEBI,
        "floor_bytes": 10 * MEBI,
        "written_bytes": 0,
        "pairs": [[1.0, 1.0, 1.0, 1.0], [1.2, 1.1, 1.0, 1.0], [9.0, 1.3, 1.0, 1.0]],
        "unequal_gradients": 0,
        "unequal_buffers": 0,
        "equal": True,
    }
    return found | changes


def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let records be read from a folder and pages be written into it; return the README."""
    readme = folder / "README.md"
    parts = (
        f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in ("results", "boards", "solvers")
    )
    readme.write_text(f"A\n{''.join(parts)}B\n")
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
        "BUILT_IN_PAGE": "built-in-steps.md",
        "INDEX": "index.md",
        "TESTED_PAGE": "tested.md",
        "TRAINS_PAGE": "what-trains-where.md",
        "COMPARED_PAGE": "compared.md",
    }
    for name, place in places.items():
        monkeypatch.setattr(make_results, name, folder / place)
    return readme


def write_records(folder: Path, name: str, *records: Any) -> None:
    """Write a file of records."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{name}.jsonl").write_text(text)
