"""PyTorch as a witness: same FLOP in products and convolutions, same tensors kept for backward."""

from collections import Counter

import pytest
import torch
from torch.utils import flop_counter

from kit.rotation import mark_seeds_except
from poetmodel.graph import zoo

nn = torch.nn


BATCH = 2


class Apply(nn.Module):  # type: ignore[misc,name-defined]
    """A module that applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        """Apply it."""
        return self.function(x)


def conv_bn(inner, outer, kernel, stride=1, groups=1):
    """Return a convolution that keeps the size over the stride, and its batch norm."""
    conv = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outer)]


def mlp():
    """Return the zoo's perceptron."""
    hidden = [nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(100, 10))


def vgg():
    """Return VGG-16 with one pixel left, no dropout."""
    layers = []
    inner = 3
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inner, channels, 3, padding=1), nn.ReLU()]
            inner = channels
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, *head, nn.Linear(4096, 10))


class Residual(nn.Module):  # type: ignore[misc,name-defined]
    """A body and a shortcut, added."""

    def __init__(self, body, shortcut, after):
        super().__init__()
        self.body, self.shortcut = nn.Sequential(*body), nn.Sequential(*shortcut)
        self.after = after

    def forward(self, x):
        """Add both."""
        return self.after(self.body(x) + self.shortcut(x))


def resnet(*, bottleneck, small, depths):
    """Return a residual network; a small one has a stem that keeps the size."""
    layers = [*conv_bn(3, 64, *((3, 1) if small else (7, 2))), nn.ReLU()]
    if not small:
        layers.append(nn.MaxPool2d(3, 2, 1))
    inner = 64
    for stage, (width, depth) in enumerate(zip((64, 128, 256, 512), depths, strict=True)):
        outer = 4 * width if bottleneck else width
        for number in range(depth):
            stride = 2 if stage > 0 and number == 0 else 1
            if bottleneck:
                body = [*conv_bn(inner, width, 1), nn.ReLU(), *conv_bn(width, width, 3, stride)]
                body += [nn.ReLU(), *conv_bn(width, outer, 1)]
            else:
                body = [*conv_bn(inner, width, 3, stride), nn.ReLU(), *conv_bn(width, width, 3)]
            shortcut = conv_bn(inner, outer, 1, stride) if (stride, inner) != (1, outer) else []
            layers.append(Residual(body, shortcut, nn.ReLU()))
            inner = outer
    return nn.Sequential(*layers, Apply(lambda x: x.mean((2, 3))), nn.Linear(inner, 10))


def mobilenet(*channels):
    """Return MobileNetV2 without dropout, with the channels of the first layer and the stages.

    ReLU replaces ReLU6, whose backward in PyTorch reads the input; the zoo's reads the result.
    """
    inner, *widths = channels
    layers = [*conv_bn(3, inner, 3, 2), nn.ReLU()]
    stages = (1, 1, 1), (6, 2, 2), (6, 3, 2), (6, 4, 2), (6, 3, 1), (6, 3, 2), (6, 1, 1)
    for outer, (expansion, blocks, first) in zip(widths, stages, strict=True):
        for number in range(blocks):
            stride, middle = first if number == 0 else 1, expansion * inner
            body = [*conv_bn(inner, middle, 1), nn.ReLU()] if expansion > 1 else []
            body += [*conv_bn(middle, middle, 3, stride, middle), nn.ReLU()]
            body += conv_bn(middle, outer, 1)
            skip = stride == 1 and inner == outer
            layers += [Residual(body, [], nn.Identity())] if skip else body
            inner = outer
    layers += [*conv_bn(inner, 1280, 1), nn.ReLU(), Apply(lambda x: x.mean((2, 3)))]
    return nn.Sequential(*layers, nn.Linear(1280, 10))


def separable(inner, outer, stride):
    """Return a depthwise separable convolution with biases, norms and ReLUs."""
    return [
        nn.Conv2d(inner, inner, 3, stride, 1, groups=inner),
        nn.BatchNorm2d(inner),
        nn.ReLU(),
        nn.Conv2d(inner, outer, 1),
        nn.BatchNorm2d(outer),
        nn.ReLU(),
    ]


def resnet8():
    """Return ResNet-8 of MLPerf Tiny."""
    layers = [nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU()]
    inner = 16
    for outer, stride in ((16, 1), (32, 2), (64, 2)):
        body = [nn.Conv2d(inner, outer, 3, stride, 1), nn.BatchNorm2d(outer), nn.ReLU()]
        body += [nn.Conv2d(outer, outer, 3, 1, 1), nn.BatchNorm2d(outer)]
        skip = [nn.Conv2d(inner, outer, 1, stride)] if stride > 1 else []
        layers.append(Residual(body, skip, nn.ReLU()))
        inner = outer
    return nn.Sequential(*layers, Apply(lambda x: x.mean((2, 3))), nn.Linear(64, 10))


