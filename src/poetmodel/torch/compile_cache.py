"""Results of earlier compiles of a step, by all that it depends on.

Three kinds of things are kept: what operations make with their workspaces, and their costs, for a
graph on a host; and the schedule of a problem, which is verified again.
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
from poetmodel.solver.facade import DEFAULT
from poetmodel.solver.outcome import Outcome, accepted, finish
from poetmodel.solver.request import Request
from poetmodel.torch.cache import (
    Cache,
    UnknownError,
    digest,
    host_key,
    operations_form,
    tensor_form,
    value_form,
)
from poetmodel.torch.graph.profiles import OpProfile
from poetmodel.torch.graph.tensors import storage_key, tensors_in
from poetmodel.torch.runtime.convolutions import describe_split_kernels
from poetmodel.torch.runtime.profiling import (
    MEASURED_BEFORE,
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
"""Stored form of a schedule: pairs, and spans in place of the many pairs that they stand for."""


def is_settled(result: SolveResult, *, within_s: float) -> bool:
    """Whether solving anew, in so much time, would find nothing else."""
    if result.termination == Termination.TIME_LIMIT:
        return (result.time_limit_s or 0.0) >= within_s
    return result.termination != Termination.INTERRUPTED


class Schedules:
    """The schedules that a cache has of problems."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def result(self, problem: Problem, *, gap: float) -> SolveResult | None:
        """Return the schedule that is known of a problem, as verified now, with its bound."""
        content = self._cache.read("schedule", _problem_key(problem))
        if content is None:
            return None
        try:
            known: dict[str, Any] = {
                name: [tuple(map(int, numbers)) for numbers in content["schedule"][name]]
                for name in _SPANS
            }
            schedule = Schedule.from_spans(
                **known,
                resident=map(int, content["schedule"]["resident"]),
                identity=GraphIdentity.of(problem.graph),
            )
            candidate = accepted(problem, schedule)
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
        result = finish(problem, request, outcome, formulation=DEFAULT)
        if result.termination == Termination.STALLED != outcome.termination:
            # What was proved for a wider gap is no reason to stop at this one.
            return replace(result, termination=Termination.INTERRUPTED)
        return result

    def keep(self, result: SolveResult) -> None:
        """Keep a result, where none that is better is known."""
        problem, schedule = result.problem, result.schedule
        if schedule is None or result.time_limit_s is None:
            return
        before = self.result(problem, gap=result.requested_gap)
        if before is not None and _rank(before) < _rank(result):
            return
        content = {
            "schedule": {name: getattr(schedule, name) for name in (*_SPANS, "resident")},
            "bound": result.proven_bound,
            "termination": str(result.termination),
            "time_limit_s": result.time_limit_s,
            "versions": dict(result.versions),
        }
        self._cache.write("schedule", _problem_key(problem), content)


class KnownStep(Schedules):
    """A captured step, and what a cache has of it and shall have."""

    def __init__(self, cache: Cache, joint: Joint) -> None:
        super().__init__(cache)
        self._joint = joint
        self._key: str | None = None
        if cache.folder is not None:
            with suppress(UnknownError):
                self._key = digest(host_key(), _graph_form(joint))
        if self._key is None:
            self._cache = Cache(None)

    def trace(self) -> Trace:
        """Return the trace: of what is known, else by running the step."""
        joint, key = self._joint, self._key or ""
        content = self._cache.read("step", key)
        with suppress(TypeError, ValueError, KeyError, IndexError, AttributeError):
            if content is not None:
                known = {int(k): OpProfile.from_list(values) for k, values in content}
                return build_trace(joint, build_captured_graph(joint, known=known))
        parts = build_captured_graph(joint)
        plain = [[k, observed.to_list()] for k, observed in parts.profiles.items()]
        self._cache.write("step", key, plain)
        return build_trace(joint, parts)

    # -- costs ---------------------------------------------------------------------------------

    def profile(
        self, trace: Trace, folder: str | Path | None, measure: Callable[[], Profile]
    ) -> Profile:
        """Return the profile with pages in a folder: the known one, else what `measure` does."""
        path = None if folder is None else str(Path(folder).resolve())
        key = digest(self._key, path, describe_split_kernels(trace))
        content = self._cache.read("costs", key)
        with suppress(TypeError, ValueError, KeyError):
            if content is not None:
                return build_profile(
                    trace,
                    times_s=content["times_s"],
                    paging=_paging(content["paging"]),
                    steps_s=content["steps_s"],
                    threads=content["threads"],
                    origin=MEASURED_BEFORE,
                )
        profile = measure()
        compute = profile.costs.compute
        times_s = [compute[n.name].time_s if n.name in compute else 0.0 for n in trace.graph.nodes]
        content = {
            "times_s": times_s,
            "paging": None if profile.paging is None else asdict(profile.paging),
            "steps_s": profile.steps_s,
            "threads": profile.threads,
        }
        self._cache.write("costs", key, content)
        return profile


def _rank(result: SolveResult) -> tuple[float, float]:
    value, gap = result.value, result.gap
    return (float("inf") if value is None else value, 1.0 if gap is None else gap)


def _paging(content: Any) -> Paging | None:
    if content is None:
        return None
    ways = {name: TransferTime(**content[name]) for name in ("page_in", "page_out")}
    return Paging(**(content | ways))


def _problem_key(problem: Problem) -> str:
    device = problem.costs.device
    costs = [problem.table.to_dict(), None if device is None else str(asdict(device))]
    return digest(__version__, problem.graph.sha256, problem.to_dict(), costs)


# -- what a step comes from ------------------------------------------------------------------------


def _graph_form(joint: Joint) -> list[Any]:
    """Return a captured graph as plain values: operations, arguments, forms of tensors.

    Shapes may depend on values that the model reads: what a mask selects has no size otherwise.
    """
    nodes = list(joint.graph_module.graph.nodes)
    shapes = [[list(tensor.shape) for tensor in tensors_in(node.meta.get("val"))] for node in nodes]
    positions = {node: k for k, node in enumerate(nodes)}
    groups: dict[int, int] = {}
    arguments = []
    values = list(map(joint.value, joint.arguments))  # held: keys are of the living
    for argument, value in zip(joint.arguments, values, strict=True):
        form: Any = value_form(value, positions) if not isinstance(value, torch.Tensor) else None
        if isinstance(value, torch.Tensor):
            group = groups.setdefault(storage_key(value), len(groups))
            form = [
                *tensor_form(value),
                group,
                value.untyped_storage().nbytes(),
                value.requires_grad,
            ]
        arguments.append([str(argument.kind), argument.name, positions[argument.node], form])
    results = [[str(r.kind), positions[r.node], r.path] for r in joint.results]
    clip = value_form(joint.clip_grad_norm, positions)
    return [operations_form(joint.graph_module.graph), shapes, arguments, results, clip]
