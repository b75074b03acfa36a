"""Models with their state in the graph: parameters, moments and running statistics."""

from fnmatch import fnmatchcase
from functools import cache

import hypothesis.strategies as st
import pytest
from hypothesis import given, reject, settings

from graph.zoo.test_models import SMALL
from graph.zoo.test_tape import KINDS, networks
from poetmodel.errors import InputError
from poetmodel.graph import checkpoint_all_peak_bytes, checkpoint_all_profile, zoo
from poetmodel.graph.zoo import Tape
from poetmodel.graph.zoo.operators import activation, batch_norm, cross_entropy, linear
from poetmodel.schedule import Schedule, checkpoint_all, simulate

NORMS = ("batch_norm", "layer_norm")
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}


@cache
def made(name, **settings):
    """Return a model of the zoo at a small size."""
    return zoo.MODELS[name](**SMALL[name], **settings)


def on_storage(graph):
    """Return the schedule that keeps all tensors to their last use, with all state on storage."""
    kept = checkpoint_all(graph)
    last = [max(users, default=k) for k, users in zip(graph.node_of, graph.users_of, strict=True)]
    replaced = {
        state: (graph.node_of[renewed], renewed) for state, renewed in graph.replacement_of.items()
    }
    homes = [(i, graph.node_of[i]) for i in graph.state_tensors]
    end = len(graph.nodes) - 1
    return Schedule(
        R=kept.R,
        S_RAM=(*kept.S_RAM, *((t, i) for i, k in homes for t in range(k + 1, last[i] + 1))),
        S_AUX=tuple(
            (t, i) for i, k in homes for t in range(k + 1, replaced.get(i, (end, 0))[0] + 1)
        ),
        M_out=tuple(replaced.values()),
    )


def replaced_by(graph):
    """Return the replacing node of each replaced state tensor."""
    return {
        tensor.replaces: node
        for node in graph.nodes
        for tensor in node.outputs
        if tensor.replaces is not None
    }


def parameters(graph):
    """Return the state tensors that are parameters, with their bytes."""
    return {
        node.name: node.output_bytes
        for node in graph.nodes
        if node.phase == "state" and node.op == "parameter"
    }


def expected_flops(name):
    """Return the FLOP of the graph without state, with each norm's backward in one node."""
    separate, fused = made(name), made(name, fused_backward=True)
    work = sum(node.flops for node in separate.nodes if not node.op.startswith(NORMS))
    return work + sum(node.flops for node in fused.nodes if node.op.startswith(NORMS))


def computed_flops(graph):
    """Return the FLOP of forward and backward pass, less the sums of shared weights' gradients."""
    return sum(
        node.flops
        for node in graph.nodes
        if node.phase != "update" and not node.name.endswith(".weight.grad")
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.sampled_from(sorted(SMALL.keys() - {"bert-base", "vgg16"})),
    st.sampled_from(("sgd", "momentum", "adam", "frozen")),
    st.booleans(),
    st.sampled_from((None, "3MB")),
    st.sampled_from((None, "all", "last-1", "last-2", "biases", "*.weight")),
)
def test_every_model_with_state_is_a_step_that_runs(name, state, in_place, tile, train):
    """With any options: valid, no state read after its replacement, each update once.

    With all state resident, the keep-all peak is that of the graph, and all state may be on
    storage.
    """
    if state == "frozen":
        train = None
    graph = made(name, state=state, in_place=in_place, tile=tile, train=train)
    assert graph.version == 2
    assert not graph.resident_bytes
    assert graph.parameters == made(name).parameters
    resident = simulate(graph, None, checkpoint_all(graph))
    assert not resident.violations
    assert resident.peak_ram_bytes == checkpoint_all_peak_bytes(graph)
    stored = simulate(graph, None, on_storage(graph))
    assert not stored.violations
    assert stored.peak_ram_bytes <= resident.peak_ram_bytes
    updates = replaced_by(graph)
    held = parameters(graph)
    assert sum(held.values()) == made(name).resident_bytes["parameters"]
    whole = {weight: weight in updates for weight in held}
    if state == "frozen":
        assert not updates
    elif train in (None, "all"):
        assert all(whole.values())
        assert computed_flops(graph) == expected_flops(name)
        assert (
            sum(node.output_bytes for node in graph.nodes if node.op == "moment")
            == 4 * MOMENTS[state] * graph.parameters
        )
    elif train == "biases":
        assert {weight for weight, trained in whole.items() if trained} == {
            weight for weight in held if ".bias" in weight
        }
    assert bool(in_place) == any(node.in_place for node in graph.nodes)
    sizes = graph.tensor_bytes
    assert all(sizes[y] == sizes[x] for pairs in graph.in_place_of for y, x in pairs)
    names = [node.name for node in graph.nodes]
    for weight, update in updates.items():
        readers = graph.users_of[graph.tensor_index[weight]]
        assert readers[-1] == names.index(update.name)
        if weight in held:  # it reads a gradient for every parameter, and all of it
            states = {tensor.replaces for tensor in update.outputs}
            arriving = [name for name in update.inputs if name not in states]
            assert sum(graph.tensor_bytes[graph.tensor_index[name]] for name in arriving) == sum(
                held.get(name, 0) for name in states if name is not None
            )
        assert not update.recomputable
    once = {node.op for node in graph.nodes if not node.recomputable and node.phase != "state"}
    assert once <= {
        "input",
        "dropout_mask",
        "running_statistics",
        *(f"{rule}_update" for rule in MOMENTS),
    }


