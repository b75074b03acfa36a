"""The ablation: its variants, and what the page says of its record."""

from __future__ import annotations

from typing import Any

import pytest

import ablation
from grid import instances
from kit.relaxation import bases_given
from result_pages.ablation import EVERYTHING, page

CELL = {"model": "m", "device": "d", "ram": "50%", "deadline": None, "limit_s": 3.0}


def run(variant: str, seconds: float, gap: float | None, **changes: Any) -> dict[str, Any]:
    """Return a record."""
    return {
        "variant": variant,
        "status": "unknown" if gap is None else "optimal" if gap == 0 else "feasible",
        "seconds": seconds,
        "gap": gap,
        "recorded": "2026-11-21T10:00:00+00:00",
        "threads": 1,
        "machine": {"cpu": "cpu", "python": "3.11.7", "versions": {"highspy": "1.15.1"}},
        "cell": CELL | changes,
    }


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


def test_the_page_counts_time_outs_with_their_limit() -> None:
    """The run with everything stands in for a missing one; other limits come by themselves."""
    text = page(
        [
            run(EVERYTHING, 1.0, 0.0),
            run(EVERYTHING, 2.5, 0.5, ram="30%"),
            run("no cuts", 1.0, None),
            run("no cuts", 9.0, 0.25, limit_s=9.0),
        ]
    )
    assert "2 instances, 3 s each" in text
    assert "| everything | 2 | 1 | 1.8 | 25.0 |" in text
    assert "| no cuts | 1 | 0 | 3.0 | 75.0 |" in text
    assert "| m d 50% | no cuts | feasible | 9.0 | 25.00 |" in text


def test_what_was_not_run_stands_for_itself_with_one_part_more() -> None:
    """Parts that are left out together are compared with the runs that leave out one less."""
    text = page(
        [
            run(EVERYTHING, 1.0, 0.0),
            run(EVERYTHING, 1.0, 0.0, ram="30%"),
            run("no a", 2.0, 0.0),
            run("no a", 2.0, 0.0, ram="30%"),
            run("no a, b", 2.0, 0.0),
        ]
    )
    assert "| no a, b | 1 | 2 | 2.0 | 0.0 |" in text


def test_a_second_record_has_a_table_of_its_own() -> None:
    """What was measured after the decisions is not mixed with what they were taken from."""
    text = page([run(EVERYTHING, 1.0, 0.0)], [run(EVERYTHING, 2.0, 0.0), run("no cuts", 2.5, 0.1)])
    before, after = text.split("A later record: 1 instances, 3 s each")
    assert "| everything | 1 | 1 | 1.0 | 0.0 |" in before
    assert "| everything | 1 | 1 | 2.0 | 0.0 |" in after
    assert "no cuts" not in before
