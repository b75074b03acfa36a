"""Continued training of networks in int8 and in float: accuracy by number type and rounding.

A network learns half of a data set in float. Then the data change: digits are rotated by 90
degrees, signals of MNIST-1D are flipped in time and sign, and training continues with plain SGD
and a constant rate on new samples. Needs PyTorch and torchao, scikit-learn for its digits, and
mnist1d, which generates signals.
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import fuse_conv_bn_eval

from harness import PRELOADED, RecordedRun, Study, make_record
from poetmodel import torch as pmt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.sweeps.measurement import Record

KIND: Final = "int8 training"
"""Kind of the records."""
DATA: Final = {"digits": "sklearn", "signals": "mnist1d"}
"""Package that contains each data set."""
LEARNING_RATES: Final = (
    (1, 400, (0.003, 0.01, 0.03)),
    (8, 300, (0.03, 0.1, 0.3)),
    (8, 900, (0.03, 0.1)),
)
"""Batch size, number of steps, and the learning rates that are tried."""
LONG_STEPS: Final = 900
"""Steps of long runs, which are on digits, and only for options that train all layers."""
SEEDS: Final = 3
"""Number of networks for each option, each with its own weights and samples."""
PRETRAINING_STEPS: Final = 500
"""Steps of pretraining in float, with 32 samples and momentum."""
END_LAYERS: Final = 4
"""Number of layers with weights in a trained end."""


class _Nearest(pmt.QuantizedSGD):
    """Optimizer that rounds int8 weights to nearest, because its random numbers are one half."""

    def draws(self, group: int, site: int) -> Any:
        """Return a source of halves in place of random numbers."""
        del group, site
        return _Halves()


class _Halves:
    def draw_uniform(self, weight: Tensor, *, first: int = 0) -> Tensor:
        """Return one half for each weight, in the shape of `weight`."""
        del first
        return torch.full(weight.shape, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """An option to train a network."""

    make: Callable[[nn.Sequential, Sequence[Tensor]], nn.Module]
    """Creates the trained network from the pretrained float network and batches of new data."""
    optimizer: Callable[..., torch.optim.Optimizer] = pmt.QuantizedSGD
    """Creates the optimizer from the network and the learning rate."""


def _quantize(
    network: nn.Sequential, batches: Sequence[Tensor], *, rounding: str = "16 bits", train: str
) -> nn.Module:
    return pmt.quantized(network, batches, train=train, rounding=rounding)


def _make_float_end(network: nn.Sequential, batches: Sequence[Tensor]) -> nn.Module:
    """Return the network with a frozen int8 front and a trained float end."""
    weighted_indices = [k for k, layer in enumerate(network) if hasattr(layer, "weight")]
    first_index = weighted_indices[-END_LAYERS]
    return nn.Sequential(pmt.quantized(network[:first_index], batches), network[first_index:])


def _make_float_last_layer(network: nn.Sequential, batches: Sequence[Tensor]) -> nn.Module:
    """Return the network with a frozen int8 front and a trained last layer in float."""
    return nn.Sequential(pmt.quantized(network[:-1], batches), network[-1])


WAYS: Final = {
    "all, float": _Way(make=lambda network, _: network),
    "all, int8, 16 bits": _Way(make=partial(_quantize, train="all")),
    "all, int8, stochastic": _Way(make=partial(_quantize, train="all", rounding="stochastic")),
    "all, int8, nearest": _Way(
        make=partial(_quantize, train="all", rounding="stochastic"), optimizer=_Nearest
    ),
    "4 layers, float": _Way(make=_make_float_end),
    "4 layers, int8, 16 bits": _Way(make=partial(_quantize, train=f"last-{END_LAYERS}")),
    "last layer, float": _Way(make=_make_float_last_layer),
}
"""Options by name: trained layers and their number type; all other layers are frozen int8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun(RecordedRun):
    """One training option on one data set."""

    data: str
    """One of `DATA`."""
    batch: int
    """Batch size."""
    way: str
    """One of `WAYS`."""
    steps: int
    rates: tuple[float, ...]
    """Learning rates; the best on the validation samples of the first network is used for all."""
    seeds: int = SEEDS
    pretrained: int = PRETRAINING_STEPS
    """Steps of pretraining in float."""
    limit_s: float = 3600.0
    """Limit of the whole run [s]."""

    @property
    def name(self) -> str:
        """Name of the run in records."""
        return f"{self.data} | batch {self.batch} | {self.steps} steps | {self.way}"


def runs(data: tuple[str, ...] = tuple(DATA)) -> Iterator[TrainingRun]:
    """Yield each option on the named data sets."""
    for name in data:
        for batch, steps, rates in LEARNING_RATES:
            options: dict[str, Any] = {"batch": batch, "steps": steps, "rates": rates}
            for way in WAYS:
                if steps < LONG_STEPS or (name == "digits" and way.startswith("all")):
                    yield TrainingRun(data=name, way=way, **options)


def smoke_runs() -> Iterator[TrainingRun]:
    """Yield each option with few steps, on the data sets whose package is installed."""
    for name, package in DATA.items():
        if find_spec(package) and find_spec("torchao"):
            small_options: dict[str, Any] = {
                "steps": 2,
                "seeds": 1,
                "rates": (0.1,),
                "pretrained": 2,
            }
            yield from (TrainingRun(data=name, batch=8, way=way, **small_options) for way in WAYS)


