"""``load_state`` and ``save_state``: exchange state between an exported program and a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from poetmodel.errors import InputError, join_names
from poetmodel.export.state import load_state_tensors, read_state, state_paths, write_state
from poetmodel.torch.int8.reading import with_fronts
from poetmodel.torch.int8.training import TrainedLayer
from poetmodel.torch.state.recovery import check_class
from poetmodel.torch.step.optimizers import OptimizerMoment, group_rules
from poetmodel.torch.step.updates import BATCHES, GRADIENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from poetmodel.export.state import ExportedTensor


def load_state(
    path: str | Path,
    model: torch.nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    folder: str | Path | None = None,
) -> None:
    """Load the state that an exported program has written to a file into a model.

    Parameters
    ----------
    path : str or Path
        The exported folder, whose file ``state.bin`` is read; or such a file, written by
        ``pm_run``, or by an application that calls `pm_read_state` for each tensor.
    model : torch.nn.Module
        The exported model, or another one with the same parameters and buffers. The values of the
        file overwrite theirs. If the program sums gradients of several batches, ``.grad`` gets the
        current sums, or None if no batch was summed since the last update.
    optimizer : torch.optim.Optimizer, optional
        The optimizer whose state gets the moments of the file; by default these are ignored. A
        momentum buffer that has no value in the file is removed from the state.
    folder : str or Path, optional
        The exported folder, if the file is elsewhere.

    Raises
    ------
    InputError
        If file or folder cannot be read or do not match, the folder's program changes no state, the
        model lacks tensors of the file or has them in other shapes or without memory, the optimizer
        does not train with the moments of the file, a module quantized by PT2E cannot be converted
        to an int8 front, or `model` or `optimizer` has the wrong class. Model and optimizer are
        then unchanged.
    """
    file, export_folder = state_paths(path, folder)
    tensors = load_state_tensors(export_folder, requires_updates=True)
    arrays = read_state(file, tensors)
    values = {tensor.name: torch.tensor(arrays[tensor.name]) for tensor in tensors}
    model_tensors = list(_matching_tensors(model, tensors))
    gradient_sums = dict(_gradient_sums(model, tensors))
    moment_names = (
        {tensor.name for tensor in tensors}
        - {name for name, _ in model_tensors}
        - gradient_sums.keys()
    )
    moment_targets = list(_moment_targets(model, moment_names, optimizer))
    with torch.no_grad():
        for name, target in model_tensors:
            target.copy_(values[name])
        for name, parameter, key in moment_targets:
            # NaN marks a momentum buffer whose first value will be the gradient.
            has_value = key != "momentum_buffer" or not bool(values[name].isnan().all())
            if optimizer is not None and has_value:
                moment = values[name].to(parameter.dtype if values[name].ndim else torch.float32)
                optimizer.state[parameter][key] = moment
            elif optimizer is not None:
                optimizer.state[parameter].pop(key, None)
    for name, parameter in gradient_sums.items():
        if parameter is not None:
            parameter.grad = values[name].to(parameter.dtype) if arrays[BATCHES] else None


def save_state(
    model: torch.nn.Module,
    path: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    folder: str | Path | None = None,
) -> None:
    """Write the state of a model as a file that an exported program can start from.

    ``pm_run`` starts from it with the argument ``state=FILE``; an application passes each tensor to
    `pm_write_state`. Sums of gradients, and their number of batches, are written as 0: a program
    that sums gradients of several batches starts with the first batch.

    Parameters
    ----------
    model : torch.nn.Module
        The exported model.
    path : str or Path
        The exported folder, where ``state.bin`` is written; or the file to write.
    optimizer : torch.optim.Optimizer, optional
        The optimizer with the moments to write; before its first step, their initial values.
        Required if the folder has moments.
    folder : str or Path, optional
        The exported folder, if the file is to be elsewhere; by default the folder of the file.

    Raises
    ------
    InputError
        If the folder has tensors that the model and the optimizer lack or have in other shapes or
        without memory, if its program changes no state, if the folder cannot be read or the file
        not be written, if a module quantized by PT2E cannot be converted to an int8 front, or if
        `model` or `optimizer` has the wrong class.
    """
    file, export_folder = state_paths(path, folder)
    tensors = load_state_tensors(export_folder, requires_updates=True)
    arrays = {
        name: source.detach().cpu().numpy() for name, source in _matching_tensors(model, tensors)
    }
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    arrays |= {name: np.zeros(shapes[name]) for name, _ in _gradient_sums(model, tensors)}
    moment_names = {tensor.name for tensor in tensors} - arrays.keys()
    if moment_names and optimizer is None:
        raise InputError(
            f"optimizer: the folder has {min(moment_names)!r}, which the model lacks; pass the "
            "optimizer"
        )
    for name, parameter, key in _moment_targets(model, moment_names, optimizer):
        if optimizer is not None:
            optimizer_moment = OptimizerMoment(optimizer, parameter, key)
            moment = optimizer_moment.value().detach().cpu().numpy().reshape(shapes[name])
            arrays[name] = (
                np.full_like(moment, np.nan) if optimizer_moment.starts_with_gradient else moment
            )
    write_state(file, tensors, arrays)


def _matching_tensors(
    model: torch.nn.Module, tensors: Sequence[ExportedTensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the parameters and buffers of a model that an exported folder has.

    They are in the order of `tensors`, the state tensors of the folder.
    """
    check_class("model", model, torch.nn.Module)
    model = with_fronts(model)
    model_tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    model_tensors |= dict(model.named_buffers(remove_duplicate=False))
    for tensor in tensors:
        model_tensor = model_tensors.get(tensor.name)
        if model_tensor is None:
            continue
        if tuple(model_tensor.shape) != tensor.shape:
            raise InputError(
                f"{tensor.name}: expected shape {list(tensor.shape)}, as in the folder, got "
                f"{list(model_tensor.shape)} of the model"
            )
        if model_tensor.is_meta:
            raise InputError(f"{tensor.name}: has no memory in the model (device meta)")
        yield tensor.name, model_tensor


