"""The shipped models: complete, readable, and equal to the output of the script."""

import importlib.util
from itertools import product
from pathlib import Path

import pytest

import published
from kit.rotation import mark_seeds_except
from poetmodel.errors import GraphError
from poetmodel.files import shipped_folder
from poetmodel.graph import zoo
from poetmodel.graph.catalogue import (
    InputShape,
    Variant,
    describe_model,
    find_model_by_hash,
    load_model,
    model_names,
    model_path,
    read_model_or_file,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_graphs.py"


@pytest.fixture(scope="module")
def script():
    """Return the script that makes the shipped graphs, as a module."""
    spec = importlib.util.spec_from_file_location("make_graphs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_are_those_of_both_families():
    """The catalogue has exactly the models of the zoo and of the published code."""
    assert sorted(model_names()) == sorted([*zoo.MODELS, *published.MODELS])


def test_shipped_files_are_what_the_script_makes(script, capsys):
    """No graph file was edited by hand, left over or forgotten."""
    status = script.main(["--check", "--folder", str(shipped_folder("graphs"))])
    assert capsys.readouterr().out == ""
    assert status == 0


def test_script_repairs_a_folder_and_then_rests(script, tmp_path, monkeypatch, capsys):
    """Missing, changed and left-over files are reported by a check and put right by a run."""
    few = [(name, published.MODELS[name]()) for name in ("paper/linear", "paper/transformer")]
    monkeypatch.setattr(script, "build_shipped_graphs", lambda: few)
    changed = model_path(tmp_path, "paper/linear")
    changed.parent.mkdir()
    changed.write_text("{}")
    left_over = model_path(tmp_path, "old")
    left_over.write_text("{}")

    arguments = ["--folder", str(tmp_path)]
    assert script.main(["--check", *arguments]) == 1
    due = ["add paper/transformer", "change paper/linear", "remove old"]
    said = capsys.readouterr().out.replace(".graph.json", "").splitlines()
    assert sorted(said) == due
    assert changed.read_text() == "{}"

    assert script.main(arguments) == 0
    assert not left_over.exists()
    assert script.main(["--check", *arguments]) == 0


@pytest.mark.parametrize("name", model_names())
def test_model_loads_under_its_name(name):
    """A shipped file contains the graph of its name, and has a description."""
    graph = load_model(name)
    assert graph.name == name
    description = describe_model(name)
    assert description
    assert "\n" not in description


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("resnet-18", "resnet18"),
        ("vgg16_cifar", "vgg16-cifar or paper/vgg16-cifar"),
        ("Paper/Bert", "paper/bert"),
        ("linear", "paper/linear"),
    ],
)
def test_unknown_name_suggests_what_was_meant(typed, meant):
    """The message names similar models and the command that lists all."""
    with pytest.raises(GraphError) as caught:
        load_model(typed)
    message = str(caught.value)
    assert message.startswith(f"model {typed!r}: no such model; did you mean {meant}")
    assert "'poetmodel models' lists all" in message


@pytest.mark.parametrize("typed", ["zzz", "", "../pyproject", "/etc/passwd"])
def test_hopeless_name_is_refused_without_a_guess(typed, told):
    """A name that resembles none gets no guess, and no file outside the catalogue is read."""
    with told.raises(GraphError):
        describe_model(typed)


def test_file_name_in_place_of_a_model_points_to_the_option(told):
    """A graph file in place of a model has another error than a misspelt name."""
    with told.raises(GraphError):
        load_model("mine.graph.json")
    with pytest.raises(GraphError, match="a" * 300):
        read_model_or_file("a" * 300)  # longer than names of files


def test_sizes_of_an_input_are_said_in_two_ways():
    """Tables label a network with its other sizes; commands accept them as options."""
    assert InputShape(batch=8).label("mlp") == "mlp, batch 8"
    assert InputShape().label("mlp") == "mlp"
    assert InputShape(batch=8, image=96).options == ("--batch", "8", "--image", "96")
    made = Variant(batch=8, state="sgd", in_place=True, tile="32KiB", train="fc*")
    assert made.label("mlp") == "mlp, batch 8, state sgd, in place, tile 32KiB, train fc*"
    assert made.options == (
        *("--batch", "8", "--state", "sgd", "--in-place", "--tile", "32KiB"),
        *("--train", "fc*"),
    )
    assert Variant().overrides == InputShape().overrides == {}
    assert describe_model("resnet18-cifar") == "ResNet-18 on CIFAR-10, 32 x 32"


@pytest.mark.parametrize(
    ("name", "batch"),
    mark_seeds_except(
        SHAPES := [*product(("mlp", "ds-cnn", "resnet18-cifar", "transformer"), (2, 40, 1001))],
        {("mlp", 2), ("ds-cnn", 40), ("mlp", 1001)},
        SHAPES,
    ),
)
def test_model_is_found_by_its_fingerprint_at_any_batch_size(name, batch):
    """A file that names a network need not state the batch size, be it usual or not."""
    shape = InputShape(batch=batch)
    graph = load_model(name, shape)
    assert find_model_by_hash(name, graph.sha256) == (graph, shape)


@pytest.mark.parametrize("shape", [Variant(state="momentum"), Variant(state="sgd", in_place=True)])
def test_model_with_state_is_found_by_its_fingerprint(shape):
    """A file that names a network with state in the graph is found by its hash."""
    graph = load_model("mlp", shape)
    assert find_model_by_hash("mlp", graph.sha256) == (graph, shape)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Variant(tile="1KiB"), "model 'mlp', --tile 1KiB: --tile: '1KiB' is for a step with state"),
        (Variant(state="sgd", train="last-4"), "--train: expected last-1 to last-3, got 'last-4'"),
        (Variant(state="sgd", tile="7 apples"), "--tile: "),
    ],
)
def test_faults_of_a_state_name_the_options(shape, message):
    """Errors of the zoo name the options of the command."""
    with pytest.raises(GraphError) as caught:
        load_model("mlp", shape)
    assert message in str(caught.value)


def test_published_graphs_take_no_state(told):
    """Those are as they were published."""
    with told.raises(GraphError):
        load_model("paper/linear", Variant(state="sgd"))