@st.composite
def steps(draw):
    """Return a random network with state, the optimizer, and the trained weights."""
    state = draw(st.sampled_from(sorted(MOMENTS)))
    train = draw(st.sampled_from(("all", "last-1", "biases", "last", "n[0-3]*")))
    options = {"in_place": draw(st.booleans()), "tile": draw(st.sampled_from((None, 16, 32)))}
    kinds = (*KINDS, "tied", "batch_norm", "linear")
    try:
        graph = draw(networks(kinds, state=state, train=train, **options))
    except InputError:
        reject()  # no layer has such a name
    return graph, state, train


@given(steps())
def test_every_random_network_with_state_is_a_step_that_runs(step):
    """Every parameter that is trained and reached from the loss is updated once, and no other."""
    graph, state, train = step
    assert not simulate(graph, None, checkpoint_all(graph)).violations
    assert not simulate(graph, None, on_storage(graph)).violations
    reaching = {"loss"}
    for node in reversed(graph.nodes):
        if node.phase in ("forward", "loss") and {each.name for each in node.outputs} & reaching:
            reaching.update(node.inputs)
    held = parameters(graph)
    updates = {name: node for name, node in replaced_by(graph).items() if name in held}
    due = held.keys() & reaching
    if train == "biases":
        due = {name for name in due if ".bias" in name}
    elif train.startswith("last"):
        due = {name for name in due if name.startswith("last.")}
    elif train != "all":
        due = {name for name in due if fnmatchcase(name, train)}
    assert updates.keys() == due
    for name, node in updates.items():
        assert node.op == f"{state}_update"
        moments = [each for each in node.inputs if each.startswith(f"{name}.")]
        assert sum(not each.endswith("grad") for each in moments) == MOMENTS[state]
    made = {
        tensor.name for node in graph.nodes if node.phase == "backward" for tensor in node.outputs
    }
    read = {name for node in graph.nodes for name in node.inputs}
    assert made <= read


def tiny(**options):
    """Return a perceptron 4-3-2 with a batch norm and ReLU, batch 1."""
    tape = Tape("tiny", **options)
    x = tape.record(linear("fc1", tape.add_input("input", 1, 4), features=3))
    x = tape.record(activation("relu", tape.record(batch_norm("bn", x)), kind="relu"))
    x = tape.record(linear("fc2", x, features=2))
    return tape.differentiate(cross_entropy("loss", x, tape.add_indices("labels", 1)))