def _gradient_sums(
    model: torch.nn.Module, tensors: Sequence[ExportedTensor]
) -> Iterator[tuple[str, torch.nn.Parameter | None]]:
    """Yield (name, parameter whose ``.grad`` is the sum) of gradient sums in an exported folder.

    The last pair is `BATCHES`, the number of summed batches, and None.
    """
    if any(tensor.name == BATCHES for tensor in tensors):
        parameters = dict(model.named_parameters(remove_duplicate=False))
        parameters |= {  # int8 weights are buffers, which have no gradients
            f"{path}.weight" if path else "weight": layer.weight_gradient
            for path, layer in model.named_modules()
            if isinstance(layer, TrainedLayer)
        }
        for tensor in tensors:
            owner_name, _, key = tensor.name.rpartition(".")
            if key == GRADIENT and owner_name in parameters:
                yield tensor.name, parameters[owner_name]
        yield BATCHES, None


def _moment_targets(
    model: torch.nn.Module, names: set[str], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, torch.nn.Parameter, str]]:
    """Yield (name, parameter, key in the optimizer's state) of each moment in `names`, sorted."""
    parameters_by_name = dict(model.named_parameters(remove_duplicate=False))
    if optimizer is not None:
        check_class("optimizer", optimizer, torch.optim.Optimizer)
    groups = () if optimizer is None else optimizer.param_groups
    trained_ids = {id(p) for group in groups for p in group["params"]}
    rules = () if optimizer is None else group_rules(optimizer)
    keys_of_parameter = {id(p): rule.moment_keys for rule, parameters in rules for p in parameters}
    for name in sorted(names):
        owner_name, _, key = name.rpartition(".")
        if owner_name not in parameters_by_name:
            raise InputError(
                f"model: expected a tensor {name!r}, which the folder has; the model has none"
            )
        if optimizer is not None and id(parameters_by_name[owner_name]) not in trained_ids:
            raise InputError(
                f"optimizer: expected it to train {owner_name!r}, because the folder has its {key}"
            )
        expected_keys = keys_of_parameter.get(id(parameters_by_name[owner_name]))
        if expected_keys is not None and key not in expected_keys:
            raise InputError(
                f"optimizer: the folder has {key} of {owner_name!r}, and "
                f"{type(optimizer).__name__} "
                f"has {join_names(expected_keys) or 'none'}; use an optimizer like the exported one"
            )
        yield name, parameters_by_name[owner_name], key
