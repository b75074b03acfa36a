"""Counting of the bytes that all live calls of a back end hold, before each pass that adds to them.

A call is live from its forward pass until its backward pass has run, or until no gradient can reach
it. Until then the call holds the tensors that autograd saved, and its results.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from threading import Lock, local
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from poetmodel.errors import BudgetError
from poetmodel.torch.dynamo.planning import PassPeaks
from poetmodel.torch.dynamo.steps import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from poetmodel.torch.dynamo.frontier import Frontier
    from poetmodel.torch.dynamo.planning import GraphPlan

    Run = Callable[[list[Any]], Any]

_COMPILED_NODE: Final = "CompiledFunctionBackward"
"""Name of the autograd node of a call of a compiled graph."""
_VIEWS: Final = 3
"""Maximum number of views between a result and the autograd node of its call."""
_WHOLE: Final = (
    "allow more, or compile the module that contains the blocks, or the function that makes all of "
    "these calls, which is planned as one; otherwise run each backward pass before the next call, "
    "and calls without one under torch.no_grad()"
)
_SHARDED: Final = (
    "allow more, or compile the module that contains the blocks, which is planned as one, then "
    "wrap that module alone: model.compile(...), then fully_shard(model)"
)
_NO_TASK: Final = -1
"""Id of autograd's current backward pass if there is none."""
_ONCE: Final = "add the losses up and call backward() once, without retain_graph=True"
_LET_GO: Final = "delete results of other calls before it, and call backward() once for each call"


class _Tensor(NamedTuple):
    """The storage of a tensor that a graph returned, and its size."""

    storage: StorageWeakRef
    bytes: int

    @property
    def alive_bytes(self) -> int:
        return 0 if self.storage.expired() else self.bytes


class _Layout(NamedTuple):
    """Outputs of a forward pass with storages of their own, by position; sizes are static."""

    results: tuple[tuple[int, int], ...]
    """Position and size [B]."""
    saved: int | None
    """Position of the largest saved tensor, which stands for all; None if no tensor is saved."""
    saved_bytes: int


