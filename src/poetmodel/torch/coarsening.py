"""Coarsening: what a solver decides about, and what it need not.

Half of the tensors of a training step are smaller than a page. They are kept for as long as
anything may read them, their sum is reserved from the budget, and the solver sees only the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from poetmodel.device import Costs
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.torch.roles import Purpose

if TYPE_CHECKING:
    from poetmodel.graph import Graph, Node
    from poetmodel.torch.tracing import Trace
    from poetmodel.torch.units import Emission, Units

KEPT_SHARE: Final = 0.01
"""Small tensors are kept as long as they are together no more than this share of the budget."""

_FINER: Final = (0.1, 0.0)
"""Parts of `KEPT_SHARE` that are tried where no schedule is left beside what is kept."""

RANDOM_STATE_BYTES: Final = 5056
"""Size of the state of PyTorch's random generator of the processor [B]."""

_RESULTS: Final = "results that wait for the end of the step"
_RANDOM: Final = "states of the random generator"


@dataclass(frozen=True, kw_only=True)
class Coarse:
    """The training graph that is solved: the nodes of the trace, and its larger tensors."""

    graph: Graph
    """What is scheduled; node ``k`` is unit ``k``."""
    numbers: tuple[int, ...]
    """For each tensor of `graph` the number of its storage."""
    threshold_bytes: int
    """Storages of fewer bytes are always kept [B]."""
    reserves: tuple[tuple[str, int], ...]
    """What the plan does not count and a step needs all the same: what for, and how much [B]."""

    @property
    def reserved_bytes(self) -> int:
        """What is reserved in all [B]."""
        return sum(size for _, size in self.reserves)


def keep_all_bytes(trace: Trace) -> int:
    """Return the peak when everything is kept; 100 % of a budget [B].

    Tensors, workspaces, and the results that wait for the end of the step.
    """
    return checkpoint_all_peak_bytes(trace.graph) + _held_bytes(trace, 0)


def coarsened(trace: Trace, *, budget_bytes: int) -> Coarse:
    """Leave as many small tensors out as a budget allows.

    Parameters
    ----------
    trace : Trace
        The step.
    budget_bytes : int
        What the step may take [B].

    Returns
    -------
    Coarse
        Of a budget close to the floor less is reserved, so that there is a schedule where there can
        be one; with room for everything there is nothing to decide, and nothing is left out.
    """
    if budget_bytes >= keep_all_bytes(trace):
        return uncoarsened(trace)
    found = [
        coarsen(trace, kept_bytes=int(part * KEPT_SHARE * budget_bytes)) for part in (1.0, *_FINER)
    ]
    enough = (coarse for coarse in found if floor_bytes(coarse) <= budget_bytes)
    return next(enough, min(found, key=floor_bytes))


def floor_bytes(coarse: Coarse) -> int:
    """Return the least budget with which a schedule may be found [B]."""
    return floor(coarse.graph).bytes + coarse.reserved_bytes


def least_bytes(trace: Trace) -> int:
    """Return the least budget with which `coarsened` leaves room for a schedule [B]."""
    return min(floor_bytes(coarsen(trace, kept_bytes=0)), keep_all_bytes(trace))


def uncoarsened(trace: Trace) -> Coarse:
    """Return the whole training graph, for budgets that keep all of it."""
    return Coarse(
        graph=trace.graph,
        numbers=tuple(range(len(trace.parts.storages))),
        threshold_bytes=0,
        reserves=((_RESULTS, _held_bytes(trace, 0)),),
    )


def coarsen(trace: Trace, *, kept_bytes: int) -> Coarse:
    """Leave the smallest tensors of a traced step to be kept always.

    Parameters
    ----------
    trace : Trace
        The step.
    kept_bytes : int
        Most that the kept tensors may take together [B].

    Returns
    -------
    Coarse
        Its graph has the same nodes; kept tensors are neither inputs nor outputs of any. What an
        operation makes of them anew when it is computed again counts as its workspace.
    """
    storages = trace.parts.storages
    threshold = _threshold([storage.bytes for storage in storages], kept_bytes)
    numbers = tuple(storage.index for storage in storages if storage.bytes >= threshold)
    names = {storages[index].name for index in numbers}
    graph = trace.graph
    if len(numbers) < len(storages):
        graph = replace(graph, nodes=tuple(_without_small(node, names) for node in graph.nodes))
    small = sum(storage.bytes for storage in storages if storage.bytes < threshold)
    return Coarse(
        graph=graph,
        numbers=numbers,
        threshold_bytes=threshold,
        reserves=(
            (f"tensors of less than {threshold:,} B, which are always kept,", small),
            (_RESULTS, _held_bytes(trace, threshold)),
            (_RANDOM, _random_bytes(trace.parts)),
        ),
    )


def coarse_costs(costs: Costs, graph: Graph) -> Costs:
    """Leave the page costs of kept tensors out."""
    pages = costs.pages
    if pages is not None:
        pages = {tensor.name: pages[tensor.name] for tensor in graph.tensors}
    return Costs(compute=costs.compute, pages=pages, device=costs.device, source=costs.source)


def is_held(emission: Emission) -> bool:
    """Return whether a result is handed out at the end of the step: the loss, new buffers."""
    return emission.result.purpose is not Purpose.GRADIENT


def _threshold(sizes: list[int], kept_bytes: int) -> int:
    """Return the size from which on tensors are scheduled; equal ones are treated alike [B]."""
    total = 0
    threshold = 0
    for size in sorted(set(sizes)):
        total += size * sizes.count(size)
        if total > kept_bytes:
            break
        threshold = size + 1
    return threshold


def _without_small(node: Node, names: set[str]) -> Node:
    outputs = tuple(tensor for tensor in node.outputs if tensor.name in names)
    small = sum(tensor.bytes for tensor in node.outputs if tensor.name not in names)
    return replace(
        node,
        inputs=tuple(name for name in node.inputs if name in names),
        outputs=outputs,
        workspace_bytes=node.workspace_bytes + small,
    )


def _held_bytes(trace: Trace, threshold: int) -> int:
    """Return the size of the copies of results that wait for the end of the step [B].

    Results in kept storages wait there; of others a copy is made, so that a loss does not hold
    the memory that it is a small part of. Sums of gradients of one weight in several places wait
    too, and the state of the random generator before the step.
    """
    storages = trace.parts.storages
    places: dict[int, list[int]] = {}
    random = any(unit.random for unit in trace.parts.units)
    total = RANDOM_STATE_BYTES if random else 0
    for emission in trace.parts.emissions:
        example = emission.result.node.meta["val"]
        size = example.numel() * example.element_size()
        of = emission.result.of
        if not is_held(emission) and of is not None:
            places.setdefault(id(trace.joint.value(of)), []).append(size)
        elif all(storages[i].bytes >= threshold for i in emission.reads.storages):
            total += size
    return total + sum(sizes[0] for sizes in places.values() if len(sizes) > 1)


def _random_bytes(parts: Units) -> int:
    """Return the size of the random states that recomputations may need [B]."""
    random = sum(unit.random for unit in parts.units)
    return (random + 1) * RANDOM_STATE_BYTES if random else 0
