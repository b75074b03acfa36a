"""Built-in networks and the published graphs: names, descriptions, and how to load them."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from inspect import signature
from itertools import chain
from typing import TYPE_CHECKING, Final

from poetmodel.errors import GraphError, InputError
from poetmodel.files import shipped_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from poetmodel.graph.structure import Graph

SUFFIX: Final = ".graph.json"
"""Suffix of graph files."""

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
"""Prefix of the names of published graphs, which are fixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShape:
    """Sizes of the input of a training step; None leaves the network's default."""

    batch: int | None = None
    """Samples per step."""
    image: int | None = None
    """Side of a square image [pixels]."""
    sequence: int | None = None
    """Tokens per sample."""

    @property
    def overrides(self) -> dict[str, int | str]:
        """Settings other than None, False and 0, by field name."""
        return {name: value for name, value in asdict(self).items() if value not in _UNSET}

    def label(self, model: str) -> str:
        """Format the network's name and its overrides for tables: ``mlp, batch 8``."""
        settings = (
            name.replace("_", " ") if value is True else f"{name} {value}"
            for name, value in self.overrides.items()
        )
        return ", ".join((model, *settings))

    @property
    def options(self) -> tuple[str, ...]:
        """The `overrides` as command-line arguments, such as ``("--batch", "8")``."""
        return tuple(
            argument
            for name, value in self.overrides.items()
            for argument in (
                f"--{name.replace('_', '-')}",
                *(() if value is True else (f"{value}",)),
            )
        )