@dataclass(eq=False)
class _LiveCall:
    """A call whose backward pass may still run."""

    graph: CountedGraph
    saved: _Tensor | None
    """Storage of one saved tensor, with the size of all, which autograd frees together."""
    results: tuple[_Tensor, ...]
    number: int = -1
    """Its number among the calls of its step; -1 if unknown."""
    node: weakref.ref[Any] | None = None
    """The autograd node; None until the forward pass has returned."""
    is_returned: bool = False

    @property
    def held_bytes(self) -> int:
        """Bytes of saved tensors and results that exist [B]."""
        held_bytes = self.saved_bytes
        if self._has_node:
            held_bytes += sum(result.alive_bytes for result in self.results)
        return held_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes of saved tensors that exist [B]."""
        return 0 if self.saved is None else self.saved.alive_bytes

    @property
    def may_save(self) -> bool:
        """Whether tensors that a plan saves would exist now."""
        return self.saved is None or bool(self.saved_bytes)

    @property
    def is_over(self) -> bool:
        """Whether its backward pass is impossible, or would free no bytes."""
        return not self.held_bytes and (self.saved is not None or not self._has_node)

    @property
    def _has_node(self) -> bool:
        """Whether autograd holds the node, so that the call can have a backward pass."""
        if self.node is None:
            return not self.is_returned
        return self.node() is not None


class CountedGraph:
    """A compiled graph whose passes are counted among the live calls of a back end.

    Parameters
    ----------
    calls : LiveCalls
        Counts the passes.
    is_sharded : bool
        Whether FSDP2 shards the parameters of its module.
    frontier : Frontier, optional
        Plans of the same graph for calls beside other calls.
    """

    def __init__(
        self, calls: LiveCalls, *, is_sharded: bool = False, frontier: Frontier | None = None
    ) -> None:
        """Begin without a plan: `set_plan` sets name, budget and peaks."""
        self.is_sharded = is_sharded
        self.frontier = frontier
        self.name = ""
        """Name in the summary; `set_plan` sets the name and the next three attributes."""
        self.budget_bytes = 0
        self.is_several = False
        """Whether its plan is for a call beside other calls."""
        self.peaks = PassPeaks(0)
        self.results_count = 0
        """Number of results among the outputs of the forward pass; the rest are saved tensors."""
        self._calls = calls
        self._layout: _Layout | None = None
        self._begun = local()
        """The call whose forward pass has run but not returned, per thread."""

    def set_plan(self, planned: GraphPlan) -> None:
        """Set name, budget and peaks to those of a plan."""
        self.name = planned.record.name
        self.is_several = planned.turn is not None
        self.budget_bytes = planned.record.ram_budget_bytes
        self.peaks = planned.peaks
        self.results_count = planned.forward_outputs

    @property
    def held_bytes(self) -> int:
        """Bytes of saved tensors and results of a call [B]; predicted before the first call."""
        if self._layout is None:
            return self.peaks.held_bytes
        return self._layout.saved_bytes + sum(size for _, size in self._layout.results)

    def count_forward(self, run: Run) -> Run:
        """Wrap the compiled forward pass; raises `BudgetError` if it could exceed the budget."""

        def forward(arguments: list[Any]) -> Any:
            """Execute and count the forward pass; register its call as live."""
            storages = _storages(arguments) if self._layout is None else {}
            running_pass = self._calls.begin(_Pass(self, self.peaks.forward_bytes))
            try:
                outputs = run(arguments)
                if self._layout is None:
                    self._layout = self._find_layout(outputs, storages)
                running_pass.call = self._begun.call = self._make_call(self._layout, outputs)
                running_pass.call.number = running_pass.number
            finally:
                self._calls.end(running_pass)
            return outputs

        return _mark_boxed(forward, run)

    def count_backward(self, run: Run) -> Run:
        """Wrap the compiled backward pass like `count_forward`."""
        return self._count_final_pass(run, self._backward_pass)

    def count_inference(self, run: Run) -> Run:
        """Wrap a compiled graph without a backward pass in the same way."""
        return self._count_final_pass(run, self._inference_pass)

    def _count_final_pass(self, run: Run, make_pass: Callable[[Sequence[Any]], _Pass]) -> Run:
        """Wrap a compiled pass that ends its call; `make_pass` records it from its arguments."""

        def counted_pass(arguments: list[Any]) -> Any:
            """Execute and count the pass; its call stays live only if the graph is retained."""
            running_pass = self._calls.begin(make_pass(arguments))
            try:
                values = run(arguments)
                running_pass.returned = self._calls.new_tensors(running_pass, values)
                running_pass.is_done = True
            finally:
                self._calls.end(running_pass)
            return values

        return _mark_boxed(counted_pass, run)

    def record_nodes(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the compiled function, so that it records the autograd node of each call."""

        def run(*arguments: Any) -> Any:
            """Call the function, and store the autograd node in its live call."""
            self._begun.call = None
            results = compiled(*arguments)
            call: _LiveCall | None = self._begun.call
            if call is not None:
                self._begun.call = None
                call.node = node_of(results)
                call.is_returned = True
            return results

        return run

    def _find_layout(
        self, outputs: Sequence[Any], argument_storages: dict[int, StorageWeakRef]
    ) -> _Layout:
        """Return the outputs of the first forward pass that have storages of their own.

        A storage counts once; one that is shared with a result counts as a result.
        """
        known_storages = set(argument_storages)
        new_outputs: list[tuple[int, int]] = []
        for position, value in enumerate(outputs):
            for storage in _storages_of(value):
                if storage._cdata not in known_storages and storage.nbytes():  # noqa: SLF001 - its identity
                    known_storages.add(storage._cdata)  # noqa: SLF001 - its identity
                    new_outputs.append((position, storage.nbytes()))
        results = tuple(output for output in new_outputs if output[0] < self.results_count)
        saved = [output for output in new_outputs if output[0] >= self.results_count]
        largest = max(saved, key=lambda output: output[1], default=(None, 0))[0]
        return _Layout(results, largest, sum(size for _, size in saved))

    def _make_call(self, layout: _Layout, outputs: Sequence[Any]) -> _LiveCall:
        def tensor(position: int, size: int) -> _Tensor:
            (storage,) = _storages_of(outputs[position])
            return _Tensor(StorageWeakRef(storage), size)

        saved = None if layout.saved is None else tensor(layout.saved, layout.saved_bytes)
        return _LiveCall(self, saved, tuple(tensor(*result) for result in layout.results))

    def _inference_pass(self, arguments: Sequence[Any]) -> _Pass:
        storages = self._calls.argument_storages(arguments)
        return _Pass(self, self.peaks.forward_bytes, argument_storages=storages)

    def _backward_pass(self, arguments: Sequence[Any]) -> _Pass:
        """Return the backward pass of the call that saved some of the arguments."""
        own_call = self._calls.find(self, arguments)
        retains = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001 - no other
        peak_bytes = self.peaks.backward_bytes
        if retains:
            saved_bytes = 0 if own_call is None or own_call.saved is None else own_call.saved.bytes
            retained_bytes = self.peaks.retained_bytes
            peak_bytes = peak_bytes + saved_bytes if retained_bytes is None else retained_bytes
        if own_call is not None:  # the peak includes all results
            peak_bytes -= sum(result.bytes - result.alive_bytes for result in own_call.results)
        storages = self._calls.argument_storages(arguments, own_call, retains=retains)
        return _Pass(
            self,
            peak_bytes,
            is_backward=True,
            own_call=own_call,
            retains=retains,
            argument_storages=storages,
        )


