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
from poetmodel.torch.dynamo.fakes import capture, predicted
from poetmodel.torch.dynamo.gradients import (
    WRAPPED,
    Additions,
    insert_additions,
    trained_parameters,
)
from poetmodel.torch.dynamo.joint_graph import SOURCE, JointGraph
from poetmodel.torch.dynamo.live_calls import CountedGraph, node_of
from poetmodel.torch.dynamo.outside import LossOnly, Remeasured
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
    sharded_around,
    wrapper_advice,
)
from poetmodel.torch.errors import CaptureError, explained
from poetmodel.torch.graph.dropout import split_dropout
from poetmodel.torch.graph.python import boxed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from poetmodel.torch.dynamo.frontier import Frontier
    from poetmodel.torch.dynamo.live_calls import Run
    from poetmodel.torch.dynamo.planning import FirstCall, GraphPlan

_LOCAL: Final = re.compile(r"^[LG]\['(?:kwargs'\]\[')?(\w+)'\]")
"""What Dynamo calls a local or global name."""
_OF_MODULE: Final = re.compile(r"\._(modules|parameters|buffers)\[")
"""What is in its name for a tensor that a module has."""
_WRAPPED: Final = ("self", "fn", "captured")
"""What a function calls the module that it calls."""
_SHOWN: Final = 3
"""Inputs that the name of a graph has."""
_AUTO_OF_ONE: Final = (
    "outside: a step of several graphs cannot be measured: give the size of what lives between "
    "their forward and backward passes, such as outside='3MiB'"
)
BY_NAME: Final[list[object]] = []
"""Functions that are back ends by themselves; they record no refusals."""


def _refuser(back: object) -> Callable[[str], object] | None:
    """Return what notes a refusal of a back end; None if it is none of this package."""
    if isinstance(back, Backend):
        return back._live.refuse  # noqa: SLF001 - of this module
    return str if any(back is known for known in BY_NAME) else None


