"""Capture the traced graphs under ``bench/traced`` from models in plain PyTorch.

``python -m pytorch.capture`` in ``bench`` writes ``NAME.graph.json`` and, measured on this host,
``NAME.profile.csv`` for every model of `MODELS`; names as arguments choose some of them. Models of
libraries (`pytorch.library_models`) are in ``models/``, and with the updates of AdamW, their state
and operators in place in ``whole-steps/``.
``--check`` writes nothing and exits 1 where a graph would differ in anything but its workspace,
which depends on the processor. It needs PyTorch, transformers and diffusers; the files were made
with PyTorch 2.13.0.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

from poetmodel.device.io import save_profile
from poetmodel.graph import Graph
from poetmodel.torch.runtime.profiling import limited_threads, measure
from poetmodel.torch.step.trace import trace
from pytorch import library_models

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TRACED: Final = Path(__file__).resolve().parents[1] / "traced"
"""The folder of traced graphs."""

BATCH: Final = 8
"""Samples of every traced step."""
CLASSES: Final = 10
"""Classes of CIFAR-10."""

Step = tuple[nn.Module, "Callable[..., torch.Tensor] | None", tuple[Any, ...]]
"""Model, loss, and inputs with the target last; without a loss the model returns its own."""


class BasicBlock(nn.Module):  # type: ignore[misc, unused-ignore]
    """Basic residual block of two convolutions (He et al., 2016)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y)) + self.shortcut(x)
        return functional.relu(y)


class ResNet18(nn.Module):  # type: ignore[misc, unused-ignore]
    """ResNet-18 for 32 x 32 images: a 3 x 3 stem and no pooling behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        stages = []
        inside = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            stages.append(
                nn.Sequential(BasicBlock(inside, width, stride), BasicBlock(width, width, 1))
            )
            inside = width
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.linear = nn.Linear(inside, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        y = functional.relu(self.bn1(self.conv1(x)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            y = stage(y)
        return self.linear(functional.avg_pool2d(y, 4).flatten(1))


class Vgg16(nn.Module):  # type: ignore[misc, unused-ignore]
    """VGG-16 for 32 x 32 images, with batch norm, and a classifier of two layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 3
        for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(depth):
                layers += [nn.Conv2d(inside, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                inside = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.classifier(self.features(x).flatten(1))


class Attention(nn.Module):  # type: ignore[misc, unused-ignore]
    """Self-attention written out: products, softmax and dropout of its own (Vaswani et al.)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(0.1)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a mixture of all positions for each position."""
        batch, length, hidden = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = query @ key.transpose(-1, -2) / (hidden // self.heads) ** 0.5
        mixed = self.dropout(scores.softmax(-1)) @ value
        return self.output(mixed.transpose(1, 2).reshape(batch, length, hidden))


class Encoder(nn.Module):  # type: ignore[misc, unused-ignore]
    """Encoder block of BERT (Devlin et al., 2019)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.dropout1 = nn.Dropout(0.1)
        self.norm1 = nn.LayerNorm(hidden)
        self.wide = nn.Linear(hidden, 4 * hidden)
        self.narrow = nn.Linear(4 * hidden, hidden)
        self.dropout2 = nn.Dropout(0.1)
        self.norm2 = nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        x = self.norm1(x + self.dropout1(self.attention(x)))
        return self.norm2(x + self.dropout2(self.narrow(functional.gelu(self.wide(x)))))


class Bert(nn.Module):  # type: ignore[misc, unused-ignore]
    """A small BERT that classifies by its first position."""

    def __init__(self, *, layers: int, hidden: int, heads: int, length: int) -> None:
        super().__init__()
        self.word = nn.Embedding(1000, hidden)
        self.position = nn.Embedding(length, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(0.1)
        self.encoder = nn.Sequential(*(Encoder(hidden, heads) for _ in range(layers)))
        self.pooler = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.norm(self.word(ids) + self.position(places)))
        x = self.encoder(x)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def resnet18() -> Step:
    """Return a step of ResNet-18 on CIFAR-10."""
    return ResNet18(), functional.cross_entropy, _images()


def vgg16() -> Step:
    """Return a step of VGG-16 with batch norm and dropout on CIFAR-10."""
    return Vgg16(), functional.cross_entropy, _images()


def bert4() -> Step:
    """Return a step of a BERT of 4 layers, 256 wide, on 128 tokens."""
    length = 128
    model = Bert(layers=4, hidden=256, heads=4, length=length)
    ids = torch.randint(0, 1000, (BATCH, length))
    return model, functional.cross_entropy, (ids, torch.randint(0, 2, (BATCH,)))


def _images() -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, 3, 32, 32), torch.randint(0, CLASSES, (BATCH,))


_WHOLE: Final = "whole-steps/"
MODELS: Final[dict[str, Callable[[], Step]]] = {
    "resnet18-b8": resnet18,
    "vgg16-b8": vgg16,
    "bert4-b8": bert4,
    **{f"models/{name}": step for name, step in library_models.MODELS.items()},
    **{f"{_WHOLE}{name}": library_models.MODELS[name] for name in library_models.WHOLE},
}
"""What is captured, by name: where its files lie."""


def bare(graph: Graph) -> Graph:
    """Return a graph without its workspaces, which depend on the processor."""
    nodes = tuple(dataclasses.replace(node, workspace_bytes=0) for node in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Capture or check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on differences")
    parser.add_argument("--folder", type=Path, default=TRACED, help="where the files lie")
    parser.add_argument("--repeats", type=int, default=10, help="measurements per operation")
    options = parser.parse_args(arguments)
    status = 0
    for name in options.names or MODELS:
        status |= _capture(name, options)
    return status


def _capture(name: str, options: Any) -> int:
    torch.manual_seed(0)
    path = options.folder / f"{name}.graph.json"
    with limited_threads(1):
        model, loss, inputs = MODELS[name]()
        whole = name.startswith(_WHOLE)
        traced = trace(
            model,
            loss,
            inputs,
            name=path.name.removesuffix(".graph.json"),
            measure_workspace=not options.check,
            optimizer=torch.optim.AdamW(model.parameters()) if whole else None,
        )
        if options.check:
            same = path.is_file() and bare(Graph.load(path)) == bare(traced.graph)
            sys.stdout.write(f"{'same' if same else 'change'} {name}\n")
            return 0 if same else 1
        path.parent.mkdir(parents=True, exist_ok=True)
        profile = measure(traced, folder=options.folder, repeats=options.repeats)
    traced.graph.save(path)
    save_profile(profile.costs, options.folder / f"{name}.profile.csv")
    sys.stdout.write("\n".join((f"write {name}", *profile.notes)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
