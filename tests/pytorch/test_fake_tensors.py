"""Captures see the layouts of real kernels."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.rotation import rotating  # noqa: E402
from kit.traced_models import Through  # noqa: E402
from kit.traced_steps import run_eager, run_units  # noqa: E402
from poetmodel.torch import capture, trace  # noqa: E402
from poetmodel.torch.capturing.replay import call, replay, tensors_in  # noqa: E402
from poetmodel.torch.capturing.surroundings import fake_mode  # noqa: E402
from poetmodel.torch.capturing.values import KnownValues  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.torch import Joint

nn = torch.nn
pytestmark = pytest.mark.torch


functional = nn.functional


def mistaken(joint: Joint) -> list[str]:
    """Return the operations whose outputs lie otherwise than the capture says."""
    found = []

    def execute(node: Any, arguments: Any, keywords: Any) -> Any:
        value = call(node, arguments, keywords)
        pairs = zip(tensors_in(node.meta.get("val", value)), tensors_in(value), strict=True)
        if any(one.stride() != other.stride() for one, other in pairs):
            found.append(node.name)
        return value

    replay(joint, execute)
    return found


def check(own: Any) -> None:
    """Assert that a capture has real strides and that replaying it gives eager's bits."""
    state = torch.get_rng_state()
    expected = run_eager(*own)
    torch.set_rng_state(state)
    traced = trace(*own, measure_workspace=False)
    found = run_units(traced)
    assert mistaken(traced.joint) == []
    assert all(torch.equal(value, found[key]) for key, value in expected.items() if key in found)
    assert {key for key in expected if key.startswith("gradient")} <= found.keys()


def tokens(x: Any) -> Any:
    """Go to tokens and back."""
    return (
        x.flatten(2)
        .transpose(1, 2)
        .reshape(len(x), -1, x.shape[1])
        .transpose(1, 2)
        .reshape(x.shape)
    )


def attention(x: Any) -> Any:
    """Attend among the pixels."""
    heads = x.flatten(2).transpose(1, 2).unflatten(2, (2, -1)).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(heads, heads, heads)
    return mixed.transpose(1, 2).flatten(2).transpose(1, 2).reshape(x.shape)


def assigned(x: Any) -> Any:
    """Assign parts in place."""
    y = x.clone()
    y[:, 1] = x[:, 0] * 2
    y[:, :, 1:3].mul_(0.5)
    return y


LAYOUTS: tuple[Callable[[Any], Any], ...] = (
    lambda x: x.contiguous(memory_format=torch.channels_last),
    lambda x: x.contiguous(),
    lambda x: x.transpose(2, 3),
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    lambda x: x.reshape(len(x), -1).reshape(x.shape),
    lambda x: x[:, :, ::2].repeat_interleave(2, 2),
    lambda x: x.contiguous().as_strided(x.shape, (144, 1, 24, 4)),
    lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    lambda x: torch.einsum("bchw->bwhc", x).permute(0, 3, 2, 1),
    lambda x: x + x.mean((2, 3), keepdim=True).expand_as(x),
    lambda x: (x * 1).add_(x.transpose(2, 3)),
    lambda x: torch.empty_like(x, memory_format=torch.channels_last).copy_(x),
    lambda x: x.double().contiguous(memory_format=torch.channels_last).float(),
    lambda x: functional.interpolate(functional.max_pool2d(x, 2), scale_factor=2),
    lambda x: functional.interpolate(functional.avg_pool2d(x, 2), scale_factor=2, mode="bilinear"),
    tokens,
    attention,
    assigned,
)
"""What changes how images of 4 channels, 6 x 6, lie in memory."""

PARTS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.BatchNorm2d(4),
    lambda: nn.LayerNorm([4, 6, 6]),
    lambda: nn.Conv2d(4, 4, 3, padding=1),
    lambda: nn.ConvTranspose2d(4, 4, 3, padding=1),
    lambda: nn.Linear(6, 6),
    lambda: nn.Dropout(0.3),
)
"""What is computed with them."""

LOSSES: tuple[Callable[[Any, Any], Any], ...] = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.soft_margin_loss,
    functional.binary_cross_entropy_with_logits,
    lambda y, t: functional.cross_entropy(y, t[:, 0].abs().long() % 4),
    lambda y, t: functional.kl_div(functional.log_softmax(y, 1), t.softmax(1)),
)


class Mixed(nn.Module):
    """A convolution, and layers between changes of layout."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.parts = nn.ModuleList(draw.choice(PARTS)() for _ in range(3))
        self.changes = [draw.choice(LAYOUTS) for _ in self.parts]
        self.residual = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the images."""
        y = start = self.first(x)
        for part, change in zip(self.parts, self.changes, strict=True):
            y = part(change(y))
        return y + start if self.residual else y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("seed", rotating(range(30), range(2)))
def test_any_mix_of_layouts_is_captured_as_eager_runs_it(seed: int) -> None:
    """Views, copies, layers and losses drawn at random: strides are real, results equal."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    torch.manual_seed(seed)
    x, t = (
        torch.randn(2, width, 6, 6).to(
            memory_format=draw.choice([torch.channels_last, torch.contiguous_format])
        )
        for width in (3, 4)
    )
    check((Mixed(draw), draw.choice(LOSSES), (x, t)))


def normalized_tokens(parts: Any, r: Any) -> Any:
    """Normalize pixels, mix channels, and add the images."""
    b, c, h, w = r.shape
    y = parts[1](parts[0](r.view(b, c, h * w)).transpose(1, 2))
    return y.transpose(1, 2).reshape(b, c, h, w) + r


def test_a_view_of_a_gradient_fits() -> None:
    """The gradient of the loss is contiguous, whatever layout is predicted for it."""
    model = Through(normalized_tokens, nn.GroupNorm(2, 8), nn.Linear(8, 8))
    check((model, functional.mse_loss, (torch.randn(2, 8, 6, 6), torch.randn(2, 8, 6, 6))))


def test_bias_gradients_are_summed_in_the_order_of_eager() -> None:
    """The gradient of an upsampling of images in channels-last is in channels-last too."""

    def up(parts: Any, x: Any) -> Any:
        y = parts[0](x)
        y = parts[1](y.contiguous(memory_format=torch.channels_last)) + y
        return parts[2](functional.interpolate(y, scale_factor=2.0, mode="nearest"))

    torch.manual_seed(3)
    convolutions = [nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 3)]
    model = Through(up, *convolutions)
    check((model, functional.mse_loss, (torch.randn(4, 8, 16, 16), torch.randn(4, 3, 30, 30))))


def test_random_generators_stay_where_they_are() -> None:
    """Operations that draw run on zeros without moving the generator; generators move nothing."""
    own = torch.Generator().manual_seed(1)
    states = torch.get_rng_state(), own.get_state()
    with fake_mode(KnownValues(), mkldnn=True):
        torch.rand_like(torch.empty(3, 4))
        torch.rand(3, 4, generator=own)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(own.get_state(), states[1])


def test_operations_that_fail_on_zeros_keep_the_predicted_strides() -> None:
    """Nothing can be drawn where all weights are zero, and that is captured all the same."""

    def drawn(parts: Any, x: Any) -> Any:
        return parts[0](x).gather(1, torch.multinomial(x.abs() + 1, 2))

    own = Through(drawn, nn.Linear(4, 4)), functional.mse_loss, (torch.ones(3, 4), torch.ones(3, 2))
    assert mistaken(capture(*own)) == []
    check(own)
