"""The shipped models: their names, what they are, and how they are read."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Final

from poetmodel.errors import GraphError, InputError
from poetmodel.files import shipped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.graph.structure import Graph

SUFFIX: Final = ".graph.json"
"""Ending of a graph file's name."""

_DESCRIPTIONS: Final[Mapping[str, str]] = {
    "mlp": "LeNet-300-100 on 28 x 28 images",
    "vgg16": "VGG-16 on ImageNet, 224 x 224",
    "vgg16-cifar": "VGG-16 on CIFAR-10, 32 x 32",
    "resnet18": "ResNet-18 on ImageNet, 224 x 224",
    "resnet18-cifar": "ResNet-18 on CIFAR-10, 32 x 32",
    "resnet50": "ResNet-50 on ImageNet, 224 x 224",
    "mobilenetv2": "MobileNetV2 on ImageNet, 224 x 224",
    "mobilenetv2-035": "MobileNetV2 of width 0.35, 48 x 48",
    "bert-base": "BERT-base, 12 blocks, 128 tokens, classification head",
    "transformer": "BERT of one block, 128 tokens, classification head",
    "resnet8": "ResNet-8 of MLPerf Tiny on CIFAR-10, 32 x 32",
    "mobilenetv1-vww": "MobileNet of MLPerf Tiny for visual wake words, width 0.25, 96 x 96",
    "ds-cnn": "DS-CNN of MLPerf Tiny for keyword spotting, 49 x 10",
    "autoencoder": "autoencoder of MLPerf Tiny for anomaly detection, 640 features",
    "paper/vgg16": "VGG-16 on ImageNet, as in the published POET code",
    "paper/vgg16-cifar": "VGG-16 on CIFAR-10, as in the published POET code",
    "paper/resnet18": "ResNet-18 on ImageNet, as in the published POET code",
    "paper/resnet18-cifar": "ResNet-18 on CIFAR-10 (6 blocks), as in the published POET code",
    "paper/resnet50": "ResNet-50 on ImageNet, as in the published POET code",
    "paper/bert": "BERT, 12 blocks, 512 tokens, as in the published POET code",
    "paper/transformer": "BERT of one block, 512 tokens, as in the published POET code",
    "paper/linear": "six fully connected layers, as in the published POET code",
}

_PUBLISHED: Final = "paper/"
"""Prefixes of the published graphs' names; those have fixed sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShape:
    """Input of one training step; None leaves a network's own size."""

    batch: int | None = None
    """Samples."""
    image: int | None = None
    """Side of a square image [pixels]."""
    sequence: int | None = None
    """Tokens of a sample."""

    @property
    def given(self) -> dict[str, int | str]:
        """Settings that are not the network's own, by name."""
        return {name: value for name, value in asdict(self).items() if value not in _NOT_GIVEN}

    def label(self, model: str) -> str:
        """Return the name of such a network in tables: ``mlp, batch 8``."""
        said = (
            name.replace("_", " ") if value is True else f"{name} {value}"
            for name, value in self.given.items()
        )
        return ", ".join((model, *said))

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the command line that state it."""
        return tuple(
            word
            for name, value in self.given.items()
            for word in (f"--{name.replace('_', '-')}", *(() if value is True else (f"{value}",)))
        )


_NOT_GIVEN: Final = (None, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant(InputShape):
    """How the graph of a step is made: what it takes in, and what of its state is inside."""

    state: str | None = None
    """The optimizer whose state is in the graph, or ``frozen``; None leaves it outside."""
    in_place: bool = False
    """Whether the operators that may write over an input are marked."""
    tile: str | None = None
    """Largest piece of a weight, as ``--tile`` takes it."""
    train: str | None = None
    """Trained parts, as ``--train`` takes them."""


_ARGUMENTS: Final = {"batch": "batch_size", "image": "image_size", "sequence": "seq_len"}
"""Parameters of the zoo's functions for the sizes of an `InputShape`."""
OWN_SHAPE: Final = InputShape()
"""The sizes that networks have by themselves."""

USUAL_BATCHES: Final = (*range(2, 33), 48, 64, 96, 128, 192, 256, 384, 512, 1024)
"""Batch sizes with which a model is looked for, where only its fingerprint is known."""


def model_names() -> tuple[str, ...]:
    """Return the names of all shipped models, the zoo's first, then ``paper/...``."""
    return tuple(_DESCRIPTIONS)