def test_tiny_step_with_momentum():
    """Each node of a small step has the inputs and outputs that were derived by hand."""
    graph = tiny(state="momentum")
    rows = [(node.name, node.phase, node.inputs) for node in graph.nodes]
    statistics = ("bn.mean", "bn.inverse_deviation")
    assert rows == [
        ("input", "input", ()),
        ("fc1.weight", "state", ()),
        ("fc1.bias", "state", ()),
        ("fc1", "forward", ("input", "fc1.weight", "fc1.bias")),
        ("bn.weight", "state", ()),
        ("bn.bias", "state", ()),
        ("bn", "forward", ("fc1", "bn.weight", "bn.bias")),
        ("bn.running_mean", "state", ()),
        ("bn.running_variance", "state", ()),
        ("bn.running", "update", (*statistics, "bn.running_mean", "bn.running_variance")),
        ("relu", "forward", ("bn",)),
        ("fc2.weight", "state", ()),
        ("fc2.bias", "state", ()),
        ("fc2", "forward", ("relu", "fc2.weight", "fc2.bias")),
        ("labels", "input", ()),
        ("loss", "loss", ("fc2", "labels")),
        ("loss.grad_input", "backward", ("loss.log_probabilities", "labels")),
        ("fc2.grad_input", "backward", ("loss.grad_input", "fc2.weight")),
        ("fc2.grad_weight", "backward", ("loss.grad_input", "relu")),
        ("fc2.weight.momentum", "state", ()),
        ("fc2.weight.update", "update", ("fc2.grad_weight", "fc2.weight", "fc2.weight.momentum")),
        ("fc2.grad_bias", "backward", ("loss.grad_input",)),
        ("fc2.bias.momentum", "state", ()),
        ("fc2.bias.update", "update", ("fc2.grad_bias", "fc2.bias", "fc2.bias.momentum")),
        ("relu.grad_input", "backward", ("fc2.grad_input", "relu")),
        ("bn.backward", "backward", ("relu.grad_input", "fc1", *statistics, "bn.weight")),
        ("bn.weight.momentum", "state", ()),
        ("bn.bias.momentum", "state", ()),
        ("bn.update", "update", ("bn.grad_weight", "bn.grad_bias", "bn.weight", "bn.bias",
                                 "bn.weight.momentum", "bn.bias.momentum")),
        ("fc1.grad_weight", "backward", ("bn.grad_input", "input")),
        ("fc1.weight.momentum", "state", ()),
        ("fc1.weight.update", "update", ("fc1.grad_weight", "fc1.weight", "fc1.weight.momentum")),
        ("fc1.grad_bias", "backward", ("bn.grad_input",)),
        ("fc1.bias.momentum", "state", ()),
        ("fc1.bias.update", "update", ("fc1.grad_bias", "fc1.bias", "fc1.bias.momentum")),
    ]  # fmt: skip
    sizes = {tensor.name: tensor.bytes for tensor in graph.tensors}
    assert (sizes["fc1.grad_weight"], sizes["fc1.grad_bias"]) == (4 * 12, 4 * 3)
    assert (sizes["fc1.weight.momentum+"], sizes["bn.running_mean+"]) == (48, 12)


def test_tiny_step_in_place():
    """Elementwise operators, norms and the loss may write over an input, layers may not.

    Without state the marks alone are added.
    """
    graph = tiny(state="sgd", in_place=True)
    assert {node.name: node.in_place for node in graph.nodes if node.in_place} == {
        "bn": (("bn", "fc1"),),
        "relu": (("relu", "bn"),),
        "loss": (("loss.log_probabilities", "fc2"),),
        "loss.grad_input": (("loss.grad_input", "loss.log_probabilities"),),
        "relu.grad_input": (("relu.grad_input", "fc2.grad_input"),),
        "bn.backward": (("bn.grad_input", "relu.grad_input"),),
    }
    graph, plain = made("resnet18-cifar", in_place=True), made("resnet18-cifar")
    assert [node.name for node in graph.nodes] == [node.name for node in plain.nodes]
    assert graph.resident_bytes == plain.resident_bytes
    assert not graph.state_tensors
    assert sum(checkpoint_all_profile(graph)) < sum(checkpoint_all_profile(plain))


def test_shared_weight_is_updated_once_from_the_sum_of_its_gradients():
    """The tied word embedding waits for the decoder's gradient and its own."""
    graph = zoo.bert_base(head="mlm", seq_len=4, state="sgd")
    nodes = {node.name: node for node in graph.nodes}
    table = "embeddings.token.weight"
    assert nodes[f"{table}.grad"].inputs == (
        "mlm.decoder.grad_weight",
        "embeddings.token.grad_weight",
    )
    assert nodes[f"{table}.update"].inputs == (f"{table}.grad", table)
    assert list(replaced_by(graph)).count(table) == 1
    readers = [graph.nodes[k].name for k in graph.users_of[graph.tensor_index[table]]]
    assert readers == [
        "embeddings.token",
        "mlm.decoder",
        "mlm.decoder.grad_input",
        f"{table}.update",
    ]


