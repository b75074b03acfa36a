"""Peers of compiled steps have the effect of their names."""

import pytest
import torch
from torch._functorch import config

from poetmodel.torch.graph.tensors import heap_peak_bytes
from pytorch import measurement
from pytorch import networks as bench_networks
from pytorch.networks import NETWORKS, Block
from pytorch.peers import (
    FileHooks,
    make_block_checkpoint,
    make_eager,
    make_file_hooks,
    make_selective_checkpoint,
)
from pytorch.runs import FUSED_NETWORKS, KEEP_ALL, METHODS, TrainingRun, make_training_runs
from pytorch.runs import NETWORKS as NAMES

nn = torch.nn


def tiny(batch=8, blocks=5):
    """Return a small network of blocks, with dropout, its loss and inputs."""
    torch.manual_seed(0)

    def layers():
        return [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Tanh(), nn.Sigmoid()]

    model = nn.Sequential(
        Block(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()),
        *(Block(*layers()) for _ in range(blocks - 2)),
        Block(*layers(), nn.Dropout(0.1)),
        nn.Flatten(),
        nn.Linear(8 * 16 * 16, 10),
    )
    inputs = (torch.randn(batch, 3, 16, 16), torch.randint(0, 10, (batch,)))
    return model, nn.functional.cross_entropy, inputs


def gradients(make):
    """Return the gradients of one step from a fixed state of the random generator."""
    model, _, inputs = training = tiny()
    method = make(training)
    torch.manual_seed(1)
    method.run(*inputs)
    return [parameter.grad for parameter in model.parameters()]


def test_registry_and_networks_agree():
    """Each name is that of a network."""
    assert set(NETWORKS) == {*NAMES, "mlp8-b16", *FUSED_NETWORKS}
    assert {name.partition("-")[0] for name in NAMES} == set(SMALLEST)


def test_peers_compute_what_eager_does(tmp_path):
    """Without batch norm, all of them have eager's gradients; the random state is restored.

    Each needs less than eager, and checkpointing with its convolutions kept more than without:
    only one of the network's blocks is in memory as a whole at a time.
    """
    expected = gradients(make_eager)
    for make in (
        make_block_checkpoint,
        make_selective_checkpoint,
        lambda t: make_file_hooks(t, tmp_path),
    ):
        assert all(map(torch.equal, gradients(make), expected))

    def peak(make):
        training = tiny()
        method = make(training)
        method.run(*training[2])
        return heap_peak_bytes(lambda: method.run(*training[2]))

    plain, selective = peak(make_eager), peak(make_selective_checkpoint)
    assert peak(make_block_checkpoint) < selective < plain
    assert peak(lambda training: make_file_hooks(training, str(tmp_path))) < plain


def test_file_hook_writes_each_tensor_once(tmp_path):
    """Views of a tensor share a page; changed tensors, and new ones at a freed address, do not.

    Parameters, inputs and small tensors are not written; all come back unchanged.
    """
    model, loss_fn, inputs = tiny()
    hooks = FileHooks((model, loss_fn, inputs), str(tmp_path))
    hooks.begin_step()
    for tensor in (model[-1].weight, inputs[0], inputs[0].flatten(1), torch.zeros(100)):
        assert hooks.pack(tensor) is tensor
    assert hooks.written_bytes == 0
    tensor = torch.randn(8, 1024)
    views = (tensor, tensor.view(1024, 8), tensor.t())
    packed = [hooks.pack(view) for view in views]
    assert hooks.written_bytes == 8 * 1024 * 4
    others = (tensor[:4], torch.randn(64, 64)[:, ::2], torch.randn(64, 1).expand(64, 64))
    packed += [hooks.pack(other) for other in others]
    assert hooks.written_bytes >= 12 * 1024 * 4
    for saved, expected in zip(packed, (*views, *others), strict=True):
        assert torch.equal(hooks.unpack(saved), expected)
    for saved, view in zip(packed, views, strict=False):
        assert hooks.unpack(saved).stride() == view.stride()
    before = tensor.clone()
    tensor.add_(1)
    pages = [packed[0], hooks.pack(tensor)]
    pages += [hooks.pack(torch.full((4096,), float(value))) for value in range(5)]
    contents = [before, tensor, *(torch.full((4096,), float(value)) for value in range(5))]
    assert all(map(torch.equal, map(hooks.unpack, pages), contents))


