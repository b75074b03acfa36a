"""Runs of a sweep: what is crossed with what, what identifies one, and those of the figures."""

import json
from dataclasses import replace
from functools import cache

import pytest

from kit.commands import BOARD, chain, write_graph
from poetmodel.baselines import method_names
from poetmodel.bench import Run, Settings, grid
from poetmodel.bench.figures import FIGURES, Figure, Part, figure
from poetmodel.errors import InputError
from poetmodel.graph.catalogue import InputShape, Variant, load_model


def test_all_combinations_budgets_ascending():
    """Back ends multiply methods that need one; budgets ascend as sizes, not as texts.

    A cell survives JSON: its fields travel as plain values, and give the same run and key.
    """
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
    (run,) = grid(["mlp"], ["rpi4b"], ram=["70%"], settings=Settings(gap=0.01))
    again = Run.from_dict(json.loads(json.dumps(run.to_dict())))
    assert (again, again.key) == (run, run.key)
    assert run.name == "mlp | rpi4b | 70% | optimal | highs"


def test_another_limit_or_graph_is_another_cell(tmp_path):
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


def test_all_faults_are_said_at_once():
    """Nothing is run before every name and limit is known to be usable."""
    with pytest.raises(InputError) as caught:
        grid(["mlp", "nope"], ["rpi4b"], ram=["70%", "7x"], methods=["best"])
    text = " ".join(caught.value.faults)
    assert all(word in text for word in ("'nope'", "'7x'", "'best'"))


def test_sizes_of_the_input_are_crossed_with_the_rest():
    """Each size is a problem of its own; a run of the network's own sizes is what it was.

    A network with its state in the graph is another problem, and its record says so.
    """
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
    shape = Variant(batch=2, state="sgd", in_place=True, tile="1KiB", train="last-2")
    (run,) = grid(["mlp"], ["rpi4b"], ram=["70%"], shapes=[shape])
    assert run.problem().graph == load_model("mlp", shape)
    assert run.network == "mlp, batch 2, state sgd, in place, tile 1KiB, train last-2"
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run


# -- figures ---------------------------------------------------------------------------------------
@cache
def cells_of(name):
    """Return all runs of a figure, made once."""
    return figure(name).runs()


@pytest.mark.slow
@pytest.mark.parametrize("entry", FIGURES.values(), ids=lambda entry: entry.name)
def test_quick_run_is_a_smaller_one(entry):
    """It has fewer runs, none twice, one seed, shorter limits, and no problem of its own."""
    every, quick = cells_of(entry.name), entry.runs(quick=True)
    assert 0 < len(quick) < len(every)
    assert len({run.key for run in every}) == len(every)
    problems = {(run.model, run.device, run.ram, run.method) for run in every}
    if entry.name == "figure3":  # one budget more, as VGG-16 needs more than 40 %
        problems |= {
            (run.model, run.device, "45%", run.method) for run in every if run.ram == "50%"
        }
    assert {(run.model, run.device, run.ram, run.method) for run in quick} <= problems
    assert {run.settings.seed for run in quick} == {0}
    assert {run.settings.time_limit_s for run in quick} == {entry.quick_limit_s}
    assert entry.quick_limit_s < max(run.settings.time_limit_s for run in every)
    limited = entry.runs(quick=True, time_limit_s=7.0)
    assert {run.settings.time_limit_s for run in limited} == {7.0}


@pytest.mark.parametrize("entry", FIGURES.values(), ids=lambda entry: entry.name)
def test_published_graphs_and_true_ones(entry):
    """Each figure is made on the graphs of the published code and on those of the zoo."""
    models = {run.model.startswith("paper/") for run in cells_of(entry.name)}
    assert models == {True, False}


def test_figures_have_all_that_they_compare():
    """Figure 3 has three networks, twice, on four devices by all methods.

    Three solvers have two formulations, two limits and three seeds; each starts cold.
    """
    runs = cells_of("figure3")
    assert {run.method for run in runs} == set(method_names())
    assert len({(run.model, run.device) for run in runs}) == 6 * 4
    assert len({(run.model, run.device, run.method) for run in runs}) == 24 * len(method_names())
    runs = [run for run in cells_of("solvers") if run.model == "paper/linear" and run.ram == "50%"]
    assert len(runs) == 3 * 2 * 2 * 3
    assert {run.settings.time_limit_s for run in runs} == {10.0, 60.0}
    assert not figure("solvers").warm


def test_formulations_are_for_methods_that_solve():
    """A method without a solver has no run of a formulation.

    The message about an unknown figure names the figures there are.
    """
    part = Part(
        models=("mlp",),
        devices=("rpi4b",),
        ram=("75%",),
        quick_ram=(),
        methods=("optimal", "dtr"),
        formulations=(None, "compact"),
    )
    entry = Figure(name="x", title="", paper="", parts=(part,), limit_s=2.0, quick_limit_s=1.0)
    found = [(run.method, run.formulation) for run in entry.runs()]
    assert found == [("optimal", None), ("dtr", None), ("optimal", "compact")]
    assert entry.runs(quick=True) == ()
    with pytest.raises(InputError, match="figure2, figure3, figure4, figure5, table3, solvers"):
        figure("figure6")