@pytest.mark.parametrize("tile", ["64KiB", 5000])
def test_tiles_have_the_sums_of_the_whole(tile):
    """Tiles of a weight: none too large, together its bytes, its gradients' work and its update."""
    whole = zoo.mlp(state="adam")
    tiled = zoo.mlp(state="adam", tile=tile)
    assert tiled.flops == whole.flops
    largest = 65536 if isinstance(tile, str) else tile
    assert max(parameters(tiled).values()) <= largest
    for op in ("linear_backward_weight", "adam_update", "moment", "parameter"):
        sums = [
            (sum(node.flops for node in graph.nodes if node.op == op),
             sum(node.output_bytes for node in graph.nodes if node.op == op))
            for graph in (whole, tiled)
        ]  # fmt: skip
        assert sums[0] == sums[1]
    tiles = [name for name in parameters(tiled) if name.startswith("fc1.weight.")]
    nodes = {node.name: node for node in tiled.nodes}
    assert len(tiles) > 1
    assert set(tiles) <= set(nodes["fc1"].inputs)
    for number, name in enumerate(tiles):
        gradient = f"fc1.grad_weight.{number}"
        assert nodes[f"{name}.update"].inputs[:2] == (gradient, name)


def test_tiles_of_tables_norms_and_channels():
    """Looked-up rows are added to a table's gradient; its tiles together compute that.

    Tiles of a norm's weight have one backward node, with no more work. A row of 784 weights has
    3136 B; tiles of 1 kB are single rows.
    """
    added = []
    for tile in (None, "1MB"):
        graph = made("transformer", state="sgd", tile=tile)
        nodes = [node for node in graph.nodes if "token.grad_weight" in node.name]
        sizes = {tensor.name: tensor.bytes for tensor in graph.tensors}
        added.append(
            sum(
                (node.bytes_moved or 0)
                - node.output_bytes
                - sum(sizes[name] for name in node.inputs)
                for node in nodes
            )
        )
        assert (len(nodes) > 1) == (tile is not None)
    assert added == [2 * 8 * 768 * 4] * 2
    whole, tiled = made("resnet8", state="sgd"), made("resnet8", state="sgd", tile=64)
    assert whole.flops == tiled.flops
    node = tiled.nodes[tiled.node_index["block3.bn1.backward"]]
    assert [tensor.bytes for tensor in node.outputs[1:]] == [64] * 8
    held = parameters(zoo.mlp(state="sgd", tile="1kB"))
    assert [size for name, size in held.items() if name.startswith("fc1.weight")] == [3136] * 300


def backward(graph):
    """Return the nodes of the backward pass."""
    return [node.name for node in graph.nodes if node.phase == "backward"]


