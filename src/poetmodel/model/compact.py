"""``compact``: the exact model with few binaries and no big-M.

Written over `Events`: decisions exist only where they can matter. Memory is stated step by step
without a recurrence; see `docs/formulations.md` for the argument that nothing is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyomo.core as pyo

from poetmodel.model.formulation import AFTER_VARIABLES, Component, Formulation
from poetmodel.model.homes import assigned_homes, declare_homes
from poetmodel.model.linear import entry
from poetmodel.model.memory import MEMORY, StepView, assign_memory
from poetmodel.model.objective import LIMITS_AND_OBJECTIVE, Decisions, add_limit
from poetmodel.model.rows import covered, row_constraint
from poetmodel.problem import LinearRow, Quantity, over_totals

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
        resident[w]      state tensor w has its home in RAM, else on storage (storage_home[w])

    What a limit or the objective wants for its own sake (a lower limit, a negative coefficient) is
    offered in every stage: recomputations, page-ins, and page-outs of whatever they are wanted of.
    """
    graph, events, wanted = m.problem.working_graph, m.events, m.problem.wanted
    last = len(graph.nodes) - 1
    kept = [(i, a) for i, stages in enumerate(events.events) for a in range(len(stages))]
    recomputed = [(t, k) for k, stages in enumerate(events.recompute) for t in stages]
    paged_in = [(t, i) for i, stages in enumerate(events.page_in) for t in stages]
    paged_out = [
        i
        for i, stages in enumerate(events.page_in)
        if m.problem.can_page
        and (wanted.page_out[i] or i not in graph.on_aux)
        and (wanted.page_out[i] or stages or (wanted.page_in[i] and graph.node_of[i] < last))
    ]
    m.kept = pyo.Var(kept, domain=pyo.Binary)
    m.recomputed = pyo.Var(recomputed, domain=pyo.Binary)
    m.paged_in = pyo.Var(paged_in, domain=pyo.Binary)
    m.paged_out = pyo.Var(paged_out, domain=pyo.Binary)
    declare_homes(m)
    m.decisions = Decisions(
        recomputations=[(k, m.recomputed[t, k]) for t, k in recomputed],
        page_ins=[(i, m.paged_in[t, i]) for t, i in paged_in],
        page_outs=[(i, m.paged_out[i]) for i in paged_out],
        storage_homes=list(m.storage_home.items()),
    )


VARIABLES = Component(
    "variables", _variables, source="POET (ICML 2022), section 5.2; events: poetmodel"
)


def sources(m: pyo.ConcreteModel, t: int, i: int) -> list[Any]:
    """Return the variables that put tensor `i` into RAM in stage (or group) `t`, an event of it."""
    k = m.problem.working_graph.node_of[i]
    segment = m.events.segment(i, m.events.group_of[k], t)
    found = [] if segment is None else [m.kept[i, segment]]
    if (t, k) in m.recomputed:
        found.append(m.recomputed[t, k])
    if (t, i) in m.paged_in:
        found.append(m.paged_in[t, i])
    return found


