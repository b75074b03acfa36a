"""Results of earlier compilations of a step, cached by all values that they depend on.

The cache has entries of three kinds: profiles of the operations of a graph on a host (outputs and
workspaces), their costs, and the schedule of a problem. A cached schedule is always verified again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel import __version__
from poetmodel.errors import InputError
from poetmodel.result import Termination
from poetmodel.schedule import Schedule
from poetmodel.schedule.identity import GraphIdentity
from poetmodel.solver.facade import DEFAULT_FORMULATION
from poetmodel.solver.outcome import Outcome, make_result, make_valid_candidate
from poetmodel.solver.request import Request
from poetmodel.torch.cache import (
    Cache,
    NoKeyError,
    digest,
    host_key,
    plain_layout,
    plain_operations,
    plain_value,
)
from poetmodel.torch.graph.profiles import OpProfile, parse_profiles
from poetmodel.torch.graph.tensors import storage_key, tensors_in
from poetmodel.torch.runtime.convolutions import describe_divided_kernels
from poetmodel.torch.runtime.profiling import (
    CACHED_NOTE,
    Paging,
    Profile,
    TransferTime,
    build_profile,
)
from poetmodel.torch.step.trace import Trace, build_captured_graph, build_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.torch.capturing.joint_graph import Joint

_SPANS: Final = ("R", "kept", "stored", "M_in", "M_out")
"""Names of a schedule's fields in the cache; spans of stages replace long lists of pairs."""


def is_final_result(result: SolveResult, *, time_limit_s: float) -> bool:
    """Return whether to use a cached result instead of solving for `time_limit_s` seconds.

    False after an interrupt, and if the solve reached a time limit below `time_limit_s`.
    """
    if result.termination == Termination.TIME_LIMIT:
        return (result.time_limit_s or 0.0) >= time_limit_s
    return result.termination != Termination.INTERRUPTED