def describe_model(name: str) -> str:
    """Return the description of a shipped model, in one line."""
    check_model_name(name)
    return _DESCRIPTIONS[name]


def load_model(name: str, shape: InputShape = OWN_SHAPE) -> Graph:
    """Read a shipped model from ``graphs/``, or make one of the zoo with other sizes."""
    from poetmodel.graph.structure import Graph

    check_model_name(name)
    if shape.given:
        return _make(name, shape)
    return Graph.load(model_path(shipped("graphs"), name))


def read_model_or_file(name: str, shape: InputShape = OWN_SHAPE) -> Graph:
    """Return the shipped model of this name and shape, else the graph in the file of this name."""
    separated = os.sep in name and not name.startswith(_PUBLISHED)
    is_file = separated or name.endswith(".json") or Path(name).exists()
    if name not in _DESCRIPTIONS and is_file:
        return load_file(name, shape)
    return load_model(name, shape)


def load_file(path: str, shape: InputShape = OWN_SHAPE) -> Graph:
    """Read a graph file, which has no other sizes than its own."""
    from poetmodel.graph.structure import Graph

    if shape.given:
        raise InputError(
            f"{path}, {' '.join(shape.options)}: a graph file has fixed sizes; leave the option "
            "out, or give a built-in network"
        )
    return Graph.load(path)


def _make(name: str, shape: InputShape) -> Graph:
    """Make a model of the zoo with sizes of its input."""
    said = f"model {name!r}, {shlex.join(shape.options)}"
    if name.startswith(_PUBLISHED):
        raise GraphError(f"{said}: the published graphs have fixed sizes; leave the option out")
    from poetmodel.graph.zoo import MODELS

    make = MODELS[name]
    known = signature(make).parameters
    taken = [key for key, argument in _ARGUMENTS.items() if key == "batch" or argument in known]
    if shape.given.keys() & _ARGUMENTS.keys() - set(taken):
        raise GraphError(
            f"{said}: this network takes {' and '.join(f'--{key}' for key in taken)} alone"
        )
    try:
        return make(**{_ARGUMENTS.get(key, key): value for key, value in shape.given.items()})
    except InputError as error:
        raise GraphError(f"{said}: {_as_options(fault)}" for fault in error.faults) from None


def _as_options(fault: str) -> str:
    """Return a fault of a function of the zoo with the names of options for its arguments."""
    subject, colon, rest = fault.partition(": ")
    if subject in Variant.__dataclass_fields__:
        fault = f"--{subject.replace('_', '-')}{colon}{rest}"
    for key, argument in _ARGUMENTS.items():
        fault = fault.replace(argument, f"--{key}")
    return fault


def find_model(name: str, sha256: str) -> tuple[Graph, InputShape] | None:
    """Return the shipped model that has this fingerprint.

    Its sizes are its own, or the batch is a usual one, or its state is in the graph, whole and all
    of it trained.
    """
    if name not in _DESCRIPTIONS:
        return None
    shapes = [OWN_SHAPE]
    if not name.startswith(_PUBLISHED):
        from poetmodel.graph.zoo.state import STATES

        shapes += [InputShape(batch=batch) for batch in USUAL_BATCHES]
        shapes += [
            Variant(state=state, in_place=in_place)
            for state in (*STATES, None)
            for in_place in (False, True)
            if state or in_place
        ]
    for shape in shapes:
        graph = load_model(name, shape)
        if graph.sha256 == sha256:
            return graph, shape
    return None


def model_path(folder: Path, name: str) -> Path:
    """Return the path of a model's graph file in a folder of shipped graphs."""
    return folder / f"{name}{SUFFIX}"


def check_model_name(name: str) -> None:
    """Raise unless a shipped model has this name; the error names those that are close.

    Raises
    ------
    GraphError
        If there is no such model.
    """
    if name in _DESCRIPTIONS:
        return
    typed = name.strip().lower().replace("_", "-")
    known = [candidate for candidate in (typed, f"paper/{typed}") if candidate in _DESCRIPTIONS]
    matches = dict.fromkeys((*known, *get_close_matches(typed, _DESCRIPTIONS, n=3)))
    hint = f"did you mean {' or '.join(matches)}? " if matches else ""
    file_hint = " (a graph file is given with --graph)" if name.endswith(".json") else ""
    raise GraphError(
        f"model {name!r}: no such model; {hint}'poetmodel models' lists all{file_hint}"
    )
