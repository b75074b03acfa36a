"""Plans for Inductor: a partitioner, and a back end that measures the peaks of fused kernels.

Inductor inlines a pointwise operation: each kernel that reads its result computes it, unless the
kernel would then read or compute more than Inductor allows. The result of an inlined operation has
no memory, and is no tensor of the plan.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._functorch import config as functorch
from torch._functorch import partitioners
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.lowering import fallbacks, lowerings
from torch.fx._lazy_graph_module import _make_graph_module
from torch.utils import _pytree
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import _disable_current_modes

from poetmodel.errors import BudgetError, InputError
from poetmodel.torch.cache import digest, plain_layout
from poetmodel.torch.dynamo.compiling import Backend, require_whole_model
from poetmodel.torch.dynamo.joint_graph import TANGENTS, JointGraph, find_ancestors
from poetmodel.torch.dynamo.planning import PassPeaks
from poetmodel.torch.graph.operators import operator_name
from poetmodel.torch.graph.profiles import execute_on_synthetic
from poetmodel.torch.graph.tensors import fake_storage_key, fake_value, heap_peak_bytes, tensors_in
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx

    from poetmodel.torch.dynamo.compiling import Compilation
    from poetmodel.torch.dynamo.live_calls import CountedGraph
    from poetmodel.torch.dynamo.planning import BackendOptions, FirstCall, GraphPlan, GraphRecord
    from poetmodel.torch.dynamo.rewriting import GraphPlanner

MAX_LARGE_INPUTS: Final = 4
"""Maximum number of large inputs of an operation that Inductor inlines: those of at least half the
size of the result."""
MAX_ATTEMPTS: Final = 5
"""Maximum number of plans of a graph; each further one reserves more bytes for Inductor."""
_UNTAGGED_REDUCTIONS: Final = frozenset(("cumsum", "prepare_softmax_online"))
"""Operators that reduce, but lack PyTorch's tag of reductions."""
_SEEDED_OPERATORS: Final = frozenset(
    ("inductor_lookup_seed", "inductor_randint", "inductor_random", "inductor_seed")
)
"""Operators of random numbers that Inductor inlines: each reader computes them from a seed."""


def is_generated(node: fx.Node) -> bool:
    """Return whether Inductor generates an operation's kernel instead of calling PyTorch's."""
    target: Any = node.target
    return (
        target in lowerings
        and target not in fallbacks
        and not partitioners.get_default_op_list().is_compute_intensive(node)
    )


