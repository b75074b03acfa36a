"""Measurement of one run: heap peak, step time, bytes written, and equality with its reference."""

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
from poetmodel.torch.step.scheduled import build_scheduled_graph, floor_bytes, keep_all_bytes
from pytorch.library import find_constructor
from pytorch.networks import NETWORKS
from pytorch.peers import (
    TrainingMethod,
    compile_whole_loss,
    make_block_checkpoint,
    make_eager,
    make_file_hooks,
    make_memory_budget,
    make_selective_checkpoint,
    make_stock,
)
from pytorch.runs import BACKEND, FILE_HOOKS, FUSED, KEEP_ALL, OURS, STOCK, TrainingRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytorch.networks import Training

RAN: Final = "ran"
"""Status of methods that need no solve."""


def measure_method(
    run: TrainingRun, *, folder: str, ram_bytes: int | None = None
) -> dict[str, Any]:
    """Execute one method on one network; return the record's fields. See `record_comparison`.

    Pages are stored in `folder`; `ram_bytes` is the budget of compiled steps at the peak of a peer
    [B]. If the method raises, ``status`` is `FAILED` and ``reason`` has the message.
    """
    return record_comparison(partial(_compare_with_reference, run, folder, ram_bytes))


def record_comparison(compare: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Execute a comparison; return its record fields, or its failure, and its time.

    Sets the number of PyTorch's threads to 1. Exceptions become a status and a reason.
    """
    torch.set_num_threads(1)
    begin_s = time.perf_counter()
    facts: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    try:
        facts |= compare()
    except NoPlanError as error:
        facts |= error.facts
    except Exception as error:  # noqa: BLE001 - any exception of a method is recorded
        facts |= {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
    return facts | {"seconds": time.perf_counter() - begin_s, "processor_s": time.process_time()}


def _compare_with_reference(run: TrainingRun, folder: str, ram_bytes: int | None) -> dict[str, Any]:
    """Return the differences and costs of a method's steps relative to the run's reference.

    Notes
    -----
    Results are those of the second step after an equal first one, so that buffers have changed. The
    peak is that of a step that adds to existing gradients, or, if the run is `fresh`, creates them.
    """
    torch.manual_seed(run.seed)
    training = (NETWORKS.get(run.network) or find_constructor(run.network))()
    model, loss_fn, inputs = training
    reference_model, captured_model = copy.deepcopy(model), copy.deepcopy(model)
    method = _make_method(run, training, folder, ram_bytes)
    torch.manual_seed(run.seed + 1)
    begin_times = time.perf_counter(), time.process_time()
    method.run(*inputs)
    first_times = time.perf_counter() - begin_times[0], time.process_time() - begin_times[1]
    results = _execute_second_step(model, method, inputs)
    two_steps_s = time.perf_counter() - begin_times[0]
    two_steps_processor_s = time.process_time() - begin_times[1]
    # After the method, because compiling the reference first would affect its compilation.
    reference = (make_stock if run.reference == STOCK else make_eager)(
        (reference_model, loss_fn, inputs)
    )
    torch.manual_seed(run.seed + 1)
    with functorch.patch(activation_memory_budget=1.0):
        reference.run(*inputs)
        expected = _execute_second_step(reference_model, reference, inputs)
    unequal = _find_unequal(expected, results)
    captured_facts: dict[str, Any] = {}
    if unequal and run.kind in (BACKEND, "memory-budget"):  # captured code may branch differently
        plain_method = compile_whole_loss((captured_model, loss_fn, inputs), "eager")
        torch.manual_seed(run.seed + 1)
        plain_method.run(*inputs)
        captured_facts["equal_captured"] = not _find_unequal(
            _execute_second_step(captured_model, plain_method, inputs), results
        )
    del expected, results, captured_model
    for own_model, own_method in ((model, method), (reference_model, reference)):
        own_model.zero_grad()
        if run.fresh:
            own_method.prepare = own_model.zero_grad
        else:
            for parameter in own_model.parameters():
                parameter.grad = torch.zeros_like(parameter)
    written_before = method.written_bytes()
    peak_bytes = heap_peak_bytes(lambda: method.run(*inputs))
    written_bytes = method.written_bytes() - written_before
    method.prepare()
    reference_peak_bytes = heap_peak_bytes(lambda: reference.run(*inputs))
    reference.prepare()
    return {
        "status": RAN,
        "reason": "",
        "heap_peak_bytes": peak_bytes,
        f"{run.reference}_heap_peak_bytes": reference_peak_bytes,
        "written_bytes": written_bytes,
        "first_s": first_times[0],
        "first_processor_s": first_times[1],
        "two_steps_s": two_steps_s,
        "two_steps_processor_s": two_steps_processor_s,
        "pairs": time_pairs(method, reference, inputs, run.pairs),
        "unequal_gradients": sum(key.startswith("gradient") for key in unequal),
        "unequal_buffers": sum(key.startswith("buffer") for key in unequal),
        "equal": not unequal,
        **captured_facts,
        **method.details,
    }


def _make_method(
    run: TrainingRun, training: Training, folder: str, ram_bytes: int | None
) -> TrainingMethod:
    if run.compiled_kind in (BACKEND, FUSED):
        return compile_with_backend(training, run, ram_bytes=ram_bytes)
    if run.compiled_kind is not None:
        return compile_step(training, run, folder=folder, ram_bytes=ram_bytes)
    constructors: dict[str, Callable[[], TrainingMethod]] = {
        "eager": lambda: make_eager(training),
        "checkpoint": lambda: make_block_checkpoint(training),
        "selective": lambda: make_selective_checkpoint(training),
        FILE_HOOKS: lambda: make_file_hooks(training, folder),
        "memory-budget": lambda: make_memory_budget(training, run.share or 1.0),
        STOCK: lambda: make_stock(training, run.share),
    }
    return constructors[run.method]()


def _find_unequal(expected: dict[str, torch.Tensor], results: dict[str, torch.Tensor]) -> list[str]:
    return [key for key in expected if not torch.equal(expected[key], results[key])]


def _execute_second_step(
    model: torch.nn.Module, method: TrainingMethod, inputs: Any
) -> dict[str, torch.Tensor]:
    """Remove gradients and execute a step; return its loss and copies of gradients and buffers."""
    model.zero_grad()
    results = {"loss": method.run(*inputs)}
    for name, parameter in model.named_parameters():
        results[f"gradient of {name}"] = parameter.grad.clone()
    for name, buffer in model.named_buffers():
        results[f"buffer {name}"] = buffer.clone()
    return results


def time_pairs(
    method: TrainingMethod, reference: TrainingMethod, inputs: Any, count: int
) -> list[list[float]]:
    """Time `count` steps of a method, each paired with one of the reference, in alternating order.

    Returns
    -------
    list of list of float
        Wall time, CPU time, and both times of the reference's step [s].
    """
    pairs = []
    for index in range(count):
        gc.collect()
        first, second = (method, reference) if index % 2 else (reference, method)
        times = {id(timed): _time_step_s(timed, inputs) for timed in (first, second)}
        pairs.append([round(time_s, 6) for time_s in (*times[id(method)], *times[id(reference)])])
    return pairs


def _time_step_s(method: TrainingMethod, inputs: Any) -> tuple[float, float]:
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    method.run(*inputs)
    times = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    method.prepare()
    return times


# -- compiled steps --------------------------------------------------------------------------------


class NoPlanError(Exception):
    """There is no plan within the budget, or none was found in time; `facts` is the record."""

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__(facts["reason"])
        self.facts = facts


def compile_step(
    training: Training, run: TrainingRun, *, folder: str, ram_bytes: int | None
) -> TrainingMethod:
    """Compile a step within `ram_bytes` [B], or if None within the run's fraction of keep-all.

    Raises
    ------
    NoPlanError
        If there is no plan, or none was found in time.
    """
    paging, recompute = OURS.get(run.compiled_kind or "", (False, False))
    ram = ram_bytes if ram_bytes is not None else f"{choose_budget_fraction(run):.0%}"
    try:
        step = pmt.compile(
            *training, ram=ram, storage=folder, paging=paging, recompute=recompute,
            minimize="energy", time_limit=run.limit_s, rollback=False, cache=False,
        )  # fmt: skip
    except (NoScheduleError, BudgetError) as error:
        raise NoPlanError(_refusal_record(training, run, ram_bytes, error)) from error
    compiled = step.compiled
    details = {
        "gap": step.result.gap,
        "floor_bytes": floor_bytes(compiled.scheduled),
        "instructions": len(compiled.plan.program),
        "trace_s": compiled.trace_s,
        "profile_s": compiled.profile_s,
        "costs": list(compiled.notes),
    }
    return TrainingMethod(
        run=step,
        written_bytes=lambda: compiled.runner.traffic[0],
        details=list_step_details(step) | details,
    )


def list_step_details(step: pmt.Step) -> dict[str, Any]:
    """Return the record fields of a compiled step and its solve."""
    compiled, result = step.compiled, step.result
    return {
        "status": str(result.status),
        "reason": result.reason,
        "gap": result.gap,
        "budget_bytes": compiled.budget_bytes,
        "keep_all_bytes": compiled.keep_all_bytes,
        "plan_peak_bytes": compiled.peak_bytes,
        "plan_time_s": compiled.check.makespan_s,
        "plan_written_bytes": compiled.check.written_bytes,
        "solve_s": result.build_s + result.solve_s,
        "compile_s": compiled.compile_s,
        "versions": dict(result.versions),
    }


def compile_with_backend(
    training: Training, run: TrainingRun, *, ram_bytes: int | None
) -> TrainingMethod:
    """Compile the loss within a budget, with the kernels of the run, and execute one step.

    The back end plans in this step. Afterwards, random state and buffers are restored, and
    gradients are removed.

    Raises
    ------
    NoPlanError
        If there is no plan within the budget.
    """
    model, _, inputs = training
    kernels = "inductor" if run.compiled_kind == FUSED else "eager"
    backend = pmt.backend(ram_bytes or "100%", kernels=kernels, time_limit=run.limit_s, cache=False)
    method = compile_whole_loss(training, backend)
    state = torch.get_rng_state()
    buffers = [buffer.clone() for buffer in model.buffers()]
    begin_times = time.perf_counter(), time.process_time()
    try:
        method.run(*inputs)
    except BackendCompilerFailed as error:
        refusal = {"status": "infeasible", "reason": str(error.inner_exception)}
        raise NoPlanError(refusal | {"budget_bytes": ram_bytes}) from error
    first_times = time.perf_counter() - begin_times[0], time.process_time() - begin_times[1]
    torch.set_rng_state(state)
    model.zero_grad()
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    (plan,) = backend.plans
    method.details = {
        "status": plan.status,
        "gap": plan.gap,
        "budget_bytes": plan.ram_budget_bytes,
        "plan_peak_bytes": plan.predicted_peak_bytes,
        "keep_all_bytes": plan.keep_all_bytes,
        "recomputed": plan.recomputed,
        "solve_s": plan.solve_s,
        "first_s": first_times[0],
        "first_processor_s": first_times[1],
    }
    return method


def choose_budget_fraction(run: TrainingRun) -> float:
    """Return the budget of a run as a fraction of the keep-all peak."""
    return 1.0 if run.compiled_kind == KEEP_ALL else run.share or 1.0


def _refusal_record(
    training: Training,
    run: TrainingRun,
    ram_bytes: int | None,
    error: NoScheduleError | BudgetError,
) -> dict[str, Any]:
    """Return the record fields of a run without a plan, minimum RAM and keep-all peak included."""
    traced = pmt.trace(*training)
    keep_all = keep_all_bytes(traced)
    budget_bytes = (
        ram_bytes if ram_bytes is not None else int(choose_budget_fraction(run) * keep_all)
    )
    traced = divide_convolutions(traced, choose_divisions(traced, budget_bytes=budget_bytes))
    floor = floor_bytes(build_scheduled_graph(traced, budget_bytes=budget_bytes))
    facts: dict[str, Any] = {
        "budget_bytes": budget_bytes,
        "floor_bytes": floor,
        "keep_all_bytes": keep_all,
    }
    if isinstance(error, NoScheduleError):
        facts["solve_s"] = error.result.build_s + error.result.solve_s
    return list_refusal_fields(error) | facts


def list_refusal_fields(error: NoScheduleError | BudgetError) -> dict[str, Any]:
    """Return the fields ``status`` and ``reason`` for a budget without a plan."""
    status = str(error.result.status) if isinstance(error, NoScheduleError) else "infeasible"
    return {"status": status, "reason": str(error)}
