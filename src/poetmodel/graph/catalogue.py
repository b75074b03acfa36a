"""The shipped models: their names, what they are, and how they are read."""

from __future__ import annotations

from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from poetmodel.data import shipped
from poetmodel.errors import GraphError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from poetmodel.graph.structure import Graph

SUFFIX: Final = ".graph.json"
"""What the name of a graph file ends with."""

_DESCRIPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mlp": "LeNet-300-100 on 28 x 28 images",
        "vgg16": "VGG-16 on ImageNet, 224 x 224",
        "vgg16-cifar": "VGG-16 on CIFAR-10, 32 x 32",
        "resnet18": "ResNet-18 on ImageNet, 224 x 224",
        "resnet18-cifar": "ResNet-18 on CIFAR-10, 32 x 32",
        "resnet50": "ResNet-50 on ImageNet, 224 x 224",
        "mobilenetv2": "MobileNetV2 on ImageNet, 224 x 224",
        "bert-base": "BERT-base, 12 blocks, 128 tokens, classification head",
        "transformer": "BERT of one block, 128 tokens, classification head",
        "paper/vgg16": "VGG-16 on ImageNet, as in the published POET code",
        "paper/vgg16-cifar": "VGG-16 on CIFAR-10, as in the published POET code",
        "paper/resnet18": "ResNet-18 on ImageNet, as in the published POET code",
        "paper/resnet18-cifar": "ResNet-18 on CIFAR-10 (6 blocks), as in the published POET code",
        "paper/resnet50": "ResNet-50 on ImageNet, as in the published POET code",
        "paper/bert": "BERT, 12 blocks, 512 tokens, as in the published POET code",
        "paper/transformer": "BERT of one block, 512 tokens, as in the published POET code",
        "paper/linear": "six fully connected layers, as in the published POET code",
    }
)


def model_names() -> tuple[str, ...]:
    """Return the names of all shipped models, the zoo's first, then ``paper/...``.

    Examples
    --------
    >>> "resnet18-cifar" in model_names()
    True
    """
    return tuple(_DESCRIPTIONS)


def describe_model(name: str) -> str:
    """Return what a shipped model is, in one line.

    Raises
    ------
    GraphError
        If there is no such model; the message names similar ones.

    Examples
    --------
    >>> describe_model("resnet18-cifar")
    'ResNet-18 on CIFAR-10, 32 x 32'
    """
    _require_known(name)
    return _DESCRIPTIONS[name]


def load_model(name: str) -> Graph:
    """Read a shipped model.

    Parameters
    ----------
    name : str
        One of `model_names`.

    Returns
    -------
    Graph
        As its file under ``graphs/`` has it.

    Raises
    ------
    GraphError
        If there is no such model; the message names similar ones.
    InputError
        If the installation lacks the file, or the file is damaged.
    """
    from poetmodel.graph.structure import Graph

    _require_known(name)
    return Graph.load(model_path(shipped("graphs"), name))


def model_path(folder: Path, name: str) -> Path:
    """Return where the graph file of a model lies in a folder of shipped graphs."""
    return folder / f"{name}{SUFFIX}"


def _require_known(name: str) -> None:
    if name in _DESCRIPTIONS:
        return
    matches = list(dict.fromkeys(_similar(name)))
    hint = f"did you mean {' or '.join(matches)}? " if matches else ""
    file_hint = " (a graph file is given with --graph)" if name.endswith(".json") else ""
    msg = f"model {name!r}: no such model; {hint}'poetmodel models' lists all{file_hint}"
    raise GraphError(msg)


def _similar(name: str) -> Iterator[str]:
    """Yield shipped names that somebody who typed `name` may have meant, nearest first."""
    typed = name.strip().lower().replace("_", "-")
    yield from (known for known in (typed, f"paper/{typed}") if known in _DESCRIPTIONS)
    yield from get_close_matches(typed, _DESCRIPTIONS, n=3)
