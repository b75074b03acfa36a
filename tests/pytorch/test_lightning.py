"""Lightning's automatic optimization with compiled steps: the weights are those without them."""

import copy
import logging
import warnings

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")

import poetmodel.torch as pmt  # noqa: E402
from poetmodel.errors import InputError  # noqa: E402
from poetmodel.torch import CaptureError  # noqa: E402
from poetmodel.torch.lightning import Strategy  # noqa: E402

nn = torch.nn
pytestmark = [
    pytest.mark.torch,
    pytest.mark.large,
    # What Lightning and its libraries say of each other is none of ours.
    pytest.mark.filterwarnings("ignore"),
]

QUICK = {"ram": "100%", "device": "rpi4b"}
"""Options of steps that are neither measured nor squeezed."""


class Network(nn.Sequential):
    """Layers with a pass of their own: Dynamo compiles none of PyTorch's own modules alone."""

    def forward(self, x):
        """Return logits."""
        return super().forward(x)


class Classifier(lightning.LightningModule):
    """Batch norm and dropout; logs, and returns more than its loss."""

    def __init__(self):
        super().__init__()
        self.net = Network(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
        )
        self.seen = []

    def training_step(self, batch, batch_idx):
        """Return loss and logits."""
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        if batch_idx % 3 == 0:
            self.log_dict({"right": (logits.argmax(1) == y).float().mean()}, on_epoch=True)
        return {"loss": loss, "logits": logits}

    def validation_step(self, batch):
        """Log the loss."""
        self.log("validation", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        """Return an optimizer with a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_after_backward(self):
        """Note gradients as they are then."""
        self.seen.append([parameter.grad.sum().item() for parameter in self.parameters()])

    def on_before_optimizer_step(self, optimizer):
        """Record the call."""
        self.seen.append(len(optimizer.param_groups))

    def on_train_batch_end(self, outputs, *_):
        """Record the returned and the logged values."""
        logged = {key: value.item() for key, value in self.trainer.callback_metrics.items()}
        self.seen.append((outputs["logits"].sum().item(), outputs["loss"].item(), logged))


def loader(count):
    """Return batches of 4; the last one is smaller."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.utils.data.TensorDataset(
        torch.randn(count, 6, generator=generator),
        torch.randint(0, 3, (count,), generator=generator),
    )
    return torch.utils.data.DataLoader(rows, batch_size=4)


