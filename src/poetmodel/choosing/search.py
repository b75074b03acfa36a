"""Search for the set of layers with the highest score that has a schedule; prove it optimal.

Logic-based Benders decomposition (Hooker and Ottosson, 2003): a relaxation proposes a set, the
solver searches for a schedule of the step that trains exactly this set, and sets for which it finds
none become cuts.

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
from poetmodel.errors import InputError, join_names, quote
from poetmodel.problem.infeasibility import describe_limits
from poetmodel.result import Status, Termination
from poetmodel.solver.facade import execute

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from poetmodel.choosing.freezing import Freezable
    from poetmodel.device import Costs
    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.solver.request import Request

GRADIENT_NORM: Final = "gradient-norm"
"""Value of the option `scores` for which scores are norms of gradients."""
MIN_GAP: Final = 1e-9
"""Gap up to which a set counts as optimal, even if a smaller gap was requested. Also the minimum
divisor of a score density."""
DEADLINE_TOLERANCE: Final = 2e-6
"""Relative tolerance of deadlines in refutations and cuts. It exceeds the tolerance of the rows of
the relaxation, so that a cut excludes its set."""
CHECK_FRACTION: Final = 0.2
"""Maximum time to check a set that the relaxation proposed, as a fraction of the remaining time."""
TRIAL_FRACTION: Final = 0.03
"""Maximum time to check a set that was not proposed, as a fraction of the remaining time."""
FIRST_TRIALS_FRACTION: Final = 0.25
"""Fraction of the time limit after which no further set is checked before the first proposal."""
REFUTATION_FRACTION: Final = 0.05
"""Maximum time to refute a subset or to bound its needs, as a fraction of the remaining time."""
_MAX_LISTED: Final = 4
"""The `max_names` of `join_names` in messages."""
ANY_GAP: Final = 1.0
"""Requested gap for which the solver ends at the first schedule."""


@dataclass(frozen=True, kw_only=True)
class LayerSet:
    """The selected set of layers, with a bound on the scores of all sets."""

    layers: tuple[str, ...]
    """The layers to train, in the order of the model; empty if no set was found."""
    score: float
    """The sum of the scores of `layers`."""
    bound: float
    """Upper bound on the score of every set that has a schedule."""
    status: Status
    """Optimal within the gap tolerance, else feasible; without a set infeasible if proved, else
    unknown."""
    result: SolveResult | None = None
    """The result with a schedule of the graph that trains `layers`; None if no set was found."""
    reason: str = ""
    """Message that states why no set was found; empty otherwise."""
    statistics: Mapping[str, int] = field(default_factory=dict)
    """Number of checks of sets (``sets``) and of added cuts (``cuts``). A set that is checked again
    counts again."""

    @property
    def gap(self) -> float:
        """(bound - score) / bound; 0 if both are 0."""
        return (self.bound - self.score) / self.bound if self.bound > 0 else 0.0


def select_layers(
    freezable: Freezable,
    problem: Problem,
    layers: Mapping[str, Sequence[str]],
    scores: Mapping[str, float],
    *,
    request: Request,
) -> LayerSet:
    """Find the layers with the highest sum of scores whose training meets all limits.

    `problem` has the graph of `freezable`, which trains all layers and to which percentages refer.
    A layer with score 0 is not trained. Ctrl-C ends the search with the best set so far.

    Notes
    -----
    In padded graphs, a schedule for a set implies one for each subset (`Freezable.padded_graph`),
    and a refuted set refutes all supersets. A cut has a minimal subset of layers that the solver
    can still refute, after the needs of the other layers are subtracted from the limits: their
    state from the RAM, if all state is in RAM, and one computation of their nodes from the
    deadline. Without such a subset, the cut excludes only the infeasible set. If a set is neither
    scheduled nor refuted, only this set is excluded, and its score remains in the bound.
    """
    return _LayerSearch(freezable, problem, layers, scores, request).find_best_set()


class _LayerSearch:
    """The search for the best set, with its incumbent and its bound."""

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
        """The feasible set with the highest score so far; empty before one is found."""
        self.result: SolveResult | None = None
        """The result with a schedule for `best`; None before one is found."""
        self.open_scores: dict[frozenset[str], float] = {}
        """Scores of the proposed sets whose check found neither a schedule nor a proof."""
        self.status_of: dict[frozenset[str], Status] = {}
        """Status of each checked set; feasible if a schedule was found."""
        self.bound = self._score(self.relaxation.layers)
        """Upper bound on the score of every set that has a schedule."""
        self.n_checked = self.n_proposals = 0
        """Numbers of checks (`_check_set`) and of proposed sets (`_propose`)."""

    def find_best_set(self) -> LayerSet:
        """Search until the gap is closed, time is up or no set is proposed; return the best set."""
        if not self.relaxation.layers:
            raise InputError("scores: all are 0, so no set is better than another")
        with suppress(KeyboardInterrupt):  # return the best set so far
            self._propose_and_check()
        return self._make_layer_set()

    def _propose_and_check(self) -> None:
        """Check first sets, then sets that the relaxation proposes, until the gap is closed."""
        self._try_first_sets()
        while not self._is_gap_closed() and self.request.remaining_s() > 0:
            proposed_layers = self._propose()
            if proposed_layers is None:
                break
            status = self._check_set(proposed_layers, CHECK_FRACTION)
            if status == Status.INFEASIBLE:
                self.relaxation.cuts.append(self._make_cut(frozenset(proposed_layers)))
                self._try_subsets(proposed_layers)
            elif status == Status.UNKNOWN:
                self.open_scores[frozenset(proposed_layers)] = self._score(proposed_layers)
                exact_cut = SetCut(layers=frozenset(proposed_layers), is_exact=True)
                self.relaxation.cuts.append(exact_cut)
                self._try_subsets(proposed_layers)

    def _propose(self) -> tuple[str, ...] | None:
        """Return the best set of the relaxation, None if no new one; lower `bound` to its bound.

        `bound` stays at least the score of `best` and of each undecided proposed set.
        """
        solution = self.relaxation.solve(self.request)
        best_known_score = max((self._score(self.best), *self.open_scores.values()), default=0.0)
        if solution.is_infeasible:
            self.bound = best_known_score
            return None
        if solution.bound is not None:
            self.bound = min(
                self.bound, max(best_known_score, solution.bound * self.relaxation.unit)
            )
        self.n_proposals += 1
        proposed_layers = self.relaxation.selected_layers(solution)
        feasible_statuses = (Status.FEASIBLE, Status.OPTIMAL)
        return (
            None
            if not proposed_layers
            or self.status_of.get(frozenset(proposed_layers)) in feasible_statuses
            else proposed_layers
        )

    def _score(self, layers: Iterable[str]) -> float:
        """Return the sum of the scores of `layers`, added in the order of the model."""
        return float(sum(self.scores[layer] for layer in self._model_order(layers)))

    def _model_order(self, layers: Iterable[str]) -> tuple[str, ...]:
        layer_set = frozenset(layers)
        return tuple(layer for layer in self.relaxation.layers if layer in layer_set)

    def _is_gap_closed(self) -> bool:
        """Return whether a set was found, with at most the requested gap, or at most `MIN_GAP`."""
        score_gap = self.bound - self._score(self.best)
        return bool(self.best) and score_gap <= max(self.request.gap, MIN_GAP) * self.bound

    def _make_layer_set(self) -> LayerSet:
        """Return the set, bound and status of the search; a gap of up to `MIN_GAP` is closed."""
        score = self._score(self.best)
        bound = score if self.bound - score <= MIN_GAP * self.bound else self.bound
        is_infeasible = not self.best and bound <= 0
        status = Status.OPTIMAL if self.best and self._is_gap_closed() else Status.FEASIBLE
        if not self.best:
            status = Status.INFEASIBLE if is_infeasible else Status.UNKNOWN
        return LayerSet(
            layers=self.best,
            score=score,
            bound=bound,
            status=status,
            result=self.result,
            reason="" if self.best else self._no_set_reason(is_proved=is_infeasible),
            statistics={"sets": self.n_checked, "cuts": len(self.relaxation.cuts)},
        )

    def _no_set_reason(self, *, is_proved: bool) -> str:
        """Return a message that states why no set was found, or (`is_proved`) why none exists."""
        limits = describe_limits(self.problem)
        if not is_proved:
            return f"no layer that can be trained within {limits} was found in time"
        relaxation, message = self.relaxation, f"no layer can be trained within {limits}"
        if len(relaxation.excluded_layers) < len(relaxation.layers):
            return message
        smallest_layer = min(relaxation.layers, key=relaxation.min_ram_bytes)
        return (
            f"{message}; the lowest bound on the RAM for one layer is "
            f"{relaxation.min_ram_bytes(smallest_layer):,} B, for {smallest_layer!r}"
        )

    # -- feasible sets -----------------------------------------------------------------------------

    def _try_first_sets(self) -> None:
        """Check sets of the last layers, then of layers by descending `_score_density`."""
        candidates = [
            layer
            for layer in self.relaxation.layers
            if layer not in self.relaxation.excluded_layers
        ]
        self._try_prefixes(candidates[::-1])
        self._collect_layers(sorted(candidates, key=self._score_density, reverse=True))

    def _try_subsets(self, layers: Collection[str]) -> None:
        """Bisect as `_try_prefixes` over `layers`, sorted by descending score density."""
        self._try_prefixes(sorted(layers, key=self._score_density, reverse=True))

    def _try_prefixes(self, layers: Sequence[str]) -> None:
        """Bisect, while time remains, for the longest prefix of `layers` with a known schedule."""
        min_length, max_length = 0, len(layers) + 1
        while max_length - min_length > 1 and self._has_time():
            length = (min_length + max_length) // 2
            if self._can_train(layers[:length]):
                min_length = length
            else:
                max_length = length

    def _collect_layers(self, layers: Sequence[str]) -> None:
        """Add blocks of `layers`, in their order, to a set with a schedule, while time remains."""
        accepted: list[str] = []
        position, block_size = 0, len(layers)
        while position < len(layers) and self._has_time():
            if self._can_train([*accepted, *layers[position : position + block_size]]):
                accepted += layers[position : position + block_size]
                position += block_size
                block_size *= 2
            elif block_size == 1:
                position += 1
            else:
                block_size = (block_size + 1) // 2

    def _has_time(self) -> bool:
        """Return whether time remains to check sets that are not proposed."""
        request = self.request
        max_fraction = 1.0 if self.n_proposals else FIRST_TRIALS_FRACTION
        return request.elapsed_s() < max_fraction * request.time_limit_s

    def _can_train(self, layers: Sequence[str]) -> bool:
        return (
            self._may_fit(layers) and self._check_set(self._model_order(layers)) == Status.FEASIBLE
        )

    def _may_fit(self, layers: Collection[str]) -> bool:
        """Return whether lower bounds on time and, without paging, on RAM permit `layers`."""
        relaxation, deadline_s = self.relaxation, self.problem.deadline_s
        extra_bytes = (
            max(relaxation.working_bytes[layer] for layer in layers) - relaxation.min_working_bytes
        )
        if (
            not self.problem.can_page
            and relaxation.state_bytes(layers) + extra_bytes > relaxation.max_state_bytes
        ):
            return False
        return deadline_s is None or relaxation.extra_compute_s(
            layers
        ) + relaxation.common_nodes_s <= deadline_s * (1 + DEADLINE_TOLERANCE)

    def _score_density(self, layer: str) -> float:
        """Return a layer's score divided by the sum of the RAM and deadline fractions it needs."""
        relaxation = self.relaxation
        max_state_bytes = max(1, relaxation.max_state_bytes)
        used_fraction = (
            relaxation.state_bytes([layer])
            + relaxation.working_bytes[layer]
            - relaxation.min_working_bytes
        ) / max_state_bytes
        used_fraction += relaxation.extra_compute_s([layer]) / (
            self.problem.deadline_s or self.problem.pass_time_s or 1.0
        )
        return self.scores[layer] / max(used_fraction, MIN_GAP)

    def _check_set(self, layers: tuple[str, ...], time_fraction: float = TRIAL_FRACTION) -> Status:
        """Return FEASIBLE (even if optimal), INFEASIBLE or UNKNOWN; a better set becomes `best`."""
        key = frozenset(layers)
        if self.status_of.get(key, Status.UNKNOWN) == Status.UNKNOWN:
            self.n_checked += 1
            graph = self.freezable.graph_for(self._parameters(layers))
            problem = self._problem_for(graph)
            result = self._solve(problem, time_fraction)
            is_scheduled = result.schedule is not None
            self.status_of[key] = Status.FEASIBLE if is_scheduled else result.status
            if is_scheduled and self._score(layers) > self._score(self.best):
                self.best, self.result = layers, result
        return self.status_of[key]

    def _parameters(self, layers: Iterable[str]) -> list[str]:
        return [name for layer in layers for name in self.relaxation.layers[layer]]

    def _solve(
        self, problem: Problem, time_fraction: float, *, gap: float = ANY_GAP
    ) -> SolveResult:
        """Solve a problem within a fraction of the remaining time, by default to any schedule."""
        limit_s = max(time_fraction * self.request.remaining_s(), 1e-2)
        result = execute(problem, replace(self.request.restart(limit_s), gap=gap))
        if result.termination == Termination.INTERRUPTED:
            raise KeyboardInterrupt
        return result

    def _problem_for(self, graph: Graph, **changes: Any) -> Problem:
        """Return the problem for `graph`, with `changes` of fields; minimizes energy by default."""
        costs = costs_for(graph, self.problem)
        return replace(self.problem, graph=graph, costs=costs, **{"minimize": "energy", **changes})

    # -- infeasible sets ---------------------------------------------------------------------------

    def _make_cut(self, layers: frozenset[str]) -> SetCut:
        """Return a cut that excludes an infeasible set, and further sets if that can be proved."""
        subset = self._minimal_refuted_subset(layers)
        if subset is None:
            return SetCut(layers=layers, is_exact=True)
        relaxation, deadline_s = self.relaxation, self.problem.deadline_s
        state_bytes = None
        if not self.problem.can_page and not self._is_refuted(subset, layers, with_state=False):
            state_bytes = relaxation.state_bytes(layers)
        if deadline_s is None:
            if state_bytes is not None and self.problem.energy_budget_j is None:
                state_bytes = min(state_bytes, self._excess_state_bytes(subset))
            return SetCut(layers=subset, state_bytes=state_bytes)
        extra_s = (
            deadline_s * (1 + DEADLINE_TOLERANCE)
            - relaxation.common_nodes_s
            - relaxation.extra_compute_s(layers)
        )
        other_state_bytes = (
            0 if state_bytes is None else state_bytes - relaxation.state_bytes(subset)
        )
        extra_s = max(extra_s, self._min_extra_s(subset, other_state_bytes))
        return SetCut(layers=subset, state_bytes=state_bytes, extra_s=extra_s)

    def _minimal_refuted_subset(self, layers: frozenset[str]) -> frozenset[str] | None:
        """Return a nonempty refuted subset from which no layer could be removed, or None."""
        ordered_layers = sorted(layers, key=lambda layer: -len(self.relaxation.nodes_for[layer]))
        count = 1
        while not self._is_refuted(frozenset(ordered_layers[:count]), layers):
            if count >= len(ordered_layers):
                return None
            count *= 2
        remaining_layers = ordered_layers[:count]
        count = len(remaining_layers) // 2
        while count:
            position = 0
            while position < len(remaining_layers):
                fewer_layers = remaining_layers[:position] + remaining_layers[position + count :]
                if fewer_layers and self._is_refuted(frozenset(fewer_layers), layers):
                    remaining_layers = fewer_layers
                else:
                    position += count
            count //= 2
        return frozenset(remaining_layers)

    def _excess_state_bytes(self, subset: frozenset[str]) -> int:
        """Return the size of trained state that makes every superset of `subset` infeasible [B]."""
        relaxation = self.relaxation
        graph = self.freezable.padded_graph(self._parameters(self._model_order(subset)))
        problem = self._problem_for(graph, ram="100%", minimize="ram")
        min_ram_bytes = math.ceil(self._solve(problem, REFUTATION_FRACTION, gap=0.0).proven_bound)
        ram_bytes = self.problem.usable_ram_bytes - relaxation.common_state_bytes
        return ram_bytes - (min_ram_bytes - relaxation.state_bytes(subset)) + 1

    def _min_extra_s(self, subset: frozenset[str], other_state_bytes: int) -> float:
        """Return a lower bound on the time beyond a single pass of steps that train `subset` [s].

        `other_state_bytes` is subtracted from the RAM. If `subset` is infeasible then, returns the
        whole deadline.
        """
        ram = self.problem.ram_budget_bytes - other_state_bytes
        if not self.problem.can_page:
            ram -= self.relaxation.common_state_bytes
        graph = self.freezable.padded_graph(self._parameters(self._model_order(subset)))
        problem = self._problem_for(graph, ram=ram, deadline=None, minimize="time")
        result = self._solve(problem, REFUTATION_FRACTION, gap=self.request.gap)
        if result.status == Status.INFEASIBLE:
            return self.problem.deadline_s or 0.0
        return (result.proven_bound - problem.pass_time_s) * (1 - DEADLINE_TOLERANCE)

    def _is_refuted(
        self, subset: frozenset[str], full_set: frozenset[str], *, with_state: bool = True
    ) -> bool:
        """Return whether `subset` is proved to have no schedule within reduced limits.

        The minimum needs of the other layers of `full_set` are subtracted from the limits, those of
        state only `with_state`.
        """
        relaxation, problem = self.relaxation, self.problem
        ram, deadline_s = problem.ram_budget_bytes, problem.deadline_s
        if not problem.can_page:
            ram -= relaxation.common_state_bytes
            ram -= (relaxation.state_bytes(full_set) - relaxation.state_bytes(subset)) * with_state
        if deadline_s is not None:
            deadline_s += (
                DEADLINE_TOLERANCE * deadline_s
                - relaxation.buffer_update_s
                - relaxation.extra_compute_s(full_set)
                + relaxation.extra_compute_s(subset)
            )
        if ram <= 0 or (deadline_s is not None and deadline_s <= 0):
            return True
        graph = self.freezable.padded_graph(self._parameters(self._model_order(subset)))
        subset_problem = self._problem_for(graph, ram=ram, deadline=deadline_s)
        return self._solve(subset_problem, REFUTATION_FRACTION).status == Status.INFEASIBLE


