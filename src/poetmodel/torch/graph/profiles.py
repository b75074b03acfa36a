"""Profiles: outputs, memory and time of a call of an operator, measured once per call key.

The key contains the operator, shapes, strides, types and numbers. Calls with one key take the same
memory and time, whatever the values of their tensors. PyTorch predicts the outputs, but some
kernels choose other strides (convolutions in bfloat16). Readers are therefore profiled on the
measured strides, except where a compiler generates kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import getitem
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import torch
from pydantic import PlainSerializer, PlainValidator
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from poetmodel.errors import PoetModelError
from poetmodel.torch.errors import FOREIGN_ERRORS, CaptureError
from poetmodel.torch.graph.operators import flops_of, has_effect, is_collective, kernel_of
from poetmodel.torch.graph.tensors import (
    call_key,
    fake_value,
    heap_peak_bytes,
    storage_key,
    tensors_in,
    to_meta,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from poetmodel.torch.graph.operators import Kernel

Value = TypeVar("Value")

_TRANSPORT_BYTES: Final = 2**15
"""Buffers of gloo for one collective without copies, measured with two processes [B]."""


def _parse_type(value: object) -> torch.dtype:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        raise ValueError(f"expected a type of tensors, got {value!r}")  # noqa: TRY004 - pydantic's
    return found


_DType = Annotated[
    torch.dtype,
    PlainValidator(_parse_type),
    PlainSerializer(lambda dtype: str(dtype).removeprefix("torch.")),
]
"""A type of tensors; in JSON its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """Type, shape, strides and offset of one output of an operation in its storage."""

    position: int | None
    """Index of the output; None if the operation returns one tensor and no tuple."""
    dtype: _DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Strides of the dimensions [elements]."""
    offset: int
    """Offset of the first element [elements]."""

    @classmethod
    def from_tensor(cls, value: torch.Tensor, position: int | None = None) -> TensorLayout:
        """Return type, shape, strides and offset of a tensor; `position` is the output's index."""
        return cls(
            position=position,
            dtype=value.dtype,
            shape=tuple(value.shape),
            stride=tuple(value.stride()),
            offset=value.storage_offset(),
        )

    def tensor_in(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor with this layout in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProfile:
    """New storages and outputs of one operation, with its FLOP, memory and time."""

    sizes_bytes: tuple[int, ...] = ()
    """Size of each new storage; empty for a view or an effect [B]."""
    outputs: tuple[tuple[int, TensorLayout], ...] = ()
    """For each new output (index of its storage in `sizes_bytes`, layout)."""
    flops: int = 0
    moved_bytes: int = 0
    """Bytes read and written [B]."""
    workspace_bytes: int = 0
    """Peak of allocated bytes during the operation minus its outputs [B]."""
    time_s: float = 0.0
    """Time of one call; 0 if not measured [s]."""
    gradient_fits: tuple[bool, bool] | None = None
    """For an update of a parameter: (whether its first gradient has the parameter's strides,
    whether that gradient fills its storage); None for other operations."""

    @classmethod
    def from_call(cls, target: Any, arguments: Any, keywords: Any, value: Any) -> OpProfile:
        """Return the profile of a call that returned `value`; workspace and time are 0.

        Outputs in the storage of an input are views.
        """
        inputs = tensors_in((arguments, keywords))
        input_keys = {storage_key(tensor) for tensor in inputs}
        is_single = not isinstance(value, tuple | list)
        size_of_storage: dict[int, int] = {}
        outputs: list[tuple[int, TensorLayout]] = []
        for position, output in enumerate((value,) if is_single else value):
            if not isinstance(output, torch.Tensor) or storage_key(output) in input_keys:
                continue
            key = storage_key(output)
            size_of_storage[key] = output.untyped_storage().nbytes()
            layout = TensorLayout.from_tensor(output, None if is_single else position)
            outputs.append((list(size_of_storage).index(key), layout))
        if not size_of_storage:
            return cls()
        read_bytes = sum(
            # A view is read at most up to the size of its storage.
            min(tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size())
            for tensor in inputs
        )
        return cls(
            sizes_bytes=tuple(size_of_storage.values()),
            outputs=tuple(outputs),
            flops=flops_of(target, arguments, keywords, value),
            moved_bytes=read_bytes + sum(size_of_storage.values()),
        )

    def with_layouts(self, value: Any) -> Any:
        """Return `value`, or a tuple of its items, with meta tensors for new outputs."""
        storages = [torch.UntypedStorage(size, device="meta") for size in self.sizes_bytes]
        outputs = {
            layout.position: layout.tensor_in(storages[storage_index])
            for storage_index, layout in self.outputs
        }
        if not isinstance(value, tuple | list):
            return outputs[None]
        return tuple(outputs.get(position, output) for position, output in enumerate(value))

    def with_maxima(self, other_profiles: Iterable[OpProfile]) -> OpProfile:
        """Return this profile with the maximum of workspace and time over all the profiles."""
        profiles = (self, *other_profiles)
        return replace(
            self,
            workspace_bytes=max(profile.workspace_bytes for profile in profiles),
            time_s=max(profile.time_s for profile in profiles),
        )


class OpProfiler:
    """Calls operators, and caches the profile of each call key.

    The second of two calls counts if a call needs workspace or times are measured, because the
    first fills the caches of libraries. Only memory of PyTorch's allocator is measured, with
    oneDNN's scratchpads. Without `measure_workspaces`, workspaces and times are 0.
    """

    def __init__(self, *, measure_times: bool = False, measure_workspaces: bool = True) -> None:
        self.measures_times = measure_times
        self._measures_workspaces = measure_workspaces
        self._profiles: dict[Hashable, OpProfile] = {}

    def __call__(self, node: fx.Node, arguments: Any, keywords: Any) -> tuple[Any, OpProfile]:
        """Call a node's kernel; return its outputs and its profile, which is cached by call key."""
        kernel: Kernel = kernel_of(node)
        is_view = node.target is getitem or getattr(node.target, "is_view", False)
        if is_view or not self._measures_workspaces:
            value = kernel(*arguments, **keywords)
            return value, self.profile(node, arguments, keywords, value)
        key = _profile_key(kernel, arguments, keywords)
        if key in self._profiles:
            return kernel(*arguments, **keywords), self._profiles[key]
        value, profile = self._measure_call(node, kernel, arguments, keywords)
        if profile.workspace_bytes or self.measures_times:
            del value
            value, profile = self._measure_call(node, kernel, arguments, keywords)
        self._profiles[key] = profile
        return value, profile

    def profile(self, node: fx.Node, arguments: Any, keywords: Any, value: Any) -> OpProfile:
        """Return the profile of a finished call with the output `value`; subclasses extend it."""
        return OpProfile.from_call(node.target, arguments, keywords, value)

    def _measure_call(
        self, node: fx.Node, kernel: Kernel, arguments: Any, keywords: Any
    ) -> tuple[Any, OpProfile]:
        """Call a kernel once; return its outputs, and a profile with workspace and time."""
        outputs: list[Any] = []
        times_s: list[float] = []

        def call_kernel() -> None:
            # Timed in here: start and end of the profiler of the heap take about 0.6 ms.
            start_s = perf_counter()
            outputs.append(kernel(*arguments, **keywords))
            times_s.append(perf_counter() - start_s)

        peak_bytes = heap_peak_bytes(call_kernel)
        profile = self.profile(node, arguments, keywords, outputs[0])
        workspace_bytes = max(0, peak_bytes - sum(profile.sizes_bytes))
        return outputs[0], replace(profile, workspace_bytes=workspace_bytes, time_s=times_s[0])


def _profile_key(kernel: Kernel, arguments: Any, keywords: Any) -> Hashable:
    """Return the call key with the storage sizes; calls with equal keys have equal profiles."""
    storage_sizes = [
        tensor.untyped_storage().nbytes() for tensor in tensors_in((arguments, keywords))
    ]
    return call_key(kernel, arguments, keywords), *storage_sizes


def predict_profile(node: fx.Node) -> OpProfile:
    """Return the profile that PyTorch's fake tensors predict for a node, without time.

    Only a collective has a workspace: its inputs and results, which gloo copies.
    """
    arguments, keywords = fx.node.map_arg((node.args, node.kwargs), fake_value)
    if has_effect(node):
        return OpProfile(flops=flops_of(node.target, arguments, keywords, fake_value(node)))
    profile = OpProfile.from_call(node.target, arguments, keywords, fake_value(node))
    if is_collective(node.target):
        profile = replace(profile, workspace_bytes=profile.moved_bytes + _TRANSPORT_BYTES)
    return profile


# -- on synthetic tensors --------------------------------------------------------------------------


def profile_on_synthetic(
    graph: fx.Graph,
    predicted_profiles: Mapping[fx.Node, OpProfile],
    profiler: OpProfiler,
    *,
    is_generated: Callable[[fx.Node], bool] | None = None,
) -> dict[fx.Node, OpProfile]:
    """Profile the operations of a graph on synthetic tensors, once per call key.

    Nodes with effects, collectives, and nodes whose kernel a compiler generates (`is_generated`)
    keep their predicted profile. Without `is_generated`, nodes read tensors with the measured
    strides, else with the predicted ones. The CPU's random state is restored.
    """
    profiles: dict[fx.Node, OpProfile] = {}
    measured_values: dict[fx.Node, Any] = {}
    """Meta tensors of outputs with other layouts than predicted, and of views of these outputs."""
    synthetic_profiler = _SyntheticProfiler(profiler)

    def current_value(source: fx.Node) -> Any:
        return measured_values[source] if source in measured_values else fake_value(source)

    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for node in (node for node in graph.nodes if node.op == "call_function"):
            if node not in predicted_profiles and measured_values.keys().isdisjoint(
                node.all_input_nodes
            ):
                continue
            arguments, keywords = fx.node.map_arg((node.args, node.kwargs), current_value)
            if node not in predicted_profiles:
                meta_arguments = _pytree.tree_map_only(FakeTensor, to_meta, (arguments, keywords))
                measured_values[node] = kernel_of(node)(*meta_arguments[0], **meta_arguments[1])
            elif (
                has_effect(node)
                or is_collective(node.target)  # a collective returns only if all processes call it
                or (is_generated is not None and is_generated(node))
            ):
                profiles[node] = predicted_profiles[node]
            else:
                profile = profiles[node] = synthetic_profiler.profile(node, arguments, keywords)
                predicted_profile = predicted_profiles[node]
                is_equal = (profile.sizes_bytes, profile.outputs) == (
                    predicted_profile.sizes_bytes,
                    predicted_profile.outputs,
                )
                if is_generated is None and not is_equal:
                    measured_values[node] = profile.with_layouts(fake_value(node))
    return profiles


class _SyntheticProfiler:
    """Profiles operations on synthetic tensors.

    Floating-point numbers are 1, all other numbers 0, or 1 if the operation fails on 0. All tensors
    of a type share memory, unless times are measured.
    """

    def __init__(self, profiler: OpProfiler) -> None:
        self._profiler = profiler
        self._memory: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._profiles: dict[Hashable, OpProfile] = {}

    def profile(self, node: fx.Node, arguments: Any, keywords: Any) -> OpProfile:
        """Return the profile of a call, measured once per call key."""
        key = _profile_key(kernel_of(node), arguments, keywords)
        if key not in self._profiles:
            self._profiles[key] = self._profile_call(node, arguments, keywords)
        return self._profiles[key]

    def _profile_call(self, node: fx.Node, arguments: Any, keywords: Any) -> OpProfile:
        """Profile an operation on synthetic tensors of the shapes and strides of its arguments."""

        def profile_with(integer: int) -> OpProfile:
            def fill(value: torch.Tensor) -> torch.Tensor:
                return self._synthetic_tensor(value, integer)

            synthetic_arguments = _pytree.tree_map_only(torch.Tensor, fill, (arguments, keywords))
            _, profile = self._profiler(node, *synthetic_arguments)
            return profile

        return execute_on_synthetic(profile_with)

    def _synthetic_tensor(self, value: torch.Tensor, integer: int) -> torch.Tensor:
        """Return a tensor with shape, strides and storage size of `value` at offset 0.

        Its numbers are 1 if they are floating-point, otherwise `integer`.
        """
        storage_bytes = value.untyped_storage().nbytes()
        key = (value.dtype, integer)
        memory = None if self._profiler.measures_times else self._memory.get(key)
        if memory is None or memory.nbytes < storage_bytes:
            fill_value = 1 if value.is_floating_point() else integer
            count = -(-storage_bytes // value.itemsize)
            memory = self._memory[key] = torch.full((count,), fill_value, dtype=value.dtype)
        storage = memory.untyped_storage()[:storage_bytes]
        return torch.empty(0, dtype=value.dtype).set_(storage, 0, value.shape, value.stride())


def execute_on_synthetic(execute: Callable[[int], Value]) -> Value:
    """Return `execute(0)`, or `execute(1)` if the first call fails; refuse if both fail.

    The argument is the value of the integers in synthetic tensors.
    """
    try:
        return execute(0)
    except PoetModelError:
        raise
    except FOREIGN_ERRORS:
        try:
            return execute(1)
        except FOREIGN_ERRORS as error:
            raise CaptureError(
                f"the memory of the function cannot be measured on synthetic numbers: {error}; "
                "leave out the operation that fails, or compute it before the compiled function"
            ) from error
