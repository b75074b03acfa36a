"""``poetmodel doctor``: what is there, what works, and what to install."""

from __future__ import annotations

import pytest

from kit.commands import invoke
from poetmodel.backends import registry
from poetmodel.cli import doctor as module
from poetmodel.errors import BackendError, BackendUnavailableError, LicenceError


def test_every_back_end_and_extra_is_listed() -> None:
    """Each has a state; HiGHS, which comes along, solves a model."""
    document = invoke("doctor", "--json").json
    assert document["works"] is True
    assert [found["name"] for found in document["backends"]] == ["highs", "scip", "gurobi"]
    assert document["backends"][0]["state"] == "works"
    assert [found["name"] for found in document["extras"]] == list(module.EXTRAS)
    states = {found["state"] for found in (*document["backends"], *document["extras"])}
    assert states <= {"works", "installed", "missing", "broken"}


def test_table_fits_and_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package comes with the command that installs its extra."""
    monkeypatch.setattr(module, "installed", lambda _: None)
    outcome = invoke("doctor")
    assert (outcome.status, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    for extra in {extra for extra, _ in module.EXTRAS.values()}:
        assert f"poetmodel[{extra}]" in " ".join(outcome.out.split())


@pytest.mark.parametrize(
    ("error", "state"),
    [(BackendUnavailableError("not here"), "missing"), (BackendError("no good"), "broken")],
)
def test_what_does_not_work_is_said(
    error: BackendError, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A back end that is missing or fails says so; without the default one the status is 5."""
    from poetmodel.backends.highs import Highs

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Highs, "versions" if state == "missing" else "solve", fail)
    outcome = invoke("doctor", "--json")
    assert outcome.status == 5
    found = outcome.json["backends"][0]
    assert (found["state"], found["remark"]) == (state, str(error))
    assert outcome.json["works"] is False


def test_licence_that_refuses_large_models_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model works and a larger one is refused: the licence is limited."""
    real = registry._least

    def limited(name: str, columns: int, rows: int) -> float | None:
        if columns >= registry.LICENCE_SIZE:
            msg = "too large"
            raise LicenceError(msg)
        return real(name, columns, rows)

    monkeypatch.setattr(registry, "_least", limited)
    found = invoke("doctor", "--json").json["backends"][0]
    assert (found["state"], found["remark"]) == ("works", "the licence is limited to small models")


def test_solver_that_is_wrong_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value other than the known one is no success."""
    monkeypatch.setattr(registry, "_least", lambda *_: 2.0)
    assert invoke("doctor", "--json").json["backends"][0]["state"] == "broken"