def measure(fields: dict[str, Any], _start: None = None) -> Record:
    """Train all networks of a run; return its record.

    The first network is trained with each learning rate, all further networks with the
    rate of the best validation accuracy.
    """
    run = TrainingRun(**{**fields, "rates": tuple(fields["rates"])})
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    accuracies_by_rate = {rate: _train_and_test(run, 0, rate) for rate in run.rates}
    rate = max(accuracies_by_rate, key=lambda candidate_rate: accuracies_by_rate[candidate_rate][0])
    accuracies = [
        accuracies_by_rate[rate],
        *(_train_and_test(run, seed, rate) for seed in range(1, run.seeds)),
    ]
    return make_record(
        KIND,
        run.name,
        cell=fields,
        workers=1,
        seconds=time.perf_counter() - begin_s,
        cpu_s=time.process_time() - begin_cpu_s,
        rate=rate,
        validated={
            str(candidate_rate): accuracy
            for candidate_rate, (accuracy, _) in accuracies_by_rate.items()
        },
        before=[_measure_pretrained_accuracy(run, seed) for seed in range(run.seeds)],
        accuracy=[accuracy for _, accuracy in accuracies],
        mean=statistics.mean(accuracy for _, accuracy in accuracies),
    )


def _train_and_test(run: TrainingRun, seed: int, rate: float) -> tuple[float, float]:
    """Train a pretrained network further; return its accuracies on validation and test samples."""
    pretrained, samples = _pretrain(run.data, seed, run.pretrained)
    (x, y), validation, test = samples
    way = WAYS[run.way]
    torch.manual_seed(seed)
    model = way.make(copy.deepcopy(pretrained), x[:128].split(32))
    optimizer = way.optimizer(model, rate)
    epochs = -(-run.steps * run.batch // len(y))
    order = torch.cat([torch.randperm(len(y)) for _ in range(epochs)])
    for step in range(run.steps):
        rows = order[step * run.batch : (step + 1) * run.batch]
        optimizer.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return _measure_accuracy(model, validation), _measure_accuracy(model, test)


def _measure_pretrained_accuracy(run: TrainingRun, seed: int) -> float:
    """Return the pretrained float network's accuracy on the test samples."""
    pretrained, (_, _, test) = _pretrain(run.data, seed, run.pretrained)
    return _measure_accuracy(pretrained, test)


def _measure_accuracy(model: nn.Module, samples: tuple[Tensor, Tensor]) -> float:
    x, y = samples
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


# -- networks and data -----------------------------------------------------------------------------


@cache
def _pretrain(data: str, seed: int, steps: int) -> tuple[nn.Sequential, list[Any]]:
    """Train a float network on the old data; return it with folded batch norms, and new samples.

    The samples are pairs of inputs and labels for training, validation and test. Cached, so callers
    must not change the network.
    """
    (x, y), *parts = _split_samples(data, seed)
    torch.manual_seed(seed)
    network = _make_network((1, 5) if data == "signals" else (3, 3))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for _ in range(steps):
        rows = torch.randint(len(y), (32,))
        optimizer.zero_grad()
        functional.cross_entropy(network(x[rows]), y[rows]).backward()
        optimizer.step()
    return _fold_batch_norms(network.eval()), parts


def _make_network(window: tuple[int, int]) -> nn.Sequential:
    """Return a small network of separable convolutions with batch norm, for ten classes."""
    padding = (window[0] // 2, window[1] // 2)
    stride = (1 if window[0] == 1 else 2, 2)
    layers: list[nn.Module] = []

    def convolution(inputs: int, results: int, **options: Any) -> None:
        layers.extend(
            (
                nn.Conv2d(inputs, results, bias=False, **options),
                nn.BatchNorm2d(results),
                nn.ReLU(),
            )
        )

    window_options: dict[str, Any] = {"kernel_size": window, "padding": padding}
    convolution(1, 16, **window_options, stride=1 if window[0] > 1 else stride)
    for inputs, results, step_size in ((16, 32, stride), (32, 64, 1)):
        convolution(inputs, inputs, **window_options, stride=step_size, groups=inputs)
        convolution(inputs, results, kernel_size=1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _fold_batch_norms(network: nn.Sequential) -> nn.Sequential:
    """Return a network with batch norms folded into its convolutions."""
    layers: list[nn.Module] = []
    for layer in network:
        if isinstance(layer, nn.BatchNorm2d):
            layers[-1] = fuse_conv_bn_eval(layers[-1], layer)
        else:
            layers.append(layer)
    return nn.Sequential(*layers)


def _split_samples(data: str, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of inputs and labels: old, and new for training, validation and test."""
    x, y = _load_digits() if data == "digits" else _load_signals()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(100 + seed))
    x, y = x[order], y[order]
    half = len(y) // 2
    new_inputs = torch.rot90(x[half:], 1, (2, 3)) if data == "digits" else -x[half:].flip(-1)
    split_points = (len(new_inputs) // 2, len(new_inputs) // 2 + len(new_inputs) // 6)
    new_samples = zip(
        torch.tensor_split(new_inputs, split_points),
        torch.tensor_split(y[half:], split_points),
        strict=True,
    )
    return [(x[:half], y[:half]), *new_samples]


def _load_digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.from_numpy(x).float().view(-1, 1, 8, 8) / 8 - 1, torch.from_numpy(y)


@cache
def _load_signals() -> tuple[Tensor, Tensor]:
    from mnist1d.data import get_dataset_args, make_dataset

    arguments = get_dataset_args()
    arguments.num_samples = 4000
    dataset = make_dataset(arguments)
    x, y = (torch.from_numpy(dataset[name]) for name in ("x", "y"))
    return x.float().view(len(x), 1, 1, -1) / 2, y.long()


STUDY: Final = Study(
    name="int8-training",
    kind=KIND,
    runs=runs,
    smoke_runs=smoke_runs,
    measure=measure,
    has_own_process=False,
    preloaded=(*PRELOADED, "torch"),
)
