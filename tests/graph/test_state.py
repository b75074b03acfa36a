"""Graphs of version 2: state tensors, their replacements, and operators in place."""

import json
import pickle
from dataclasses import replace

import pytest

from kit.instances import make_rng, random_step
from kit.worked import make_state_node, make_update_node
from poetmodel.device import Costs
from poetmodel.errors import CostError, GraphError
from poetmodel.graph import (
    Graph,
    Node,
    Tensor,
    checkpoint_all_peak_bytes,
    checkpoint_all_profile,
    floor,
    inference_profile,
    operation,
)
from poetmodel.graph.io import canonical_json


def step(*changed):
    """Return x, w, y = f(x, w), g, w+ = u(w, g), with nodes of these names changed."""
    nodes = {
        "x": operation("x", output_bytes=10, phase="input", on_aux=True),
        "w": make_state_node("w", 8),
        "y": operation("y", output_bytes=6, inputs=("x", "w"), in_place={"y": "x"}),
        "g": operation("g", output_bytes=8, inputs=("y",), phase="backward"),
        "u": make_update_node("u", "g", w=8),
    }
    return Graph(name="step", nodes=tuple({**nodes, **{n.name: n for n in changed}}.values()))


def document(**changes):
    """Return `step` as in a file, with changed keys of nodes; None removes one."""
    found = step().to_dict()
    for node in found["nodes"]:
        node.update(changes.get(node["name"]) or {})
        for key in [key for key, value in node.items() if value is None]:
            del node[key]
    return found


def fault(content):
    """Return the one fault of a document."""
    with pytest.raises(GraphError) as caught:
        Graph.from_dict(content)
    (found,) = caught.value.faults
    return found.removeprefix("graph: ")


W_PLUS = {"name": "w+", "bytes": 8, "replaces": "w"}


# -- what a graph knows ------------------------------------------------------------------------
def test_graph_knows_its_state():
    """State, its replacements and in-place pairs have indices.

    No reader of state runs in a stage after its replacement. A replacement needs no additional
    RAM, and y is written over x, unless x is read again. The eight bytes of w count from the
    first step to the last.
    """
    graph = step()
    assert (graph.version, graph.state_tensors) == (2, (1,))
    assert dict(graph.replacement_of) == {1: 4}
    assert graph.in_place_of == ((), (), ((2, 0),), (), ())
    assert graph.state_bytes == 8
    assert not graph.nodes[1].recomputable
    assert graph.allocated_bytes == (10, 8, 6, 8, 0)
    graph = step(operation("z", output_bytes=4, inputs=("y",)))
    assert graph.last_stages == (5, 4, 4, 5, 4, 5)
    assert [graph.last_page_in_stage(i) for i in range(len(graph.tensors))] == [5, 4, 5, 5, 5, 5]
    graph = step()
    assert graph.step_bytes == (10, 8, 10 + 8 + 6 - 6, 6 + 8, 8 + 8)
    assert floor(graph).bytes == 18
    assert floor(graph, memory_mapped=True).bytes == 14
    assert checkpoint_all_profile(graph) == (18, 8 + 10, 8 + 10 + 6 - 6, 8 + 6 + 8, 8 + 8)
    assert checkpoint_all_peak_bytes(graph) == 22
    assert inference_profile(graph) == {0: 18, 1: 18, 2: 18}
    graph = step(operation("g", output_bytes=8, inputs=("y", "x"), phase="backward"))
    assert checkpoint_all_profile(graph)[2:4] == (8 + 10 + 6, 8 + 10 + 6 + 8)
    assert floor(graph).bytes == 24


# -- files -------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(150))
def test_nothing_is_lost(seed, tmp_path):
    """Dictionary, canonical text, file, networkx and pickle return the same graph."""
    graph = random_step(make_rng(f"files/{seed}"), flops=5)
    path = tmp_path / "step.graph.json"
    graph.save(path)
    for again in (
        Graph.from_dict(graph.to_dict()),
        Graph.from_dict(graph.to_dict(defaults=True)),
        Graph.from_dict(json.loads(canonical_json(graph.to_dict(defaults=True)))),
        Graph.from_networkx(graph.to_networkx()),
        Graph.load(path),
        pickle.loads(pickle.dumps(graph)),  # noqa: S301 - its own bytes
        replace(graph),
    ):
        assert again == graph
        assert hash(again) == hash(graph)
        assert again.sha256 == graph.sha256


