"""What compiled steps are compared with does what its name says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from poetmodel.torch.capturing.replay import heap_peak_bytes  # noqa: E402
from pytorch import measurement  # noqa: E402
from pytorch.networks import NETWORKS, Block  # noqa: E402
from pytorch.peers import (  # noqa: E402
    FileHooks,
    checkpoint_per_block,
    eager,
    hooks_to_file,
    selective_checkpoint,
)
from pytorch.runs import FUSED_NETWORKS, METHODS, TrainingRun  # noqa: E402
from pytorch.runs import NETWORKS as NAMES  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

nn = torch.nn
pytestmark = pytest.mark.torch


def tiny(batch: int = 8) -> Any:
    """Return a small network of five blocks, with dropout, its loss and inputs."""
    torch.manual_seed(0)

    def layers() -> list[Any]:
        return [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Tanh(), nn.Sigmoid()]

    model = nn.Sequential(
        Block(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()),
        *(Block(*layers()) for _ in range(3)),
        Block(*layers(), nn.Dropout(0.1)),
        nn.Flatten(),
        nn.Linear(8 * 16 * 16, 10),
    )
    inputs = (torch.randn(batch, 3, 16, 16), torch.randint(0, 10, (batch,)))
    return model, nn.functional.cross_entropy, inputs


def gradients(make: Any) -> list[torch.Tensor]:
    """Return the gradients of one step from a fixed state of the random generator."""
    model, _, inputs = training = tiny()
    method = make(training)
    torch.manual_seed(1)
    method.run(*inputs)
    return [parameter.grad for parameter in model.parameters()]


def to_file(folder: Path) -> Any:
    """Return what makes the file hook of a training."""
    return lambda training: hooks_to_file(training, str(folder))


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Return whether all gradients are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_registry_and_networks_agree() -> None:
    """Every name stands for a network."""
    assert set(NETWORKS) == {*NAMES, "mlp8-b16", *FUSED_NETWORKS}


def test_peers_compute_what_eager_does(tmp_path: Path) -> None:
    """Without batch norm all of them give eager's gradients; the random state is restored."""
    expected = gradients(eager)
    for make in (checkpoint_per_block, selective_checkpoint, to_file(tmp_path)):
        assert same(gradients(make), expected)


def test_peers_save_memory(tmp_path: Path) -> None:
    """Each takes less than eager, and checkpointing with its convolutions kept more than without.

    Of the network's blocks only one is in memory as a whole at a time.
    """

    def peak(make: Any) -> int:
        training = tiny()
        method = make(training)
        method.run(*training[2])
        return heap_peak_bytes(lambda: method.run(*training[2]))

    plain, selective = peak(eager), peak(selective_checkpoint)
    assert peak(checkpoint_per_block) < selective < plain
    assert peak(to_file(tmp_path)) < plain


def test_file_hook_writes_each_tensor_once(tmp_path: Path) -> None:
    """A result that ReLU and the next layer both save is one page; views of it are, too."""
    own = tiny()
    hooks = FileHooks(own, str(tmp_path))
    hooks.begin()
    tensor = torch.randn(8, 1024)
    first, second = hooks.pack(tensor), hooks.pack(tensor.view(1024, 8))
    transposed = hooks.pack(tensor.t())
    assert hooks.written_bytes == 8 * 1024 * 4
    half = hooks.pack(tensor[:4])
    assert hooks.written_bytes == 12 * 1024 * 4
    for saved, expected in (
        (first, tensor), (second, tensor.view(1024, 8)), (transposed, tensor.t()),
        (half, tensor[:4]),
    ):  # fmt: skip
        found = hooks.unpack(saved)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


def test_file_hook_tells_changed_and_new_contents_apart(tmp_path: Path) -> None:
    """What was changed in place, or lies where a freed tensor lay, is written anew."""
    own = tiny()
    hooks = FileHooks(own, str(tmp_path))
    hooks.begin()
    tensor = torch.zeros(2048)
    before = hooks.pack(tensor)
    tensor.add_(1)
    after = hooks.pack(tensor)
    assert torch.equal(hooks.unpack(before), torch.zeros(2048))
    assert torch.equal(hooks.unpack(after), torch.ones(2048))
    saved = []
    for value in range(5):
        saved.append(hooks.pack(torch.full((4096,), float(value))))
    for value, page in enumerate(saved):
        assert torch.equal(hooks.unpack(page), torch.full((4096,), float(value)))


def test_file_hook_leaves_what_is_there_anyway(tmp_path: Path) -> None:
    """Parameters, inputs and small tensors are not written; strided ones are, as they are."""
    model, loss_fn, inputs = tiny()
    hooks = FileHooks((model, loss_fn, inputs), str(tmp_path))
    hooks.begin()
    for tensor in (model[-1].weight, inputs[0], inputs[0].flatten(1), torch.zeros(100)):
        assert hooks.pack(tensor) is tensor
    assert hooks.written_bytes == 0
    strided = torch.randn(64, 64)[:, ::2]
    assert torch.equal(hooks.unpack(hooks.pack(strided)), strided)
    expanded = torch.randn(64, 1).expand(64, 64)
    assert torch.equal(hooks.unpack(hooks.pack(expanded)), expanded)


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in METHODS if "@" not in m and m != "memory-budget"])
def test_every_method_is_measured(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record has the peak, the pairs and the equality; that of a compiled step its plan, too."""
    monkeypatch.setitem(measurement.NETWORKS, "unet-b8", tiny)
    threads = torch.get_num_threads()
    run = TrainingRun(network="unet-b8", method=method, share=0.9, limit_s=5.0, pairs=2)
    facts = measurement.measured(run, folder=str(tmp_path))
    torch.set_num_threads(threads)
    assert facts["threads"] == 1
    assert facts["equal"] is True
    assert len(facts["pairs"]) == 2
    assert all(time > 0 for pair in facts["pairs"] for time in pair)
    assert facts["eager_heap_peak_bytes"] > 0
    if run.own is None:
        assert facts["status"] == "ran"
        return
    assert facts["status"] in ("optimal", "feasible")
    assert facts["heap_peak_bytes"] <= facts["budget_bytes"]
    assert facts["floor_bytes"] <= facts["budget_bytes"] <= facts["keep_all_bytes"]
    assert facts["written_bytes"] == facts["plan_written_bytes"]
    assert facts["trace_s"] + facts["profile_s"] + facts["solve_s"] <= facts["compile_s"]


def test_budget_below_the_floor_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget without a plan is recorded with the reason and the floor, whole or in bytes."""
    monkeypatch.setitem(measurement.NETWORKS, "unet-b8", tiny)
    run = TrainingRun(network="unet-b8", method="both", share=0.01, limit_s=5.0, pairs=2)
    for ram_bytes in (None, 1000):
        facts = measurement.measured(run, folder=str(tmp_path), ram_bytes=ram_bytes)
        assert facts["status"] == "infeasible"
        assert facts["reason"]
        assert facts["budget_bytes"] < facts["floor_bytes"] < facts["keep_all_bytes"]


def test_method_that_fails_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stops a method is recorded with its name."""

    def broken(training: Any) -> Any:
        del training
        msg = "no such kernel"
        raise RuntimeError(msg)

    monkeypatch.setitem(measurement.NETWORKS, "unet-b8", tiny)
    monkeypatch.setattr(measurement, "checkpoint_per_block", broken)
    run = TrainingRun(network="unet-b8", method="checkpoint")
    facts = measurement.measured(run, folder=str(tmp_path))
    assert facts["status"] == "failed"
    assert facts["reason"] == "RuntimeError: no such kernel"
    assert facts["seconds"] > 0
