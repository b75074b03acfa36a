"""Runs of a sweep: what is crossed with what, and what identifies one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kit.commands import BOARD, chain, write_graph
from poetmodel.bench import Run, Settings, grid
from poetmodel.errors import InputError
from poetmodel.graph.catalogue import InputShape, Variant, load_model

if TYPE_CHECKING:
    from pathlib import Path


def test_all_combinations_budgets_ascending() -> None:
    """Back ends multiply methods that need one; budgets ascend as sizes, not as texts."""
    runs = grid(
        ["mlp"],
        ["rpi4b", "mkr1000"],
        ram=["100%", "70%", "1KiB"],
        deadlines=[None, "150%"],
        methods=["optimal", "dtr", "dtr"],
        backends=["highs", "scip"],
    )
    assert len(runs) == 2 * 2 * 3 * 3
    assert [run.ram for run in runs[:3]] == ["1KiB", "70%", "100%"]
    assert {(run.method, run.backend) for run in runs} == {
        ("optimal", "highs"),
        ("optimal", "scip"),
        ("dtr", None),
    }
    assert len({run.chain for run in runs}) == 12
    assert len({run.key for run in runs}) == len(runs)


def test_a_cell_survives_json() -> None:
    """Its fields travel as plain values, and give the same run and key."""
    (run,) = grid(["mlp"], ["rpi4b"], ram=["70%"], settings=Settings(gap=0.01))
    again = Run.from_dict(json.loads(json.dumps(run.to_dict())))
    assert (again, again.key) == (run, run.key)
    assert run.name == "mlp | rpi4b | 70% | optimal | highs"


def test_another_limit_or_graph_is_another_cell(tmp_path: Path) -> None:
    """A changed setting, graph or device file is not taken for what was solved before."""
    from poetmodel.bench.runs import _fingerprint, device_of, graph_of

    board = tmp_path / "board.toml"
    keys = []
    for size, power in ((100, "1.0"), (101, "1.0"), (101, "2.0")):
        for cached in (graph_of, device_of, _fingerprint):
            cached.cache_clear()
        document = chain()
        document["nodes"][0]["output_bytes"] = size
        graph = write_graph(tmp_path / "chain.graph.json", document)
        board.write_text(BOARD.replace("power_w = 1.0", f"power_w = {power}", 1))
        (run,) = grid([str(graph)], [str(board)], ram=["100%"])
        keys += [run.key, replace(run, settings=Settings(seed=1)).key]
    assert len(set(keys)) == 6


def test_all_faults_are_said_at_once() -> None:
    """Nothing is run before every name and limit is known to be usable."""
    with pytest.raises(InputError) as caught:
        grid(["mlp", "nope"], ["rpi4b"], ram=["70%", "7x"], methods=["best"])
    text = " ".join(caught.value.faults)
    assert all(word in text for word in ("'nope'", "'7x'", "'best'"))


def test_sizes_of_the_input_are_crossed_with_the_rest() -> None:
    """Each size is a problem of its own; a run of the network's own sizes is what it was."""
    shapes = (InputShape(), InputShape(batch=8), InputShape(batch=8, image=20))
    runs = grid(["mlp"], ["rpi4b"], ram=["70%"], shapes=shapes, methods=["dtr"])
    assert [run.network for run in runs] == ["mlp", "mlp, batch 8", "mlp, batch 8, image 20"]
    graphs = [run.problem().graph for run in runs]
    assert [graph.batch_size for graph in graphs] == [1, 8, 8]
    assert len({graph.sha256 for graph in graphs}) == 3
    assert len({run.chain for run in runs}) == len({run.key for run in runs}) == 3
    assert not {"batch", "image", "sequence", "state", "in_place"} & set(runs[0].to_dict())
    for run in runs:
        assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_state_of_a_network_is_part_of_a_run() -> None:
    """A network with its state in the graph is another problem, and its record says so."""
    shape = Variant(batch=2, state="sgd", in_place=True, tile="1KiB", train="last-2")
    (run,) = grid(["mlp"], ["rpi4b"], ram=["70%"], shapes=[shape])
    assert run.problem().graph == load_model("mlp", shape)
    assert run.network == "mlp, batch 2, state sgd, in place, tile 1KiB, train last-2"
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run
