"""Random small networks: exported C trains as PyTorch does, whatever the layers and the budget."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kit.export_agreement import (  # noqa: E402
    OPTIMIZERS,
    Exported,
    batches_like,
    lowered,
    torch_steps,
)
from kit.networks import trainings  # noqa: E402
from poetmodel.errors import NoScheduleError  # noqa: E402

pytestmark = pytest.mark.torch
STEPS = 3
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""No search for a smaller failure, of which each try is a build."""


def check(training: Any, optimizer: str, share: float, device: str) -> None:
    """Fail unless the exported step agrees with PyTorch."""
    batches = batches_like(training[2], 2)
    steps = 1 if optimizer == "gradients" else STEPS
    with tempfile.TemporaryDirectory() as folder:
        step = lowered(training, optimizer)
        try:
            exported = Exported(step, Path(folder), share=share, device=device, time_limit=20)
        except NoScheduleError:
            reject()  # no addresses were found that fit: there is nothing to compare
        found = exported.outcome(batches, steps)
    apart = found.differences(torch_steps(training, batches, steps, optimizer))
    assert max(apart.values()) <= 1e-11, apart


ARGUMENTS = {
    "training": trainings(),
    "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
    "share": st.sampled_from((0.0, 0.1, 0.3, 1.0)),
    "device": st.sampled_from(("nrf52840", "stm32h743", "nano33ble")),
}


@pytest.mark.slow
@given(**ARGUMENTS)
@settings(max_examples=3, phases=PHASES)
def test_some_random_networks_train_as_in_torch(**drawn: Any) -> None:
    """Losses, gradients and state of random networks are PyTorch's, in double."""
    check(**drawn)


@pytest.mark.seeds
@given(**ARGUMENTS)
@settings(max_examples=20, phases=PHASES)
def test_random_networks_train_as_in_torch(**drawn: Any) -> None:
    """The same of many more."""
    check(**drawn)
