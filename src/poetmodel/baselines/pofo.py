"""Keeping, recomputing or offloading each layer of a chain while transfers overlap: POFO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from poetmodel.baselines.chain import Chain, ChainMemory
from poetmodel.baselines.checkpointing import rotor
from poetmodel.baselines.engine import (
    begin_of_backward,
    cheapest,
    fitted,
    last_forward_uses,
    retain,
)
from poetmodel.baselines.homes import all_in_ram
from poetmodel.baselines.paging import Overhead, eviction_costs
from poetmodel.clock import check_time_limit
from poetmodel.errors import MethodNotApplicableError
from poetmodel.problem import DeadlineCounts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

WIDTH: Final = 240
"""Most prefixes that are extended from one step to the next."""
BINS: Final = 40
"""Classes of kept bytes into which they are sorted when there are more."""


class Action(StrEnum):
    """What happens to the tape and the state of a step between forward and backward pass."""

    KEEP = "keep"
    """They stay in RAM."""
    OFFLOAD = "offload"
    """They are paged out after the step and paged in before they are read."""
    RECOMPUTE = "recompute"
    """They are dropped and recomputed, with adjacent steps of the same action."""


@all_in_ram
def pofo(problem: Problem, rule: str = "") -> Schedule:
    """Give every step of a chain one action so that the step of training takes the least time.

    Deadlines are ignored. The plan of the schedule for DMA decides when transfers begin.

    As in the paper: chains only; one action per layer; page-outs end before the last step of the
    forward pass (the loss) begins, page-ins begin after it; transfers run one at a time beside the
    computing, and the core waits where RAM is not free yet. The dynamic program goes through the
    steps once and decides both passes at the same time: the backward pass is the same kind of
    process with time reversed, a page-in being a page-out there.

    The `rule` says what is added up; without one, the best schedule of all rules is taken, that of
    `rotor` among them, which is the choice without offloading.

    - ``published``: as above, on every device.
    - ``time``: where transfers block the core, they hold up both passes for as long as they take;
      where a deadline counts compute only, they take no time.
    - ``energy``: energies are added up, those of all transfers among them.

    Interpreted: a layer is a step between articulation points, its activation what its part of the
    backward pass reads and the state it hands on. Adjacent steps with the action recompute form a
    run. All of it is recomputed, with its tapes, before the part behind the run begins; the paper
    goes through such runs by rotor, which may compute a layer more often. The state of a prefix is
    its bytes kept, its pending transfers in both passes and its time so far. A prefix dominates
    another if it is no worse in all of these. Up to `WIDTH` undominated prefixes are extended,
    beyond that the quickest of each class of kept bytes. So the method is exact for short chains
    and a beam search for long ones, in time proportional to ``L * WIDTH**2`` for `L` steps.
    """
    if not rule:
        chosen = (lambda each=each: pofo(problem, each) for each in Overhead)
        return cheapest(problem, (*chosen, lambda: rotor(problem)))
    chain = ChainMemory(problem.graph)
    layers = tuple(layers_of(problem, chain, Overhead(rule)))
    left_out = {Action.OFFLOAD: not problem.can_page, Action.RECOMPUTE: not problem.recompute}
    actions = [action for action in Action if not left_out.get(action)]

    def run(ram_bytes: int) -> Schedule:
        best = best_actions(layers, ram_bytes, actions)
        if best is None:
            raise MethodNotApplicableError(f"no choice of actions keeps within {ram_bytes:,} B")
        return schedule_of(chain, best.actions)

    return fitted(problem, run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One step as the dynamic program sees it. Costs are seconds, or joules where these count."""

    forward_cost: float
    """Cost of the step."""
    recompute_cost: float
    """Cost of the step when it is recomputed, without its samples."""
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
    input_bytes: int
    """The state before it [B]."""
    forward_bytes: int
    """Peak of the step, its input and what is kept aside [B]."""
    recompute_bytes: int
    """The same when it is recomputed, gradients and samples aside [B]."""
    backward_bytes: int
    """Peak of its part of the backward pass, the state before it and what is kept aside [B]."""
    others_bytes: int
    """Gradients and samples as its part of the backward pass begins [B]."""


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
        """Return what is not freed yet after some time [B]."""
        return sum(size for end, size in self.ends if end > after_s)

    def then(self, seconds: float, size_bytes: int) -> Transfers:
        """Return them with one more in line."""
        return Transfers((*self.ends, (self.drain_s + seconds, size_bytes)))

    def after(self, seconds: float) -> Transfers:
        """Return what is left of them after some time."""
        return Transfers(tuple((end - seconds, size) for end, size in self.ends if end > seconds))

    def wait_s(self, room_bytes: int) -> float | None:
        """Return how long to wait until no more than so much is left; None if that never is."""
        if room_bytes < 0:
            return None
        waits = (0.0, *(end for end, _ in self.ends))
        return next(wait for wait in waits if self.left_bytes(wait) <= room_bytes)

    def within(self, other: Transfers) -> bool:
        """Return whether at no time more is left of these than of others."""
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
    run_bytes: int = 0
    """Activations of the current run of recomputed steps [B]."""
    run_cost: float = 0.0
    """Cost of computing that run."""
    run_peak_bytes: int = 0
    """Peak of computing that run [B]."""

    def forward(self, layer: Layer, ram_bytes: int) -> ActionPrefix | None:
        """Return the prefix after one more step forward, None if that never fits."""
        last = self.actions[-1] if self.actions else Action.KEEP
        use = self.kept_bytes + layer.forward_bytes
        page_outs = self.page_outs
        if last == Action.RECOMPUTE:
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

    def backward(self, layer: Layer, ram_bytes: int, *, run_ends: bool) -> ActionPrefix | None:
        """Return the prefix with one more part of the backward pass before those so far."""
        held = self.kept_bytes + self.run_bytes + (self.anchor[1] if self.anchor else 0)
        wait = self.page_ins.wait_s(ram_bytes - held - layer.backward_bytes)
        if wait is None:
            return None
        spent = wait + layer.backward_cost
        after = replace(self, total=self.total + spent, page_ins=self.page_ins.after(spent))
        return after.end_run(layer, ram_bytes) if run_ends else after

    def end_run(self, layer: Layer, ram_bytes: int) -> ActionPrefix | None:
        """Return the prefix with its run recomputed and its anchor paged in before that."""
        held = self.kept_bytes + (self.anchor[1] if self.anchor else 0)
        page_ins, spent = self.page_ins, 0.0
        if self.run_bytes or self.run_cost:
            wait = page_ins.wait_s(ram_bytes - held - self.run_peak_bytes - layer.others_bytes)
            if wait is None:
                return None
            spent = wait + self.run_cost
            page_ins = page_ins.after(spent)
        if self.anchor:
            page_ins = page_ins.then(*self.anchor)
        return ActionPrefix(
            actions=self.actions,
            total=self.total + spent,
            kept_bytes=self.kept_bytes,
            page_outs=self.page_outs,
            page_ins=page_ins,
        )

    def with_action(self, action: Action, layer: Layer) -> ActionPrefix:
        """Return the prefix with an action for the step that it went through last."""
        actions = (*self.actions, action)
        if action == Action.KEEP:
            return replace(self, actions=actions, kept_bytes=self.kept_bytes + layer.size_bytes)
        if action == Action.OFFLOAD:
            page_outs = self.page_outs.then(layer.out_s, layer.size_bytes)
            return replace(
                self,
                actions=actions,
                total=self.total + layer.transfer_cost,
                page_outs=page_outs,
                anchor=(layer.in_s, layer.size_bytes),
            )
        return replace(
            self,
            actions=actions,
            run_bytes=self.run_bytes + layer.size_bytes,
            run_cost=self.run_cost + layer.recompute_cost,
            run_peak_bytes=max(self.run_peak_bytes, self.run_bytes + layer.recompute_bytes),
        )

    def dominates(self, other: ActionPrefix) -> bool:
        """Return whether all that may follow the other prefix is as good after this one."""
        return (
            self.total <= other.total
            and self.kept_bytes <= other.kept_bytes
            and self.page_outs.within(other.page_outs)
            and self.page_ins.within(other.page_ins)
        )


