"""Hugging Face's `Trainer` with compiled steps: the weights are those of the plain one."""

import copy
import re

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import poetmodel.torch as pmt  # noqa: E402
from kit.eager_steps import compile_keep_all  # noqa: E402
from kit.rotation import mark_seeds_except  # noqa: E402
from poetmodel.errors import BudgetError, InputError  # noqa: E402
from poetmodel.torch import CaptureError  # noqa: E402
from poetmodel.torch.huggingface import Trainer  # noqa: E402
from pytorch.coverage import AS_CAPTURED, REFUSED, WORKS, ModelRun, try_model  # noqa: E402
from pytorch.models import TRIALS  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.large,
    # What the libraries say of each other.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
]

QUICK = {"ram": "100%", "device": "rpi4b"}
"""Options of steps that are neither measured nor squeezed."""


class Rows(torch.utils.data.Dataset):
    """Sentences of 8 words, every other one with 5 and a mask."""

    def __init__(self, count, *, words=False):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, 60, (count, 8), generator=generator)
        self.mask = torch.ones_like(self.ids)
        self.mask[::2, 5:] = 0
        self.labels = torch.randint(0, 2, (count,), generator=generator)
        if words:
            self.labels = self.ids.masked_fill(self.mask == 0, -100)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, place):
        return {
            "input_ids": self.ids[place],
            "attention_mask": self.mask[place],
            "labels": self.labels[place],
        }


def bert():
    """Return a classifier of sentences, with dropout."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2(width=16):
    """Return a language model, which divides its loss by the number of words of all batches."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=60, n_embd=width, n_layer=1, n_head=2, n_positions=16,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else it logs that it takes this one, which Dynamo refuses
    return model


def trained(kind, model, rows, folder, *, resume=None, back=None, **options):
    """Train a copy of a model, compiled where there is a back end; return weights and trainer."""
    own = copy.deepcopy(model)
    if back is not None:
        torch._dynamo.reset()
        own.compile(backend=back, fullgraph=True, dynamic=False)
    settings = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "dataloader_pin_memory": False, "per_device_train_batch_size": 2, "num_train_epochs": 2,
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine",
        "warmup_steps": 1, "learning_rate": 1e-2, "eval_strategy": "epoch", "logging_steps": 1,
        "save_strategy": "no", **options.pop("settings", {}),
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**settings)
    trainer = kind(model=own, args=arguments, train_dataset=rows, eval_dataset=rows, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.state_dict(), trainer


def history(trainer):
    """Return the log without times."""
    return [
        {key: value for key, value in entry.items() if "runtime" not in key and "per_s" not in key}
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize(
    ("make", "count"),
    [(bert, 10), *(pytest.param(gpt2, k, marks=pytest.mark.slow) for k in (8, 9))],
)
def test_a_trainer_gives_the_weights_of_the_plain_one(make, count, tmp_path):
    """With masks, accumulation and its remainder, clipping, a schedule and evaluation.

    The number of words scales the loss of a language model: it is another one for each step.
    """
    model, rows = make(), Rows(count, words=make is gpt2)
    expected, plain = trained(transformers.Trainer, model, rows, tmp_path)
    found, ours = trained(Trainer, model, rows, tmp_path, **QUICK)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(found.values(), model.state_dict().values(), strict=True)
    )
    assert all(map(torch.equal, found.values(), expected.values()))
    assert history(ours) == history(plain)
    assert ours.step is not None
    assert ours.step.report()["budget_bytes"] > 0


@pytest.mark.parametrize("make", [bert, gpt2])
def test_the_plain_trainer_keeps_the_budget_of_a_back_end(make, tmp_path):
    """With masks, accumulation, clipping and evaluation the weights are those without it."""
    model, rows = make(), Rows(8, words=make is gpt2)
    expected, plain = trained(transformers.Trainer, model, rows, tmp_path)
    back = pmt.backend("80%", cache=False, gap=0.5)
    found, ours = trained(transformers.Trainer, model, rows, tmp_path, back=back)
    assert all(map(torch.equal, found.values(), expected.values()))
    assert history(ours) == history(plain)
    training = back.plans[0]
    assert training.recomputed > 0
    assert training.predicted_peak_bytes <= training.ram_budget_bytes < training.keep_all_bytes


@pytest.mark.slow
def test_training_resumes_within_an_epoch(tmp_path):
    """From a checkpoint of either trainer, with the same weights in the end."""
    model, rows = bert(), Rows(12)
    saves = {"settings": {"save_strategy": "steps", "save_steps": 2}}
    expected, _ = trained(transformers.Trainer, model, rows, tmp_path / "plain", **saves)
    found, _ = trained(Trainer, model, rows, tmp_path / "ours", **saves, **QUICK)
    assert all(map(torch.equal, found.values(), expected.values()))
    for folder in ("plain", "ours"):
        resume = str(tmp_path / folder / "checkpoint-2")
        again, trainer = trained(
            Trainer, model, rows, tmp_path / "again", resume=resume, **saves, **QUICK
        )
        assert trainer.state.global_step == 6
        assert all(map(torch.equal, again.values(), expected.values()))


@pytest.mark.slow
def test_losses_of_a_users_own(tmp_path):
    """A subclass's ``compute_loss``, a ``compute_loss_func``, and smoothed labels."""

    class Weighted:
        def compute_loss(self, model, inputs, *more, **named):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weight = torch.tensor([1.0, 3.0])
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weight)
            return (loss, outputs) if more or named.get("return_outputs") else loss

    class Plain(Weighted, transformers.Trainer):
        pass

    class Ours(Weighted, Trainer):
        pass

    def func(outputs, labels, num_items_in_batch=None):
        losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
        return losses / num_items_in_batch

    model, rows = bert(), Rows(4)
    cases = [
        (Plain, Ours, {}),
        (transformers.Trainer, Trainer, {"compute_loss_func": func}),
        (transformers.Trainer, Trainer, {"settings": {"label_smoothing_factor": 0.1}}),
    ]
    for plain, ours, options in cases:
        expected, _ = trained(plain, model, rows, tmp_path, **copy.deepcopy(options))
        found, _ = trained(ours, model, rows, tmp_path, **options, **QUICK)
        assert all(map(torch.equal, found.values(), expected.values()))