def group_by_layer(names: Iterable[str], per: str) -> dict[str, tuple[str, ...]]:
    """Return parameter names by module, such as ``fc``, or by their own name (``tensor``)."""
    if per not in ("layer", "tensor"):
        raise InputError(f"per: expected layer or tensor, got {per!r}")
    layers: dict[str, tuple[str, ...]] = {}
    for name in names:
        layer = (name.rpartition(".")[0] or name) if per == "layer" else name
        layers[layer] = (*layers.get(layer, ()), name)
    return layers


def check_layer_names(scores: Mapping[str, float], layers: Collection[str], source: str) -> None:
    """Raise `InputError` if a score belongs to no layer; `source` begins the message."""
    unknown_names = [quote(name) for name in scores if name not in layers]
    layer_names = join_names([quote(name) for name in layers], max_names=_MAX_LISTED)
    if unknown_names:
        raise InputError(
            f"{source}: no layer is called {join_names(unknown_names, max_names=_MAX_LISTED)}; "
            f"expected {layer_names}"
        )


def check_scores(scores: Mapping[str, float], layers: Collection[str], source: str) -> None:
    """Raise `InputError` unless exactly the layers have scores, of 0 or more, with a finite sum."""
    check_layer_names(scores, layers, source)
    unscored_layers = [quote(name) for name in layers if name not in scores]
    invalid_scores = [
        f"{quote(name)} is {score:g}" for name, score in scores.items() if not 0 <= score < math.inf
    ]
    if unscored_layers:
        raise InputError(
            f"{source}: no score for {join_names(unscored_layers, max_names=_MAX_LISTED)}; use 0 "
            "for layers that should stay frozen"
        )
    if invalid_scores:
        raise InputError(
            f"{source}: the score of {join_names(invalid_scores, max_names=_MAX_LISTED)}; "
            "expected a finite number of 0 or more"
        )
    if not math.isfinite(sum(scores.values())):
        raise InputError(f"{source}: expected scores with a finite sum, such as fractions of 1")


def rename_costs(costs: Costs, graph: Graph, renamed_graph: Graph) -> Costs:
    """Return the costs of `graph` for `renamed_graph`, which differs only in names."""
    node_names = dict(zip(graph.node_index, renamed_graph.node_index, strict=True))
    tensor_names = dict(zip(graph.tensor_index, renamed_graph.tensor_index, strict=True))
    return replace(
        costs,
        compute={node_names[name]: cost for name, cost in costs.compute.items()},
        pages=None
        if costs.pages is None
        else {tensor_names[name]: cost for name, cost in costs.pages.items()},
    )