def test_file_is_of_version_2_and_short():
    """Keys that a node of phase state may not have are not written; pairs are an object.

    A graph without keys of version 2 has its former text.
    """
    found = step().to_dict(defaults=True)
    assert found["version"] == 2
    assert found["nodes"][1] == {
        "name": "w",
        "op": "parameter",
        "phase": "state",
        "inputs": [],
        "output_bytes": 8,
    }
    assert found["nodes"][2]["in_place"] == {"y": "x"}
    assert found["nodes"][4]["outputs"] == [W_PLUS]
    plain = Graph(name="pair", nodes=(operation("a", output_bytes=8),))
    assert (plain.version, plain.state_tensors, dict(plain.replacement_of)) == (1, (), {})
    assert plain.to_dict()["version"] == 1
    assert "in_place" not in canonical_json(plain.to_dict(defaults=True))
    assert Graph.from_dict({**plain.to_dict(), "version": 2}) == plain
    empty = {**plain.to_dict(), "version": 2}
    empty["nodes"][0]["in_place"] = {}
    assert Graph.from_dict(empty).sha256 == plain.sha256


def test_pairs_are_the_same_in_any_order():
    """The order of an object has no meaning."""
    inputs = tuple(operation(name, output_bytes=2) for name in "ab")
    outputs = (Tensor(name="c", bytes=2), Tensor(name="d", bytes=2))

    def made(pairs):
        node = Node(
            name="f", op="f", phase="forward", inputs=("a", "b"), outputs=outputs, in_place=pairs
        )
        return Graph(name="g", nodes=(*inputs, node))

    assert made({"d": "a", "c": "b"}) == made((("c", "b"), ("d", "a")))
    assert made({"d": "a", "c": "b"}).sha256 == made({"c": "b", "d": "a"}).sha256


# -- faults ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"w": {"flops": 1}},
            "nodes[1] ('w').flops: a node of phase state computes nothing; leave the key out",
        ),
        ({"w": {"workspace_bytes": 3}}, "nodes[1] ('w').workspace_bytes: a node of phase state"),
        ({"w": {"on_aux": True}}, "nodes[1] ('w').on_aux: a node of phase state computes nothing"),
        ({"w": {"bytes_moved": 1}}, "nodes[1] ('w').bytes_moved: a node of phase state computes"),
        ({"w": {"inputs": ["x"]}}, "nodes[1] ('w').inputs: a node of phase state reads nothing; e"),
        (
            {"w": {"output_bytes": None, "outputs": [W_PLUS | {"name": "w"}]}},
            "nodes[1] ('w').outputs: a node of phase state replaces nothing; leave replaces out",
        ),
        (
            {
                "w": {
                    "output_bytes": None,
                    "outputs": [{"name": "w", "bytes": 8}, {"name": "v", "bytes": 1}],
                }
            },
            "nodes[1] ('w').outputs: a node of phase state has 1 output, got 2",
        ),
        (
            {"u": {"recomputable": None}},
            "nodes[4] ('u').recomputable: expected false, since the node replaces 'w'; a state "
            "tensor is updated once",
        ),
        ({"u": {"recomputable": True}}, "nodes[4] ('u').recomputable: expected false, since the"),
        ({"u": {"on_aux": True}}, "nodes[4] ('u').on_aux: expected false, since the node replaces"),
        (
            {"u": {"outputs": [W_PLUS | {"bytes": 9}]}},
            "nodes[4] ('u').outputs: 'w+' replaces 'w', but they differ in bytes: 9 and 8",
        ),
        (
            {"u": {"outputs": [W_PLUS, W_PLUS | {"name": "w2"}]}},
            "nodes[4] ('u').outputs: 'w2' replaces 'w', which nodes[4] ('u') replaces already",
        ),
        (
            {
                "g": {"recomputable": False, "output_bytes": None, "inputs": ["y", "w"]}
                | {"outputs": [{"name": "g", "bytes": 8}, W_PLUS | {"name": "w2"}]},
                "u": {"inputs": ["g", "w"]},
            },
            "nodes[4] ('u').outputs: 'w+' replaces 'w', which nodes[3] ('g') replaces already|"
            "nodes[4] ('u').inputs: 'w' is read after nodes[3] ('g') has replaced it",
        ),
        (
            {"u": {"inputs": ["g"]}},
            "nodes[4] ('u').outputs: 'w+' replaces 'w', which the node does not read; add it to in",
        ),
        (
            {"u": {"outputs": [W_PLUS | {"replaces": "g"}]}},
            "nodes[4] ('u').outputs: 'w+' replaces 'g', which is no state tensor: nodes[3] ('g') i",
        ),
        (
            {"u": {"outputs": [W_PLUS | {"replaces": "z"}]}},
            "nodes[4] ('u').outputs: 'w+' replaces 'z', which no node makes",
        ),
        ({"u": {"outputs": [W_PLUS | {"replaces": 5}]}}, "outputs[0].replaces: expected a non-em"),
        ({"y": {"in_place": {"z": "x"}}}, "nodes[2] ('y').in_place: 'z' is no output of the node"),
        ({"y": {"in_place": {"y": "g"}}}, "nodes[2] ('y').in_place: 'g' is no input of the node"),
        (
            {"y": {"in_place": {"y": "w"}}},
            "nodes[2] ('y').in_place: 'w' is a state tensor; only its replacement may overwrite it",
        ),
        (
            {"u": {"in_place": {"w+": "g"}}},
            "nodes[4] ('u').in_place: 'w+' replaces a state tensor, in whose memory it is written",
        ),
        ({"w": {"in_place": {"w": "x"}}}, "nodes[1] ('w').in_place: 'x' is no input of the node"),
        (
            {
                "y": {
                    "output_bytes": None,
                    "outputs": [{"name": "y", "bytes": 6}, {"name": "v", "bytes": 1}],
                    "in_place": {"y": "x", "v": "x"},
                }
            },
            "nodes[2] ('y').in_place: 'v' overwrites 'x' already",
        ),
        ({"y": {"in_place": ["x"]}}, "nodes[2] ('y').in_place: expected an object that maps names"),
        ({"y": {"in_place": {"y": 3}}}, "nodes[2] ('y').in_place: expected an object that maps"),
    ],
)
def test_each_fault_of_state_names_its_place(changes, message):
    """Each is a sentence that names node and field."""
    with pytest.raises(GraphError) as caught:
        Graph.from_dict(document(**changes))
    found = [each.removeprefix("graph: ") for each in caught.value.faults]
    assert len(found) == len(message.split("|")), found
    for each, wanted in zip(found, message.split("|"), strict=True):
        assert wanted in each


