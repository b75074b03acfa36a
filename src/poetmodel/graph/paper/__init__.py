"""The training graphs of the published POET code, for comparison with the zoo's correct ones.

Facts and figures are those of github.com/ShishirPatil/poet (``poet/architectures``,
``poet/power_computation.py``, ``poet/power_computation_transformer.py``): its operators, its FLOP
rules, four bytes per element, and a backward pass that is one reversed chain. They are kept as
they are, with their faults; ``docs/deviations.md`` lists those. Time and energy there are FLOP
over a device's FLOP/s and FLOP/J, and a transfer is latency plus bytes over rate times power, so
`poetmodel.device.Costs.estimate` with the ``paper-*`` devices gives its costs exactly.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from poetmodel.graph.paper.models import (
    bert,
    linear,
    resnet18,
    resnet18_cifar,
    resnet50,
    transformer,
    vgg16,
    vgg16_cifar,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.graph.structure import Graph

MODELS: Final[Mapping[str, Callable[..., Graph]]] = MappingProxyType(
    {
        "paper/bert": bert,
        "paper/linear": linear,
        "paper/resnet18": resnet18,
        "paper/resnet18-cifar": resnet18_cifar,
        "paper/resnet50": resnet50,
        "paper/transformer": transformer,
        "paper/vgg16": vgg16,
        "paper/vgg16-cifar": vgg16_cifar,
    }
)
"""Every model that the published code can be asked for, by the name of its graph."""

__all__ = [
    "MODELS",
    "bert",
    "linear",
    "resnet18",
    "resnet18_cifar",
    "resnet50",
    "transformer",
    "vgg16",
    "vgg16_cifar",
]