def mobilenet_vww():
    """Return the quarter of MobileNet of MLPerf Tiny."""
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU()]
    blocks = ((16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (128, 2), *((128, 1),) * 5)
    inner = 8
    for outer, stride in (*blocks, (256, 2), (256, 1)):
        layers += separable(inner, outer, stride)
        inner = outer
    return nn.Sequential(*layers, Apply(lambda x: x.mean((2, 3))), nn.Linear(256, 2))


def ds_cnn():
    """Return DS-CNN of MLPerf Tiny without dropout; padding as Keras has it."""
    padding = nn.ZeroPad2d((1, 1, 4, 5))
    layers = [padding, nn.Conv2d(1, 64, (10, 4), 2), nn.BatchNorm2d(64), nn.ReLU()]
    for _ in range(4):
        layers += separable(64, 64, 1)
    return nn.Sequential(*layers, Apply(lambda x: x.mean((2, 3))), nn.Linear(64, 12))


def autoencoder():
    """Return the autoencoder of MLPerf Tiny."""
    layers = []
    inner = 640
    for outer in (128, 128, 128, 128, 8, 128, 128, 128, 128):
        layers += [nn.Linear(inner, outer), nn.BatchNorm1d(outer), nn.ReLU()]
        inner = outer
    return nn.Sequential(*layers, nn.Linear(inner, 640))


class Attention(nn.Module):  # type: ignore[misc,name-defined]
    """Multi-head self-attention, written out."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(hidden, hidden) for _ in range(4)
        )

    def forward(self, x):
        """Attend."""
        batch, length, hidden = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        shares = torch.softmax(query @ key.transpose(-1, -2) * 0.5, -1)
        return self.output((shares @ value).transpose(1, 2).reshape(batch, length, hidden))


class Encoder(nn.Module):  # type: ignore[misc,name-defined]
    """The zoo's transformer: embeddings, blocks, pooler and classifier."""

    def __init__(self, seq_len, blocks, hidden, heads, inner):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, hidden) for rows in (50, seq_len, 2))
        self.norm = nn.LayerNorm(hidden)
        layers = []
        for _ in range(blocks):
            feedforward = [nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden)]
            for body in ([Attention(hidden, heads)], feedforward):
                layers.append(Residual(body, [], nn.LayerNorm(hidden)))
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, ids):
        """Classify; the first row is copied, as in the zoo."""
        token, position, kind = self.tables
        x = (
            token(ids)
            + position(torch.arange(ids.shape[1], device=ids.device))
            + kind(torch.zeros_like(ids))
        )
        return self.head(self.blocks(self.norm(x))[:, 0].clone())


SMALL_ENCODER = {"seq_len": 6, "blocks": 2, "hidden": 12, "heads": 3}


def images(side, channels=3):
    """Return a batch of images."""
    return torch.randn(BATCH, channels, side, side)


CASES = {
    "mlp": lambda **options: (
        zoo.mlp(image_size=8, batch_size=BATCH, **options),
        mlp(),
        images(8, 1),
    ),
    "vgg16-cifar": lambda **options: (
        zoo.vgg16_cifar(batch_size=BATCH, dropout=0, **options),
        vgg(),
        images(32),
    ),
    "resnet18-cifar": lambda **options: (
        zoo.resnet18_cifar(batch_size=BATCH, image_size=16, **options),
        resnet(bottleneck=False, small=True, depths=(2, 2, 2, 2)),
        images(16),
    ),
    "resnet50": lambda **options: (
        zoo.resnet50(batch_size=BATCH, image_size=64, classes=10, **options),
        resnet(bottleneck=True, small=False, depths=(3, 4, 6, 3)),
        images(64),
    ),
    "mobilenetv2": lambda **options: (
        zoo.mobilenetv2(batch_size=BATCH, image_size=64, classes=10, dropout=0, **options),
        mobilenet(32, 16, 24, 32, 64, 96, 160, 320),
        images(64),
    ),
    "mobilenetv2-035": lambda **options: (
        zoo.mobilenetv2_035(batch_size=BATCH, dropout=0, **options),
        mobilenet(16, 8, 8, 16, 24, 32, 56, 112),
        images(48),
    ),
    "resnet8": lambda **options: (zoo.resnet8(batch_size=BATCH, **options), resnet8(), images(32)),
    "mobilenetv1-vww": lambda **options: (
        zoo.mobilenetv1_vww(batch_size=BATCH, **options),
        mobilenet_vww(),
        images(96),
    ),
    "ds-cnn": lambda **options: (
        zoo.ds_cnn(batch_size=BATCH, dropout=0, **options),
        ds_cnn(),
        torch.randn(BATCH, 1, 49, 10),
    ),
    "autoencoder": lambda **options: (
        zoo.autoencoder(batch_size=BATCH, **options),
        autoencoder(),
        torch.randn(BATCH, 640),
    ),
    "transformer": lambda **options: (
        zoo.transformer(
            **SMALL_ENCODER, feedforward=20, vocabulary=50, batch_size=BATCH, **options
        ),
        Encoder(**SMALL_ENCODER, inner=20),
        torch.zeros(BATCH, SMALL_ENCODER["seq_len"], dtype=torch.int64),
    ),
}

