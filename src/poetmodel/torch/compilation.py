"""`compile`: a module, its loss and a budget become a training step that keeps the budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self
from weakref import WeakKeyDictionary

import torch

from poetmodel.clock import infrequent_gc
from poetmodel.device import Device
from poetmodel.errors import InputError, listed, shown
from poetmodel.files import write_text
from poetmodel.torch.capturing.inputs import input_errors, refuse, unflatten
from poetmodel.torch.capturing.surroundings import CAPTURE_LOCK
from poetmodel.torch.compiled import Compiled, CompileOptions, stages_shown
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.runtime.certificate import certify
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from poetmodel.plan import Plan
    from poetmodel.result import SolveResult
    from poetmodel.torch.capturing.inputs import Inputs
    from poetmodel.torch.runtime.certificate import Certificate
    from poetmodel.torch.runtime.runner import Runner


def compile(  # noqa: PLR0913 - one way in, and all but three of its parameters have defaults
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
    time_limit: float = 60.0,
    gap: float = 0.01,
    rollback: bool = True,
    dynamic: str = "error",
    accumulate: int = 1,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    clip_grad_norm: float | None = None,
    cache: str | Path | bool = True,
) -> Step:
    """Compile a training step that keeps a RAM budget and computes what PyTorch would.

    Parameters
    ----------
    model : torch.nn.Module
        The network, on the processor, in the mode (train or eval) that it is to run in.
    loss_fn : callable, optional
        The loss is ``loss_fn(model(*inputs[:-1]), inputs[-1])``; without it, it is
        ``model(*inputs)``, or the ``loss`` that this has, or the first of several. A mapping alone
        in a tuple, whose keys are parameters of ``forward``, is given by name: ``model(**batch)``.
    inputs : sequence or mapping
        Example inputs, the target last: tensors, or nests of tuples, lists and mappings of them,
        which the model gets as dicts. A mapping has the inputs by name: the model gets them as
        ``model(**batch)``, and a step returns what this returns, detached. Then there is no
        `loss_fn`.
    ram : str or int
        The budget for tensors and workspaces, without parameters and gradients unless there is an
        `optimizer`: bytes, a size such as ``20MiB``, or a percentage of the peak when everything is
        kept. With inputs of several forms (`dynamic`) a percentage below 100 is of the first one's
        peak, the same bytes for all.
    storage : str or Path, optional
        Folder for the page file and the state file; made if it is not there.
    paging : bool, optional
        Whether tensors may be paged. Default: where `storage` is given.
    recompute : bool
        Whether tensors may be recomputed.
    device : str or Device, optional
        Estimate costs for this device in place of measuring them here.
    minimize : {'energy', 'time', 'ram', 'writes'}, optional
        What the schedule is best in. Default: time where costs are those of this host, energy where
        they are those of a device.
    deadline : str or float, optional
        Time limit of a step: seconds, ``20ms``, or ``150%`` of one computation of every operation.
    time_limit : float
        Most time for the solver [s].
    gap : float
        Gap of the overhead at which the solver stops.
    rollback : bool
        Whether a step that fails in the middle leaves existing gradients alone. While gradients
        accumulate over several steps that page, this holds a second set of gradients. With an
        `optimizer` and `storage`, whether it leaves the state of before, in RAM and for `recover`:
        each step then also writes the state that it updates in RAM.
    dynamic : {'error', 'retrace'}
        What to do with inputs of other shapes or types, and with another value of a Python
        number, flag, string, container or name that the model or the loss reads: refuse the call,
        or compile again.
    accumulate : int
        Number of steps over which gradients accumulate: they are those of the loss divided by it.
        The loss that a step returns is not divided, as if it were 1.
    optimizer : torch.optim.Optimizer or sequence of them, optional
        Make its step a part of the step: each parameter is updated as soon as its gradient is
        there, which then goes. One that `trace` takes, or several. The budget counts parameters,
        buffers, inputs and the state of the optimizer too. Where they do not all have room and
        tensors may be paged, the solver decides which of them lie in `storage`, and steps read and
        write them.
    clip_grad_norm : float, optional
        Clip the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_`` does with
        ``model.parameters()``. Needs an `optimizer`.
    cache : str, Path or bool
        Folder for what compiling finds out, which the next compile of the step begins with. By
        default that of the variable ``POETMODEL_CACHE`` (empty for none), else
        ``~/.cache/poetmodel``; False for none.

    Returns
    -------
    Step
        Call it in place of forward pass, loss and ``backward()``, as ``step(x, y)``, or by name as
        ``step(**batch)``; with an `optimizer` in place of its ``zero_grad()`` and ``step()`` too.

    Raises
    ------
    CaptureError
        If the step cannot be captured.
    BudgetError
        If a limit is not usable.
    NoScheduleError
        If no schedule keeps the limits, or none was found in time.
    InputError
        If the page file cannot be made, or costs cannot be measured.
    """
    given = locals().copy()
    options = CompileOptions(**{field.name: given[field.name] for field in fields(CompileOptions)})
    return Step(model, loss_fn, inputs, options)


class Step:
    """A compiled training step: ``loss = step(x, y)``, then ``optimizer.step()``.

    Use it in a ``with`` block, or call `close`, to remove its page file at a time of your own; it
    goes with the object otherwise.
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
        self._compiled: list[Compiled] = []
        self._certificates: WeakKeyDictionary[Runner, Certificate] = WeakKeyDictionary()
        """Last verification of each running plan."""
        self._current = self._compile(inputs)

    def __repr__(self) -> str:
        current, result = self._current, self._current.result
        pays, whole = "", result.problem.objective.baseline
        if result.overhead is not None and whole > 0:
            pays = f"{result.overhead / whole:.2%} more {result.problem.minimize}"
        peak = f"{format_bytes(current.peak_bytes)} of {format_bytes(current.budget_bytes)} planned"
        call = "step(*inputs)" if current.trace.joint.output is None else "step(**batch)"
        return brief(self, shown(current.trace.joint.name), peak, pays, f"loss = {call}")

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run one step: fill ``.grad`` (accumulating), update buffers, return the loss.

        Where it was compiled with an optimizer, update the parameters and leave ``.grad`` None.

        Parameters
        ----------
        *inputs
            As those that the step was compiled with: same nesting, shapes and types.
        **named
            Inputs of a step that was compiled with a mapping; it takes the mapping itself too.

        Returns
        -------
        Tensor or object
            The loss, detached. Of a step that gets its inputs by name: what the model returns, with
            tensors that are detached, and without caches, which are None.

        Raises
        ------
        CaptureError
            If the inputs, the parameters, the modules or Python values that they read are not as
            they were compiled for.
        PageError
            If a page cannot be written, read or trusted; nothing has changed then. Compiled with an
            optimizer that holds with `storage` and `rollback`; else parameters may be updated.
        """
        compiled, flat = self.select(*inputs, **named)
        return compiled.runner(flat)

    def select(self, *inputs: Any, **named: Any) -> tuple[Compiled, tuple[Any, ...]]:
        """Return the step compiled for such inputs, and the inputs flat; compile if need be."""
        name = self._current.trace.joint.name
        given = self._given(inputs, named)
        for compiled in (self._current, *self._compiled):
            try:
                flat = compiled.trace.joint.flat_inputs(given)
            except CaptureError:
                continue
            if compiled.guards.hold(flat):
                self._current = compiled
                return compiled, flat
        if self._options.dynamic == "error":
            flat = self._current.trace.joint.flat_inputs(given)
            refuse(name, input_errors(given))
            reason = "; ".join(self._current.guards.differences(flat))
            raise CaptureError(f"{name}: {reason}; compile again, or with dynamic='retrace'")
        self._current = self._compile(given)
        return self._current, self._current.trace.joint.flat_inputs(given)

    def _given(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Inputs:
        """Return the inputs of a call in the way in which the step was compiled."""
        joint = self._current.trace.joint
        if joint.output is None and not named:
            return inputs
        if joint.output is not None and not (inputs and named):
            batch = named if not inputs else inputs[0]
            if len(inputs) <= 1 and isinstance(batch, Mapping):
                return batch
        expected = "inputs by name, as the step was compiled with: step(**batch)"
        if joint.output is None:
            expected = "inputs without names, in their order, as in step(x, y) or step(batch)"
        got = listed(named) or f"{len(inputs)} without names"
        raise CaptureError(f"{joint.name}: expected {expected}; got {got}")

    @property
    def compiled(self) -> Compiled:
        """Program that ran last, or is to run first."""
        return self._current

    @property
    def result(self) -> SolveResult:
        """Result of the solver: the schedule that runs.

        Its RAM and its budget leave out what is reserved; `budget_bytes` is that of the step.
        """
        return self._current.result

    @property
    def plan(self) -> Plan:
        """Program that runs."""
        return self._current.plan

    @property
    def budget_bytes(self) -> int:
        """The budget for tensors and workspaces [B]."""
        return self._current.budget_bytes

    @property
    def source(self) -> str:
        """The program, as Python."""
        return self._current.runner.program.source

    def verify(self, *inputs: Any, **named: Any) -> Certificate:
        """Run eager PyTorch and this step from the same state, and compare.

        Parameters
        ----------
        *inputs
            Inputs of a step; by default those that it was compiled with.
        **named
            As for a step.

        Returns
        -------
        Certificate
            Its ``summary()`` says what was found. Parameters, gradients, buffers, inputs and the
            state of the random generator are as before.

        Raises
        ------
        CaptureError, PageError
            As a step does.
        """
        joint = self._current.trace.joint
        given = inputs if inputs or named else unflatten(joint.inputs, joint.input_spec)
        compiled, flat = self.select(*given, **named)
        certificate = self._certificates[compiled.runner] = certify(compiled, flat)
        return certificate

    def report(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return the facts on the step, and write them to a file if one is given.

        Parameters
        ----------
        path : str or Path, optional
            ``*.html``: one page that needs no network, as ``poetmodel report`` makes it, on the
            step, its schedule and its plan; needs ``poetmodel[report]``. ``*.json``: the figures.

        Returns
        -------
        dict
            Numbers, texts, lists and dicts, all of which JSON has. ``certificate`` is None before
            the first `verify`.

        Raises
        ------
        InputError
            If the file cannot be written.
        MissingExtraError
            If a page is requested, and a library that draws it is not installed.
        """
        report = _report(
            self._current,
            self._certificates.get(self._current.runner),
            call=_as_call(self._current, self._options),
        )
        if path is not None:
            _write(path, report, self._current)
        return report

    def close(self) -> None:
        """Remove the page files. The step cannot be run any more if it pages."""
        for compiled in self._compiled:
            compiled.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a compiled step cannot be copied or pickled: it belongs to its model and its page "
            "file; copy or save the model (state_dict()), and compile a step of the copy"
        )

    def _compile(self, inputs: Inputs) -> Compiled:
        first = self._compiled[0] if self._compiled else None
        with CAPTURE_LOCK, infrequent_gc(), stages_shown() as tell:
            compiled = Compiled(
                self._model, self._loss_fn, inputs, self._options, first=first, tell=tell
            )
        self._compiled.append(compiled)
        return compiled


