"""``export``: write a module and its loss as a folder of C code within a RAM budget."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from poetmodel.export.checks import check_weight_bytes
from poetmodel.export.exporting import export_with
from poetmodel.export.options import ExportOptions
from poetmodel.torch.lowering.inference import with_evaluation, with_inference
from poetmodel.torch.lowering.step import lower
from poetmodel.torch.target import trained_weight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from poetmodel.export.deployment import Deployment
    from poetmodel.export.options import ExportKeywords


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
        As for `compile`; every batch has the shapes of the inputs. Inputs of type ``torch.uint8``
        or ``torch.int8`` stay bytes: the operators that the model applies to each byte become a
        lookup table.
    folder : str or Path
        Folder to write; created if missing. C files, headers and weight files that only an earlier
        export wrote there are deleted.
    name : str, optional
        Name of the step; by default the name of the class of `model`.
    optimizer : torch.optim.Optimizer, optional
        Include the updates of this optimizer, with all its parameter groups and settings. It must
        be one that `trace` supports. Without an optimizer, the step returns gradients.
    clip_grad_norm : float, optional
        Clip the total norm of all gradients. Needs an `optimizer`.
    accumulate : int
        Number of batches whose gradients are summed before an update, as by ``(loss /
        n).backward()`` for each: ``pm_step`` computes one batch, and each n-th call updates the
        parameters. The sums are state.
    infer : bool
        Also export ``pm_infer``: the forward pass of `model` in evaluation mode with the current
        state, after any number of steps. It writes the output of the model; without a `loss_fn`,
        the loss.
    evaluate : bool
        Also export ``pm_evaluate``: loss of a batch in evaluation mode and, if the targets are
        class labels, number of correct labels. With ``commit`` also ``pm_keep_best`` and
        ``pm_restore_best``.
    **options
        As for `poetmodel.export.options.ExportOptions.parse`: ``ram``, ``device``, ``profile``,
        ``stack``, ``tile``, ``paging``, ``recompute``, ``minimize``, ``deadline``,
        ``deadline_counts``, ``aux_bytes``, ``time_limit``, ``replay_cut``,
        ``gap``, ``commit``, ``commit_every``, ``checksum``, ``replay``, ``migrate_from``,
        ``byte_inputs``, ``prefix``, ``weights``, ``shared_kernels``, ``command``, ``on_progress``.
        The default ``command`` is Python code that repeats this export.

    Returns
    -------
    Deployment
        The exported step, with the result of the solve.

    Raises
    ------
    InputError
        If an option has an invalid value, `accumulate` is above 1 without an optimizer, or
        parameters, buffers, constants or optimizer state are not finite.
    CaptureError
        If the step, or its forward pass in evaluation mode, cannot be captured, `clip_grad_norm` is
        given without an optimizer, or operators have no kernel; the message names the first of
        these operators, and its module.
    BudgetError
        If the RAM or storage limit permits no schedule.
    FlashError
        If program and storage do not fit the flash of the device.
    NoScheduleError
        If no schedule meets the limits, or none was found in time.
    """
    parsed = ExportOptions.parse(folder, infer=infer, evaluate=evaluate, **options)
    parsed.check_ram()
    check_weight_bytes(trained_weight_bytes(model), parsed.device)
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
    explicit_accumulate = accumulate if accumulate > 1 else None
    explicit_values = {
        "name": name,
        "clip_grad_norm": clip_grad_norm,
        "accumulate": explicit_accumulate,
    }
    explicit_options: dict[str, Any] = {
        key: value for key, value in explicit_values.items() if value is not None
    }
    explicit_options |= {**options, **({"infer": True} if infer else {})}
    explicit_options |= {"evaluate": True} if evaluate else {}
    if "command" not in options:
        command = _export_command(optimizer, explicit_options, folder)
        parsed = replace(parsed, command=command)
    return export_with(step, parsed)


def _export_command(
    optimizer: torch.optim.Optimizer | None, options: dict[str, Any], folder: str | Path
) -> str:
    """Return Python code that repeats the export, if the ``repr`` of each argument is code."""
    arguments = "" if optimizer is None else ", optimizer=optimizer"
    arguments += "".join(
        f", {key}={repr(value) if isinstance(value, str) else ' '.join(repr(value).split())}"
        for key, value in options.items()
    )
    call = f"pmt.export(model, loss_fn, inputs, folder={str(folder)!r}{arguments})"
    return f"import poetmodel.torch as pmt\n\n{call}"
