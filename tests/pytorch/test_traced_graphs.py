"""The traced graphs under ``bench/traced``: what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from poetmodel.device import Costs
from poetmodel.graph import Graph, checkpoint_all_peak_bytes
from poetmodel.problem import Problem

TRACED = Path(__file__).parents[2] / "bench" / "traced"

SIZES = {
    "resnet18-b8": (160, 300, 47.3e6, 56.7e6),
    "vgg16-b8": (117, 227, 30.1e6, 39.6e6),
    "bert4-b8": (266, 316, 95.5e6, 95.5e6),
}
"""Nodes, tensors, and the keep-all peak without and with workspace [B]."""


MODELS = (
    *("bert12", "efficientnet-b0", "gpt2", "llama", "mamba", "mixer", "mobilenetv2", "swin", "t5"),
    *("unet2d", "vit", "whisper"),
)
"""Captures of models as people train them."""
WHOLE = ("gpt2", "llama", "mixer", "swin", "t5", "vit")
"""The same with an optimizer."""
CAPTURES = (*(f"models/{name}" for name in MODELS), *(f"whole-steps/{name}" for name in WHOLE))


def test_every_traced_graph_is_listed() -> None:
    """The folder holds the graphs of the lists, each with its profile, and their licence."""
    names = (*SIZES, *CAPTURES)
    files = {f"{name}.{kind}" for name in names for kind in ("graph.json", "profile.csv")}
    files.add("README.md")
    found = (path for path in TRACED.rglob("*") if path.is_file())
    assert {path.relative_to(TRACED).as_posix() for path in found} == files


@pytest.mark.parametrize("name", CAPTURES)
def test_captured_models_are_problems(name: str) -> None:
    """Of 150 nodes or more, with costs of each, and with state where there is an optimizer."""
    graph = Graph.load(TRACED / f"{name}.graph.json")
    assert graph.name == name.split("/")[1]
    assert len(graph.nodes) >= 150
    assert bool(graph.state_tensors) == name.startswith("whole-steps/")
    costs = Costs.load(TRACED / f"{name}.profile.csv")
    assert Problem(graph, costs, ram="50%").pass_time_s > 0


@pytest.mark.parametrize("name", SIZES)
def test_traced_graphs_are_complete(name: str) -> None:
    """Sizes are those of the network, names are unique, and the profile fits the graph."""
    graph = Graph.load(TRACED / f"{name}.graph.json")
    nodes, tensors, bare, whole = SIZES[name]
    assert (graph.name, graph.batch_size) == (name, 8)
    assert (len(graph.nodes), len(graph.tensors)) == (nodes, tensors)
    assert checkpoint_all_peak_bytes(graph) == pytest.approx(whole, rel=0.01)
    live, peak = 0, 0
    last = [users[-1] if users else graph.node_of[i] for i, users in enumerate(graph.users_of)]
    for k, node in enumerate(graph.nodes):
        live += node.output_bytes
        peak = max(peak, live)
        live -= sum(b for b, end in zip(graph.tensor_bytes, last, strict=True) if end == k)
    assert peak == pytest.approx(bare, rel=0.01)
    costs = Costs.load(TRACED / f"{name}.profile.csv")
    assert Problem(graph, costs, ram="50%").pass_time_s > 0