class InliningPredictor:
    """Predicts which operations of a joint graph Inductor inlines."""

    def __init__(self, graph: fx.Graph, n_forward_outputs: int) -> None:
        self._op_types = partitioners.get_default_op_list()
        (output,) = graph.find_nodes(op="output")
        results = _pytree.tree_leaves(output.args)
        self._results = set(results)
        self._forward = find_ancestors(results[:n_forward_outputs])
        self._reductions: set[fx.Node] = set()
        """Reductions, and operations on their results with as many elements; none is inlined.

        Inductor generates operations on the results as scalar code after the reduction. In a
        reader they would be vector code, whose logarithm, for example, may differ in the last bit.
        """
        for node in graph.nodes:
            reduced_inputs = self._reductions.intersection(node.all_input_nodes)
            if _is_reduction(node) or _max_elements(node) in map(_max_elements, reduced_inputs):
                self._reductions.add(node)

    def __call__(self, node: fx.Node, size_bytes: int, read_bytes: Sequence[int]) -> bool:
        """Return whether a node is inlined, by its size and the sizes of its inputs [B].

        An inlined node has at most `MAX_LARGE_INPUTS` inputs with half of its size or more, with
        several readers at most one.
        """
        if not self._is_fusible(node) or node in self._reductions or node.is_impure():
            return False
        views = [node, *self._find_views(node)]
        if not self._results.isdisjoint(views):
            return False
        readers = {reader for view in views for reader in view.users} - set(views)
        if not all(map(self._is_fusible, readers)):
            return False
        n_large_inputs = sum(2 * size >= size_bytes for size in read_bytes)
        if n_large_inputs > MAX_LARGE_INPUTS or (
            len(readers) > 1 and (n_large_inputs > 1 or operator_name(node) == "cat")
        ):
            return False
        is_random = any(
            operator_name(source) == "inductor_random" for source in node.all_input_nodes
        )
        return not (is_random and node in self._forward and not readers <= self._forward)

    def _is_fusible(self, node: fx.Node) -> bool:
        """Return whether Inductor can fuse an operation with its readers."""
        if self._op_types.is_random(node):
            return False
        return self._op_types.is_fusible(node) or operator_name(node) in _SEEDED_OPERATORS

    def _find_views(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the views of a node, and their views."""
        for user in node.users:
            if user.op == "call_function" and fake_storage_key(user) == fake_storage_key(node):
                yield user
                yield from self._find_views(user)


def _is_reduction(node: fx.Node) -> bool:
    return (
        torch.Tag.reduction in getattr(node.target, "tags", ())
        or operator_name(node) in _UNTAGGED_REDUCTIONS
    )


def _max_elements(node: fx.Node) -> int:
    """Return the number of elements in the largest output tensor of a node; 0 without one."""
    return max((tensor.numel() for tensor in tensors_in(fake_value(node))), default=0)


class Partitioner(CustomPartitionerFn):  # type: ignore[misc, unused-ignore]
    """A partitioner for Inductor with a RAM budget; created by `poetmodel.torch.partitioner`.

    `reserved_bytes` of the budget are for memory of Inductor that is not in the plan [B]. Without a
    `call` each graph is one of its own. The plan replaces that of `plan_index`, if given.
    """

    def __init__(
        self,
        graphs: GraphPlanner,
        call: FirstCall | None = None,
        *,
        reserved_bytes: int = 0,
        plan_index: int | None = None,
    ) -> None:
        self.graphs = graphs
        self.graph_plan: GraphPlan | None = None
        """Plan of the last graph; None before a graph with gradients."""
        self.plan_index: int | None = None
        """Position of that plan in the record."""
        self._call = call
        self._replaced_index = plan_index
        self.forward_results_bytes = self.final_results_bytes = 0
        """Bytes of the last graph: results of the forward pass, and results of both passes with
        autograd's copies of gradients [B]."""
        self._reserved_bytes = reserved_bytes

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],  # noqa: ARG002 - as Inductor calls it
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan a joint graph, changing it; return the modules of forward and backward pass."""
        with self.graphs.record_refusals():
            return self._split_graph(gm, num_fwd_outputs, static_lifetime_input_indices)

    def _split_graph(
        self,
        gm: fx.GraphModule,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan a joint graph; return the modules of its forward and backward passes.

        Removes unused nodes from `gm`, and repeated ones if PyTorch's option ``cse`` is on. Sets
        `forward_results_bytes` and `final_results_bytes`.
        """
        require_whole_model(has_one_plan=True)
        gm.graph.eliminate_dead_code()
        if functorch.cse:
            gm.graph = partitioners.fx_graph_cse(gm.graph)
        inlining = InliningPredictor(gm.graph, num_fwd_outputs)
        joint = JointGraph(gm.graph, num_fwd_outputs, is_inlined=inlining)
        call_context = self.graphs.begin_call() if self._call is None else nullcontext(self._call)
        with call_context as call:
            graph, saved_nodes, planned, self.plan_index = self.graphs.rewrite(
                joint, call, reserved_bytes=self._reserved_bytes, plan_index=self._replaced_index
            )
        self.graph_plan = planned.graph_plan
        sizes = [storage.bytes for storage in joint.step_graph.storages]
        results = joint.find_storages(joint.results[:num_fwd_outputs])
        self.forward_results_bytes = sum(sizes[number] for number in results)
        final_results = (sizes[number] for number in joint.final_results)
        self.final_results_bytes = joint.copied_bytes + sum(final_results)
        fixed_indices = set(static_lifetime_input_indices or ())
        inputs = [
            node
            for node in graph.find_nodes(op="placeholder")
            if not str(node.target).startswith(TANGENTS)
        ]
        forward, backward = partitioners._extract_fwd_bwd_modules(  # noqa: SLF001 - as PyTorch's
            _make_graph_module(gm, graph),
            saved_nodes,
            [],
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_nodes=OrderedSet(
                node for number, node in enumerate(inputs) if number in fixed_indices
            ),
        )
        forward, backward = map(partitioners.raise_getitems, (forward, backward))
        return (
            partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False),
            partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True),
        )

    def __deepcopy__(self, _: object) -> Partitioner:
        """Return this object: Inductor copies its settings, which include the partitioner."""
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickle this object as its `uuid`, which Inductor's cache keys contain."""
        return str, (self.uuid(),)

    def uuid(self) -> str:
        """Return `GraphPlanner.key`, which does not depend on `reserved_bytes`."""
        return self.graphs.key


