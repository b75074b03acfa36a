"""Compilation of models of other libraries: the smallest budgets, and whether bits are equal.

By default all `pytorch.models.TRIALS` are tried. A trial whose library is missing is recorded as
failed.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final

from harness import RecordedRun, Study, make_record
from poetmodel.sweeps.measurement import FAILED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.sweeps.measurement import Record

KIND: Final = "coverage"
"""Kind of the records."""
WORKS, DIFFERS, REFUSED = "works", "differs", "refused"
"""Results: all bits equal those of eager; some differ; the model is refused with a message."""
AS_CAPTURED: Final = "as captured"
"""Result: bits equal those of ``aot_eager``, because PyTorch's capture differs from eager mode."""
SHARES: Final = (0.6, 0.8)
"""Budgets as fractions of the keep-all peak, tried in order until a schedule fits."""
LIMIT_S: Final = 5.0
"""Time limit of the solver [s]."""
SEED: Final = 0
"""Seed of weights and inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRun(RecordedRun):
    """A trial of one model."""

    model: str
    limit_s: float = LIMIT_S

    @property
    def name(self) -> str:
        """Name of the run in records."""
        return self.model


def try_model(run: ModelRun, *, folder: str) -> dict[str, Any]:
    """Compile a model at its keep-all peak and below; compare two batches with eager.

    Tries `poetmodel.torch.compile` and the back end of ``torch.compile``. Pages are stored in
    `folder`. Sets the number of PyTorch's threads to 1.

    Returns
    -------
    dict
        Fields of the record; status `FAILED` if the model cannot be created, `REFUSED` if it cannot
        be captured. ``line`` has those after the line that a refusal states, if there is one.
    """
    import torch

    from pytorch.models import LINES, TRIALS

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    begin_s = time.perf_counter()
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "library_version": _library_version(run.model),
    }
    try:
        trial = TRIALS[run.model]()
    except (ImportError, OSError, RuntimeError) as error:
        return {**facts, "seconds": 0.0, "status": FAILED, "reason": _shorten_paths(error)}
    facts |= _try_compile(trial, run.limit_s, folder)
    facts["back_end"] = _execute_in_torch_compile(trial, run.limit_s)
    if facts["status"] == REFUSED and run.model in LINES:
        text, execute_line = LINES[run.model]
        execute_line(trial)
        facts["line"] = {"text": text, **_try_compile(trial, run.limit_s, folder)}
    return {**facts, "seconds": time.perf_counter() - begin_s}


def _try_compile(trial: Any, limit_s: float, folder: str) -> dict[str, Any]:
    """Compile and verify in all budgets; return record fields, with a reason if refused."""
    from poetmodel.torch import CaptureError

    try:
        facts = _compile_and_verify(trial, limit_s)
        return {**facts, "budget": _compile_in_less_ram(trial, limit_s, folder)}
    except CaptureError as error:
        return {"status": REFUSED, "reason": _shorten_paths(error)}


def _compile_and_verify(trial: Any, limit_s: float) -> dict[str, Any]:
    """Compile within the keep-all budget and verify on both batches; return record fields."""
    import poetmodel.torch as pmt

    step = _compile_step(trial, limit_s, ram="100%")
    joint = step.compiled.trace.joint
    certificate = step.verify()
    try:
        is_other_equal, other_reason = step.verify(*trial.other).equal, ""
    except pmt.CaptureError as error:
        is_other_equal, other_reason = False, _shorten_paths(error)
    status, other_status = WORKS, other_reason or WORKS
    if not certificate.equal or not (is_other_equal or other_reason):
        batches = (trial.inputs,) if other_reason else (trial.inputs, trial.other)
        own_values = [_execute_compiled(trial.model, step, batch) for batch in batches]
        results = [
            _compare_bits(trial, batch, values)
            for batch, values in zip(batches, own_values, strict=True)
        ]
        status, other_status = [*results, other_status][:2]
    return {
        "status": status,
        "reason": "" if certificate.equal else certificate.summary().splitlines()[0],
        "nodes": len(joint.graph_module.graph.nodes),
        "results": certificate.compared,
        "trace_s": step.compiled.trace_s,
        "peak_bytes": step.compiled.keep_all_bytes,
        "read": [
            {"what": read.description, "place": _shorten_paths(read.line)}
            for read in joint.value_guards.reads
        ],
        "other": other_status,
    }


def _execute_compiled(model: Any, step: Any, batch: Any) -> list[Any]:
    """Execute a compiled step; return what `_execute_step` returns. Restores the model's state."""
    import torch

    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(SEED)
    loss = step(*batch)
    values = [loss, *(p.grad for p in model.parameters()), *map(torch.clone, model.buffers())]
    model.load_state_dict(state)
    model.zero_grad()
    return values


def _compile_in_less_ram(trial: Any, limit_s: float, folder: str) -> dict[str, Any] | None:
    """Compile and verify for the smallest budget of `SHARES` with a schedule; None without one."""
    from poetmodel.errors import BudgetError, NoScheduleError

    for fraction in SHARES:
        options: dict[str, Any] = {"ram": f"{fraction:.0%}", "storage": folder}
        try:
            step = _compile_step(trial, limit_s, **options)
        except (NoScheduleError, BudgetError):
            continue
        with step:
            certificate = step.verify()
        facts = {"equal": certificate.equal, "within": certificate.within_budget}
        return {"share": fraction, **facts, "written_bytes": certificate.written_bytes}
    return None