def test_nobody_reads_a_replaced_state_or_a_replacement(told):
    """Replaced state is not readable after the update; its new value is for the next step."""
    late = operation("late", output_bytes=1, inputs=("w",))
    with pytest.raises(GraphError, match=r"nodes\[5\] \('late'\)\.inputs: 'w' is read after") as e:
        step(late)
    assert "must be its last reader" in str(e.value)
    with told.raises(GraphError, "second"):
        step(replace(late, inputs=("w+",)))
    chained = make_update_node("v", "w+", **{"w+": 8})
    with told.raises(GraphError, "third"):
        step(chained)


def test_pairs_that_share_an_output_are_no_object():
    """An output overwrites at most one input; invalid objects are errors, not crashes."""
    for pairs in ((("y", "x"), ("y", "w")), 7, (("y",),), ("yx",), [("y", "x")]):
        with pytest.raises(GraphError, match=r"\('y'\)\.in_place: expected an object"):
            step(operation("y", output_bytes=6, inputs=("x", "w"), in_place=pairs))


@pytest.mark.parametrize("name", ["flops", "workspace_bytes", "on_aux"])
def test_state_made_in_python_computes_nothing(name, told):
    """The rule of files holds of nodes made in Python, and recomputable is false by itself."""
    with told.raises(GraphError):
        step(replace(make_state_node("w", 8), **{name: True if name == "on_aux" else 3}))


def test_version_1_has_no_key_of_version_2():
    """Each node that needs version 2 is named, with its keys."""
    with pytest.raises(GraphError) as caught:
        Graph.from_dict({**document(), "version": 1})
    assert [each.removeprefix("graph: ") for each in caught.value.faults] == [
        "nodes[1] ('w'): phase: needs \"version\": 2, the file says 1",
        "nodes[2] ('y'): in_place: needs \"version\": 2, the file says 1",
        "nodes[4] ('u'): outputs.replaces: needs \"version\": 2, the file says 1",
    ]


# -- costs -------------------------------------------------------------------------------------
def test_state_has_no_compute_costs(told):
    """A profile has page columns alone for it, and compute costs are refused."""
    graph, pages = step(), [(1.0, 2.0)] * 5
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1, 0, 1, 1, 1],
        compute_energy_j=[2, 0, 2, 2, 2],
        page_in=pages,
        page_out=pages,
    )
    assert "w" not in costs.compute
    assert costs.table(graph).compute_time_s == (1, 0, 1, 1, 1)
    dear = Costs.from_arrays(graph, compute_time_s=[1] * 5, compute_energy_j=[2] * 5)
    with told.raises(CostError):
        dear.table(graph)
