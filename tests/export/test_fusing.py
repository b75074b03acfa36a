"""Gradients that are no tensors: updates by SGD that make them."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final

import pytest

torch = pytest.importorskip("torch")

from kit.export_agreement import batches_like  # noqa: E402
from kit.programs import needs  # noqa: E402
from poetmodel.export.board import Target, build, run  # noqa: E402
from poetmodel.export.exporting import export_step, in_tiles  # noqa: E402
from poetmodel.export.fusing import fused, parted  # noqa: E402
from poetmodel.graph import checkpoint_all_peak_bytes, floor  # noqa: E402
from poetmodel.torch.lowering.step import lower  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from poetmodel.export.step import LoweredStep

pytestmark = pytest.mark.torch

RATE: Final = 0.05
PLACES: Final[dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    "kept": ({"ram": "100%", "paging": False}, ()),
    "paged": ({"ram": "95%", "recompute": False}, ()),
    "read in place": ({"ram": "60%", "device": "nano33ble"}, ("DRIVER=ram",)),
    "in tiles": ({"ram": "95%", "tile": 256}, ()),
    "with commits": ({"ram": "95%", "commit": True}, ()),
}
"""Where weights are: options of the export, and what the program is built with."""
RULES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True},
}


class Twice(torch.nn.Module):
    """A layer that is applied two times: its gradient is a sum of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(9, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it, and again."""
        return self.layer(torch.tanh(self.layer(x)))


def perceptron() -> torch.nn.Module:
    """Return two layers whose sizes are no multiples of a block of the kernels."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(37, 11), torch.nn.ReLU(), torch.nn.Linear(11, 5))


def filters() -> torch.nn.Module:
    """Return convolutions: in groups, of two filters to a channel, transposed, of one window.

    Images are so small that at batch size 1 each gradient takes as much as what it is made of.
    """
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 9, 3, padding=1), torch.nn.ReLU()),
        *(torch.nn.Conv2d(9, 9, 3, padding=1, groups=9), torch.nn.ReLU()),
        *(torch.nn.Conv2d(9, 12, 3, stride=2, groups=3), torch.nn.ReLU()),
        *(torch.nn.Conv2d(12, 24, (1, 2), padding=(0, 1), groups=12), torch.nn.ReLU()),
        *(torch.nn.ConvTranspose2d(24, 8, 2), torch.nn.ReLU()),
        *(torch.nn.Conv2d(8, 13, 1), torch.nn.ReLU(), torch.nn.Conv2d(13, 5, (2, 3))),
        torch.nn.Flatten(),
    )


def captured(model: torch.nn.Module, batch: int = 3, **rule: Any) -> tuple[LoweredStep, Any]:
    """Return a step with SGD, and a batch for it."""
    torch.manual_seed(1)
    weight = next(model.parameters())
    image = (3, 3) if weight.dim() == 4 else ()
    inputs = (torch.randn(batch, weight.shape[1], *image), torch.randint(0, 5, (batch,)))
    clip = rule.pop("clip", None)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, **rule)
    loss = torch.nn.functional.cross_entropy
    return lower(model, loss, inputs, optimizer=optimizer, clip_grad_norm=clip), inputs


def kernels(step: LoweredStep) -> list[str]:
    """Return the kernels that a step calls."""
    return [call.kernel for calls in step.calls for call in calls]


def test_gradients_of_weights_are_no_tensors() -> None:
    """Two of them are gone with their nodes; those of biases stay. The step takes less RAM."""
    joined, _ = captured(perceptron())
    two = parted(joined)
    assert kernels(two).count("pm_sgd") == 4
    assert kernels(joined).count("pm_sgd") == kernels(joined).count("pm_mm_sgd") == 2
    gone = set(two.graph.tensor_index) - set(joined.graph.tensor_index)
    assert sorted(two.buffers[name].elements for name in gone) == [55, 407]
    assert len(joined.graph.nodes) == len(two.graph.nodes) - 2
    assert not gone & joined.buffers.keys()
    assert checkpoint_all_peak_bytes(joined.graph) < checkpoint_all_peak_bytes(two.graph)
    assert floor(joined.graph).bytes <= floor(two.graph).bytes


