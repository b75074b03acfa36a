"""``compact``: the exact model with few binaries and no big-M.

Written over `Events`: decisions exist only where they can matter. Memory is stated step by step
without a recurrence; see `docs/formulations.md` for the argument that nothing is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyomo.core as pyo

from poetmodel.model.formulation import AFTER_VARIABLES, Component, Formulation
from poetmodel.model.linear import entry
from poetmodel.model.memory import MEMORY, StepView, assign_memory
from poetmodel.model.objective import LIMITS_AND_OBJECTIVE, Decisions, add_limit
from poetmodel.model.rows import Row, covered, row_constraint
from poetmodel.problem import Quantity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.schedule import Schedule


def _variables(m: pyo.ConcreteModel) -> None:
    """Declare the decisions, all binary.

    ::

        kept[i,a]        tensor i stays in RAM from event e_a to e_(a+1):
                         S_RAM[t,i] for e_a < t <= e_(a+1)
        recomputed[t,k]  node k is recomputed in stage t: R[t,k]
        paged_in[t,i]    tensor i is paged in, in stage t: M_in[t,i]
        paged_out[i]     tensor i is paged out right after its first computation; S_AUX from then on

    What a limit or the objective wants for its own sake (a lower limit, a negative coefficient) is
    offered in every stage: recomputations, page-ins, and page-outs of whatever they are wanted of.
    """
    graph, events, wanted = m.problem.graph, m.events, m.problem.wanted
    last = len(graph.nodes) - 1
    kept = [(i, a) for i, stages in enumerate(events.events) for a in range(len(stages))]
    recomputed = [(t, k) for k, stages in enumerate(events.recompute) for t in stages]
    paged_in = [(t, i) for i, stages in enumerate(events.page_in) for t in stages]
    paged_out = [
        i
        for i, stages in enumerate(events.page_in)
        if m.problem.can_page
        and (wanted.page_out[i] or not graph.nodes[graph.node_of[i]].on_aux)
        and (wanted.page_out[i] or stages or (wanted.page_in[i] and graph.node_of[i] < last))
    ]
    m.kept = pyo.Var(kept, domain=pyo.Binary)
    m.recomputed = pyo.Var(recomputed, domain=pyo.Binary)
    m.paged_in = pyo.Var(paged_in, domain=pyo.Binary)
    m.paged_out = pyo.Var(paged_out, domain=pyo.Binary)
    m.decisions = Decisions(
        recomputations=[(k, m.recomputed[t, k]) for t, k in recomputed],
        page_ins=[(i, m.paged_in[t, i]) for t, i in paged_in],
        page_outs=[(i, m.paged_out[i]) for i in paged_out],
    )


VARIABLES = Component(
    "variables", _variables, source="POET (ICML 2022), section 5.2; events: poetmodel"
)


def sources(m: pyo.ConcreteModel, t: int, i: int) -> list[Any]:
    """Return the variables that put tensor `i` into RAM in stage (or group) `t`, an event of it."""
    k = m.problem.graph.node_of[i]
    segment = m.events.segment(i, m.events.group_of[k], t)
    found = [] if segment is None else [m.kept[i, segment]]
    if (t, k) in m.recomputed:
        found.append(m.recomputed[t, k])
    if (t, i) in m.paged_in:
        found.append(m.paged_in[t, i])
    return found


def _once(m: pyo.ConcreteModel) -> None:
    """Put a tensor into RAM at most once a stage.

    Paging in what is in RAM is not allowed; recomputing it is waste where the node makes nothing
    else, and no limit and no objective wants it recomputed::

        S_RAM[t,i] + M_in[t,i] + R[t,node(i)] <= 1    node(i) has one output and is not wanted
        S_RAM[t,i] + M_in[t,i] <= 1                   otherwise
    """
    state_once(m, [(t, i) for i, stages in enumerate(m.events.events) for t in stages])


def state_once(m: pyo.ConcreteModel, index: Sequence[tuple[int, int]]) -> None:
    """State these rows for (stage or group, tensor)."""
    graph, wanted = m.problem.graph, m.problem.wanted.compute

    def rule(t: int, i: int) -> Row | None:
        k = graph.node_of[i]
        again = entry(m.recomputed, (t, k))
        beside = len(graph.outputs_of[k]) > 1 or wanted[k] > 0
        found = [var for var in sources(m, t, i) if not (beside and var is again)]
        return Row([(1, var) for var in found], upper=1) if len(found) > 1 else None

    m.once = row_constraint(index, rule)


ONCE = Component(
    "once",
    _once,
    "poetmodel: section 5.2 of POET with page-ins that count at once",
    AFTER_VARIABLES,
)


def _keeping(m: pyo.ConcreteModel) -> None:
    """Keep on only what is in RAM.

    For every event ``t = e_a`` of a tensor after its first computation::

        kept[i,a] <= S_RAM[t,i] + R[t,node(i)] + M_in[t,i]
    """

    def rule(i: int, a: int) -> Row:
        return covered(m.kept[i, a], sources(m, m.events.events[i][a - 1], i))

    m.keeping = row_constraint([(i, a) for i, a in m.kept if a > 0], rule)


KEEPING = Component("keeping", _keeping, "POET (ICML 2022), constraint 1c", AFTER_VARIABLES)


def _from_storage(m: pyo.ConcreteModel) -> None:
    """Page in only what was paged out.

    ::

        M_in[t,i] <= paged_out[i]    i is not on storage from the start
    """
    graph = m.problem.graph

    def rule(t: int, i: int) -> Row | None:
        if graph.nodes[graph.node_of[i]].on_aux:
            return None
        return covered(m.paged_in[t, i], [m.paged_out[i]])

    m.from_storage = row_constraint(m.paged_in, rule)


FROM_STORAGE = Component(
    "from_storage", _from_storage, "POET (ICML 2022), constraints 1d and 1e", AFTER_VARIABLES
)


def _inputs(m: pyo.ConcreteModel) -> None:
    """Compute a node only when its inputs are in RAM.

    For every input `i` of node `j`, in its own stage and where it may be recomputed::

        1      <= S_RAM[j,i] + R[j,node(i)] + M_in[j,i]
        R[t,j] <= S_RAM[t,i] + R[t,node(i)] + M_in[t,i]
    """
    graph, group_of = m.problem.graph, m.events.group_of

    def first(j: int, i: int) -> Row:
        return Row([(1, var) for var in sources(m, group_of[j], i)], lower=1)

    def again(t: int, j: int, i: int) -> Row:
        return covered(m.recomputed[t, j], sources(m, t, i))

    reads = [(j, i) for j, inputs in enumerate(graph.inputs_of) for i in inputs]
    m.inputs = row_constraint(
        [(j, i) for j, i in reads if group_of[graph.node_of[i]] < group_of[j]], first
    )
    m.inputs_again = row_constraint(
        [(t, j, i) for j, i in reads for t in m.events.recompute[j]], again
    )


INPUTS = Component(
    "inputs",
    _inputs,
    "POET (ICML 2022), constraint 1b; Checkmate (MLSys 2020), equation 1b",
    AFTER_VARIABLES,
)


def _storage(m: pyo.ConcreteModel) -> None:
    """Keep within the auxiliary storage; its space is not reused.

    ::

        sum(bytes[i] * paged_out[i]) <= aux_bytes
    """
    problem = m.problem
    limit = problem.aux_limit_bytes
    if limit is None:
        return
    taken = [
        0 if problem.graph.nodes[k].on_aux else size
        for k, size in zip(problem.graph.node_of, problem.graph.tensor_bytes, strict=True)
    ]
    room = problem.quantity(Quantity.WRITES).coefficients._replace(page_out=taken)
    add_limit(m, "storage", room, limit)


STORAGE = Component(
    "storage",
    _storage,
    "poetmodel: auxiliary storage is finite and not reused within a step",
    AFTER_VARIABLES,
)

COMPACT = Formulation(
    "compact",
    (VARIABLES, ONCE, KEEPING, FROM_STORAGE, INPUTS, MEMORY, STORAGE, *LIMITS_AND_OBJECTIVE),
)


class CompactRelations(StepView):
    """Values of the paper's relations in terms of the variables of ``compact``."""

    def R(self, t: int, k: int) -> Any:
        """``R[t,k]``."""
        return self.m.one if t == k else self._or_zero(self.computed(t, k))

    def S_RAM(self, t: int, i: int) -> Any:
        """``S_RAM[t,i]``."""
        return self._or_zero(self.in_ram(t, i))

    def S_AUX(self, t: int, i: int) -> Any:  # noqa: ARG002  # on storage from the first stage on
        """``S_AUX[t,i]``."""
        stored = self.graph.nodes[self.graph.node_of[i]].on_aux
        return self.m.one if stored else entry(self.m.paged_out, i, self.m.zero)

    def M_in(self, t: int, i: int) -> Any:
        """``M_in[t,i]``."""
        return self._or_zero(self.paged_in(t, i))

    def M_out(self, t: int, i: int) -> Any:
        """``M_out[t,i]``."""
        first = t == self.graph.node_of[i]
        return entry(self.m.paged_out, i, self.m.zero) if first else self.m.zero

    def _or_zero(self, variable: Any | None) -> Any:
        return self.m.zero if variable is None else variable

    def chosen(self, value: Any) -> Iterator[tuple[str, int, int]]:
        """Yield (relation, stage, index) of every entry that holds, given a variable's value."""
        m, graph = self.m, self.graph
        yield from (("R", t, t) for t in range(len(graph.nodes)))
        yield from (("R", t, k) for (t, k), var in m.recomputed.items() if value(var))
        yield from (("M_in", t, i) for (t, i), var in m.paged_in.items() if value(var))
        for (i, a), var in m.kept.items():
            if value(var):
                yield from (("S_RAM", t, i) for t in self.stages_of(i, a))
        for i, k in enumerate(graph.node_of):
            out = i in m.paged_out and value(m.paged_out[i])
            if out:
                yield "M_out", k, i
            if out or graph.nodes[k].on_aux:
                yield from (("S_AUX", t, i) for t in range(k + 1, len(graph.nodes)))

    def assign(self, schedule: Schedule) -> Iterator[tuple[Any, float]]:
        """Yield (variable, value) of what a schedule says, as far as the variables can say it."""
        m = self.m
        entries = {name: set(getattr(schedule, name)) for name in ("R", "S_RAM", "M_in")}
        out = {i for _, i in schedule.M_out}
        values: dict[int, float] = {}
        for index, var in m.recomputed.items():
            values[id(var)] = float(index in entries["R"])
            yield var, values[id(var)]
        for (i, a), var in m.kept.items():
            held = all((t, i) in entries["S_RAM"] for t in self.stages_of(i, a))
            values[id(var)] = float(held)
            yield var, values[id(var)]
        yield from ((var, float(index in entries["M_in"])) for index, var in m.paged_in.items())
        yield from ((var, float(i in out)) for i, var in m.paged_out.items())
        yield from assign_memory(m, schedule, values)

    def stages_of(self, i: int, a: int) -> range:
        """Return the stages at whose beginning segment `a` of tensor `i` has it in RAM."""
        stages = self.m.events.events[i]
        begin = self.graph.node_of[i] if a == 0 else stages[a - 1]
        return range(begin + 1, stages[a] + 1)
