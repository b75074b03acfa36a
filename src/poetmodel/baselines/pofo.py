"""POFO: keep, recompute or offload each layer of a chain, with overlapping transfers.

Steps, their tapes and their states are those of `poetmodel.baselines.chain`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.baselines.checkpointing import MARGIN_DIVISOR, ChainTable, best_rotor_schedule
from poetmodel.baselines.engine import bisect_budget, select_best_schedule
from poetmodel.baselines.homes import use_homes_of
from poetmodel.baselines.paging import CostRule, eviction_costs, require_within_budget
from poetmodel.clock import check_time_limit
from poetmodel.errors import MethodNotApplicableError
from poetmodel.problem import Quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from poetmodel.baselines.chain import ChainMemory
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

    SequenceCost = Callable[[int, int, int], float]
    """(first step, last step, RAM [B]) -> cost of recomputing these steps, each for its part [s or
    J]; inf if the RAM does not suffice."""

UNITS: Final = 32
"""Number of units of the RAM budget in the bisection for the RAM of the dynamic program."""


class Beam(NamedTuple):
    """Maximum number of prefixes that a beam search extends at each step, and their classes."""

    width: int
    """Maximum number of prefixes."""
    n_classes: int
    """Number of classes of kept bytes. If there are more than `width` prefixes, each class retains
    at most ``width // n_classes`` of its prefixes."""


NARROW, WIDE = Beam(60, 30), Beam(240, 60)
"""Beam of the bisection for the RAM of the dynamic program, and beam of the search within the
budget."""


class Action(StrEnum):
    """Treatment of the tape and the state of a step between forward and backward pass."""

    KEEP = "keep"
    """Tape and state stay in RAM."""
    OFFLOAD = "offload"
    """Tape and state are paged out after the step and paged in before their use."""
    RECOMPUTE = "recompute"
    """Tape and state are dropped and recomputed, in a sequence of one or more adjacent steps of
    this action; the final state of a sequence is kept."""


@use_homes_of("pofo")
def pofo(problem: Problem, rule: str = "") -> Schedule:
    """Assign one action to each step of a chain so that the training step has minimum cost.

    Deadlines are ignored. If transfers overlap computations, the plan made from the schedule
    decides when transfers begin.

    As in the paper: chains only; one action per layer; page-outs end before the last step of the
    forward pass (the loss) begins, and page-ins begin after it; one transfer is executed at a time
    during computations, and the core waits if RAM is not yet free. The dynamic program processes
    the steps once and decides both passes simultaneously: the backward pass is the same kind of
    process with time reversed, in which a page-in corresponds to a page-out.

    The `rule` sets the costs. By default the best schedule of three is returned: of the published
    rule, of the rule for the minimized quantity (energy unless time is minimized), and of `rotor`,
    which offloads no step. Homes of state are those of `StateHomes.EITHER`.

    - ``published``: as above, on every device.
    - ``time``: transfers that block the core delay both passes by their duration; if the deadline
      counts only computations, transfers take no time.
    - ``energy``: energies are added up, including those of all transfers.

    Interpretations. A layer is a step between articulation points; its activation consists of the
    tensors that its part of the backward pass reads, and its state. Adjacent steps with the action
    recompute form sequences, which `rotor` schedules within the RAM that is free at that time, as
    in the paper; the final state of a sequence stays in RAM until the next part ends. A prefix
    dominates another with the same last action, needed page-in and start of its sequence if it is
    no worse in kept bytes, pending transfers and cost. Above the width of the `Beam`, only the
    cheapest undominated prefixes of each class of kept bytes are extended: for long chains, the
    method is a beam search. The dynamic program may count more RAM than the simulator does, so
    bisection with the narrow beam finds its largest RAM whose schedule meets the budget; the wide
    beam searches once, within the budget. The run time is proportional to ``L * width**2 + L**3 *
    500`` for `L` steps.
    """
    named_rule = CostRule.parse(rule) if rule else None
    table = ChainTable(problem)
    if named_rule is not None:
        return _schedule_with_rule(problem, named_rule, table)
    minimized_rule = CostRule.TIME if problem.minimize == Quantity.TIME else CostRule.ENERGY
    rules = [CostRule.PUBLISHED, minimized_rule]
    rule_searches = (partial(_schedule_with_rule, problem, cost_rule, table) for cost_rule in rules)
    return select_best_schedule(
        problem, (*rule_searches, partial(best_rotor_schedule, problem, table))
    )