def best_actions(
    layers: Sequence[Layer], ram_bytes: int, actions: Sequence[Action] = tuple(Action)
) -> ActionPrefix | None:
    """Return the quickest of the allowed actions, None where none keep within the RAM.

    The last layer holds the loss and keeps its outputs.
    """
    prefixes = [ActionPrefix()]
    for layer in layers[:-1]:
        longer = []
        for prefix in prefixes:
            check_time_limit()
            ahead = prefix.forward(layer, ram_bytes)
            for action in actions if ahead else ():
                whole = ahead and ahead.backward(
                    layer, ram_bytes, run_ends=action != Action.RECOMPUTE
                )
                if whole:
                    longer.append(whole.with_action(action, layer))
        prefixes = _pruned(longer)
    ends = []
    for prefix in prefixes:
        drained_total = prefix.total + prefix.page_outs.drain_s
        drained = replace(prefix, total=drained_total, page_outs=Transfers())
        ahead = drained.forward(layers[-1], ram_bytes)
        whole = ahead and ahead.backward(layers[-1], ram_bytes, run_ends=True)
        if whole:
            spent = whole.total + whole.page_ins.drain_s
            ends.append(replace(whole, total=spent, actions=(*whole.actions, Action.KEEP)))
    return min(ends, key=lambda prefix: prefix.total, default=None)


