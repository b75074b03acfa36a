"""Back ends that compile each captured graph by its plan, with eager's kernels."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._subclasses import FakeTensor
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from poetmodel.clock import infrequent_gc
from poetmodel.errors import InputError
from poetmodel.torch.capturing.surroundings import CAPTURE_LOCK, native_operators, real_strides
from poetmodel.torch.dynamo.fakes import capture_on_fakes, fake_function
from poetmodel.torch.dynamo.gradients import (
    WRAPPED,
    Additions,
    insert_additions,
    trained_parameters,
)
from poetmodel.torch.dynamo.joint_graph import SOURCE, JointGraph
from poetmodel.torch.dynamo.live_calls import CountedGraph, node_of
from poetmodel.torch.dynamo.outside import LossOnly, RemeasuredGraph
from poetmodel.torch.dynamo.planning import (
    MEASURED,
    Outside,
    PlanRecord,
)
from poetmodel.torch.dynamo.rewriting import AUTO, GraphPlanner
from poetmodel.torch.dynamo.steps import frontiers_of
from poetmodel.torch.dynamo.wrappers import (
    active_ddp,
    add_wrapper_advice,
    has_compiled_siblings,
    has_ddp_buckets,
    sharded_parents,
    wrapper_advice,
)
from poetmodel.torch.errors import CaptureError, convert_exceptions
from poetmodel.torch.graph.dropout import split_dropout
from poetmodel.torch.graph.python import make_boxed_function

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from poetmodel.torch.dynamo.frontier import Frontier
    from poetmodel.torch.dynamo.live_calls import Run
    from poetmodel.torch.dynamo.planning import FirstCall, GraphPlan

_LOCAL: Final = re.compile(r"^[LG]\['(?:kwargs'\]\[')?(\w+)'\]")
"""Dynamo's expression of a local or global name."""
_OF_MODULE: Final = re.compile(r"\._(modules|parameters|buffers)\[")
"""Substring of Dynamo's expression of a module's tensor."""
_MODULE_NAMES: Final = ("self", "fn", "captured")
"""Local variables that refer to the module that a function calls."""
_MAX_SHAPES: Final = 3
"""Maximum number of input shapes in the name of a graph."""
_AUTO_OF_ONE: Final = (
    "outside: a step of several graphs cannot be measured: pass the size of the memory between "
    "their forward and backward passes, such as outside='3MiB'"
)
BY_NAME: Final[list[object]] = []
"""Functions that are back ends themselves; they record no refusals."""


def _refusal_recorder(back_end: object) -> Callable[[str], object] | None:
    """Return a function that records a refusal of a back end; None if the class is not ours."""
    if isinstance(back_end, Backend):
        return back_end._live.record_refusal  # noqa: SLF001 - of this module
    return str if any(back_end is function for function in BY_NAME) else None


