"""Costs of a joint graph's operations: memory beside their tensors, and time.

Operations of one form (operator, shapes, strides, types, numbers) take the same, whatever their
values. Each form runs once on made-up tensors, with the caches of libraries full.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from poetmodel.device import Device
from poetmodel.device.hardware import Compute
from poetmodel.errors import PoetModelError
from poetmodel.torch.cache import (
    Cache,
    UnknownError,
    digest,
    host_key,
    operations_form,
    tensor_form,
)
from poetmodel.torch.capturing.replay import form_of, heap_peak_bytes, storage_key, tensors_in
from poetmodel.torch.dynamo.operations import fake, function_of, is_effect
from poetmodel.torch.errors import RAISED, CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from poetmodel.torch.dynamo.operations import Operations

Made = TypeVar("Made")

CALL_S: Final = 5e-6
"""Time of an operation besides its work: PyTorch's dispatcher, and the interpreter [s]."""
_MATRIX: Final = 1024
_COPIED_BYTES: Final = 2**26


class Form(NamedTuple):
    """Observations of one form of operation. Its fields are plain values, as JSON has them."""

    workspace_bytes: int
    """The highest total of allocations during the operation, less its outputs [B]."""
    time_s: float
    sizes_bytes: list[int]
    """Sizes of the storages that it makes [B]."""
    layouts: list[list[Any] | None]
    """Type, shape, stride, and storage number of each output; None for no tensor."""
    is_single: bool
    """Whether it returns one tensor, and no tuple."""

    def outputs(self) -> Any:
        """Return tensors without memory that lie as its outputs do."""
        outputs = [None if layout is None else self._output(*layout) for layout in self.layouts]
        return outputs[0] if self.is_single else tuple(outputs)

    def _output(self, dtype: str, shape: list[int], stride: list[int], k: int) -> torch.Tensor:
        empty = torch.empty(0, dtype=getattr(torch, dtype), device="meta")
        storage = torch.UntypedStorage(self.sizes_bytes[k], device="meta")
        return empty.set_(storage, 0, shape, stride)


class Forms:
    """Costs of the forms of operations: as seen here, or in earlier processes.

    PyTorch predicts strides that some kernels do not keep (convolutions in bfloat16), and others
    take more memory for it. So what an operation was seen to make is what its readers read.

    Parameters
    ----------
    cache : Cache
        Has what is known of whole graphs.
    timed : bool
        Whether operations are timed too.
    is_generated : callable, optional
        Whether a compiler writes the kernel of a node, which makes what PyTorch predicts and takes
        nothing more; by default it writes none. Where it writes some, all read what is predicted.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        timed: bool,
        is_generated: Callable[[fx.Node], bool] | None = None,
    ) -> None:
        self._cache = cache
        self._timed = timed
        self._is_generated = is_generated
        self._seen: dict[Hashable, Form] = {}
        self._ones: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def of(self, operations: Operations) -> list[Form]:
        """Return the forms of each operation of a graph; unknown ones are run once."""
        key = self._key(operations)
        values = None if key is None else self._cache.read("forms", key)
        with suppress(TypeError):
            if values is not None:
                return [Form(*fields) for fields in values]
        forms = self._observed(operations)
        if key is not None:
            self._cache.write("forms", key, forms)
        return forms

    def _key(self, operations: Operations) -> str | None:
        """Return an identifier of a graph on this host; None for one of unknown values."""
        given = [list(map(tensor_form, tensors_in(fake(node)))) for node in operations.arguments]
        with suppress(UnknownError):
            return digest(
                host_key(),
                operations_form(operations.graph),
                given,
                self._timed,
                self._is_generated is not None,
            )
        return None

    def _observed(self, operations: Operations) -> list[Form]:
        position = {operation.node: k for k, operation in enumerate(operations.operations)}
        forms: list[Form | None] = [None] * len(position)
        unlike: dict[fx.Node, Any] = {}
        """Tensors with another memory layout than PyTorch predicts, and views of them."""

        def value_of(source: fx.Node) -> Any:
            return unlike[source] if source in unlike else fake(source)

        calls = (node for node in operations.graph.nodes if node.op == "call_function")
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            for node in calls:
                if node not in position and unlike.keys().isdisjoint(node.all_input_nodes):
                    continue
                function = function_of(node)
                given = fx.node.map_arg((node.args, node.kwargs), value_of)
                if node not in position:
                    arguments, keywords = _pytree.tree_map_only(FakeTensor, _without_memory, given)
                    unlike[node] = function(*arguments, **keywords)
                elif is_effect(node):
                    forms[position[node]] = _predicted(node)
                elif self._is_generated is None:
                    form = forms[position[node]] = self._form_of(function, *given)
                    if form[2:] != _form(fake(node))[2:]:
                        unlike[node] = form.outputs()
                elif self._is_generated(node):
                    forms[position[node]] = _predicted(node)
                else:
                    forms[position[node]] = self._form_of(function, *given)
        self._ones.clear()
        return [form for form in forms if form is not None]

    def _form_of(self, function: Callable[..., Any], arguments: Any, keywords: Any) -> Form:
        whole = [t.untyped_storage().nbytes() for t in tensors_in((arguments, keywords))]
        key = form_of(function, arguments, keywords), *whole
        if key not in self._seen:
            self._seen[key] = self._run(function, arguments, keywords)
        return self._seen[key]

    def _run(self, function: Callable[..., Any], arguments: Any, keywords: Any) -> Form:
        """Run an operation on made-up tensors and see what it takes.

        Where it takes more than its outputs, or its time counts, the second run tells: the first
        one fills the caches of libraries.
        """

        def run(integer: int) -> Form:
            made = partial(self._filled, integer=integer)
            given, named = _pytree.tree_map_only(torch.Tensor, made, (arguments, keywords))
            form = _seen(function, given, named)
            return _seen(function, given, named) if self._timed or form.workspace_bytes else form

        return on_made_up(run)

    def _filled(self, value: torch.Tensor, *, integer: int) -> torch.Tensor:
        """Return a tensor of ones, or of a number where it has integers.

        All of a type share memory, unless times count, which are those of memory of their own. Its
        storage is as large as that of the value: copies of parts take all of it.
        """
        whole_bytes = value.untyped_storage().nbytes()
        key = (value.dtype, integer)
        memory = None if self._timed else self._ones.get(key)
        if memory is None or memory.nbytes < whole_bytes:
            number = 1 if value.is_floating_point() else integer
            count = -(-whole_bytes // value.itemsize)
            memory = self._ones[key] = torch.full((count,), number, dtype=value.dtype)
        storage = memory.untyped_storage()[:whole_bytes]
        return torch.empty(0, dtype=value.dtype).set_(storage, 0, value.shape, value.stride())


def on_made_up(run: Callable[[int], Made]) -> Made:
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


def predicted_forms(operations: Operations) -> list[Form]:
    """Return the outputs of each operation by PyTorch's prediction, without workspaces."""
    return [_predicted(operation.node) for operation in operations.operations]


