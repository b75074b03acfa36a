"""The graphs of the published POET code, against figures worked out by hand from its rules."""

import pytest

import published
from poetmodel.errors import GraphError
from poetmodel.graph import checkpoint_all_peak_bytes


@pytest.fixture(scope="module", params=sorted(published.MODELS))
def graph(request):
    """Return each model at its default size."""
    return published.MODELS[request.param]()


def node(graph, name):
    """Return a node by name."""
    return graph.nodes[graph.node_index[name]]


def forward(graph):
    """Return the indices of the nodes before the backward pass."""
    return [k for k, each in enumerate(graph.nodes) if each.phase != "backward"]


def test_nodes_have_one_output_and_nothing_special(graph):
    """The family is the paper's case: one tensor per node, no workspace, nothing on storage.

    Walking back, each gradient reads its layer, the layer after it and the gradient before.
    """
    for each in graph.nodes:
        assert [tensor.name for tensor in each.outputs] == [each.name]
        assert (each.workspace_bytes, each.on_aux, each.recomputable) == (0, False, True)
        assert each.bytes_moved is None
    assert graph.dtype == "float32"
    layers = [graph.nodes[k] for k in forward(graph)]
    gradients = graph.nodes[len(layers) :]
    assert len(gradients) == len(layers) - 1
    upstream = layers[-1].name
    for step, gradient in enumerate(gradients, 1):
        layer, after = layers[-1 - step], layers[-step]
        assert gradient.name == f"grad.{layer.name}"
        assert set(gradient.inputs) == {layer.name, after.name, upstream}
        assert gradient.output_bytes == after.output_bytes
        assert gradient.flops == 2 * layer.flops
        upstream = gradient.name


def test_vgg_follows_the_published_rules():
    """Convolution, rectifier, pooling, flattening, linear and loss figures, worked out by hand."""
    vgg = published.vgg16_cifar()
    assert node(vgg, "grad.fc3").inputs == ("fc3", "loss")  # which it reads once
    stem = node(published.resnet18(), "conv")  # its stride does not lower the count
    assert stem.flops == 2 * 49 * (3 * 224 * 224) * 64 + 64 * 112 * 112
    first = node(vgg, "conv1_1")
    assert first.inputs == ("input",)
    assert first.flops == 2 * 9 * (3 * 32 * 32) * 64 + 64 * 32 * 32
    assert first.output_bytes == 64 * 32 * 32 * 4
    assert node(vgg, "relu1_1").flops == 64 * 32 * 32
    assert node(vgg, "pool1").flops == 2 * 4 * 64 * 16 * 16
    assert node(vgg, "pool5").output_bytes == 512 * 4
    assert node(vgg, "flatten").flops == 512
    assert node(vgg, "fc1").flops == 2 * 513 * 4096 + 4096
    assert node(vgg, "dropout1").flops == 4096
    assert node(vgg, "loss").flops == 10 * 10
    assert vgg.parameters == 33_638_218
    assert vgg.resident_bytes == {"parameters": 134_552_872, "gradients": 134_552_872}


def test_residuals_start_where_the_published_code_has_them():
    """Inside the block for ImageNet, at a convolved shortcut for CIFAR-10."""
    assert node(published.resnet18(), "block2_1.add").inputs == ("block2_1.relu1", "block2_1.bn2")
    assert node(published.resnet50(), "block2_1.add").inputs == ("block2_1.bn3", "block2_1.relu1")
    cifar = published.resnet18_cifar()
    assert node(cifar, "block2_1.conv3").inputs == ("block1_2.relu3",)
    assert node(cifar, "block2_1.add").inputs == ("block2_1.relu2", "block2_1.bn3")