class MeasuringCompiler:
    """Compiles the graphs of one function by Inductor, and measures their peaks."""

    def __init__(self, counted_graph: CountedGraph) -> None:
        self._counted_graph = counted_graph
        self.forward_bytes = self.backward_bytes = 0
        """Peaks of the forward and backward passes on synthetic tensors; 0 before they are
        compiled [B]."""
        self._strides: dict[str, tuple[int, ...]] = {}
        """Strides of the arguments of the forward pass, by name."""

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a graph of one pass, store its measured peak, and return the counted pass."""
        names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
        compiled_function = compile_fx_inner(gm, example_inputs, **options)
        is_backward = options.get("is_backward", False)

        def measure_peak(integer: int) -> int:
            """Execute the graph twice on synthetic inputs; return the second peak [B].

            A backward pass excludes only inputs with name and strides of a forward input.
            """
            makers = []
            for name, value in zip(names, example_inputs, strict=True):
                stride = value.stride() if isinstance(value, torch.Tensor) else ()
                if not is_backward:
                    self._strides[name] = stride
                # Convolutions save arguments in another layout, as a copy.
                is_counted = self._strides.get(name) != stride
                makers.append(_make_synthetic_source(value, is_counted=is_counted, integer=integer))
            first_makers, results = list(makers), list[Any]()
            compiled_function([make() for make in first_makers])  # fills the caches of libraries

            def execute() -> None:
                results.append(compiled_function([make() for make in makers]))
                makers.clear()

            return heap_peak_bytes(execute)

        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            peak_bytes = execute_on_synthetic(measure_peak)
        if is_backward:
            self.backward_bytes = peak_bytes
        else:
            self.forward_bytes = peak_bytes
        if options.get("is_inference", False):
            return self._counted_graph.count_inference(compiled_function)
        if is_backward:
            return self._counted_graph.count_backward(compiled_function)
        return self._counted_graph.count_forward(compiled_function)


def _make_synthetic_source(value: Any, *, is_counted: bool, integer: int) -> Callable[[], Any]:
    """Return a function that returns a synthetic CPU tensor like `value`; `value` if no tensor.

    It is full of 1 if its type is floating-point, otherwise of `integer`. With `is_counted` each
    call allocates a new tensor, which a measured peak then includes.
    """
    if not isinstance(value, torch.Tensor):
        return lambda: value
    layout, dtype = (value.shape, value.stride()), value.dtype

    def make_tensor() -> torch.Tensor:
        return torch.empty_strided(*layout, dtype=dtype).fill_(
            1 if dtype.is_floating_point else integer
        )

    if is_counted:
        return make_tensor
    tensor = make_tensor()
    return lambda: tensor


class InductorBackend(Backend):
    """The back end whose kernels Inductor generates.

    Inductor chooses fusions and the order of kernels. Therefore the graph is executed on synthetic
    tensors and, if its peak exceeds the budget, planned again with a smaller one.
    """

    _has_one_plan = True

    def __init__(self, settings: BackendOptions) -> None:
        super().__init__(settings, is_generated=is_generated)

    def plan_for(self, *_: Any, **_options: Any) -> list[GraphRecord]:
        """Raise `InputError`: the memory of Inductor's kernels is unknown before execution."""
        raise InputError("kernels: those of Inductor cannot be planned without running them")

    def _compile_call(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        compilation: Compilation,
        **_: Any,
    ) -> Any:
        """Compile a graph; repeat with more bytes reserved for Inductor until the peak fits.

        Fails after `MAX_ATTEMPTS`. The reserved bytes are cached for later compilations.
        """
        layouts = [plain_layout(value) for value in inputs if isinstance(value, torch.Tensor)]
        cache, key = self.settings.cache, digest(self.key, module.code, layouts)
        reserved_bytes: int = cache.read("reserve", key) or 0
        call, plan_index, peaks = compilation.call, -1, list[int]()
        for attempt in range(MAX_ATTEMPTS):
            counted_graph = self.count_calls(is_sharded=call.is_sharded)
            module_copy, compiler = copy.deepcopy(module), MeasuringCompiler(counted_graph)
            partitioner = Partitioner(
                self,
                call,
                reserved_bytes=reserved_bytes,
                plan_index=plan_index if peaks else None,
            )
            # No cached results, and the backward pass is compiled now, so that it is measured.
            with functorch.patch(
                enable_autograd_cache=False, force_non_lazy_backward_lowering=True
            ):
                try:
                    compiled_function = compile_fx(
                        module_copy,
                        inputs,
                        compiler,
                        config_patches={"custom_partitioner_fn": partitioner},
                    )
                except BudgetError:
                    if not peaks:
                        raise
                    break
            graph_plan = partitioner.graph_plan
            if (
                graph_plan is None or partitioner.plan_index is None
            ):  # a call without gradients has no plan
                counted_graph.name = f"a call without gradients{call.title}"
                counted_graph.peaks = PassPeaks(compiler.forward_bytes)
                peak_bytes = compiler.forward_bytes + call.wrapped_bytes
                budget_bytes = self._inference_budget_bytes(counted_graph.name, peak_bytes)
                counted_graph.budget_bytes = budget_bytes
                self._unplanned_lines.append(
                    f"{counted_graph.name}: peak {format_bytes(peak_bytes)} of "
                    f"{format_bytes(budget_bytes)}, without a plan"
                )
                return compiled_function
            plan_index, record = partitioner.plan_index, graph_plan.record
            # During the backward pass the results and their gradients are in RAM too.
            backward_bytes = max(
                compiler.backward_bytes + 2 * partitioner.forward_results_bytes,
                partitioner.final_results_bytes + partitioner.forward_results_bytes,
            )
            peak_bytes = max(compiler.forward_bytes, backward_bytes) + call.wrapped_bytes
            excess_bytes = peak_bytes - record.ram_budget_bytes
            if excess_bytes <= 0:
                record = replace(record, predicted_peak_bytes=peak_bytes)
                self._graph_plans[plan_index] = graph_plan = replace(
                    graph_plan,
                    record=record,
                    peaks=PassPeaks(
                        forward_bytes=compiler.forward_bytes,
                        held_bytes=min(compiler.forward_bytes, backward_bytes),
                        backward_bytes=backward_bytes,
                        copied_bytes=graph_plan.peaks.copied_bytes,
                    ),
                )
                counted_graph.set_plan(graph_plan)
                if peaks:
                    cache.write("reserve", key, reserved_bytes)
                return counted_graph.record_nodes(compiled_function)
            # The memory of Inductor that is not in the plan may grow as the plan shrinks.
            reserved_bytes += excess_bytes << attempt
            peaks.append(peak_bytes)
        del self._graph_plans[plan_index]
        raise BudgetError(
            f"ram: kernels of Inductor took at least {min(peaks):,} B in all attempts for graph "
            f"{plan_index}: ram={min(peaks)} is enough"
        )

    def _inference_budget_bytes(self, name: str, peak_bytes: int) -> int:
        """Return the stated budget, refused below the peak; without bytes stated, the peak [B]."""
        budget = self.settings.budget
        budget_bytes = None if budget is None else budget.size_bytes
        if budget_bytes is None:
            return peak_bytes
        if peak_bytes > budget_bytes:
            raise BudgetError(
                f"ram: kernels of Inductor take {peak_bytes:,} B for {name}, and "
                f"cannot be planned without gradients: ram={peak_bytes} is enough, or use "
                "kernels='eager'"
            )
        return budget_bytes
