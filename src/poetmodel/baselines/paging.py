"""Methods that page: LRU, `offload_all` and `zero_offload`, and what all of them share.

A *gap* is a tensor between two uses that are not in adjacent stages. A method that decides
beforehand chooses the gaps in which a tensor is out of RAM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from poetmodel.baselines.engine import cheapest
from poetmodel.baselines.homes import all_on_storage, in_best_homes
from poetmodel.errors import MethodNotApplicableError
from poetmodel.heuristics.execution import FORWARD, StagedExecution, overwrites
from poetmodel.problem import DeadlineCounts, Problem, Quantity
from poetmodel.schedule import Schedule, simulate
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.graph import Graph


@in_best_homes
def lru_paging(problem: Problem) -> Schedule:
    """Page out the least recently used tensor whenever RAM is short, page in what is read.

    A tensor is used when a node computes or reads it; among those of the same step the lowest
    number goes first. Tensors do not change, so each is written once, as far as the storage limit
    allows. Evicted again it is dropped, as a clean page is. Tensors without a further user are
    freed at once, those of 0 bytes stay. Takes O(n) evictions of O(n) candidates.
    """
    return _LeastRecentlyUsed(problem).run()


def offload_all(problem: Problem) -> Schedule:
    """Page out every tensor that is saved for the backward pass, and page it in there.

    Saved is what input, forward and loss nodes compute and backward or update nodes read. It stays
    in RAM until its last use before the backward pass. Two rules are tried, and the better schedule
    is taken. It is paged in once, for its first reader there, and stays to its last use, as in
    vDNN. Or it is paged in for each node that reads it, and stays no longer than the next node if
    that one reads it too, as with ``torch.autograd.graph.save_on_cpu``: more transfers, less RAM.
    The method looks at no budget. Gradients stay in RAM from the first to the last use, as do
    tensors of 0 bytes. Samples that lie on storage from the start are not written. Takes linear
    time.

    State is in RAM, or on storage with the rule of `zero_offload`, whichever is better.
    """
    if not problem.can_page:
        raise MethodNotApplicableError(
            "it pages every saved tensor out, and the problem allows no paging"
        )
    if all(node.phase in FORWARD or node.is_state for node in problem.graph.nodes):
        raise MethodNotApplicableError(
            "it pages what the backward pass reads, and the graph has no backward nodes"
        )

    @in_best_homes
    def schedule(plain: Problem) -> Schedule:
        gaps = _saved_gaps(plain.graph)
        first = {gap.tensor: gap for gap in reversed(gaps)}
        state = _between_uses(problem, plain.graph)
        rules = (dict.fromkeys(out, True) | state for out in (first.values(), gaps))
        return cheapest(plain, (partial(_executed, plain, pages) for pages in rules))

    return schedule(problem)


def _saved_gaps(graph: Graph) -> list[Gap]:
    """Return the gaps after which the backward pass reads a tensor of the forward pass."""
    forward = [node.phase in FORWARD for node in graph.nodes]
    return [
        gap
        for gap in gaps_of(graph)
        if graph.tensor_bytes[gap.tensor]
        and forward[graph.node_of[gap.tensor]]
        and not forward[gap.after]
    ]


def _executed(problem: Problem, pages: Mapping[Gap, bool]) -> Schedule:
    return within_budget(problem, execute_gaps(problem, pages))


def zero_offload(problem: Problem) -> Schedule:
    """Keep all state on storage, read it for each use and write it back; keep activations in RAM.

    The home of all state is storage: parameters, moments and running statistics. Each is read when
    its first reader needs it, stays no longer than the next node if that one reads it too, and is
    read again for each later use. Its update writes it back. Everything else is kept to its last
    use. The method looks at no budget. Takes linear time.

    ZeRO-Offload keeps master copies and moments in the memory of the host, updates them there, and
    moves gradients out as soon as they are made. Here storage takes the place of the host, and it
    cannot compute: so moments come in for the update, and a gradient is used up by it in RAM. When
    updates run is for the graph to say. Without state in the graph everything is kept.
    """

    @all_on_storage
    def schedule(plain: Problem) -> Schedule:
        return execute_gaps(plain, _between_uses(problem, plain.graph))

    return within_budget(problem, schedule(problem))


def _between_uses(problem: Problem, graph: Graph) -> dict[Gap, bool]:
    """Return the gaps of state that come after a use of it, all paged."""
    state = frozenset(problem.graph.state_tensors)
    return {
        gap: True
        for gap in gaps_of(graph)
        if gap.tensor in state and gap.before != graph.node_of[gap.tensor]
    }


class StorageSpace:
    """Which tensors have a copy on storage, and how much space is left there."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.sizes = graph.tensor_bytes
        self.can_page = problem.can_page
        self.stored = set(graph.on_aux) if problem.can_page else set[int]()
        limit = problem.aux_limit_bytes
        self.left_bytes = math.inf if limit is None else limit

    def takes(self, i: int) -> bool:
        """Whether tensor `i` has a copy on storage, or space for one."""
        return i in self.stored or (self.can_page and self.sizes[i] <= self.left_bytes)

    def write(self, i: int) -> None:
        """Write tensor `i`, unless it has a copy."""
        if i not in self.stored:
            self.stored.add(i)
            self.left_bytes -= self.sizes[i]


