"""The benchmark of training methods: every method runs on every network; no speed is asserted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from torch._functorch import config  # noqa: E402

from pytorch import networks  # noqa: E402
from pytorch.measurement import FAILED, measured  # noqa: E402
from pytorch.runs import KEEP_ALL, METHODS, NETWORKS, training_runs  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.torch

SMALLEST = {
    "resnet18": lambda: networks.resnet18(1),
    "vgg16": lambda: networks.vgg16(1),
    "mobilenetv2": lambda: networks.mobilenet_v2(1),
    "bert4": lambda: networks.bert(1),
    "gpt4": lambda: networks.gpt(1),
    "unet": lambda: networks.unet(1),
}
"""The networks with a batch of one, by the first part of their names."""


@pytest.fixture
def settings() -> Iterator[None]:
    """Put back what measuring changes in PyTorch."""
    threads = torch.get_num_threads()
    with config.patch(activation_memory_budget=config.activation_memory_budget):
        yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def test_all_networks_are_tried() -> None:
    """A network that is added is tried here, too."""
    assert set(NETWORKS) <= set(networks.NETWORKS)
    assert {name.partition("-")[0] for name in NETWORKS} == set(SMALLEST)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    "network",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "vgg16" else pytest.mark.seeds)
        for name in SMALLEST
    ],
)
def test_every_method_runs(network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives a peak, times and bytes; compiled steps equal eager and keep their budgets."""
    name = next(name for name in NETWORKS if name.startswith(f"{network}-"))
    monkeypatch.setitem(networks.NETWORKS, name, SMALLEST[network])
    tried = []
    peaks: dict[str | None, int] = {}
    for run in training_runs((name,), shares=(0.75,), limit_s=2.0, pairs=1):
        found = measured(run, folder=str(tmp_path), ram_bytes=peaks.get(run.peer))
        assert found["status"] != FAILED, f"{run.name}: {found['reason']}"
        tried.append(run.method)
        if run.own is not None and "heap_peak_bytes" not in found:
            assert found["reason"], run.name  # no plan is an answer
            continue
        peaks[run.method] = found["heap_peak_bytes"]
        assert found["heap_peak_bytes"] > 0
        assert found["eager_heap_peak_bytes"] > 0
        assert len(found["pairs"]) == 1
        assert min(found["pairs"][0]) >= 0
        if run.method == "file-hooks":
            assert found["written_bytes"] > 0
        if run.own is not None or run.method == "eager":
            assert found["equal"], run.name
        if run.own is not None:
            assert found["heap_peak_bytes"] <= found["budget_bytes"], run.name
    assert tuple(tried) == METHODS
    assert KEEP_ALL in peaks
