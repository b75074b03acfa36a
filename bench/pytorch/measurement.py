"""Measurement of one run: heap peak, step time, bytes written, and equality with eager."""

from __future__ import annotations

import copy
import gc
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch

from poetmodel import torch as pmt
from poetmodel.errors import BudgetError, NoScheduleError
from poetmodel.sweeps.measurement import FAILED
from poetmodel.torch.graph.tensors import heap_peak_bytes
from poetmodel.torch.runtime.convolutions import choose_divisions, divide_convolutions
from poetmodel.torch.step.scheduled import floor_bytes, keep_all_bytes, scheduled_graph
from pytorch.library import network
from pytorch.networks import NETWORKS
from pytorch.peers import (
    TrainingMethod,
    checkpoint_per_block,
    eager,
    hooks_to_file,
    memory_budget,
    selective_checkpoint,
    stock,
    whole_loss,
)
from pytorch.runs import BACKEND, FILE_HOOKS, FUSED, KEEP_ALL, OURS, STOCK, TrainingRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytorch.networks import Training

RAN: Final = "ran"
"""Status of methods without a solve."""


def measured(run: TrainingRun, *, folder: str, ram_bytes: int | None = None) -> dict[str, Any]:
    """Execute one method on one network; return the record's fields.

    Pages are stored in `folder`; `ram_bytes` is the budget of compiled steps at the peak of a peer
    [B]. If the method raises, ``status`` is `FAILED` and ``reason`` has the message.
    """
    return facts_of(partial(_comparison_record, run, folder, ram_bytes))


