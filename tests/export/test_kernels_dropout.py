"""Random numbers in exported code: those that are documented, in each step others."""

import pytest
import torch

from kit.export_agreement import SCHEDULES, Exported, make_batches_like, train_in_torch
from kit.export_agreement import lower_training as lowered_step
from kit.kernel_calls import build_kernel, lower_operation
from kit.programs import require_programs, run_command
from kit.random_masks import draw_mask, draw_normal, draw_uniform, draw_words
from kit.traced_models import FunctionModule
from poetmodel.export.board import Target
from poetmodel.export.exporting import export_step
from poetmodel.torch.lowering.step import lower

aten = torch.ops.aten


def ones(*shape):
    """Return ones."""
    return torch.ones(shape, dtype=torch.float64)


def executed(operation, *, step=0):
    """Return the result of an operation in a step."""
    build_kernel("pm_dropout").random_step.value = step
    return operation.execute()


def test_generator():
    """The reference has the first known results of Random123 for Philox 4x32-10."""
    found = [f"{word:08x}" for word in draw_words(0, 0, 4)]
    assert found == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


@pytest.mark.parametrize("step", [0, 1, 77])
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_masks(ratio, step):
    """A mask is that of the documented generator, in each step another; the rest is scaled up."""
    x = torch.arange(1.0, 1003.0, dtype=torch.float64)
    out, mask = executed(
        lower_operation(aten.native_dropout.default, x, ratio, True), step=step
    ).values()
    want = torch.from_numpy(draw_mask(step, 0, len(x), ratio))
    assert torch.equal(mask.bool(), want)
    torch.testing.assert_close(out, x * want / (1 - ratio), rtol=1e-15, atol=0)
    assert abs(want.double().mean() - (1 - ratio)) < 0.05


def test_sites_differ():
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


def masked(site, dropped_ratio):
    """Return dropout by given masks, those of exported code; each call is a step."""
    steps = iter(range(9))

    def drop(_, x):
        mask = torch.from_numpy(draw_mask(next(steps), site, x.numel(), dropped_ratio))
        return x * mask.view(x.shape) / (1 - dropped_ratio)

    return FunctionModule(drop)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["keep-all", "recomputed"])
def test_training_with_dropout(schedule, tmp_path):
    """An exported network with dropout trains as PyTorch with the documented masks."""
    require_programs(Target.HOST_DOUBLE)
    torch.manual_seed(0)
    first, second = torch.nn.Linear(5, 80), torch.nn.Linear(80, 3)
    drops = torch.nn.Dropout(0.4), torch.nn.Dropout(0.2)
    loss, inputs = torch.nn.functional.mse_loss, (torch.randn(6, 5), torch.randn(6, 3))
    model = torch.nn.Sequential(first, drops[0], second, drops[1])
    twin = torch.nn.Sequential(first, masked(0, 0.4), second, masked(1, 0.2))
    batches = make_batches_like(inputs, 2)
    expected = train_in_torch((twin, loss, inputs), batches, 4, "momentum")
    step = lowered_step((model, loss, inputs), "momentum")
    exported = Exported(step, tmp_path, **SCHEDULES[schedule])
    apart = exported.outcome(batches, 4).differences(expected)
    assert max(apart.values()) <= 1e-12, apart
    assert bool(exported.ops["again"]) == (schedule == "recomputed")


AGAIN = """\
#include <stdio.h>
#include "pm.h"

int main(void)
{
    pm_real x[64], target[64] = {0}, loss;
    const void *const inputs[] = {x, target};
    for (int k = 0; k < 64; k++) x[k] = 1;
    for (int start = 0; start < 2; start++) {
        if (pm_init()) return 1;
        for (int step = 0; step < 3; step++) {
            if (pm_step(inputs, (pm_real)0.1, &loss)) return 2;
            printf("%.9g ", (double)loss);
        }
    }
    return 0;
}
"""


def test_a_second_start_draws_the_masks_of_the_first(tmp_path):
    """Without commits, too, numbers begin with those of step 0: its losses are the same."""
    require_programs("cc")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5))
    inputs = (torch.ones(1, 64), torch.zeros(1, 64))
    step = lower(model, torch.nn.functional.mse_loss, inputs)
    export_step(step, tmp_path, gap=0.5, ram="150%")
    (tmp_path / "again.c").write_text(AGAIN, encoding="utf-8")
    parts = [*sorted(tmp_path.glob("src/*.c")), "port/driver_ram.c", "again.c", "-lm"]
    run_command(["cc", "-std=c11", "-I.", "-Iinclude", *parts, "-o", "again"], tmp_path)
    losses = run_command(["./again"], tmp_path).split()
    assert losses[:3] == losses[3:]
    assert len(set(losses)) == 3