def _pruned(prefixes: list[ActionPrefix]) -> list[ActionPrefix]:
    """Return the undominated prefixes, or the most promising of them."""
    groups: dict[object, list[ActionPrefix]] = {}
    for prefix in sorted(prefixes, key=lambda prefix: prefix.total):
        check_time_limit()
        key = (prefix.actions[-1], prefix.anchor, prefix.run_bytes, prefix.run_cost)
        kept = groups.setdefault(key, [])
        if not any(other.dominates(prefix) for other in kept):
            kept.append(prefix)
    kept_prefixes = [prefix for kept in groups.values() for prefix in kept]
    if len(kept_prefixes) <= WIDTH:
        return kept_prefixes
    most = 1 + max(prefix.kept_bytes for prefix in kept_prefixes)
    bins: dict[int, list[ActionPrefix]] = {}
    for prefix in sorted(kept_prefixes, key=_expected):
        members = bins.setdefault(prefix.kept_bytes * BINS // most, [])
        if len(members) < WIDTH // BINS:
            members.append(prefix)
    return [prefix for members in bins.values() for prefix in members]


def _expected(prefix: ActionPrefix) -> float:
    return prefix.total + prefix.page_outs.drain_s + prefix.page_ins.drain_s + prefix.run_cost


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
            recompute_cost=sum(computing[k] for k in chain.recomputed_nodes(s)),
            backward_cost=sum(computing[k] for k in step.backward),
            transfer_cost=0.0 if overlaps else out + back,
            out_s=out if overlaps else 0.0,
            in_s=back if overlaps else 0.0,
            size_bytes=chain.bytes_of(activation),
            input_bytes=chain.bytes_of(before),
            forward_bytes=chain.first[s].taped,
            recompute_bytes=chain.recomputed[s].taped,
            backward_bytes=chain.backward_bytes[s],
            others_bytes=chain.others_before(s),
        )
        before = step.state


def schedule_of(chain: Chain, actions: Sequence[Action]) -> Schedule:
    """Return the schedule of one action per step."""
    graph = chain.graph
    begin, last = begin_of_backward(graph), last_forward_uses(graph)
    by_action: dict[Action, set[int]] = {action: set() for action in Action}
    for step, action in zip(chain.steps, actions, strict=True):
        by_action[action].update(step.tape | step.state)
    demanded: dict[int, set[int]] = {}
    run: set[int] = set()
    for step, action in zip(chain.steps, actions, strict=True):
        if step.backward:
            demanded[step.backward[0]] = set(run) if action != Action.RECOMPUTE else set()
        if action == Action.RECOMPUTE:
            run |= step.tape
        elif step.backward:
            run = set()
    return retain(
        graph,
        keep=lambda t, i: i in by_action[Action.KEEP] or t < last[i] or t >= begin,
        demand=lambda t: demanded.get(t, ()),
        stored=by_action[Action.OFFLOAD],
    )