# -- reports -----------------------------------------------------------------------------------


def _report(compiled: Compiled, certificate: Certificate | None, *, call: str) -> dict[str, Any]:
    """Return the facts on a compiled step, and the call that makes it, as plain values."""
    graph, scheduled, check = compiled.trace.graph, compiled.scheduled, compiled.check
    program = compiled.plan.program
    return {
        "name": graph.name,
        "torch": str(torch.__version__),
        "call": call,
        "graph": {
            "nodes": len(graph.nodes),
            "tensors": len(graph.tensors),
            "scheduled_tensors": len(scheduled.graph.tensors),
            "threshold_bytes": scheduled.threshold_bytes,
            "batch_size": graph.batch_size,
            "resident_bytes": dict(graph.resident_bytes),
        },
        "costs": [*compiled.notes, f"minimized: {compiled.result.problem.minimize}"],
        "budget_bytes": compiled.budget_bytes,
        "keep_all_bytes": compiled.keep_all_bytes,
        "reserved_bytes": scheduled.reserved_bytes,
        "reserves": {what.strip(","): size for what, size in scheduled.reserves if size},
        "plan": {
            "mode": str(compiled.plan.mode),
            "device": compiled.device,
            "instructions": len(program),
            "recomputed": sum(op == "compute" for op, _ in program) - len(scheduled.graph.nodes),
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


def _write(path: str | Path, report: dict[str, Any], compiled: Compiled) -> None:
    """Write a report, as a page or as JSON by the name of the file."""
    kind = Path(str(path)).suffix
    if kind not in (".html", ".json"):
        raise InputError(f"{path}: expected a file *.html, the page, or *.json, its figures")
    if kind == ".json":
        write_text(path, json.dumps(report, allow_nan=False, ensure_ascii=False) + "\n")
        return
    from poetmodel.report.page import check_report, write_report
    from poetmodel.report.subject import solved_subject

    check_report(path)
    step = {key: value for key, value in report.items() if key != "result"}
    name, plan, check = report["name"], compiled.plan, compiled.check
    subject = solved_subject(compiled.result, name=name, plan=plan, check=check, step=step)
    write_report(path, [subject])


def _as_call(compiled: Compiled, options: CompileOptions) -> str:
    """Return a call of `compile` with these options, those by default left out."""
    parameters = signature(compile).parameters
    by_name = compiled.trace.joint.output is not None
    words = ["model", "None", "batch"] if by_name else ["model", "loss_fn", "inputs"]
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, Device):
            value = value.key or value.name
        if field.name == "optimizer" and value is not None:
            words.append("optimizer=optimizer")
        elif value != parameters[field.name].default:
            words.append(f"{field.name}={(str(value) if isinstance(value, Path) else value)!r}")
    return f"poetmodel.torch.compile({', '.join(words)})"