WHOLE = {"gradient_accumulation_steps": 1, "optim": "adamw_torch_fused"}
"""Settings of a trainer whose optimizer is a part of the step."""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["RAM", "storage"])
def test_the_optimizer_is_a_part_of_the_step(where, tmp_path):
    """Weights and moments are those of the plain trainer, also where they lie on storage."""
    model, rows = gpt2(16 if where == "RAM" else 64), Rows(7, words=True)
    options = {"ram": "100%", "device": "rpi4b"}
    if where == "storage":
        options = {"ram": "60%", "device": "rpi4b", "storage": tmp_path / "pages", "gap": 0.2}
    settings = {**WHOLE, "save_strategy": "steps", "save_steps": 3}
    expected, plain = trained(transformers.Trainer, model, rows, tmp_path, settings=settings)
    settings["save_strategy"] = "no"
    found, ours = trained(
        Trainer, model, rows, tmp_path, settings=settings, whole_step=True, **options
    )
    assert all(map(torch.equal, found.values(), expected.values()))
    losses = [[entry.get("loss") for entry in history(trainer)] for trainer in (ours, plain)]
    assert losses[0] == losses[1]
    assert not any("grad_norm" in entry for entry in history(ours))
    moved = len(ours.step.result.problem.graph.state_tensors) > len(ours.step.plan.resident)
    assert moved == (where == "storage")
    options |= {"whole_step": True, "resume": str(tmp_path / "checkpoint-3")}
    resumed, _ = trained(Trainer, model, rows, tmp_path, settings=settings, **options)
    assert all(map(torch.equal, resumed.values(), expected.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", mark_seeds_except(["checkpointed", "bf16", "noise"], ["checkpointed"])
)
def test_settings_of_all_kinds(kind, tmp_path):
    """Gradient checkpointing, autocast and noise in embeddings."""
    rows = Rows(6, words=True)
    settings = {
        "checkpointed": {"gradient_checkpointing": True},
        "bf16": {"bf16": True},
        "noise": {"neftune_noise_alpha": 5},
    }.get(kind, {})
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    settings = {"num_train_epochs": 1, "eval_strategy": "no", **settings}
    expected, _ = trained(transformers.Trainer, model, rows, tmp_path, settings=settings)
    found, _ = trained(Trainer, model, rows, tmp_path, settings=settings, **QUICK)
    assert all(map(torch.equal, found.values(), expected.values()))
    assert not all(map(torch.equal, found.values(), model.state_dict().values()))


class Averaging(torch.optim.SGD):
    """Plain SGD that, like schedule-free optimizers, has other weights for evaluation."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.training = False

    def _move(self, *, train_mode):
        """Set the mode, and move all weights if it was the other one."""
        for group in self.param_groups:
            if group.setdefault("train_mode", False) != train_mode:
                group["train_mode"] = self.training = train_mode
                for parameter in group["params"]:
                    parameter.data.mul_(2.0 if train_mode else 0.5)

    def train(self):
        """Set the mode of training."""
        self._move(train_mode=True)

    def eval(self):
        """Set the mode of evaluation."""
        self._move(train_mode=False)

    def step(self, closure=None):
        """Update like plain SGD, in training mode."""
        assert self.training
        assert all(group["train_mode"] for group in self.param_groups)
        return super().step(closure)


@pytest.mark.parametrize(
    "options",
    [
        {"settings": {"torch_empty_cache_steps": 2}},
        {"optimizer_cls_and_kwargs": (Averaging, {"lr": 0.1})},
    ],
    ids=["emptied cache", "optimizer with modes"],
)
def test_what_the_plain_trainer_does_around_the_loss(options, tmp_path):
    """It empties a cache and sets the mode of the optimizer."""
    model, rows = bert(), Rows(4)
    expected, plain = trained(transformers.Trainer, model, rows, tmp_path, **copy.deepcopy(options))
    found, ours = trained(Trainer, model, rows, tmp_path, **options, **QUICK)
    assert all(map(torch.equal, found.values(), expected.values()))
    assert history(ours) == history(plain)


def test_what_a_trainer_cannot_take_is_told(tmp_path):
    """A budget that is too small where training begins; updates are the trainer's own."""
    with pytest.raises(BudgetError, match="is too little"):
        trained(Trainer, bert(), Rows(2), tmp_path, **{**QUICK, "ram": "1KiB"})
    with pytest.raises(InputError, match="gradient_accumulation_steps is 2"):
        trained(Trainer, bert(), Rows(2), tmp_path, **QUICK, whole_step=True)
    settings = {**WHOLE, "optim": "adafactor"}
    with pytest.raises(CaptureError, match="expected SGD"):
        trained(Trainer, bert(), Rows(2), tmp_path, settings=settings, **QUICK, whole_step=True)

    class Annealed(Trainer):
        def compute_loss(self, *args, **named):
            return super().compute_loss(*args, **named) * min(1, self.state.global_step / 10)

    with pytest.raises(CaptureError, match="compute_loss reads global_step, whose value would"):
        trained(Annealed, bert(), Rows(2), tmp_path, **QUICK)
    with pytest.raises(TypeError, match="ram"):
        Trainer(model=bert())
    with pytest.raises(TypeError, match="clip_grad_norm"):
        Trainer(model=bert(), ram="100%", clip_grad_norm=1.0)


# -- models that are captured with their masks ---------------------------------------------------
READ = ("transformers BERT", "transformers GPT-2, gradient checkpointing")
SAMPLE = (
    "BERT, autocast to bfloat16", "BERT, LoRA of PEFT", "DistilBERT", "Mixtral", "T5", "Mamba",
    "Llama, gradient checkpointing", "Whisper", "Wav2Vec2", "ViT", "Swin", "Segformer",
    "Wav2Vec2, no SpecAugment, no layerdrop", "DETR, a loss of one's own", "DETR, its own loss",
)  # fmt: skip
"""Models of transformers that differ in kind; the record of `pytorch.coverage` has all."""
OTHERWISE_COMPILED = ("Mamba",)
"""Models that ask whether Dynamo compiles them, and compute in another way then."""
SEEDED = "transformers Wav2Vec2, no SpecAugment"


def tried_step(name):
    """Return a model of another library, and its step with room for everything."""
    torch.manual_seed(0)
    trial = TRIALS[name]()
    return trial, compile_keep_all(trial.model, trial.loss_fn, trial.inputs)


def without_padding(trial):
    """Return the batch of a model with a mask of ones."""
    (batch,) = trial.inputs
    return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", READ)
def test_one_step_is_for_all_masks(name):
    """Another mask runs, and one of ones, for which eager mode takes another way to the bits."""
    trial, step = tried_step(name)
    for batch in (trial.inputs, trial.other, [without_padding(trial)]):
        assert step.verify(*batch).equal


@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_layers_that_are_dropped_at_random_are_refused():
    """The error says that a random number decides, and its line."""
    with pytest.raises(CaptureError, match=r"random number .*modeling_wav2vec2"):
        tried_step(SEEDED)


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.slow
@pytest.mark.parametrize("name", mark_seeds_except(SAMPLE, SAMPLE[:3]))
def test_models_of_other_libraries(name, tmp_path):
    """Each is equal to eager, or to PyTorch's capture, on two batches and in less, or refused.

    After the line that a refusal states, if there is one, it is equal.
    """
    expected = AS_CAPTURED if name in OTHERWISE_COMPILED else WORKS
    found = try_model(ModelRun(model=f"transformers {name}"), folder=str(tmp_path))
    assert found["back_end"]["status"] in (expected, REFUSED)
    assert found["back_end"].get("within", True)
    if found["status"] == REFUSED:
        assert re.search("cannot|would|does not|call the model once", found["reason"])
        if "line" not in found:
            return
        found = found["line"]
    assert (found["status"], found["other"]) == (expected, expected)
    budget = found["budget"] or {"equal": expected == WORKS, "within": True}
    assert (budget["equal"], budget["within"]) == (expected == WORKS, True)


def test_several_processes_are_refused_with_what_trains_there(monkeypatch):
    """The stock Trainer accepts a compiled model."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"one of 2 processes.*transformers\.Trainer\(model"):
        Trainer(model=None, ram="90%")
