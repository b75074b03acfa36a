"""The captured graph run node by node, with kernels that give what eager does; memory measured.

A network repeats itself. Where a run only measures, the expensive operations of one form (operator,
shapes, strides, types, numbers) are computed once.
"""

from __future__ import annotations

import os
import sys
import tempfile
import weakref
from collections import Counter
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from operator import getitem, itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx
from torch._ops import OpOverload
from torch.autograd.profiler import profile
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from poetmodel.torch.errors import RAISED, CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from poetmodel.torch.capturing.signature import Joint

    Execute = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]


def storage_key(tensor: torch.Tensor) -> int:
    """Return an identifier of one storage among all that are alive."""
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - the only identity on every device
    return key


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors in a nest of tuples, lists and dicts, in order."""
    return tuple(leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


@contextmanager
def temporarily(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """Set something inside, and set it as it was before at the end."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


# -- running -----------------------------------------------------------------------------------


def call(node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the result of a node's operation on its arguments."""
    return kernel_of(node)(*arguments, **keywords)


def replay(joint: Joint, execute: Execute = call) -> None:
    """Run every operation once, in the order of the graph, on the inputs of the capture.

    `execute` gets each node with its arguments and returns its value. Values are let go after their
    last use. The state of the random generator is put back.
    """
    given = ((argument.node, joint.value(argument)) for argument in joint.arguments)
    env = {node: v.detach() if isinstance(v, torch.Tensor) else v for node, v in given}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _Interpreter(joint.graph_module, execute).run(initial_env=env, enable_io_processing=False)


class _Interpreter(fx.Interpreter):  # type: ignore[misc, unused-ignore]
    """Runs a graph with something of one's own in place of each operation."""

    def __init__(self, module: fx.GraphModule, execute: Execute) -> None:
        super().__init__(module)
        self._execute = execute
        self.extra_traceback = False  # errors say themselves where they are

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        return self._execute(n, *self.fetch_args_kwargs_from_env(n))


# -- each form of operation once ----------------------------------------------------------------


def is_counted(node: fx.Node) -> bool:
    """Return whether an operation is a convolution, matrix product or attention."""
    return getattr(node.target, "overloadpacket", None) in flop_registry


def flops_of(target: Any, arguments: Sequence[Any], keywords: dict[str, Any], value: Any) -> int:
    """Return the FLOP of one operation that makes a value of its arguments.

    Convolutions, matrix products and attention as ``torch.utils.flop_counter`` counts them. It
    knows nothing else; any other operation counts one FLOP per element of its largest operand, so
    that devices without a memory bandwidth do not take it for free.
    """
    if target is torch.ops.aten.convolution_backward.default:
        return _gradient_flops(*arguments[:3], transposed=arguments[7], wanted=arguments[-1])
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is not None:
        return int(formula(*arguments, **keywords, out_val=value))
    sizes = [tensor.numel() for tensor in tensors_in((arguments, keywords, value))]
    return max(sizes, default=0)


def _gradient_flops(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *, transposed: bool, wanted: Sequence[bool]
) -> int:
    """Return the FLOP of a convolution's gradients: each takes as many as the convolution.

    PyTorch's counter takes that of the weight for one over all channels, whatever the groups.
    """
    macs = (x if transposed else dy).numel() * (w.numel() // max(1, w.shape[0]))
    return 2 * int(macs) * sum(wanted[:2])


class Sampler:
    """Executes the first of the expensive operations of a form, whose outputs stand for all others.

    Expensive are convolutions, matrix products, attention, and what makes large tensors: nearly
    all of the time of a step. Their times and workspaces do not depend on values. The outputs are
    of the right kind, but not those of the step, random numbers among them: `sampled` runs it in
    full where an operation fails on them.
    """

    def __init__(self, joint: Joint, execute: Execute) -> None:
        self._execute = execute
        self._forms = {
            node: form_of(node.target, *_fakes(node))
            for node in joint.graph_module.graph.nodes
            if is_counted(node) or _is_large(node)
        }
        self._left = Counter(self._forms.values())
        """How many of each form are to come, by what the capture predicts."""
        self._first: dict[Hashable, tuple[fx.Node, Hashable, Any]] = {}
        """First of each form that is to come again, its true form, and its outputs."""
        self.like: dict[fx.Node, fx.Node] = {}
        """Operation whose outputs stand for those of each operation that was not executed."""

    def __call__(self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the outputs of an operation, or those of one like it."""
        form = self._forms.get(node)
        if form is None:
            return self._execute(node, arguments, keywords)
        self._left[form] -= 1
        kept = self._first.get(form) if self._left[form] else self._first.pop(form, None)
        true = form_of(node.target, arguments, keywords)
        if kept is not None and kept[1] == true:
            self.like[node] = kept[0]
            return kept[2]
        value = self._execute(node, arguments, keywords)
        if self._left[form] and _is_new(value, (arguments, keywords)):
            self._first[form] = (node, true, value)
        return value


LARGE_BYTES: Final = 2**18
"""Outputs of so many bytes make an operation expensive [B]."""


def _is_large(node: fx.Node) -> bool:
    """Return whether an operation of PyTorch makes large tensors, and no indices."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target.is_view:
        return False
    outputs = tensors_in(node.meta.get("val"))
    kinds = {output.dtype for output in outputs}
    return sum(output.nbytes for output in outputs) >= LARGE_BYTES and all(
        kind.is_floating_point or kind == torch.bool for kind in kinds
    )


def sampled(joint: Joint, execute: Execute) -> Mapping[fx.Node, fx.Node]:
    """Run the step as `replay` does, with each form of expensive operation executed once.

    Returns for each operation that was not executed the one that stands for it.
    """
    sampler = Sampler(joint, execute)
    try:
        replay(joint, sampler)
    except RAISED:
        if not sampler.like:
            raise
        replay(joint, execute)  # it may have failed on the outputs of others
        return {}
    return sampler.like


def _fakes(node: fx.Node) -> tuple[Any, Any]:
    """Return the arguments of a node as the capture predicts them."""

    def fake(source: fx.Node) -> Any:
        return source.meta.get("val")

    return fx.node.map_arg(node.args, fake), fx.node.map_arg(node.kwargs, fake)


def form_of(*given: Any) -> Hashable:
    """Return a key that is equal for calls that do the same work on other values."""
    leaves, spec = _pytree.tree_flatten(given)
    return spec, tuple(
        (leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset())
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), str(leaf))
        for leaf in leaves
    )


def _is_new(value: Any, inputs: Any) -> bool:
    """Return whether outputs are on the processor, in memory that no input has."""
    there = {storage_key(tensor) for tensor in tensors_in(inputs)}
    outputs = tensors_in(value)
    return all(t.device.type == "cpu" and storage_key(t) not in there for t in outputs)


# -- kernels -----------------------------------------------------------------------------------


KERNEL: Final = "poetmodel.kernel"
"""Key under a node's ``meta``: what to call in place of its target, with the same arguments."""


def kernel_of(node: fx.Node) -> Callable[..., Any]:
    """Return the function for the operation of a node: nearly always its target itself."""
    if KERNEL in node.meta:
        chosen: Callable[..., Any] = node.meta[KERNEL]
        return chosen
    aten = torch.ops.aten
    if node.target is aten.native_dropout.default:
        return _dropout
    if node.target is aten.native_dropout_backward.default:
        return _dropout_backward(_dropped_ratio(node))
    target: Callable[..., Any] = node.target
    return target


def _dropout(
    x: torch.Tensor,
    p: float,
    train: bool | None,  # noqa: FBT001 - the signature is that of PyTorch's operator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor after dropout, and which elements were kept.

    A capture has the dropout of accelerators, whose mask is boolean: a quarter of the bytes that
    eager saves on the processor. It multiplies by the mask and by ``1 / (1 - p)`` one after the
    other, where eager's multiplies by their product, rounded to the type of the tensor; and it
    draws where ``p`` is 1. This computes what eager does, of the same random numbers.
    """
    if train is False or x.numel() == 0:
        values: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten.native_dropout(x, p, train)
        return values
    if p == 1:
        nothing = torch.zeros((), dtype=x.dtype, device=x.device)
        return x.mul(nothing), torch.zeros_like(x, dtype=torch.bool)
    noise = torch.empty_like(x).bernoulli_(1 - p)
    mask = noise.to(torch.bool)
    return _multiplied(noise.div_(1 - p), x), mask


@cache
def _dropout_backward(p: float | None) -> Callable[..., torch.Tensor]:
    """Return the backward of dropout: the gradient times what the input was multiplied by.

    PyTorch's kernel mixes types and makes three tensors; to convert first and to multiply in place
    makes one, and takes a third of the time.
    """

    def backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        noise = mask.to(grad.dtype)
        if scale != 0:  # 0 where p is 1: nothing was kept
            noise.div_(1 / scale if p is None else 1 - p)
        return _multiplied(noise, grad)

    return backward


def dropout_backward_in_place(node: fx.Node) -> Callable[..., torch.Tensor]:
    """Return the backward of dropout that multiplies the gradient where it is, by the same number.

    The mask is 0 or 1, so that two products after each other round once, as one does.
    """
    p = _dropped_ratio(node)

    def backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        grad.mul_(mask)
        if scale != 0:
            factor = torch.ones((), dtype=grad.dtype, device=grad.device)
            grad.mul_(factor.div_(1 / scale if p is None else 1 - p))
        return grad

    return backward


def _dropped_ratio(node: fx.Node) -> float | None:
    """Return with which ratio the mask was drawn that a backward of dropout reads.

    The scale alone tells it up to a rounding; None where the mask comes from elsewhere.
    """
    dropout = torch.ops.aten.native_dropout.default
    for mask in node.all_input_nodes:
        for source in mask.all_input_nodes:
            if mask.target is getitem and source.target is dropout:
                ratio: Any = source.args[1]
                return float(ratio)
    return None


def _multiplied(noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the product, in place of the noise where that does not change its strides."""
    return noise.mul_(x) if noise.stride() == x.stride() else x * noise


# -- memory ------------------------------------------------------------------------------------

_MEMORY: Final = "[memory]"
"""Name of the events that tell of memory taken and given back."""
_NOTICE: Final = b"USDT:"
"""How lines begin that the profiler writes to stderr on every start and stop."""


class Workspaces:
    """Executes operations, and measures what each form of them takes beside its outputs.

    It is the highest total of allocations during the operation, less its outputs. One that takes
    anything is executed again, for the first time fills the caches of libraries. Only memory that
    goes through PyTorch's allocator is seen; that includes the scratchpads of oneDNN convolutions,
    which are the largest.
    """

    def __init__(self) -> None:
        self.sizes_bytes: dict[fx.Node, int] = {}
        """Workspace of each operation that was executed [B]; views take nothing."""
        self._forms: dict[Hashable, int] = {}

    def __call__(self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the outputs of an operation."""
        if node.target is getitem or getattr(node.target, "is_view", False):
            return call(node, arguments, keywords)
        form = form_of(node.target, arguments, keywords)
        if form in self._forms:
            value = call(node, arguments, keywords)
        else:
            value, size = self._measured(node, arguments, keywords)
            if size:
                del value
                value, size = self._measured(node, arguments, keywords)
            self._forms[form] = size
        self.sizes_bytes[node] = self._forms[form]
        return value

    def _measured(
        self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Any, int]:
        """Return the outputs of an operation, and what it took beside them [B]."""
        values: list[Any] = []
        peak_bytes = heap_peak_bytes(lambda: values.append(call(node, arguments, keywords)))
        there = {storage_key(tensor) for tensor in tensors_in((arguments, keywords))}
        sizes = {storage_key(t): t.untyped_storage().nbytes() for t in tensors_in(values)}
        own = sum(size for key, size in sizes.items() if key not in there)
        return values[0], max(0, peak_bytes - own)


def heap_peak_bytes(work: Callable[[], object]) -> int:
    """Measure the highest total of what PyTorch allocates while something runs [B].

    By the memory events of PyTorch's profiler: tensors and workspaces, less what is freed. What was
    there before does not count.

    Raises
    ------
    CaptureError
        If a profiler is on already: PyTorch has one at a time, and would drop what that has seen.
    """
    if torch._C._autograd._profiler_enabled():  # noqa: SLF001 - no other way
        raise CaptureError(
            "a profiler of PyTorch is on, and memory is measured with another one: compile, or run "
            "the compiled function once, before it begins"
        )
    with _without_notices(), profile(profile_memory=True) as recorded:
        work()
    events = (event for event in recorded.kineto_results.events() if event.name() == _MEMORY)
    changes: list[tuple[int, int]] = [(event.start_ns(), event.nbytes()) for event in events]
    changes.sort(key=itemgetter(0))
    return max(accumulate((size for _, size in changes), initial=0))


@contextmanager
def _without_notices() -> Iterator[None]:
    """Leave the profiler's notices out of stderr; all else that is written there gets through."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            for line in written:
                if not line.startswith(_NOTICE):
                    os.write(2, line)


def storage_peak_bytes(work: Callable[[], object], known: Iterable[torch.Tensor]) -> int:
    """Measure the highest total of tensors alive while something runs, but for `known` [B]."""
    with _StorageWatch(known) as watch:
        work()
    return int(watch.highest)


class _StorageWatch(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """Sees each new storage, and when it goes."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, int] = {storage_key(tensor): 0 for tensor in known}
        self.total = self.highest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        value = function(*args, **(kwargs or {}))
        for tensor in tensors_in(value):
            storage, key = tensor.untyped_storage(), storage_key(tensor)
            if key not in self.alive:
                self.alive[key] = storage.nbytes()
                self.total += storage.nbytes()
                weakref.finalize(storage, self._gone, key)
        self.highest = max(self.highest, self.total)
        return value

    def _gone(self, key: int) -> None:
        self.total -= self.alive.pop(key)
