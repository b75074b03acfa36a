"""What is in force while PyTorch captures: checkpoints have the results of eager."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from kit.eager_steps import differing, keep_all  # noqa: E402
from kit.traced_models import rows  # noqa: E402
from poetmodel.torch import CaptureError  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.torch


class Counted(nn.BatchNorm1d):
    """A batch norm that counts its calls."""

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count, and normalize."""
        self.calls += 1
        return super().forward(x)


def inside(norm: Any, *, reentrant: bool) -> Any:
    """Return a step with a norm and a dropout inside of a checkpoint, between two layers."""
    torch.manual_seed(1)
    layers = (nn.Linear(4, 4), nn.Dropout(0.5), norm, nn.ReLU(inplace=True))
    return rows(
        nn.Linear(4, 4),
        nn.Sequential(*layers),
        nn.Linear(4, 4),
        by=lambda p, x: p[2](checkpoint(p[1], p[0](x), use_reentrant=reentrant)),
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("momentum", [0.1, 0.3])
def test_batch_norm_inside_of_a_checkpoint_is_updated_as_in_eager(
    momentum: float, reentrant: bool
) -> None:
    """Eager updates it again when it computes the part again; the step does so too."""
    own = inside(nn.BatchNorm1d(4, momentum=momentum), reentrant=reentrant)
    step = keep_all(*own)
    for _ in range(2):
        assert differing(step, *own) == []
    assert int(own[0].parts[1][2].num_batches_tracked) == 4


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_without_trained_inputs_train_nothing() -> None:
    """As in eager: no parameter inside gets a gradient."""
    own = rows(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        by=lambda p, x: p[0](x) + checkpoint(p[1], x, use_reentrant=True),
    )
    step = keep_all(*own)
    assert differing(step, *own) == []
    assert own[0].parts[1].weight.grad is None


def test_other_buffers_that_change_inside_of_a_checkpoint_are_refused() -> None:
    """What eager changes twice, and a step once, is named."""
    with pytest.raises(
        CaptureError, match=r"mutation of parts\.1\.2\.calls .*leave the checkpoint"
    ):
        keep_all(*inside(Counted(), reentrant=False))
