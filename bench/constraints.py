"""Own constraints: some instances of the grid, each with constraints of a user's own, and without.

A constraint is what a user would write into the file of ``--constraints``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import poetmodel as pm
from grid import PROFILE, SMOKE_LIMIT_S, Instance, InstanceRun, measure
from harness import Study, warm_up
from poetmodel.problem.io import parse_constraints

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyomo.environ as pyo

    from poetmodel.bench.measurement import Record
    from poetmodel.problem import Problem

KIND: Final = "own constraint"
"""Kind of the records."""
GAP: Final = 0.01
"""Gap at which a solve is done."""

WITHOUT: Final = "without"
"""The same instance without the constraint."""
TOTALS: Final = "totals"
"""Stated over the totals of a schedule, and solved by default."""
MODEL: Final = "model"
"""Stated on a model made by `pm.build`, over the decisions of all stages."""


# -- constraints -----------------------------------------------------------------------------------


def most(key: str, limit: int, of: int) -> tuple[str, str]:
    """Return name and text of an upper limit: so many `of` those of the best schedule without."""
    what = key.removesuffix(":*").replace("_", "-" if key.startswith("page") else " ")
    text = f'[[constraint]]\nsum = {{"{key}" = 1}}\nat_most = {limit}\n'
    return f"at most {limit:,} of {of:,} {what}", text


def equal(key: str, blocks: Sequence[int]) -> tuple[str, str]:
    """Return name and text of equal decisions on the same node or tensor of some blocks."""
    first, *others = map(key.format, blocks)
    rows = (
        f'[[constraint]]\nsum = {{"{first}" = 1, "{other}" = -1}}\nequals = 0\n' for other in others
    )
    return f"equal `{key.format('N')}` for {len(blocks)} blocks", "".join(rows)


ONCE: Final = (
    "at most one recomputation of each node",
    '[[constraint]]\neach = "recomputations:*"\nat_most = 1\n',
)
"""Name and text of a row for each node."""
WEAR: Final = (
    "energy and 10 nJ of wear for each byte written",
    '[objective]\nsum = {"energy_j" = 1, "bytes_written" = 1e-8}\n',
)
"""Name and text of an own objective."""

_OWN: Final = (
    (
        Instance(goal=2, model="resnet18-cifar", device="rpi4b", ram="50%"),
        most("page_outs:*", 3, of=6),
        most("bytes_written", 141_312, of=282_624),
        most("bytes_read", 141_312, of=282_624),
        most("recomputations:*", 18, of=36),
        ONCE,
        WEAR,
    ),
    (
        Instance(goal=2, model="resnet50", device="rpi4b", ram="70%"),
        most("recomputations:*", 41, of=83),
        WEAR,
    ),
    (
        Instance(goal=2, model="bert-base", device="rpi4b", ram="50%"),
        most("page_outs:*", 5, of=11),
        most("bytes_written", 8_257_536, of=16_515_072),
        most("bytes_read", 8_257_536, of=16_515_072),
        most("recomputations:*", 19, of=39),
        equal("page_outs:block{}.ffn.linear1", range(12)),
        equal("recomputations:block{}.ffn.norm", range(12)),
        WEAR,
    ),
    (
        Instance(goal=2, model="mobilenetv2", device="rpi4b", ram="35%"),
        most("page_outs:*", 1, of=2),
        most("bytes_written", 2_411_008, of=4_822_016),
        most("bytes_read", 4_819_456, of=9_638_912),
        most("recomputations:*", 51, of=103),
        WEAR,
    ),
    (
        Instance(goal=3, model="traced/bert4-b8", device=PROFILE, ram="50%"),
        most("recomputations:*", 19, of=39),
        equal("recomputations:encoder.{}.attention.value/addmm", range(4)),
        WEAR,
    ),
)
"""Instances, each with its constraints. What they limit is that of the best schedule without them,
proved to 0.01 %: half of it, and where no schedule has that little, the least tenth that one has.
"""


# -- runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRun(InstanceRun):
    """One instance, solved with a constraint or without it."""

    own: str
    """Name of the constraint."""
    text: str
    """The constraint, as in a file."""
    form: str = TOTALS
    """How it is stated: `WITHOUT`, `TOTALS` or `MODEL`."""

    @property
    def name(self) -> str:
        """What it is called in the records."""
        return f"{self.instance.name} | {self.own} | {self.form}"

    def stated(self, problem: Problem) -> Problem | pyo.ConcreteModel:
        """Return what is solved in place of the instance's problem."""
        if self.form == WITHOUT:
            return problem
        own = parse_constraints(self.text, problem, source=self.own)
        return own if self.form == TOTALS else on_model(problem, own)


def on_model(problem: Problem, own: Problem) -> pyo.ConcreteModel:
    """Return a model with the first constraint, that counts all page-outs or recomputations."""
    import pyomo.environ as pyo

    model, row = pm.build(problem), own.constraints[0]
    counted = list(model.M_out.values())
    if next(iter(row.terms)).startswith("recomputations:"):
        counted = [computed for (t, k), computed in model.R.items() if k < t]
    model.own = pyo.Constraint(expr=sum(counted) <= row.upper)
    return model


def runs() -> Iterator[OwnRun]:
    """Yield all runs: each constraint right after the instance without it."""
    for instance, *constraints in _OWN:
        for place, (own, text) in enumerate(constraints):
            for form in (WITHOUT, TOTALS, *([MODEL] if place == 0 else [])):
                yield OwnRun(instance=instance, own=own, text=text, form=form)


def smoke_runs() -> Iterator[OwnRun]:
    """Yield every kind of constraint, and each form, at its smallest size."""
    small = Instance(
        goal=1, model="paper/linear", device="paper-a72", ram="50%", limit_s=SMOKE_LIMIT_S
    )
    kinds = (most("recomputations:*", 2, of=4), equal("page_outs:relu{}", (1, 2)), ONCE, WEAR)
    for own, text in kinds:
        yield OwnRun(instance=small, own=own, text=text)
    (own, text), *_ = kinds
    for form in (WITHOUT, MODEL):
        yield OwnRun(instance=small, own=own, text=text, form=form)


def measure_own(fields: dict[str, Any], _start: None = None) -> Record:
    """Solve an instance as a run states it and return its record."""
    warm_up()
    run = OwnRun.of(fields)
    found = measure(run.instance.to_dict(), gap=GAP, stated=run.stated)
    return {**found, "kind": KIND, "name": run.name, "cell": fields}


STUDY: Final = Study(
    name="constraints", kind=KIND, runs=runs, smoke_runs=smoke_runs, measure=measure_own
)
