"""What a schedule breaks and how much RAM it takes, stated without executing it.

The simulator executes a schedule with a state. Here each rule is one condition over the relations,
and the RAM of each step one sum over them, so that the two can be held against each other. With

    have(t, i) = S_RAM[t,i] or M_in[t,i] or R[t,node(i)]

the RAM in use at step ``(t, k)`` is the sum of

- ``m_i * S_RAM[t,i]`` over the tensors whose step lies ahead, ``node(i) > k``;
- ``m_i * (S_RAM[t,i] + M_in[t,i] + R[t,k])`` over ``i in out(k)``: an old copy counts as well;
- ``m_i`` over tensors with ``node(i) < k`` and ``have(t, i)`` that are read at ``k`` or later in
  the stage, or that stage ``t + 1`` begins with;
- ``workspace_k * R[t,k]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.schedule import RELATIONS

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.schedule import Schedule

Entry = tuple[str, int, int]


def broken_entries(graph: Graph, schedule: Schedule) -> set[Entry]:
    """Return every entry of a schedule that breaks a rule, as (relation, stage, index)."""
    n, made_by = len(graph.nodes), graph.node_of
    R, S_RAM, S_AUX, M_in, M_out = (set(getattr(schedule, name)) for name in RELATIONS)  # noqa: N806

    def have(t: int, i: int) -> bool:
        return (t, i) in S_RAM or (t, i) in M_in or (t, made_by[i]) in R

    def stored(t: int, i: int) -> bool:
        return graph.nodes[made_by[i]].on_aux or any((s, i) in M_out for s in range(t))

    bad: set[Entry] = {("R", t, t) for t in range(n) if (t, t) not in R}
    bad |= {("R", t, k) for t, k in R if k < t and not graph.nodes[k].recomputable}
    bad |= {("R", t, k) for t, k in R if k > t or not all(have(t, i) for i in graph.inputs_of[k])}
    bad |= {("S_RAM", t, i) for t, i in S_RAM if made_by[i] >= t or not have(t - 1, i)}
    bad |= {("S_AUX", t, i) for t, i in S_AUX if made_by[i] >= t or not stored(t, i)}
    bad |= {
        ("M_in", t, i)
        for t, i in M_in
        if made_by[i] >= t or (t, i) not in S_AUX or not stored(t, i) or (t, i) in S_RAM
    }
    bad |= {("M_out", t, i) for t, i in M_out if made_by[i] > t or not have(t, i)}
    return bad


def copies(graph: Graph, schedule: Schedule, t: int, k: int) -> dict[int, int]:
    """Return the tensors in RAM during step ``(t, k)`` of a valid schedule, and how often each."""
    made_by = graph.node_of
    R, S_RAM, _, M_in, _ = (set(getattr(schedule, name)) for name in RELATIONS)  # noqa: N806
    found = {}
    for i, node in enumerate(made_by):
        if node > k:
            count = int((t, i) in S_RAM)
        elif node == k:
            count = ((t, i) in S_RAM) + ((t, i) in M_in) + ((t, k) in R)
        else:
            had = (t, i) in S_RAM or (t, i) in M_in or (t, node) in R
            read = any(j >= k and (t, j) in R for j in graph.users_of[i])
            count = int(had and (read or (t + 1, i) in S_RAM))
        if count:
            found[i] = count
    return found


def memory_curve(graph: Graph, schedule: Schedule) -> dict[tuple[int, int], int]:
    """Return the RAM in use at every step of a valid schedule that executes something [B]."""
    sizes = graph.tensor_bytes
    computed = set(schedule.R)
    moved = {(t, graph.node_of[i]) for t, i in (*schedule.M_in, *schedule.M_out)}
    curve = {}
    for t, k in sorted(computed | moved):
        held = copies(graph, schedule, t, k).items()
        workspace = graph.nodes[k].workspace_bytes if (t, k) in computed else 0
        curve[t, k] = workspace + sum(count * sizes[i] for i, count in held)
    return curve


def energy_j(
    schedule: Schedule, compute: list[float], into: list[float], out: list[float]
) -> float:
    """Return the energy of a schedule: every entry of `R`, `M_in` and `M_out` once [J]."""
    total = sum(compute[k] for _, k in schedule.R)
    total += sum(into[i] for _, i in schedule.M_in)
    return total + sum(out[i] for _, i in schedule.M_out)
