"""`compile`: a module, its loss and a budget become a training step within the budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self
from weakref import WeakKeyDictionary

import torch

from poetmodel.clock import infrequent_gc
from poetmodel.device import Device
from poetmodel.errors import InputError, join_names, quote
from poetmodel.files import write_text
from poetmodel.torch.capturing.front import Changed
from poetmodel.torch.capturing.inputs import input_errors, refuse, unflatten
from poetmodel.torch.capturing.surroundings import CAPTURE_LOCK
from poetmodel.torch.compiled import Compiled, CompileOptions
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.planning.progress import show_phases
from poetmodel.torch.runtime.certificate import certify
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.plan import Plan
    from poetmodel.result import SolveResult
    from poetmodel.torch.capturing.inputs import Inputs
    from poetmodel.torch.runtime.certificate import Certificate
    from poetmodel.torch.runtime.runner import Runner


def compile(  # noqa: PLR0913 - one entry point; all parameters except three have defaults
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
    *,
    ram: str | int,
    storage: str | Path | None = None,
    paging: bool | None = None,
    recompute: bool = True,
    device: str | Device | None = None,
    minimize: str | None = None,
    deadline: str | float | None = None,
    time_limit: float | None = None,
    gap: float | None = None,
    steps: int = 10_000,
    rollback: bool = True,
    dynamic: str = "error",
    accumulate: int = 1,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    clip_grad_norm: float | None = None,
    cache: str | Path | bool = True,
) -> Step:
    """Compile a training step that stays within a RAM budget and computes the values of PyTorch.

    Compilation executes the step on the example inputs, also in eager PyTorch, and then restores
    the values of all state. It shows its current phase on stderr if that is a terminal.

    Parameters
    ----------
    model : torch.nn.Module
        The network, on the CPU, in the mode (train or eval) in which it will be executed.
    loss_fn : callable, optional
        The loss is ``loss_fn(model(*inputs[:-1]), inputs[-1])``. Without a `loss_fn`, it is
        ``model(*inputs)``, the ``loss`` item or attribute of this output, or its first element. If
        the only argument of the model is a mapping whose keys are parameters of ``forward``, it is
        passed by name: ``model(**batch)``.
    inputs : sequence or mapping
        Example inputs, the target last: tensors, numbers, strings or None, or nested tuples, lists
        and mappings of these; the model receives mappings as dicts. A mapping contains the inputs
        by name: the model is called as ``model(**batch)``, and a step returns its output, detached.
        `loss_fn` must then be None.
    ram : str or int
        The budget for tensors and workspaces: bytes, a size such as ``20MiB``, or a percentage of
        the peak when everything is kept. Parameters, and gradients that are complete, count only
        with an `optimizer`.
        With several input shapes (`dynamic`), a percentage below 100 refers to the peak of the
        first shape, and all have the same budget in bytes.
    storage : str or Path, optional
        Folder for the page file and the state file. Created if it is missing and used, also to
        measure transfers.
    paging : bool, optional
        Whether tensors may be paged. Default: only if `storage` is given.
    recompute : bool
        Whether tensors may be recomputed.
    device : str or Device, optional
        Estimate costs for this device instead of measuring them on this host.
    minimize : {'energy', 'time', 'ram', 'writes'}, optional
        The quantity that the schedule minimizes. Default: time with costs of this host, energy with
        costs of a device.
    deadline : str or float, optional
        Time limit of a step: seconds, ``20ms``, or a percentage such as ``150%`` of the time to
        compute each operation once.
    time_limit : float, optional
        Maximum time for the solver [s]. Default: 60.
    gap : float, optional
        Gap of the overhead at which the solver stops. Default: 0.01.
    steps : int
        Number of steps that will be executed. If neither `time_limit` nor `gap` is given and the
        minimized time is that of this host, the solver also stops when these steps can gain less
        time by a better schedule than its search takes.
    rollback : bool
        Whether a step that fails in the middle leaves existing gradients unchanged. While gradients
        accumulate over several steps that page, this needs memory for a second set of gradients.
        With an `optimizer` and `storage`, whether the state from before the step is preserved, in
        RAM and for `recover`: each step then also writes the state that it updates in RAM.
    dynamic : {'error', 'retrace'}
        Response to inputs of other shapes or types, and to another value of a Python number, flag,
        string, container or name that the model or the loss reads: raise an error, or compile
        again.
    accumulate : int
        Number of steps over which gradients accumulate: the backward pass of each step divides the
        loss by this number. The loss that a step returns is not divided.
    optimizer : torch.optim.Optimizer or sequence of them, optional
        Include the optimizer's updates in the step: each parameter is updated as soon as its
        gradient is computed, and the gradient is freed. One or several optimizers that `trace`
        supports. The budget then also counts parameters, buffers, inputs and the optimizer's state.
        If not everything can be kept and tensors may be paged, the solver chooses parameters,
        buffers and optimizer state that are in `storage` between steps; steps read and write them
        there.
    clip_grad_norm : float, optional
        Clip the total norm of all gradients, as ``torch.nn.utils.clip_grad_norm_`` does with
        ``model.parameters()``. Needs an `optimizer`.
    cache : str, Path or bool
        Folder for results of compilation, which later compilations of the same step reuse. Default:
        the variable ``POETMODEL_CACHE`` (empty for none), else ``poetmodel`` in ``$XDG_CACHE_HOME``
        or ``~/.cache``; False for none.

    Returns
    -------
    Step
        Call it instead of forward pass, loss and ``backward()``, as ``step(x, y)``, or by name as
        ``step(**batch)``. With an `optimizer`, it also replaces ``zero_grad()`` and
        ``optimizer.step()``.

    Raises
    ------
    CaptureError
        If the step cannot be captured, or its results differ from those of eager PyTorch by more
        than the rounding of sums.
    BudgetError
        If the RAM or the deadline is invalid, or the RAM does not exceed the reserved bytes.
    NoScheduleError
        If no schedule meets the limits, or none was found in time.
    InputError
        If an option is invalid, the page file cannot be created, or costs cannot be measured.
    PageError
        If a page or state cannot be written or read.
    """
    arguments = locals().copy()
    options = CompileOptions(
        **{field.name: arguments[field.name] for field in fields(CompileOptions)}
    )
    return Step(model, loss_fn, inputs, options)


class Step:
    """A compiled training step: ``loss = step(x, y)``, then ``optimizer.step()``.

    Creating the object compiles the step for the example inputs. Use a step in a ``with`` block, or
    call `close`, to remove its files at a definite time; otherwise they are removed when the object
    is deleted.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor] | None,
        inputs: Inputs,
        options: CompileOptions,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._options = options
        self._compiled_steps: list[Compiled] = []
        """The step as compiled for each set of input shapes and Python values, oldest first."""
        self._certificates: WeakKeyDictionary[Runner, Certificate] = WeakKeyDictionary()
        """Last certificate of each runner."""
        self._current = self._compile(inputs)
        """The compiled step for the last inputs."""

    def __repr__(self) -> str:
        """Return name, planned peak, budget, overhead, and the call that executes the step."""
        current, result = self._current, self._current.result
        overhead = ""
        if result.overhead is not None and result.problem.objective.baseline > 0:
            overhead = f"{current.record.overhead:.2%} more {result.problem.minimize}"
        peak = f"{format_bytes(current.peak_bytes)} of {format_bytes(current.budget_bytes)} planned"
        call = "step(*inputs)" if current.trace.joint.output is None else "step(**batch)"
        return brief(self, quote(current.trace.joint.name), peak, overhead, f"loss = {call}")

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Execute one step: accumulate gradients in ``.grad``, update buffers, return the loss.

        A step compiled with an optimizer does not accumulate: it updates parameters and optimizer
        state, and leaves ``.grad`` of the parameters None.

        Parameters
        ----------
        *inputs
            Inputs with the same nesting, shapes and types as in `compile`.
        **named_inputs
            Inputs by name, for a step that was compiled with a mapping. Such a step also accepts
            the mapping as its only positional argument.

        Returns
        -------
        Tensor or object
            The loss, detached. A step with inputs by name returns the output of the model, with
            detached tensors, and None in place of caches.

        Raises
        ------
        CaptureError
            If the inputs, the parameters, the modules, or Python values that model or loss read
            differ from those at compilation. With ``dynamic="retrace"`` the step is then compiled
            again, which may raise the errors of `compile`. Inputs by name instead of by position,
            or the reverse, are always refused, as is inference mode. Also if a test of the model
            for finite numbers fails (without `rollback`, gradients may then have been added), or a
            parameter that the step updates already has a gradient.
        PageError
            If a page cannot be written, read or verified, or the file was closed. With `rollback`
            the step then has no effect. Without it, gradients may have been added, or parameters
            updated.
        """
        batch = self._structure_inputs(inputs, named_inputs)
        for compiled, flat_inputs in self._candidates(batch):
            if compiled.guards.hold_before(flat_inputs):
                with suppress(Changed):
                    output = compiled.execute(flat_inputs)
                    self._current = compiled
                    return output
        compiled, flat_inputs = self.select(*inputs, **named_inputs)
        try:
            return compiled.execute(flat_inputs)
        except Changed as change:
            name = compiled.trace.joint.name
            raise CaptureError(f"{name}: {change}; compile again") from None

    def select(self, *inputs: Any, **named_inputs: Any) -> tuple[Compiled, tuple[Any, ...]]:
        """Return (compiled step for inputs like these, flat inputs).

        Tries the current compiled step, then all, oldest first. The first one whose guards hold
        becomes the current one. If there is none, compiles a new one if `dynamic` is ``retrace``,
        and otherwise raises `CaptureError`. Also raises the errors of `_structure_inputs` and
        `Guards.hold`, and of `compile` if it compiles.
        """
        name = self._current.trace.joint.name
        batch = self._structure_inputs(inputs, named_inputs)
        for compiled, flat_inputs in self._candidates(batch):
            if compiled.guards.hold(flat_inputs):
                self._current = compiled
                return compiled, flat_inputs
        if self._options.dynamic == "error" and not self._is_expected(batch):
            flat_inputs = self._current.trace.joint.flat_inputs(batch)
            refuse(name, input_errors(batch))
            reason = "; ".join(self._current.guards.differences(flat_inputs))
            raise CaptureError(f"{name}: {reason}; compile again, or with dynamic='retrace'")
        self._current = self._compile(batch)
        return self._current, self._current.trace.joint.flat_inputs(batch)

    def _candidates(self, batch: Inputs) -> Iterator[tuple[Compiled, tuple[Any, ...]]]:
        """Yield each compiled step that takes inputs of this nesting, and these flat."""
        for compiled in (self._current, *self._compiled_steps):
            try:
                flat_inputs = compiled.trace.joint.flat_inputs(batch)
            except CaptureError:
                continue
            yield compiled, flat_inputs

    def _is_expected(self, batch: Inputs) -> bool:
        """Return whether forward has set, in its first passes, what needs another graph now."""
        joint = self._current.trace.joint
        with suppress(CaptureError):
            flat_inputs = joint.flat_inputs(batch)
            if self._current.guards.hold_before(flat_inputs):
                return joint.captures.is_expected(flat_inputs)
        return False

    def _structure_inputs(self, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> Inputs:
        """Return a call's inputs as a sequence or mapping; refuse another kind than compiled."""
        joint = self._current.trace.joint
        if joint.output is None and not named_inputs:
            return inputs
        if joint.output is not None and not (inputs and named_inputs):
            batch = named_inputs if not inputs else inputs[0]
            if len(inputs) <= 1 and isinstance(batch, Mapping):
                return batch
        expected_text = "inputs by name, as the step was compiled with: step(**batch)"
        if joint.output is None:
            expected_text = "inputs without names, in their order, as in step(x, y) or step(batch)"
        got_text = join_names(named_inputs) or f"{len(inputs)} without names"
        raise CaptureError(f"{joint.name}: expected {expected_text}; got {got_text}")

    @property
    def compiled(self) -> Compiled:
        """The compiled step for the last inputs; before the first call, for those of `compile`."""
        return self._current

    @property
    def result(self) -> SolveResult:
        """Result of the solver, with the schedule.

        RAM and budget of the result do not count reserved bytes; `budget_bytes` does.
        """
        return self._current.result

    @property
    def plan(self) -> Plan:
        """The plan of the current compiled step."""
        return self._current.plan

    @property
    def budget_bytes(self) -> int:
        """The budget for tensors and workspaces [B]."""
        return self._current.budget_bytes

    @property
    def source(self) -> str:
        """The program of the current compiled step as Python code."""
        return self._current.runner.program.source

    def verify(self, *inputs: Any, **named_inputs: Any) -> Certificate:
        """Execute eager PyTorch and this step from the same state, and compare the results.

        Parameters
        ----------
        *inputs
            Inputs of a step; by default those for which the current step was compiled.
        **named_inputs
            As for a step.

        Returns
        -------
        Certificate
            Its ``summary()`` describes the comparison; differences raise no error. `report` has
            the last certificate. Parameters, gradients, optimizer state, buffers, inputs and the
            state of the random generator are restored.

        Raises
        ------
        CaptureError, PageError
            As for a step. `CaptureError` also if a profiler of PyTorch is on.
        """
        joint = self._current.trace.joint
        step_inputs = (
            inputs if inputs or named_inputs else unflatten(joint.inputs, joint.input_spec)
        )
        compiled, flat_inputs = self.select(*step_inputs, **named_inputs)
        certificate = self._certificates[compiled.runner] = certify(compiled, flat_inputs)
        return certificate

    def report(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return the metrics of the step, and write them to a file if a path is given.

        Parameters
        ----------
        path : str or Path, optional
            ``*.html``: a self-contained page, like that of ``poetmodel report``, with the step, its
            schedule and its plan; needs ``poetmodel[report]``. ``*.json``: the returned values.

        Returns
        -------
        dict
            Numbers, strings, lists and dicts that JSON can represent. ``certificate`` is that of
            the last `verify` of the current compiled step, None before the first: `report` does
            not call `verify`.

        Raises
        ------
        InputError
            If the file cannot be written, or is neither ``*.html`` nor ``*.json``.
        MissingExtraError
            If a page is requested, and a library that draws it is missing.
        """
        report = _report_values(
            self._current,
            self._certificates.get(self._current.runner),
            call=_format_compile_call(self._current, self._options),
        )
        if path is not None:
            _write_report(path, report, self._current)
        return report

    def close(self) -> None:
        """Move all state to RAM, and remove the files in `storage`.

        If the step uses these files, later calls of it raise `PageError`. So does this method if
        state cannot be read.
        """
        for compiled in self._compiled_steps:
            compiled.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a compiled step cannot be copied or pickled, because it uses its model and its page "
            "file; copy or save the model (state_dict()), and compile a step of the copy"
        )

    def _compile(self, inputs: Inputs) -> Compiled:
        """Compile the step for inputs; append it to `_compiled_steps`, not yet current."""
        first_compiled = self._compiled_steps[0] if self._compiled_steps else None
        with CAPTURE_LOCK, infrequent_gc(), show_phases() as show_phase:
            compiled = Compiled(
                self._model,
                self._loss_fn,
                inputs,
                self._options,
                first_compiled=first_compiled,
                show_phase=show_phase,
            )
        self._compiled_steps.append(compiled)
        return compiled


# -- reports -----------------------------------------------------------------------------------


def _report_values(
    compiled: Compiled, certificate: Certificate | None, *, call: str
) -> dict[str, Any]:
    """Return the values of `Step.report`; `call` is the Python code that compiles the step."""
    graph, scheduled, check = compiled.trace.graph, compiled.scheduled, compiled.check
    record = compiled.record
    return {
        "name": graph.name,
        "torch": str(torch.__version__),
        "call": call,
        "graph": {
            "nodes": len(graph.nodes),
            "tensors": len(graph.tensors),
            "scheduled_tensors": len(scheduled.graph.tensors),
            "batch_size": graph.batch_size,
            "resident_bytes": dict(graph.resident_bytes),
        },
        "costs": [*compiled.notes, f"minimized: {compiled.result.problem.minimize}"],
        "budget_bytes": record.ram_budget_bytes,
        "keep_all_bytes": record.keep_all_bytes,
        "reserved_bytes": scheduled.reserved_bytes,
        "reserves": {name: size for name, size in scheduled.reserves if size},
        "plan": {
            "mode": str(compiled.plan.mode),
            "device": record.device,
            "instructions": len(compiled.plan.program),
            "recomputed": record.recomputed,
            "peak_bytes": compiled.peak_bytes,
            "written_bytes": check.written_bytes,
            "read_bytes": check.read_bytes,
            "compute_s": check.compute_s,
            "transfer_s": check.transfer_s,
            "stall_s": check.stall_s,
            "makespan_s": check.makespan_s,
            "energy_j": check.energy_j,
        },
        "compile_s": compiled.compile_s,
        "certificate": None if certificate is None else certificate.to_dict(),
        "result": compiled.result.to_dict(),
    }


def _write_report(path: str | Path, report: dict[str, Any], compiled: Compiled) -> None:
    """Write a report as JSON or as a page, which shows the result and plan of `compiled`."""
    suffix = Path(str(path)).suffix
    if suffix not in (".html", ".json"):
        raise InputError(f"{path}: expected a file *.html for a page, or *.json for values")
    if suffix == ".json":
        write_text(path, json.dumps(report, allow_nan=False, ensure_ascii=False) + "\n")
        return
    from poetmodel.case.case import Case
    from poetmodel.case.checked_plan import CheckedPlan
    from poetmodel.case.opening import Checked
    from poetmodel.report.page import check_report, write_report

    check_report(path)
    step_metrics = {key: value for key, value in report.items() if key != "result"}
    name, result = report["name"], compiled.result
    planned = CheckedPlan(problem=result.problem, plan=compiled.plan, check=compiled.check)
    checked = Checked.of_result(result, case=Case(source=name), file=name)
    write_report(path, [checked.of_step(step_metrics, planned)])


def _format_compile_call(compiled: Compiled, options: CompileOptions) -> str:
    """Return Python code that calls `compile` with these options, without default values."""
    parameters = signature(compile).parameters
    has_named_inputs = compiled.trace.joint.output is not None
    arguments = ["model", "None", "batch"] if has_named_inputs else ["model", "loss_fn", "inputs"]
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, Device):
            value = value.key or value.name
        if field.name == "optimizer" and value is not None:
            arguments.append("optimizer=optimizer")
        elif value != parameters[field.name].default:
            arguments.append(f"{field.name}={(str(value) if isinstance(value, Path) else value)!r}")
    return f"poetmodel.torch.compile({', '.join(arguments)})"
