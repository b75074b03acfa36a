"""Live calls of a back end: counts the bytes that they hold, and refuses passes over the budget.

A call is live from its forward pass until a backward pass without ``retain_graph=True`` has been
executed, or until its saved tensors are freed and no gradient can reach its results. Saved tensors
count while they exist, results while they exist and a gradient can reach the call.
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
from poetmodel.torch.dynamo.steps import Moment

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterable, Sequence

    from poetmodel.torch.dynamo.frontier import Frontier
    from poetmodel.torch.dynamo.planning import GraphPlan

    CompiledPass = Callable[[list[Any]], Any]

_COMPILED_NODE: Final = "CompiledFunctionBackward"
"""Name of the autograd node of a call of a compiled graph."""
_MAX_DEPTH: Final = 3
"""Maximum number of autograd nodes from that of a result to that of its call, both included."""
_COMPILE_WHOLE_ADVICE: Final = (
    "allow more, or compile the module that contains the blocks, or the function that makes all of "
    "these calls, which is planned as one; otherwise run each backward pass before the next call, "
    "and calls without one under torch.no_grad()"
)
_SHARDED_ADVICE: Final = (
    "allow more, or compile the module that contains the blocks, which is planned as one, then "
    "wrap that module alone: model.compile(...), then fully_shard(model)"
)
_NO_PASS: Final = -1
"""Id that autograd returns if no backward pass is being executed."""
_ONE_BACKWARD_ADVICE: Final = (
    "add the losses up and call backward() once, without retain_graph=True"
)
_DELETE_RESULTS_ADVICE: Final = (
    "delete results of other calls before it, and call backward() once for each call"
)


class _SizedStorage(NamedTuple):
    """The storage of a returned tensor, with the size of all tensors that are freed with it."""

    storage: StorageWeakRef
    bytes: int

    @property
    def alive_bytes(self) -> int:
        """`bytes` while the storage exists, then 0 [B]."""
        return 0 if self.storage.expired() else self.bytes


class _OutputLayout(NamedTuple):
    """Outputs of a forward pass that are in new storages, by position; equal for all calls."""

    results: tuple[tuple[int, int], ...]
    """(position, size [B]) of each result."""
    saved_position: int | None
    """Position of the largest saved tensor, which represents all; None if no tensor is saved."""
    saved_bytes: int
    """Size of all saved tensors [B]."""


@dataclass(eq=False)
class _LiveCall:
    """A call whose backward pass may follow."""

    graph: CountedGraph
    saved_storage: _SizedStorage | None
    """Storage of one saved tensor, with the size of all saved tensors, which autograd frees
    together; None if no tensor is saved."""
    results: tuple[_SizedStorage, ...]
    number: int = -1
    """Number of the call among those of its step with a choice of plans; otherwise -1."""
    node: weakref.ref[Any] | None = None
    """The autograd node; None until the compiled function has returned, or if none was found."""
    is_returned: bool = False
    """Whether the compiled function has returned."""

    @property
    def held_bytes(self) -> int:
        """Existing bytes of saved tensors and, if a backward pass may follow, of results [B]."""
        held_bytes = self.saved_bytes
        if self._has_node:
            held_bytes += sum(result.alive_bytes for result in self.results)
        return held_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes of saved tensors that exist [B]."""
        return 0 if self.saved_storage is None else self.saved_storage.alive_bytes

    @property
    def may_save(self) -> bool:
        """Whether saved tensors exist, or might exist by another plan."""
        return self.saved_storage is None or bool(self.saved_bytes)

    @property
    def is_finished(self) -> bool:
        """Whether the call holds no bytes, and its saved tensors are freed or it has no node."""
        return not self.held_bytes and (self.saved_storage is not None or not self._has_node)

    @property
    def _has_node(self) -> bool:
        """Whether the autograd node exists or may still be found: a backward pass is possible."""
        if self.node is None:
            return not self.is_returned
        return self.node() is not None


class CallChoice(NamedTuple):
    """The choice of a plan for a call, made before its forward pass."""

    is_pinned: bool = False
    """Whether the call has no choice of plans."""
    expected_number: int | None = None
    """Number in its step for which the plan of the call was chosen; None if it was not chosen."""


_NO_CHOICE: Final = CallChoice()