class Backend(GraphPlanner):
    """Plans each graph that ``torch.compile`` captures; made by `poetmodel.torch.backend`."""

    __name__ = "poetmodel"
    _has_one_plan = False
    """Whether all calls of a graph have the same plan."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        add_wrapper_advice(_refuser)
        self.names: dict[int, str] = {}
        """What the function that is compiled calls its arguments, by number."""
        self._parameters: dict[int, str] = {}
        """Names of its arguments whose gradients the backward pass adds, by number."""

    @property
    def _compiler(self) -> Callable[..., Callable[[list[Any]], Any]]:
        """Compiler of a graph that was split off."""
        return predicted if self._is_predicted else boxed

    def plan_for(
        self, model: Callable[..., Any], *inputs: Any, paging: bool = False
    ) -> list[PlanRecord]:
        """Plan what ``torch.compile`` would capture of a call, for a device that is not here.

        Nothing is run and no tensor has memory, so a model may be larger than this machine. Tensors
        have the sizes that PyTorch predicts; the workspaces of kernels are not known and not part
        of the peak.

        Parameters
        ----------
        model : callable
            The function to compile, or a module, whose parameters may be on the device ``meta``.
        *inputs
            What it is called with; tensors on the device ``meta`` count as the processor's.
        paging : bool
            Whether tensors may be paged to the storage of the back end's device. A page waits for
            its transfer, so the plan is slower than one that overlaps both.

        Returns
        -------
        list of PlanRecord
            One for each graph; `plans` and `summary` have them too.

        Raises
        ------
        BudgetError
            If the budget is too small: says the least that is known to do.
        InputError
            If times are to be measured, kernels are Inductor's, or no device has a storage.
        """
        wanted = self._wanted
        storage = None if wanted.device is None else wanted.device.storage
        if wanted.costs == MEASURED:
            raise InputError(f"costs: nothing is run here that could be {MEASURED}")
        if paging and storage is None:
            raise InputError("paging: give the back end a device that has a storage")
        planner = Backend(replace(wanted, paging=storage if paging else None), is_predicted=True)
        with self.noting_refusals(), explained("plan_for"):
            capture(planner, model, inputs)
        self._planned += planner._planned
        return planner.plans

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a graph, as ``torch.compile`` asks for it."""
        with self.noting_refusals():
            require_whole_model(has_one_plan=self._has_one_plan)
            title = self._title(module, inputs)
            with self.first_call(inputs, title=title, **self._surroundings()) as call:
                if not self._wanted.loss_only:
                    return self._called(module, inputs, call, **options)
                return LossOnly(module)(lambda own: self._called(own, inputs, call, **options))

    def _surroundings(self) -> dict[str, Any]:
        """Return what is known of wrappers, and of other calls, around the function."""
        sharded, ddp = _sharded(), active_ddp()
        if self._wanted.add_gradients and (sharded or ddp is not None):
            raise CaptureError(WRAPPED)
        self._sharded.update(sharded)
        if ddp is not None:
            self._replicas.add(ddp)
        is_part = has_ddp_buckets() or any(map(has_compiled_siblings, _modules()))
        return {
            "is_sharded": bool(sharded),
            "is_several": is_part and not self._has_one_plan,
            "wrapped_bytes": self._wrapped_bytes(),
        }

    def _called(
        self, module: fx.GraphModule, inputs: Sequence[Any], call: FirstCall, **options: Any
    ) -> Any:
        """Compile a graph of a call."""
        if self._wanted.outside == AUTO and call.is_several:
            raise InputError(_AUTO_OF_ONE)
        if self._wanted.outside != AUTO:
            return self._compiled(module, inputs, self._compiler, **options)
        number, is_first = len(self._planned), call.function not in self._first_bytes

        def again(outside: Outside, arguments: Sequence[Any]) -> Callable[..., Any]:
            if is_first:  # a percentage is of the whole step
                del self._first_bytes[call.function]
            with self.first_call(before=call, outside=outside):
                compiled = self._compiled(module, arguments, self._compiler)
            planned = self._planned.pop()
            record = replace(planned.record, name=self._planned[number].record.name)
            self._planned[number] = replace(planned, record=record)
            return compiled

        run = Remeasured(again)
        run.compiled = self._compiled(module, inputs, run.watched(self._compiler), **options)
        return run

    def _compiled(
        self, module: fx.GraphModule, inputs: Sequence[Any], backward: Any, **options: Any
    ) -> Callable[..., Any]:
        """Compile a graph, its backward pass with a compiler of its own."""
        base = self._variant(module, inputs, backward, **options)
        frontier = self._frontier
        if frontier is None or self._is_predicted:
            return base.run
        return CallsOfGraph(self, module, frontier, base)

    def _variant(
        self, module: fx.GraphModule, inputs: Sequence[Any], backward: Any, **options: Any
    ) -> CompiledVariant:
        """Compile a graph by one plan."""
        is_fsdp = self._call is not None and self._call.is_sharded
        counted = CountedGraph(self._live, is_sharded=is_fsdp)
        forward, inference = self._compiler, self._inference
        is_adding = self._wanted.add_gradients
        self._parameters = trained_parameters(inputs, self.names) if is_adding else {}
        if not self._is_predicted:
            forward = _count_passes(forward, counted.count_forward)
            backward = _count_passes(backward, counted.count_backward)
            inference = _count_passes(inference, counted.count_inference)
        compile_ = aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=self._partition,
        )
        lazy = _use_lazy_graph_module(should_use=True)  # no code is run of it
        strides = nullcontext() if self._is_predicted else real_strides(inputs)
        with CAPTURE_LOCK, native_operators(), strides, lazy, infrequent_gc():
            compiled = cast("Callable[..., Any]", compile_(module, inputs, **options))
        if self._is_predicted:
            return CompiledVariant(compiled, counted)
        counted.set_plan(self._planned[-1])
        counted.frontier = self._frontier
        if counted.is_several and self._wanted.stated_bytes is None:
            counted.budget_bytes = 0  # a percentage is of all calls of the step
        run = counted.note_nodes(compiled)
        if self._parameters:
            run = Additions(self._parameters).checked(run, node_of)
        return CompiledVariant(run, counted)

    def variant(
        self, of: CallsOfGraph, planned: GraphPlan, arguments: Sequence[Any]
    ) -> CompiledVariant:
        """Compile a graph that was captured before, by another plan."""
        call, frontier = of.frontier.source.call, self._frontier
        record = planned.record
        name = f"{record.name}, plan {len(of.variants) + 1}"
        budget_bytes = self._live.budget_bytes or record.ram_budget_bytes
        record = replace(record, name=name, ram_budget_bytes=budget_bytes)
        planned = replace(planned, record=record)
        with self.noting_refusals(), self.first_call(before=call, planned=planned):
            self._frontier, self.names = of.frontier, of.names
            try:
                return self._variant(of.module, arguments, self._compiler)
            finally:
                self._frontier = frontier

    def plan_of_call(self, frontier: Frontier, *, is_pinned: bool) -> GraphPlan | None:
        """Return the plan of the call that begins; None for the first one of its graph."""
        self._live.is_pinned, self._live.is_expected = is_pinned, False
        if is_pinned:
            return None
        number = self._live.next_number()
        if number == 0:
            self._steps.current = None
            last = self._live.last_step
            if last is not None and any(event.frontier is not None for event in last):
                several = len(frontiers_of(last)) > 1
                if several or frontier.source.call.is_several:
                    with self.noting_refusals():
                        self._steps.begin_step(last, self._share, self._gather)
                    self._live.budget_bytes = self._steps.budget_bytes
        planned = self._steps.plan_of(frontier, number)
        self._live.is_expected = planned is not None
        if planned is not None:
            return planned
        return frontier.tight if number or frontier.source.call.is_several else None

    def _title(self, module: fx.GraphModule, inputs: Sequence[Any]) -> str:
        """Return which function a graph is of, and the shapes of its first inputs."""
        self.names, shapes = {}, []
        for number, node in enumerate(module.graph.find_nodes(op="placeholder")):
            source = getattr(getattr(node, "_dynamo_source", None), "name", "")
            name = str(source() if callable(source) else source)
            self.names[number] = _LOCAL.sub(r"\1", name)
            if not _OF_MODULE.search(name) and isinstance(inputs[number], torch.Tensor):
                shapes.append(f"{self.names[number]} {'x'.join(map(str, inputs[number].shape))}")
        more = ", ..." if len(shapes) > _SHOWN else ""
        given = f" of {', '.join(shapes[:_SHOWN])}{more}" if shapes else ""
        return f", {_function()}{given}"

    def _joint_graph(self, graph: fx.Graph, forward_outputs: int | None) -> JointGraph:
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
        graph, saved = self.rewritten(self._joint_graph(module.graph, num_fwd_outputs))
        joint = _make_graph_module(module, graph)
        forward, backward = partitioners._extract_fwd_bwd_modules(  # noqa: SLF001 - as PyTorch's
            joint, saved, [], num_fwd_outputs=num_fwd_outputs
        )
        return forward, backward

    def _inference(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graph, _saved = self.rewritten(self._joint_graph(module.graph, None))
        return self._compiler(_make_graph_module(module, graph))


class CompiledVariant(NamedTuple):
    """A graph that was compiled by one plan."""

    run: Callable[..., Any]
    counted: CountedGraph


class CallsOfGraph:
    """A captured graph, each call of which runs by the plan that its step has for it.

    Parameters
    ----------
    back : Backend
        Chooses plans and compiles them.
    module : torch.fx.GraphModule
        The graph, as Dynamo captured it.
    frontier : Frontier
        Its plans.
    base : CompiledVariant
        The first plan that was compiled.
    """

    def __init__(
        self, back: Backend, module: fx.GraphModule, frontier: Frontier, base: CompiledVariant
    ) -> None:
        self.module = module
        self.frontier = frontier
        self.names = back.names
        self._back = back
        self._base = base
        self.variants: dict[int, CompiledVariant] = {}
        """By the identity of the plan."""
        if base.counted.is_several:
            self.variants[id(frontier.tight)] = base

    def __call__(self, *arguments: Any) -> Any:
        """Run a call by its plan, which is compiled if it is new."""
        if any(isinstance(value, FakeTensor) for value in arguments):  # DDP asks for shapes
            return self._base.run(*arguments)
        # A checkpoint that is computed again must save the same tensors.
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # noqa: FBT003, SLF001 - no other way
        planned = self._back.plan_of_call(self.frontier, is_pinned=has_hooks)
        if planned is None:
            return self._base.run(*arguments)
        variant = self.variants.get(id(planned))
        if variant is None:
            variant = self._back.variant(self, planned, arguments)
            self.variants[id(planned)] = variant
        return variant.run(*arguments)


def _translator() -> Any:
    """Return what captures a function now; None where nothing does."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return getattr(InstructionTranslator, "current_tx", lambda: None)()


def _modules() -> list[torch.nn.Module]:
    """Return the modules that the captured function has as local variables."""
    translator = _translator()
    values = () if translator is None else translator.f_locals.values()
    return [value for value in values if isinstance(value, torch.nn.Module)]


def _sharded() -> list[torch.nn.Module]:
    """Return what FSDP2 shards around modules that the function has as local variables."""
    return [sharded for module in _modules() for sharded in sharded_around(module)]


def _function() -> str:
    """Return the name of the function that is captured, or of the module that it calls."""
    translator = _translator()
    if translator is None:
        return "a function"
    found = (translator.f_locals.get(name) for name in _WRAPPED)
    module = next((value for value in found if isinstance(value, torch.nn.Module)), None)
    if module is not None:
        return type(module).__name__
    code = translator.f_code
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _count_passes(compiler: Callable[..., Run], count: Callable[[Run], Run]) -> Callable[..., Run]:
    """Return a compiler whose compiled passes are counted."""
    return lambda module, inputs: count(compiler(module, inputs))


def require_whole_model(*, has_one_plan: bool) -> None:
    """Raise unless Dynamo captures the function as one graph.

    Graph breaks make several graphs, and what is between them has no budget. Buckets of DDP do too,
    which a back end refuses if it `has_one_plan` for each graph.
    """
    translator = _translator()
    if has_one_plan and has_ddp_buckets():
        raise CaptureError(
            "DistributedDataParallel makes a graph for each of its buckets, and each would have "
            "all of the budget: set torch._dynamo.config.optimize_ddp = False, compile the module "
            "inside, then wrap it"
        )
    if translator is not None and not translator.one_graph:
        if advice := wrapper_advice(is_sharded=bool(_sharded())):
            raise CaptureError(advice)
        raise CaptureError(
            "the saved tensors of several graphs add up, and what is between graphs has no budget: "
            "pass fullgraph=True to torch.compile, which names the line that breaks the graph, and "
            "dynamic=False, so that sizes are known"
        )
