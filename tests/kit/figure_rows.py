"""Rows of a figure's cells, made up for tests."""


def row(method="optimal", ram="50%", **changes):
    """Return the row of a cell of 100 J with an overhead of 1 J, proven."""
    return {
        "model": "m",
        "device": "d",
        "ram": ram,
        "deadline": None,
        "method": method,
        "backend": None,
        "formulation": None,
        "seed": 0,
        "time_limit_s": 10.0,
        "status": "optimal",
        "reason": "",
        "termination": "proved",
        "violations": 0,
        "ram_budget_bytes": 1024 * int(ram.rstrip("%")),
        "energy_j": 101.0,
        "baseline_energy_j": 100.0,
        "overhead_j": 1.0,
        "gap": 0.0,
        "axis_gap": 0.0,
        "model_gap": None,
        "overhead_bound_j": 1.0,
        "model_value": None,
        "model_bound": None,
        "peak_ram_bytes": 1000,
        "makespan_s": 1.0,
        "build_s": 0.5,
        "solve_s": 1.5,
        "columns": 10,
        "rows": 2000,
        "nodes": 3,
        "seconds": 2.0,
    } | changes


def without(status, method="optimal", ram="50%", **changes):
    """Return the row of a cell that has no schedule."""
    names = (
        "energy_j",
        "overhead_j",
        "overhead_bound_j",
        "baseline_energy_j",
        "gap",
        "axis_gap",
        "peak_ram_bytes",
    )
    nothing = dict.fromkeys((*names, "makespan_s", "ram_budget_bytes"))
    return row(method, ram, **{**nothing, "status": status, **changes})