def test_transformer_follows_the_published_rules():
    """Attention figures worked out by hand: 512 tokens, 768 wide, 12 heads of 64."""
    transformer = published.transformer()
    assert node(transformer, "block1.qkv").flops == 3 * 512 * 768 * 768
    assert node(transformer, "block1.qkv").output_bytes == 3 * 512 * 768 * 4
    assert node(transformer, "block1.scores").flops == 512 * 512 * 768 + 2 * 512 * 512 * 12
    assert node(transformer, "block1.scores").output_bytes == 512 * 512 * 12 * 4
    assert node(transformer, "block1.context").flops == 2 * 512 * 512 * 768
    assert node(transformer, "block1.context").inputs == ("block1.scores",)
    assert node(transformer, "block1.projection").flops == 2 * 769 * 768 + 768
    assert node(transformer, "block1.ffn1").flops == 2 * 769 * 3072 + 3072 + 512 * 3072
    assert node(transformer, "block1.ffn2").flops == 2 * 3073 * 768 + 768
    assert node(transformer, "loss").flops == 512 * 768 * 512
    # The published sum skips the first residual.
    assert node(transformer, "block1.add1").inputs == ("input", "block1.projection")
    assert node(transformer, "block1.add2").inputs == ("block1.projection", "block1.ffn2")


@pytest.mark.parametrize(
    ("name", "nodes", "peak_bytes", "flops"),
    [
        ("paper/bert", 195, 383_778_816, 55_253_637_120),
        ("paper/resnet18", 127, 28_577_536, None),
        ("paper/resnet18-cifar", 133, 2_453_760, 316_493_950),
        ("paper/resnet50", 335, 127_759_104, None),
        ("paper/vgg16", 81, 115_505_152, None),
        ("paper/vgg16-cifar", 81, 2_465_832, 1_995_204_286),
    ],
)
def test_nodes_peak_and_flops(name, nodes, peak_bytes, flops):
    """Budgets are fractions of these peaks; ResNet takes 7.89 J at the A72's 40.1 MFLOP/J."""
    graph = published.MODELS[name]()
    assert (graph.name, len(graph.nodes)) == (name, nodes)
    assert checkpoint_all_peak_bytes(graph) == peak_bytes
    assert flops in (None, graph.flops)
    assert len(published.bert(blocks=24).nodes) == 195 + 12 * 16


@pytest.mark.parametrize(
    ("name", "published_bytes"),
    [
        ("paper/vgg16", 2.57e7),
        ("paper/resnet18", 6.42e6),
        ("paper/resnet50", 6.97e6),
        ("paper/resnet18-cifar", 196_608),
    ],
)
def test_forward_floor_is_where_the_published_sweeps_start(name, published_bytes):
    """The published budget sweeps start at the largest forward working set, to three digits."""
    graph = published.MODELS[name]()
    largest = max(graph.step_bytes[k] for k in forward(graph))
    assert largest == pytest.approx(published_bytes, rel=1e-3)


def test_batch_scales_images_but_not_linear_layers():
    """The published rule of a linear layer forgets the batch, and so does the loss's shape."""
    one, four = published.vgg16_cifar(), published.vgg16_cifar(batch_size=4)
    assert four.batch_size == 4
    assert node(four, "conv3_1").flops == 4 * node(one, "conv3_1").flops
    assert node(four, "fc1").output_bytes == 4 * node(one, "fc1").output_bytes
    assert node(four, "fc1").flops == node(one, "fc1").flops
    assert node(four, "loss").output_bytes == node(one, "loss").output_bytes


@pytest.mark.parametrize(
    ("make", "size", "words"),
    [
        (published.bert, {"blocks": 0}, "a whole number from 1 to 1000000, got 0"),
        (published.vgg16, {"batch_size": True}, "a whole number from 1 to 1000000, got True"),
        (published.vgg16, {"image_size": 100}, "a multiple of 32, got 100"),
        (published.linear, {"batch_size": 1.5}, "a whole number from 1 to 1000000, got 1.5"),
    ],
)
def test_wrong_sizes_are_refused(make, size, words):
    """A size that makes no network is named with what would be accepted."""
    with pytest.raises(GraphError, match=f"{next(iter(size))}: expected {words}"):
        make(**size)
