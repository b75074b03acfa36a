"""Random numbers in exported code: those that are documented, in each step others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.export_agreement import SCHEDULES, Exported, batches_like, torch_steps  # noqa: E402
from kit.export_agreement import lowered as lowered_step  # noqa: E402
from kit.kernel_calls import Lowered, built, lowered  # noqa: E402
from kit.programs import needs  # noqa: E402
from kit.random_masks import kept, normal, uniform, words  # noqa: E402
from poetmodel.export.board import Target  # noqa: E402
from poetmodel.torch.lowering.step import lower  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch
aten = torch.ops.aten


def ones(*shape: int) -> Any:
    """Return ones."""
    return torch.ones(shape, dtype=torch.float64)


def executed(operation: Lowered, *, step: int = 0) -> dict[int, Any]:
    """Return what an operation makes in a step."""
    built("pm_dropout").random_step.value = step
    return operation.execute()


def test_generator() -> None:
    """The reference gives the first known answers of Random123 for Philox 4x32-10."""
    found = [f"{word:08x}" for word in words(0, 0, 4)]
    assert found == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


@pytest.mark.parametrize("step", [0, 1, 77])
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_masks(ratio: float, step: int) -> None:
    """A mask is that of the documented generator; what stays is scaled up."""
    x = torch.arange(1.0, 1003.0, dtype=torch.float64)
    out, mask = executed(lowered(aten.native_dropout.default, x, ratio, True), step=step).values()
    want = torch.from_numpy(kept(step, 0, len(x), ratio))
    assert torch.equal(mask.bool(), want)
    torch.testing.assert_close(out, x * want / (1 - ratio), rtol=1e-15, atol=0)
    assert abs(want.double().mean() - (1 - ratio)) < 0.05


def test_masks_differ_between_steps_only() -> None:
    """Computed again, a mask is the same; in another step it is another one."""
    operation = lowered(aten.native_dropout.default, ones(100), 0.5, True)
    first, again, other = (executed(operation, step=step)[1] for step in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_sites_differ() -> None:
    """Each random operator of a step has numbers of its own, in their order."""
    layers = [
        torch.nn.Linear(4, 4),
        torch.nn.Dropout(),
        torch.nn.Linear(4, 4),
        torch.nn.Dropout(0.2),
    ]
    loss = torch.nn.functional.mse_loss
    step = lower(torch.nn.Sequential(*layers), loss, (torch.ones(3, 4), torch.ones(3, 4)))
    calls = [call for made in step.calls for call in made]
    drawn = [call.arguments[2:] for call in calls if call.kernel == "pm_dropout_bits"]
    assert drawn == [(0, 2**23), (1, round(0.2 * 2**24))]
    factors = [call.arguments[-1] for call in calls if call.kernel == "pm_bits_scale"]
    assert sorted(factors) == [1.25, 1.25, 2.0, 2.0]


class Masked(torch.nn.Module):
    """Dropout by masks that are given, those of exported code; each call is a step."""

    def __init__(self, site: int, dropped_ratio: float) -> None:
        super().__init__()
        self.site, self.dropped_ratio, self.step = site, dropped_ratio, 0

    def forward(self, x: Any) -> Any:
        """Multiply by the mask of the step."""
        mask = torch.from_numpy(kept(self.step, self.site, x.numel(), self.dropped_ratio))
        self.step += 1
        return x * mask.view(x.shape) / (1 - self.dropped_ratio)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["keep-all", "recomputed"])
def test_training_with_dropout(schedule: str, tmp_path: Path) -> None:
    """Exported, a network with dropout trains as PyTorch does with the documented masks."""
    needs(Target.HOST_DOUBLE)
    torch.manual_seed(0)
    first, second = torch.nn.Linear(5, 80), torch.nn.Linear(80, 3)
    drops = torch.nn.Dropout(0.4), torch.nn.Dropout(0.2)
    loss, inputs = torch.nn.functional.mse_loss, (torch.randn(6, 5), torch.randn(6, 3))
    model = torch.nn.Sequential(first, drops[0], second, drops[1])
    twin = torch.nn.Sequential(first, Masked(0, 0.4), second, Masked(1, 0.2))
    batches = batches_like(inputs, 2)
    expected = torch_steps((twin, loss, inputs), batches, 4, "momentum")
    step = lowered_step((model, loss, inputs), "momentum")
    exported = Exported(step, tmp_path, **SCHEDULES[schedule])
    apart = exported.outcome(batches, 4).differences(expected)
    assert max(apart.values()) <= 1e-12, apart
    assert bool(exported.ops["again"]) == (schedule == "recomputed")


def test_all_or_nothing() -> None:
    """Ratio 1 drops all, ratio 0 nothing, and so does evaluation."""
    for ratio, train, value in ((1.0, True, 0), (0.0, True, 1), (0.5, False, 1)):
        out, mask = executed(lowered(aten.native_dropout.default, ones(9), ratio, train)).values()
        assert torch.equal(out, value * ones(9))
        assert torch.equal(mask.double(), value * ones(9))


def test_permuted() -> None:
    """A permuted tensor is dropped where its output lies."""
    x = ones(5, 7).t()
    out, mask = executed(lowered(aten.native_dropout.default, x, 0.5, True)).values()
    assert torch.equal(mask.t().reshape(-1).bool(), torch.from_numpy(kept(0, 0, 35, 0.5)))
    assert torch.equal(out, 2 * mask.double())


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_in_place(ratio: float) -> None:
    """The result may lie where the operand lay."""
    operation = lowered(aten.native_dropout.default, ones(9), ratio, True, in_place_of=0)
    assert operation.operation.elementwise
    out, mask = executed(operation).values()
    assert torch.equal(out, mask / (1 - ratio))


def test_bernoulli() -> None:
    """Draws of 0 and 1, as dropout of whole channels has them."""
    found = lowered(aten.bernoulli.p, ones(2, 500), 0.3).execute()[0]
    want = torch.from_numpy(kept(0, 0, 1000, 0.7)).view(2, 500)
    assert torch.equal(found, want.double())


@pytest.mark.parametrize("count", [1, 6, 7, 20001])
def test_normal_and_uniform_numbers(count: int) -> None:
    """They are those of the documented generator, and have its mean and its variance."""
    like, step = torch.empty(count, dtype=torch.float64), 5
    for operator, reference in (
        (aten.randn_like.default, normal),
        (aten.rand_like.default, uniform),
    ):
        operation = lowered(operator, like)
        built(operation.operation.calls[0].kernel).random_step.value = step
        found, want = operation.execute()[0], torch.from_numpy(reference(step, 0, count))
        torch.testing.assert_close(found, want, rtol=1e-14, atol=1e-15)
        if count > 20000:
            centre, deviation = (0, 1) if operator is aten.randn_like.default else (0.5, 12**-0.5)
            assert abs(found.mean() - centre) < 0.02
            assert abs(found.std() - deviation) < 0.02


@pytest.mark.parametrize("shape", [(3, 4), (4, 3)])
def test_scaled_and_shifted_numbers(shape: tuple[int, int]) -> None:
    """A mean and a deviation may be numbers or tensors."""
    torch.manual_seed(0)
    a, b = torch.randn(shape, dtype=torch.float64), torch.rand(shape, dtype=torch.float64)
    z = torch.from_numpy(normal(0, 0, a.numel())).view(shape)
    u = torch.from_numpy(uniform(0, 0, a.numel())).view(shape)
    for operator, arguments, want in (
        (aten.normal.Tensor_float, (a, 2.0), a + 2 * z),
        (aten.normal.float_Tensor, (2.0, b), 2 + b * z),
        (aten.normal.Tensor_Tensor, (a, b), a + b * z),
        (aten.normal_functional.default, (a, 3.0, 2.0), 3 + 2 * z),
        (aten.uniform.default, (a, -1.0, 3.0), 4 * u - 1),
    ):
        operation = lowered(operator, *arguments)
        built(operation.operation.calls[0].kernel).random_step.value = 0
        torch.testing.assert_close(operation.execute()[0], want, rtol=1e-13, atol=1e-13)


class Variational(torch.nn.Module):
    """An autoencoder with noise between its halves; `draw` makes that of a shape."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.mean, self.spread = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
        self.decoder, self.draw = torch.nn.Linear(3, 6), draw

    def forward(self, x: Any) -> Any:
        """Return the loss: what is not rebuilt, and the divergence from the normal distribution."""
        mean, spread = self.mean(x), self.spread(x)
        rebuilt = self.decoder(mean + self.draw(spread) * (0.5 * spread).exp())
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum()
        return torch.nn.functional.mse_loss(rebuilt, x, reduction="sum") + divergence


@pytest.mark.parametrize(
    ("target", "within"),
    [(Target.HOST_DOUBLE, 1e-12), pytest.param(Target.HOST, 1e-5, marks=pytest.mark.slow)],
)
def test_training_with_noise(target: Target, within: float, tmp_path: Path) -> None:
    """A variational autoencoder trains as PyTorch does with the documented noise."""
    needs(target)
    torch.manual_seed(0)
    ours, steps = Variational(torch.randn_like), iter(range(9))
    twin = Variational(
        lambda like: torch.from_numpy(normal(next(steps), 0, like.numel())).view(like.shape)
    )
    twin.load_state_dict(ours.state_dict())
    inputs = (torch.randn(5, 6),)
    batches = batches_like(inputs, 2)
    twin.__deepcopy__ = lambda _: twin  # its noise goes on from step to step
    expected = torch_steps((twin, None, inputs), batches, 4, "momentum")
    exported = Exported(lowered_step((ours, None, inputs), "momentum"), tmp_path)
    apart = exported.outcome(batches, 4, target=target).differences(expected)
    assert max(apart.values()) <= within, apart