def facts_of(compared: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Execute a comparison; return its record fields, or its failure, and its time."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    facts: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    try:
        facts |= compared()
    except NoPlanError as error:
        facts |= error.facts
    except Exception as error:  # noqa: BLE001 - any exception of a method is recorded
        facts |= {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
    return facts | {"seconds": time.perf_counter() - begun, "processor_s": time.process_time()}


def _comparison_record(run: TrainingRun, folder: str, ram_bytes: int | None) -> dict[str, Any]:
    """Return the differences and costs of a method's steps relative to eager PyTorch.

    Notes
    -----
    Results are those of the second step after an equal first one, so that buffers have changed. The
    peak is measured with existing gradients, to which all methods add; or with new gradients.
    """
    torch.manual_seed(run.seed)
    training = (NETWORKS.get(run.network) or network(run.network))()
    model, loss_fn, inputs = training
    twin, third = copy.deepcopy(model), copy.deepcopy(model)
    method = _method(run, training, folder, ram_bytes)
    torch.manual_seed(run.seed + 1)
    begun = time.perf_counter(), time.process_time()
    method.run(*inputs)
    first = time.perf_counter() - begun[0], time.process_time() - begun[1]
    results = _results(model, method, inputs)
    two_steps_s = time.perf_counter() - begun[0]
    two_steps_processor_s = time.process_time() - begun[1]
    # Only now, because compiling the reference would affect what the method compiles.
    reference = (stock if run.reference == STOCK else eager)((twin, loss_fn, inputs))
    torch.manual_seed(run.seed + 1)
    with functorch.patch(activation_memory_budget=1.0):
        reference.run(*inputs)
        expected = _results(twin, reference, inputs)
    unequal = _unequal(expected, results)
    captured: dict[str, Any] = {}
    if unequal and run.kind in (BACKEND, "memory-budget"):  # captured, it may branch differently
        plain = whole_loss((third, loss_fn, inputs), "eager")
        torch.manual_seed(run.seed + 1)
        plain.run(*inputs)
        captured["equal_captured"] = not _unequal(_results(third, plain, inputs), results)
    del expected, results, third
    for own, ways in ((model, method), (twin, reference)):
        own.zero_grad()
        if run.fresh:
            ways.prepare = own.zero_grad
        else:
            for parameter in own.parameters():
                parameter.grad = torch.zeros_like(parameter)
    before = method.written_bytes()
    peak = heap_peak_bytes(lambda: method.run(*inputs))
    written = method.written_bytes() - before
    method.prepare()
    eager_peak = heap_peak_bytes(lambda: reference.run(*inputs))
    reference.prepare()
    return {
        "status": RAN,
        "reason": "",
        "heap_peak_bytes": peak,
        f"{run.reference}_heap_peak_bytes": eager_peak,
        "written_bytes": written,
        "first_s": first[0],
        "first_processor_s": first[1],
        "two_steps_s": two_steps_s,
        "two_steps_processor_s": two_steps_processor_s,
        "pairs": pairs_of(method, reference, inputs, run.pairs),
        "unequal_gradients": sum(key.startswith("gradient") for key in unequal),
        "unequal_buffers": sum(key.startswith("buffer") for key in unequal),
        "equal": not unequal,
        **captured,
        **method.details,
    }


def _method(
    run: TrainingRun, training: Training, folder: str, ram_bytes: int | None
) -> TrainingMethod:
    if run.own in (BACKEND, FUSED):
        return within_backend(training, run, ram_bytes=ram_bytes)
    if run.own is not None:
        return compiled(training, run, folder=folder, ram_bytes=ram_bytes)
    made: dict[str, Callable[[], TrainingMethod]] = {
        "eager": lambda: eager(training),
        "checkpoint": lambda: checkpoint_per_block(training),
        "selective": lambda: selective_checkpoint(training),
        FILE_HOOKS: lambda: hooks_to_file(training, folder),
        "memory-budget": lambda: memory_budget(training, run.share or 1.0),
        STOCK: lambda: stock(training, run.share),
    }
    return made[run.method]()


def _unequal(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    return [key for key in expected if not torch.equal(expected[key], found[key])]


def _results(
    model: torch.nn.Module, method: TrainingMethod, inputs: Any
) -> dict[str, torch.Tensor]:
    """Execute a step after the first one; return copies of its loss, gradients and buffers."""
    model.zero_grad()
    found = {"loss": method.run(*inputs)}
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = parameter.grad.clone()
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    return found


def pairs_of(
    method: TrainingMethod, reference: TrainingMethod, inputs: Any, count: int
) -> list[list[float]]:
    """Time steps of a method, each beside one of the reference, in alternating order.

    Returns
    -------
    list of list of float
        Wall time and CPU time, and both of the reference's step [s].
    """
    pairs = []
    for place in range(count):
        gc.collect()
        first, second = (method, reference) if place % 2 else (reference, method)
        times = {id(each): _times_s(each, inputs) for each in (first, second)}
        pairs.append([round(t, 6) for t in (*times[id(method)], *times[id(reference)])])
    return pairs


def _times_s(method: TrainingMethod, inputs: Any) -> tuple[float, float]:
    begin, processor = time.perf_counter(), time.process_time()
    method.run(*inputs)
    times = time.perf_counter() - begin, time.process_time() - processor
    method.prepare()
    return times


# -- compiled steps --------------------------------------------------------------------------------


class NoPlanError(Exception):
    """There is no plan within the budget, or none was found in time; has the record's fields."""

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__(facts["reason"])
        self.facts = facts


def compiled(
    training: Training, run: TrainingRun, *, folder: str, ram_bytes: int | None
) -> TrainingMethod:
    """Compile a step within a budget: in bytes, or the run's fraction of keep-all.

    Raises
    ------
    NoPlanError
        If there is no plan.
    """
    paging, recompute = OURS.get(run.own or "", (False, False))
    ram = ram_bytes if ram_bytes is not None else f"{share_of(run):.0%}"
    try:
        step = pmt.compile(
            *training, ram=ram, storage=folder, paging=paging, recompute=recompute,
            minimize="energy", time_limit=run.limit_s, rollback=False, cache=False,
        )  # fmt: skip
    except (NoScheduleError, BudgetError) as error:
        raise NoPlanError(_refusal_record(training, run, ram_bytes, error)) from error
    found = step.compiled
    details = {
        "gap": step.result.gap,
        "floor_bytes": floor_bytes(found.scheduled),
        "instructions": len(found.plan.program),
        "trace_s": found.trace_s,
        "profile_s": found.profile_s,
        "costs": list(found.notes),
    }
    return TrainingMethod(
        run=step, written_bytes=lambda: found.runner.traffic[0], details=details_of(step) | details
    )


def details_of(step: pmt.Step) -> dict[str, Any]:
    """Return the record fields of a compiled step."""
    found, result = step.compiled, step.result
    return {
        "status": str(result.status),
        "reason": result.reason,
        "gap": result.gap,
        "budget_bytes": found.budget_bytes,
        "keep_all_bytes": found.keep_all_bytes,
        "plan_peak_bytes": found.peak_bytes,
        "plan_time_s": found.check.makespan_s,
        "plan_written_bytes": found.check.written_bytes,
        "solve_s": result.build_s + result.solve_s,
        "compile_s": found.compile_s,
        "versions": dict(result.versions),
    }


def within_backend(
    training: Training, run: TrainingRun, *, ram_bytes: int | None
) -> TrainingMethod:
    """Compile the loss within a budget, with the kernels of the run; planned at the first call.

    Raises
    ------
    NoPlanError
        If there is no plan within the budget.
    """
    model, _, inputs = training
    kernels = "inductor" if run.own == FUSED else "eager"
    back = pmt.backend(ram_bytes or "100%", kernels=kernels, time_limit=run.limit_s, cache=False)
    method = whole_loss(training, back)
    state = torch.get_rng_state()
    buffers = [buffer.clone() for buffer in model.buffers()]
    begun = time.perf_counter(), time.process_time()
    try:
        method.run(*inputs)
    except BackendCompilerFailed as error:
        refused = {"status": "infeasible", "reason": str(error.inner_exception)}
        raise NoPlanError(refused | {"budget_bytes": ram_bytes}) from error
    first = time.perf_counter() - begun[0], time.process_time() - begun[1]
    torch.set_rng_state(state)
    model.zero_grad()
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    (record,) = back.plans
    method.details = {
        "status": record.status,
        "gap": record.gap,
        "budget_bytes": record.ram_budget_bytes,
        "plan_peak_bytes": record.predicted_peak_bytes,
        "keep_all_bytes": record.keep_all_bytes,
        "recomputed": record.recomputed,
        "solve_s": record.solve_s,
        "first_s": first[0],
        "first_processor_s": first[1],
    }
    return method


def share_of(run: TrainingRun) -> float:
    """Return the budget of a run as a fraction of keep-all."""
    return 1.0 if run.own == KEEP_ALL else run.share or 1.0


def _refusal_record(
    training: Training,
    run: TrainingRun,
    ram_bytes: int | None,
    error: NoScheduleError | BudgetError,
) -> dict[str, Any]:
    """Return the record fields of a run without a plan."""
    traced = pmt.trace(*training)
    whole = keep_all_bytes(traced)
    budget = ram_bytes if ram_bytes is not None else int(share_of(run) * whole)
    traced = divide_convolutions(traced, choose_divisions(traced, budget_bytes=budget))
    least = floor_bytes(scheduled_graph(traced, budget_bytes=budget))
    facts: dict[str, Any] = {"budget_bytes": budget, "floor_bytes": least, "keep_all_bytes": whole}
    if isinstance(error, NoScheduleError):
        facts["solve_s"] = error.result.build_s + error.result.solve_s
    return no_plan(error) | facts


def no_plan(error: NoScheduleError | BudgetError) -> dict[str, Any]:
    """Return status and reason of a budget without a plan."""
    status = str(error.result.status) if isinstance(error, NoScheduleError) else "infeasible"
    return {"status": status, "reason": str(error)}