class Overhead(StrEnum):
    """What an eviction is charged with: a rule of `capuchin` or `pofo`."""

    PUBLISHED = "published"
    """Time, of which computing hides what it can, as on the paper's machine."""
    TIME = "time"
    """The time that counts in the problem: nothing is hidden where transfers block the core."""
    ENERGY = "energy"
    """Energy, of which nothing is hidden."""


def eviction_costs(
    problem: Problem, rule: Overhead
) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Return the cost of each computation, page-in and page-out by a rule: seconds or joules."""
    table, energy = problem.table, problem.energy.coefficients
    if rule == Overhead.ENERGY:
        return energy.compute, energy.page_in, energy.page_out
    if not table.has_storage or (
        rule == Overhead.TIME and problem.deadline_counts == DeadlineCounts.COMPUTE
    ):
        nothing = (0.0,) * len(problem.graph.tensors)
        return table.compute_time_s, nothing, nothing
    return table.compute_time_s, table.page_in_time_s, table.page_out_time_s


def transfer_costs(problem: Problem) -> tuple[Sequence[float], Sequence[float]]:
    """Return the costs of page-in and page-out of each tensor: energy, or time if it is minimized.

    Time in the deadline's meaning: none where it counts compute only.
    """
    rule = Overhead.TIME if problem.minimize == Quantity.TIME else Overhead.ENERGY
    _, page_in, page_out = eviction_costs(problem, rule)
    return page_in, page_out


class _LeastRecentlyUsed(StagedExecution):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.graph, problem.usable_ram_bytes)
        self.storage = StorageSpace(problem)
        self.steps = 0
        self.last_use = [0] * len(self.sizes)

    def victim(self, k: int) -> int | None:
        can_go = [i for i in self.candidates(k) if self.storage.takes(i)]
        victim = min(can_go, key=lambda i: self.last_use[i], default=None)
        if victim is not None:
            self.storage.write(victim)
        return victim

    def pages_in(self, i: int) -> bool:
        return i in self.storage.stored

    def compute(self, k: int) -> None:
        super().compute(k)
        self.steps += 1
        for i in (*self.graph.inputs_of[k], *self.graph.outputs_of[k]):
            self.last_use[i] = self.steps


# -- methods that decide beforehand ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """A tensor between two uses that are not in adjacent stages."""

    tensor: int
    before: int
    """The node that computes or reads it before the gap."""
    after: int
    """The next node that reads it."""


def gaps_of(graph: Graph, *, overwritten: bool = False) -> list[Gap]:
    """Return every gap of a graph, by tensor and stage.

    With `overwritten` also the gaps of no stage, before which a node may write over the tensor, if
    that is allowed.
    """
    overwritten = overwritten and overwrites()
    return [
        Gap(i, a, b)
        for i, users in enumerate(graph.users_of)
        for a, b in pairwise((graph.node_of[i], *users))
        if b > a + 1 or (overwritten and i in graph.shared_bytes_of[a])
    ]


def relieved(graph: Graph, gap: Gap) -> slice:
    """Return the stages that take less RAM if the tensor is out of it in a gap.

    The stage before the gap is one of them if its node may then write over the tensor.
    """
    overwritten = overwrites() and gap.tensor in graph.shared_bytes_of[gap.before]
    return slice(gap.before + (not overwritten), gap.after)


def execute_gaps(problem: Problem, pages: Mapping[Gap, bool]) -> Schedule:
    """Return the schedule in which tensors are out of RAM in some gaps, whatever RAM that takes.

    After a gap a tensor is paged in where `pages` says true, else recomputed: for that, inputs on
    storage are paged in and all others recomputed, as far back as needed.
    """
    return GapExecution(problem, pages).run()


class GapExecution(StagedExecution):
    """An execution in which tensors are out of RAM in some gaps; see `execute_gaps`."""

    def __init__(self, problem: Problem, pages: Mapping[Gap, bool]) -> None:
        super().__init__(problem.graph)
        self.out_after = {(gap.tensor, gap.before): page for gap, page in pages.items()}
        self.last_use = list(problem.graph.node_of)
        """The last node that has used each tensor in its own stage."""
        self.stored = {gap.tensor for gap, page in pages.items() if page}
        self.stored |= StorageSpace(problem).stored

    def pages_in(self, i: int) -> bool:
        """Whether tensor `i` is paged in after the gap that it is in."""
        return self.out_after.get((i, self.last_use[i]), i in self.stored)

    def retains(self, i: int) -> bool:
        """Whether tensor `i` stays: it will be read, and is not in a gap without it."""
        return self.is_awaited(i) and (i, self.last_use[i]) not in self.out_after

    def compute(self, k: int) -> None:
        """Compute node `k`, and note which tensors its own stage uses."""
        super().compute(k)
        if k == self.stage:
            for i in self.graph.inputs_of[k]:
                self.last_use[i] = k


def within_budget(problem: Problem, schedule: Schedule) -> Schedule:
    """Return a schedule, or raise `MethodNotApplicableError` unless it keeps the RAM budget."""
    usable = problem.usable_ram_bytes
    peak = simulate(problem.graph, problem.costs, schedule).peak
    if peak.ram_bytes > usable:
        raise MethodNotApplicableError(
            f"its schedule needs {format_bytes(peak.ram_bytes)} at "
            f"{problem.graph.nodes[peak.node].name!r}, and tensors may use {format_bytes(usable)}"
        )
    return schedule