_UNSET: Final = (None, False)
"""Values of settings that leave the network's default; 0 does so, too, since it equals False."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant(InputShape):
    """Settings of the graph of a step: input sizes, state in the graph, tiles, trained weights."""

    state: str | None = None
    """Optimizer whose state is in the graph, or ``frozen``; None for a graph without state."""
    in_place: bool = False
    """Whether operators that can overwrite an input are marked."""
    tile: str | None = None
    """Maximum size of a tile of a weight, as ``--tile`` accepts it."""
    train: str | None = None
    """Weights to train, as ``--train`` accepts them."""


_PARAMETER_OF_FIELD: Final = {"batch": "batch_size", "image": "image_size", "sequence": "seq_len"}
"""Parameter of the functions in `poetmodel.graph.zoo`, by field of `InputShape`."""
DEFAULT_SHAPE: Final = InputShape()
"""The default input sizes of every network."""

MAX_FOUND_BATCH: Final = 4096
"""Largest batch size that `find_model_by_hash` finds."""


def model_names() -> tuple[str, ...]:
    """Return the names of all built-in networks, then of all published graphs (``paper/...``)."""
    return tuple(_DESCRIPTIONS)


def describe_model(name: str) -> str:
    """Return the one-line description of a built-in network or published graph."""
    check_model_name(name)
    return _DESCRIPTIONS[name]


def load_model(name: str, shape: InputShape = DEFAULT_SHAPE) -> Graph:
    """Load a network with overrides, or a published graph without; `GraphError` for others."""
    from poetmodel.graph.structure import Graph

    check_model_name(name)
    if shape.overrides:
        return _build_zoo_model(name, shape)
    return Graph.load(model_path(shipped_folder("graphs"), name))


def read_model_or_file(name: str, shape: InputShape = DEFAULT_SHAPE) -> Graph:
    """Load the built-in network or published graph of this name, or else a graph file.

    `name` is a path if it ends in ``.json``, exists, or has a separator and no prefix ``paper/``.
    """
    has_separator = os.sep in name and not name.startswith(_PUBLISHED)
    is_file = has_separator or name.endswith(".json") or os.path.exists(name)  # noqa: PTH110
    if name not in _DESCRIPTIONS and is_file:
        return load_file(name, shape)
    return load_model(name, shape)


def load_file(path: str, shape: InputShape = DEFAULT_SHAPE) -> Graph:
    """Load a graph file or the graph of a step file; refuse overrides in `shape`."""
    from poetmodel.graph.structure import Graph

    if shape.overrides:
        raise InputError(
            f"{path}, {' '.join(shape.options)}: the graph of a file is fixed; leave the "
            "option out, or give a built-in network"
        )
    return Graph.load(path)


def _build_zoo_model(name: str, shape: InputShape) -> Graph:
    """Build a network with the overrides of `shape`; raise `GraphError` for refused ones."""
    subject = f"model {name!r}, {shlex.join(shape.options)}"
    if name.startswith(_PUBLISHED):
        raise GraphError(f"{subject}: the published graphs are fixed; leave the option out")
    from poetmodel.graph.zoo import MODELS

    build_graph = MODELS[name]
    parameters = signature(build_graph).parameters
    accepted_fields = [
        key
        for key, argument in _PARAMETER_OF_FIELD.items()
        if key == "batch" or argument in parameters
    ]
    if shape.overrides.keys() & _PARAMETER_OF_FIELD.keys() - set(accepted_fields):
        raise GraphError(
            f"{subject}: of the sizes, this network only accepts "
            f"{' and '.join(f'--{key}' for key in accepted_fields)}"
        )
    try:
        return build_graph(
            **{_PARAMETER_OF_FIELD.get(key, key): value for key, value in shape.overrides.items()}
        )
    except InputError as error:
        raise GraphError(
            f"{subject}: {_replace_argument_names(fault)}" for fault in error.faults
        ) from None


def _replace_argument_names(fault: str) -> str:
    """Replace argument names of a zoo function in an error message by command-line options."""
    argument_name, colon, description = fault.partition(": ")
    if argument_name in Variant.__dataclass_fields__:
        fault = f"--{argument_name.replace('_', '-')}{colon}{description}"
    for key, argument in _PARAMETER_OF_FIELD.items():
        fault = fault.replace(argument, f"--{key}")
    return fault


def find_model_by_hash(name: str, sha256: str) -> tuple[Graph, InputShape] | None:
    """Return the variant of network `name` whose graph has this SHA-256, with its settings, if any.

    Tries the default sizes, untiled and with all weights trained, with every combination of `state`
    and `in_place`, and without state batch sizes up to `MAX_FOUND_BATCH`.
    """
    if name not in _DESCRIPTIONS:
        return None
    shapes = [DEFAULT_SHAPE]
    if not name.startswith(_PUBLISHED):
        from poetmodel.graph.zoo.state import STATES

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
    batch = None if name.startswith(_PUBLISHED) else _find_batch_by_hash(name, sha256)
    if batch is None:
        return None
    shape = InputShape(batch=batch)
    return load_model(name, shape), shape


def _find_batch_by_hash(name: str, sha256: str) -> int | None:
    """Return the batch size from 2 on at which network `name` has this SHA-256, if any.

    Every number in the JSON is linear in the batch size: two graphs determine all graphs.
    """
    from poetmodel.graph.io import canonical_json

    graphs = [load_model(name, InputShape(batch=batch)) for batch in (2, 3)]
    texts = [canonical_json(graph.to_dict(defaults=True)) for graph in graphs]
    parts: list[str] = [""]
    """Fixed texts, before and after each of `numbers`."""
    numbers: list[tuple[int, int]] = []
    """Numbers that change with the batch size: at batch size 2, and by how much for each sample."""
    for at_two, at_three in zip(*(re.split(r"(\d+)", text) for text in texts), strict=True):
        if at_two == at_three:
            parts[-1] += at_two
        else:
            numbers.append((int(at_two), int(at_three) - int(at_two)))
            parts.append("")
    for batch in range(2, MAX_FOUND_BATCH + 1):
        values = [str(value + (batch - 2) * change) for value, change in numbers]
        text = "".join(chain.from_iterable(zip(parts, values, strict=False))) + parts[-1]
        if hashlib.sha256(text.encode()).hexdigest() == sha256:
            return batch
    return None


def model_path(folder: Path, name: str) -> Path:
    """Return the path of a network's graph file in a folder of graph files."""
    return folder / f"{name}{SUFFIX}"


def check_model_name(name: str) -> None:
    """Raise `GraphError`, with similar names, if no built-in network or graph has this name."""
    if name in _DESCRIPTIONS:
        return
    normalized_name = name.strip().lower().replace("_", "-")
    corrected_names = [
        candidate
        for candidate in (normalized_name, f"{_PUBLISHED}{normalized_name}")
        if candidate in _DESCRIPTIONS
    ]
    matches = dict.fromkeys(
        (*corrected_names, *get_close_matches(normalized_name, _DESCRIPTIONS, n=3))
    )
    hint = f"did you mean {' or '.join(matches)}? " if matches else ""
    file_hint = " (a graph file is given with --graph)" if name.endswith(".json") else ""
    raise GraphError(
        f"model {name!r}: no such model; {hint}'poetmodel models' lists all{file_hint}"
    )
