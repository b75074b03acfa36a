"""Results of earlier compilations of a step, cached by all values that they depend on.

These are profiles of the operations of a graph on a host (outputs and workspaces), their costs, and
schedules (`poetmodel.torch.planning.cache`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from pydantic import TypeAdapter, ValidationError

from poetmodel.torch.cache import Cache, digest, plain_layout, plain_value
from poetmodel.torch.graph.tensors import storage_key
from poetmodel.torch.planning.cache import CachedSchedules
from poetmodel.torch.planning.profiles import find_graph_key, load_or_measure
from poetmodel.torch.runtime.convolutions import describe_divided_kernels
from poetmodel.torch.runtime.profiling import (
    CACHED_NOTE,
    Profile,
    build_profile,
)
from poetmodel.torch.state.paging import Paging  # noqa: TC001 - pydantic reads it
from poetmodel.torch.step.trace import Trace, build_trace, profile_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.torch.capturing.joint_graph import Joint


class CachedStep(CachedSchedules):
    """Loads and stores the profiles, costs and schedules of a captured step in a cache.

    Without a folder or a key of `joint`, a new cache in memory is used instead.
    """

    def __init__(self, cache: Cache, joint: Joint) -> None:
        super().__init__(cache)
        self._joint = joint
        self._key: str | None = None
        if cache.folder is not None:
            graph = joint.graph_module.graph
            self._key = find_graph_key(graph, lambda: _describe_ends(joint))
        if self._key is None:
            self._cache = Cache(None)

    def load_trace(self) -> Trace:
        """Return the trace of the step; without cached profiles, execute the step to profile it."""
        joint = self._joint
        profiles = load_or_measure(
            self._cache, self._key, joint.graph_module.graph, lambda: profile_step(joint)
        )
        return build_trace(joint, profiles)

    # -- costs ---------------------------------------------------------------------------------

    def load_profile(
        self, trace: Trace, folder: str | Path | None, measure: Callable[[], Profile]
    ) -> Profile:
        """Return the costs of `trace` with pages in `folder`: cached, or else from `measure`."""
        path = None if folder is None else str(Path(folder).resolve())
        key = digest(self._key, path, describe_divided_kernels(trace))
        cached_times = _parse_times(self._cache.read("costs", key), count=len(trace.graph.nodes))
        if cached_times is not None:
            return build_profile(trace, **vars(cached_times), origin=CACHED_NOTE)
        profile = measure()
        compute = profile.costs.compute
        times = _Times(
            times_s=[
                compute[node.name].time_s if node.name in compute else 0.0
                for node in trace.graph.nodes
            ],
            paging=profile.paging,
            steps_s=list(profile.steps_s),
            threads=profile.threads,
        )
        self._cache.write("costs", key, _TIMES.dump_python(times, mode="json"))
        return profile


@dataclass(frozen=True, kw_only=True)
class _Times:
    """The arguments of `build_profile` that a measurement found."""

    times_s: list[float]
    paging: Paging | None
    steps_s: list[float]
    threads: int


_TIMES: Final = TypeAdapter(_Times)


def _parse_times(content: Any, *, count: int) -> _Times | None:
    """Return cached times; None unless valid for `count` nodes."""
    with suppress(ValidationError):
        times = _TIMES.validate_python(content)
        if len(times.times_s) == count:
            return times
    return None


# -- keys of captured steps -----------------------------------------------------------------------


def _describe_ends(joint: Joint) -> list[Any]:
    """Return arguments, results and clipping norm of a step, for a key.

    A tensor is represented by layout and sharing, not by its values.
    """
    positions = {node: index for index, node in enumerate(joint.graph_module.graph.nodes)}
    storage_groups: dict[int, int] = {}
    arguments = []
    # Storage keys are unique only while the tensors exist.
    values = list(map(joint.value, joint.arguments))
    for argument, value in zip(joint.arguments, values, strict=True):
        description: Any
        if isinstance(value, torch.Tensor):
            group = storage_groups.setdefault(storage_key(value), len(storage_groups))
            description = [
                *plain_layout(value),
                group,
                value.untyped_storage().nbytes(),
                value.requires_grad,
            ]
        else:
            description = plain_value(value, positions)
        arguments.append([str(argument.kind), argument.name, positions[argument.node], description])
    results = [[str(result.kind), positions[result.node], result.path] for result in joint.results]
    max_norm = plain_value(joint.clip_grad_norm, positions)
    return [arguments, results, max_norm]
