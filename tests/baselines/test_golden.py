"""Every method without a solver returns, on a few problems, the schedule that is recorded here.

`golden.json` has the number of moves, the peak and the overhead of each schedule, and a digest of
it; or that the method refuses the problem. After a change that is meant, write it anew and read the
difference::

    POETMODEL_WRITE_GOLDEN=1 python -m pytest tests/baselines/test_golden.py
"""

import hashlib
import json
import os
from functools import cache
from pathlib import Path

import pytest

import poetmodel as pm
from kit.instances import make_rng, random_costs, random_training_graph
from kit.rotation import mark_seeds_except
from poetmodel.baselines import METHODS, run
from poetmodel.errors import MethodNotApplicableError
from poetmodel.schedule import RELATIONS

FILE = Path(__file__).with_name("golden.json")
NAMES = [
    name
    for entry in METHODS.values()
    if not entry.uses_solver
    for name in (entry.name, *(f"{entry.name}:{variant}" for variant in entry.variants))
]

LONG = {
    *("checkmate-rounding", "checkmate-rounding:randomized", "capuchin"),
    *("capuchin:energy", "capuchin:time", "pofo:energy", "pofo:time", "lower-sets:pruned"),
}


@cache
def problems():
    """Return the problems by name: a chain, branches, and steps with state in RAM or not."""
    device, overlapping = pm.Device.load("nrf52840"), pm.Device.load("stm32h743")
    plain = pm.zoo.mlp(hidden=(64,) * 3, batch_size=8)
    trained = pm.zoo.mlp(hidden=(32,), state="momentum")
    rng = make_rng("golden")
    branched = random_training_graph(rng, 6)
    branched_costs = random_costs(rng, branched, idle=False)
    found = {
        name: pm.Problem(graph, pm.Costs.estimate(graph, on), ram=ram, **limits)
        for name, graph, on, ram, limits in (
            ("mlp", plain, device, "92%", {}),
            ("mlp in time", plain, overlapping, "95%", {"minimize": "time"}),
            ("momentum", trained, device, "99%", {}),
            ("momentum in RAM", trained, overlapping, "100%", {}),
        )
    }
    return found | {"branched": pm.Problem(branched, branched_costs, ram="90%")}


def describe(problem, name):
    """Return the result of a method: four numbers and a digest of its schedule, or a refusal."""
    try:
        result = run(problem, name)
    except MethodNotApplicableError:
        return {"refused": True}
    schedule = result.require_schedule()
    entries = [sorted(getattr(schedule, relation)) for relation in (*RELATIONS, "resident")]
    digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:12]
    return {
        "recomputations": len(schedule.R) - len(problem.graph.nodes),
        "page_ins": len(schedule.M_in),
        "peak_ram_bytes": result.simulation.peak_ram_bytes,
        "overhead_j": result.overhead_j,
        "digest": digest,
    }


@pytest.mark.parametrize("name", mark_seeds_except(sorted(NAMES), {*NAMES} - LONG, LONG))
def test_schedules_are_those_recorded(name):
    """The digest covers all decisions; the numbers locate a change."""
    found = {label: describe(problem, name) for label, problem in problems().items()}
    recorded = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    if os.environ.get("POETMODEL_WRITE_GOLDEN"):
        text = json.dumps({**recorded, name: found}, indent=1, sort_keys=True)
        FILE.write_text(f"{text}\n", encoding="utf-8", newline="\n")
        return
    expected = recorded[name]
    for label, outcome in found.items():
        approximate = {
            key: pytest.approx(value, rel=1e-9) if key == "overhead_j" else value
            for key, value in expected[label].items()
        }
        assert outcome == approximate, label


def test_every_method_is_recorded():
    """A removed method has no record."""
    assert sorted(json.loads(FILE.read_text(encoding="utf-8"))) == sorted(NAMES)
