"""The highest step of a stage, found as the verifier does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poetmodel.heuristics.partial_schedule import PartialSchedule


def highest_step(partial: PartialSchedule, t: int) -> int:
    """Return the highest RAM use in stage `t` of a partial schedule [B].

    The row of stage ``t - 1`` must be up to date, for what is in RAM when stage `t` begins.
    """
    graph, sizes = partial.working, partial.working.tensor_bytes
    recomputed, paged_in = partial.recomputed[t], partial.paged_in[t]
    page: dict[int, list[int]] = {}
    for i in paged_in:
        page.setdefault(graph.node_of[i], []).append(i)
    steps = sorted({*recomputed, *page, t})
    freed, saved = _freed_bytes(partial, t, steps, page)
    ram = highest = _begin_bytes(partial, t)
    for k in steps:
        if k in page:
            ram += sum(sizes[i] for i in page[k])
            highest = max(highest, ram)
        if k == t or k in recomputed:
            is_there = not partial.resident.isdisjoint(graph.outputs_of[k])
            output_bytes = 0 if is_there else graph.output_bytes[k]
            step = ram + output_bytes + graph.nodes[k].workspace_bytes - saved.get(k, 0)
            highest = max(highest, step)
            ram += output_bytes - sum(sizes[i] for i in page.get(k, ()))
        ram -= freed.get(k, 0)
    return highest


def _freed_bytes(
    partial: PartialSchedule, t: int, steps: list[int], page: dict[int, list[int]]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the bytes freed after each step of stage `t`, and those saved by it in place [B].

    A step saves memory where it writes over what is freed.
    """
    graph, recomputed = partial.working, partial.recomputed[t]
    last: dict[int, int] = {}
    for k in steps:
        if k == t or k in recomputed:
            last |= dict.fromkeys((*graph.inputs_of[k], *graph.outputs_of[k]), k)
        last |= dict.fromkeys(page.get(k, ()), k)
    freed: dict[int, int] = {}
    saved: dict[int, int] = {}
    for i, k in last.items():
        if not partial.enters(i, t + 1):
            freed[k] = freed.get(k, 0) + graph.tensor_bytes[i]
            if i in graph.shared_bytes_of[k]:
                saved[k] = saved.get(k, 0) + graph.shared_bytes_of[k][i]
    return freed, saved


def _begin_bytes(partial: PartialSchedule, t: int) -> int:
    """Return the bytes in RAM when stage `t` begins."""
    if t == 0:
        return sum(partial.sizes[i] for i in partial.resident)
    graph, saved = partial.working, partial.working.shared_bytes_of[t - 1]
    own = {*graph.inputs_of[t - 1], *graph.outputs_of[t - 1]}
    crossing = int(partial.row_bytes[t - 1]) - graph.step_bytes[t - 1]
    return crossing + sum(
        graph.tensor_bytes[i] - saved.get(i, 0) for i in own if partial.enters(i, t)
    )
