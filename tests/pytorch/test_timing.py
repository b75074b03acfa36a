"""Times of units: the least of several steps."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from poetmodel.torch import timing, trace  # noqa: E402
from traced_models import residual, rows  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.torch


def test_least_time_counts_and_views_belong_to_their_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a clock that runs slower from step to step, the last step's times come out."""
    traced = trace(*rows(nn.Linear(4, 4)), measure_workspace=False)
    calls = sum(node.op == "call_function" for node in traced.joint.graph_module.graph.nodes)
    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        step, half = divmod(reads - 1, 2 * calls)
        return float(half % 2) * (10.0 - step)

    monkeypatch.setattr(timing, "thread_time", clock)
    times_s = timing.unit_times_s(traced.joint, traced.parts, repeats=3)
    assert times_s == tuple(8.0 * (1 + len(u.reads.views)) for u in traced.parts.units)


def test_threads_are_put_back() -> None:
    """Measuring with some threads leaves the setting of the process as it was."""
    traced = trace(*residual(), measure_workspace=False)
    before = torch.get_num_threads()
    times_s = timing.unit_times_s(traced.joint, traced.parts, repeats=1, threads=before + 1)
    assert torch.get_num_threads() == before
    assert len(times_s) == len(traced.graph.nodes)
    assert min(times_s) > 0
