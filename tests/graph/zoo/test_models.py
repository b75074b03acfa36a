"""The models: published numbers, and properties of all training graphs."""

from functools import cache

import pytest

import poetmodel as pm
from poetmodel.errors import InputError
from poetmodel.graph import zoo

WEIGHTED = ("conv2d", "linear", "batch_norm", "layer_norm", "embedding")
SMALL = {
    "mlp": {"hidden": (8, 6)},
    "vgg16": {"image_size": 32, "batch_norm": True},
    "vgg16-cifar": {},
    "resnet18": {"image_size": 32},
    "resnet18-cifar": {"image_size": 8},
    "resnet50": {"image_size": 32},
    "mobilenetv2": {"image_size": 32},
    "mobilenetv2-035": {"image_size": 32},
    "bert-base": {"seq_len": 8, "dropout": 0.1},
    "transformer": {"seq_len": 8},
    "resnet8": {},
    "mobilenetv1-vww": {"image_size": 32},
    "ds-cnn": {},
    "autoencoder": {},
}


@cache
def small(name, **settings):
    """Return a model of the zoo at a small size."""
    return zoo.MODELS[name](**SMALL[name], **settings)


def test_names_are_public():
    """The zoo has exactly the published names, and each graph carries its own."""
    assert list(zoo.MODELS) == list(SMALL)
    assert [small(name).name for name in SMALL] == list(SMALL)
    assert pm.zoo is zoo


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (zoo.mlp, 266_610),  # LeNet-300-100
        (zoo.vgg16, 138_357_544),
        (zoo.vgg16_cifar, 14_714_688 + 512 * 4096 + 4096 + 4096 * 4097 + 10 * 4097),
        (zoo.resnet18, 11_689_512),
        (zoo.resnet18_cifar, 11_173_962),
        (zoo.resnet50, 25_557_032),
        (zoo.mobilenetv2, 3_504_872),
        (lambda: zoo.mobilenetv2_035(classes=1000), 1_677_128),
        (zoo.bert_base, 109_482_240 + 2 * 769),  # embeddings, encoder, pooler; then the classifier
        (lambda: zoo.bert_base(head="mlm"), 109_514_298),  # BertForMaskedLM, decoder tied
        (lambda: zoo.bert_base(classes=5), 109_482_240 + 5 * 769),
        # MLPerf Tiny: the summaries of its Keras models, less two running statistics per channel.
        (zoo.resnet8, 78_666 - 2 * 240),
        (zoo.mobilenetv1_vww, 221_794 - 2 * 2736),
        (zoo.ds_cnn, 24_908 - 2 * 576),
        (zoo.autoencoder, 269_992 - 2 * 1032),
    ],
)
def test_published_parameter_counts(build, parameters):
    """Trainable parameters are the published number, to the last one."""
    graph = build()
    assert graph.parameters == parameters
    assert graph.resident_bytes["parameters"] == 4 * parameters


def test_block_has_the_parameters_of_an_encoder_layer():
    """A block of 512 features, 2048 inside, has the 3,152,384 parameters of the 2017 encoder."""
    sizes = [
        zoo.transformer(blocks=blocks, hidden=512, heads=8, feedforward=2048).parameters
        for blocks in (1, 2)
    ]
    assert sizes[0] is not None
    assert sizes[1] is not None
    assert sizes[1] - sizes[0] == 3_152_384


