"""Compiled steps with an optimizer: budget, bits, what is left behind, and what is refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.networks import residual_step, transformer_step  # noqa: E402
from kit.optimizer_steps import OPTIMIZERS, Twins  # noqa: E402
from kit.rotation import quick  # noqa: E402
from kit.traced_models import residual  # noqa: E402
from poetmodel.errors import BudgetError  # noqa: E402
from poetmodel.report.facts import facts as page_facts  # noqa: E402
from poetmodel.report.step_file import step_subject  # noqa: E402
from poetmodel.torch import PageError, Step, compile  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

nn = torch.nn
pytestmark = pytest.mark.torch


def compiled(twins: Twins, **options: Any) -> Step:
    """Return a step that is compiled with the optimizer of the model."""
    options = {"device": "rpi4b", "time_limit": 10, "ram": "100%"} | options
    return compile(
        twins.model, twins.loss_fn, twins.inputs,
        optimizer=twins.optimizers[0], clip_grad_norm=twins.clip, **options,
    )  # fmt: skip


def large(name: str, clip: float | None = None) -> Twins:
    """Return a step whose activations take more than its state and workspaces."""
    torch.manual_seed(1)
    return Twins(residual_step(batch=16, size=16), OPTIMIZERS[name], clip=clip)


def trained(twins: Twins, step: Step, steps: int = 3) -> list[str]:
    """Return what is not eager's after some steps of training."""
    return twins.differing(step.compiled.trace, lambda _: step(*twins.inputs), steps)


