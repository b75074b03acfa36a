"""Readable names: module path, operator, phase."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from poetmodel.graph import Phase  # noqa: E402
from poetmodel.torch import trace  # noqa: E402
from traced_models import checkpointed, residual, rows  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.torch

NAMES = [
    ("0/convolution", Phase.FORWARD),
    ("1.conv/convolution", Phase.FORWARD),
    ("1.bn/add", Phase.FORWARD),
    ("1.bn/_native_batch_norm_legit_functional", Phase.FORWARD),
    ("1/add", Phase.FORWARD),
    ("1/relu", Phase.FORWARD),
    ("2/native_dropout", Phase.FORWARD),
    ("4/addmm", Phase.FORWARD),
    ("loss/_log_softmax", Phase.LOSS),
    ("loss/nll_loss_forward", Phase.LOSS),
    ("loss/nll_loss_backward", Phase.BACKWARD),
    ("loss/_log_softmax_backward_data", Phase.BACKWARD),
    ("4/mm", Phase.BACKWARD),
    ("4/mm#2", Phase.BACKWARD),
    ("4/sum", Phase.BACKWARD),
    ("2/native_dropout_backward", Phase.BACKWARD),
    ("1/threshold_backward", Phase.BACKWARD),
    ("1.bn/native_batch_norm_backward", Phase.BACKWARD),
    ("1.conv/convolution_backward", Phase.BACKWARD),
    ("1/add#2", Phase.BACKWARD),
    ("0/convolution_backward", Phase.BACKWARD),
]


def test_names_say_module_and_operator() -> None:
    """Every node says whose it is, the sum of a residual block's gradients too."""
    traced = trace(*residual(), measure_workspace=False)
    assert [(node.name, node.phase) for node in traced.graph.nodes] == NAMES
    assert [unit.label.module for unit in traced.parts.units[:3]] == ["0", "1.conv", "1.bn"]


def test_names_without_annotations_say_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch cannot record modules, names are operators, and still unique."""
    monkeypatch.delattr(torch.fx.traceback, "annotate")
    nodes = trace(*residual(), measure_workspace=False).graph.nodes
    assert [node.name for node in nodes[:3]] == ["convolution", "convolution#2", "add"]
    assert [node.phase == Phase.BACKWARD for node in nodes] == [
        phase == Phase.BACKWARD for _, phase in NAMES
    ]


def test_names_do_not_depend_on_the_run() -> None:
    """Traced twice, a step gives the same graph, so that profiles and schedules fit."""
    first, second = (trace(*residual(), measure_workspace=False).graph for _ in range(2))
    assert first.sha256 == second.sha256


def test_a_module_used_twice_has_numbered_names() -> None:
    """What happens again in the same module gets a number."""
    step = rows(nn.Linear(4, 4), by=lambda p, x: p[0](p[0](x)))
    names = [node.name for node in trace(*step, measure_workspace=False).graph.nodes]
    assert names[:2] == ["parts.0/addmm", "parts.0/addmm#2"]


def test_phases_follow_each_other() -> None:
    """Forward, loss, backward: none comes again."""
    order = [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD]
    graph = trace(*residual(), measure_workspace=False).graph
    places = [order.index(Phase(node.phase)) for node in graph.nodes]
    assert all(before <= after for before, after in pairwise(places))


def test_a_checkpoint_of_the_user_decides_nothing() -> None:
    """What the user's code would compute twice is there once: the schedule decides."""
    graph = trace(*checkpointed(), measure_workspace=False).graph
    assert [node.op for node in graph.nodes].count("native_dropout") == 1
