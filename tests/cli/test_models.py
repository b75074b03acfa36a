"""``poetmodel models``: every shipped network, for people and as JSON."""

from __future__ import annotations

from kit.commands import invoke
from poetmodel.graph.catalogue import describe_model, model_names


def test_list_has_every_model_on_a_line_of_its_own() -> None:
    """Each shipped name begins one line, unbroken, so that it can be copied."""
    outcome = invoke("models")
    assert outcome.status == 0
    firsts = [line.split()[0] for line in outcome.out.splitlines() if line.strip()]
    assert [name for name in firsts if name in model_names()] == list(model_names())
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_json_is_a_list_of_objects() -> None:
    """The list as JSON has one object per model, with the keys of inspect."""
    entries = invoke("models", "--json").json
    assert [entry["model"] for entry in entries] == list(model_names())
    inspected = invoke("inspect", "resnet18-cifar", "--json").json
    entry = next(entry for entry in entries if entry["model"] == "resnet18-cifar")
    assert entry.items() >= inspected.items()


def test_one_model_is_one_object() -> None:
    """A name gives that model alone."""
    entry = invoke("models", "mlp", "--json").json
    assert entry["model"] == "mlp"
    assert entry["description"] == describe_model("mlp")
    assert entry["nodes"] > 0


def test_one_model_is_described() -> None:
    """For people there are the description and the table of inspect."""
    outcome = invoke("models", "resnet18-cifar")
    assert outcome.out.startswith(describe_model("resnet18-cifar"))
    assert "keep-all" in outcome.out


def test_unknown_model_exits_2() -> None:
    """A name that is none gets a hint."""
    outcome = invoke("models", "resnet")
    assert outcome.status == 2
    assert "'resnet'" in outcome.err
    assert "resnet18" in outcome.err
