"""``poetmodel export``: what it says where PyTorch is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, NoReturn

import pytest

from kit.commands import invoke

if TYPE_CHECKING:
    from pathlib import Path

    from kit.messages import Told


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "train:step", "--out", "firmware"),
        ("profile", "train:step", "--target", "qemu", "--device", "nrf52840", "--out", "p.csv"),
    ],
)
def test_missing_torch_is_said(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    """To capture a step needs PyTorch: one sentence with how to get it, and nothing is written."""

    def missing(name: str) -> NoReturn:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("poetmodel.torch.errors.version", missing)
    before = set(tmp_path.iterdir())
    outcome = invoke(*arguments)
    assert outcome.status == 5
    told(outcome.err)
    assert set(tmp_path.iterdir()) == before
