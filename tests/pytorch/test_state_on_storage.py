"""Steps whose state lies on storage: eager's bits, the budget, and failures that change nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.networks import residual_step  # noqa: E402
from kit.optimizer_steps import OPTIMIZERS, Twins  # noqa: E402
from kit.rotation import quick, rotating  # noqa: E402
from poetmodel.errors import BudgetError  # noqa: E402
from poetmodel.heuristics.greedy import page_everything  # noqa: E402
from poetmodel.torch import PageError, Step, compile  # noqa: E402
from poetmodel.torch.state.file import StateFile  # noqa: E402
from poetmodel.torch.step.trace import least_bytes  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

nn = torch.nn
pytestmark = pytest.mark.torch


def perceptron() -> Any:
    """Return a step whose state takes much more than its activations."""
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)]
    layers += [nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    inputs = (torch.randn(4, 32), torch.randint(0, 10, (4,)))
    return nn.Sequential(*layers), nn.functional.cross_entropy, inputs


def convolutions() -> Any:
    """Return a step with batch norm and dropout."""
    return residual_step(widths=(16, 32), batch=2)


class Tied(nn.Module):
    """An embedding that is the classifier's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(80, 24)
        self.between = nn.Linear(24, 24)
        self.frozen = nn.Linear(24, 96).requires_grad_(False)
        self.back = nn.Linear(96, 24)
        self.last = nn.Linear(24, 80, bias=False)
        self.last.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of the next word."""
        y = torch.relu(self.between(self.words(x)))
        return self.last(y + self.back(torch.relu(self.frozen(y)))).flatten(0, 1)


def tied() -> Any:
    """Return a step of a small language model with a frozen layer."""
    words = torch.randint(0, 80, (2, 5))
    return Tied(), nn.functional.cross_entropy, (words, words.flatten())


NETWORKS: dict[str, tuple[Callable[[], Any], str]] = {
    "perceptron": (perceptron, "55%"),
    "convolutions": (convolutions, "58%"),
    "tied": (tied, "68%"),
}
"""Steps, and a budget below what parameters and moments of Adam take."""


def twins_of(network: str, optimizer: str = "adamw", clip: float | None = None) -> Twins:
    """Return a step and the same one as PyTorch does it."""
    torch.manual_seed(1)
    return Twins(NETWORKS[network][0](), OPTIMIZERS[optimizer], clip=clip)


def compiled(twins: Twins, folder: Path, ram: str | int, **options: Any) -> Step:
    """Return a step that is compiled with the optimizer and a folder."""
    options = {"device": "rpi4b", "time_limit": 2} | options
    return compile(
        twins.model, twins.loss_fn, twins.inputs,
        optimizer=twins.optimizers[0], clip_grad_norm=twins.clip,
        ram=ram, storage=folder, **options,
    )  # fmt: skip


def differing(twins: Twins, step: Step, steps: int) -> list[str]:
    """Return what is not eager's after some steps of training."""
    return twins.differing(step.compiled.trace, lambda _: step(*twins.inputs), steps)


def on_storage(step: Step) -> set[str]:
    """Return the names of state that has its home on storage."""
    graph = step.compiled.coarse.graph
    away = set(graph.state_tensors).difference(step.plan.resident or ())
    return {graph.tensors[i].name for i in away}


@pytest.mark.slow
@pytest.mark.parametrize("background_io", [False, True])
@pytest.mark.parametrize("network", rotating(NETWORKS, ("perceptron",)))
def test_steps_below_the_size_of_state_are_eagers(
    network: str, background_io: bool, tmp_path: Path
) -> None:
    """With a budget below parameters and moments 20 steps are eager's, and memory is within it."""
    twins = twins_of(network)
    ram = NETWORKS[network][1]
    with compiled(twins, tmp_path, ram, background_io=background_io) as step:
        assert on_storage(step)
        assert step.budget_bytes < step.compiled.trace.graph.state_bytes
        assert not differing(twins, step, 20)
        certificate = step.verify()
        assert certificate.equal, certificate.summary()
        assert certificate.within_budget, certificate.summary()
        assert certificate.heap_peak_bytes <= step.compiled.peak_bytes
        assert certificate.written_bytes == certificate.plan_written_bytes > 0
        assert certificate.read_bytes == certificate.plan_read_bytes > 0
        assert not differing(twins, step, 1)
    assert not list(tmp_path.iterdir())
    assert not differing_now(twins)


def differing_now(twins: Twins) -> list[str]:
    """Return what is not eager's now."""
    return [name for name, *both in twins._state() if not torch.equal(*both)]


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    quick(
        [("sgd", None), ("nesterov", 0.1), ("adam, weight decay", None), ("amsgrad", 0.1)],
        [("sgd", None), ("amsgrad", 0.1)],
    ),
)
def test_every_optimizer_updates_state_on_storage(
    optimizer: str, clip: float | None, tmp_path: Path
) -> None:
    """With the least RAM bits are eager's, with and without clipping."""
    twins = twins_of("perceptron", optimizer, clip)
    least = least_bytes(twins.trace(), homes=True)
    with compiled(twins, tmp_path, least) as step:
        assert len(on_storage(step)) >= 3
        assert not differing(twins, step, 3)