LARGE = {"resnet50", "mobilenetv2", "mobilenetv2-035", "mobilenetv1-vww"}


def step(model, x):
    """Run one forward and backward pass."""
    y = model(x)
    if y.shape == x.shape:
        nn.functional.mse_loss(y, x).backward()
        return
    labels = torch.zeros(BATCH, dtype=torch.int64, device=x.device)
    nn.functional.cross_entropy(y, labels).backward()


def counted(graph):
    """Return the FLOP of a graph's products as PyTorch would count them.

    It counts no bias, and in the weight gradient of a grouped convolution all pairs of channels,
    although only those within a group are computed.
    """
    flops = Counter()
    sizes = {tensor.name: tensor.bytes // 4 for tensor in graph.tensors}
    weights = {node.name: node for node in graph.nodes if node.phase == "forward"}
    for node in graph.nodes:
        kind, _, part = node.op.partition("_backward_")
        if kind not in ("conv2d", "linear", "matmul"):
            continue
        work = node.flops
        if part == "weight":
            work = weights[node.name.removesuffix(".grad_weight")].flops
            arriving = sizes[node.inputs[0]]
            assert node.flops - work in (0, arriving)
            if ".depthwise" in node.name:
                work *= depthwise_groups(graph, node.name)
        flops["convolution" if kind == "conv2d" else "product"] += work
    return flops


def depthwise_groups(graph, name):
    """Return the channels of a depthwise convolution: its batch norm has a mean for each."""
    statistics = graph.tensor_index[name.removesuffix(".grad_weight") + ".bn.mean"]
    return graph.tensor_bytes[statistics] // 4


@pytest.mark.parametrize("name", mark_seeds_except(CASES, {*CASES} - LARGE, LARGE))
def test_flops_are_those_that_torch_counts(name):
    """Forward and backward FLOP of convolutions and matrix products agree exactly."""
    with torch.device("meta"):  # shapes only: nothing is computed
        graph, model, x = CASES[name]()
    assert sum(parameter.numel() for parameter in model.parameters()) == graph.parameters
    with flop_counter.FlopCounterMode(display=False) as counter:
        step(model, x)
    theirs = Counter()
    for op, flops in counter.get_flop_counts()["Global"].items():
        theirs["convolution" if "conv" in str(op) else "product"] += flops
    assert counted(graph) == theirs


@pytest.mark.parametrize(
    "name", ["mlp", "resnet18-cifar", "mobilenetv2", "transformer", "resnet8", "autoencoder"]
)
def test_saved_tensors_are_those_that_torch_saves(name):
    """The sizes of forward tensors that the backward pass reads are those that autograd saves.

    Weights and integers (labels, ids) are excluded, and a tensor and its views are one. Models
    with max pooling are excluded, too: PyTorch saves the input, of which only the shape is
    used.
    """
    graph, model, x = CASES[name]()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    own |= {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    kept = {}

    def keep(tensor):
        place = tensor.untyped_storage().data_ptr()
        if place not in own and tensor.is_floating_point() and tensor.dim():
            kept[place] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step(model, x)
    theirs = Counter(storage.nbytes() for storage in kept.values())
    read = {name for node in graph.nodes if node.phase == "backward" for name in node.inputs}
    ours = Counter(
        tensor.bytes
        for node in graph.nodes
        if node.phase != "backward"
        for tensor in node.outputs
        if tensor.name in read and not tensor.name.endswith(("ids", "labels"))
    )
    assert ours == theirs


@pytest.mark.parametrize("name", CASES)
def test_state_is_that_of_the_module(name):
    """Parameters and running statistics have the sizes of the module's state."""
    with torch.device("meta"):
        graph, model, _ = CASES[name](state="sgd")
    held = {"parameter": Counter(), "running_statistic": Counter()}
    for node in graph.nodes:
        if node.phase == "state":
            held[node.op][node.output_bytes] += 1
    counted = (buffer for buffer in model.buffers() if buffer.is_floating_point())
    assert held["parameter"] == Counter(weight.nbytes for weight in model.parameters())
    assert held["running_statistic"] == Counter(buffer.nbytes for buffer in counted)
    assert len(graph.replacement_of) == len(graph.state_tensors)
