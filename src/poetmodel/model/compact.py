"""``compact``: the exact model with few binaries and no big-M.

Its decisions exist only at `Events`, where they can matter. Memory is stated step by step without a
recurrence; `docs/concepts/formulations.md` proves that no optimum is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.model.decisions import Decisions
from poetmodel.model.formulation import AFTER_VARIABLES, Component, Formulation
from poetmodel.model.linear import scale_and_register_limit
from poetmodel.model.memory import MEMORY, StepView
from poetmodel.model.objective import LIMITS_AND_OBJECTIVE, add_limit
from poetmodel.problem import LinearRow, Quantity, row_over_totals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.model.arrays import Model


def declare_homes(m: Model) -> None:
    """Declare the homes of state; without paging they are in RAM.

    ::

        resident[w] + storage_home[w] = 1
    """
    problem = m.problem
    state = problem.graph.state_tensors
    m.add_variables("resident", state)
    m.add_variables("storage_home", state if problem.can_page else ())
    m.begin_rows("home")
    for i, column in m.storage_home.items():
        m.add_row(i, (m.resident[i], column), (1.0, 1.0), lower=1.0, upper=1.0)
    for i, column in m.resident.items():
        if i not in m.storage_home:
            m.fixed[column] = 1.0


def _declare_decisions(m: Model) -> None:
    """Declare the decisions, all binary.

    ::

        kept[i,a]        tensor i stays in RAM from event e_a to e_(a+1):
                         S_RAM[t,i] for e_a < t <= e_(a+1)
        recomputed[t,k]  node k is recomputed in stage t: R[t,k]
        paged_in[t,i]    tensor i is paged in, in stage t: M_in[t,i]
        paged_out[i]     tensor i is paged out right after its first computation; S_AUX from then on
        resident[w]      the home of state tensor w is RAM, else storage (storage_home[w])

    Decisions that a limit or the objective rewards (a lower limit, a negative coefficient) exist in
    every stage: recomputations, page-ins, and page-outs of all tensors that are rewarded.
    """
    graph, events, rewards = m.problem.working_graph, m.events, m.problem.rewards
    last = len(graph.nodes) - 1
    kept = [(i, a) for i, stages in enumerate(events.events) for a in range(len(stages))]
    recomputed = [(t, k) for k, stages in enumerate(events.recompute) for t in stages]
    paged_in = [(t, i) for i, stages in enumerate(events.page_in) for t in stages]
    paged_out = [
        i
        for i, stages in enumerate(events.page_in)
        if m.problem.can_page
        and (rewards.page_out[i] or i not in graph.on_aux)
        and (rewards.page_out[i] or stages or (rewards.page_in[i] and graph.node_of[i] < last))
    ]
    m.add_variables("kept", kept)
    m.add_variables("recomputed", recomputed)
    m.add_variables("paged_in", paged_in)
    m.add_variables("paged_out", paged_out)
    declare_homes(m)
    m.decisions = Decisions(
        recomputations=[(k, column) for (_, k), column in m.recomputed.items()],
        page_ins=[(i, column) for (_, i), column in m.paged_in.items()],
        page_outs=list(m.paged_out.items()),
        storage_homes=list(m.storage_home.items()),
    )


VARIABLES = Component(
    "variables", _declare_decisions, source="POET (ICML 2022), section 5.2; events: poetmodel"
)


def source_columns(m: Model, t: int, i: int) -> list[int]:
    """Return the columns that bring tensor `i` into RAM in `t`, one of its events.

    `t` is a stage, or a group of stages in a relaxation.
    """
    k = m.problem.working_graph.node_of[i]
    segment = m.events.segment(i, m.events.group_of[k], t)
    columns = [] if segment is None else [m.kept[i, segment]]
    if (t, k) in m.recomputed:
        columns.append(m.recomputed[t, k])
    if (t, i) in m.paged_in:
        columns.append(m.paged_in[t, i])
    return columns


def presence_columns(m: Model, t: int, i: int) -> list[int]:
    """Return the columns that can bring or keep tensor `i` in RAM in `t`, a stage or group.

    At least one of them must be 1 if a step of `t` reads the tensor.
    """
    home = [m.resident[i]] if i in m.resident else []
    return source_columns(m, t, i) + home


def _add_once_rows(m: Model) -> None:
    """Bring a tensor into RAM at most once per stage.

    A tensor in RAM must not be paged in. Recomputing it is useless if its node makes no other
    tensor, and no limit and no objective rewards the recomputation::

        S_RAM[t,i] + M_in[t,i] + R[t,node(i)] <= 1    node(i) has one output and no reward
        S_RAM[t,i] + M_in[t,i] <= 1                   otherwise

    The same holds in a group of stages. But if page-ins of a tensor are rewarded, a group of
    several stages has no row for it: the tensor may be freed in one stage for a recomputation, and
    paged in again.
    """
    graph, rewards, grouping = m.problem.working_graph, m.problem.rewards, m.grouping
    longer_groups = {
        group
        for group, last in enumerate(grouping.last_stage)
        if grouping.first_stage[group] < last
    }
    m.begin_rows("once")
    for i, groups in enumerate(m.events.events):
        k = graph.node_of[i]
        may_recompute_present = len(graph.outputs_of[k]) > 1 or rewards.compute[k] > 0
        for group in groups:
            if group in longer_groups and rewards.page_in[i]:
                continue
            columns = source_columns(m, group, i)
            if may_recompute_present:
                recomputation = m.recomputed.get((group, k))
                columns = [column for column in columns if column != recomputation]
            if len(columns) > 1:
                m.add_row((group, i), columns, [1.0] * len(columns), upper=1.0)


ONCE = Component(
    "once",
    _add_once_rows,
    "poetmodel: section 5.2 of POET, but a page-in occupies RAM in its own stage",
    AFTER_VARIABLES,
)


def _add_keeping_rows(m: Model) -> None:
    """Keep only a tensor that is in RAM.

    For every event ``t = e_a`` of a tensor after its first computation::

        kept[i,a] <= S_RAM[t,i] + R[t,node(i)] + M_in[t,i]

    There is no row for a free keep (`Events.kept`) of state: the state may be in RAM because it is
    resident.
    """
    m.begin_rows("keeping")
    for (i, a), column in m.kept.items():
        if a > 0 and not (i in m.resident and (i, a) in m.events.kept):
            m.add_implication_row((i, a), column, source_columns(m, m.events.events[i][a - 1], i))


def _add_home_rows(m: Model) -> None:
    """Keep no copy of resident state.

    ::

        kept[w,0] <= 1 - resident[w]
    """
    m.begin_rows("homes_kept")
    for i, home in m.storage_home.items():
        if (i, 0) in m.kept:
            m.add_implication_row((i, 0), m.kept[i, 0], [home])
    for i in m.resident:
        if i not in m.storage_home and (i, 0) in m.kept:
            m.fixed[m.kept[i, 0]] = 0.0


HOMES_KEPT = Component(
    "homes_kept", _add_home_rows, "poetmodel: resident state needs no copy", AFTER_VARIABLES
)


KEEPING = Component(
    "keeping", _add_keeping_rows, "POET (ICML 2022), constraint 1c", AFTER_VARIABLES
)


def _add_from_storage_rows(m: Model) -> None:
    """Page in only tensors that were paged out, and state whose home is storage.

    ::

        M_in[t,i] <= paged_out[i]         i is not on storage from the start
        M_in[t,i] <= 1 - resident[i]      i is state
    """
    graph = m.problem.working_graph
    m.begin_rows("from_storage")
    for (t, i), column in m.paged_in.items():
        if i in m.storage_home:
            m.add_implication_row((t, i), column, [m.storage_home[i]])
        elif i not in graph.on_aux:
            m.add_implication_row((t, i), column, [m.paged_out[i]])


FROM_STORAGE = Component(
    "from_storage",
    _add_from_storage_rows,
    "POET (ICML 2022), constraints 1d and 1e",
    AFTER_VARIABLES,
)


def _add_input_rows(m: Model) -> None:
    """Compute a node only if its inputs are in RAM.

    For every input `i` of node `j`, in its own stage and wherever it may be recomputed::

        1      <= S_RAM[j,i] + R[j,node(i)] + M_in[j,i]
        R[t,j] <= S_RAM[t,i] + R[t,node(i)] + M_in[t,i]

    Resident state is in RAM: for state `w`, the right-hand sides include ``+ resident[w]``.
    """
    graph, group_of = m.problem.working_graph, m.events.group_of
    reads = [(j, i) for j, inputs in enumerate(graph.inputs_of) for i in inputs]
    m.begin_rows("inputs")
    for j, i in reads:
        if group_of[graph.node_of[i]] < group_of[j]:
            columns = presence_columns(m, group_of[j], i)
            m.add_row((j, i), columns, [1.0] * len(columns), lower=1.0)
    m.begin_rows("inputs_again")
    for j, i in reads:
        for t in m.events.recompute[j]:
            m.add_implication_row((t, j, i), m.recomputed[t, j], presence_columns(m, t, i))


INPUTS = Component(
    "inputs",
    _add_input_rows,
    "POET (ICML 2022), constraint 1b; Checkmate (MLSys 2020), equation 1b",
    AFTER_VARIABLES,
)


def _add_storage_rows(m: Model) -> None:
    """Limit the auxiliary storage, whose space is not reused.

    State that is not resident uses storage; its replacement uses the same space::

        sum(bytes[i] * paged_out[i]) + sum(bytes[w] * (1 - resident[w])) <= aux_bytes
    """
    problem = m.problem
    limit = problem.aux_limit_bytes
    if limit is None:
        return
    graph = problem.graph
    sizes = [
        0 if is_stored else size
        for is_stored, size in zip(graph.starts_on_storage, graph.tensor_bytes, strict=True)
    ]
    state = set(graph.state_tensors)
    homes = [size if i in state else 0 for i, size in enumerate(graph.tensor_bytes)]
    writes = problem.make_objective(Quantity.WRITES).coefficients
    coefficients = writes._replace(page_out=sizes, storage_home=homes)
    add_limit(m, row_over_totals(problem, coefficients, name="storage", upper=limit))


STORAGE = Component(
    "storage",
    _add_storage_rows,
    "poetmodel: auxiliary storage is finite and not reused within a step",
    AFTER_VARIABLES,
)


def _add_stage_limits(m: Model) -> None:
    """Add the rows of the per-stage user constraints; a relaxation adds only those it enforces.

    Groups end where coefficients of such a constraint change, so it has equal coefficients in all
    stages of a group. `l` is a group; with groups of one stage, the stage::

        sum(coefficient * recomputed[l,k]) + sum(coefficient * paged_in[l,i])  <=  upper
    """
    add_stage_limit_rows(m, StepView(m), m.grouping.own_rows)


def add_stage_limit_rows(m: Model, view: StepView, positions: Iterable[int]) -> None:
    """Add the rows of some per-stage user constraints.

    `positions` are their positions in `Problem.stage_limits`; `view` gives the columns.
    """
    columns = {"recomputed": view.computed, "paged_in": view.paged_in}
    m.begin_rows("stage_limits")
    for position in sorted(positions):
        row = m.problem.stage_limits[position]
        if row.upper < 0:
            m.add_infeasible_row(position)
            continue
        stated_terms = (
            (value, columns[family](*index)) for value, (family, index) in row.terms if value
        )
        terms = {column: value for value, column in stated_terms if column is not None}
        pairs = ((value, column) for column, value in terms.items())
        limit = LinearRow.from_terms(pairs, upper=row.upper, name="stage_limits", key=position)
        scaled_limit = scale_and_register_limit(m, limit)
        if scaled_limit is not None:
            m.add_linear_row(scaled_limit)


STAGE_LIMITS = Component(
    "stage_limits",
    _add_stage_limits,
    "poetmodel: a user's own rows, over stages with equal coefficients",
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
        STAGE_LIMITS,
        *LIMITS_AND_OBJECTIVE,
    ),
)
