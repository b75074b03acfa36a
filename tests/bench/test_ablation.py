"""The ablation: its variants."""

from __future__ import annotations

import pytest

import ablation
from grid import instances
from kit.relaxation import bases_given


def test_every_instance_is_one_of_the_grid() -> None:
    """But for its limit."""
    names = {each.name for each in instances()}
    assert {each.name for each in (*ablation.SAMPLE, *ablation.CAPTURES)} <= names


def test_every_variant_is_another() -> None:
    """In one thing at least."""
    assert len(set(ablation.VARIANTS.values())) == len(ablation.VARIANTS)


def test_a_smoke_run_records_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters reach the solve; the record names the variant."""
    monkeypatch.setattr(ablation.lazy, "solve_lazily", ablation.lazy.solve_lazily)
    small = {**ablation.SAMPLE[0].to_dict(), "model": "paper/transformer", "ram": "90%"}
    record = ablation.measure_variant({**small, "variant": "no interval cuts"}, threads=2)
    assert record["threads"] == 2
    assert record["kind"] == ablation.KIND
    assert record["name"].endswith("| default | 0 | no interval cuts")
    assert record["variant"] == "no interval cuts"
    assert (
        ablation.lazy.solve_lazily.keywords["params"]
        == ablation.VARIANTS["no interval cuts"].params
    )


@pytest.mark.parametrize(
    ("owner", "method", "variant"),
    [
        (ablation.EarlierRecomputation, "relieve", "no earlier recomputation"),
        (ablation.Repair, "drop_order", "no prices for bytes in drops"),
    ],
    ids=["recomputing earlier", "prices for bytes"],
)
def test_parts_of_repair_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, variant: str
) -> None:
    """What the variant leaves out is never asked."""
    monkeypatch.setattr(ablation.lazy, "solve_lazily", ablation.lazy.solve_lazily)
    asked: list[object] = []
    monkeypatch.setattr(owner, method, lambda _, about: asked.append(about) or 0)
    small = {**ablation.SAMPLE[0].to_dict(), "model": "paper/transformer", "ram": "70%"}
    ablation.measure_variant({**small, "variant": "everything"})
    assert asked
    asked.clear()
    ablation.measure_variant({**small, "variant": variant})
    assert not asked


def test_warm_starts_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No solve begins from a basis."""
    monkeypatch.setattr(ablation.lazy, "solve_lazily", ablation.lazy.solve_lazily)
    monkeypatch.setattr(ablation.linear, "carried_basis", ablation.linear.carried_basis)
    given = bases_given(monkeypatch)
    small = {**ablation.SAMPLE[0].to_dict(), "limit_s": 3.0}
    ablation.measure_variant({**small, "variant": "everything"})
    assert any(basis is not None for basis in given)
    given.clear()
    ablation.measure_variant({**small, "variant": "no warm starts of linear relaxations"})
    assert given
    assert all(basis is None for basis in given)
