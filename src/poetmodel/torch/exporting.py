"""``export``: a module, its loss and a budget become a folder of C."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from poetmodel.export.checks import check_weight_bytes
from poetmodel.export.exporting import ExportKeywords, check_export, export_step
from poetmodel.torch.lowering.inference import with_evaluation, with_inference
from poetmodel.torch.lowering.step import lower
from poetmodel.torch.target import trained_weight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from poetmodel.export.deployment import Deployment


def export(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Sequence[Any],
    *,
    folder: str | Path,
    name: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    infer: bool = False,
    evaluate: bool = False,
    **options: Unpack[ExportKeywords],
) -> Deployment:
    """Write a training step as a folder of C that builds for the host and for a Cortex-M.

    Parameters
    ----------
    model, loss_fn, inputs
        As for `compile`; the shapes of the inputs are those of every batch. Those of type
        ``torch.uint8`` or ``torch.int8`` stay bytes: what the model makes of each is looked up.
    folder : str or Path
        Where to write; made if it is not there.
    name : str, optional
        Name of the step; by default the class of `model`.
    optimizer : torch.optim.Optimizer, optional
        Update parameters as it would: one that `trace` takes, all its groups and their settings
        included. Without it the step hands out gradients.
    clip_grad_norm : float, optional
        Clip the norm of all gradients together. Needs an `optimizer`.
    accumulate : int
        Over how many batches gradients are summed before an update, as by ``(loss / n).backward()``
        for each: ``pm_step`` takes one of them, and each n-th call updates. The sums are state.
    infer : bool
        Export ``pm_infer`` too: the forward pass of `model` in evaluation mode, with the state as
        it is after any number of steps. It writes what the model returns.
    evaluate : bool
        Export ``pm_evaluate`` too: loss and number of correct classes of a batch in evaluation
        mode. With ``commit`` also ``pm_keep_best`` and ``pm_restore_best``.
    **options
        As for `poetmodel.export.exporting.export_step`: ``ram``, ``device``, ``profile``,
        ``stack``, ``tile``, ``paging``, ``recompute``, ``minimize``, ``deadline``, ``time_limit``,
        ``gap``, ``commit``, ``commit_every``, ``checksum``, ``replay``, ``migrate_from``,
        ``byte_inputs``, ``prefix``, ``weights``, ``shared_kernels``.

    Returns
    -------
    Deployment
        What was written, with the result of the solve.

    Raises
    ------
    InputError
        If an option has no such value, or `accumulate` no optimizer.
    CaptureError
        If the step cannot be captured, or an operator has no kernel: names each, and its module.
    BudgetError
        If the RAM leaves no room for any schedule.
    NoScheduleError
        If no schedule keeps the limits, or none was found in time.
    """
    board = check_export(Path(folder), **options)
    check_weight_bytes(trained_weight_bytes(model), board)
    step = lower(
        model,
        loss_fn,
        inputs,
        name=name,
        optimizer=optimizer,
        clip_grad_norm=clip_grad_norm,
        accumulate=accumulate,
    )
    if infer:
        step = with_inference(step, model, loss_fn, inputs)
    if evaluate:
        step = with_evaluation(step, model, loss_fn, inputs)
    several = accumulate if accumulate > 1 else None
    named = {"name": name, "clip_grad_norm": clip_grad_norm, "accumulate": several}
    shown: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    shown |= {**options, **({"infer": True} if infer else {})}
    shown |= {"evaluate": True} if evaluate else {}
    options.setdefault("command", _command(optimizer, shown, folder))
    return export_step(step, Path(folder), infer=infer, evaluate=evaluate, **options)


def _command(
    optimizer: torch.optim.Optimizer | None, options: dict[str, Any], folder: str | Path
) -> str:
    """Return Python that exports again, where model, loss, inputs and optimizer are there."""
    given = "" if optimizer is None else ", optimizer=optimizer"
    given += "".join(f", {key}={' '.join(repr(x).split())}" for key, x in options.items())
    call = f"pmt.export(model, loss_fn, inputs, folder={str(folder)!r}{given})"
    return f"import poetmodel.torch as pmt\n\n{call}"
