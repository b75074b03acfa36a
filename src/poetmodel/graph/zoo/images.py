"""Networks for images: multi-layer perceptron, VGG-16, residual networks and MobileNetV2.

`image_size` is the side of a square image, with three channels unless stated otherwise. `dropout`
is a rate; 0 omits the dropout nodes. Every public function also accepts the keys of `TapeOptions`,
and raises `InputError` for an invalid size, rate or option.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.graph.zoo import operators
from poetmodel.graph.zoo.declaration import Value, require_counts
from poetmodel.graph.zoo.operators import add, global_avg_pool, linear, max_pool
from poetmodel.graph.zoo.tape import Tape, TapeOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from poetmodel.graph.structure import Graph

    Convolutions = Sequence[tuple[int, int, bool]]
    """For each convolution of a block: the kernel, the factor on the stage's channels, and whether
    the convolution has the block's stride."""


def mlp(
    *,
    image_size: int = 28,
    channels: int = 1,
    hidden: Sequence[int] = (300, 100),
    classes: int = 10,
    **options: Unpack[TapeOptions],
) -> Graph:
    """Return a perceptron with ReLU; by default LeNet-300-100 on 28 x 28 images.

    `channels` are those of the image. `hidden` are the features of the hidden layers, each with a
    ReLU; () leaves one linear layer.

    Y. LeCun et al., "Gradient-based learning applied to document recognition", Proc. IEEE 86(11),
    1998, section III.C.4, doi:10.1109/5.726791.
    """
    require_counts(image_size=image_size, channels=channels, classes=classes)
    require_counts(**{f"hidden[{k}]": width for k, width in enumerate(hidden)})
    tape = Tape("mlp", **options)
    x = tape.add_image(image_size, channels=channels).flatten()
    for number, width in enumerate(hidden, start=1):
        x = tape.record(linear(f"fc{number}", x, features=width))
        x = tape.activate(f"relu{number}", x)
    return tape.classify(f"fc{len(hidden) + 1}", x, classes=classes)


