"""Which layers to train: the set with the highest sum of scores that has a schedule, proved.

Logic-based Benders decomposition (Hooker and Ottosson, 2003): a relaxation proposes a set, the
solver of schedules says whether there is one for the step that trains just this set, and what it
refutes becomes a cut.

References
----------
J. N. Hooker and G. Ottosson, "Logic-based Benders decomposition", Mathematical Programming 96,
2003, doi:10.1007/s10107-003-0375-9.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.choosing.relaxation import ChoiceRelaxation, SetCut, costs_for
from poetmodel.errors import InputError, listed, shown
from poetmodel.problem.infeasibility import describe_limits
from poetmodel.result import Status, Termination
from poetmodel.solver import solve

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from poetmodel.choosing.freezing import Freezable
    from poetmodel.device import Costs
    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.solver.request import Request

GRADIENT_NORM: Final = "gradient-norm"
"""The scores that are norms of gradients."""
CLOSED: Final = 1e-9
"""Gap at which a score is the best, whatever gap was asked for."""
EXTRA: Final = 2e-6
"""By how much more than its deadline a set is refuted, relatively, so that rounding in the
relaxation lets it through no more."""
LONGEST_CHECK_RATIO: Final = 0.2
"""Most time for the question whether a set has a schedule, as a share of what is left."""
LONGEST_TRIAL_RATIO: Final = 0.03
"""The same for a set that is tried without being proposed."""
TRIALS_RATIO: Final = 0.25
"""Share of the time after which no more sets are tried before the first is proposed."""
LONGEST_REFUTATION_RATIO: Final = 0.05
"""The same for a part of a refuted set."""
_MOST_NAMED: Final = 4
"""How many names one message lists."""
ANY: Final = 1.0
"""A gap that every schedule has."""


@dataclass(frozen=True, kw_only=True)
class LayerSet:
    """A set of layers, and what is proved of all others."""

    layers: tuple[str, ...]
    """Those that are trained, in the order of the model; none where no set was found."""
    score: float
    """The sum of their scores."""
    bound: float
    """No set that has a schedule has a higher sum."""
    status: Status
    """What is proved; infeasible means that nothing can be trained."""
    result: SolveResult | None = None
    """A schedule for it, of the graph derived from that which trains all."""
    reason: str = ""
    """Why there is no set, in words."""
    statistics: Mapping[str, int] = field(default_factory=dict)
    """How many sets were tried, and how many cuts were made."""

    @property
    def gap(self) -> float:
        """(bound - score) / bound, 0 where both are 0."""
        return (self.bound - self.score) / self.bound if self.bound > 0 else 0.0


def select(
    freezable: Freezable,
    problem: Problem,
    layers: Mapping[str, Sequence[str]],
    scores: Mapping[str, float],
    *,
    request: Request,
) -> LayerSet:
    """Find the layers with the highest sum of scores whose training keeps all limits.

    Parameters
    ----------
    freezable : Freezable
        The step.
    problem : Problem
        The limits, with the graph in which all is trained. Percentages are of that.
    layers : mapping of str to sequence of str
        The parameters of each layer.
    scores : mapping of str to float
        Of each layer, 0 or more. A layer with score 0 stays as it is.
    request : Request
        How to solve, and for how long.

    Notes
    -----
    A set that trains less needs a part of the nodes, so that a schedule for more layers leaves one
    for fewer: see `Freezable.padded`. So what refutes a set refutes all larger ones. A cut has as
    few layers as the solver can still refute, with what the others of the set take off the limits:
    their state off the RAM, where all state is there, and one computation of their nodes off the
    deadline. A question that the solver leaves open excludes nothing: the set is put aside, and its
    score stays in the bound.
    """
    return _LayerSearch(freezable, problem, layers, scores, request).run()


class _LayerSearch:
    """The search for the best set."""

    def __init__(
        self,
        freezable: Freezable,
        problem: Problem,
        layers: Mapping[str, Sequence[str]],
        scores: Mapping[str, float],
        request: Request,
    ) -> None:
        self.freezable, self.request = freezable, request
        self.problem = problem.resolved()
        self.relaxation = ChoiceRelaxation(
            freezable=freezable,
            problem=self.problem,
            layers={name: tuple(layers[name]) for name in layers if scores[name] > 0},
            scores=scores,
        )
        self.scores = scores
        self.best: tuple[str, ...] = ()
        self.result: SolveResult | None = None
        self.open: dict[frozenset[str], float] = {}
        """Scores of the sets of which nothing is known."""
        self.known: dict[frozenset[str], Status] = {}
        self.bound = self._score(self.relaxation.layers)
        self.tried = self.proposals = 0

    def run(self) -> LayerSet:
        """Solve relaxations until the best set is known, or time is up."""
        if not self.relaxation.layers:
            raise InputError("scores: all are 0, so that no set is better than another")
        with suppress(KeyboardInterrupt):  # the best set so far stays
            self._search()
        return self._selection()

    def _search(self) -> None:
        self._start()
        while not self._is_closed() and self.request.remaining_s() > 0:
            proposed = self._propose()
            if proposed is None:
                break
            status = self._try(proposed, LONGEST_CHECK_RATIO)
            if status == Status.INFEASIBLE:
                self.relaxation.cuts.append(self._refutation(frozenset(proposed)))
                self._repair(proposed)
            elif status == Status.UNKNOWN:
                self.open[frozenset(proposed)] = self._score(proposed)
                excluded = SetCut(layers=frozenset(proposed), exactly=True)
                self.relaxation.cuts.append(excluded)
                self._repair(proposed)

    def _propose(self) -> tuple[str, ...] | None:
        """Return the best set that nothing excludes; None where there is none, or time is up."""
        solution = self.relaxation.solve(
            self.request.backend,
            max(self.request.remaining_s(), 1e-3),
            seed=self.request.seed,
            solver_options=self.request.solver_options,
        )
        left = max((self._score(self.best), *self.open.values()), default=0.0)
        if solution.infeasible:
            self.bound = left
            return None
        if solution.bound is not None:
            self.bound = min(self.bound, max(left, solution.bound * self.relaxation.unit))
        self.proposals += 1
        proposed = self.relaxation.chosen(solution)
        settled = (Status.FEASIBLE, Status.OPTIMAL)
        return None if not proposed or self.known.get(frozenset(proposed)) in settled else proposed

    def _score(self, layers: Iterable[str]) -> float:
        return float(sum(self.scores[layer] for layer in self._ordered(layers)))

    def _ordered(self, layers: Iterable[str]) -> tuple[str, ...]:
        """Return layers in the order of the model."""
        wanted = frozenset(layers)
        return tuple(layer for layer in self.relaxation.layers if layer in wanted)

    def _is_closed(self) -> bool:
        """Whether the gap is at most the one asked for."""
        missing = self.bound - self._score(self.best)
        return bool(self.best) and missing <= max(self.request.gap, CLOSED) * self.bound

    def _selection(self) -> LayerSet:
        score = self._score(self.best)
        bound = score if self.bound - score <= CLOSED * self.bound else self.bound
        nothing = not self.best and bound <= 0
        status = Status.OPTIMAL if self.best and self._is_closed() else Status.FEASIBLE
        if not self.best:
            status = Status.INFEASIBLE if nothing else Status.UNKNOWN
        return LayerSet(
            layers=self.best,
            score=score,
            bound=bound,
            status=status,
            result=self.result,
            reason="" if self.best else self._reason(proved=nothing),
            statistics={"sets": self.tried, "cuts": len(self.relaxation.cuts)},
        )

    def _reason(self, *, proved: bool) -> str:
        limits = describe_limits(self.problem)
        if not proved:
            return f"no layer was found in time that can be trained within {limits}"
        of, nothing = self.relaxation, f"no layer can be trained within {limits}"
        if len(of.excluded) < len(of.layers):
            return nothing
        least = min(of.layers, key=of.floor_bytes)
        return (
            f"{nothing}; the least RAM that one needs is {of.floor_bytes(least):,} B, of {least!r}"
        )

    # -- sets that have a schedule -----------------------------------------------------------------

    def _start(self) -> None:
        """Try as many of the last layers as can be trained, and of those that score most for it."""
        able = [layer for layer in self.relaxation.layers if layer not in self.relaxation.excluded]
        self._try_longest(able[::-1])
        self._try_in_turn(sorted(able, key=self._density, reverse=True))

    def _repair(self, layers: Collection[str]) -> None:
        """Try as many of some layers as can be trained, those that score most for it first."""
        self._try_longest(sorted(layers, key=self._density, reverse=True))

    def _try_longest(self, layers: Sequence[str]) -> None:
        """Look by halves for the longest beginning of a list that can be trained."""
        low, high = 0, len(layers) + 1
        while high - low > 1 and self._has_time():
            middle = (low + high) // 2
            if self._can_train(layers[:middle]):
                low = middle
            else:
                high = middle

    def _try_in_turn(self, layers: Sequence[str]) -> None:
        """Add layers of a list, many at a time, wherever those before can be trained with them."""
        chosen: list[str] = []
        first, size = 0, len(layers)
        while first < len(layers) and self._has_time():
            if self._can_train([*chosen, *layers[first : first + size]]):
                chosen += layers[first : first + size]
                first += size
                size *= 2
            elif size == 1:
                first += 1
            else:
                size = (size + 1) // 2

    def _has_time(self) -> bool:
        """Whether there is time to try a set that is not proposed."""
        request = self.request
        trials = 1.0 if self.proposals else TRIALS_RATIO
        return request.elapsed_s() < trials * request.time_limit_s

    def _can_train(self, layers: Sequence[str]) -> bool:
        return self._may_fit(layers) and self._try(self._ordered(layers)) == Status.FEASIBLE

    def _may_fit(self, layers: Collection[str]) -> bool:
        """Whether no limit rules a set out at once."""
        of, deadline_s = self.relaxation, self.problem.deadline_s
        more = max(of.working_bytes[layer] for layer in layers) - of.least_bytes
        if not self.problem.can_page and of.state_bytes(layers) + more > of.room_bytes:
            return False
        return deadline_s is None or of.pass_s(layers) + of.always_s <= deadline_s * (1 + EXTRA)

    def _density(self, layer: str) -> float:
        """Return the score of a layer for what it takes of the limits alone."""
        of = self.relaxation
        room = max(1, of.room_bytes)
        taken = (of.state_bytes([layer]) + of.working_bytes[layer] - of.least_bytes) / room
        taken += of.pass_s([layer]) / (self.problem.deadline_s or self.problem.pass_time_s or 1.0)
        return self.scores[layer] / max(taken, CLOSED)

    def _try(self, layers: tuple[str, ...], ratio: float = LONGEST_TRIAL_RATIO) -> Status:
        """Ask the solver whether a set has a schedule, within a share of the time that is left."""
        key = frozenset(layers)
        if self.known.get(key, Status.UNKNOWN) == Status.UNKNOWN:
            self.tried += 1
            graph = self.freezable.trained(self._parameters(layers))
            stated = self._problem(graph)
            result = self._solved(stated, ratio)
            scheduled = result.schedule is not None
            self.known[key] = Status.FEASIBLE if scheduled else result.status
            if scheduled and self._score(layers) > self._score(self.best):
                self.best, self.result = layers, result
        return self.known[key]

    def _parameters(self, layers: Iterable[str]) -> list[str]:
        return [name for layer in layers for name in self.relaxation.layers[layer]]

    def _solved(self, stated: Problem, ratio: float, *, gap: float = ANY) -> SolveResult:
        limit_s = max(ratio * self.request.remaining_s(), 1e-2)
        result = solve(
            stated,
            backend=self.request.backend,
            time_limit=limit_s,
            gap=gap,
            threads=self.request.threads,
            seed=self.request.seed,
            solver_options=self.request.solver_options,
        )
        if result.termination == Termination.INTERRUPTED:
            raise KeyboardInterrupt
        return result

    def _problem(self, graph: Graph, **limits: Any) -> Problem:
        costs = costs_for(graph, self.problem)
        return replace(self.problem, graph=graph, costs=costs, **{"minimize": "energy", **limits})

    # -- sets that have none -----------------------------------------------------------------------

    def _refutation(self, layers: frozenset[str]) -> SetCut:
        """Return a cut for a set that has no schedule."""
        part = self._refuted_part(layers)
        if part is None:
            return SetCut(layers=layers, exactly=True)
        of, deadline_s = self.relaxation, self.problem.deadline_s
        state_bytes = None
        if not self.problem.can_page and not self._is_refuted(part, layers, with_state=False):
            state_bytes = of.state_bytes(layers)
        if deadline_s is None:
            if state_bytes is not None and self.problem.energy_budget_j is None:
                state_bytes = min(state_bytes, self._least_state_bytes(part))
            return SetCut(layers=part, state_bytes=state_bytes)
        extra_s = deadline_s * (1 + EXTRA) - of.always_s - of.pass_s(layers)
        beside_bytes = 0 if state_bytes is None else state_bytes - of.state_bytes(part)
        extra_s = max(extra_s, self._extra_s(part, beside_bytes))
        return SetCut(layers=part, state_bytes=state_bytes, extra_s=extra_s)

    def _refuted_part(self, layers: frozenset[str]) -> frozenset[str] | None:
        """Return a part of a set that is refuted, and of which no layer can be left out; or None.

        The layers whose training needs the most nodes come first.
        """
        order = sorted(layers, key=lambda layer: -len(self.relaxation.nodes_for[layer]))
        size = 1
        while not self._is_refuted(frozenset(order[:size]), layers):
            if size >= len(order):
                return None
            size *= 2
        left = order[:size]
        size = len(left) // 2
        while size:
            first = 0
            while first < len(left):
                rest = left[:first] + left[first + size :]
                if rest and self._is_refuted(frozenset(rest), layers):
                    left = rest
                else:
                    first += size
            size //= 2
        return frozenset(left)

    def _least_state_bytes(self, part: frozenset[str]) -> int:
        """Return the trained state that is too much where some layers are trained [B]."""
        of = self.relaxation
        graph = self.freezable.padded(self._parameters(self._ordered(part)))
        stated = self._problem(graph, ram="100%", minimize="ram")
        least = math.ceil(self._solved(stated, LONGEST_REFUTATION_RATIO, gap=0.0).proven_bound)
        room = self.problem.usable_ram_bytes - of.always_state_bytes
        return room - (least - of.state_bytes(part)) + 1

    def _extra_s(self, part: frozenset[str], beside_bytes: int) -> float:
        """Return the least time beyond a pass of a step that trains some layers [s].

        Others take so much of the RAM.
        """
        ram = self.problem.ram_budget_bytes - beside_bytes
        if not self.problem.can_page:
            ram -= self.relaxation.always_state_bytes
        graph = self.freezable.padded(self._parameters(self._ordered(part)))
        stated = self._problem(graph, ram=ram, deadline=None, minimize="time")
        result = self._solved(stated, LONGEST_REFUTATION_RATIO, gap=self.request.gap)
        if result.status == Status.INFEASIBLE:
            return self.problem.deadline_s or 0.0
        return (result.proven_bound - stated.pass_time_s) * (1 - EXTRA)

    def _is_refuted(
        self, part: frozenset[str], whole: frozenset[str], *, with_state: bool = True
    ) -> bool:
        """Whether a part of a set has no schedule beside what the rest takes in any case."""
        of, problem = self.relaxation, self.problem
        ram, deadline_s = problem.ram_budget_bytes, problem.deadline_s
        if not problem.can_page:
            ram -= of.always_state_bytes
            ram -= (of.state_bytes(whole) - of.state_bytes(part)) * with_state
        if deadline_s is not None:
            deadline_s += EXTRA * deadline_s - of.renewal_s - of.pass_s(whole) + of.pass_s(part)
        if ram <= 0 or (deadline_s is not None and deadline_s <= 0):
            return True
        graph = self.freezable.padded(self._parameters(self._ordered(part)))
        stated = self._problem(graph, ram=ram, deadline=deadline_s)
        return self._solved(stated, LONGEST_REFUTATION_RATIO).status == Status.INFEASIBLE


def layers_of(names: Iterable[str], per: str) -> dict[str, tuple[str, ...]]:
    """Return the parameters of each layer: of each module, or each parameter alone.

    Parameters
    ----------
    names : iterable of str
        Of the parameters, with the paths of their modules.
    per : {'layer', 'tensor'}
        What is trained or frozen as a whole. A parameter without a module is a layer of its own.
    """
    if per not in ("layer", "tensor"):
        raise InputError(f"per: expected layer or tensor, got {per!r}")
    layers: dict[str, tuple[str, ...]] = {}
    for name in names:
        layer = (name.rpartition(".")[0] or name) if per == "layer" else name
        layers[layer] = (*layers.get(layer, ()), name)
    return layers


def check_names(scores: Mapping[str, float], layers: Collection[str], source: str) -> None:
    """Raise if a score is that of no layer."""
    unknown = [shown(name) for name in scores if name not in layers]
    known = listed([shown(name) for name in layers], max_names=_MOST_NAMED)
    if unknown:
        raise InputError(
            f"{source}: no layer is called {listed(unknown, max_names=_MOST_NAMED)}; expected "
            f"{known}"
        )


def check_scores(scores: Mapping[str, float], layers: Collection[str], source: str) -> None:
    """Raise unless there is a score for each layer, and for nothing else, and all are 0 or more."""
    check_names(scores, layers, source)
    missing = [shown(name) for name in layers if name not in scores]
    wrong = [
        f"{shown(name)} is {score:g}" for name, score in scores.items() if not 0 <= score < math.inf
    ]
    if missing:
        raise InputError(
            f"{source}: no score for {listed(missing, max_names=_MOST_NAMED)}; give 0 for what is "
            "to stay as it is"
        )
    if wrong:
        raise InputError(
            f"{source}: the score of {listed(wrong, max_names=_MOST_NAMED)}; expected 0 or more"
        )
    if not math.isfinite(sum(scores.values())):
        raise InputError(f"{source}: expected scores with a finite sum, such as shares of 1")


def renamed(costs: Costs, graph: Graph, other: Graph) -> Costs:
    """Return the costs of a graph for another one, which differs in names alone."""
    nodes = dict(zip(graph.node_index, other.node_index, strict=True))
    tensors = dict(zip(graph.tensor_index, other.tensor_index, strict=True))
    return replace(
        costs,
        compute={nodes[name]: cost for name, cost in costs.compute.items()},
        pages=None
        if costs.pages is None
        else {tensors[name]: cost for name, cost in costs.pages.items()},
    )