def _schedule_with_rule(problem: Problem, rule: CostRule, table: ChainTable) -> Schedule:
    """Return the better schedule of the narrow and the wide beam search by `rule`."""
    compute_costs, _, _ = eviction_costs(problem, rule)
    cost_per_second = sum(compute_costs) / (problem.pass_time_s or 1.0)
    if not np.allclose(
        compute_costs, cost_per_second * np.array(problem.table.compute_time_s), atol=0
    ):
        table, cost_per_second = ChainTable(problem, compute_costs), 1.0
    layers = tuple(build_layers(problem, table.chain, rule))
    is_disabled = {
        Action.OFFLOAD: not problem.can_page,
        Action.RECOMPUTE: not problem.recompute,
    }
    actions = [action for action in Action if not is_disabled.get(action)]

    usable_bytes = problem.usable_ram_bytes

    def sequence_cost_of(first: int, last: int, free_bytes: int) -> float:
        return cost_per_second * table.sequence_time_s(first, last, free_bytes)

    def search(units: int, beam: Beam = NARROW) -> Schedule | None:
        best_prefix = search_actions(
            layers, usable_bytes * units // UNITS, actions, sequence_cost_of, beam
        )
        return None if best_prefix is None else build_schedule(table, best_prefix)

    def require_schedule(schedule: Schedule | None) -> Schedule:
        if schedule is None:
            raise MethodNotApplicableError(f"no assignment of actions fits in {usable_bytes:,} B")
        return schedule

    def search_narrow() -> Schedule:
        return require_schedule(
            bisect_budget(problem, search, UNITS, UNITS + UNITS // MARGIN_DIVISOR)
        )

    def search_wide() -> Schedule:
        return require_within_budget(problem, require_schedule(search(UNITS, WIDE)))

    return select_best_schedule(problem, (search_narrow, search_wide))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One step in the dynamic program; costs are seconds, or joules with the energy rule."""

    forward_cost: float
    """Cost of the step [s or J]."""
    backward_cost: float
    """Cost of the step's part of the backward pass [s or J]."""
    transfer_cost: float = 0.0
    """Cost of paging the step's activation out and in [s or J]; 0 if the cost rule hides
    transfers."""
    out_s: float = 0.0
    """Time of paging the step's activation out [s]; 0 unless the cost rule hides transfers."""
    in_s: float = 0.0
    """Time of paging the step's activation in [s]; 0 unless the cost rule hides transfers."""
    size_bytes: int
    """Bytes of the step's activation: tape and state [B]."""
    state_bytes: int
    """Bytes of the step's state [B]."""
    input_bytes: int
    """Bytes of the state before the step [B]."""
    forward_bytes: int
    """Peak of the step, without its input and kept activations of earlier steps [B]."""
    backward_bytes: int
    """Peak of the step's part of the backward pass, without the state before the step and kept
    activations of earlier steps [B]."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Pending transfers; at its end, each one frees its bytes."""

    ends: tuple[tuple[float, int], ...] = ()
    """(time until the end [s], bytes [B]) in bus order."""

    @property
    def drain_s(self) -> float:
        """Time until the last transfer ends [s]."""
        return self.ends[-1][0] if self.ends else 0.0

    def pending_bytes(self, after_s: float = 0.0) -> int:
        """Return the bytes of transfers that are still pending after `after_s` [B]."""
        return sum(size for end, size in self.ends if end > after_s)

    def with_transfer(self, seconds: float, size_bytes: int) -> Transfers:
        """Return the transfers with one appended that takes `seconds`."""
        return Transfers((*self.ends, (self.drain_s + seconds, size_bytes)))

    def pending_after(self, seconds: float) -> Transfers:
        """Return the transfers that are still pending after `seconds`, with times from then on."""
        return Transfers(tuple((end - seconds, size) for end, size in self.ends if end > seconds))

    def wait_s(self, max_bytes: int) -> float | None:
        """Return the time until at most `max_bytes` are pending [s]; None for a negative number."""
        if max_bytes < 0:
            return None
        waits = (0.0, *(end for end, _ in self.ends))
        return next(wait for wait in waits if self.pending_bytes(wait) <= max_bytes)

    def frees_no_later(self, other: Transfers) -> bool:
        """Return whether at each time, no more bytes are pending than in `other`.

        The last transfer must also end no later than in `other`, even if it has 0 bytes.
        """
        return self.drain_s <= other.drain_s and all(
            self.pending_bytes(time_s) <= other.pending_bytes(time_s)
            for time_s in (0.0, *(end_s for end_s, _ in other.ends))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionPrefix:
    """Actions of the first steps of a chain: a state of the dynamic program."""

    actions: tuple[Action, ...] = ()
    """Action of each step so far."""
    total_cost: float = 0.0
    """Cost of both passes so far, including waits [s or J]; without the recomputations and backward
    parts of the unfinished sequence."""
    kept_bytes: int = 0
    """Bytes of the activations, and of final states of sequences, that stay in RAM [B]."""
    page_outs: Transfers = Transfers()
    """Pending page-outs."""
    page_ins: Transfers = Transfers()
    """Pending page-ins, with time reversed."""
    needed_page_in: tuple[float, int] | None = None
    """(time [s], bytes [B]) of the page-in of the latest offloaded step, until it is appended to
    `page_ins`; None without one. If transfers are not hidden, the time is 0 and only the step's
    state counts."""
    sequence_start: int | None = None
    """First step of an unfinished recompute sequence; None outside a sequence."""
    sequence_cost: float = 0.0
    """Cost of recomputing that sequence if it ended now [s or J]."""
    sequence_backward_cost: float = 0.0
    """Cost of the backward parts of that sequence [s or J]."""
    sequences: tuple[tuple[int, int, int], ...] = ()
    """Finished recompute sequences: first step, last step and the RAM for their parts [B]."""

    def extend_forward(self, layer: Layer, ram_bytes: int) -> ActionPrefix | None:
        """Return the prefix with the cost of the forward pass of `layer`, its next step.

        The action is not yet appended. The cost includes the wait until pending page-outs free
        enough of `ram_bytes`. None if the step does not fit.
        """
        last_action = self.actions[-1] if self.actions else Action.KEEP
        needed_bytes = self.kept_bytes + layer.forward_bytes
        page_outs = self.page_outs
        if self.sequence_start is not None:
            needed_bytes += layer.input_bytes
        elif (
            last_action == Action.OFFLOAD and page_outs.ends
        ):  # the step reads the previous state, which stays until the step ends
            end_s, size = page_outs.ends[-1]
            needed_bytes += size
            page_outs = Transfers((*page_outs.ends[:-1], (end_s, 0)))
        elif last_action == Action.OFFLOAD:
            needed_bytes += layer.input_bytes
        wait = page_outs.wait_s(ram_bytes - needed_bytes)
        if wait is None:
            return None
        elapsed = wait + layer.forward_cost
        return replace(
            self,
            total_cost=self.total_cost + elapsed,
            page_outs=self.page_outs.pending_after(elapsed),
        )

    def extend_backward(self, layer: Layer, ram_bytes: int) -> ActionPrefix | None:
        """Return the prefix with the cost of the backward part of `layer`, its next step.

        Time is reversed. The cost includes the wait until pending page-ins free enough of
        `ram_bytes`; then `needed_page_in` is pending, too. None if the part does not fit.
        """
        held_bytes = self.kept_bytes + (self.needed_page_in[1] if self.needed_page_in else 0)
        wait = self.page_ins.wait_s(ram_bytes - held_bytes - layer.backward_bytes)
        return None if wait is None else self._advance_backward(wait + layer.backward_cost)

    def _advance_backward(self, elapsed: float) -> ActionPrefix:
        """Return the prefix `elapsed` later [s or J]; then `needed_page_in` is pending."""
        page_ins = self.page_ins.pending_after(elapsed)
        if self.needed_page_in:
            page_ins = page_ins.with_transfer(*self.needed_page_in)
        return replace(
            self, total_cost=self.total_cost + elapsed, page_ins=page_ins, needed_page_in=None
        )

    def with_recompute(
        self, layer: Layer, ram_bytes: int, sequence_cost_of: SequenceCost
    ) -> ActionPrefix | None:
        """Return the prefix with RECOMPUTE for `layer`, in a new or the current sequence.

        `end_sequence` adds the costs of the sequence to `total_cost`. None if the sequence, the
        kept bytes and the needed page-in do not fit in `ram_bytes`.
        """
        step = len(self.actions)
        first = step if self.sequence_start is None else self.sequence_start
        held_bytes = self.kept_bytes + (self.needed_page_in[1] if self.needed_page_in else 0)
        cost = sequence_cost_of(first, step, ram_bytes - held_bytes)
        if cost == math.inf:
            return None
        return replace(
            self,
            actions=(*self.actions, Action.RECOMPUTE),
            sequence_start=first,
            sequence_cost=cost,
            sequence_backward_cost=self.sequence_backward_cost + layer.backward_cost,
        )

    def end_sequence(
        self, layer: Layer, ram_bytes: int, sequence_cost_of: SequenceCost
    ) -> ActionPrefix | None:
        """Return the prefix with its recompute sequence finished and the final state kept.

        `layer` is the last step of the sequence. Recomputation may wait for pending page-ins, after
        which more RAM is free: the sum of wait and cost is minimized. None if it does not fit.
        """
        first, last = self.sequence_start or 0, len(self.actions) - 1
        held_bytes = self.kept_bytes + (self.needed_page_in[1] if self.needed_page_in else 0)
        best: tuple[float, int] | None = None
        for wait in (0.0, *(end for end, _ in self.page_ins.ends)):
            free_bytes = ram_bytes - held_bytes - self.page_ins.pending_bytes(wait)
            elapsed = wait + sequence_cost_of(first, last, free_bytes)
            if elapsed < math.inf and (best is None or elapsed < best[0]):
                best = elapsed, free_bytes
        if best is None:
            return None
        return replace(
            self._advance_backward(best[0] + self.sequence_backward_cost),
            kept_bytes=self.kept_bytes + layer.state_bytes,
            sequence_start=None,
            sequence_cost=0.0,
            sequence_backward_cost=0.0,
            sequences=(*self.sequences, (first, last, best[1])),
        )

    def with_action(self, action: Action, layer: Layer) -> ActionPrefix:
        """Return the prefix with `action`, KEEP or OFFLOAD, for `layer`, its next step."""
        actions = (*self.actions, action)
        if action == Action.KEEP:
            return replace(self, actions=actions, kept_bytes=self.kept_bytes + layer.size_bytes)
        overlaps = layer.out_s > 0 or layer.in_s > 0
        return replace(
            self,
            actions=actions,
            total_cost=self.total_cost + layer.transfer_cost,
            page_outs=self.page_outs.with_transfer(layer.out_s, layer.size_bytes)
            if overlaps
            else self.page_outs,
            needed_page_in=(layer.in_s, layer.size_bytes if overlaps else layer.state_bytes),
        )

    def dominates(self, other: ActionPrefix) -> bool:
        """Return whether this prefix is no worse than `other` in cost, kept and pending bytes."""
        return (
            self.total_cost <= other.total_cost
            and self.kept_bytes <= other.kept_bytes
            and self.page_outs.frees_no_later(other.page_outs)
            and self.page_ins.frees_no_later(other.page_ins)
        )


def search_actions(
    layers: Sequence[Layer],
    ram_bytes: int,
    actions: Sequence[Action],
    sequence_cost_of: SequenceCost,
    beam: Beam = WIDE,
) -> ActionPrefix | None:
    """Return the cheapest complete prefix that the beam search finds; None if it finds none.

    The last layer contains the loss and is kept. Page-outs end before it begins, and page-ins begin
    after it; the cost includes both waits. `sequence_cost_of(first, last, ram_bytes)` returns the
    cost of recomputing steps for their parts, or inf.
    """
    other_actions = [action for action in actions if action != Action.RECOMPUTE]
    prefixes = [ActionPrefix()]
    for layer in layers[:-1]:
        extended_prefixes: list[ActionPrefix | None] = []
        for prefix in prefixes:
            check_time_limit()
            after_forward = prefix.extend_forward(layer, ram_bytes)
            if after_forward is None:
                continue
            if Action.RECOMPUTE in actions:
                recompute_prefix = after_forward.with_recompute(layer, ram_bytes, sequence_cost_of)
                extended_prefixes += [
                    recompute_prefix,
                    recompute_prefix
                    and recompute_prefix.end_sequence(layer, ram_bytes, sequence_cost_of),
                ]
            extended_prefix = (
                after_forward.extend_backward(layer, ram_bytes)
                if after_forward.sequence_start is None
                else None
            )
            for action in other_actions if extended_prefix else ():
                extended_prefixes.append(
                    extended_prefix and extended_prefix.with_action(action, layer)
                )
        prefixes = _prune([prefix for prefix in extended_prefixes if prefix is not None], beam)
    complete_prefixes = []
    for prefix in prefixes:
        if prefix.sequence_start is not None:
            continue
        drained_total = prefix.total_cost + prefix.page_outs.drain_s
        after_page_outs = replace(prefix, total_cost=drained_total, page_outs=Transfers())
        after_forward = after_page_outs.extend_forward(layers[-1], ram_bytes)
        extended_prefix = after_forward and after_forward.extend_backward(layers[-1], ram_bytes)
        if extended_prefix:
            total = extended_prefix.total_cost + extended_prefix.page_ins.drain_s
            complete_prefixes.append(
                replace(
                    extended_prefix,
                    total_cost=total,
                    actions=(*extended_prefix.actions, Action.KEEP),
                )
            )
    return min(complete_prefixes, key=lambda prefix: prefix.total_cost, default=None)


def _prune(prefixes: list[ActionPrefix], beam: Beam) -> list[ActionPrefix]:
    """Return undominated prefixes; above the beam width, the cheapest per class of kept bytes."""
    groups: dict[object, list[ActionPrefix]] = {}
    for prefix in sorted(prefixes, key=lambda prefix: prefix.total_cost):
        check_time_limit()
        key = (prefix.actions[-1], prefix.needed_page_in, prefix.sequence_start)
        undominated = groups.setdefault(key, [])
        position = bisect_right(undominated, prefix.kept_bytes, key=attrgetter("kept_bytes"))
        if not any(existing.dominates(prefix) for existing in undominated[:position]):
            undominated.insert(position, prefix)
    all_undominated = [prefix for undominated in groups.values() for prefix in undominated]
    if len(all_undominated) <= beam.width:
        return all_undominated
    n_byte_values = 1 + max(prefix.kept_bytes for prefix in all_undominated)
    classes: dict[int, list[ActionPrefix]] = {}
    for prefix in sorted(all_undominated, key=_expected_total_cost):
        class_prefixes = classes.setdefault(prefix.kept_bytes * beam.n_classes // n_byte_values, [])
        if len(class_prefixes) < beam.width // beam.n_classes:
            class_prefixes.append(prefix)
    return [prefix for class_prefixes in classes.values() for prefix in class_prefixes]


def _expected_total_cost(prefix: ActionPrefix) -> float:
    """Return the cost so far plus pending transfers and the unfinished sequence [s or J]."""
    waiting_s = prefix.page_outs.drain_s + prefix.page_ins.drain_s
    return prefix.total_cost + waiting_s + prefix.sequence_cost + prefix.sequence_backward_cost


def build_layers(problem: Problem, chain: ChainMemory, rule: CostRule) -> Iterator[Layer]:
    """Yield a `Layer` for each step of a chain, in forward order, with costs by a rule."""
    compute_costs, page_in_costs, page_out_costs = eviction_costs(problem, rule)
    overlaps = rule == CostRule.PUBLISHED or (rule == CostRule.TIME and problem.is_overlapping)
    state_before: Collection[int] = ()
    for s, step in enumerate(chain.steps):
        activation = step.tape | step.state
        page_out_cost, page_in_cost = (
            sum(costs[i] for i in activation) for costs in (page_out_costs, page_in_costs)
        )
        yield Layer(
            forward_cost=sum(compute_costs[k] for k in step.nodes),
            backward_cost=sum(compute_costs[k] for k in step.backward),
            transfer_cost=0.0 if overlaps else page_out_cost + page_in_cost,
            out_s=page_out_cost if overlaps else 0.0,
            in_s=page_in_cost if overlaps else 0.0,
            size_bytes=chain.total_bytes(activation),
            state_bytes=chain.total_bytes(step.state),
            input_bytes=chain.total_bytes(state_before),
            forward_bytes=chain.forward_peaks[s].taped_bytes,
            backward_bytes=chain.backward_bytes[s],
        )
        state_before = step.state


def build_schedule(table: ChainTable, prefix: ActionPrefix) -> Schedule:
    """Return the schedule of the actions of a complete prefix.

    Offloaded activations are paged out after their first computation, and paged in when a part that
    needs them begins. Sequences are recomputed by `ChainTable.follow_sequence`.
    """
    end_of_sequence = {first: (last, free_bytes) for first, last, free_bytes in prefix.sequences}
    tensors_of_part: dict[int, frozenset[int]] = {}
    freed_steps: set[int] = set()
    stored_tensors: set[int] = set()
    kept_tensors, previous_state = frozenset[int](), frozenset[int]()
    sequence_end = -1
    for s, (step, action) in enumerate(zip(table.chain.steps, prefix.actions, strict=True)):
        activation = step.tape | step.state
        if action == Action.RECOMPUTE:
            if s in end_of_sequence:
                sequence_end, free_bytes = end_of_sequence[s]
                tensors_of_sequence_part, newly_freed_steps = table.follow_sequence(
                    s, sequence_end, free_bytes, kept_tensors | previous_state
                )
                tensors_of_part, freed_steps, previous_state = (
                    tensors_of_part | tensors_of_sequence_part,
                    freed_steps | newly_freed_steps,
                    frozenset(),
                )
            kept_tensors |= step.state if s == sequence_end else frozenset()
            continue
        tensors_of_part[s] = kept_tensors | previous_state | step.tape
        if action == Action.KEEP:
            kept_tensors, previous_state = kept_tensors | activation, frozenset()
        else:
            stored_tensors, previous_state = stored_tensors | activation, step.state
    return table.chain.to_schedule(
        tensors_of_part, freed_steps=freed_steps, stored_tensors=stored_tensors
    )