class Backend(GraphPlanner):
    """Plans each graph that ``torch.compile`` captures; made by `poetmodel.torch.backend`."""

    __name__ = "poetmodel"
    _has_one_plan = False
    """Whether all calls of a graph have the same plan."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        add_wrapper_advice(_refusal_recorder)
        self.names: dict[int, str] = {}
        """Names of the arguments in the function to compile, by number."""
        self._parameters: dict[int, str] = {}
        """Names of the arguments whose gradients the backward pass adds, by number."""

    @property
    def _compiler(self) -> Callable[..., Callable[[list[Any]], Any]]:
        """The compiler of a forward or backward graph after the split."""
        return fake_function if self._is_predicted else make_boxed_function

    def plan_for(
        self, model: Callable[..., Any], *inputs: Any, paging: bool = False
    ) -> list[PlanRecord]:
        """Plan the graphs that ``torch.compile`` would capture of a call, for another device.

        Nothing is executed and no tensor has memory, so a model may be larger than this machine.
        Tensors have the sizes that PyTorch predicts. Workspaces of kernels are unknown and not part
        of the peak.

        Parameters
        ----------
        model : callable
            The function to compile, or a module, whose parameters may be on the device ``meta``.
        *inputs
            Its arguments; tensors on the device ``meta`` count as CPU tensors.
        paging : bool
            Whether tensors may be paged to the storage of the back end's device. Each page transfer
            is waited for, so the plan is slower than with overlapping transfers.

        Returns
        -------
        list of PlanRecord
            One for each graph; they are also added to `plans` and `summary`.

        Raises
        ------
        BudgetError
            If the budget is too small; the message has the smallest known sufficient budget.
        InputError
            If times are to be measured, kernels are Inductor's, or the device has no storage.
        """
        settings = self._settings
        storage = None if settings.device is None else settings.device.storage
        if settings.costs == MEASURED:
            raise InputError(f"costs: nothing is executed here that could be {MEASURED}")
        if paging and storage is None:
            raise InputError("paging: the back end needs a device with storage")
        planner = Backend(replace(settings, paging=storage if paging else None), is_predicted=True)
        with self.recording_refusals(), convert_exceptions("plan_for"):
            capture_on_fakes(planner, model, inputs)
        self._planned += planner._planned
        return planner.plans

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a graph; ``torch.compile`` calls this."""
        with self.recording_refusals():
            require_whole_model(has_one_plan=self._has_one_plan)
            title = self._title(module, inputs)
            with self.first_call(inputs, title=title, **self._register_wrappers()) as call:
                if not self._settings.loss_only:
                    return self._compile_call(module, inputs, call, **options)
                return LossOnly(module)(
                    lambda changed_module: self._compile_call(
                        changed_module, inputs, call, **options
                    )
                )

    def _register_wrappers(self) -> dict[str, Any]:
        """Register DDP and FSDP2 modules around the function; return fields of `FirstCall`.

        Raises `CaptureError` if gradients are to be added and there is a wrapper.
        """
        sharded, ddp = _sharded_modules(), active_ddp()
        if self._settings.add_gradients and (sharded or ddp is not None):
            raise CaptureError(WRAPPED)
        self._sharded.update(sharded)
        if ddp is not None:
            self._replicas.add(ddp)
        is_part = has_ddp_buckets() or any(map(has_compiled_siblings, _local_modules()))
        return {
            "is_sharded": bool(sharded),
            "is_several": is_part and not self._has_one_plan,
            "wrapped_bytes": self._wrapped_bytes(),
        }

    def _compile_call(
        self, module: fx.GraphModule, inputs: Sequence[Any], call: FirstCall, **options: Any
    ) -> Any:
        """Compile a graph of a call; with ``outside="auto"`` a later call compiles it again."""
        if self._settings.outside == AUTO and call.is_several:
            raise InputError(_AUTO_OF_ONE)
        if self._settings.outside != AUTO:
            return self._compile_graph(module, inputs, self._compiler, **options)
        number, is_first = len(self._planned), call.function not in self._first_bytes

        def compile_again(outside: Outside, arguments: Sequence[Any]) -> Callable[..., Any]:
            """Compile the graph again with the measured memory, in place of its first plan."""
            if is_first:  # a percentage is of the whole step
                del self._first_bytes[call.function]
            with self.first_call(before=call, outside=outside):
                compiled = self._compile_graph(module, arguments, self._compiler)
            planned = self._planned.pop()
            record = replace(planned.record, name=self._planned[number].record.name)
            self._planned[number] = replace(planned, record=record)
            return compiled

        run = RemeasuredGraph(compile_again)
        backward = run.mark_backward(self._compiler)
        run.compiled = self._compile_graph(module, inputs, backward, **options)
        return run

    def _compile_graph(
        self, module: fx.GraphModule, inputs: Sequence[Any], backward: Any, **options: Any
    ) -> Callable[..., Any]:
        """Compile a graph; its calls may use different plans. `backward` is a compiler."""
        first_variant = self._compile_variant(module, inputs, backward, **options)
        frontier = self._frontier
        if frontier is None or self._is_predicted:
            return first_variant.run
        return CallsOfGraph(self, module, frontier, first_variant)

    def _compile_variant(
        self, module: fx.GraphModule, inputs: Sequence[Any], backward: Any, **options: Any
    ) -> CompiledVariant:
        """Compile a graph by the plan of the current call, or by a new plan if there is none."""
        is_fsdp = self._call is not None and self._call.is_sharded
        counted_graph = CountedGraph(self._live, is_sharded=is_fsdp)
        forward, inference = self._compiler, self._compile_inference
        is_adding = self._settings.add_gradients
        self._parameters = trained_parameters(inputs, self.names) if is_adding else {}
        if not self._is_predicted:
            forward = _count_passes(forward, counted_graph.count_forward)
            backward = _count_passes(backward, counted_graph.count_backward)
            inference = _count_passes(inference, counted_graph.count_inference)
        compile_ = aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=self._partition,
        )
        lazy = _use_lazy_graph_module(should_use=True)  # its code is never executed
        strides = nullcontext() if self._is_predicted else real_strides(inputs)
        with CAPTURE_LOCK, native_operators(), strides, lazy, infrequent_gc():
            compiled = cast("Callable[..., Any]", compile_(module, inputs, **options))
        if self._is_predicted:
            return CompiledVariant(compiled, counted_graph)
        counted_graph.set_plan(self._planned[-1])
        counted_graph.frontier = self._frontier
        if counted_graph.is_several and self._settings.stated_bytes is None:
            counted_graph.budget_bytes = 0  # a percentage refers to all calls of the step
        run = counted_graph.record_nodes(compiled)
        if self._parameters:
            run = Additions(self._parameters).add_checks(run, node_of)
        return CompiledVariant(run, counted_graph)

    def compile_variant(
        self, graph_calls: CallsOfGraph, planned: GraphPlan, arguments: Sequence[Any]
    ) -> CompiledVariant:
        """Compile a graph that was captured before, by another plan."""
        call, frontier = graph_calls.frontier.source.call, self._frontier
        record = planned.record
        name = f"{record.name}, plan {len(graph_calls.variants) + 1}"
        budget_bytes = self._live.budget_bytes or record.ram_budget_bytes
        record = replace(record, name=name, ram_budget_bytes=budget_bytes)
        planned = replace(planned, record=record)
        with self.recording_refusals(), self.first_call(before=call, planned=planned):
            self._frontier, self.names = graph_calls.frontier, graph_calls.names
            try:
                return self._compile_variant(graph_calls.module, arguments, self._compiler)
            finally:
                self._frontier = frontier

    def plan_of_call(self, frontier: Frontier, *, is_pinned: bool) -> GraphPlan | None:
        """Return the plan of the call that begins, or None for the first compiled plan.

        The first call of a step chooses the plans of the step. With `is_pinned` the call has no
        choice.
        """
        self._live.is_pinned, self._live.is_expected = is_pinned, False
        if is_pinned:
            return None
        number = self._live.next_number()
        if number == 0:
            self._steps.current = None
            last_step = self._live.last_step
            if last_step is not None and any(event.frontier is not None for event in last_step):
                has_several_calls = len(frontiers_of(last_step)) > 1
                if has_several_calls or frontier.source.call.is_several:
                    with self.recording_refusals():
                        self._steps.begin_step(last_step, self._share, self._gather)
                    self._live.budget_bytes = self._steps.budget_bytes
        planned = self._steps.plan_of(frontier, number)
        self._live.is_expected = planned is not None
        if planned is not None:
            return planned
        return frontier.tight if number or frontier.source.call.is_several else None

    def _title(self, module: fx.GraphModule, inputs: Sequence[Any]) -> str:
        """Return the name of a graph's function with its first input shapes; set `names`."""
        self.names, shapes = {}, []
        for number, node in enumerate(module.graph.find_nodes(op="placeholder")):
            source = getattr(getattr(node, "_dynamo_source", None), "name", "")
            name = str(source() if callable(source) else source)
            self.names[number] = _LOCAL.sub(r"\1", name)
            if not _OF_MODULE.search(name) and isinstance(inputs[number], torch.Tensor):
                shapes.append(f"{self.names[number]} {'x'.join(map(str, inputs[number].shape))}")
        suffix = ", ..." if len(shapes) > _MAX_SHAPES else ""
        of_shapes = f" of {', '.join(shapes[:_MAX_SHAPES])}{suffix}" if shapes else ""
        return f", {_function_name()}{of_shapes}"

    def _build_joint_graph(self, graph: fx.Graph, forward_outputs: int | None) -> JointGraph:
        """Prepare a joint graph for planning, and return its operations."""
        if any("mkldnn_rnn" in str(node.target) for node in graph.nodes):
            raise CaptureError(
                "oneDNN's LSTM cannot be run apart from its graph: set "
                "torch.backends.mkldnn.enabled = False first, or use pmt.compile"
            )
        for node in graph.find_nodes(op="placeholder"):
            name = self.names.get(getattr(node.meta.get("desc"), "idx", -1))
            if name:
                node.meta[SOURCE] = name
        graph.eliminate_dead_code()
        split_dropout(graph)
        if forward_outputs is not None and self._parameters:
            insert_additions(graph, self._parameters)
        return JointGraph(graph, forward_outputs)

    def _partition(
        self,
        module: fx.GraphModule,
        _: Sequence[Any],
        *,
        num_fwd_outputs: int,
        **_others: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan a joint graph and split it into the forward and the backward pass."""
        graph, saved = self.rewrite(self._build_joint_graph(module.graph, num_fwd_outputs))
        joint = _make_graph_module(module, graph)
        forward, backward = partitioners._extract_fwd_bwd_modules(  # noqa: SLF001 - as PyTorch's
            joint, saved, [], num_fwd_outputs=num_fwd_outputs
        )
        return forward, backward

    def _compile_inference(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """Plan and compile a graph without a backward pass."""
        graph, _saved = self.rewrite(self._build_joint_graph(module.graph, None))
        return self._compiler(_make_graph_module(module, graph))


class CompiledVariant(NamedTuple):
    """A graph compiled by one plan."""

    run: Callable[..., Any]
    counted: CountedGraph


class CallsOfGraph:
    """A captured graph; executes each call by the plan that the current step has for the call.

    Parameters
    ----------
    back_end : Backend
        Chooses plans and compiles them.
    module : torch.fx.GraphModule
        The graph, as Dynamo captured it.
    frontier : Frontier
        Plans of the graph.
    first_variant : CompiledVariant
        The first compiled plan.
    """

    def __init__(
        self,
        back_end: Backend,
        module: fx.GraphModule,
        frontier: Frontier,
        first_variant: CompiledVariant,
    ) -> None:
        """Store the first compiled plan; further plans are compiled when calls need them."""
        self.module = module
        self.frontier = frontier
        self.names = back_end.names
        self._back_end = back_end
        self._first_variant = first_variant
        self.variants: dict[int, CompiledVariant] = {}
        """Compiled variants of the graph, by the ``id`` of their plan."""
        if first_variant.counted.is_several:
            self.variants[id(frontier.tight)] = first_variant

    def __call__(self, *arguments: Any) -> Any:
        """Execute a call by its plan, which is compiled if it is new."""
        if any(isinstance(value, FakeTensor) for value in arguments):  # DDP determines shapes
            return self._first_variant.run(*arguments)
        # A checkpoint that is recomputed must save the same tensors.
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # noqa: FBT003, SLF001 - no other way
        planned = self._back_end.plan_of_call(self.frontier, is_pinned=has_hooks)
        if planned is None:
            return self._first_variant.run(*arguments)
        variant = self.variants.get(id(planned))
        if variant is None:
            variant = self._back_end.compile_variant(self, planned, arguments)
            self.variants[id(planned)] = variant
        return variant.run(*arguments)


def _translator() -> Any:
    """Return the Dynamo translator that is capturing a function now; None outside of a capture."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return getattr(InstructionTranslator, "current_tx", lambda: None)()


def _local_modules() -> list[torch.nn.Module]:
    """Return the modules among the local variables of the captured function."""
    translator = _translator()
    values = () if translator is None else translator.f_locals.values()
    return [value for value in values if isinstance(value, torch.nn.Module)]


def _sharded_modules() -> list[torch.nn.Module]:
    """Return the modules sharded by FSDP2 that contain local modules of the captured function."""
    return [sharded for module in _local_modules() for sharded in sharded_parents(module)]


def _function_name() -> str:
    """Return the name of the captured function, or of the module that it calls."""
    translator = _translator()
    if translator is None:
        return "a function"
    values = (translator.f_locals.get(name) for name in _MODULE_NAMES)
    module = next((value for value in values if isinstance(value, torch.nn.Module)), None)
    if module is not None:
        return type(module).__name__
    code = translator.f_code
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _count_passes(compiler: Callable[..., Run], count: Callable[[Run], Run]) -> Callable[..., Run]:
    """Return a compiler that wraps each compiled pass by `count`."""
    return lambda module, inputs: count(compiler(module, inputs))


def require_whole_model(*, has_one_plan: bool) -> None:
    """Raise `CaptureError` unless Dynamo captures the function as one graph.

    After a graph break there are several graphs, and the code between them has no budget. The
    buckets of DDP are separate graphs too; they are refused for a back end that `has_one_plan` per
    graph.
    """
    translator = _translator()
    if has_one_plan and has_ddp_buckets():
        raise CaptureError(
            "DistributedDataParallel makes a graph for each of its buckets, and each would have "
            "all of the budget: set torch._dynamo.config.optimize_ddp = False, compile the module "
            "inside, then wrap it"
        )
    if translator is not None and not translator.one_graph:
        if advice := wrapper_advice(is_sharded=bool(_sharded_modules())):
            raise CaptureError(advice)
        raise CaptureError(
            "the saved tensors of several graphs add up, and code between graphs has no budget: "
            "pass fullgraph=True to torch.compile, which names the line that breaks the graph, and "
            "dynamic=False, so that sizes are known"
        )