def fitted(model, folder, count=22, *, resume=None, back=None, **options):
    """Train a copy of a model, its network compiled where there is a back end, and return both."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    own, batches = copy.deepcopy(model), loader(count)
    if back is not None:
        torch._dynamo.reset()
        own.net.compile(backend=back, fullgraph=True, dynamic=False)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given = {"default_root_dir": folder, "accelerator": "cpu", "devices": 1, "max_epochs": 2}
    given |= {"gradient_clip_val": 0.5, "num_sanity_val_steps": 0, **dict.fromkeys(quiet, False)}
    trainer = lightning.Trainer(**given | options)
    torch.manual_seed(3)
    trainer.fit(own, batches, batches, ckpt_path=resume)
    return own, trainer


def same(one, other):
    """Return whether two models have the same weights, and hooks saw the same."""
    values = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in values) and one.seen == other.seen


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_strategy_gives_the_weights_of_the_plain_one(accumulate, tmp_path):
    """With accumulation, clipping, a schedule, logs, outputs, hooks and validation."""
    model = Classifier()
    options = {"accumulate_grad_batches": accumulate}
    expected, plain = fitted(model, tmp_path, **options)
    found, ours = fitted(model, tmp_path, **options, strategy=Strategy(**QUICK))
    assert same(found, expected)
    assert ours.callback_metrics == plain.callback_metrics
    assert not same(found, model)
    assert ours.strategy.step.verify().equal


def test_a_back_end_needs_no_strategy(tmp_path):
    """With accumulation, clipping, logs and validation; the last batch is another graph."""
    model = Classifier()
    expected, plain = fitted(model, tmp_path, accumulate_grad_batches=2)
    back = pmt.backend("100%", cache=False)  # the minimum is 99.4 % on some processors
    found, ours = fitted(model, tmp_path, accumulate_grad_batches=2, back=back)
    assert same(found, expected)
    assert ours.callback_metrics == plain.callback_metrics
    assert len(back.plans) == 4  # two sizes of batches, each in training and validation
    assert all(one.predicted_peak_bytes <= one.ram_budget_bytes for one in back.plans)


@pytest.mark.slow
def test_training_resumes_within_an_epoch(tmp_path):
    """From a checkpoint in the middle of one, as without poetmodel."""
    model = Classifier()

    def trained(**options):
        folder = tmp_path / str(len(options))
        saver = lightning.pytorch.callbacks.ModelCheckpoint(
            folder, filename="{step}", every_n_train_steps=4, save_top_k=-1
        )
        more = {"enable_checkpointing": True, "callbacks": [saver]}
        make = {key: Strategy(**value) for key, value in options.items()}
        fitted(model, tmp_path, **more, **make)
        make = {key: Strategy(**value) for key, value in options.items()}
        again, trainer = fitted(
            Classifier(), tmp_path, **make, resume=folder / "step=4.ckpt", max_epochs=3
        )
        assert trainer.current_epoch == 3
        return [*again.state_dict().values()]

    assert all(map(torch.equal, trained(strategy=QUICK), trained()))


@pytest.mark.slow
def test_the_optimizer_is_a_part_of_the_step(tmp_path):
    """Weights, moments and logs are those of the plain one; state is restored from storage."""

    class Quiet(Classifier):
        def on_after_backward(self):
            assert ours is None or all(p.grad is None for p in self.parameters())

    model = Quiet()
    layers = [nn.Linear(64, 64) for _ in range(5)]
    model.net = nn.Sequential(nn.Linear(6, 64), *layers, nn.Tanh(), nn.Linear(64, 3))
    ours = None
    expected, plain = fitted(model, tmp_path)
    for options in (QUICK, {**QUICK, "ram": "80%", "storage": tmp_path, "gap": 0.2}):
        ours = Strategy(**options, whole_step=True)
        found, trainer = fitted(model, tmp_path, strategy=ours)
        assert same(found, expected)
        assert ours.step is not None
        moved = len(ours.step.compiled.scheduled.graph.state_tensors) > len(ours.step.plan.resident)
        assert moved == ("storage" in options)
        states = [t.optimizers[0].state_dict()["state"].values() for t in (trainer, plain)]
        pairs = [(a[key], b[key]) for a, b in zip(*states, strict=True) for key in a]
        assert all(torch.equal(a, b) for a, b in pairs)
    ours = Strategy(**QUICK, whole_step=True)
    with pytest.raises(InputError, match="leave accumulate_grad_batches out"):
        fitted(model, tmp_path, strategy=ours, accumulate_grad_batches=2)


@pytest.mark.slow
def test_mixed_precision_is_a_part_of_the_step(tmp_path):
    """As autocast around it is not."""
    model = Classifier()
    expected, _ = fitted(model, tmp_path, precision="bf16-mixed")
    found, _ = fitted(model, tmp_path, precision="bf16-mixed", strategy=Strategy(**QUICK))
    assert same(found, expected)


def test_what_would_stay_as_it_is_is_refused(tmp_path):
    """Numbers that are logged, counters of the trainer, skipped batches, manual optimization."""

    class Number(Classifier):
        def training_step(self, batch, batch_idx):
            self.log("rate", 0.1)
            return super().training_step(batch, batch_idx)

    class Warm(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)["loss"] * min(1, self.global_step / 9)

    class Skips(Classifier):
        def training_step(self, batch, batch_idx):
            return None if batch_idx >= 0 else batch

    class Manual(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    for kind, words in (
        (Number, "logs 'rate', a float, which would never change"),
        (Warm, "Warm: training_step reads global_step, whose value would never change"),
        (Skips, "training_step returned None"),
        (Manual, "manual optimization"),
    ):
        given = {} if kind is not Manual else {"gradient_clip_val": None}
        with pytest.raises(CaptureError, match=words):
            fitted(kind(), tmp_path, 4, strategy=Strategy(**QUICK), **given)
    with pytest.raises(TypeError, match="clip_grad_norm, speed"):  # which are Lightning's
        Strategy(ram="100%", speed=3, clip_grad_norm=1.0)


def test_several_processes_are_refused_with_what_trains_there(monkeypatch):
    """Each would train alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"one of 2 processes.*strategy='ddp'"):
        Strategy(ram="90%")