@pytest.mark.parametrize("ram_bytes", [None, pytest.param(1000, marks=pytest.mark.slow)])
def test_methods_that_stop_are_results(ram_bytes, tmp_path, monkeypatch):
    """A budget without a plan is recorded with reason and floor, a failure with its name."""
    monkeypatch.setitem(measurement.NETWORKS, "unet-b8", lambda: tiny(blocks=2))
    run = TrainingRun(network="unet-b8", method="both", share=0.01, limit_s=5.0, pairs=2)
    facts = measurement.measure_method(run, folder=str(tmp_path), ram_bytes=ram_bytes)
    assert facts["status"] == "infeasible"
    assert facts["reason"]
    assert facts["budget_bytes"] < facts["floor_bytes"] < facts["keep_all_bytes"]

    def broken(_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(measurement, "make_block_checkpoint", broken)
    run = TrainingRun(network="unet-b8", method="checkpoint")
    facts = measurement.measure_method(run, folder=str(tmp_path))
    assert (facts["status"], facts["reason"]) == ("failed", "RuntimeError: no such kernel")
    assert facts["seconds"] > 0


SMALLEST = {
    "resnet18": lambda: bench_networks.resnet18(1),
    "vgg16": lambda: bench_networks.vgg16(1),
    "mobilenetv2": lambda: bench_networks.mobilenet_v2(1),
    "bert4": lambda: bench_networks.bert(1),
    "gpt4": lambda: bench_networks.gpt(1),
    "unet": lambda: bench_networks.unet(1),
}
"""The networks with a batch of one, by the first part of their names."""


@pytest.fixture
def settings():
    """Restore settings of PyTorch that measurements change."""
    threads = torch.get_num_threads()
    with config.patch(activation_memory_budget=config.activation_memory_budget):
        yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    "network",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "unet" else pytest.mark.seeds)
        for name in SMALLEST
    ],
)
def test_every_method_runs(network, tmp_path, monkeypatch):
    """Each has a peak, times and bytes; compiled steps equal eager within budget and plan."""
    name = next(name for name in NAMES if name.startswith(f"{network}-"))
    monkeypatch.setitem(NETWORKS, name, SMALLEST[network])
    tried = []
    peaks = {}
    for run in make_training_runs((name,), shares=(0.75,), limit_s=2.0, pairs=1):
        found = measurement.measure_method(run, folder=str(tmp_path), ram_bytes=peaks.get(run.peer))
        assert found["status"] != measurement.FAILED, f"{run.name}: {found['reason']}"
        tried.append(run.method)
        if run.compiled_kind is not None and "heap_peak_bytes" not in found:
            assert found["reason"], run.name  # no plan is an answer
            continue
        peaks[run.method] = found["heap_peak_bytes"]
        assert found["heap_peak_bytes"] > 0
        assert found["eager_heap_peak_bytes"] > 0
        assert found["threads"] == 1
        assert len(found["pairs"]) == 1
        assert min(found["pairs"][0]) > 0
        if run.method == "file-hooks":
            assert found["written_bytes"] > 0
        if run.compiled_kind is not None or run.method == "eager":
            assert found["equal"], run.name
        if run.compiled_kind is not None:
            assert found["heap_peak_bytes"] <= found["budget_bytes"], run.name
            assert found["floor_bytes"] <= found["budget_bytes"]
            if run.peer is None:  # a peer may take more than keep-all
                assert found["budget_bytes"] <= found["keep_all_bytes"]
            assert found["written_bytes"] == found["plan_written_bytes"]
            parts_s = (found["trace_s"], found["profile_s"], found["solve_s"])
            assert sum(parts_s) <= found["compile_s"]
    assert tuple(tried) == METHODS
    assert KEEP_ALL in peaks
