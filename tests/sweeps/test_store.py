"""Runs of a sweep, and the store that keeps their records."""

import errno
import json
import os
from dataclasses import replace
from functools import cache

import pytest

from kit.commands import BOARD, chain, write_graph
from poetmodel.baselines import method_names
from poetmodel.errors import InputError
from poetmodel.graph.catalogue import InputShape, Variant, load_model
from poetmodel.sweeps import Run, Settings, Store, grid
from poetmodel.sweeps.figures import FIGURES, Figure, FigureGrid, find_figure


def _record(key, status="optimal", **more):
    return {"key": key, "status": status, "cell": {}, "result": None, **more}


def test_records_and_schedules_are_kept(tmp_path):
    """A record is found again, its schedule in a file of its own."""
    store = Store(tmp_path / "sweep")
    assert (store.records(), store.load_schedule("a")) == ([], None)
    store.add(_record("a", schedule={"R": [[0, 0]]}))
    store.add(_record("b", schedule=None))
    again = Store(tmp_path / "sweep")
    assert again.records() == [_record("a"), _record("b")]
    assert again.load_schedule("a") == {"R": [[0, 0]]}
    assert again.load_schedule("b") is None


def test_failed_runs_are_not_finished(tmp_path):
    """They are run again; the record of a later run replaces the earlier one."""
    store = Store(tmp_path)
    store.add(_record("a", "failed"))
    assert store.finished_records() == {}
    store.add(_record("a", "infeasible"))
    assert list(store.finished_records()) == ["a"]
    assert len(store.records()) == 1


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_torn_last_line_is_taken_away(tmp_path, cut):
    """The partial line of a killed sweep is removed, and the next record has its own line."""
    store = Store(tmp_path)
    store.add(_record("a"))
    whole = store.path.read_bytes()
    store.add(_record("b"))
    torn = store.path.read_bytes()[: len(whole) + cut]
    store.path.write_bytes(torn)
    again = Store(tmp_path)
    assert list(again.finished_records()) == ["a"]
    again.add(_record("c"))
    assert list(again.finished_records()) == ["a", "c"]
    assert again.path.read_bytes().startswith(whole + b'{"key": "c"')


def test_line_without_its_end_is_kept(tmp_path):
    """Only the end of line was lost: the record counts."""
    store = Store(tmp_path)
    store.add(_record("a"))
    store.path.write_bytes(store.path.read_bytes()[:-1])
    again = Store(tmp_path)
    again.add(_record("b"))
    assert list(again.finished_records()) == ["a", "b"]


def test_only_a_torn_line(tmp_path):
    """A file without a complete line has only the next record, also after a partial character."""
    store = Store(tmp_path)
    store.path.write_bytes('{"key": "é'.encode()[:-1])
    assert Store(tmp_path).records() == []
    store.add(_record("a"))
    assert store.path.read_bytes().startswith(b'{"key": "a"')


def test_folder_that_cannot_be_made(tmp_path):
    """A file in place of the folder is reported, not overwritten."""
    (tmp_path / "taken").write_text("x")
    with pytest.raises(InputError, match="cannot be made"):
        Store(tmp_path / "taken")


@pytest.mark.parametrize(
    "line", [b"nonsense", b"[1]", b"\xff\xfe", b'{"key": "a"}', b"[" * 100_000, b"null", b""]
)
def test_lines_without_a_record_are_passed_over(tmp_path, line):
    """A damaged line loses only its own record, at any position."""
    store = Store(tmp_path)
    store.add(_record("a"))
    store.path.write_bytes(line + b"\n" + store.path.read_bytes() + line + b"\n")
    store.add(_record("b"))
    assert list(Store(tmp_path).finished_records()) == ["a", "b"]


def test_record_of_a_killed_neighbour_does_not_swallow_the_next(tmp_path):
    """A partial line of another sweep that was killed meanwhile is ended before the next record."""
    store = Store(tmp_path)
    store.add(_record("a"))
    with store.path.open("ab") as stream:
        stream.write(b'{"key": "torn')
    store.add(_record("b"))
    assert list(store.finished_records()) == list(Store(tmp_path).finished_records()) == ["a", "b"]


def test_record_that_cannot_be_written_whole_leaves_the_file(tmp_path, monkeypatch, told):
    """On a full disk, the sweep ends with an error, and the file is unchanged."""
    store = Store(tmp_path)
    store.add(_record("a"))
    before = store.path.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("poetmodel.sweeps.store.os.fsync", full)
        with told.raises(InputError):
            store.add(_record("b"))
    assert store.path.read_bytes() == before
    store.add(_record("b"))
    assert list(Store(tmp_path).finished_records()) == ["a", "b"]


def test_damaged_schedule_file_is_none(tmp_path):
    """A start that cannot be read is no start."""
    store = Store(tmp_path)
    store.add(_record("a", schedule={"R": []}))
    path = tmp_path / "schedules" / "a.schedule.json"
    for content in (b'{"R": [', b"\xff", b"[]"):
        path.write_bytes(content)
        assert store.load_schedule("a") is None


