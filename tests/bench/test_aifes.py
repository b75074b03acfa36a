"""Networks for microcontrollers, and AIfES beside exported steps, with a stub in its place."""

import json
import shutil
from pathlib import Path

import pytest

from harness import run_study
from kit.programs import require_programs
from kit.rotation import mark_seeds_except
from poetmodel.errors import InputError
from poetmodel.export.board import Target, ToolchainError
from poetmodel.graph import zoo

pytest.importorskip("torch")

import torch

from mcu import aifes, networks
from mcu.networks import count_forward_macs, count_parameters
from mcu.small_networks import NETWORKS, make_training
from poetmodel import torch as pmt

pytestmark = pytest.mark.torch

STUB = Path(__file__).with_name("aifes_stub")


@pytest.fixture
def tiny(monkeypatch):
    """Make a network of two linear layers one of those that are run, and return its training."""
    layers = torch.nn.Linear(3, 5), torch.nn.Linear(5, 10)
    monkeypatch.setitem(NETWORKS, "tiny", lambda: (torch.nn.Sequential(*layers), (1, 3)))
    return make_training("tiny")


def torch_losses(made):
    """Return the losses of PyTorch on the batches that the programs read."""
    model, loss_fn, (x, _) = made
    optimizer = torch.optim.SGD(model.parameters(), lr=aifes.LEARNING_RATE)
    words = torch.frombuffer(bytearray(aifes.make_batches(made)), dtype=torch.float32)
    losses = []
    for row in words.view(aifes.STEPS, -1):
        optimizer.zero_grad()
        label = row[x.numel() :].view(torch.int32).long()
        loss = loss_fn(model(row[: x.numel()].view(x.shape)), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- the source that is asked for ------------------------------------------------------------------
@pytest.mark.parametrize("given", ["another folder", "no header"])
def test_a_folder_without_aifes_is_refused_in_a_sentence(given, tmp_path, told):
    """The error states the missing folder and its source."""
    if given == "no header":
        (tmp_path / "library.properties").write_text("name=AIfES for Arduino\n")
    with pytest.raises(InputError) as raised:
        list(aifes.runs(source=str(tmp_path)))
    told(str(raised.value).replace(str(tmp_path), "FOLDER"), given)


def test_version_and_digest_are_those_of_the_source(tmp_path):
    """The version is the library's own; another letter of its C has another digest."""
    assert aifes.read_version(STUB) == "0.0.1"
    copied = shutil.copytree(STUB, tmp_path / "copy")
    assert aifes.compute_digest(copied) == aifes.compute_digest(STUB)
    header = copied / "src" / "aifes.h"
    header.write_text(header.read_text().replace("tests", "Tests", 1))
    assert aifes.compute_digest(copied) != aifes.compute_digest(STUB)


# -- networks in AIfES's words ---------------------------------------------------------------------
def test_every_network_has_its_parameters_in_the_header():
    """Each number is there once: as many as PyTorch trains."""
    for name in NETWORKS:
        made = make_training(name)
        values = aifes.format_header(made, 1, 2).partition("first_weights[] = {")[2]
        assert values.partition("}")[0].count("0x") == count_parameters(made)


def test_layers_are_stated_as_aifes_has_them(told):
    """Sizes of windows, momentum of norms and the order of channels are AIfES's."""
    for name in ("lenet", "batch norms"):
        text = aifes.format_header(make_training(name), 1, 2)
        told("\n".join(line for line in text.splitlines() if "first_weights" not in line), name)


def test_a_layer_that_is_unknown_is_refused(told):
    """It is named."""
    with told.raises(InputError):
        aifes.convert_layer(torch.nn.GELU())


# -- programs --------------------------------------------------------------------------------------
def test_the_loop_trains_as_pytorch_does(tmp_path, tiny):
    """Weights, batches and rate reach the library; memory and stack are those that it requested."""
    require_programs(Target.M4)
    model, loss_fn, inputs = tiny
    optimizer = torch.optim.SGD(model.parameters(), lr=aifes.LEARNING_RATE)
    pmt.export(
        model, loss_fn, inputs, folder=tmp_path, optimizer=optimizer, ram="4MiB", paging=False
    )
    found = aifes.execute_aifes(STUB, tmp_path, tiny, aifes.make_batches(tiny))
    assert list(found.losses.values()) == pytest.approx(torch_losses(tiny), rel=1e-6)
    figures = found.metrics
    asked = figures["parameter_bytes"] + figures["training_bytes"] + figures["stack_limit_bytes"]
    assert asked < figures["ram_bytes"] < asked + 1024
    assert figures["parameter_bytes"] == 4 * count_parameters(tiny)
    assert 0 <= figures["stack_limit_bytes"] - figures["stack_bytes"] < aifes.STACK_ALIGNMENT


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_record_has_exports_and_the_library(tmp_path):
    """Exports and the stub are built and run; their losses agree."""
    require_programs(Target.M4)
    out = tmp_path / "x-aifes.jsonl"
    settings = ["--set", f"source={STUB}", "--set", "networks=tiny"]
    assert run_study(aifes.STUDY, [*settings, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert set(found["programs"]) == {*aifes.EXPORTS, "aifes"}
    assert found["loss_difference"] <= aifes.LOSS_TOLERANCE


def test_other_losses_are_refused(told):
    """Programs that do not compute the same are not compared."""
    programs = {name: {"losses": [1.5, 1.25]} for name in ("aifes", "keep_all")}
    assert aifes.compare_losses(programs) == 0.0
    with told.raises(ToolchainError):
        aifes.compare_losses(programs | {"aifes": {"losses": [1.5, 1.2501]}})


# -- networks ------------------------------------------------------------------------------------
IN_ZOO = {
    "resnet8": zoo.resnet8,
    "mobilenetv1-vww": zoo.mobilenetv1_vww,
    "ds-cnn": zoo.ds_cnn,
    "autoencoder": zoo.autoencoder,
    "mobilenetv2-035": zoo.mobilenetv2_035,
    "mlp": zoo.mlp,
    "bert-block": lambda: zoo.transformer(
        seq_len=16, hidden=32, heads=2, feedforward=128, vocabulary=64
    ),
    "encoder-layer": lambda: zoo.transformer(
        seq_len=16, hidden=32, heads=2, feedforward=128, vocabulary=64
    ),
}
"""The same networks as graphs, whose figures are held against publications."""


@pytest.mark.parametrize("name", IN_ZOO)
def test_networks_are_those_of_the_zoo(name):
    """Parameters and multiply-accumulates of a sample are those of the zoo's graph."""
    step, graph = networks.NETWORKS[name](), IN_ZOO[name]()
    assert count_parameters(step) == graph.parameters
    assert count_forward_macs(step) == graph.forward_macs * len(step[2][0])


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("lenet", 61_706),  # LeNet-5 with all maps of its second layer connected
        ("m5", 26_915),  # the figure of PyTorch's speech command tutorial
        ("vit-block", 49 * 32 + 18 * 32 + 3 * 2 * 32 + 4 * 33 * 32 + 64 * 33 + 32 * 65 + 10 * 33),
    ],
)
def test_published_parameters(name, count):
    """Networks outside of the zoo have as many parameters as published, or as in their layers."""
    assert count_parameters(networks.NETWORKS[name]()) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_seeds_except(networks.NETWORKS, list(networks.NETWORKS)[::6]))
def test_every_network_is_traced(name):
    """A training step of each is captured; all its parameters have gradients."""
    model, loss_fn, inputs = networks.NETWORKS[name]()
    graph = pmt.trace(model, loss_fn, inputs, name=name).graph
    assert graph.resident_bytes["gradients"] == 4 * sum(p.numel() for p in model.parameters())