_VGG_STAGES: Final = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and number of convolutions before each pooling."""


def vgg16(
    *,
    image_size: int = 224,
    classes: int = 1000,
    batch_norm: bool = False,
    dropout: float = 0.5,
    **options: Unpack[TapeOptions],
) -> Graph:
    """Return VGG-16 (configuration D): 13 convolutions and 3 linear layers, ReLU between them.

    The linear layers have 4096, 4096 and `classes` features. The first one reads the last feature
    map without further pooling: 7 x 7 for an image of 224 x 224, which gives 138,357,544 parameters
    with 1000 classes.

    `batch_norm` adds a batch norm after each convolution, which has a bias in any case. Dropout
    follows the ReLU of the first and second linear layer. Raises `InputError` for images of less
    than 32 x 32 pixels, and for any other invalid size, rate or option.

    K. Simonyan, A. Zisserman, "Very deep convolutional networks for large-scale image
    recognition", ICLR 2015, table 1, arXiv:1409.1556.
    """
    require_counts(image_size=image_size, classes=classes)
    tape = Tape("vgg16", **options)
    x = tape.add_image(image_size)
    for stage, (channels, n_convolutions) in enumerate(_VGG_STAGES, start=1):
        for number in range(1, n_convolutions + 1):
            suffix = f"{stage}_{number}"
            convolution = operators.conv2d(
                f"conv{suffix}", x, channels=channels, kernel=3, padding=1, bias=True
            )
            x = tape.record(convolution)
            if batch_norm:
                x = tape.record(operators.batch_norm(f"bn{suffix}", x))
            x = tape.activate(f"relu{suffix}", x)
        x = tape.record(max_pool(f"pool{stage}", x, kernel=2))
    x = x.flatten()
    for number in (6, 7):
        x = tape.record(linear(f"fc{number}", x, features=4096))
        x = tape.activate(f"relu{number}", x)
        x = tape.record_dropout(f"drop{number}", x, rate=dropout)
    return tape.classify("fc8", x, classes=classes)


def vgg16_cifar(
    *,
    image_size: int = 32,
    classes: int = 10,
    batch_norm: bool = False,
    dropout: float = 0.5,
    **options: Unpack[TapeOptions],
) -> Graph:
    """Return `vgg16` for CIFAR-10, with the head of the original: 512-4096-4096-`classes`.

    The graph is named ``vgg16-cifar``. The five poolings reduce an image of 32 x 32 to one pixel of
    512 channels, which gives 33,638,218 parameters with 10 classes. (Variants published elsewhere
    have a single linear layer as head.)
    """
    graph = vgg16(
        image_size=image_size, classes=classes, batch_norm=batch_norm, dropout=dropout, **options
    )
    return replace(graph, name="vgg16-cifar")


_RESNET_WIDTHS: Final = (64, 128, 256, 512)
"""Channels of the four stages."""

_BASIC_BLOCK: Final = ((3, 1, True), (3, 1, False))
_BOTTLENECK_BLOCK: Final = ((1, 1, False), (3, 1, True), (1, 4, False))
"""Convolutions of a basic block, and of a bottleneck block."""


def resnet18(
    *, image_size: int = 224, classes: int = 1000, **options: Unpack[TapeOptions]
) -> Graph:
    """Return ResNet-18: 11,689,512 parameters with 1000 classes.

    K. He et al., "Deep residual learning for image recognition", CVPR 2016, table 1,
    doi:10.1109/CVPR.2016.90.
    """
    return _build_resnet("resnet18", _BASIC_BLOCK, (2, 2, 2, 2), image_size, classes, **options)


def resnet18_cifar(
    *, image_size: int = 32, classes: int = 10, **options: Unpack[TapeOptions]
) -> Graph:
    """Return `resnet18` for CIFAR-10: a 3 x 3 first convolution of stride 1 and no max pooling.

    It has 11,173,962 parameters with 10 classes.
    """
    return _build_resnet(
        "resnet18-cifar", _BASIC_BLOCK, (2, 2, 2, 2), image_size, classes, is_small=True, **options
    )


def resnet50(
    *, image_size: int = 224, classes: int = 1000, **options: Unpack[TapeOptions]
) -> Graph:
    """Return ResNet-50 with the stride in the 3 x 3 convolutions ("v1.5", as in torchvision).

    It has 25,557,032 parameters with 1000 classes.
    """
    return _build_resnet(
        "resnet50", _BOTTLENECK_BLOCK, (3, 4, 6, 3), image_size, classes, **options
    )


def _build_resnet(
    name: str,
    convolutions: Convolutions,
    depths: Sequence[int],
    image_size: int,
    classes: int,
    *,
    is_small: bool = False,
    **options: Unpack[TapeOptions],
) -> Graph:
    """Build a residual network of `depths` blocks per stage, with `convolutions` in each block.

    `is_small`: the first convolution is 3 x 3 with stride 1, without pooling after it.
    """
    require_counts(image_size=image_size, classes=classes)
    tape = Tape(name, **options)
    x = tape.add_image(image_size)
    kernel, stride = (3, 1) if is_small else (7, 2)
    x = tape.record_conv_bn(
        x, ("conv1", "bn1"), channels=_RESNET_WIDTHS[0], kernel=kernel, stride=stride
    )
    x = tape.activate("relu", x)
    if not is_small:
        x = tape.record(max_pool("maxpool", x, kernel=3, stride=2, padding=1))
    for stage, (width, depth) in enumerate(zip(_RESNET_WIDTHS, depths, strict=True), start=1):
        for number in range(depth):
            stride = 2 if stage > 1 and number == 0 else 1
            x = _record_block(tape, f"layer{stage}.{number}", x, width, stride, convolutions)
    return tape.classify("fc", tape.record(global_avg_pool("avgpool", x)), classes=classes)


def _record_block(
    tape: Tape, name: str, x: Value, width: int, stride: int, convolutions: Convolutions
) -> Value:
    """Record a residual block; a 1 x 1 convolution projects the skip if the shape changes."""
    y = x
    for number, (kernel, expansion, is_strided) in enumerate(convolutions, start=1):
        if number > 1:
            y = tape.activate(f"{name}.relu{number - 1}", y)
        names = (f"{name}.conv{number}", f"{name}.bn{number}")
        sizes = {"channels": expansion * width, "stride": stride if is_strided else 1}
        y = tape.record_conv_bn(y, names, kernel=kernel, bias=False, **sizes)
    if x.shape != y.shape:
        names = (f"{name}.downsample.conv", f"{name}.downsample.bn")
        x = tape.record_conv_bn(x, names, channels=y.shape[1], kernel=1, stride=stride)
    return tape.activate(f"{name}.relu", tape.record(add(f"{name}.add", y, x)))


_MOBILENET_STAGES: Final = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, channels, blocks and first stride of each stage (table 2 of the paper)."""