def test_what_has_room_stays_in_ram(tmp_path: Path) -> None:
    """Less state is paged with more room, and none where all has room."""
    moved = []
    for ram in ("55%", "80%", "100%"):
        twins = twins_of("perceptron")
        with compiled(twins, tmp_path, ram) as step:
            graph, away = step.compiled.trace.graph, on_storage(step)
            moved.append(sum(graph.tensor_bytes[graph.tensor_index[name]] for name in away))
    assert moved[0] > moved[1] > moved[2] == 0


def test_checkpoints_are_loaded_in_the_middle(tmp_path: Path) -> None:
    """`load_state_dict` of model and optimizer goes on from a checkpoint as in eager PyTorch."""
    twins = twins_of("convolutions")
    with compiled(twins, tmp_path, "58%") as step:
        assert not differing(twins, step, 2)
        checkpoint = tmp_path / "checkpoint.pt"
        model, optimizer = twins.model, twins.optimizers[0]
        torch.save([model.state_dict(), optimizer.state_dict()], checkpoint)
        assert not differing(twins, step, 2)
        for k in range(2):
            found = torch.load(checkpoint)
            (twins.model, twins.twin)[k].load_state_dict(found[0])
            twins.optimizers[k].load_state_dict(found[1])
        assert not differing_now(twins)
        assert not differing(twins, step, 2)


def test_an_optimizer_may_begin_anew(tmp_path: Path) -> None:
    """Without its state the next step is a first one, sums of squares as they are before it."""
    torch.manual_seed(1)
    adagrad = partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.1)
    twins = Twins(perceptron(), adagrad)
    with compiled(twins, tmp_path, least_bytes(twins.trace(), homes=True)) as step:
        assert any(name.endswith(".sum") for name in on_storage(step))
        assert not differing(twins, step, 2)
        for optimizer in twins.optimizers:
            optimizer.state.clear()
        assert not differing(twins, step, 2)