def test_gradients_of_filters_are_no_tensors() -> None:
    """None of seven convolutions has one, so that the step takes less RAM."""
    joined, _ = captured(filters(), batch=1)
    two = parted(joined)
    gone = set(two.graph.tensor_index) - set(joined.graph.tensor_index)
    weights = [p.numel() for p in filters().parameters() if p.dim() == 4]
    assert sorted(two.buffers[name].elements for name in gone) == sorted(weights)
    assert kernels(joined).count("pm_conv2d_dw_sgd") == 5
    assert kernels(joined).count("pm_depthwise_dw_sgd") == 2
    assert not {"pm_conv2d_dw", "pm_depthwise_dw"} & set(kernels(joined))
    assert checkpoint_all_peak_bytes(joined.graph) < checkpoint_all_peak_bytes(two.graph)


def test_small_gradients_of_large_images_stay() -> None:
    """They take little, and a node of their own is a stage in which something may be recomputed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(5)
    )
    inputs = (torch.randn(1, 3, 9, 9), torch.tensor([1]))
    model(inputs[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    step = lower(model, torch.nn.functional.cross_entropy, inputs, optimizer=optimizer)
    assert "pm_conv2d_dw" in kernels(step)
    assert "pm_conv2d_dw_sgd" not in kernels(step)


@pytest.mark.parametrize(
    ("model", "kernel"), [(perceptron, "pm_mm_sgd"), (filters, "pm_conv2d_dw_sgd")]
)
def test_parting_is_undone_by_fusing(model: Callable[[], torch.nn.Module], kernel: str) -> None:
    """What is parted so that weights can be split has the same nodes and calls afterwards."""
    joined, _ = captured(model(), batch=1, weight_decay=0.1)
    again = fused(parted(joined))
    assert again.calls == joined.calls
    assert again.graph == joined.graph
    assert fused(joined) is joined
    tiles = in_tiles(joined, 640)
    assert kernels(tiles).count(kernel) > kernels(joined).count(kernel)


@pytest.mark.parametrize(
    ("model", "rule"),
    [(perceptron, {"momentum": 0.9}), (perceptron, {"clip": 0.5}), (Twice, {})],
    ids=["momentum", "clipped", "shared"],
)
def test_gradients_that_something_else_reads_stay(model: Any, rule: dict[str, Any]) -> None:
    """Another rule, a norm of all gradients, a sum over two uses: nothing changes."""
    step, _ = captured(model(), **rule)
    assert "pm_mm" in kernels(step)
    assert "pm_mm_sgd" not in kernels(step)
    assert parted(step).graph == step.graph


def test_steps_without_updates_hand_gradients_out() -> None:
    """They are what the step is for."""
    model = perceptron()
    inputs = (torch.randn(3, 37), torch.randint(0, 5, (3,)))
    step = lower(model, torch.nn.functional.cross_entropy, inputs)
    assert "pm_mm_sgd" not in kernels(step)


QUICK: Final = {
    ("kept", "plain", perceptron),
    ("read in place", "decay", perceptron),
    ("in tiles", "plain", filters),
    ("read in place", "decay", filters),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("place", "rule", "model"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(PLACES, RULES, (perceptron, filters))
    ],
)
def test_state_has_the_bits_of_two_nodes(
    place: str, rule: str, model: Callable[[], torch.nn.Module], batch: int, tmp_path: Path
) -> None:
    """Wherever the weight is, in whatever blocks the gradient is summed."""
    needs(Target.HOST)
    step, inputs = captured(model(), batch, **RULES[rule])
    batches = batches_like(inputs, 3)
    data = b"".join(x.float().numpy().tobytes() + y.int().numpy().tobytes() for x, y in batches)
    options, settings = PLACES[place]
    states = []
    for name in ("two", "one"):
        if name == "two":
            export_step(parted(step), tmp_path / name, ram="100%", paging=False)
        else:
            export_step(step, tmp_path / name, gap=0.5, **options)
        program = build(tmp_path / name, Target.HOST, settings=settings if name == "one" else ())
        done = run(
            program, Target.HOST, tmp_path / name, inputs=data, steps=3, learning_rate=RATE
        ).require_success()
        states.append(done.state)
    source = (tmp_path / "one" / "src" / "pm_step.c").read_text(encoding="utf-8")
    assert "_sgd(" in source
    assert states[0] == states[1]