@pytest.mark.parametrize(
    ("build", "low", "high"),
    [
        (zoo.vgg16, 15.4e9, 15.6e9),
        (zoo.resnet18, 1.81e9, 1.83e9),
        (zoo.resnet50, 4.08e9, 4.12e9),
        (zoo.mobilenetv2, 0.30e9, 0.32e9),
        (zoo.resnet18_cifar, 0.55e9, 0.56e9),
        (zoo.vgg16_cifar, 0.31e9, 0.34e9),
        # M. Sandler et al., the published checkpoints of MobileNetV2: 59 M for width 0.35 at 224.
        (lambda: zoo.mobilenetv2_035(image_size=224, classes=1000), 58.5e6, 59.5e6),
        # MLPerf Tiny: 12.5 M, 7.5 M, 2.7 M and 0.264 M.
        (zoo.resnet8, 12.45e6, 12.55e6),
        (zoo.mobilenetv1_vww, 7.45e6, 7.55e6),
        (zoo.ds_cnn, 2.65e6, 2.75e6),
        (zoo.autoencoder, 264_000, 265_000),
    ],
)
def test_published_forward_macs(build, low, high):
    """Multiply-accumulates of one image are within the published figure's rounding."""
    macs = build().forward_macs
    assert low <= macs <= high


@pytest.mark.parametrize("name", SMALL)
def test_phases_come_in_order(name):
    """Forward, loss, backward, update; no node moves less than its tensors.

    Those without weights move exactly that.
    """
    order = ("forward", "loss", "backward", "update")
    phases = [node.phase for node in small(name, optimizer="sgd").nodes if node.phase != "input"]
    assert phases == sorted(phases, key=order.index)
    assert set(phases) == set(order)
    once = {node.op for node in small(name, optimizer="sgd").nodes if not node.recomputable}
    assert once <= {"input", "dropout_mask", "sgd_update"}
    graph = small(name)
    for k, node in enumerate(graph.nodes):
        if node.phase == "input":
            continue
        tensors = node.output_bytes + sum(graph.tensor_bytes[i] for i in graph.inputs_of[k])
        weighted = node.op.removesuffix("_weight").removesuffix("_input").removesuffix("_backward")
        assert (node.bytes_moved > tensors) == (weighted in WEIGHTED), node.name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_everything_made_is_read(name, fused):
    """Only the loss and weight gradients have no reader.

    Each weighted layer has exactly one node for its weights; a separate one makes 0 B.
    """
    graph = small(name, fused_backward=fused)
    for tensor, users in zip(graph.tensors, graph.users_of, strict=True):
        assert users or tensor.name == "loss" or tensor.bytes == 0, tensor.name
    ending = "backward" if fused else "grad_weight"
    made = [node.name for node in graph.nodes if node.name.endswith(f".{ending}")]
    wanted = [f"{node.name}.{ending}" for node in graph.nodes if node.op in WEIGHTED]
    if fused:
        made = [name for name in made if name in set(wanted)]
    assert sorted(made) == sorted(wanted)
    if not fused:
        assert all(graph.nodes[graph.node_index[name]].output_bytes == 0 for name in wanted)


@pytest.mark.parametrize("name", SMALL)
def test_fused_backward_has_one_node_per_layer(name):
    """Fused, every backward node is a sum of gradients or the one backward of its layer.

    Fusing changes no forward node, parameter or MAC, and adds no work.
    """
    graph = small(name, fused_backward=True)
    layers = {node.name for node in graph.nodes if node.phase in ("forward", "loss")}
    backward = [node for node in graph.nodes if node.phase == "backward" and node.op != "add"]
    owners = [node.name.removesuffix(".backward") for node in backward]
    assert len(set(owners)) == len(owners)
    assert set(owners) <= layers
    without = {node.op for node in graph.nodes if node.name in layers - set(owners)}
    assert without <= {"add", "dropout_mask"}
    separate, fused = small(name), small(name, fused_backward=True)
    ends = [
        next(k for k, node in enumerate(graph.nodes) if node.phase == "backward")
        for graph in (separate, fused)
    ]
    assert separate.nodes[: ends[0]] == fused.nodes[: ends[1]]
    assert (separate.parameters, separate.forward_macs) == (fused.parameters, fused.forward_macs)
    assert fused.flops <= separate.flops


