"""``load_state`` and ``save_state``: what an exported program trained, in a model, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from poetmodel.errors import InputError, listed
from poetmodel.export.state import read_state, state_paths, state_tensors, write_state
from poetmodel.torch.int8.reading import with_fronts
from poetmodel.torch.int8.training import TrainedLayer
from poetmodel.torch.state.recovery import check_kind
from poetmodel.torch.step.optimizers import OptimizerSlot, group_rules
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
    """Give a model the state that an exported program has written.

    Parameters
    ----------
    path : str or Path
        The exported folder, whose file ``state.bin`` is read; or such a file, which ``pm_run``
        writes, or an application from `pm_read_state`, tensor by tensor.
    model : torch.nn.Module
        The model that was exported, or another one of the same parameters and buffers, which get
        the values.
    optimizer : torch.optim.Optimizer, optional
        Its state gets the moments of the file, which are left out otherwise. Where the program sums
        gradients of several batches, those so far are in ``.grad``; None after an update.
    folder : str or Path, optional
        The exported folder, where the file lies elsewhere.

    Raises
    ------
    InputError
        If the file is not one of the folder, whose program may change no state, or the model has no
        such tensors: nothing is changed.
    """
    file, home = state_paths(path, folder)
    tensors = state_tensors(home, is_trained=True)
    arrays = read_state(file, tensors)
    values = {tensor.name: torch.tensor(arrays[tensor.name]) for tensor in tensors}
    pairs = list(_pairs(model, tensors))
    sums = dict(_sums(model, tensors))
    moments = {tensor.name for tensor in tensors} - {name for name, _ in pairs} - sums.keys()
    kept = list(_moments(model, moments, optimizer))
    with torch.no_grad():
        for name, own in pairs:
            own.copy_(values[name])
        for name, parameter, key in kept:
            # A buffer that begins with its first gradient has NaN.
            has_value = key != "momentum_buffer" or not bool(values[name].isnan().all())
            if optimizer is not None and has_value:
                like = values[name].to(parameter.dtype if values[name].ndim else torch.float32)
                optimizer.state[parameter][key] = like
            elif optimizer is not None:
                optimizer.state[parameter].pop(key, None)
    for name, parameter in sums.items():
        if parameter is not None:
            parameter.grad = values[name].to(parameter.dtype) if arrays[BATCHES] else None


def save_state(
    model: torch.nn.Module,
    path: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    folder: str | Path | None = None,
) -> None:
    """Write the state of a model as a file that an exported program can begin with.

    ``pm_run`` begins with it where its arguments have ``state=FILE``; an application hands each
    tensor to `pm_write_state`.

    Parameters
    ----------
    model : torch.nn.Module
        The model that was exported.
    path : str or Path
        The exported folder, where ``state.bin`` is written; or the file to write.
    optimizer : torch.optim.Optimizer, optional
        Whose moments are written; where it has taken no step they are those that it begins with.
        Needed where the folder has some. A program that sums gradients of several batches begins
        with the first of them.
    folder : str or Path, optional
        The exported folder, where the file is to lie elsewhere.

    Raises
    ------
    InputError
        If the folder has tensors that the model and the optimizer do not have, or its program
        changes no state.
    """
    file, home = state_paths(path, folder)
    tensors = state_tensors(home, is_trained=True)
    arrays = {name: own.detach().cpu().numpy() for name, own in _pairs(model, tensors)}
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    arrays |= {name: np.zeros(shapes[name]) for name, _ in _sums(model, tensors)}
    moments = {tensor.name for tensor in tensors} - arrays.keys()
    if moments and optimizer is None:
        raise InputError(f"optimizer: the folder keeps {min(moments)!r} too; give the optimizer")
    for name, parameter, key in _moments(model, moments, optimizer):
        if optimizer is not None:
            slot = OptimizerSlot(optimizer, parameter, key)
            moment = slot.value().detach().cpu().numpy().reshape(shapes[name])
            arrays[name] = np.full_like(moment, np.nan) if slot.begins_with_gradient else moment
    write_state(file, tensors, arrays)


def _pairs(
    model: torch.nn.Module, tensors: Sequence[ExportedTensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers that a folder has, by name."""
    check_kind("model", model, torch.nn.Module)
    model = with_fronts(model)
    own: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))
    for tensor in tensors:
        mine = own.get(tensor.name)
        if mine is None:
            continue
        if tuple(mine.shape) != tensor.shape:
            raise InputError(
                f"{tensor.name}: expected shape {list(tensor.shape)}, as in the folder, got "
                f"{list(mine.shape)} of the model"
            )
        if mine.is_meta:
            raise InputError(f"{tensor.name}: the model has no memory for it (device meta)")
        yield tensor.name, mine


def _sums(
    model: torch.nn.Module, tensors: Sequence[ExportedTensor]
) -> Iterator[tuple[str, torch.nn.Parameter | None]]:
    """Yield the sums of gradients of a folder, each with its parameter; how many are in them."""
    if any(tensor.name == BATCHES for tensor in tensors):
        own = dict(model.named_parameters(remove_duplicate=False))
        own |= {  # int8 weights are buffers; another parameter stands for them
            f"{path}.weight" if path else "weight": layer.weight_gradient
            for path, layer in model.named_modules()
            if isinstance(layer, TrainedLayer)
        }
        for tensor in tensors:
            of, _, key = tensor.name.rpartition(".")
            if key == GRADIENT and of in own:
                yield tensor.name, own[of]
        yield BATCHES, None


def _moments(
    model: torch.nn.Module, names: set[str], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, torch.nn.Parameter, str]]:
    """Yield which parameter a moment is of, and what the optimizer calls it."""
    own = dict(model.named_parameters(remove_duplicate=False))
    if optimizer is not None:
        check_kind("optimizer", optimizer, torch.optim.Optimizer)
    groups = () if optimizer is None else optimizer.param_groups
    trained = {id(p) for group in groups for p in group["params"]}
    rules = () if optimizer is None else group_rules(optimizer)
    moments = {id(p): rule.moments for rule, parameters in rules for p in parameters}
    for name in sorted(names):
        of, _, key = name.rpartition(".")
        if of not in own:
            raise InputError(
                f"model: expected a tensor {name!r}, which the folder has; it has none"
            )
        if optimizer is not None and id(own[of]) not in trained:
            raise InputError(
                f"optimizer: expected it to train {of!r}, of which the folder has {key}"
            )
        keeps = moments.get(id(own[of]))
        if keeps is not None and key not in keeps:
            raise InputError(
                f"optimizer: the folder has {key} of {of!r}, and {type(optimizer).__name__} "
                f"keeps {listed(keeps) or 'nothing'}; give one like that which was exported"
            )
        yield name, own[of], key