class CachedSchedules:
    """Reads and stores schedules of problems in a cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def load_result(self, problem: Problem, *, gap: float) -> SolveResult | None:
        """Return the cached result of a problem: its schedule, verified now, and its bound.

        Returns None if the cache has no valid result, or the schedule is invalid. If the solve
        ended with a proof, but the gap of the result is larger than `gap`, the termination is
        ``interrupted``, so that the result is not final.
        """
        content = self._cache.read("schedule", _problem_key(problem))
        if content is None:
            return None
        try:
            decisions: dict[str, Any] = {
                name: [tuple(map(int, span)) for span in content["schedule"][name]]
                for name in _SPANS
            }
            schedule = Schedule.from_spans(
                **decisions,
                resident=map(int, content["schedule"]["resident"]),
                identity=GraphIdentity.from_graph(problem.graph),
            )
            candidate = make_valid_candidate(problem, schedule)
            request = Request(time_limit_s=content["time_limit_s"], gap=gap)
            outcome = Outcome(
                termination=Termination(content["termination"]),
                candidate=candidate,
                bound=float(content["bound"]) - problem.objective.baseline,
                versions=content["versions"],
            )
        except (InputError, TypeError, ValueError, KeyError, IndexError):
            return None
        if candidate is None:
            return None
        result = make_result(problem, request, outcome, formulation=DEFAULT_FORMULATION)
        if result.termination == Termination.STALLED != outcome.termination:
            # The solve stopped at a wider gap: the caller solves again.
            return replace(result, termination=Termination.INTERRUPTED)
        return result

    def store(self, result: SolveResult) -> None:
        """Store a result (schedule and bound), unless the cached result is better.

        Better is a smaller value, or the same value with a smaller gap; on ties, the new result is
        stored. A result without a schedule, or of a solve without a time limit, is not stored.
        """
        problem, schedule = result.problem, result.schedule
        if schedule is None or result.time_limit_s is None:
            return
        cached_result = self.load_result(problem, gap=result.requested_gap)
        if cached_result is not None and _rank_key(cached_result) < _rank_key(result):
            return
        content = {
            "schedule": {name: getattr(schedule, name) for name in (*_SPANS, "resident")},
            "bound": result.proven_bound,
            "termination": str(result.termination),
            "time_limit_s": result.time_limit_s,
            "versions": dict(result.versions),
        }
        self._cache.write("schedule", _problem_key(problem), content)


class CachedStep(CachedSchedules):
    """Loads and stores the profiles, costs and schedules of a captured step in a cache.

    If `cache` has no folder, or `joint` contains a value without a key, a new cache in memory is
    used instead.
    """

    def __init__(self, cache: Cache, joint: Joint) -> None:
        """Compute the key of the step; without a folder or key, use a new cache in memory."""
        super().__init__(cache)
        self._joint = joint
        self._key: str | None = None
        if cache.folder is not None:
            with suppress(NoKeyError):
                self._key = digest(host_key(), _plain_graph(joint))
        if self._key is None:
            self._cache = Cache(None)

    def load_trace(self) -> Trace:
        """Return the trace of the step, with profiles of its operations from the cache.

        They have sizes, layouts, FLOP and workspaces; `load_profile` returns the costs. Without
        valid cached profiles, executes the step to profile it, and stores the profiles. Raises
        `CaptureError` as `CapturedGraph` does.
        """
        joint, key = self._joint, self._key or ""
        cached_profiles = _parse_step(self._cache.read("step", key))
        captured_graph = build_captured_graph(joint, profiles=cached_profiles)
        if cached_profiles is None:
            profiles = captured_graph.profiles.items()
            entries = [[index, profile.to_list()] for index, profile in profiles]
            self._cache.write("step", key, entries)
        return build_trace(joint, captured_graph)

    # -- costs ---------------------------------------------------------------------------------

    def load_profile(
        self, trace: Trace, folder: str | Path | None, measure: Callable[[], Profile]
    ) -> Profile:
        """Return the costs of `trace` with pages in `folder`: from the cache, else from `measure`.

        An entry of the cache is valid for one step, one `folder`, and the same division of
        convolutions in `trace`. Stores the costs that `measure` returns.
        """
        path = None if folder is None else str(Path(folder).resolve())
        key = digest(self._key, path, describe_divided_kernels(trace))
        measured = _parse_times(self._cache.read("costs", key), count=len(trace.graph.nodes))
        if measured is not None:
            return build_profile(trace, **measured, origin=CACHED_NOTE)
        profile = measure()
        compute = profile.costs.compute
        times_s = [
            compute[node.name].time_s if node.name in compute else 0.0 for node in trace.graph.nodes
        ]
        content = {
            "times_s": times_s,
            "paging": None if profile.paging is None else asdict(profile.paging),
            "steps_s": profile.steps_s,
            "threads": profile.threads,
        }
        self._cache.write("costs", key, content)
        return profile


def _rank_key(result: SolveResult) -> tuple[float, float]:
    """Return (value, gap) of a result for comparisons; smaller is better.

    A missing value counts as infinite, a missing gap as 1.
    """
    value, gap = result.value, result.gap
    return (float("inf") if value is None else value, 1.0 if gap is None else gap)


def _parse_step(content: Any) -> dict[int, OpProfile] | None:
    """Return the cached profiles by position; None if `content` is none or damaged."""
    with suppress(TypeError, ValueError):
        indices, lists = zip(*content, strict=True)
        profiles = parse_profiles(lists)
        if profiles is not None:
            return dict(zip(map(int, indices), profiles, strict=True))
    return None


def _parse_times(content: Any, *, count: int) -> dict[str, Any] | None:
    """Return the cached arguments of `build_profile`; None if `content` is none or damaged.

    `count` is the number of nodes, each of which has a time.
    """
    with suppress(TypeError, ValueError, KeyError):
        times_s = list(map(float, content["times_s"]))
        paging = content["paging"]
        if paging is not None:
            transfers = {name: TransferTime(**paging[name]) for name in ("page_in", "page_out")}
            paging = Paging(**(paging | transfers))
        if len(times_s) == count:
            return {
                "times_s": times_s,
                "paging": paging,
                "steps_s": list(map(float, content["steps_s"])),
                "threads": int(content["threads"]),
            }
    return None


def _problem_key(problem: Problem) -> str:
    device = problem.costs.device
    costs = [problem.table.to_dict(), None if device is None else str(asdict(device))]
    return digest(__version__, problem.graph.sha256, problem.to_dict(), costs)


# -- keys of captured steps -----------------------------------------------------------------------


def _plain_graph(joint: Joint) -> list[Any]:
    """Return operations, shapes, arguments, results and clipping norm of a graph, for a key.

    A tensor among the arguments is represented by its layout, the size of its storage, the tensors
    that share this storage, and ``requires_grad``, but not by its values. Other arguments are
    represented by their values. Shapes are included because they may depend on values that the
    model reads, such as masks. Raises `NoKeyError` if a value has no key.
    """
    nodes = list(joint.graph_module.graph.nodes)
    shapes = [[list(tensor.shape) for tensor in tensors_in(node.meta.get("val"))] for node in nodes]
    positions = {node: index for index, node in enumerate(nodes)}
    storage_groups: dict[int, int] = {}
    arguments = []
    # Storage keys are unique only while the tensors exist.
    values = list(map(joint.value, joint.arguments))
    for argument, value in zip(joint.arguments, values, strict=True):
        description: Any = (
            plain_value(value, positions) if not isinstance(value, torch.Tensor) else None
        )
        if isinstance(value, torch.Tensor):
            group = storage_groups.setdefault(storage_key(value), len(storage_groups))
            description = [
                *plain_layout(value),
                group,
                value.untyped_storage().nbytes(),
                value.requires_grad,
            ]
        arguments.append([str(argument.kind), argument.name, positions[argument.node], description])
    results = [[str(result.kind), positions[result.node], result.path] for result in joint.results]
    max_norm = plain_value(joint.clip_grad_norm, positions)
    return [plain_operations(joint.graph_module.graph), shapes, arguments, results, max_norm]