def test_all_or_nothing():
    """Ratio 1 drops all, ratio 0 and evaluation none; permuted, or drawn as numbers."""
    for ratio, train, value in ((1.0, True, 0), (0.0, True, 1), (0.5, False, 1)):
        out, mask = executed(
            lower_operation(aten.native_dropout.default, ones(9), ratio, train)
        ).values()
        assert torch.equal(out, value * ones(9))
        assert torch.equal(mask.double(), value * ones(9))
    x = ones(5, 7).t()
    out, mask = executed(lower_operation(aten.native_dropout.default, x, 0.5, True)).values()
    assert torch.equal(mask.t().reshape(-1).bool(), torch.from_numpy(draw_mask(0, 0, 35, 0.5)))
    assert torch.equal(out, 2 * mask.double())
    for shape in ((2, 500), (3, 7)):
        found = lower_operation(aten.bernoulli.p, ones(*shape), 0.3).execute()[0]
        want = torch.from_numpy(draw_mask(0, 0, found.numel(), 0.7)).view(shape)
        assert torch.equal(found, want.double())


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_in_place(ratio):
    """The result may lie where the operand lay."""
    operation = lower_operation(aten.native_dropout.default, ones(9), ratio, True, in_place_of=0)
    assert operation.operation.can_overwrite_operand
    out, mask = executed(operation).values()
    assert torch.equal(out, mask / (1 - ratio))


@pytest.mark.parametrize("count", [1, 6, 7, 20001])
def test_normal_and_uniform_numbers(count):
    """They are those of the documented generator, and have its mean and its variance."""
    like, step = torch.empty(count, dtype=torch.float64), 5
    for operator, reference in (
        (aten.randn_like.default, draw_normal),
        (aten.rand_like.default, draw_uniform),
    ):
        operation = lower_operation(operator, like)
        build_kernel(operation.operation.calls[0].kernel).random_step.value = step
        found, want = operation.execute()[0], torch.from_numpy(reference(step, 0, count))
        torch.testing.assert_close(found, want, rtol=1e-14, atol=1e-15)
        if count > 20000:
            centre, deviation = (0, 1) if operator is aten.randn_like.default else (0.5, 12**-0.5)
            assert abs(found.mean() - centre) < 0.02
            assert abs(found.std() - deviation) < 0.02


@pytest.mark.parametrize("shape", [(3, 4), (4, 3)])
def test_scaled_and_shifted_numbers(shape):
    """A mean and a deviation may be numbers or tensors."""
    torch.manual_seed(0)
    a, b = torch.randn(shape, dtype=torch.float64), torch.rand(shape, dtype=torch.float64)
    z = torch.from_numpy(draw_normal(0, 0, a.numel())).view(shape)
    u = torch.from_numpy(draw_uniform(0, 0, a.numel())).view(shape)
    for operator, arguments, want in (
        (aten.normal.Tensor_float, (a, 2.0), a + 2 * z),
        (aten.normal.float_Tensor, (2.0, b), 2 + b * z),
        (aten.normal.Tensor_Tensor, (a, b), a + b * z),
        (aten.normal_functional.default, (a, 3.0, 2.0), 3 + 2 * z),
        (aten.uniform.default, (a, -1.0, 3.0), 4 * u - 1),
    ):
        operation = lower_operation(operator, *arguments)
        build_kernel(operation.operation.calls[0].kernel).random_step.value = 0
        torch.testing.assert_close(operation.execute()[0], want, rtol=1e-13, atol=1e-13)


def variational(draw):
    """Return the loss of an autoencoder with noise between its halves; `draw` makes that."""

    def loss(own, x):
        mean, spread = own.mean(x), own.spread(x)
        rebuilt = own.decoder(mean + draw(spread) * (0.5 * spread).exp())
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum()
        return torch.nn.functional.mse_loss(rebuilt, x, reduction="sum") + divergence

    halves = {"mean": torch.nn.Linear(6, 3), "spread": torch.nn.Linear(6, 3)}
    return FunctionModule(loss, **halves, decoder=torch.nn.Linear(3, 6))


@pytest.mark.parametrize(
    ("target", "within"),
    [(Target.HOST_DOUBLE, 1e-12), pytest.param(Target.HOST, 1e-5, marks=pytest.mark.slow)],
)
def test_training_with_noise(target, within, tmp_path):
    """A variational autoencoder trains as PyTorch with the documented noise."""
    require_programs(target)
    torch.manual_seed(0)
    ours, steps = variational(torch.randn_like), iter(range(9))
    twin = variational(
        lambda like: torch.from_numpy(draw_normal(next(steps), 0, like.numel())).view(like.shape)
    )
    twin.load_state_dict(ours.state_dict())
    inputs = (torch.randn(5, 6),)
    batches = make_batches_like(inputs, 2)
    expected = train_in_torch((twin, None, inputs), batches, 4, "momentum")
    exported = Exported(lowered_step((ours, None, inputs), "momentum"), tmp_path)
    apart = exported.outcome(batches, 4, target=target).differences(expected)
    assert max(apart.values()) <= within, apart