class CountedGraph:
    """A compiled graph whose passes are counted among the live calls of a back end.

    `set_plan` sets name, budget and peaks. `is_sharded` (by FSDP2) changes only the advice of
    errors. `frontier` has plans for calls that wait together.
    """

    def __init__(
        self, calls: LiveCalls, *, is_sharded: bool = False, frontier: Frontier | None = None
    ) -> None:
        self.is_sharded = is_sharded
        self.frontier = frontier
        self.name = ""
        """Name in the summary."""
        self.budget_bytes = 0
        """Budget of the graph [B]; 0 if only that of all calls of a step applies."""
        self.has_concurrent_calls = False
        """Whether the plan is for a call with other calls between its two passes."""
        self.peaks = PassPeaks(0)
        self.results_count = 0
        """Number of results among the outputs of the forward pass; the rest are saved tensors."""
        self._calls = calls
        self._layout: _OutputLayout | None = None
        """Layout of the outputs; None before the first call."""
        self._thread_state = local()
        """Attributes `call`: the call whose forward pass has ended in this thread, or None; and
        `choice`: that for the next call in this thread."""

    def set_plan(self, graph_plan: GraphPlan) -> None:
        """Set name, budget, `has_concurrent_calls`, peaks and number of results by a plan."""
        self.name = graph_plan.record.name
        self.has_concurrent_calls = graph_plan.inserted_node is not None
        self.budget_bytes = graph_plan.record.ram_budget_bytes
        self.peaks = graph_plan.peaks
        self.results_count = graph_plan.forward_outputs

    def announce_call(self, choice: CallChoice) -> None:
        """Set the choice for the next call in this thread."""
        self._thread_state.choice = choice

    @property
    def held_bytes(self) -> int:
        """Bytes of saved tensors and results of one call [B]; predicted before the first call."""
        if self._layout is None:
            return self.peaks.held_bytes
        return self._layout.saved_bytes + sum(size for _, size in self._layout.results)

    def count_forward(self, compiled_pass: CompiledPass) -> CompiledPass:
        """Wrap a forward pass: its call becomes live when the pass returns."""

        def forward(arguments: list[Any]) -> Any:
            """Execute and count the forward pass; the graph's first call also sets `_layout`."""
            storages = _storage_references(arguments) if self._layout is None else {}
            choice = getattr(self._thread_state, "choice", _NO_CHOICE)
            running_pass = self._calls.begin_pass(
                _Pass(self, self.peaks.forward_bytes, choice=choice)
            )
            try:
                outputs = compiled_pass(arguments)
                if self._layout is None:
                    self._layout = self._find_layout(outputs, storages)
                running_pass.forward_call = self._thread_state.call = self._make_call(
                    self._layout, outputs
                )
                running_pass.forward_call.number = running_pass.number
            finally:
                self._calls.end_pass(running_pass)
            return outputs

        return _mark_boxed(forward, compiled_pass)

    def count_backward(self, compiled_pass: CompiledPass) -> CompiledPass:
        """Wrap a backward pass, so that it ends its call unless ``retain_graph=True``."""
        return self._count_final_pass(compiled_pass, self._make_backward_pass)

    def count_inference(self, compiled_pass: CompiledPass) -> CompiledPass:
        """Wrap a graph without a backward pass, so that its peak is reserved while it runs."""
        return self._count_final_pass(compiled_pass, self._make_inference_pass)

    def _count_final_pass(
        self, compiled_pass: CompiledPass, make_pass: Callable[[Sequence[Any]], _Pass]
    ) -> CompiledPass:
        """Wrap the last pass of a call: it ends the call, except with ``retain_graph=True``."""

        def counted_pass(arguments: list[Any]) -> Any:
            """Reserve the peak, execute the pass, record its new tensors; always end the pass."""
            running_pass = self._calls.begin_pass(make_pass(arguments))
            try:
                values = compiled_pass(arguments)
                running_pass.returned_storages = self._calls.find_new_tensors(running_pass, values)
                running_pass.is_done = True
            finally:
                self._calls.end_pass(running_pass)
            return values

        return _mark_boxed(counted_pass, compiled_pass)

    def record_nodes(self, compiled_function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the compiled function, so that each live call has its autograd node."""

        def call_compiled(*arguments: Any) -> Any:
            """Call the function; mark its call as returned, with its autograd node or None."""
            self._thread_state.call = None
            results = compiled_function(*arguments)
            call: _LiveCall | None = self._thread_state.call
            if call is not None:
                self._thread_state.call = None
                call.node = find_compiled_node(results)
                call.is_returned = True
            return results

        return call_compiled

    def _find_layout(
        self, outputs: Sequence[Any], argument_storages: dict[int, StorageWeakRef]
    ) -> _OutputLayout:
        """Return the layout of the first forward pass's outputs that are in new storages."""
        known_storages = set(argument_storages)
        new_outputs: list[tuple[int, int]] = []
        for position, value in enumerate(outputs):
            for storage in _get_storages(value):
                if storage._cdata not in known_storages and storage.nbytes():  # noqa: SLF001 - its identity
                    known_storages.add(storage._cdata)  # noqa: SLF001 - its identity
                    new_outputs.append((position, storage.nbytes()))
        results = tuple(output for output in new_outputs if output[0] < self.results_count)
        saved_outputs = [output for output in new_outputs if output[0] >= self.results_count]
        largest_position = max(saved_outputs, key=lambda output: output[1], default=(None, 0))[0]
        return _OutputLayout(results, largest_position, sum(size for _, size in saved_outputs))

    def _make_call(self, layout: _OutputLayout, outputs: Sequence[Any]) -> _LiveCall:
        """Return the call of a forward pass with `outputs`; one saved tensor represents all."""

        def sized_storage(position: int, size: int) -> _SizedStorage:
            (storage,) = _get_storages(outputs[position])
            return _SizedStorage(StorageWeakRef(storage), size)

        saved_storage = None
        if layout.saved_position is not None:
            saved_storage = sized_storage(layout.saved_position, layout.saved_bytes)
        return _LiveCall(
            self, saved_storage, tuple(sized_storage(*result) for result in layout.results)
        )

    def _make_inference_pass(self, arguments: Sequence[Any]) -> _Pass:
        storages = self._calls.find_argument_storages(arguments)
        return _Pass(self, self.peaks.forward_bytes, is_inference=True, argument_storages=storages)

    def _make_backward_pass(self, arguments: Sequence[Any]) -> _Pass:
        """Return the record of a backward pass: its peak, and its call, None if unknown.

        With ``retain_graph=True`` the peak includes all saved tensors. Freed results do not count.
        """
        backward_call = self._calls.find_call(self, arguments)
        retains_graph = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001 - no other
        peak_bytes = self.peaks.backward_bytes
        if retains_graph:
            saved_bytes = (
                0
                if backward_call is None or backward_call.saved_storage is None
                else backward_call.saved_storage.bytes
            )
            retained_bytes = self.peaks.retained_bytes
            peak_bytes = peak_bytes + saved_bytes if retained_bytes is None else retained_bytes
        if backward_call is not None:  # the peak includes all results
            peak_bytes -= sum(result.bytes - result.alive_bytes for result in backward_call.results)
        storages = self._calls.find_argument_storages(
            arguments, backward_call, retains_graph=retains_graph
        )
        return _Pass(
            self,
            peak_bytes,
            is_backward=True,
            backward_call=backward_call,
            retains_graph=retains_graph,
            argument_storages=storages,
        )


@dataclass(eq=False)
class _Pass:
    """A pass of a graph that is being executed, or is checked before its execution."""

    graph: CountedGraph
    peak_bytes: int
    """Peak of the pass, without other live calls [B]."""
    choice: CallChoice = _NO_CHOICE
    """Choice of a plan for the call of a forward pass."""
    is_backward: bool = False
    is_inference: bool = False
    """Whether it is the pass of a graph without a backward pass."""
    backward_call: _LiveCall | None = None
    """The call whose backward pass this is; None for other passes, or if unknown."""
    retains_graph: bool = False
    """Whether `backward_call` stays live after the pass, by ``retain_graph=True``."""
    argument_storages: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Storages of the arguments, by key, as `LiveCalls.find_argument_storages` returns them; empty
    for a forward pass."""
    forward_call: _LiveCall | None = None
    """The call that a forward pass has begun; None until it has returned."""
    returned_storages: dict[int, _SizedStorage] = field(default_factory=dict)
    """Gradients, or results of a graph without a backward pass, by storage key, as
    `LiveCalls.find_new_tensors` returns them; empty for a forward pass."""
    is_done: bool = False
    """Whether a backward pass, or a pass without gradients, has returned."""
    number: int = -1
    """Number of its call among those of the step with a choice of plans; otherwise -1."""


class LiveCalls:
    """Counts live calls and running passes of all graphs of one back end; safe for threads.

    `keep_all_fraction` is the budget of calls that wait together, relative to their keep-all peak;
    None if the budget is stated in bytes. The back end sets `budget_bytes` once it is known.
    """

    def __init__(self, keep_all_fraction: float | None = None) -> None:
        self.keep_all_fraction = keep_all_fraction
        self.budget_bytes: int | None = None
        """Budget of calls that wait together [B]; None until it is known."""
        self.outside_bytes = 0
        """Bytes of that budget for memory outside of compiled functions [B]."""
        self.wrapped_bytes: Callable[[Container[int]], int] = lambda _: 0
        """Returns the current bytes of DDP, and of FSDP2 without storages of some keys [B].

        The back end sets it.
        """
        self.find_gradients: Callable[[], Sequence[torch.Tensor]] = tuple
        """Returns the gradients that FSDP2 holds; those from before a step do not count in it."""
        self.find_modes: Callable[[], Hashable] = tuple
        """Returns what distinguishes steps of equal calls: the modes of FSDP2."""
        self.tell_step: Callable[[Sequence[Moment], Hashable], object] = lambda *_: None
        """Called with passes and modes of each step that ended complete."""
        self.last_steps: dict[Hashable, tuple[Moment, ...]] = {}
        """Passes of the last step of each mode that ended and had calls with a choice of plans; a
        step that was not complete has none."""
        self._modes: Hashable = ()
        """The modes in which the current step began."""
        self._earlier_gradients: dict[int, StorageWeakRef] = {}
        """Storages of gradients from before the current step, by key."""
        self._moments: list[Moment] = []
        """Passes of the current step."""
        self._next_number = 0
        """Number of the next call with a choice of plans in the current step."""
        self._is_regular = True
        """Whether the passes of this step ran one after another, returned, retained no graph, and
        each backward pass was attributed to a call."""
        self._keep_all_bytes = 0
        """Peak of the calls of this step so far, with everything kept [B]."""
        self._forward_bytes = 0
        """Maximum RAM at a forward pass of this step before the budget was known [B]."""
        self.refusal: str | None = None
        """Reason of the last refusal; None without one, or if a step has been completed since."""
        self.has_completed_step = False
        """Whether a step, which may be a single call without gradients, was ever completed."""
        self.concurrent_bytes = 0
        """Maximum RAM that counted at a pass with other live calls or running passes [B]; 0 if
        there was none."""
        self._lock = Lock()
        self._calls: list[_LiveCall] = []
        """Live calls, in the order of their forward passes."""
        self._passes: list[_Pass] = []
        """Passes that are being executed."""
        self._returned_storages: dict[int, _SizedStorage] = {}
        """Tensors that passes returned since the first live call, by storage key."""
        self._copied_bytes = 0
        """Bytes of autograd's copies of the gradients among these tensors [B]."""

    def record_refusal(self, text: str) -> str:
        """Record the reason of a refusal for the summary; return `text`."""
        self.refusal = text
        return text

    def find_call(self, graph: CountedGraph, arguments: Sequence[Any]) -> _LiveCall | None:
        """Return the live call of `graph` whose backward pass has `arguments`; None if unknown.

        Of several calls without a saved storage, the latest is returned: they hold equal bytes.
        """
        with self._lock:
            calls = [call for call in self._calls if call.graph is graph]
        if len(calls) > 1 and any(call.saved_storage is not None for call in calls):
            storages = _storage_references(arguments)
            calls = [
                call
                for call in calls
                if call.saved_storage is not None and call.saved_storage.storage.cdata in storages
            ]
        return calls[-1] if calls else None

    def find_argument_storages(
        self,
        arguments: Sequence[Any],
        backward_call: _LiveCall | None = None,
        *,
        retains_graph: bool = False,
    ) -> dict[int, StorageWeakRef]:
        """Return the storages of arguments by key; empty if no other call or pass needs them."""
        is_alone = all(call is backward_call for call in self._calls) and not (
            self._passes or self._returned_storages
        )
        return {} if is_alone and not retains_graph else _storage_references(arguments)

    def find_new_tensors(self, running_pass: _Pass, values: Any) -> dict[int, _SizedStorage]:
        """Return new storages of `values`, by key; empty if no other call or pass needs them."""
        with self._lock:
            has_other_calls = any(
                call is not running_pass.backward_call or running_pass.retains_graph
                for call in self._calls
            )
            if not has_other_calls and len(self._passes) == 1:
                return {}
        return {
            storage._cdata: _SizedStorage(StorageWeakRef(storage), storage.nbytes())  # noqa: SLF001
            for value in values
            for storage in _get_storages(value)
            if storage._cdata not in running_pass.argument_storages  # noqa: SLF001 - its identity
        }

    def begin_pass(self, new_pass: _Pass) -> _Pass:
        """Reserve the peak of a pass until its end, and record it in the step.

        Raises `BudgetError`, and sets `refusal`, if the pass with live calls and other running
        passes could exceed the budget after a garbage collection. A forward pass is refused also if
        every possible next backward pass, or waiting beside other calls, could exceed a final
        budget; these rules do not apply to plans chosen for the step and recomputed checkpoints.
        """
        text = self._reserve(new_pass)
        if text is not None:
            gc.collect()  # live calls in unreachable reference cycles
            text = self._reserve(new_pass)
        if text is not None:
            raise BudgetError(self.record_refusal(text))
        return new_pass

    def end_pass(self, ended_pass: _Pass) -> None:
        """End a pass: its call becomes live after a forward pass, and ends after a backward pass.

        A failed pass adds or ends no call; ``retain_graph=True`` keeps the call live. The step ends
        when no call is live and no pass runs; this clears `refusal`.
        """
        with self._lock:
            self._passes.remove(ended_pass)
            if ended_pass.forward_call is not None:
                self._calls.append(ended_pass.forward_call)
            if (
                ended_pass.is_done
                and ended_pass.backward_call in self._calls
                and not ended_pass.retains_graph
            ):
                self._calls.remove(ended_pass.backward_call)
            self._returned_storages |= ended_pass.returned_storages
            if ended_pass.returned_storages and ended_pass.is_backward:
                self._copied_bytes += ended_pass.graph.peaks.copied_bytes
            is_returned = ended_pass.forward_call is not None or ended_pass.is_done
            self._is_regular = self._is_regular and is_returned and not ended_pass.retains_graph
            self._remove_finished()
            is_end = ended_pass.is_done and not self._calls and not self._passes
            if is_end:
                self.has_completed_step, self.refusal = True, None
                self._end_step()
            moments, modes = self.last_steps.get(self._modes), self._modes
        if is_end and moments is not None:
            self.tell_step(moments, modes)

    @property
    def last_step(self) -> tuple[Moment, ...] | None:
        """Passes of the last step of the present modes; None if unknown or not complete."""
        return self.last_steps.get(self.find_modes())

    def next_call_number(self) -> int:
        """Return the next number among the step's calls with a choice of plans; 0 begins a step."""
        with self._lock:
            self._remove_finished()
            return self._next_number if self._calls or self._passes else 0

    def _end_step(self) -> None:
        """Set `last_step` to the passes of the step, or to None if the step is not complete."""
        backward_numbers = {moment.number for moment in self._moments if moment.is_backward}
        forward_numbers = {moment.number for moment in self._moments if moment.number >= 0}
        if forward_numbers:
            self.last_steps.pop(self._modes, None)
            if self._is_regular and forward_numbers == backward_numbers:
                self.last_steps[self._modes] = tuple(self._moments)

    def _begin_step(self) -> None:
        self._moments.clear()
        self._modes = self.find_modes()
        self._earlier_gradients = _storage_references(self.find_gradients())
        self._next_number, self._is_regular = 0, True
        self._keep_all_bytes = self._forward_bytes = 0

    def _record_moments(
        self, new_pass: _Pass, other_calls: Sequence[_LiveCall], held_bytes: int
    ) -> None:
        """Append the `Moment` of a pass to the step, and set the `number` of the pass.

        `held_bytes` is all RAM that counts besides the peak of the pass. The number is -1 without a
        choice of plans or a known call. The interval before a backward pass is a moment, too.
        """
        backward_call = new_pass.backward_call
        if new_pass.is_backward:
            new_pass.number = -1 if backward_call is None else backward_call.number
            self._is_regular = self._is_regular and backward_call is not None
        elif new_pass.graph.frontier is not None and not new_pass.choice.is_pinned:
            new_pass.number = self._next_number
            self._next_number += 1
        self._is_regular = self._is_regular and not self._passes
        planned_calls = [call for call in other_calls if call.may_save and call.number >= 0]
        waiting_numbers = tuple(call.number for call in planned_calls)
        other_bytes = held_bytes - sum(call.saved_bytes for call in planned_calls)
        fixed_bytes = other_bytes + new_pass.peak_bytes
        if new_pass.number >= 0:
            peaks = new_pass.graph.peaks
            fixed_bytes -= peaks.backward_bytes if new_pass.is_backward else peaks.forward_bytes
        if new_pass.is_backward and backward_call is not None and not self._moments[-1].is_backward:
            # Results may have been deleted by now.
            other_bytes += self.outside_bytes + sum(
                result.bytes for result in backward_call.results
            )
            if new_pass.number < 0:
                other_bytes += backward_call.saved_bytes
            calls = (*waiting_numbers, *([new_pass.number] if new_pass.number >= 0 else []))
            self._moments.append(Moment(None, -1, False, calls, other_bytes))  # noqa: FBT003
        self._moments.append(
            Moment(
                new_pass.graph.frontier,
                new_pass.number,
                new_pass.is_backward,
                waiting_numbers,
                fixed_bytes,
            )
        )

    def _find_budget_bytes(
        self, new_pass: _Pass, other_calls: Sequence[_LiveCall], held_bytes: int
    ) -> tuple[int, bool]:
        """Return (budget of a pass [B], whether it is final).

        With several calls, a percentage refers to the keep-all peak of the step. In a backward pass
        all calls are known, and the budget is final. A forward pass has the keep-all peak so far.
        """
        graphs = [
            new_pass.graph,
            *(call.graph for call in other_calls),
            *(running_pass.graph for running_pass in self._passes),
        ]
        graph_budget_bytes = max(graph.budget_bytes for graph in graphs)
        if new_pass.is_inference and len(graphs) > 1 and self.keep_all_fraction is not None:
            return held_bytes + new_pass.peak_bytes, True
        if self.budget_bytes is not None:
            return max(graph_budget_bytes, self.budget_bytes), True
        frontier = new_pass.graph.frontier
        if (
            self.keep_all_fraction is None
            or frontier is None
            or (len(graphs) == 1 and graph_budget_bytes and not self._keep_all_bytes)
        ):
            return graph_budget_bytes, True
        keep_all_bytes = held_bytes
        for call in other_calls:
            if call.graph.frontier is not None and call.may_save:
                keep_all_peaks = call.graph.frontier.keep_all_plan.peaks
                keep_all_bytes += max(0, keep_all_peaks.saved_bytes - call.saved_bytes)
        peaks = frontier.keep_all_plan.peaks
        keep_all_bytes += max(peaks.forward_bytes, peaks.backward_bytes)
        self._keep_all_bytes = max(self._keep_all_bytes, keep_all_bytes)
        fraction = self.keep_all_fraction if new_pass.is_backward else 1.0
        return max(graph_budget_bytes, int(fraction * self._keep_all_bytes)), new_pass.is_backward

    def _reserve(self, new_pass: _Pass) -> str | None:
        """Reserve the peak of a pass and record it, or return the message that refuses it."""
        graph = new_pass.graph
        with self._lock:
            self._remove_finished()
            if not self._calls and not self._passes:
                self._begin_step()
            other_calls = [call for call in self._calls if call is not new_pass.backward_call]
            graphs = [
                graph,
                *(call.graph for call in other_calls),
                *(running_pass.graph for running_pass in self._passes),
            ]
            held_bytes = self._copied_bytes + self.wrapped_bytes(
                self._returned_storages.keys() | self._earlier_gradients.keys()
            )
            held_bytes += sum(call.held_bytes for call in other_calls)
            held_bytes += sum(running_pass.peak_bytes for running_pass in self._passes)
            held_bytes += sum(
                tensor.alive_bytes
                for key, tensor in self._returned_storages.items()
                if key not in new_pass.argument_storages
            )
            budget_bytes, is_final = self._find_budget_bytes(new_pass, other_calls, held_bytes)
            needed_bytes = held_bytes + new_pass.peak_bytes
            if new_pass.is_backward and self.budget_bytes is None:
                needed_bytes = max(needed_bytes, self._forward_bytes)
            # The results of a recomputed checkpoint are freed before the backward pass.
            is_recomputed = torch._C._current_graph_task_id() != _NO_PASS  # noqa: SLF001
            has_later_backward = graph.peaks.backward_bytes and not (
                new_pass.is_backward or is_recomputed
            )
            # Another thread may have begun the call of this number meanwhile.
            is_expected = new_pass.choice.expected_number == self._next_number
            if is_final and not is_expected and has_later_backward:
                needed_bytes = max(needed_bytes, self._min_backward_bytes(graph, held_bytes))
            if (
                has_later_backward
                and not is_expected
                and (len(graphs) > 1 or graph.has_concurrent_calls)
            ):
                middle_bytes = held_bytes + graph.held_bytes + self.outside_bytes
                needed_bytes = max(needed_bytes, middle_bytes)
            if needed_bytes <= budget_bytes:
                if not is_final:
                    self._forward_bytes = max(self._forward_bytes, needed_bytes)
                if len(graphs) > 1:
                    self.concurrent_bytes = max(self.concurrent_bytes, needed_bytes)
                self._record_moments(new_pass, other_calls, held_bytes)
                self._passes.append(new_pass)
                return None
        if len(graphs) == 1 and not new_pass.is_backward:
            return (
                f"ram: a call of {graph.name} takes {needed_bytes:,} B beside results and "
                f"gradients of earlier calls, and ram is {budget_bytes:,} B: "
                f"{_DELETE_RESULTS_ADVICE}"
            )
        if len(graphs) == 1:
            retain_text = " with retain_graph=True" if new_pass.retains_graph else ""
            advice = _ONE_BACKWARD_ADVICE if new_pass.retains_graph else _DELETE_RESULTS_ADVICE
            return (
                f"ram: the backward pass of {graph.name}{retain_text} takes {needed_bytes:,} B "
                "beside results and gradients returned since its forward pass, and ram is "
                f"{budget_bytes:,} B: {advice}"
            )
        other_names = sorted({live_graph.name for live_graph in graphs[1:]})
        count = len(graphs) - 1
        calls_text = "a call" if count == 1 else f"{count} calls"
        is_sharded = any(live_graph.is_sharded for live_graph in graphs)
        advice = _SHARDED_ADVICE if is_sharded else _COMPILE_WHOLE_ADVICE
        return (
            f"ram: {graph.name} runs beside {calls_text} of {'; '.join(other_names)} that still "
            f"need a backward pass; together they may take {needed_bytes:,} B, and ram is "
            f"{budget_bytes:,} B: {advice}"
        )

    def _min_backward_bytes(self, graph: CountedGraph, held_bytes: int) -> int:
        """Return the smallest peak of a backward pass right after a forward pass [B].

        `held_bytes` is all RAM that counts besides the forward peak.
        """
        peaks = [held_bytes + graph.peaks.backward_bytes]
        for call in self._calls:
            waiting_bytes = held_bytes - call.held_bytes + graph.held_bytes
            peaks.append(waiting_bytes + call.graph.peaks.backward_bytes)
        return min(peaks)

    def _remove_finished(self) -> None:
        """Remove finished calls; if none is live and no pass runs, discard the returned tensors."""
        self._calls = [call for call in self._calls if not call.is_finished]
        if not self._calls and not self._passes:
            self._returned_storages.clear()
            self._copied_bytes = 0


def _get_storages(value: Any) -> tuple[Any, ...]:
    """Return (storage,) of a strided tensor; () for any other value."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return ()
    return (value.untyped_storage(),)


def _storage_references(values: Iterable[Any]) -> dict[int, StorageWeakRef]:
    """Return references to the storages of tensors, by key; they prevent reuse of the key."""
    references = (StorageWeakRef(storage) for value in values for storage in _get_storages(value))
    return {reference.cdata: reference for reference in references}


def find_compiled_node(results: Any) -> weakref.ref[Any] | None:
    """Return a weak reference to the node of the compiled call that made `results`, or None."""
    nodes = [value.grad_fn for value in results if isinstance(value, torch.Tensor)]
    for _ in range(_MAX_DEPTH):
        nodes = [node for node in nodes if node is not None]
        for node in nodes:
            if type(node).__name__ == _COMPILED_NODE:
                return weakref.ref(node)
        nodes = [previous_node for node in nodes for previous_node, _ in node.next_functions]
    return None


def _mark_boxed(function: CompiledPass, compiled_pass: CompiledPass) -> CompiledPass:
    """Mark a wrapper as boxed, like its `compiled_pass`, which empties its list of arguments."""
    if not getattr(compiled_pass, "_boxed_call", False):
        raise AssertionError("a compiled pass takes its arguments as a list")
    function._boxed_call = True  # type: ignore[attr-defined] # noqa: SLF001 - PyTorch reads it
    return function
