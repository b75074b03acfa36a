"""The reference networks of MLPerf Tiny, a benchmark of inference on microcontrollers.

C. Banbury et al., "MLPerf Tiny benchmark", NeurIPS 2021 (datasets and benchmarks track),
arXiv:2106.07597. Sizes are those of its reference repository, github.com/mlcommons/tiny,
``benchmark/training``. As there, layers before a batch norm have a bias. Parameter counts of the
repository include running statistics; those stated here count trainable parameters only.

Every public function also accepts the keys of `TapeOptions`, and raises `InputError` for an invalid
size, rate or option.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.graph.zoo.declaration import Value, require_counts, require_rate
from poetmodel.graph.zoo.operators import (
    add,
    batch_norm,
    conv2d,
    global_avg_pool,
    linear,
    mean_squared_error,
)
from poetmodel.graph.zoo.tape import Tape, TapeOptions

if TYPE_CHECKING:
    from typing import Unpack

    from poetmodel.graph.structure import Graph


def resnet8(*, image_size: int = 32, classes: int = 10, **options: Unpack[TapeOptions]) -> Graph:
    """Return ResNet-8 for CIFAR-10: three residual blocks with 16, 32 and 64 channels.

    It has 78,186 parameters with 10 classes. The skip connections of the second and third block are
    convolutions without a batch norm.
    """
    require_counts(image_size=image_size, classes=classes)
    tape = Tape("resnet8", **options)
    x = tape.add_image(image_size)
    x = tape.activate(
        "relu", tape.record_conv_bn(x, ("conv", "bn"), channels=16, kernel=3, bias=True)
    )
    for number, (channels, stride) in enumerate(((16, 1), (32, 2), (64, 2)), start=1):
        name, y = f"block{number}", x
        for position, conv_stride in ((1, stride), (2, 1)):
            if position == 2:  # noqa: PLR2004 - the second convolution
                y = tape.activate(f"{name}.relu1", y)
            names = (f"{name}.conv{position}", f"{name}.bn{position}")
            y = tape.record_conv_bn(
                y, names, channels=channels, kernel=3, stride=conv_stride, bias=True
            )
        if x.shape != y.shape:
            skip = conv2d(f"{name}.skip", x, channels=channels, kernel=1, stride=stride, bias=True)
            x = tape.record(skip)
        x = tape.activate(f"{name}.relu", tape.record(add(f"{name}.add", y, x)))
    return tape.classify("fc", tape.record(global_avg_pool("avgpool", x)), classes=classes)


_VWW_BLOCKS: Final = (
    (16, 1),
    (32, 2),
    (32, 1),
    (64, 2),
    (64, 1),
    (128, 2),
    *((128, 1),) * 5,
    (256, 2),
    (256, 1),
)
"""Channels and stride of each depthwise separable convolution (a quarter of MobileNet's
channels)."""


def mobilenetv1_vww(
    *, image_size: int = 96, classes: int = 2, **options: Unpack[TapeOptions]
) -> Graph:
    """Return MobileNet of width 0.25 for visual wake words: 216,322 parameters with 2 classes.

    A. Howard et al., "MobileNets: efficient convolutional neural networks for mobile vision
    applications", 2017, table 1, arXiv:1704.04861.
    """
    require_counts(image_size=image_size, classes=classes)
    tape = Tape("mobilenetv1-vww", **options)
    x = _record_conv_bn_relu(
        tape, "conv", tape.add_image(image_size), channels=8, kernel=3, stride=2
    )
    for number, (channels, stride) in enumerate(_VWW_BLOCKS, start=1):
        x = _record_separable(tape, f"block{number}", x, channels=channels, stride=stride)
    return tape.classify("fc", tape.record(global_avg_pool("avgpool", x)), classes=classes)


def ds_cnn(*, classes: int = 12, dropout: float = 0.4, **options: Unpack[TapeOptions]) -> Graph:
    """Return DS-CNN for keyword spotting: 49 frames of 10 coefficients, 64 channels throughout.

    It has 23,756 parameters with 12 classes. `dropout` is the rate before the pooling; the rate
    after the first convolution is half of it. The pooling is global; that of the reference omits
    the last of 25 rows.

    Y. Zhang et al., "Hello edge: keyword spotting on microcontrollers", 2017, arXiv:1711.07128.
    """
    require_counts(classes=classes)
    require_rate(dropout)
    tape = Tape("ds-cnn", **options)
    x = tape.add_input("input", tape.batch_size, 1, 49, 10)
    x = tape.record(
        conv2d("conv", x, channels=64, kernel=(10, 4), stride=2, padding="same", bias=True)
    )
    x = tape.activate("conv.relu", tape.record(batch_norm("conv.bn", x)))
    x = tape.record_dropout("drop1", x, rate=dropout / 2)
    for number in range(1, 5):
        x = _record_separable(tape, f"block{number}", x, channels=64, stride=1)
    x = tape.record_dropout("drop2", x, rate=dropout)
    return tape.classify("fc", tape.record(global_avg_pool("avgpool", x)), classes=classes)


_HIDDEN_FEATURES: Final = (128, 128, 128, 128, 8, 128, 128, 128, 128)
"""Features of the autoencoder's hidden layers."""


def autoencoder(*, features: int = 640, **options: Unpack[TapeOptions]) -> Graph:
    """Return the autoencoder of ToyADMOS: 640-128-128-128-128-8-128-128-128-128-640.

    Batch norm and ReLU follow each hidden layer. It has 267,928 parameters with 640 `features`, the
    size of a sample: 5 frames of 128 frequency bands of a sound. The loss is the mean squared error
    between the network's output and its input.

    Y. Koizumi et al., "ToyADMOS: a dataset of miniature-machine operating sounds for anomalous
    sound detection", WASPAA 2019, doi:10.1109/WASPAA.2019.8937164.
    """
    require_counts(features=features)
    tape = Tape("autoencoder", **options)
    x = sample = tape.add_input("input", tape.batch_size, features)
    for number, width in enumerate(_HIDDEN_FEATURES, start=1):
        x = tape.record(linear(f"fc{number}", x, features=width))
        x = tape.activate(f"relu{number}", tape.record(batch_norm(f"bn{number}", x)))
    x = tape.record(linear(f"fc{len(_HIDDEN_FEATURES) + 1}", x, features=features))
    return tape.differentiate(mean_squared_error("loss", x, sample))


def _record_separable(tape: Tape, name: str, x: Value, *, channels: int, stride: int) -> Value:
    """Record a 3 x 3 depthwise convolution with `stride`, and a 1 x 1 to `channels`."""
    channels_in = x.shape[1]
    x = _record_conv_bn_relu(
        tape,
        f"{name}.depthwise",
        x,
        channels=channels_in,
        kernel=3,
        stride=stride,
        groups=channels_in,
    )
    return _record_conv_bn_relu(tape, f"{name}.pointwise", x, channels=channels, kernel=1)


def _record_conv_bn_relu(tape: Tape, name: str, x: Value, **sizes: int) -> Value:
    x = tape.record_conv_bn(x, (name, f"{name}.bn"), bias=True, **sizes)
    return tape.activate(f"{name}.relu", x)
