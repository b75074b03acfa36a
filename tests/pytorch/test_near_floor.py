"""Budgets close to the floor: less is kept beside the plan, so that there can be one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from poetmodel.torch import compile, trace  # noqa: E402
from poetmodel.torch.coarsening import (  # noqa: E402
    KEPT_SHARE,
    coarsen,
    coarsened,
    floor_bytes,
    keep_all_bytes,
)
from small_networks import residual_step  # noqa: E402
from traced_models import residual  # noqa: E402

pytestmark = pytest.mark.torch


def test_less_is_kept_where_nothing_is_left_beside_it() -> None:
    """Between the floors of the finest and the usual graph a finer one is taken."""
    torch.manual_seed(1)
    traced = trace(*residual_step())
    finest = coarsen(traced, kept_bytes=0)
    budget = floor_bytes(finest)
    usual = coarsen(traced, kept_bytes=int(KEPT_SHARE * budget))
    assert floor_bytes(usual) > budget
    found = coarsened(traced, budget_bytes=budget)
    assert floor_bytes(found) <= budget
    assert found.threshold_bytes < usual.threshold_bytes
    roomy = floor_bytes(usual) + 1000
    assert coarsened(traced, budget_bytes=roomy).threshold_bytes >= usual.threshold_bytes


def test_below_the_floor_the_least_one_is_told() -> None:
    """Of several floors the least is the one that no budget may be below."""
    traced = trace(*residual(), measure_workspace=False)
    found = coarsened(traced, budget_bytes=100)
    assert floor_bytes(found) == min(
        floor_bytes(coarsen(traced, kept_bytes=kept)) for kept in (0, 1)
    )


def test_room_for_everything_leaves_nothing_out() -> None:
    """At the peak of keeping everything there is nothing to decide."""
    traced = trace(*residual(), measure_workspace=False)
    whole = coarsened(traced, budget_bytes=keep_all_bytes(traced))
    assert len(whole.numbers) == len(traced.parts.storages)
    assert whole.threshold_bytes == 0


def test_step_near_the_floor_keeps_its_budget(tmp_path: object) -> None:
    """A step a little above the floor, below which there is no plan, is within its budget."""
    torch.manual_seed(1)
    own = residual_step()
    budget = floor_bytes(coarsened(trace(*own), budget_bytes=0)) + 256
    with compile(*own, ram=budget, storage=str(tmp_path), device="rpi4b", time_limit=5) as step:
        certificate = step.verify()
    assert certificate.equal
    assert certificate.heap_peak_bytes <= budget
