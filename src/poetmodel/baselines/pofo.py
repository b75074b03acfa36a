"""Keeping, recomputing or offloading each layer of a chain while transfers overlap: POFO."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.baselines.checkpointing import MARGIN, ChainTable, checkpointed
from poetmodel.baselines.engine import bisected, cheapest
from poetmodel.baselines.homes import forward_only, in_best_homes
from poetmodel.baselines.paging import Overhead, eviction_costs, within_budget
from poetmodel.clock import check_time_limit
from poetmodel.errors import MethodNotApplicableError
from poetmodel.problem import DeadlineCounts, Quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from poetmodel.baselines.chain import ChainMemory
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

    RunCost = Callable[[int, int, int], float]

UNITS: Final = 32
"""Steps in which the RAM to fill is looked for, up to the budget."""


class Beam(NamedTuple):
    """How many prefixes are extended from one step to the next."""

    width: int
    """Most prefixes."""
    bins: int
    """Classes of kept bytes into which they are sorted when there are more."""


NARROW, WIDE = Beam(60, 30), Beam(240, 60)
"""The beam with which the RAM to fill is looked for, and that with which the budget is filled."""


class Action(StrEnum):
    """What happens to the tape and the state of a step between forward and backward pass."""

    KEEP = "keep"
    """They stay in RAM."""
    OFFLOAD = "offload"
    """They are paged out after the step and paged in before they are read."""
    RECOMPUTE = "recompute"
    """They are dropped and recomputed, in a run with adjacent steps of the same action."""


@in_best_homes
@forward_only
def pofo(problem: Problem, rule: str = "") -> Schedule:
    """Give every step of a chain one action so that the step of training takes the least time.

    Deadlines are ignored. The plan of the schedule for DMA decides when transfers begin.

    As in the paper: chains only; one action per layer; page-outs end before the last step of the
    forward pass (the loss) begins, page-ins begin after it; transfers run one at a time beside the
    computing, and the core waits where RAM is not free yet. The dynamic program goes through the
    steps once and decides both passes at the same time: the backward pass is the same kind of
    process with time reversed, a page-in being a page-out there.

    The `rule` says what is added up. Without one, the best schedule is taken of the published rule,
    that for the quantity that is minimized, and `rotor`, which is the choice without offloading.

    - ``published``: as above, on every device.
    - ``time``: where transfers block the core, they hold up both passes for as long as they take;
      where a deadline counts compute only, they take no time.
    - ``energy``: energies are added up, those of all transfers among them.

    Interpreted: a layer is a step between articulation points, its activation what its part of the
    backward pass reads and the state it hands on. Adjacent steps with the action recompute form
    runs. As in the paper, `rotor` goes through a run with the RAM that is free by then; the state
    that the run hands on stays in RAM until the part behind it is over. The state of a prefix is
    its bytes kept, its pending transfers in both passes and its cost so far. A prefix dominates
    another if it is no worse in all of these. A `Beam` says how many undominated prefixes are
    extended, the cheapest of each class of kept bytes, so that the method is a beam search for long
    chains. The narrow beam is run by bisection, for the most RAM that it may fill; the wide one
    fills the budget. Takes time proportional to ``L * width**2 + L**3 * 500`` for `L` steps.
    """
    times = ChainTable(problem)
    if rule:
        return _with_rule(problem, Overhead(rule), times)
    adapted = Overhead.TIME if problem.minimize == Quantity.TIME else Overhead.ENERGY
    rules = [Overhead.PUBLISHED, adapted]
    chosen = (partial(_with_rule, problem, each, times) for each in rules)
    return cheapest(problem, (*chosen, partial(checkpointed, problem, times)))


def _with_rule(problem: Problem, rule: Overhead, table: ChainTable) -> Schedule:
    computing, _, _ = eviction_costs(problem, rule)
    per_second = sum(computing) / (problem.pass_time_s or 1.0)
    if not np.allclose(computing, per_second * np.array(problem.table.compute_time_s), atol=0):
        table, per_second = ChainTable(problem, computing), 1.0
    layers = tuple(layers_of(problem, table.chain, rule))
    left_out = {Action.OFFLOAD: not problem.can_page, Action.RECOMPUTE: not problem.recompute}
    actions = [action for action in Action if not left_out.get(action)]

    usable = problem.usable_ram_bytes

    def run_cost(first: int, last: int, room_bytes: int) -> float:
        return per_second * table.run_cost(first, last, room_bytes)

    def run(units: int, beam: Beam = NARROW) -> Schedule | None:
        best = best_actions(layers, usable * units // UNITS, actions, run_cost, beam)
        return None if best is None else schedule_of(table, best)

    def required(schedule: Schedule | None) -> Schedule:
        if schedule is None:
            raise MethodNotApplicableError(f"no choice of actions keeps within {usable:,} B")
        return schedule

    def narrow() -> Schedule:
        return required(bisected(problem, run, UNITS, UNITS + UNITS // MARGIN))

    def wide() -> Schedule:
        return within_budget(problem, required(run(UNITS, WIDE)))

    return cheapest(problem, (narrow, wide))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One step as the dynamic program sees it. Costs are seconds, or joules where these count."""

    forward_cost: float
    """Cost of the step."""
    backward_cost: float
    """Cost of its part of the backward pass."""
    transfer_cost: float = 0.0
    """Cost of paging its activation out and in that no computing hides."""
    out_s: float = 0.0
    """Time to page its activation out beside the computing [s]."""
    in_s: float = 0.0
    """Time to page it in beside the computing [s]."""
    size_bytes: int
    """Its activation: tape and state [B]."""
    state_bytes: int
    """Its state [B]."""
    input_bytes: int
    """The state before it [B]."""
    forward_bytes: int
    """Peak of the step, its input and what is kept aside [B]."""
    backward_bytes: int
    """Peak of its part of the backward pass, the state before it and what is kept aside [B]."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Pending transfers: when each ends, from now, and the bytes that it frees then."""

    ends: tuple[tuple[float, int], ...] = ()
    """In order."""

    @property
    def drain_s(self) -> float:
        """When the last one ends [s]."""
        return self.ends[-1][0] if self.ends else 0.0

    def left_bytes(self, after_s: float = 0.0) -> int:
        """Return the bytes not freed yet after some time [B]."""
        return sum(size for end, size in self.ends if end > after_s)

    def then(self, seconds: float, size_bytes: int) -> Transfers:
        """Return them with one more in line."""
        return Transfers((*self.ends, (self.drain_s + seconds, size_bytes)))

    def after(self, seconds: float) -> Transfers:
        """Return the transfers pending after some time."""
        return Transfers(tuple((end - seconds, size) for end, size in self.ends if end > seconds))

    def wait_s(self, room_bytes: int) -> float | None:
        """Return the wait until no more than so much is left [s]; None if that never is."""
        if room_bytes < 0:
            return None
        waits = (0.0, *(end for end, _ in self.ends))
        return next(wait for wait in waits if self.left_bytes(wait) <= room_bytes)

    def within(self, other: Transfers) -> bool:
        """Whether at no time more is left of these than of others."""
        return self.drain_s <= other.drain_s and all(
            self.left_bytes(x) <= other.left_bytes(x) for x in (0.0, *(e for e, _ in other.ends))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionPrefix:
    """Actions of the first steps: a state of the dynamic program."""

    actions: tuple[Action, ...] = ()
    """One for each step so far."""
    total: float = 0.0
    """Cost of both passes so far, waiting included."""
    kept_bytes: int = 0
    """Activations that stay [B]."""
    page_outs: Transfers = Transfers()
    page_ins: Transfers = Transfers()
    """Pending page-ins, with time reversed."""
    anchor: tuple[float, int] | None = None
    """Page-in of the latest step that is offloaded, while a part still needs it: time, bytes."""
    run_begin: int | None = None
    """The first step of a run that goes on."""
    run_so_far_cost: float = 0.0
    """Cost of recomputing that run if it ended here."""
    run_backward_cost: float = 0.0
    """Cost of the parts of that run."""
    runs: tuple[tuple[int, int, int], ...] = ()
    """Runs that have ended: first and last step, and the RAM for their parts [B]."""

    def forward(self, layer: Layer, ram_bytes: int) -> ActionPrefix | None:
        """Return the prefix after one more step forward, None if that never fits."""
        last = self.actions[-1] if self.actions else Action.KEEP
        use = self.kept_bytes + layer.forward_bytes
        page_outs = self.page_outs
        if self.run_begin is not None:
            use += layer.input_bytes
        elif last == Action.OFFLOAD and page_outs.ends:  # the step reads it: it stays until its end
            end_s, size = page_outs.ends[-1]
            use += size
            page_outs = Transfers((*page_outs.ends[:-1], (end_s, 0)))
        elif last == Action.OFFLOAD:
            use += layer.input_bytes
        wait = page_outs.wait_s(ram_bytes - use)
        if wait is None:
            return None
        spent = wait + layer.forward_cost
        return replace(self, total=self.total + spent, page_outs=self.page_outs.after(spent))

    def backward(self, layer: Layer, ram_bytes: int) -> ActionPrefix | None:
        """Return the prefix with one more part of the backward pass before those so far."""
        held = self.kept_bytes + (self.anchor[1] if self.anchor else 0)
        wait = self.page_ins.wait_s(ram_bytes - held - layer.backward_bytes)
        return None if wait is None else self._after(wait + layer.backward_cost)

    def _after(self, spent: float) -> ActionPrefix:
        """Return the prefix after more of the backward pass, its anchor paged in before that."""
        page_ins = self.page_ins.after(spent)
        if self.anchor:
            page_ins = page_ins.then(*self.anchor)
        return replace(self, total=self.total + spent, page_ins=page_ins, anchor=None)

    def in_run(self, layer: Layer, ram_bytes: int, run_cost: RunCost) -> ActionPrefix | None:
        """Return the prefix whose run has the step that it went through last."""
        step = len(self.actions)
        first = step if self.run_begin is None else self.run_begin
        held = self.kept_bytes + (self.anchor[1] if self.anchor else 0)
        so_far = run_cost(first, step, ram_bytes - held)
        if so_far == math.inf:
            return None
        return replace(
            self,
            actions=(*self.actions, Action.RECOMPUTE),
            run_begin=first,
            run_so_far_cost=so_far,
            run_backward_cost=self.run_backward_cost + layer.backward_cost,
        )

    def end_run(self, layer: Layer, ram_bytes: int, run_cost: RunCost) -> ActionPrefix | None:
        """Return the prefix with its run at its end, the state of the last step kept."""
        first, last = self.run_begin or 0, len(self.actions) - 1
        held = self.kept_bytes + (self.anchor[1] if self.anchor else 0)
        best: tuple[float, int] | None = None
        for wait in (0.0, *(end for end, _ in self.page_ins.ends)):
            room_bytes = ram_bytes - held - self.page_ins.left_bytes(wait)
            spent = wait + run_cost(first, last, room_bytes)
            if spent < math.inf and (best is None or spent < best[0]):
                best = spent, room_bytes
        if best is None:
            return None
        return replace(
            self._after(best[0] + self.run_backward_cost),
            kept_bytes=self.kept_bytes + layer.state_bytes,
            run_begin=None,
            run_so_far_cost=0.0,
            run_backward_cost=0.0,
            runs=(*self.runs, (first, last, best[1])),
        )

    def with_action(self, action: Action, layer: Layer) -> ActionPrefix:
        """Return the prefix that keeps or offloads the step that it went through last."""
        actions = (*self.actions, action)
        if action == Action.KEEP:
            return replace(self, actions=actions, kept_bytes=self.kept_bytes + layer.size_bytes)
        beside = layer.out_s > 0 or layer.in_s > 0
        return replace(
            self,
            actions=actions,
            total=self.total + layer.transfer_cost,
            page_outs=self.page_outs.then(layer.out_s, layer.size_bytes)
            if beside
            else self.page_outs,
            anchor=(layer.in_s, layer.size_bytes if beside else layer.state_bytes),
        )

    def dominates(self, other: ActionPrefix) -> bool:
        """Whether all that may follow the other prefix is as good after this one."""
        return (
            self.total <= other.total
            and self.kept_bytes <= other.kept_bytes
            and self.page_outs.within(other.page_outs)
            and self.page_ins.within(other.page_ins)
        )


def best_actions(
    layers: Sequence[Layer],
    ram_bytes: int,
    actions: Sequence[Action],
    run_cost: RunCost,
    beam: Beam = WIDE,
) -> ActionPrefix | None:
    """Return the cheapest of the allowed actions, None where none keep within the RAM.

    The last layer holds the loss and keeps its outputs. `run_cost` says what recomputing steps for
    their parts costs: from the first to the last step, within some RAM [B].
    """
    prefixes = [ActionPrefix()]
    for layer in layers[:-1]:
        longer: list[ActionPrefix | None] = []
        for prefix in prefixes:
            check_time_limit()
            ahead = prefix.forward(layer, ram_bytes)
            if ahead is None:
                continue
            if Action.RECOMPUTE in actions:
                on = ahead.in_run(layer, ram_bytes, run_cost)
                longer += [on, on and on.end_run(layer, ram_bytes, run_cost)]
            whole = ahead.backward(layer, ram_bytes) if ahead.run_begin is None else None
            for action in set(actions) - {Action.RECOMPUTE} if whole else ():
                longer.append(whole and whole.with_action(action, layer))
        prefixes = _pruned([prefix for prefix in longer if prefix is not None], beam)
    ends = []
    for prefix in prefixes:
        if prefix.run_begin is not None:
            continue
        drained_total = prefix.total + prefix.page_outs.drain_s
        drained = replace(prefix, total=drained_total, page_outs=Transfers())
        ahead = drained.forward(layers[-1], ram_bytes)
        whole = ahead and ahead.backward(layers[-1], ram_bytes)
        if whole:
            spent = whole.total + whole.page_ins.drain_s
            ends.append(replace(whole, total=spent, actions=(*whole.actions, Action.KEEP)))
    return min(ends, key=lambda prefix: prefix.total, default=None)


def _pruned(prefixes: list[ActionPrefix], beam: Beam) -> list[ActionPrefix]:
    """Return the undominated prefixes, or the most promising of them."""
    groups: dict[object, list[ActionPrefix]] = {}
    for prefix in sorted(prefixes, key=lambda prefix: prefix.total):
        check_time_limit()
        key = (prefix.actions[-1], prefix.anchor, prefix.run_begin)
        kept = groups.setdefault(key, [])
        place = bisect_right(kept, prefix.kept_bytes, key=attrgetter("kept_bytes"))
        if not any(other.dominates(prefix) for other in kept[:place]):
            kept.insert(place, prefix)
    kept_prefixes = [prefix for kept in groups.values() for prefix in kept]
    if len(kept_prefixes) <= beam.width:
        return kept_prefixes
    most = 1 + max(prefix.kept_bytes for prefix in kept_prefixes)
    bins: dict[int, list[ActionPrefix]] = {}
    for prefix in sorted(kept_prefixes, key=_expected):
        members = bins.setdefault(prefix.kept_bytes * beam.bins // most, [])
        if len(members) < beam.width // beam.bins:
            members.append(prefix)
    return [prefix for members in bins.values() for prefix in members]


def _expected(prefix: ActionPrefix) -> float:
    waiting_s = prefix.page_outs.drain_s + prefix.page_ins.drain_s
    return prefix.total + waiting_s + prefix.run_so_far_cost + prefix.run_backward_cost


def layers_of(problem: Problem, chain: ChainMemory, rule: Overhead) -> Iterator[Layer]:
    """Yield the steps of a chain with their costs by a rule, and their peaks."""
    computing, paging_in, paging_out = eviction_costs(problem, rule)
    overlaps = rule == Overhead.PUBLISHED or (
        rule == Overhead.TIME and problem.deadline_counts == DeadlineCounts.OVERLAP
    )
    before: Collection[int] = ()
    for s, step in enumerate(chain.steps):
        activation = step.tape | step.state
        out, back = (sum(costs[i] for i in activation) for costs in (paging_out, paging_in))
        yield Layer(
            forward_cost=sum(computing[k] for k in step.nodes),
            backward_cost=sum(computing[k] for k in step.backward),
            transfer_cost=0.0 if overlaps else out + back,
            out_s=out if overlaps else 0.0,
            in_s=back if overlaps else 0.0,
            size_bytes=chain.bytes_of(activation),
            state_bytes=chain.bytes_of(step.state),
            input_bytes=chain.bytes_of(before),
            forward_bytes=chain.first[s].taped,
            backward_bytes=chain.backward_bytes[s],
        )
        before = step.state


def schedule_of(table: ChainTable, chosen: ActionPrefix) -> Schedule:
    """Return the schedule of one action per step."""
    ends = {first: (last, room_bytes) for first, last, room_bytes in chosen.runs}
    held: dict[int, frozenset[int]] = {}
    freed: set[int] = set()
    stored: set[int] = set()
    kept, before = frozenset[int](), frozenset[int]()
    end = -1
    for s, (step, action) in enumerate(zip(table.chain.steps, chosen.actions, strict=True)):
        activation = step.tape | step.state
        if action == Action.RECOMPUTE:
            if s in ends:
                end, room_bytes = ends[s]
                parts, again = table.run(s, end, room_bytes, kept | before)
                held, freed, before = held | parts, freed | again, frozenset()
            kept |= step.state if s == end else frozenset()
            continue
        held[s] = kept | before | step.tape
        if action == Action.KEEP:
            kept, before = kept | activation, frozenset()
        else:
            stored, before = stored | activation, step.state
    return table.chain.realize(held, freed=freed, stored=stored)
