"""What forward sets: buffers that are assigned go on as in eager, attributes are put back."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.eager_steps import differing  # noqa: E402
from kit.traced_steps import run_eager, run_units  # noqa: E402
from poetmodel.torch import CaptureError, capture, compile, trace  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

nn = torch.nn
pytestmark = pytest.mark.torch


class Average(nn.Module):
    """Adds a moving average, a buffer, to its input, and sets what a function of it sets."""

    def __init__(self, sets: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.count = 0
        self.seen: list[Any] = []
        self.by_name: dict[str, Any] = {"first": 1}
        self.last: deque[Any] = deque([1, 2], maxlen=2)
        self.aux = None
        self.sets = sets

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output; the buffer's old value is needed by the backward pass."""
        y = self.layer(x) * self.mean + self.layer(x + self.mean)
        self.sets(self, x, y)
        return y


def averaged(module: Any, x: Any, _: Any) -> None:
    """Assign the buffer."""
    module.mean = 0.9 * module.mean + 0.1 * x.mean(0).detach()


def step_of(sets: Any) -> Any:
    """Return a step of two modules that set something."""
    model = nn.Sequential(Average(sets), Average(sets))
    return model, nn.functional.mse_loss, (torch.randn(3, 4), torch.randn(3, 4))


def test_assigned_buffers_are_updated_as_in_eager(tmp_path: Path) -> None:
    """Step after step, loss, gradients and the buffers are eager's; the buffers stay the same."""
    torch.manual_seed(1)
    own = step_of(averaged)
    buffers = [module.mean for module in own[0]]
    with compile(*own, ram="95%", storage=tmp_path, device="rpi4b", time_limit=5) as step:
        assert not any(buffer.any() for buffer in buffers)
        for _ in range(3):
            assert differing(step, *own) == []
        before = [buffer.clone() for buffer in buffers]
        assert all(buffer.any() for buffer in buffers)
        certificate = step.verify()
        assert certificate.equal, certificate.summary()
    assert all(module.mean is buffer for module, buffer in zip(own[0], buffers, strict=True))
    assert all(map(torch.equal, buffers, before))


@pytest.mark.parametrize(
    ("sets", "fragment"),
    [
        (
            lambda m, x, _: setattr(m, "mean", x.detach().clone()),
            r"was float32 \[4\] and is assigned float32 \[3, 4\] in forward; .*copy_",
        ),
        (lambda m, x, _: setattr(m, "mean", x.mean(0).double()), r".* assigned float64 \[4\]"),
        (
            lambda m, _, y: setattr(m, "mean", y.mean(0)),
            "is assigned a value that depends on parameters, .*the graph.* with .detach",
        ),
        (lambda m, _, __: setattr(m, "mean", None), "is taken away in forward"),
        (
            lambda m, x, _: m.register_buffer("other", x),
            "is new after forward; register it, .* in __init__",
        ),
    ],
)
def test_assignments_that_are_no_update_are_refused(sets: Any, fragment: str) -> None:
    """The error names buffer and module, and says what to do; the buffer is as it was."""
    own = step_of(sets)
    buffers = [module.mean for module in own[0]]
    with pytest.raises(CaptureError, match=f"Sequential: buffer '.*' of module '0' {fragment}"):
        capture(*own)
    assert all(module.mean is buffer for module, buffer in zip(own[0], buffers, strict=True))
    assert [list(dict(module.named_buffers())) for module in own[0]] == [["mean"], ["mean"]]


def test_buffers_that_are_one_are_not_assigned_apart() -> None:
    """In eager the two would part; a compiled step does not change the other one silently."""
    own = step_of(averaged)
    own[0][1].mean = own[0][0].mean
    with pytest.raises(CaptureError, match=r"module '0' is assigned .* memory with 1\.mean"):
        capture(*own)


def cached(module: Any, _: Any, y: Any) -> None:
    """Make a table in the first pass, and use it in all others."""
    if module.aux is None:
        module.aux = torch.arange(4.0)
    y.mul_(module.aux)


def test_tables_of_the_first_pass_are_captured() -> None:
    """What forward keeps for later passes is no foreign tensor, however often PyTorch runs it."""
    torch.manual_seed(1)
    own = step_of(cached)
    traced = trace(*own, measure_workspace=False)
    assert own[0][0].aux is None
    found = run_units(traced)
    for name, value in run_eager(*own).items():
        if name in found:
            assert torch.equal(found[name], value), name
    assert "gradient of 0.layer.weight" in found


def noted(module: Any, x: Any, y: Any) -> None:
    """Set all kinds of attributes."""
    module.count += 1
    module.aux = y.pow(2).mean()
    module.seen.append(y)
    module.by_name["last"] = x
    module.last.append(y)
    module.new = x


def test_attributes_are_put_back_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """After a capture no attribute holds what is no number, and the log names those that were."""
    own = step_of(noted)
    with caplog.at_level(logging.WARNING):
        capture(*own)
    for module in own[0]:
        assert (module.count, module.aux, module.seen) == (0, None, [])
        assert module.by_name == {"first": 1}
        assert list(module.last) == [1, 2]
        assert not hasattr(module, "new")
    (message,) = [record.getMessage() for record in caplog.records]
    assert "forward sets 0.aux, 0.by_name, 0.last, 0.new, 0.seen, 1.aux, " in message
    assert "register_buffer" in message


def test_attributes_are_put_back_after_a_failure() -> None:
    """A step that cannot be captured leaves the modules as they were."""

    def fails(module: Any, _: Any, y: Any) -> None:
        module.aux = y
        module.count += int(y.sum())

    own = step_of(fails)
    with pytest.raises(CaptureError, match="reads a tensor's value"):
        capture(*own)
    assert own[0][0].aux is None


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_weights_that_hooks_make_are_not_told(
    norm: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A weight that is made anew of parameters in each pass is no attribute that goes stale."""
    torch.manual_seed(1)
    model = nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    own = model, nn.functional.mse_loss, (torch.randn(3, 4), torch.randn(3, 4))
    with caplog.at_level(logging.WARNING):
        capture(*own)
    assert not caplog.records
    with compile(*own, ram="100%", storage=tmp_path, device="rpi4b", time_limit=5) as step:
        step(*own[2])
        assert step.verify().equal