@dataclass(eq=False)
class _Pass:
    """A forward or backward pass that is being executed, or whose begin is being checked."""

    graph: CountedGraph
    peak_bytes: int
    is_backward: bool = False
    own_call: _LiveCall | None = None
    """The call of a backward pass."""
    retains: bool = False
    """Whether that call stays live, as with ``retain_graph=True``."""
    argument_storages: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Storages of its arguments, if any other call is live."""
    call: _LiveCall | None = None
    """The call that a forward pass began."""
    returned: dict[int, _Tensor] = field(default_factory=dict)
    """Gradients, or results without a backward pass, if any other call is live."""
    is_done: bool = False
    """Whether a backward pass, or a call without one, has returned."""
    number: int = -1
    """Number of its call in the step; -1 if the call has no choice of plans."""


class LiveCalls:
    """Live calls and running passes of all graphs of one back end; safe for threads.

    Parameters
    ----------
    keep_all_fraction : float, optional
        The budget of several calls as a fraction of their peak with everything kept.
    """

    def __init__(self, keep_all_fraction: float | None = None) -> None:
        """Begin without live calls; a budget in bytes is set by the back end."""
        self.keep_all_fraction = keep_all_fraction
        self.budget_bytes: int | None = None
        """Budget of several calls [B]; None while it is unknown."""
        self.outside_bytes = 0
        """Bytes of that budget for memory outside of compiled functions [B]."""
        self.wrapped_bytes: Callable[[Container[int]], int] = lambda _: 0
        """Returns the current bytes of DDP and FSDP2, without storages of some keys [B]."""
        self.is_expected = False
        """Whether the call that begins has the plan that was chosen for it in its step."""
        self.is_pinned = False
        """Whether the call that begins has one plan in all steps."""
        self.last_step: tuple[Event, ...] | None = None
        """Passes of the last complete step; None if the last step was not complete."""
        self._events: list[Event] = []
        """Passes of the current step."""
        self._next_number = 0
        """Number of the next call with a choice of plans in the current step."""
        self._is_regular = True
        """Whether each pass of this step could be attributed to a call."""
        self._keep_all_bytes = 0
        """Peak of the known calls of this step with everything kept [B]."""
        self._forward_bytes = 0
        """Maximum bytes of forward passes before the budget was known [B]."""
        self.refusal: str | None = None
        """Reason of the last refusal; None if a step was completed since."""
        self.has_run = False
        """Whether a step, or a call without gradients, was ever completed."""
        self.together_bytes = 0
        """Maximum bytes of several calls that were live at once [B]; 0 if there were none."""
        self._lock = Lock()
        self._calls: list[_LiveCall] = []
        """Live calls, in the order of their forward passes."""
        self._passes: list[_Pass] = []
        """Passes that are being executed."""
        self._returned: dict[int, _Tensor] = {}
        """Tensors that passes returned since the first live call, by storage key."""
        self._copied_bytes = 0
        """Bytes of autograd's copies of such gradients [B]."""

    def __reduce__(self) -> tuple[type[LiveCalls], tuple[float | None]]:
        """Return the constructor of a copy, which has no live calls."""
        return LiveCalls, (self.keep_all_fraction,)

    def record_refusal(self, text: str) -> str:
        """Record the reason of a refusal for the summary; return `text`."""
        self.refusal = text
        return text

    def find(self, graph: CountedGraph, arguments: Sequence[Any]) -> _LiveCall | None:
        """Return the call whose saved tensors are arguments of a backward pass; None if unknown.

        Calls of a graph that saves no tensor of its own hold equal bytes: the last one is returned.
        """
        with self._lock:
            calls = [call for call in self._calls if call.graph is graph]
        if len(calls) > 1 and any(call.saved is not None for call in calls):
            storages = _storages(arguments)
            calls = [c for c in calls if c.saved is not None and c.saved.storage.cdata in storages]
        return calls[-1] if calls else None

    def argument_storages(
        self, arguments: Sequence[Any], own_call: _LiveCall | None = None, *, retains: bool = False
    ) -> dict[int, StorageWeakRef]:
        """Return the storages of arguments by key; empty if no other call is live."""
        is_alone = all(call is own_call for call in self._calls) and not (
            self._passes or self._returned
        )
        return {} if is_alone and not retains else _storages(arguments)

    def new_tensors(self, running_pass: _Pass, values: Any) -> dict[int, _Tensor]:
        """Return the new tensors that a pass returns, by key; empty if no other call is live."""
        with self._lock:
            has_other_calls = any(
                call is not running_pass.own_call or running_pass.retains for call in self._calls
            )
            if not has_other_calls and len(self._passes) == 1:
                return {}
        return {
            storage._cdata: _Tensor(StorageWeakRef(storage), storage.nbytes())  # noqa: SLF001
            for value in values
            for storage in _storages_of(value)
            if storage._cdata not in running_pass.argument_storages  # noqa: SLF001 - its identity
        }

    def begin(self, new_pass: _Pass) -> _Pass:
        """Reserve the peak of a pass until its end.

        Raises
        ------
        BudgetError
            If the pass could exceed the budget beside live calls, or if after this forward pass
            no backward pass could run.
        """
        text = self._reserve(new_pass)
        if text is not None:
            gc.collect()  # live calls in unreachable reference cycles
            text = self._reserve(new_pass)
        if text is not None:
            raise BudgetError(self.record_refusal(text))
        return new_pass

    def end(self, ended_pass: _Pass) -> None:
        """End a pass: add the call of a forward pass, or remove the call of a backward pass."""
        with self._lock:
            self._passes.remove(ended_pass)
            if ended_pass.call is not None:
                self._calls.append(ended_pass.call)
            if ended_pass.is_done and ended_pass.own_call in self._calls and not ended_pass.retains:
                self._calls.remove(ended_pass.own_call)
            self._returned |= ended_pass.returned
            if ended_pass.returned and ended_pass.is_backward:
                self._copied_bytes += ended_pass.graph.peaks.copied_bytes
            is_done = ended_pass.call is not None or ended_pass.is_done
            self._is_regular = self._is_regular and is_done and not ended_pass.retains
            self._remove_finished()
            if ended_pass.is_done and not self._calls and not self._passes:
                self.has_run, self.refusal = True, None
                self._end_step()

    def next_number(self) -> int:
        """Return the number of the next call in its step; 0 for the first call of a step."""
        with self._lock:
            self._remove_finished()
            return self._next_number if self._calls or self._passes else 0

    def _end_step(self) -> None:
        """Set `last_step` to the passes of the step; None if a call had no backward pass."""
        backward_numbers = {event.number for event in self._events if event.is_backward}
        forward_numbers = {event.number for event in self._events if event.number >= 0}
        if forward_numbers:
            is_complete = self._is_regular and forward_numbers == backward_numbers
            self.last_step = tuple(self._events) if is_complete else None

    def _begin_step(self) -> None:
        self._events.clear()
        self._next_number, self._is_regular = 0, True
        self._keep_all_bytes = self._forward_bytes = 0

    def _record_event(
        self, new_pass: _Pass, other_calls: Sequence[_LiveCall], held_bytes: int
    ) -> None:
        """Record a pass in the step, with the other RAM that no choice of plans changes."""
        own_call = new_pass.own_call
        if new_pass.is_backward:
            new_pass.number = -1 if own_call is None else own_call.number
            self._is_regular = self._is_regular and own_call is not None
        elif new_pass.graph.frontier is not None and not self.is_pinned:
            new_pass.number = self._next_number
            self._next_number += 1
        self._is_regular = self._is_regular and not self._passes
        planned_calls = [call for call in other_calls if call.may_save and call.number >= 0]
        waiting_numbers = tuple(call.number for call in planned_calls)
        beside_bytes = held_bytes - sum(call.saved_bytes for call in planned_calls)
        fixed_bytes = beside_bytes + new_pass.peak_bytes
        if new_pass.number >= 0:
            peaks = new_pass.graph.peaks
            fixed_bytes -= peaks.backward_bytes if new_pass.is_backward else peaks.forward_bytes
        if new_pass.is_backward and own_call is not None and not self._events[-1].is_backward:
            # Results may have been deleted by now.
            beside_bytes += self.outside_bytes + sum(result.bytes for result in own_call.results)
            if new_pass.number < 0:
                beside_bytes += own_call.saved_bytes
            calls = (*waiting_numbers, *([new_pass.number] if new_pass.number >= 0 else []))
            self._events.append(Event(None, -1, False, calls, beside_bytes))  # noqa: FBT003
        self._events.append(
            Event(
                new_pass.graph.frontier,
                new_pass.number,
                new_pass.is_backward,
                waiting_numbers,
                fixed_bytes,
            )
        )

    def _budget_bytes(
        self, new_pass: _Pass, other_calls: Sequence[_LiveCall], held_bytes: int
    ) -> tuple[int, bool]:
        """Return the budget [B], and whether the budget is final.

        A percentage refers to the calls of the first step, which are known when a backward pass
        begins; until then the budget may grow.
        """
        graphs = [
            new_pass.graph,
            *(call.graph for call in other_calls),
            *(p.graph for p in self._passes),
        ]
        own_bytes = max(graph.budget_bytes for graph in graphs)
        if self.budget_bytes is not None:
            return max(own_bytes, self.budget_bytes), True
        frontier = new_pass.graph.frontier
        if self.keep_all_fraction is None or frontier is None or (len(graphs) == 1 and own_bytes):
            return own_bytes, True
        keep_all_bytes = held_bytes
        for call in other_calls:
            if call.graph.frontier is not None and call.may_save:
                keep_all_peaks = call.graph.frontier.keep_all.peaks
                keep_all_bytes += max(0, keep_all_peaks.saved_bytes - call.saved_bytes)
        peaks = frontier.keep_all.peaks
        keep_all_bytes += max(peaks.forward_bytes, peaks.backward_bytes)
        self._keep_all_bytes = max(self._keep_all_bytes, keep_all_bytes)
        fraction = self.keep_all_fraction if new_pass.is_backward else 1.0
        return max(own_bytes, int(fraction * self._keep_all_bytes)), new_pass.is_backward

    def _reserve(self, new_pass: _Pass) -> str | None:
        """Reserve the peak of a pass if it meets the budget; otherwise return the reason."""
        graph = new_pass.graph
        with self._lock:
            self._remove_finished()
            if not self._calls and not self._passes:
                self._begin_step()
            other_calls = [call for call in self._calls if call is not new_pass.own_call]
            graphs = [
                graph,
                *(call.graph for call in other_calls),
                *(p.graph for p in self._passes),
            ]
            held_bytes = self._copied_bytes + self.wrapped_bytes(self._returned)
            held_bytes += sum(call.held_bytes for call in other_calls)
            held_bytes += sum(running_pass.peak_bytes for running_pass in self._passes)
            held_bytes += sum(
                tensor.alive_bytes
                for key, tensor in self._returned.items()
                if key not in new_pass.argument_storages
            )
            budget_bytes, is_known = self._budget_bytes(new_pass, other_calls, held_bytes)
            needed_bytes = held_bytes + new_pass.peak_bytes
            if new_pass.is_backward and self.budget_bytes is None:
                needed_bytes = max(needed_bytes, self._forward_bytes)
            # A recomputed checkpoint frees its results before the backward pass.
            is_recomputed = torch._C._current_graph_task_id() != _NO_TASK  # noqa: SLF001
            is_open = is_known and not self.is_expected
            is_first = graph.peaks.backward_bytes and not (new_pass.is_backward or is_recomputed)
            if is_open and is_first:
                needed_bytes = max(needed_bytes, self._next_backward_bytes(graph, held_bytes))
            if is_first and not self.is_expected and (len(graphs) > 1 or graph.is_several):
                between_bytes = held_bytes + graph.held_bytes + self.outside_bytes
                needed_bytes = max(needed_bytes, between_bytes)
            if needed_bytes <= budget_bytes:
                if not is_known:
                    self._forward_bytes = max(self._forward_bytes, needed_bytes)
                if len(graphs) > 1:
                    self.together_bytes = max(self.together_bytes, needed_bytes)
                self._record_event(new_pass, other_calls, held_bytes)
                self._passes.append(new_pass)
                return None
        if len(graphs) == 1:
            retaining = " with retain_graph=True" if new_pass.retains else ""
            return (
                f"ram: the backward pass of {graph.name}{retaining} takes {needed_bytes:,} B "
                "beside results and gradients returned since its forward pass, and ram is "
                f"{budget_bytes:,} B: {_ONCE if new_pass.retains else _LET_GO}"
            )
        other_names = sorted({live_graph.name for live_graph in graphs[1:]})
        count = len(graphs) - 1
        calls = "a call" if count == 1 else f"{count} calls"
        advice = _SHARDED if any(live_graph.is_sharded for live_graph in graphs) else _WHOLE
        return (
            f"ram: {graph.name} runs beside {calls} of {'; '.join(other_names)} that still need a "
            f"backward pass; together they may take {needed_bytes:,} B, and ram is "
            f"{budget_bytes:,} B: {advice}"
        )

    def _next_backward_bytes(self, graph: CountedGraph, held_bytes: int) -> int:
        """Return the smallest peak of any backward pass after a forward pass of a graph [B].

        `held_bytes` are held beside the forward pass.
        """
        peaks = [held_bytes + graph.peaks.backward_bytes]
        for call in self._calls:
            beside_bytes = held_bytes - call.held_bytes + graph.held_bytes
            peaks.append(beside_bytes + call.graph.peaks.backward_bytes)
        return min(peaks)

    def _remove_finished(self) -> None:
        """Remove calls that are over; without a live call also the returned tensors."""
        self._calls = [call for call in self._calls if not call.is_over]
        if not self._calls and not self._passes:
            self._returned.clear()
            self._copied_bytes = 0


