"""The back end that compiles each captured graph by its plan, with PyTorch's own kernels."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._subclasses import FakeTensor
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from poetmodel.clock import infrequent_gc
from poetmodel.errors import InputError
from poetmodel.torch.capturing.surroundings import (
    CAPTURE_LOCK,
    correct_fake_strides,
    native_operators,
)
from poetmodel.torch.dynamo.fakes import capture_on_fakes, fake_function
from poetmodel.torch.dynamo.gradients import (
    WRAPPER_ERROR,
    AdditionChecks,
    insert_additions,
    trained_parameters,
)
from poetmodel.torch.dynamo.joint_graph import ARGUMENT_NAME, JointGraph
from poetmodel.torch.dynamo.live_calls import CallChoice, CountedGraph, find_compiled_node
from poetmodel.torch.dynamo.outside import LossOnlyGraph, RemeasuredGraph
from poetmodel.torch.dynamo.planning import (
    MEASURED,
    GraphRecord,
    OutsideMemory,
)
from poetmodel.torch.dynamo.rewriting import AUTO, GraphPlanner, Planned
from poetmodel.torch.dynamo.steps import has_choice
from poetmodel.torch.dynamo.wrappers import (
    active_ddp,
    find_sharded_parents,
    has_ddp_buckets,
    has_other_compiled_modules,
    register_wrapper_advice,
    wrapper_advice,
)
from poetmodel.torch.errors import CaptureError, convert_exceptions
from poetmodel.torch.graph.dropout import split_dropout
from poetmodel.torch.graph.python import make_boxed_function
from poetmodel.torch.graph.tensors import storage_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from poetmodel.torch.dynamo.frontier import Frontier
    from poetmodel.torch.dynamo.live_calls import CompiledPass
    from poetmodel.torch.dynamo.planning import FirstCall, GraphPlan

_NAME_EXPRESSION: Final = re.compile(r"^[LG]\['(?:kwargs'\]\[')?(\w+)'\]")
"""Start of Dynamo's expression of a local or global variable; the group is the variable's name."""
_MODULE_TENSOR: Final = re.compile(r"\._(modules|parameters|buffers)\[")
"""Substring of Dynamo's expression of a module's parameter or buffer."""
_MODULE_NAMES: Final = ("self", "fn", "captured")
"""Names of local variables that may refer to the module that a function calls."""
_MAX_SHAPES: Final = 3
"""Maximum number of input shapes in the name of a graph."""
_AUTO_ERROR: Final = (
    "outside: a step of several graphs cannot be measured: pass the size of the memory between "
    "their forward and backward passes, such as outside='3MiB'"
)
BACK_END_FUNCTIONS: Final[list[object]] = []
"""Functions that are back ends themselves, and record no refusals."""


def _find_refusal_recorder(back_end: object) -> Callable[[str], object] | None:
    """Return a function that records the text of a refusal; None for a foreign back end."""
    if isinstance(back_end, Backend):
        return back_end._live.record_refusal  # noqa: SLF001 - of this module
    has_no_recorder = any(back_end is function for function in BACK_END_FUNCTIONS)
    return str if has_no_recorder else None  # `str` stands for a recorder without an effect


class Backend(GraphPlanner):
    """Plans and compiles graphs of ``torch.compile``; created by `poetmodel.torch.backend`.

    Its construction registers a callback in Dynamo (`register_wrapper_advice`).
    """

    __name__ = "poetmodel"
    _has_one_plan = False
    """Whether all calls of a graph have the same plan."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        register_wrapper_advice(_find_refusal_recorder)

    @property
    def compiler(self) -> Callable[..., Callable[[list[Any]], Any]]:
        """The compiler of a forward or backward graph; for a prediction, `fake_function`."""
        return fake_function if self.is_predicted else make_boxed_function

    def plan_for(
        self, model: Callable[..., Any], *inputs: Any, paging: bool = False
    ) -> list[GraphRecord]:
        """Plan the graphs that ``torch.compile`` would capture of a call, without executing them.

        Tensors have no memory, and their sizes are those that PyTorch predicts, so a model may
        exceed the RAM of this machine. Workspaces of kernels are unknown, and the peak excludes
        them. Errors of capture and planning are also recorded for `summary`.

        Parameters
        ----------
        model : callable
            The function to compile, or a module, whose parameters may be on the device ``meta``.
        *inputs
            Arguments of the call; tensors on the device ``meta`` count as CPU tensors.
        paging : bool
            Whether tensors may be paged to the storage of the back end's device. The core waits for
            each transfer, so the plan is slower than with overlapping transfers.

        Returns
        -------
        list of GraphRecord
            One for each graph; they are also added to `plans` and `summary`.

        Raises
        ------
        BudgetError
            If the budget is too small, that of a region is invalid, or no plan was found in time.
            Without regions, the message has the smallest known sufficient budget, if any.
        CaptureError
            If PyTorch cannot capture the call as one graph, or a graph cannot be planned.
        InputError
            If times are to be measured, kernels are Inductor's, a region has no tensor, or there is
            no device with storage for `paging`.
        """
        settings = self.settings
        storage = None if settings.device is None else settings.device.storage
        if settings.costs == MEASURED:
            raise InputError(
                f"costs: plan_for executes no operation, so times cannot be {MEASURED}"
            )
        if paging and storage is None:
            raise InputError("paging: the back end needs a device with storage")
        planner = Backend(replace(settings, paging=storage if paging else None), is_predicted=True)
        with self.record_refusals(), convert_exceptions("plan_for"):
            capture_on_fakes(planner, model, inputs)
        self._graph_plans += planner._graph_plans
        return planner.plans

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a graph; ``torch.compile`` calls this, with the `options` of AOTAutograd.

        With ``loss_only``, a scalar result that needs a gradient makes all larger ones detached.
        """
        with self.record_refusals():
            require_whole_model(has_one_plan=self._has_one_plan)
            names = _argument_names(module)
            title = _make_name_suffix(module, inputs, names)
            with self.begin_call(inputs, title=title, **self._register_wrappers()) as call:
                compilation = Compilation(self, call, names)
                if not self.settings.loss_only:
                    return self._compile_call(module, inputs, compilation, **options)
                return LossOnlyGraph(module).compile_with(
                    lambda changed_module: self._compile_call(
                        changed_module, inputs, compilation, **options
                    )
                )

    def _register_wrappers(self) -> dict[str, Any]:
        """Register DDP and FSDP2 modules around the function; return their `FirstCall` fields.

        Fails if the back end adds gradients to ``.grad``.
        """
        sharded_modules, ddp = _find_sharded_modules(), active_ddp()
        if self.settings.add_gradients and (sharded_modules or ddp is not None):
            raise CaptureError(WRAPPER_ERROR)
        self._fsdp_modules.update(dict.fromkeys(sharded_modules))
        if ddp is not None:
            self._replicas.add(ddp)
        has_concurrent_calls = has_ddp_buckets() or any(
            map(has_other_compiled_modules, _find_local_modules())
        )
        return {
            "is_sharded": bool(sharded_modules),
            "has_concurrent_calls": has_concurrent_calls and not self._has_one_plan,
            "wrapped_bytes": self._wrapped_bytes(
                {storage_key(gradient) for gradient in self._live.find_gradients()}
            ),
        }

    def _compile_call(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        compilation: Compilation,
        **options: Any,
    ) -> Any:
        """Compile a graph with AOTAutograd's options, again once ``outside="auto"`` is measured."""
        call = compilation.call
        if self.settings.outside == AUTO and call.has_concurrent_calls:
            raise InputError(_AUTO_ERROR)
        if self.settings.outside != AUTO:
            return compilation.compile_calls(module, inputs, self.compiler, **options)
        is_first_shape = call.function not in self._first_keep_all_bytes

        def compile_again(outside: OutsideMemory, arguments: Sequence[Any]) -> Callable[..., Any]:
            """Compile with the measured memory; the new plan replaces the first in the record."""
            if is_first_shape:  # a percentage of keep-all counts the measured memory too
                self._first_keep_all_bytes.pop(call.function, None)  # absent for ram="eager"
            with self.begin_call(earlier_call=call, outside=outside) as new_call:
                new_compilation = Compilation(
                    self, new_call, compilation.names, plan_index=compilation.plan_index
                )
                return new_compilation.compile_calls(module, arguments, self.compiler)

        remeasured_graph = RemeasuredGraph(compile_again)
        backward_compiler = remeasured_graph.wrap_backward_compiler(self.compiler)
        remeasured_graph.compiled_function = compilation.compile_calls(
            module, inputs, backward_compiler, **options
        )
        return remeasured_graph

    def compile_variant(
        self, graph_calls: GraphCalls, graph_plan: GraphPlan, arguments: Sequence[Any]
    ) -> CompiledVariant:
        """Compile the graph of `graph_calls` by `graph_plan`; add its record to `plans`.

        The record has the budget of the step, if known, and a name with the number of the variant.
        Errors of this package are recorded as refusals, and raised.
        """
        record = graph_plan.record
        name = f"{record.name}, plan {len(graph_calls.variants) + 1}"
        budget_bytes = self._live.budget_bytes or record.ram_budget_bytes
        record = replace(record, name=name, ram_budget_bytes=budget_bytes)
        planned = Planned(replace(graph_plan, record=record), graph_calls.frontier)
        earlier_call = graph_calls.frontier.graph_problem.call
        with self.record_refusals(), self.begin_call(earlier_call=earlier_call) as call:
            compilation = Compilation(self, call, graph_calls.names, planned=planned)
            return compilation.compile(graph_calls.module, arguments, self.compiler)

    def count_calls(self, *, is_sharded: bool) -> CountedGraph:
        """Return a counted graph among the live calls of this back end."""
        return CountedGraph(self._live, is_sharded=is_sharded)

    def choose_plan(
        self, frontier: Frontier, *, is_pinned: bool
    ) -> tuple[GraphPlan | None, CallChoice]:
        """Return (plan of the next call of a graph, choice); None for the first compiled plan.

        - A pinned call has the first compiled plan.
        - The first call of a step chooses budget and plans of all calls, if the passes of a step
          are known (`LiveCalls.last_step`) and several calls have a choice, or calls are
          concurrent. The budget is stored in `_live`.
        - A call without a chosen plan has `Frontier.tight_plan` if it follows another call of the
          step or calls are concurrent, otherwise the first compiled plan.
        """
        if is_pinned:
            return None, CallChoice(is_pinned=True)
        number = self._live.next_call_number()
        if number == 0:
            self._steps.step_plan = None
            last_step = self._live.last_step
            if last_step is not None and has_choice(last_step):
                with self.record_refusals():
                    self._steps.choose_step_plan(last_step, self._live.find_modes(), self._ranks)
                self._live.budget_bytes = self._steps.budget_bytes
        graph_plan = self._steps.find_plan(frontier, number)
        if graph_plan is not None:
            return graph_plan, CallChoice(expected_number=number)
        waits = number or frontier.graph_problem.call.has_concurrent_calls
        return frontier.tight_plan if waits else None, CallChoice()


