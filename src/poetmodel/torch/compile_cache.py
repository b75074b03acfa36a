"""Results of earlier compilations of a step, cached by all values that they depend on.

These are profiles of the operations of a graph on a host (outputs and workspaces), their costs, and
schedules (`poetmodel.torch.planning.cache`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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
from poetmodel.torch.planning.cache import CachedSchedules
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
            with suppress(NoKeyError):
                self._key = digest(host_key(), _plain_graph(joint))
        if self._key is None:
            self._cache = Cache(None)

    def load_trace(self) -> Trace:
        """Return the trace of the step; without cached profiles, execute the step to profile it."""
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
        """Return the costs of `trace` with pages in `folder`: cached, or else from `measure`."""
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


def _parse_step(content: Any) -> dict[int, OpProfile] | None:
    """Return cached profiles by position of the node; None if `content` is None or damaged."""
    with suppress(TypeError, ValueError):
        indices, lists = zip(*content, strict=True)
        profiles = parse_profiles(lists)
        if profiles is not None:
            return dict(zip(map(int, indices), profiles, strict=True))
    return None


def _parse_times(content: Any, *, count: int) -> dict[str, Any] | None:
    """Return the cached arguments of `build_profile`; None unless valid for `count` nodes."""
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


# -- keys of captured steps -----------------------------------------------------------------------


def _plain_graph(joint: Joint) -> list[Any]:
    """Return operations, shapes, arguments, results and clipping norm of a graph, for a key.

    A tensor is represented by layout and sharing, not by its values. Shapes may depend on values
    that the model reads, such as masks.
    """
    nodes = list(joint.graph_module.graph.nodes)
    shapes = [[list(tensor.shape) for tensor in tensors_in(node.meta.get("val"))] for node in nodes]
    positions = {node: index for index, node in enumerate(nodes)}
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
    return [plain_operations(joint.graph_module.graph), shapes, arguments, results, max_norm]