def _predicted(node: fx.Node) -> Form:
    value = () if is_effect(node) else fake(node)
    return _form(_pytree.tree_map_only(torch.Tensor, _without_memory, value))


def _without_memory(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _seen(function: Callable[..., Any], given: Any, named: Any) -> Form:
    """Run an operation and return what it did."""
    values: list[Any] = []
    begin = perf_counter()
    peak_bytes = heap_peak_bytes(lambda: values.append(function(*given, **named)))
    time_s = perf_counter() - begin
    form = _form(values[0])
    return form._replace(workspace_bytes=max(0, peak_bytes - sum(form.sizes_bytes)), time_s=time_s)


def _form(value: Any) -> Form:
    """Return the form of an operation that makes these outputs, and takes nothing beside them."""
    is_single = isinstance(value, torch.Tensor)
    sizes: dict[int, int] = {}
    layouts: list[list[Any] | None] = []
    for output in [value] if is_single else list(value):
        if not isinstance(output, torch.Tensor):
            layouts.append(None)
            continue
        key = storage_key(output)
        sizes.setdefault(key, output.untyped_storage().nbytes())
        dtype = str(output.dtype).removeprefix("torch.")
        shape, stride = list(output.shape), list(output.stride())
        layouts.append([dtype, shape, stride, list(sizes).index(key)])
    return Form(0, 0.0, list(sizes.values()), layouts, is_single)


# -- a machine as a device ------------------------------------------------------------------------


def this_machine(kept: Cache) -> Device:
    """Return this machine's rates, by a matrix product and a copy, measured once and kept."""
    rates = kept.read("rates", digest(host_key()))
    if rates is None:
        rates = _rates()
        kept.write("rates", digest(host_key()), rates)
    flops_per_s, bytes_per_s = rates
    return Device(
        name="this machine",
        ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        compute=Compute(flops_per_s=flops_per_s, power_w=1.0, bytes_per_s=bytes_per_s),
        source="a matrix product and a copy, measured; a nominal 1 W",
    )


def _rates() -> tuple[float, float]:
    with _disable_current_modes(), torch.no_grad():
        matrix = torch.ones(_MATRIX, _MATRIX)
        copied = torch.ones(_COPIED_BYTES // 4)
        target = torch.empty_like(copied)
        product_s = _least_s(lambda: torch.mm(matrix, matrix))
        copy_s = _least_s(lambda: target.copy_(copied))
    return 2 * _MATRIX**3 / product_s, 2 * _COPIED_BYTES / copy_s


def _least_s(work: Callable[[], object]) -> float:
    least = float("inf")
    for _ in range(3):
        begin = perf_counter()
        work()
        least = min(least, perf_counter() - begin)
    return least