def test_records_of_other_sweeps_are_seen(tmp_path):
    """Each of two sweeps in a folder reads the other's records."""
    one, other = Store(tmp_path), Store(tmp_path)
    assert one.find_record("a") is None
    other.add(_record("a", "failed"))
    assert one.find_record("a") == _record("a", "failed")
    one.add(_record("a"))
    assert other.find_record("a") == _record("a")
    one.path.write_bytes(b"")
    assert other.find_record("a") is None


# -- runs ----------------------------------------------------------------------------------------
def test_all_combinations_budgets_ascending():
    """Back ends multiply methods that need one; budgets ascend as sizes, not as texts.

    A cell survives JSON: its fields are plain values, and have the same run and key.
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
    """A changed setting, graph or device file makes a new cell."""
    from poetmodel.sweeps.runs import _fingerprint, load_device, load_graph

    board = tmp_path / "board.toml"
    keys = []
    for size, power in ((100, "1.0"), (101, "1.0"), (101, "2.0")):
        for cached in (load_graph, load_device, _fingerprint):
            cached.cache_clear()
        document = chain()
        document["nodes"][0]["output_bytes"] = size
        graph = write_graph(tmp_path / "chain.graph.json", document)
        board.write_text(BOARD.replace("power_w = 1.0", f"power_w = {power}", 1))
        (run,) = grid([str(graph)], [str(board)], ram=["100%"])
        keys += [run.key, replace(run, settings=Settings(seed=1)).key]
    assert len(set(keys)) == 6


def test_all_faults_are_said_at_once():
    """No run begins before all names and limits are valid."""
    with pytest.raises(InputError) as caught:
        grid(["mlp", "nope"], ["rpi4b"], ram=["70%", "7x"], methods=["best"])
    text = " ".join(caught.value.faults)
    assert all(word in text for word in ("'nope'", "'7x'", "'best'"))


def test_sizes_of_the_input_are_crossed_with_the_rest():
    """Each size is a separate problem; runs of the default sizes have their former keys.

    A network with state in the graph is another problem, as its record states.
    """
    shapes = (InputShape(), InputShape(batch=8), InputShape(batch=8, image=20))
    runs = grid(["mlp"], ["rpi4b"], ram=["70%"], shapes=shapes, methods=["dtr"])
    assert [run.network for run in runs] == ["mlp", "mlp, batch 8", "mlp, batch 8, image 20"]
    graphs = [run.build_problem().graph for run in runs]
    assert [graph.batch_size for graph in graphs] == [1, 8, 8]
    assert len({graph.sha256 for graph in graphs}) == 3
    assert len({run.chain for run in runs}) == len({run.key for run in runs}) == 3
    assert not {"batch", "image", "sequence", "state", "in_place"} & set(runs[0].to_dict())
    for run in runs:
        assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    shape = Variant(batch=2, state="sgd", in_place=True, tile="1KiB", train="last-2")
    (run,) = grid(["mlp"], ["rpi4b"], ram=["70%"], shapes=[shape])
    assert run.build_problem().graph == load_model("mlp", shape)
    assert run.network == "mlp, batch 2, state sgd, in place, tile 1KiB, train last-2"
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run


# -- figures ---------------------------------------------------------------------------------------
@cache
def cells_of(name):
    """Return all runs of a figure, made once."""
    return find_figure(name).runs()


@pytest.mark.slow
@pytest.mark.parametrize("entry", FIGURES.values(), ids=lambda entry: entry.name)
def test_quick_run_is_a_smaller_one(entry):
    """It has fewer runs, none twice, shorter limits, and no problem of its own."""
    every, quick = cells_of(entry.name), entry.runs(quick=True)
    assert 0 < len(quick) < len(every)
    assert len({run.key for run in every}) == len(every)
    problems = {(run.model, run.device, run.ram, run.method) for run in every}
    if entry.name == "figure3":  # one budget more, as VGG-16 needs more than 40 %
        problems |= {
            (run.model, run.device, "45%", run.method) for run in every if run.ram == "50%"
        }
    assert {(run.model, run.device, run.ram, run.method) for run in quick} <= problems
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
    """Figure 3 has three networks, twice, on four devices by all methods."""
    runs = cells_of("figure3")
    assert {run.method for run in runs} == set(method_names())
    assert len({(run.model, run.device) for run in runs}) == 6 * 4
    assert len({(run.model, run.device, run.method) for run in runs}) == 24 * len(method_names())


def test_formulations_are_for_methods_that_solve():
    """A method without a solver has no run of a formulation."""
    runs = grid(
        ("mlp",), ("rpi4b",), ram=("75%",), methods=("optimal", "dtr"),
        formulations=(None, "compact"),
    )  # fmt: skip
    found = [(run.method, run.formulation) for run in runs]
    assert found == [("optimal", None), ("dtr", None), ("optimal", "compact")]


def test_parts_may_be_left_out_of_a_quick_run():
    """The message about an unknown figure names the figures there are."""
    part = FigureGrid(
        models=("mlp",), devices=("rpi4b",), ram=("75%",), quick_ram=(), methods=("dtr",)
    )
    entry = Figure(name="x", title="", paper="", grids=(part,), limit_s=2.0, quick_limit_s=1.0)
    assert len(entry.runs()) == 1
    assert entry.runs(quick=True) == ()
    with pytest.raises(InputError, match=r"figure2, figure3, figure4, figure5, table3, "):
        find_figure("figure6")
