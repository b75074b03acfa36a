"""Dropout: masks, values and gradients are those of eager, whatever its ratio and type."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.eager_steps import differing, keep_all  # noqa: E402
from kit.plans import random_program  # noqa: E402
from kit.rotation import rotating  # noqa: E402
from kit.traced_models import Through, recurrent  # noqa: E402
from poetmodel.torch import compile, trace  # noqa: E402
from poetmodel.torch.runtime.runner import Runner  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

nn = torch.nn
pytestmark = pytest.mark.torch

RATIOS = (0.0, *(k / 20 for k in range(1, 20)), 1.0)


def layers(p: float) -> Any:
    """Return a step of dropout between layers, and at the end."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.Linear(8, 8), nn.Dropout(p))
    return model, nn.functional.mse_loss, (torch.randn(16, 8), torch.randn(16, 8))


def low(p: float) -> Any:
    """Return the same with everything in bfloat16."""
    model, loss_fn, inputs = layers(p)
    return model.bfloat16(), loss_fn, tuple(tensor.bfloat16() for tensor in inputs)


def cast(p: float) -> Any:
    """Return the same with autocast inside of the model."""

    def forward(parts: Any, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return parts[0](x).float()

    model, loss_fn, inputs = layers(p)
    return Through(forward, model), loss_fn, inputs


def encoder(p: float) -> Any:
    """Return a step of a transformer's layer, with dropout of its attention."""
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=p, batch_first=True)
    return model, nn.functional.mse_loss, (torch.randn(2, 5, 8), torch.randn(2, 5, 8))


def low_encoder(p: float) -> Any:
    """Return the same in bfloat16."""
    model, loss_fn, inputs = encoder(p)
    return model.bfloat16(), loss_fn, tuple(tensor.bfloat16() for tensor in inputs)


def channels(p: float) -> Any:
    """Return a step of dropout in place, and of whole channels."""
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.Dropout(p, inplace=True), nn.Dropout2d(p), nn.FeatureAlphaDropout(p)
    )
    return model, nn.functional.mse_loss, (torch.randn(2, 4, 6, 6), torch.randn(2, 4, 4, 4))


KINDS = {f.__name__: f for f in (layers, low, cast, encoder, low_encoder, channels)}


def check(step: Any, folder: Path, plans: int) -> None:
    """Run random plans, which recompute and page, and compare each with eager."""
    traced = trace(*step, measure_workspace=False)
    flat = traced.joint.flat_inputs
    for seed in range(plans):
        plan = random_program(traced.graph, Random(seed), "blocking", page=0.3)  # noqa: S311
        runner = Runner(traced, plan, range(len(traced.parts.storages)), folder=folder)
        assert differing(lambda *given, r=runner: r(flat(given)), *step) == [], seed
        runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layers", "low", "cast"])
@pytest.mark.parametrize("p", rotating(RATIOS, (0.0, 0.1, 0.5, 1.0)))
def test_dropout_of_every_ratio_is_that_of_eager(p: float, kind: str, tmp_path: Path) -> None:
    """Loss, gradients and random state are equal in single and half precision, and autocast."""
    torch.manual_seed(1)
    check(KINDS[kind](p), tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["encoder", "low_encoder", "channels"])
@pytest.mark.parametrize("p", [0.1, 0.15, 0.45, 1.0])
def test_dropout_inside_of_layers_is_that_of_eager(p: float, kind: str, tmp_path: Path) -> None:
    """So is the dropout of transformers, in place, and of channels, recomputed and paged."""
    torch.manual_seed(1)
    check(KINDS[kind](p), tmp_path, 2)


@pytest.mark.parametrize("kind", ["layers", "low_encoder"])
def test_a_compiled_step_with_dropout_is_eager(kind: str, tmp_path: Path) -> None:
    """A solved schedule changes no bit, step after step."""
    torch.manual_seed(1)
    own = KINDS[kind](0.15)
    with compile(*own, ram="100%", storage=tmp_path, device="rpi4b", time_limit=5) as step:
        assert differing(step, *own) == []
        assert differing(step, *own) == []


@pytest.mark.parametrize("draw", ["dropout", "noise", "rrelu"])
def test_numbers_that_nobody_reads_are_drawn(draw: str) -> None:
    """As eager does: what is drawn after them is another number otherwise."""
    draws: dict[str, Any] = {
        "dropout": nn.functional.dropout,
        "noise": torch.randn_like,
        "rrelu": lambda x: nn.functional.rrelu(x, training=True),
    }

    def forward(parts: Any, x: Any) -> Any:
        x = parts[0](x)
        draws[draw](x)
        return nn.functional.dropout(x, 0.25)

    torch.manual_seed(1)
    model = Through(forward, nn.Linear(8, 8))
    own = model, nn.functional.mse_loss, (torch.randn(16, 8), torch.randn(16, 8))
    step = keep_all(*own)
    assert differing(step, *own) == []
    assert differing(step, *own) == []


def test_dropout_that_drops_nothing_copies_nothing() -> None:
    """In evaluation, and with p = 0, it is its input, whose strides decide the order of sums."""

    def forward(parts: Any, x: Any) -> Any:
        x = parts[0](x)[:, ::4]
        return nn.functional.gelu(parts[1](x)).mean((2, 3))

    torch.manual_seed(1)
    for dropout in (nn.Dropout(0.0), nn.Dropout(0.5).eval()):
        model = Through(forward, nn.Conv2d(4, 48, 1), dropout)
        own = model, nn.functional.mse_loss, (torch.randn(2, 4, 16, 16), torch.randn(2, 12))
        assert differing(keep_all(*own), *own) == []
        graph = trace(*own, measure_workspace=False).graph
        assert not any(node.op in ("clone", "native_dropout") for node in graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_dropout_between_recurrent_layers_is_drawn(kind: Any, p: float) -> None:
    """Recurrent layers draw eager's masks; results are equal but for the order of sums."""
    torch.manual_seed(1)
    model, loss_fn, _ = recurrent(kind(4, 4, 3, dropout=p, bidirectional=True, batch_first=True))
    own = model, loss_fn, (torch.randn(2, 3, 4), torch.randn(2, 3, 8))
    traced = trace(*own, measure_workspace=False)
    plan = random_program(traced.graph, Random(1), "blocking", page=0)  # noqa: S311
    runner = Runner(traced, plan, range(len(traced.parts.storages)))
    state = torch.get_rng_state()
    loss = loss_fn(model(own[2][0]), own[2][1])
    loss.backward()
    state_after = torch.get_rng_state()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    torch.set_rng_state(state)
    assert torch.allclose(runner(traced.joint.flat_inputs(own[2])), loss.detach(), atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state_after)
    for name, weight in model.named_parameters():
        assert torch.allclose(weight.grad, expected[name], atol=1e-6), name