def mobilenetv2(
    *,
    image_size: int = 224,
    classes: int = 1000,
    dropout: float = 0.2,
    **options: Unpack[TapeOptions],
) -> Graph:
    """Return MobileNetV2 of width 1: 3,504,872 parameters with 1000 classes.

    M. Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks", CVPR 2018,
    doi:10.1109/CVPR.2018.00474.
    """
    return _build_mobilenetv2("mobilenetv2", 1.0, image_size, classes, dropout, **options)


def mobilenetv2_035(
    *,
    image_size: int = 48,
    classes: int = 10,
    dropout: float = 0.2,
    **options: Unpack[TapeOptions],
) -> Graph:
    """Return `mobilenetv2` of width 0.35, by default on 48 x 48 images with 10 classes.

    It has 408,938 parameters with 10 classes, and 1,677,128 with 1000. Channels are multiples of 8,
    as in the published code; the last convolution has 1280 channels at any width.
    """
    return _build_mobilenetv2("mobilenetv2-035", 0.35, image_size, classes, dropout, **options)


def _build_mobilenetv2(
    name: str,
    width: float,
    image_size: int,
    classes: int,
    dropout: float,
    **options: Unpack[TapeOptions],
) -> Graph:
    """Build a MobileNetV2; `width` scales the channels, but the last convolution has 1280."""
    require_counts(image_size=image_size, classes=classes)
    tape = Tape(name, **options)
    x = _record_conv_bn_relu6(
        tape,
        "features.first",
        tape.add_image(image_size),
        channels=_scale_channels(32, width),
        kernel=3,
        stride=2,
    )
    number = 0
    for expansion, full_channels, blocks, first_stride in _MOBILENET_STAGES:
        channels = _scale_channels(full_channels, width)
        for block in range(blocks):
            number += 1
            stride = first_stride if block == 0 else 1
            x = _record_inverted_residual(tape, f"block{number}", x, expansion, channels, stride)
    x = _record_conv_bn_relu6(tape, "features.last", x, channels=1280, kernel=1)
    x = tape.record(global_avg_pool("avgpool", x))
    return tape.classify(
        "classifier", tape.record_dropout("drop", x, rate=dropout), classes=classes
    )


def _scale_channels(channels: int, width: float) -> int:
    """Return `channels` times `width`, as a multiple of 8, at least 8 and never 10 % too low."""
    scaled = channels * width
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * scaled else rounded


def _record_inverted_residual(
    tape: Tape, name: str, x: Value, expansion: int, channels: int, stride: int
) -> Value:
    """Record an inverted residual: expand by `expansion`, filter each channel, project."""
    inner_channels = expansion * x.shape[1]
    y = x
    if expansion > 1:
        y = _record_conv_bn_relu6(tape, f"{name}.expand", y, channels=inner_channels, kernel=1)
    y = _record_conv_bn_relu6(
        tape,
        f"{name}.depthwise",
        y,
        channels=inner_channels,
        kernel=3,
        stride=stride,
        groups=inner_channels,
    )
    y = tape.record_conv_bn(
        y, (f"{name}.project", f"{name}.project.bn"), channels=channels, kernel=1
    )
    return tape.record(add(f"{name}.add", y, x)) if x.shape == y.shape else y


def _record_conv_bn_relu6(tape: Tape, name: str, x: Value, **sizes: int) -> Value:
    x = tape.record_conv_bn(x, (name, f"{name}.bn"), bias=False, **sizes)
    return tape.activate(f"{name}.relu6", x, "relu6")
