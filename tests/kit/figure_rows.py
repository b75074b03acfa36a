"""Rows of figures: the records of their cells, with synthetic values."""


def make_row(method="optimal", ram="50%", **changes):
    """Return the row of a cell solved to optimality: baseline 100 J, overhead 1 J.

    `ram` is a percentage; `changes` replace fields of the row.
    """
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


def make_row_without_schedule(status, method="optimal", ram="50%", **changes):
    """Return the row of a cell without a schedule: its metrics of schedules are None."""
    names = (
        "energy_j",
        "overhead_j",
        "overhead_bound_j",
        "baseline_energy_j",
        "gap",
        "axis_gap",
        "peak_ram_bytes",
    )
    absent = dict.fromkeys((*names, "makespan_s", "ram_budget_bytes"))
    return make_row(method, ram, **{**absent, "status": status, **changes})
