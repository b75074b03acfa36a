"""``compact``: the exact model with few binaries and no big-M.

Decisions exist only at events (`poetmodel.model.events.Events`), which are stages, or groups of
stages in a relaxation. Each step has a memory row of its own, without a recurrence from step to
step; `docs/concepts/formulations.md` proves that no optimum is lost.
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
    """Add the binary variables and the rows of the homes of state.

    For each state tensor `w`::

        resident[w] + storage_home[w] = 1

    Without paging, fixes ``resident[w]`` to 1, and adds neither ``storage_home[w]`` nor the row.
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
    """Add the decisions, all binary variables.

    ::

        kept[i,a]        tensor i stays in RAM from event e_a to e_(a+1):
                         S_RAM[t,i] for e_a < t <= e_(a+1)
        recomputed[t,k]  node k is recomputed in stage t: R[t,k]
        paged_in[t,i]    tensor i is paged in, in stage t: M_in[t,i]
        paged_out[i]     tensor i is paged out right after its first computation; S_AUX from then on
        resident[w]      the home of state tensor w is RAM, else storage (storage_home[w])

    `Model.events` states where decisions exist. Recomputations and page-ins that a limit or the
    objective rewards (a lower limit, a negative coefficient) exist in every stage in which they are
    possible. With paging, page-outs exist for each tensor whose page-out is rewarded, and for each
    tensor that may be paged in and does not start on storage. Sets `Model.decisions`.
    """
    graph, events, rewards = m.problem.working_graph, m.events, m.problem.rewards
    last_node = len(graph.nodes) - 1
    kept = [(i, a) for i, stages in enumerate(events.event_groups) for a in range(len(stages))]
    recomputed = [(t, k) for k, stages in enumerate(events.recompute_groups) for t in stages]
    paged_in = [(t, i) for i, stages in enumerate(events.page_in_groups) for t in stages]
    paged_out = [
        i
        for i, stages in enumerate(events.page_in_groups)
        if m.problem.can_page
        and (rewards.page_out[i] or i not in graph.on_aux)
        and (rewards.page_out[i] or stages or (rewards.page_in[i] and graph.node_of[i] < last_node))
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
    """Return the columns that put tensor `i` in RAM in group `t`: keep, recomputation, page-in."""
    k = m.problem.working_graph.node_of[i]
    a = m.events.keep_index(i, m.events.group_of[k], t)
    columns = [] if a is None else [m.kept[i, a]]
    if (t, k) in m.recomputed:
        columns.append(m.recomputed[t, k])
    if (t, i) in m.paged_in:
        columns.append(m.paged_in[t, i])
    return columns


def presence_columns(m: Model, t: int, i: int) -> list[int]:
    """Return the columns of `source_columns` and, for state, the column of the resident home."""
    resident_columns = [m.resident[i]] if i in m.resident else []
    return source_columns(m, t, i) + resident_columns


def _add_once_rows(m: Model) -> None:
    """Limit the keep, page-in and recomputation of a tensor in a stage to one of them.

    A tensor in RAM must not be paged in. Recomputing a tensor in RAM is useless if its node makes
    no other tensor, and neither a limit nor the objective rewards the recomputation::

        S_RAM[t,i] + M_in[t,i] + R[t,node(i)] <= 1    node(i) has one output and no reward
        S_RAM[t,i] + M_in[t,i] <= 1                   otherwise

    The same holds in a group of stages. But if page-ins of a tensor are rewarded, a group of
    several stages has no row for the tensor: it may be freed in one stage for a recomputation, and
    paged in again.
    """
    graph, rewards, grouping = m.problem.working_graph, m.problem.rewards, m.grouping
    groups_of_several_stages = {
        group
        for group, last_stage in enumerate(grouping.last_stage)
        if grouping.first_stage[group] < last_stage
    }
    m.begin_rows("once")
    for i, groups in enumerate(m.events.event_groups):
        k = graph.node_of[i]
        may_recompute_present = len(graph.outputs_of[k]) > 1 or rewards.compute[k] > 0
        for group in groups:
            if group in groups_of_several_stages and rewards.page_in[i]:
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
    """Allow keeps only of tensors in RAM.

    For every event ``t = e_a`` of a tensor after its first computation::

        kept[i,a] <= S_RAM[t,i] + R[t,node(i)] + M_in[t,i]

    There is no row for a free keep (`Events.free_keeps`) of state: the state may be in RAM because
    it is resident.
    """
    m.begin_rows("keeping")
    for (i, a), column in m.kept.items():
        if a > 0 and not (i in m.resident and (i, a) in m.events.free_keeps):
            m.add_implication_row(
                (i, a), column, source_columns(m, m.events.event_groups[i][a - 1], i)
            )


def _add_resident_keep_rows(m: Model) -> None:
    """Forbid the first keep of resident state, which is in RAM anyway.

    Later keeps need the first keep or a page-in. For each state tensor `w`::

        kept[w,0] <= 1 - resident[w]

    Without paging, all state is resident, and ``kept[w,0]`` is fixed to 0 instead.
    """
    m.begin_rows("homes_kept")
    for i, home in m.storage_home.items():
        if (i, 0) in m.kept:
            m.add_implication_row((i, 0), m.kept[i, 0], [home])
    for i in m.resident:
        if i not in m.storage_home and (i, 0) in m.kept:
            m.fixed[m.kept[i, 0]] = 0.0


NO_RESIDENT_KEEPS = Component(
    "homes_kept",
    _add_resident_keep_rows,
    "poetmodel: resident state is in RAM anyway",
    AFTER_VARIABLES,
)


KEEPING = Component(
    "keeping", _add_keeping_rows, "POET (ICML 2022), constraint 1c", AFTER_VARIABLES
)


def _add_from_storage_rows(m: Model) -> None:
    """Forbid page-ins of tensors that were not paged out, and of state whose home is RAM.

    ::

        M_in[t,i] <= paged_out[i]         i is not on storage from the start
        M_in[t,i] <= 1 - resident[i]      i is state

    Other tensors that are on storage from the start have no row.
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
    """Require the inputs of a computed node in RAM.

    For every input `i` of node `j`, in stage `j` and in each stage `t` with a recomputation of
    `j`::

        1      <= S_RAM[j,i] + R[j,node(i)] + M_in[j,i]    unless one group computes node(i) and j
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
    m.begin_rows("recompute_inputs")
    for j, i in reads:
        for t in m.events.recompute_groups[j]:
            m.add_implication_row((t, j, i), m.recomputed[t, j], presence_columns(m, t, i))


INPUTS = Component(
    "inputs",
    _add_input_rows,
    "POET (ICML 2022), constraint 1b; Checkmate (MLSys 2020), equation 1b",
    AFTER_VARIABLES,
)


def _add_storage_rows(m: Model) -> None:
    """Limit the auxiliary storage, whose space is not reused.

    Adds no row without a storage limit, or if the limit cannot bind; an infeasible row if no
    decisions can meet the limit. Otherwise also registers the limit for cover cuts. Tensors that
    start on storage do not count as paged out. State that is not resident uses storage; its
    replacement uses the same space::

        sum(bytes[i] * paged_out[i]) + sum(bytes[w] * (1 - resident[w])) <= aux_limit_bytes
    """
    problem = m.problem
    limit = problem.aux_limit_bytes
    if limit is None:
        return
    graph = problem.graph
    page_out_bytes = [
        0 if is_stored else size
        for is_stored, size in zip(graph.starts_on_storage, graph.tensor_bytes, strict=True)
    ]
    state_tensors = set(graph.state_tensors)
    home_bytes = [size if i in state_tensors else 0 for i, size in enumerate(graph.tensor_bytes)]
    coefficients_of_writes = problem.make_objective(Quantity.WRITES).coefficients
    coefficients = coefficients_of_writes._replace(page_out=page_out_bytes, storage_home=home_bytes)
    add_limit(m, row_over_totals(problem.totals, coefficients, name="storage", upper=limit))


STORAGE = Component(
    "storage",
    _add_storage_rows,
    "poetmodel: auxiliary storage is finite and not reused within a step",
    AFTER_VARIABLES,
)


def _add_stage_limits(m: Model) -> None:
    """Add one row for each per-stage user constraint; in a relaxation only if it is enforced.

    Each row sums over all groups `l` of stages, in ``compact`` one stage each. Groups end where
    coefficients of an enforced constraint change, so its coefficients are equal in all stages of a
    group::

        sum(coefficient[l,k] * recomputed[l,k]) + sum(coefficient[l,i] * paged_in[l,i])  <=  upper
    """
    add_stage_limit_rows(m, StepView(m), m.grouping.user_rows)


def add_stage_limit_rows(m: Model, view: StepView, positions: Iterable[int]) -> None:
    """Add one row for each per-stage user constraint at `positions`, over all its stages.

    `positions` are those in `Problem.stage_limits`. Also registers the limits for cover cuts. Rows
    that cannot bind are omitted. Coefficients must be 0 or more, and equal in all stages of a
    group.
    """
    column_getters = {"recomputed": view.recompute_column, "paged_in": view.page_in_column}
    m.begin_rows("stage_limits")
    for position in sorted(positions):
        row = m.problem.stage_limits[position]
        if row.upper < 0:  # all terms are >= 0
            m.add_infeasible_row(position)
            continue
        all_terms = (
            (value, column_getters[family](*index)) for value, (family, index) in row.terms if value
        )
        terms = {column: value for value, column in all_terms if column is not None}
        column_terms = ((value, column) for column, value in terms.items())
        limit = LinearRow.from_terms(
            column_terms, upper=row.upper, name="stage_limits", key=position
        )
        scaled_limit = scale_and_register_limit(m, limit)
        if scaled_limit is not None:
            m.add_linear_row(scaled_limit)


STAGE_LIMITS = Component(
    "stage_limits",
    _add_stage_limits,
    "poetmodel: per-stage user constraints, over stages with equal coefficients",
    AFTER_VARIABLES,
)

COMPACT = Formulation(
    "compact",
    (
        VARIABLES,
        ONCE,
        KEEPING,
        NO_RESIDENT_KEEPS,
        FROM_STORAGE,
        INPUTS,
        MEMORY,
        STORAGE,
        STAGE_LIMITS,
        *LIMITS_AND_OBJECTIVE,
    ),
)