def present(m: pyo.ConcreteModel, t: int, i: int) -> list[Any]:
    """Return the variables of which one must hold for a step of stage or group `t` to read `i`."""
    home = [m.resident[i]] if i in m.resident else []
    return sources(m, t, i) + home


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
    graph, wanted = m.problem.working_graph, m.problem.wanted.compute

    def rule(t: int, i: int) -> LinearRow | None:
        k = graph.node_of[i]
        again = entry(m.recomputed, (t, k))
        beside = len(graph.outputs_of[k]) > 1 or wanted[k] > 0
        found = [var for var in sources(m, t, i) if not (beside and var is again)]
        return LinearRow.of([(1, var) for var in found], upper=1) if len(found) > 1 else None

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

    State that is surely there may be so because it is resident: there is no row then.
    """

    def rule(i: int, a: int) -> LinearRow | None:
        if i in m.resident and (i, a) in m.events.kept:
            return None
        return covered(m.kept[i, a], sources(m, m.events.events[i][a - 1], i))

    m.keeping = row_constraint([(i, a) for i, a in m.kept if a > 0], rule)


def _homes_kept(m: pyo.ConcreteModel) -> None:
    """Keep no copy of resident state.

    ::

        kept[w,0] <= 1 - resident[w]
    """
    m.homes_kept = row_constraint(
        [(i, 0) for i in m.storage_home if (i, 0) in m.kept],
        lambda i, a: covered(m.kept[i, a], [m.storage_home[i]]),
    )
    for i in m.resident:
        if i not in m.storage_home and (i, 0) in m.kept:
            m.kept[i, 0].fix(0)


HOMES_KEPT = Component(
    "homes_kept", _homes_kept, "poetmodel: resident state needs no copy", AFTER_VARIABLES
)


KEEPING = Component("keeping", _keeping, "POET (ICML 2022), constraint 1c", AFTER_VARIABLES)


def _from_storage(m: pyo.ConcreteModel) -> None:
    """Page in only what was paged out.

    ::

        M_in[t,i] <= paged_out[i]         i is not on storage from the start
        M_in[t,i] <= 1 - resident[i]      i is state
    """
    graph = m.problem.working_graph

    def rule(t: int, i: int) -> LinearRow | None:
        if i in m.storage_home:
            return covered(m.paged_in[t, i], [m.storage_home[i]])
        if i in graph.on_aux:
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

    Resident state is in RAM: of state `w` the right-hand sides have ``+ resident[w]``.
    """
    graph, group_of = m.problem.working_graph, m.events.group_of

    def first(j: int, i: int) -> LinearRow:
        return LinearRow.of([(1, var) for var in present(m, group_of[j], i)], lower=1)

    def again(t: int, j: int, i: int) -> LinearRow:
        return covered(m.recomputed[t, j], present(m, t, i))

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

    State that is not resident takes room there, and what replaces it no more::

        sum(bytes[i] * paged_out[i]) + sum(bytes[w] * (1 - resident[w])) <= aux_bytes
    """
    problem = m.problem
    limit = problem.aux_limit_bytes
    if limit is None:
        return
    graph = problem.graph
    taken = [
        0 if stored else size
        for stored, size in zip(graph.starts_on_storage, graph.tensor_bytes, strict=True)
    ]
    state = set(graph.state_tensors)
    homes = [size if i in state else 0 for i, size in enumerate(graph.tensor_bytes)]
    writes = problem.quantity(Quantity.WRITES).coefficients
    room = writes._replace(page_out=taken, storage_home=homes)
    add_limit(m, over_totals(problem, room, name="storage", upper=limit))


STORAGE = Component(
    "storage",
    _storage,
    "poetmodel: auxiliary storage is finite and not reused within a step",
    AFTER_VARIABLES,
)

COMPACT = Formulation(
    "compact",
    (
        VARIABLES,
        ONCE,
        KEEPING,
        HOMES_KEPT,
        FROM_STORAGE,
        INPUTS,
        MEMORY,
        STORAGE,
        *LIMITS_AND_OBJECTIVE,
    ),
)


class CompactRelations(StepView):
    """Values of the paper's relations in terms of the variables of ``compact``."""

    def R(self, t: int, k: int) -> Any:
        """``R[t,k]``."""
        return self.m.one if t == k else self._or_zero(self.computed(t, k))

    def S_RAM(self, t: int, i: int) -> Any:
        """``S_RAM[t,i]``."""
        return self._or_zero(self.in_ram(t, i))

    def S_AUX(self, t: int, i: int) -> Any:
        """``S_AUX[t,i]``."""
        if i in self.m.resident:
            home = entry(self.m.storage_home, i, self.m.zero)
            return home if t <= self.problem.graph.last_page_in(i) else self.m.zero
        if i in self.graph.on_aux:
            return self.m.one
        return entry(self.m.paged_out, i, self.m.zero)

    def M_in(self, t: int, i: int) -> Any:
        """``M_in[t,i]``."""
        return self._or_zero(self.paged_in(t, i))

    def M_out(self, t: int, i: int) -> Any:
        """``M_out[t,i]``."""
        if t != self.graph.node_of[i]:
            return self.m.zero
        old = self.problem.graph.state_of.get(i)
        if old is not None:
            return entry(self.m.storage_home, old, self.m.zero)
        return entry(self.m.paged_out, i, self.m.zero)

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
            if out or (i in graph.on_aux and i not in m.resident):
                yield from (("S_AUX", t, i) for t in range(k + 1, len(graph.nodes)))
        for i, var in m.storage_home.items():
            if value(var):
                k = graph.node_of[i]
                last = self.problem.graph.last_page_in(i)
                yield from (("S_AUX", t, i) for t in range(k + 1, last + 1))
                new = self.problem.graph.replacement_of.get(i)
                if new is not None:
                    yield "M_out", last, new

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
        for index, var in m.paged_in.items():
            values[id(var)] = float(index in entries["M_in"])
            yield var, values[id(var)]
        yield from ((var, float(i in out)) for i, var in m.paged_out.items())
        yield from assigned_homes(m, schedule, values)
        yield from assign_memory(m, schedule, values)

    def stages_of(self, i: int, a: int) -> range:
        """Return the stages at whose beginning segment `a` of tensor `i` has it in RAM."""
        stages = self.m.events.events[i]
        begin = self.graph.node_of[i] if a == 0 else stages[a - 1]
        return range(begin + 1, stages[a] + 1)
