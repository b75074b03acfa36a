"""Profiles: what one call of an operator makes and takes, seen once for each form of call.

A form is operator, shapes, strides, types and numbers. Calls of one form take the same memory and
time, whatever their values. PyTorch predicts what a call makes, but strides that some kernels do
not keep (convolutions in bfloat16); so what a call was seen to make is what its readers read, but
where a compiler writes kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import getitem
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from poetmodel.errors import PoetModelError
from poetmodel.torch.errors import RAISED, CaptureError
from poetmodel.torch.graph.operators import flops_of, is_collective, is_effect, kernel_of
from poetmodel.torch.graph.tensors import fake, form_of, heap_peak_bytes, storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from poetmodel.torch.graph.operators import Kernel

Value = TypeVar("Value")

_TRANSPORT_BYTES: Final = 2**15
"""Buffers of gloo for one collective beside copies, as measured with two processes [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """How one output of an operation lies in its storage."""

    position: int | None
    """Which output; None where the operation returns one tensor and no tuple."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Steps of the dimensions [elements]."""
    offset: int
    """First element."""

    @classmethod
    def of(cls, value: torch.Tensor, position: int | None = None) -> TensorLayout:
        """Return the layout of a tensor in its storage."""
        return cls(
            position=position,
            dtype=value.dtype,
            shape=tuple(value.shape),
            stride=tuple(value.stride()),
            offset=value.storage_offset(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProfile:
    """Outputs of one operation that were not there before, and what it takes."""

    sizes_bytes: tuple[int, ...] = ()
    """Size of each new storage; none for a view [B]."""
    outputs: tuple[tuple[int, TensorLayout], ...] = ()
    """Storage of each new output among these, and its layout."""
    flops: int = 0
    moved_bytes: int = 0
    """Bytes that it reads and writes [B]."""
    workspace_bytes: int = 0
    """The highest total of allocations during the operation, less its outputs [B]."""
    time_s: float = 0.0
    """Time of one call; 0 also if that was not measured [s]."""
    gradient_fits: tuple[bool, bool] | None = None
    """Whether the gradient of an update has the parameter's layout and fills its memory."""

    @classmethod
    def of(cls, target: Any, arguments: Any, keywords: Any, value: Any) -> OpProfile:
        """Return the profile of a call by what it returns, without workspace and time."""
        inputs = tensors_in((arguments, keywords))
        there = {storage_key(tensor) for tensor in inputs}
        single = not isinstance(value, tuple | list)
        sizes: dict[int, int] = {}
        outputs: list[tuple[int, TensorLayout]] = []
        for position, output in enumerate((value,) if single else value):
            if not isinstance(output, torch.Tensor) or storage_key(output) in there:
                continue
            key = storage_key(output)
            sizes[key] = output.untyped_storage().nbytes()
            layout = TensorLayout.of(output, None if single else position)
            outputs.append((list(sizes).index(key), layout))
        if not sizes:
            return cls()
        read_bytes = sum(
            # At most a storage for each of its views.
            min(tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size())
            for tensor in inputs
        )
        return cls(
            sizes_bytes=tuple(sizes.values()),
            outputs=tuple(outputs),
            flops=flops_of(target, arguments, keywords, value),
            moved_bytes=read_bytes + sum(sizes.values()),
        )

    def like(self, value: Any) -> Any:
        """Return outputs without memory that lie as these do; what is not new, as predicted."""
        storages = [torch.UntypedStorage(size, device="meta") for size in self.sizes_bytes]
        seen = {
            layout.position: torch.empty(0, dtype=layout.dtype, device="meta").set_(
                storages[number], layout.offset, layout.shape, layout.stride
            )
            for number, layout in self.outputs
        }
        if not isinstance(value, tuple | list):
            return seen[None]
        return tuple(seen.get(position, output) for position, output in enumerate(value))

    def largest(self, others: Iterable[OpProfile]) -> OpProfile:
        """Return the profile with the largest workspace and time among itself and others."""
        every = (self, *others)
        return replace(
            self,
            workspace_bytes=max(profile.workspace_bytes for profile in every),
            time_s=max(profile.time_s for profile in every),
        )

    def to_list(self) -> list[Any]:
        """Return it as plain values."""
        outputs = [
            [number, o.position, str(o.dtype).removeprefix("torch."), o.shape, o.stride, o.offset]
            for number, o in self.outputs
        ]
        counts = [self.flops, self.moved_bytes, self.workspace_bytes, self.time_s]
        return [self.sizes_bytes, outputs, *counts, self.gradient_fits]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> OpProfile:
        """Return the object that `to_list` made plain values of."""
        sizes, outputs, flops, moved_bytes, workspace_bytes, time_s, fits = values
        layouts = (
            (
                number,
                TensorLayout(
                    position=position,
                    dtype=getattr(torch, dtype),
                    shape=tuple(shape),
                    stride=tuple(stride),
                    offset=offset,
                ),
            )
            for number, position, dtype, shape, stride, offset in outputs
        )
        return cls(
            sizes_bytes=tuple(sizes),
            outputs=tuple(layouts),
            flops=flops,
            moved_bytes=moved_bytes,
            workspace_bytes=workspace_bytes,
            time_s=time_s,
            gradient_fits=None if fits is None else (fits[0], fits[1]),
        )


class OpProfiler:
    """Calls operators, and remembers the profile of each form of call.

    Where a call takes more than its outputs, or its time counts, the second call tells: the first
    one fills the caches of libraries. Only memory that goes through PyTorch's allocator is seen;
    that includes the scratchpads of oneDNN convolutions, which are the largest.

    Parameters
    ----------
    timed : bool
        Whether calls are timed.
    measured : bool
        Whether workspaces are measured, and so calls made twice.
    """

    def __init__(self, *, timed: bool = False, measured: bool = True) -> None:
        self.timed = timed
        self._measured = measured
        self._seen: dict[Hashable, OpProfile] = {}

    def __call__(self, node: fx.Node, arguments: Any, keywords: Any) -> tuple[Any, OpProfile]:
        """Return the outputs of a node's operation, and its profile."""
        kernel: Kernel = kernel_of(node)
        is_view = node.target is getitem or getattr(node.target, "is_view", False)
        if is_view or not self._measured:
            value = kernel(*arguments, **keywords)
            return value, self.profile(node, arguments, keywords, value)
        form = _call_form(kernel, arguments, keywords)
        if form in self._seen:
            return kernel(*arguments, **keywords), self._seen[form]
        value, seen = self._called(node, kernel, arguments, keywords)
        if seen.workspace_bytes or self.timed:
            del value
            value, seen = self._called(node, kernel, arguments, keywords)
        self._seen[form] = seen
        return value, seen

    def profile(self, node: fx.Node, arguments: Any, keywords: Any, value: Any) -> OpProfile:
        """Return the profile of a call that was made."""
        return OpProfile.of(node.target, arguments, keywords, value)

    def _called(
        self, node: fx.Node, kernel: Kernel, arguments: Any, keywords: Any
    ) -> tuple[Any, OpProfile]:
        values: list[Any] = []
        begin = perf_counter()
        peak_bytes = heap_peak_bytes(lambda: values.append(kernel(*arguments, **keywords)))
        time_s = perf_counter() - begin
        seen = self.profile(node, arguments, keywords, values[0])
        more_bytes = max(0, peak_bytes - sum(seen.sizes_bytes))
        return values[0], replace(seen, workspace_bytes=more_bytes, time_s=time_s)


def _call_form(kernel: Kernel, arguments: Any, keywords: Any) -> Hashable:
    """Return a key that is equal for calls that make and take the same."""
    whole = [t.untyped_storage().nbytes() for t in tensors_in((arguments, keywords))]
    return form_of(kernel, arguments, keywords), *whole


def predicted(node: fx.Node) -> OpProfile:
    """Return the profile that PyTorch predicts of an operation, without workspace.

    A collective has a workspace of the size of its inputs and results, which gloo copies.
    """
    arguments, keywords = fx.node.map_arg((node.args, node.kwargs), fake)
    if is_effect(node):
        return OpProfile(flops=flops_of(node.target, arguments, keywords, fake(node)))
    profile = OpProfile.of(node.target, arguments, keywords, fake(node))
    if is_collective(node.target):
        profile = replace(profile, workspace_bytes=profile.moved_bytes + _TRANSPORT_BYTES)
    return profile


# -- on made-up tensors ----------------------------------------------------------------------------


def profiles_on_made_up(
    graph: fx.Graph,
    expected: Mapping[fx.Node, OpProfile],
    profiler: OpProfiler,
    *,
    is_generated: Callable[[fx.Node], bool] | None = None,
) -> dict[fx.Node, OpProfile]:
    """Return the profiles of the operations of a graph, each form run on made-up tensors.

    Parameters
    ----------
    graph : torch.fx.Graph
    expected : mapping
        What makes memory there, as `predicted`; all else are views.
    profiler : OpProfiler
    is_generated : callable, optional
        Whether a compiler writes the kernel of a node, which makes what PyTorch predicts and takes
        nothing more; by default it writes none. Where it writes some, all read what is predicted.

    Raises
    ------
    CaptureError
        If an operation fails on made-up tensors.
    """
    profiles: dict[fx.Node, OpProfile] = {}
    unlike: dict[fx.Node, Any] = {}
    """Tensors with another memory layout than PyTorch predicts, and views of them."""
    made_up = _MadeUp(profiler)

    def value_of(source: fx.Node) -> Any:
        return unlike[source] if source in unlike else fake(source)

    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for node in (node for node in graph.nodes if node.op == "call_function"):
            if node not in expected and unlike.keys().isdisjoint(node.all_input_nodes):
                continue
            arguments, keywords = fx.node.map_arg((node.args, node.kwargs), value_of)
            if node not in expected:
                given = _pytree.tree_map_only(FakeTensor, _without_memory, (arguments, keywords))
                unlike[node] = kernel_of(node)(*given[0], **given[1])
            elif (
                is_effect(node)
                or is_collective(node.target)  # all processes would have to run it
                or (is_generated is not None and is_generated(node))
            ):
                profiles[node] = expected[node]
            else:
                seen = profiles[node] = made_up.profile(node, arguments, keywords)
                known = expected[node]
                like = (seen.sizes_bytes, seen.outputs) == (known.sizes_bytes, known.outputs)
                if is_generated is None and not like:
                    unlike[node] = seen.like(fake(node))
    return profiles


class _MadeUp:
    """Profiles operations on tensors of ones, and of zeros where these have integers.

    All of a type share memory, unless times count, which are those of memory of their own.
    """

    def __init__(self, profiler: OpProfiler) -> None:
        self._profiler = profiler
        self._memory: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._seen: dict[Hashable, OpProfile] = {}

    def profile(self, node: fx.Node, arguments: Any, keywords: Any) -> OpProfile:
        form = _call_form(kernel_of(node), arguments, keywords)
        if form not in self._seen:
            self._seen[form] = self._run(node, arguments, keywords)
        return self._seen[form]

    def _run(self, node: fx.Node, arguments: Any, keywords: Any) -> OpProfile:
        def run(integer: int) -> OpProfile:
            def filled(value: torch.Tensor) -> torch.Tensor:
                return self._filled(value, integer)

            given = _pytree.tree_map_only(torch.Tensor, filled, (arguments, keywords))
            _, seen = self._profiler(node, *given)
            return seen

        return on_made_up(run)

    def _filled(self, value: torch.Tensor, integer: int) -> torch.Tensor:
        """Return a tensor in storage as large as the value's: copies of parts take all of it."""
        whole_bytes = value.untyped_storage().nbytes()
        key = (value.dtype, integer)
        memory = None if self._profiler.timed else self._memory.get(key)
        if memory is None or memory.nbytes < whole_bytes:
            number = 1 if value.is_floating_point() else integer
            count = -(-whole_bytes // value.itemsize)
            memory = self._memory[key] = torch.full((count,), number, dtype=value.dtype)
        storage = memory.untyped_storage()[:whole_bytes]
        return torch.empty(0, dtype=value.dtype).set_(storage, 0, value.shape, value.stride())


def on_made_up(run: Callable[[int], Value]) -> Value:
    """Run something on made-up tensors whose integers are 0, or 1 where it fails: a divisor, say.

    Raises
    ------
    CaptureError
        If it fails on both.
    """
    try:
        return run(0)
    except PoetModelError:
        raise
    except RAISED:
        try:
            return run(1)
        except RAISED as error:
            raise CaptureError(
                f"what the function takes cannot be measured on made-up numbers: {error}; leave "
                "out what fails on them, or compute it before the compiled function"
            ) from error


def _without_memory(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