def test_frozen_step_is_the_forward_pass_and_the_loss():
    """No weight trains, so there is no gradient; batch norms use running statistics."""
    graph = tiny(state="frozen")
    assert not backward(graph)
    assert graph.nodes[-1].name == "loss"
    norm = graph.nodes[graph.node_index["bn"]]
    assert norm.inputs == ("fc1", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_variance")
    assert [tensor.name for tensor in norm.outputs] == ["bn"]


@pytest.mark.parametrize("train", ["last-1", "fc2", "fc2.*"])
def test_last_layers_need_no_backward_below(train):
    """If only the last layer trains, no gradient of its inputs is computed."""
    assert backward(tiny(state="sgd", train=train)) == [
        "loss.grad_input",
        "fc2.grad_weight",
        "fc2.grad_bias",
    ]


def test_norm_belongs_to_the_layer_before_it():
    """The last two layers of conv, norm, conv, norm, linear are the last conv and the linear.

    With biases trained alone, no convolution's or norm's input is read by the backward pass.
    """
    trained = replaced_by(made("resnet18-cifar", state="sgd", train="last-2"))
    assert set(trained) == {
        f"layer4.1.{name}"
        for name in ("conv2.weight", "bn2.weight", "bn2.bias", "bn2.running_mean",
                     "bn2.running_variance")
    } | {"fc.weight", "fc.bias"}  # fmt: skip
    graph = made("resnet18-cifar", state="sgd", train="biases")
    layers = {
        graph.nodes[k].name
        for i, tensor in enumerate(graph.tensors)
        if graph.nodes[graph.node_of[i]].op == "conv2d"
        for k in graph.users_of[graph.tensor_index[tensor.name]]
        if graph.nodes[k].phase == "backward"
    }
    assert not layers
    assert not any(name.endswith("grad_weight") for name in backward(graph))


def chain(train, *, kind="relu"):
    """Return four layers of 64 features on 32 rows, each with an activation, and a loss."""
    tape = Tape("chain", batch_size=32, state="sgd", train=train, in_place=True)
    x = tape.add_input("input", 32, 64)
    for number in range(1, 5):
        x = tape.record(linear(f"fc{number}", x, features=64))
        x = tape.record(activation(f"act{number}", x, kind=kind))
    return tape.classify("last", x, classes=2)


@pytest.mark.parametrize("kind", ["relu", "relu6"])
def test_masks_stand_for_values_that_no_gradient_reads(kind):
    """If weights train, the next layer's gradient reads the values; for biases, none does."""
    assert not [node for node in chain("*.weight", kind=kind).nodes if node.op == "mask"]
    graph = chain("biases", kind=kind)
    nodes = {node.name: node for node in graph.nodes}
    masks = [node for node in graph.nodes if node.op == "mask"]
    assert [node.name for node in masks] == [f"act{k}.mask" for k in range(1, 5)]
    for mask in masks:
        activation_name = mask.name.removesuffix(".mask")
        assert mask.inputs == (activation_name,)
        assert mask.output_bytes == 32 * 64 // 8
        gradient = nodes[f"{activation_name}.grad_input"]
        assert gradient.inputs[1:] == (mask.name,)
    assert "mask" not in {node.op for node in chain("biases", kind="tanh").nodes}


def test_masks_take_what_arithmetic_says(monkeypatch):
    """Four results of 32 x 64 reals, N = 8 KiB, are kept for the backward pass, or masks of 256 B.

    With values, the peak is where the loss has arrived at them: all four, the gradient of the last
    (N), and those of the two logits (256 B) and of their bias (8 B). With masks, it is at the bias
    of the last hidden layer (256 B): the gradient that arrived there, the one made of it (2 N), and
    the masks of the three layers before.
    """
    masks = chain("biases")
    monkeypatch.setattr("poetmodel.graph.zoo.tape.save_bit_masks", list)
    values = chain("biases")
    state = values.state_bytes
    assert checkpoint_all_peak_bytes(values) - state == 5 * 8192 + 256 + 8
    assert checkpoint_all_peak_bytes(masks) - state == 2 * 8192 + 256 + 3 * 256


def test_dropout_keeps_a_bit_of_an_element():
    """Of 10 elements both directions read 2 B where a part is trained; where all is, 10 B."""
    for train, size in (("*.bias", 2), ("all", 10)):
        tape = Tape("dropped", batch_size=2, state="sgd", train=train)
        x = tape.record(linear("fc", tape.add_input("input", 2, 3), features=5))
        graph = tape.classify("last", tape.record_dropout("drop", x, rate=0.5), classes=2)
        nodes = {node.name: node for node in graph.nodes}
        assert nodes["drop.mask"].output_bytes == size
        assert nodes["drop"].inputs == ("fc", "drop.mask")
        assert nodes["drop.grad_input"].inputs[1:] == ("drop.mask",)


@pytest.mark.parametrize(
    "options",
    [
        {"state": "lamb"},
        {"state": "sgd", "optimizer": "sgd"},
        {"tile": "32KiB"},
        {"train": "all"},
        {"state": "frozen", "train": "all"},
        {"state": "sgd", "train": "last-9"},
        {"state": "sgd", "train": "last-0"},
        {"state": "sgd", "train": "conv*"},
        {"state": "sgd", "train": 3},
        {"state": "sgd", "train": ""},
        {"state": "sgd", "tile": 0},
        {"state": "sgd", "tile": "big"},
    ],
)
def test_options_that_do_not_go_together_are_refused(options, told):
    """Contradictory options are refused with the accepted ones."""
    with told.raises(InputError):
        tiny(**options)
