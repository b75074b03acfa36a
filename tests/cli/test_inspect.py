"""``poetmodel inspect``: the numbers of a graph, for people and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from commands import chain, invoke, node, write_graph
from poetmodel.graph.catalogue import model_names

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {
    "name",
    "nodes",
    "edges",
    "parameters",
    "forward_macs",
    "flops",
    "resident_bytes",
    "checkpoint_all_peak_bytes",
    "floor_bytes",
    "floor_node",
}


def test_json_has_the_hand_computed_numbers(chain_file: Path) -> None:
    """Edges are (tensor, reader) pairs, peak 404 B, floor 304 B at g2; the unknown is null."""
    facts = invoke("inspect", chain_file, "--json").json
    assert set(facts) >= KEYS
    assert {key: facts[key] for key in KEYS} == {
        "name": "chain",
        "nodes": 6,
        "edges": 8,
        "parameters": None,
        "forward_macs": None,
        "flops": 6_000_000,
        "resident_bytes": {},
        "checkpoint_all_peak_bytes": 404,
        "floor_bytes": 304,
        "floor_node": "g2",
    }


def test_inference_peak_stands_beside_the_training_peak(chain_file: Path, tmp_path: Path) -> None:
    """The forward pass alone takes h1 + h2 (or x + h1) = 200 B of 404 B; unknown without phases."""
    facts = invoke("inspect", chain_file, "--json").json
    assert facts["inference_peak_bytes"] == 200
    assert facts["inference_peak_node"] == "h1"
    out = " ".join(invoke("inspect", chain_file).out.split())
    words = "peak of the forward pass alone, at h1; training takes 2.02 times as much"
    assert f"inference 200 B {words}" in out
    nodes = [entry | {"phase": "forward"} for entry in chain()["nodes"]]
    path = write_graph(tmp_path / "g.json", chain() | {"nodes": nodes})
    facts = invoke("inspect", path, "--json").json
    assert (facts["inference_peak_bytes"], facts["inference_peak_node"]) == (None, None)
    assert "inference unknown" in " ".join(invoke("inspect", path).out.split())


def test_option_and_argument_read_the_same_file(chain_file: Path) -> None:
    """A graph file may be given as --graph or as the argument."""
    assert invoke("inspect", "--graph", chain_file, "--json") == invoke(
        "inspect", chain_file, "--json"
    )


def test_file_beats_nothing_but_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing file is read whatever its name; a shipped model's name always means the model."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "mlp"):
        write_graph(tmp_path / name, chain())
    assert invoke("inspect", "mine", "--json").json["name"] == "chain"
    assert invoke("inspect", "mlp", "--json").json["name"] == "mlp"


def test_table_shows_what_json_says(chain_file: Path) -> None:
    """The table has peak, floor, the floor's tensors, phases and the largest tensors."""
    outcome = invoke("inspect", chain_file)
    assert outcome.status == 0
    assert outcome.err == ""
    for text in ("404 B", "304 B", "needed by", "g2", "backward", "Largest tensors", "8 edges"):
        assert text in outcome.out


@pytest.mark.parametrize("name", model_names())
def test_tables_of_shipped_models_fit_80_columns(name: str) -> None:
    """No line of the table of a shipped model is longer than a plain terminal."""
    outcome = invoke("inspect", name)
    assert outcome.status == 0
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_graph_without_tensors_is_shown(tmp_path: Path) -> None:
    """A node that makes nothing is a graph too: one node, no bytes."""
    lonely = {key: value for key, value in node("x").items() if key != "output_bytes"}
    document = chain() | {"nodes": [lonely | {"outputs": []}]}
    path = write_graph(tmp_path / "g.json", document)
    assert invoke("inspect", path).status == 0
    assert invoke("inspect", path, "--json").json["checkpoint_all_peak_bytes"] == 0


def test_names_are_printed_as_they_are(tmp_path: Path) -> None:
    """Brackets in names are no markup, and letters of any script survive."""
    document = chain() | {"name": "[bold]été[/]"}
    path = write_graph(tmp_path / "g.json", document)
    assert "[bold]été[/]" in invoke("inspect", path).out
    assert invoke("inspect", path, "--json").json["name"] == "[bold]été[/]"


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    """Control characters in names are spelled out, in tables and in errors."""
    document = chain() | {"name": "a\x1b[31mred\nnew"}
    path = write_graph(tmp_path / "g.json", document)
    outcome = invoke("inspect", path)
    assert "a\\x1b[31mred\\nnew" in outcome.out
    assert "\x1b" not in outcome.out
    assert invoke("inspect", path, "--json").json["name"] == document["name"]
    assert "\x1b" not in invoke("inspect", "\x1b[31m.json").err
