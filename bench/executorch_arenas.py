"""Arenas of ExecuTorch's programs: its own, and ours within a budget, with its planner and ours.

``python bench/executorch_arenas.py --out bench/results/$(date +%F)-executorch.jsonl`` writes each
network for each budget, and trains both programs for some steps: bits are compared. It needs the
extra ``executorch``. ``python scripts/make_results.py`` puts the figures into
``docs/guides/executorch.md``.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

from harness import latest, parsed, record
from mcu import networks
from poetmodel.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KIND: Final = "executorch"
"""Kind of the records."""
SHARES: Final = (0.6, 0.5)
"""Budgets, of the arena of ExecuTorch's own program."""
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


def measured(name: str, share: float, limit_s: float) -> dict[str, Any]:
    """Write a network's program for a budget, and train it and ExecuTorch's own.

    Where the budget is too little, what the sentence says is enough takes its place.
    """
    import poetmodel.torch as pmt
    from poetmodel.torch.executorch.edge import edge_program
    from poetmodel.torch.executorch.lowering import lowered

    torch.manual_seed(0)
    model, loss, inputs = NETWORKS[name]()
    own = lowered(edge_program(name, model, loss, inputs), is_ours=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.pte"
        write = partial(pmt.to_executorch, model, loss, inputs, path=path, time_limit=limit_s)
        refused = ""
        try:
            made = write(ram=int(share * own.arena_bytes))
        except BudgetError as error:
            refused = str(error)
            made = write(ram=int(enough(refused)))
        theirs, ours = (trained(program, inputs) for program in (own.program, path.read_bytes()))
    equal = [key for key, value in theirs.items() if torch.equal(value, ours[key])]
    facts = {key: value for key, value in made.to_dict().items() if key not in {"name", "path"}}
    return {**facts, "refused": refused, "equal": len(equal), "compared": len(theirs)}


def enough(sentence: str) -> str:
    """Return the budget that a sentence about one that is too small says is enough."""
    found = re.search(r"ram=(\d+)", sentence)
    if found is None:
        raise ValueError(sentence)
    return found[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all networks and budgets; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, action="append", help="some only")
    parser.add_argument("--limit", type=float, default=60.0, help="of each solve [s]")
    options = parsed(parser, "executorch.jsonl", arguments)
    records = latest(options.out)
    for name in options.network or NETWORKS:
        for share in SHARES:
            facts = measured(name, share, options.limit)
            cell = {"network": name, "share": share}
            records.add(
                record(KIND, f"{name} | {share}", cell=cell, limit_s=options.limit, **facts)
            )
            sys.stdout.write(f"{name} at {share:.0%}: {facts['arena_bytes']:,} B\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