def test_steps_of_eager_may_come_in_between(tmp_path: Path) -> None:
    """What eager PyTorch does to parameters and moments is what the next step begins with."""
    twins = twins_of("perceptron", "adam")
    with compiled(twins, tmp_path, "55%") as step:
        assert not differing(twins, step, 2)
        for model, optimizer in zip((twins.model, twins.twin), twins.optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(2)
            twins.loss_fn(model(twins.inputs[0]), twins.inputs[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not differing(twins, step, 2)


class Broken:
    """A state file of whose transfers one fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.left: int | None = None
        real = getattr(StateFile, name)

        def move(file: StateFile, *given: Any, **named: Any) -> None:
            if self.left is not None:
                self.left -= 1
                if self.left == -1:
                    raise PageError("the medium is failing")
            real(file, *given, **named)

        monkeypatch.setattr(StateFile, name, move)


@pytest.mark.slow
@pytest.mark.parametrize("background_io", [False, True])
@pytest.mark.parametrize(("name", "after"), [("read", 5), ("write", 5), ("commit", 0)])
def test_a_step_that_fails_leaves_the_state_of_before(
    name: str, after: int, background_io: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a transfer of state fails, parameters, moments, buffers and generator are as before.

    In the first step too, which makes the moments.
    """
    twins = twins_of("convolutions")
    broken = Broken(monkeypatch, name)
    with compiled(twins, tmp_path, "58%", background_io=background_io) as step:
        for _ in range(2):
            for count in {0, after}:
                random = torch.get_rng_state()
                broken.left = count
                with pytest.raises(PageError) as caught:
                    step(*twins.inputs)
                assert not getattr(caught.value, "__notes__", [])  # nothing is torn
                assert torch.equal(random, torch.get_rng_state())
                assert not differing_now(twins)
            broken.left = None
            assert not differing(twins, step, 2)


def test_without_rollback_a_failed_step_says_that_it_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One generation takes half of the storage, and a failed step may leave state half new."""
    twins = twins_of("perceptron")
    broken = Broken(monkeypatch, "write")
    with compiled(twins, tmp_path, "55%", rollback=False) as step:
        assert not differing(twins, step, 3)
        assert step.verify().equal
        assert not differing(twins, step, 1)
        broken.left = 2
        with pytest.raises(PageError) as caught:
            step(*twins.inputs)
        assert "updated" in str(getattr(caught.value, "__notes__", []))


def test_batches_of_other_sizes_share_the_state(tmp_path: Path) -> None:
    """With dynamic='retrace' each form has a plan of its own, and all the same state."""
    twins = twins_of("perceptron")
    with compiled(twins, tmp_path, "55%", dynamic="retrace") as step:
        batches = [twins.inputs, (torch.randn(7, 32), torch.randint(0, 10, (7,)))]
        for k in (0, 1, 0, 1):
            twins.inputs = batches[k]
            assert not differing(twins, step, 2)
    assert not list(tmp_path.iterdir())


def test_too_little_ram_says_how_much_is_needed(tmp_path: Path) -> None:
    """The message has the least budget, by which the step runs; without a folder it is larger."""
    twins = twins_of("perceptron")
    needed = []
    for folder in (tmp_path, None):
        with pytest.raises(BudgetError, match=r"ram=[\d,]+ B") as caught:
            compiled(twins, folder, 2_000)  # type: ignore[arg-type]
        needed.append(int(str(caught.value).rpartition("ram=")[2].split()[0].replace(",", "")))
    assert needed[0] < 0.7 * needed[1]
    with compiled(twins, tmp_path, needed[0]) as step:
        assert not differing(twins, step, 2)


def test_a_closed_step_leaves_state_in_ram(tmp_path: Path) -> None:
    """Parameters and moments are ordinary tensors then, and eager PyTorch trains on."""
    twins = twins_of("perceptron")
    step = compiled(twins, tmp_path, "55%")
    assert not differing(twins, step, 2)
    step.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(PageError, match="closed"):
        step(*twins.inputs)
    assert not differing_now(twins)


def test_reports_tell_state_on_storage(tmp_path: Path) -> None:
    """The figures say what lies on storage, and what a step writes for a rollback."""
    twins = twins_of("perceptron")
    with compiled(twins, tmp_path, "55%") as step:
        certificate = step.verify()
        assert certificate.mirrored_bytes > 0
        assert "rollback" in certificate.summary()
        assert step.report()["certificate"]["mirrored_bytes"] == certificate.mirrored_bytes
    with compiled(twins, tmp_path, "55%", rollback=False) as step:
        assert step.verify().mirrored_bytes == 0
        assert "rollback" not in step.verify().summary()


@pytest.mark.parametrize("rollback", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_state_moves_where_another_plan_has_other_homes(tmp_path: Path, rollback: bool) -> None:
    """A plan that takes over between steps finds state in its homes, also to be verified."""
    twins = twins_of("perceptron")
    with compiled(twins, tmp_path, "60%", rollback=rollback) as step:
        assert not differing(twins, step, 2)
        now, before = step.compiled, on_storage(step)
        paged = page_everything(now._problem())
        assert paged is not None
        now.plan, now.check = now._planned(replace(now.result, schedule=paged))
        old, now.runner = now.runner, now._runner(now.plan)
        assert on_storage(step) > before
        assert step.verify().equal
        assert not differing(twins, step, 2)
        now.runner = old
        assert not differing(twins, step, 2)


@pytest.mark.parametrize("rollback", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_checkpoint_may_be_loaded_before_the_first_step(tmp_path: Path, rollback: bool) -> None:
    """Moments that are loaded into an optimizer without any are what the first step begins with."""
    twins = twins_of("perceptron")
    for _ in range(2):
        twins.eager()
    found = copy.deepcopy([twins.twin.state_dict(), twins.optimizers[1].state_dict()])
    with compiled(twins, tmp_path, "55%", rollback=rollback) as step:
        twins.model.load_state_dict(found[0])
        twins.optimizers[0].load_state_dict(found[1])
        assert not differing(twins, step, 2)


def test_verifying_before_the_first_step_measures_steps_that_have_moments(tmp_path: Path) -> None:
    """What is read is what the plan says, and the optimizer is left without moments."""
    twins = twins_of("perceptron")
    with compiled(twins, tmp_path, "55%") as step:
        certificate = step.verify()
        assert certificate.read_bytes == certificate.plan_read_bytes > 0
        assert not twins.optimizers[0].state
        assert not differing(twins, step, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "optimizer"),
    rotating(
        [(n, name) for n in NETWORKS for name in ("sgd", "nesterov", "adam", "amsgrad")],
        [("perceptron", "adam"), ("convolutions", "nesterov")],
    ),
)
def test_two_hundred_steps_are_eagers(network: str, optimizer: str, tmp_path: Path) -> None:
    """By costs measured here, with background transfers, other batches and a falling rate."""
    twins = twins_of(network, optimizer, clip=0.5)
    with compiled(twins, tmp_path, "75%", device=None, background_io=True) as step:
        for optimizers in twins.optimizers:
            for group in optimizers.param_groups:
                group["lr"] *= 2
        assert not differing(twins, step, 200)


def test_state_in_ram_is_kept_too_where_there_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all state a step that fails leaves that of before, unless without rollback."""
    twins = twins_of("perceptron")
    broken = Broken(monkeypatch, "commit")
    with compiled(twins, tmp_path, "100%") as step:
        assert not on_storage(step)
        assert not differing(twins, step, 2)
        broken.left = 0
        with pytest.raises(PageError):
            step(*twins.inputs)
        assert not differing_now(twins)
    with compiled(twins, tmp_path, "100%", rollback=False) as step:
        assert not list(tmp_path.iterdir())
        assert not step.verify().mirrored_bytes