@pytest.mark.parametrize("name", ["resnet18", "resnet18-cifar", "resnet50"])
def test_residual_networks_add_once_per_block(name):
    """Each block's input has two users, so each block has one accumulation of two gradients."""
    graph = small(name)
    blocks = sum(node.op == "add" and node.phase == "forward" for node in graph.nodes)
    sums = [node for node in graph.nodes if node.op == "add" and node.phase == "backward"]
    # Without max pooling before it, the first block's input is the result of the stem's ReLU.
    assert len(sums) == blocks == (16 if name == "resnet50" else 8)
    assert {len(node.inputs) for node in sums} == {2}


def test_attention_sums_four_gradients():
    """A block's input feeds query, key, value and the residual; its gradient sums four.

    Scores and their softmax have one s x s matrix per head; query and context do not grow.
    """
    nodes = {node.name: node for node in small("transformer").nodes}
    assert nodes["embeddings.norm.grad"].inputs == (
        "block0.attention.norm.grad_input",
        "block0.attention.value.grad_input",
        "block0.attention.key.grad_input",
        "block0.attention.query.grad_input",
    )
    graph = zoo.bert_base(seq_len=16, batch_size=3)
    sizes = {tensor.name: tensor.bytes for tensor in graph.tensors}
    for what in ("scores", "scale", "softmax"):
        assert sizes[f"block5.attention.{what}"] == 3 * 12 * 16 * 16 * 4
    for what in ("query", "key", "value", "context", "output", "add", "norm"):
        assert sizes[f"block5.attention.{what}"] == 3 * 16 * 768 * 4
    assert sizes["block5.ffn.gelu"] == 3 * 16 * 3072 * 4


@pytest.mark.parametrize("name", SMALL)
def test_element_type_scales_bytes(name):
    """Half precision halves all tensors except statistics, masks, positions, indices and the loss.

    Five samples cost five times one, except per-channel and per-position costs.
    """
    whole, half, quarter = (small(name, dtype=dtype) for dtype in ("float32", "float16", "int8"))
    fixed = ("mean", "inverse_deviation", "mask", "indices", "ids", "labels", "loss")
    for a, b, c in zip(whole.tensors, half.tensors, quarter.tensors, strict=True):
        if a.name.endswith(fixed) and "grad" not in a.name:
            assert a.bytes == b.bytes == c.bytes
        else:
            assert a.bytes == 2 * b.bytes == 4 * c.bytes
    assert whole.resident_bytes["parameters"] == 4 * quarter.resident_bytes["parameters"]
    assert (whole.flops, whole.parameters) == (half.flops, half.parameters)
    one, five = small(name), small(name, batch_size=5)
    assert (five.batch_size, five.parameters) == (5, one.parameters)
    assert five.forward_macs == 5 * one.forward_macs
    by_channel = {
        tensor.name for node in one.nodes if node.op == "batch_norm" for tensor in node.outputs[1:]
    }
    unscaled = by_channel | {"position_ids", "embeddings.position", "loss"}
    for a, b in zip(one.tensors, five.tensors, strict=True):
        alike = a.name in unscaled or a.name == "embeddings.add.grad_input1"
        assert b.bytes == (1 if alike else 5) * a.bytes, a.name
    for x, y in zip(one.nodes, five.nodes, strict=True):
        if not x.name.startswith("embeddings.position"):
            assert y.flops == 5 * x.flops, x.name


@pytest.mark.parametrize(
    "build",
    [
        lambda: zoo.vgg16(image_size=31),
        lambda: zoo.resnet50(classes=0),
        lambda: zoo.mlp(hidden=(3, 0)),
        lambda: zoo.bert_base(seq_len=513),
        lambda: zoo.bert_base(head="nsp"),
        lambda: zoo.transformer(heads=7),
        lambda: zoo.mobilenetv2(dropout=1.0),
        lambda: zoo.ds_cnn(dropout="a"),
        lambda: zoo.ds_cnn(dropout=1.5),
    ],
)
def test_options_that_make_no_model_are_refused(build, told):
    """A size that no model has is refused in a sentence that names it."""
    with told.raises(InputError):
        build()