WAYS: dict[str, dict[str, Any]] = {
    "everything": {},
    "recomputing": {"ram": "80%"},
    "paging": {"ram": "60%", "recompute": False, "storage": "pages"},
    "both": {"ram": "55%", "storage": "pages"},
    "background": {"ram": "60%", "recompute": False, "storage": "pages", "background_io": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_steps_keep_the_budget_and_are_eagers(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured memory is within a budget that counts everything; every step is eager's."""
    monkeypatch.chdir(tmp_path)
    twins = large(name, clip=0.5)
    with compiled(twins, **WAYS[way]) as step:
        certificate = step.verify()
        assert certificate.equal, certificate.summary()
        assert certificate.within_budget, certificate.summary()
        assert certificate.heap_peak_bytes <= step.compiled.peak_bytes
        assert "(loss, parameters, optimizer state, buffers)" in certificate.summary()
        program = step.plan.program
        assert ("paging" in way or way in ("both", "background")) == bool(certificate.written_bytes)
        nodes = len(step.compiled.coarse.graph.nodes)
        recomputed = sum(op == "compute" for op, _ in program) - nodes
        assert step.report()["plan"]["recomputed"] == recomputed
        assert recomputed > 0 or way != "recomputing"
        assert not trained(twins, step)


def test_tied_weights_and_dropout_train_as_eager() -> None:
    """So does a transformer with a tied weight, by costs that are measured here."""
    torch.manual_seed(1)
    twins = Twins(transformer_step(), OPTIMIZERS["adam"])
    step = compiled(twins, device=None)
    assert step.verify().equal
    assert not trained(twins, step)


@pytest.mark.parametrize("name", ["nesterov", "adamw", "rmsprop"])
def test_numbers_that_updates_multiply_with_count(name: str) -> None:
    """Where the update of the largest parameter is the peak, it is kept to the byte."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    own = model, nn.functional.mse_loss, (torch.randn(4, 16), torch.randn(4, 4))
    step = compiled(Twins(own, OPTIMIZERS[name]))
    assert step.verify().heap_peak_bytes <= step.compiled.peak_bytes == step.budget_bytes


def test_the_mask_of_dropout_counts_in_the_type_of_the_gradient() -> None:
    """It is multiplied with where the gradient lies, in place."""
    torch.manual_seed(1)
    layers = [layer for _ in range(4) for layer in (nn.Tanh(), nn.Dropout(0.5))]
    own = nn.Sequential(nn.Linear(8, 8), *layers), lambda y, _: (y**3).sum(), None
    inputs = (torch.randn(512, 8), torch.zeros(()))
    twins = Twins((*own[:2], inputs), OPTIMIZERS["sgd"])
    nodes = twins.trace().graph.nodes
    backward = [node for node in nodes if node.op == "native_dropout_backward"]
    assert any(node.in_place for node in backward)
    for node in backward:
        if node.in_place:
            assert node.workspace_bytes >= node.output_bytes
    step = compiled(twins)
    assert step.verify().heap_peak_bytes <= step.compiled.peak_bytes


def test_the_budget_counts_state_and_inputs() -> None:
    """A moment more takes as much more; a budget without room for state says what takes it."""
    sizes = {}
    for name in ("sgd", "momentum"):
        twins = Twins(residual(), OPTIMIZERS[name])
        sizes[name] = compiled(twins).compiled.keep_all_bytes
    parameters = sum(p.nbytes for p in twins.model.parameters())
    assert sizes["momentum"] - sizes["sgd"] == parameters
    with pytest.raises(BudgetError, match="parameters, buffers, and what the optimizer keeps"):
        compiled(large("momentum"), ram=50_000)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_compiling_and_verifying_leave_everything_as_it_was(name: str) -> None:
    """Parameters, buffers, moments, gradients and the random state are as before."""
    twins = Twins(residual(), OPTIMIZERS[name])
    model, optimizer = twins.model, twins.optimizers[0]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    step = compiled(twins)
    step.verify()
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    step(*twins.inputs)
    held = {
        (id(p), key): value.clone()
        for p, moments in optimizer.state.items()
        for key, value in moments.items()
    }
    assert held
    gradient = next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    assert step.verify().equal
    assert next(model.parameters()).grad is gradient
    for p, moments in optimizer.state.items():
        assert all(torch.equal(held[id(p), key], value) for key, value in moments.items())


def test_other_shapes_train_on() -> None:
    """With dynamic='retrace' the optimizer goes on with batches of another size."""
    torch.manual_seed(1)
    twins = Twins(residual(), OPTIMIZERS["adam"])
    step = compiled(twins, dynamic="retrace")
    assert not trained(twins, step, steps=2)
    twins.inputs = (torch.randn(3, 3, 4, 4), torch.tensor([0, 2, 1]))
    assert not trained(twins, step, steps=2)


def test_a_lost_page_says_that_updates_may_be_torn(tmp_path: Path) -> None:
    """The error of a step that stops in the middle says that parameters may be new already."""
    twins = large("momentum")
    with compiled(twins, **WAYS["paging"] | {"storage": tmp_path}) as step:
        file = step.compiled.runner.file
        assert file is not None
        os.truncate(file.path, 100)
        with pytest.raises(PageError):
            step(*twins.inputs)
        assert not trained(twins, step)  # with a new file; nothing had been done


@pytest.mark.parametrize("minimize", quick(["writes", "ram", "energy"], ["writes"]))
def test_all_state_is_in_ram_whatever_is_minimized(minimize: str, tmp_path: Path) -> None:
    """A home on storage costs no byte written where state is reserved; it is RAM all the same."""
    twins = Twins(residual(), OPTIMIZERS["momentum"])
    with compiled(twins, minimize=minimize, storage=tmp_path) as step:
        assert step.plan.resident == step.compiled.coarse.graph.state_tensors
        assert not trained(twins, step)


def test_reports_hold_steps_with_updates() -> None:
    """The file of such a step is read again, with its certificate, and its schedule verified."""
    twins = Twins(residual(), OPTIMIZERS["adamw"], clip=1.0)
    step = compiled(twins)
    step.verify()
    found = step.report()
    assert found["certificate"]["updates"]
    assert "optimizer=optimizer, clip_grad_norm=1.0" in found["call"]
    answers = page_facts(step_subject(found, source="step"))["step"]
    assert answers == {k: v for k, v in found.items() if k not in ("result", "scheduled")}