def _compile_step(trial: Any, limit_s: float, **options: Any) -> Any:
    import poetmodel.torch as pmt

    all_options = {"device": "rpi4b", "time_limit": limit_s, **options}
    return pmt.compile(trial.model, trial.loss_fn, trial.inputs, **all_options)


def _execute_in_torch_compile(trial: Any, limit_s: float) -> dict[str, Any]:
    """Execute both batches with the ``torch.compile`` back end in the smallest feasible budget.

    Resets the compilers of PyTorch.
    """
    import logging

    import torch
    from torch._dynamo import config as dynamo
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

    import poetmodel.torch as pmt
    from poetmodel.errors import BudgetError

    log_functions = {
        getattr(logging.Logger, name, None) for name in ("warning_once", "warning", "info")
    }
    for fraction in (*SHARES, 1.0):
        torch.compiler.reset()
        backend = pmt.backend(f"{fraction:.0%}", device="rpi4b", time_limit=limit_s)
        try:
            with dynamo.patch(ignore_logging_functions=log_functions - {None}):
                results = {
                    _compare_bits(trial, batch, _execute_step(trial, batch, backend))
                    for batch in (trial.inputs, trial.other)
                }
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, BudgetError) and fraction < 1:
                continue
            return {"status": REFUSED, "reason": _shorten_paths(error.inner_exception)}
        except (TorchDynamoException, RuntimeError) as error:
            return {"status": REFUSED, "reason": shorten(_shorten_paths(error), 200)}
        plan = backend.plans[0]
        return {
            "status": next(bits for bits in (DIFFERS, AS_CAPTURED, WORKS) if bits in results),
            "share": fraction,
            "within": plan.predicted_peak_bytes <= plan.ram_budget_bytes,
            "recomputed": plan.recomputed,
        }
    raise AssertionError("the last of these budgets is that of keep-all")


def _compare_bits(trial: Any, batch: Any, own_values: list[Any]) -> str:
    """Compare results of `_execute_step` with those of eager, then of ``aot_eager``.

    May reset the compilers of PyTorch, and with them compiled steps. Returns `WORKS`,
    `AS_CAPTURED` or `DIFFERS`.
    """
    import torch

    def is_equal(values: list[Any]) -> bool:
        pairs = zip(own_values, values, strict=True)
        return all(
            own_value is value
            if own_value is None or value is None
            else torch.equal(own_value, value)
            for own_value, value in pairs
        )

    if is_equal(_execute_step(trial, batch)):
        return WORKS
    torch.compiler.reset()
    return AS_CAPTURED if is_equal(_execute_step(trial, batch, "aot_eager")) else DIFFERS


def _execute_step(trial: Any, batch: Any, backend: Any = None) -> list[Any]:
    """Execute a step of a copy of the model, compiled by a back end; return loss and the rest."""
    import torch

    from poetmodel.torch.capturing.inputs import takes_keywords

    model = copy.deepcopy(trial.model)

    def step() -> Any:
        if trial.loss_fn is not None:
            return trial.loss_fn(model(*batch[:-1]), batch[-1])
        output = model(**batch[0]) if takes_keywords(model, batch) else model(*batch)
        output = getattr(output, "loss", output)
        return output[0] if isinstance(output, tuple | list) else output

    torch.manual_seed(SEED)
    if backend is not None:
        step = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    loss = step()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


def _shorten_paths(text: object) -> str:
    """Format a message on one line, without the folders of ``sys.path``."""
    shown = " ".join(str(text).split())
    for folder in sys.path:
        shown = shown.replace(f"{folder}/", "") if folder else shown
    return shown


def _library_version(model: str) -> str:
    """Return the name and, if it is installed, the version of a model's library."""
    library = model.split(maxsplit=1)[0].lower()
    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return library


def measure(fields: dict[str, Any], _start: None = None) -> Record:
    """Try a model; return its record. Warnings are off from then on."""
    warnings.simplefilter("ignore")  # libraries warn about their own code
    run = ModelRun(**fields)
    return make_record(KIND, run.name, cell=fields, **try_model(run, folder=tempfile.gettempdir()))


def runs(models: tuple[str, ...] = ()) -> Iterator[ModelRun]:
    """Yield the named models; by default all."""
    from pytorch.models import TRIALS

    for model in models or TRIALS:
        yield ModelRun(model=model)


def smoke_runs() -> Iterator[ModelRun]:
    """Yield one model if transformers is installed."""
    if find_spec("transformers"):
        yield ModelRun(model="transformers BERT")


STUDY: Final = Study(
    name="coverage",
    kind=KIND,
    runs=runs,
    smoke_runs=smoke_runs,
    measure=measure,
    preloaded=(
        *("torch", "poetmodel.torch.compilation", "pyomo.environ", "highspy", "pytorch.models"),
        "transformers.models.bert.modeling_bert",
    ),
    grace_s=300.0,
)