class Compilation:
    """One graph of a call, from its capture to compiled functions; AOTAutograd calls its methods.

    Without `planned`, it is planned. `names` are those of its arguments in the compiled function,
    by position. Its plan replaces that of `plan_index` in the record, if given.
    """

    def __init__(
        self,
        back_end: Backend,
        call: FirstCall,
        names: dict[int, str],
        *,
        planned: Planned | None = None,
        plan_index: int | None = None,
    ) -> None:
        self.call = call
        self.names = names
        self.planned = planned
        """Plan and frontier; None before the graph is partitioned."""
        self._back_end = back_end
        self.settings = back_end.settings
        self.plan_index = plan_index
        """Position of its plan in the record; None before it is planned."""
        self._added_parameters: dict[int, str] = {}
        """Names of the arguments whose gradients the backward pass adds, by position."""

    def compile_calls(
        self, module: fx.GraphModule, inputs: Sequence[Any], backward_compiler: Any, **options: Any
    ) -> Callable[..., Any]:
        """Compile a graph; with a frontier, its calls may have different plans."""
        first_variant = self.compile(module, inputs, backward_compiler, **options)
        frontier = None if self.planned is None else self.planned.frontier
        if frontier is None:
            return first_variant.execute
        return GraphCalls(self._back_end, module, self.names, frontier, first_variant)

    def compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], backward_compiler: Any, **options: Any
    ) -> CompiledVariant:
        """Compile a graph by its plan, with AOTAutograd's `options`."""
        back_end, settings = self._back_end, self.settings
        is_predicted = back_end.is_predicted
        counted_graph = back_end.count_calls(is_sharded=self.call.is_sharded)
        forward_compiler, inference_compiler = back_end.compiler, self.compile_inference
        if settings.add_gradients:
            self._added_parameters = trained_parameters(inputs, self.names)
        if not is_predicted:
            forward_compiler = _count_passes(forward_compiler, counted_graph.count_forward)
            backward_compiler = _count_passes(backward_compiler, counted_graph.count_backward)
            inference_compiler = _count_passes(inference_compiler, counted_graph.count_inference)
        compile_ = aot_autograd(
            fw_compiler=forward_compiler,
            bw_compiler=backward_compiler,
            inference_compiler=inference_compiler,
            partition_fn=self.partition,
        )
        # The Python code of lazy modules is not generated, because it is never executed.
        lazy_modules = _use_lazy_graph_module(should_use=True)
        stride_correction = nullcontext() if is_predicted else correct_fake_strides(inputs)
        with CAPTURE_LOCK, native_operators(), stride_correction, lazy_modules, infrequent_gc():
            compiled_function = cast("Callable[..., Any]", compile_(module, inputs, **options))
        if is_predicted or self.planned is None:
            return CompiledVariant(compiled_function, counted_graph)
        counted_graph.set_plan(self.planned.graph_plan)
        counted_graph.frontier = self.planned.frontier
        if counted_graph.has_concurrent_calls and settings.stated_bytes is None:
            counted_graph.budget_bytes = 0  # a budget in percent is that of all calls of the step
        execute = counted_graph.record_nodes(compiled_function)
        if self._added_parameters:
            execute = AdditionChecks(self._added_parameters).add_checks(execute, find_compiled_node)
        return CompiledVariant(execute, counted_graph)

    def partition(
        self,
        module: fx.GraphModule,
        _: Sequence[Any],
        *,
        num_fwd_outputs: int,
        **_options: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan a joint graph, changing it; return the modules of the forward and backward pass."""
        graph, saved_nodes = self._rewrite(module.graph, num_fwd_outputs)
        joint = _make_graph_module(module, graph)
        forward, backward = partitioners._extract_fwd_bwd_modules(  # noqa: SLF001 - as PyTorch's
            joint, saved_nodes, [], num_fwd_outputs=num_fwd_outputs
        )
        return forward, backward

    def compile_inference(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """Plan and compile a graph without a backward pass; it is changed in place."""
        graph, _ = self._rewrite(module.graph, None)
        return self._back_end.compiler(_make_graph_module(module, graph))

    def _rewrite(
        self, graph: fx.Graph, n_forward_outputs: int | None
    ) -> tuple[fx.Graph, list[fx.Node]]:
        """Return a graph in the order of its plan, and saved nodes; sets `planned`."""
        joint = self._build_joint_graph(graph, n_forward_outputs)
        rewritten = self._back_end.rewrite(
            joint, self.call, self.planned, plan_index=self.plan_index
        )
        self.planned, self.plan_index = rewritten.planned, rewritten.plan_index
        return rewritten.graph, rewritten.saved_nodes

    def _build_joint_graph(self, graph: fx.Graph, n_forward_outputs: int | None) -> JointGraph:
        """Prepare an FX graph in place for planning: insert additions to ``.grad``, split dropout.

        `n_forward_outputs` is None for a graph without a backward pass.
        """
        if any("mkldnn_rnn" in str(node.target) for node in graph.nodes):
            raise CaptureError(
                "oneDNN's LSTM cannot be run apart from its graph: set "
                "torch.backends.mkldnn.enabled = False first, or use pmt.compile"
            )
        for node in graph.find_nodes(op="placeholder"):
            name = self.names.get(getattr(node.meta.get("desc"), "idx", -1))
            if name:
                node.meta[ARGUMENT_NAME] = name
        graph.eliminate_dead_code()
        split_dropout(graph)
        if n_forward_outputs is not None and self._added_parameters:
            insert_additions(graph, self._added_parameters)
        return JointGraph(graph, n_forward_outputs)


class CompiledVariant(NamedTuple):
    """A graph compiled by one plan."""

    execute: Callable[..., Any]
    """Executes a call."""
    counted_graph: CountedGraph


class GraphCalls:
    """A captured graph, each call of which is executed by its plan in the current step.

    Further variants than `first_variant` are compiled when calls need them.
    """

    def __init__(
        self,
        back_end: Backend,
        module: fx.GraphModule,
        names: dict[int, str],
        frontier: Frontier,
        first_variant: CompiledVariant,
    ) -> None:
        self.module = module
        self.names = names
        self.frontier = frontier
        self._back_end = back_end
        self._first_variant = first_variant
        self._lock = Lock()
        """Held while a variant is compiled."""
        self.variants: dict[int, CompiledVariant] = {}
        """Compiled variants of the graph, by the ``id`` of their plan in `frontier`.

        The first one is included only if its plan is a copy of `tight_plan`.
        """
        if first_variant.counted_graph.has_concurrent_calls:
            self.variants[id(frontier.tight_plan)] = first_variant

    def __call__(self, *arguments: Any) -> Any:
        """Execute a call by its chosen plan, compiled on demand.

        Calls on fake tensors, and calls under hooks of saved tensors, have the first plan.
        """
        if any(isinstance(value, FakeTensor) for value in arguments):  # DDP predicts shapes
            return self._first_variant.execute(*arguments)
        # A checkpoint has such hooks, and must save the same tensors again when it is recomputed.
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # noqa: FBT003, SLF001 - no other way
        graph_plan, choice = self._back_end.choose_plan(self.frontier, is_pinned=has_hooks)
        if graph_plan is None:
            variant = self._first_variant
        else:
            with self._lock:
                if id(graph_plan) not in self.variants:
                    new_variant = self._back_end.compile_variant(self, graph_plan, arguments)
                    self.variants[id(graph_plan)] = new_variant
                variant = self.variants[id(graph_plan)]
        variant.counted_graph.announce_call(choice)
        return variant.execute(*arguments)


def _find_translator() -> Any:
    """Return Dynamo's translator of the function that is being captured; None without a capture."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return getattr(InstructionTranslator, "current_tx", lambda: None)()


def _find_local_modules() -> list[torch.nn.Module]:
    """Return the modules among the captured function's local variables; [] without a capture."""
    translator = _find_translator()
    values = () if translator is None else translator.f_locals.values()
    return [value for value in values if isinstance(value, torch.nn.Module)]


def _find_sharded_modules() -> list[torch.nn.Module]:
    """Return the modules sharded by FSDP2 that are or contain local modules of the function."""
    return [
        sharded_module
        for module in _find_local_modules()
        for sharded_module in find_sharded_parents(module)
    ]


def _argument_names(module: fx.GraphModule) -> dict[int, str]:
    """Return the names of a graph's arguments in the compiled function, by position."""
    return {
        position: _NAME_EXPRESSION.sub(r"\1", _source_expression(node))
        for position, node in enumerate(module.graph.find_nodes(op="placeholder"))
    }


def _make_name_suffix(module: fx.GraphModule, inputs: Sequence[Any], names: dict[int, str]) -> str:
    """Return a function's name with its first `_MAX_SHAPES` input shapes."""
    shapes = []
    for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
        is_tensor = isinstance(inputs[position], torch.Tensor)
        if is_tensor and not _MODULE_TENSOR.search(_source_expression(node)):
            sizes_text = "x".join(map(str, inputs[position].shape))
            shapes.append(f"{names[position]} {sizes_text}")
    suffix = ", ..." if len(shapes) > _MAX_SHAPES else ""
    shapes_text = f" of {', '.join(shapes[:_MAX_SHAPES])}{suffix}" if shapes else ""
    return f", {_find_function_name()}{shapes_text}"


def _source_expression(node: fx.Node) -> str:
    """Return Dynamo's expression of an argument of a graph; "" if it has none."""
    expression = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return str(expression() if callable(expression) else expression)


def _find_function_name() -> str:
    """Return the class of the module that the captured function calls, or its name and line."""
    translator = _find_translator()
    if translator is None:
        return "a function"
    values = (translator.f_locals.get(name) for name in _MODULE_NAMES)
    module = next((value for value in values if isinstance(value, torch.nn.Module)), None)
    if module is not None:
        return type(module).__name__
    code = translator.f_code
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _count_passes(
    compiler: Callable[..., CompiledPass], wrap: Callable[[CompiledPass], CompiledPass]
) -> Callable[..., CompiledPass]:
    """Return a compiler that passes each compiled pass through `wrap`."""
    return lambda module, inputs: wrap(compiler(module, inputs))


def require_whole_model(*, has_one_plan: bool) -> None:
    """Refuse several graphs per model: code between them, and each bucket of DDP, has no budget.

    With `has_one_plan`, each bucket would have the whole budget.
    """
    translator = _find_translator()
    if has_one_plan and has_ddp_buckets():
        raise CaptureError(
            "DistributedDataParallel makes a graph for each of its buckets, and each would have "
            "all of the budget: set torch._dynamo.config.optimize_ddp = False, compile the module "
            "inside, then wrap it"
        )
    if translator is not None and not translator.one_graph:
        if advice := wrapper_advice(is_sharded=bool(_find_sharded_modules())):
            raise CaptureError(advice)
        raise CaptureError(
            "the saved tensors of several graphs add up, and code between graphs has no budget: "
            "pass fullgraph=True to torch.compile, which names the line that breaks the graph, and "
            "dynamic=False, so that sizes are known"
        )
