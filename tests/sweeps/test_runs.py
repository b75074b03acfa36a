"""Keys and cells of runs, as records of earlier sweeps have them."""

import json

import pytest

from poetmodel.graph.catalogue import Variant
from poetmodel.sweeps import Run, Settings, grid

CONSTRAINTS = '[[constraint]]\nname = "writes"\nsum = { bytes_written = 1 }\nat_most = 9e9\n'
SETTINGS = Settings(
    deadline_counts="compute",
    time_limit_s=5.0,
    gap=0.01,
    threads=2,
    seed=3,
    constraints=CONSTRAINTS,
    commit=4,
)
PLAIN_CELL = {
    "model": "mlp",
    "device": "mkr1000",
    "ram": "70%",
    "deadline": None,
    "method": "optimal",
    "backend": "highs",
    "formulation": None,
    "settings": {
        "deadline_counts": None,
        "time_limit_s": 60.0,
        "gap": 0.0001,
        "threads": 1,
        "seed": 0,
    },
    "inputs": "b72c93347d65e291",
}
FULL_CELL = PLAIN_CELL | {
    "batch": 2,
    "state": "momentum",
    "in_place": True,
    "deadline": "200%",
    "backend": "scip",
    "formulation": "compact",
    "settings": {
        "deadline_counts": "compute",
        "time_limit_s": 5.0,
        "gap": 0.01,
        "threads": 2,
        "seed": 3,
        "constraints": CONSTRAINTS,
        "commit": 4,
    },
    "inputs": "fecd68eb8f3361d3",
}
RECORDED = {
    "plain": ({}, PLAIN_CELL, "c42d5e39457879d0f2fb"),
    "method": (
        {"methods": ["chen-sqrt"]},
        PLAIN_CELL | {"method": "chen-sqrt", "backend": None},
        "f32178675b50a8288ceb",
    ),
    "full": (
        {
            "settings": SETTINGS,
            "shapes": [Variant(batch=2, state="momentum", in_place=True)],
            "deadlines": ["200%"],
            "formulations": ["compact"],
            "backends": ["scip"],
        },
        FULL_CELL,
        "42a31117675ab546e470",
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_keys_of_earlier_records_are_found_again(name):
    """The cell of a record, its key, and the run that is read from it."""
    axes, cell, key = RECORDED[name]
    (run,) = grid(["mlp"], ["mkr1000"], ram=["70%"], **axes)
    assert (run.to_dict(), run.key) == (cell, key)
    assert Run.from_dict(json.loads(json.dumps(cell))) == run