def _storages_of(value: Any) -> tuple[Any, ...]:
    """Return the storage of a strided tensor as a tuple; empty for other values."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return ()
    return (value.untyped_storage(),)


def _storages(values: Iterable[Any]) -> dict[int, StorageWeakRef]:
    """Return the storages of tensors by key, which the references reserve."""
    references = (StorageWeakRef(s) for value in values for s in _storages_of(value))
    return {reference.cdata: reference for reference in references}


def node_of(results: Any) -> weakref.ref[Any] | None:
    """Return the autograd node of the compiled call that made some results; None without one."""
    nodes = [value.grad_fn for value in results if isinstance(value, torch.Tensor)]
    for _ in range(_VIEWS):
        nodes = [node for node in nodes if node is not None]
        for node in nodes:
            if type(node).__name__ == _COMPILED_NODE:
                return weakref.ref(node)
        nodes = [previous_node for node in nodes for previous_node, _ in node.next_functions]
    return None


def _mark_boxed(function: Run, run: Run) -> Run:
    """Mark a function as boxed: it empties the list of its arguments, like compiled passes."""
    if not getattr(run, "_boxed_call", False):
        raise AssertionError("a compiled pass takes its arguments as a list")
    function._boxed_call = True  # type: ignore[attr-defined] # noqa: SLF001 - PyTorch reads it
    return function
