"""Arenas of ExecuTorch's programs: its own, and ours within a budget, with its planner and ours.

Both programs train for some steps, and bits are compared. Needs the extra ``executorch``.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

from harness import Cell, Study, record
from mcu import networks
from poetmodel.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.bench.measurement import Record

KIND: Final = "executorch"
"""Kind of the records."""
SHARES: Final = (0.6, 0.5)
"""Budgets, of the arena of ExecuTorch's own program."""
LIMIT_S: Final = 60.0
"""Of each solve [s]."""
STEPS: Final = 20
"""How many steps both programs train for."""
SGD: Final = {"lr": 0.05, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
"""How they train."""


def cnn(batch: int = 4) -> networks.Training:
    """Return a plain convolutional network with batch norm and max pooling."""

    def block(into: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]

    model = nn.Sequential(
        *block(3, 8), *block(8, 8), nn.MaxPool2d(2), *block(8, 16), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    inputs = (torch.randn(batch, 3, 16, 16), torch.randint(0, 10, (batch,)))
    return model, functional.cross_entropy, inputs


NETWORKS: Final[dict[str, Callable[[], networks.Training]]] = {
    "mlp": partial(networks.mlp, 32),
    "cnn": cnn,
    "resnet8": networks.resnet8,
    "ds-cnn": networks.ds_cnn,
    "bert-block": partial(networks.bert, 4),
}
"""The networks by name."""


def trained(program: bytes, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return losses, gradients and weights of a program after some steps in its runtime."""
    from executorch.extension.training import (
        _load_for_executorch_for_training_from_buffer as load,
    )
    from executorch.extension.training import get_sgd_optimizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is experimental
        step, optimizer, losses, gradients = load(program), None, [], {}
        for number in range(STEPS):
            batch = _batch(inputs, number)
            losses += step.forward_backward("forward", batch)
            gradients = step.named_gradients()
            if optimizer is None:
                optimizer = get_sgd_optimizer(step.named_parameters(), **SGD)
            optimizer.step(gradients)
    weights = {f"weight {key}": value.clone() for key, value in step.named_parameters().items()}
    return {
        "losses": torch.stack([loss.reshape(()) for loss in losses]),
        **{f"gradient {key}": value.clone() for key, value in gradients.items()},
        **weights,
    }


def _batch(inputs: Sequence[torch.Tensor], number: int) -> tuple[torch.Tensor, ...]:
    """Return another batch of such inputs for each number: the samples in another order."""
    torch.manual_seed(number)
    return tuple(
        value + 0.1 * torch.randn_like(value)
        if value.is_floating_point()
        else value.flatten()[torch.randperm(value.numel())].reshape(value.shape)
        for value in inputs
    )


def runs(
    networks: tuple[str, ...] = tuple(NETWORKS), shares: tuple[float, ...] = SHARES
) -> Iterator[Cell]:
    """Yield each network within each budget."""
    for network, share in product(networks, shares):
        yield Cell(f"{network} | {share}", {"network": network, "share": share})


def measure(fields: dict[str, Any], _start: None = None) -> Record:
    """Write a network's program for a budget, train it and ExecuTorch's own; return the record.

    Where the budget is too little, the least that the error names takes its place.
    """
    import poetmodel.torch as pmt
    from poetmodel.torch.executorch.edge import edge_program
    from poetmodel.torch.executorch.lowering import lowered

    name, share = fields["network"], fields["share"]
    torch.manual_seed(0)
    model, loss, inputs = NETWORKS[name]()
    own = lowered(edge_program(name, model, loss, inputs), is_ours=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.pte"
        write = partial(pmt.to_executorch, model, loss, inputs, path=path, time_limit=LIMIT_S)
        refused = ""
        try:
            made = write(ram=int(share * own.arena_bytes))
        except BudgetError as error:
            refused = str(error)
            made = write(ram=int(enough(refused)))
        theirs, ours = (trained(program, inputs) for program in (own.program, path.read_bytes()))
    equal = [key for key, value in theirs.items() if torch.equal(value, ours[key])]
    facts = {key: value for key, value in made.to_dict().items() if key not in {"name", "path"}}
    facts |= {"refused": refused, "equal": len(equal), "compared": len(theirs)}
    return record(KIND, f"{name} | {share}", cell=fields, limit_s=LIMIT_S, **facts)


def enough(sentence: str) -> str:
    """Return the budget that an error about one that is too small says is enough."""
    found = re.search(r"ram=(\d+)", sentence)
    if found is None:
        raise ValueError(sentence)
    return found[1]


STUDY: Final = Study(
    name="executorch",
    kind=KIND,
    runs=runs,
    smoke_runs=lambda: runs(("mlp",), (0.6,)) if find_spec("executorch") else (),
    measure=measure,
    alone=False,
)
