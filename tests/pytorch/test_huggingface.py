"""Hugging Face's `Trainer` with compiled steps: the weights are those of the plain one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import poetmodel.torch as pmt  # noqa: E402
from kit.rotation import rotating  # noqa: E402
from poetmodel.errors import BudgetError, InputError  # noqa: E402
from poetmodel.torch import CaptureError  # noqa: E402
from poetmodel.torch.huggingface import Trainer  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

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

    def __init__(self, count: int, *, words: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, 60, (count, 8), generator=generator)
        self.mask = torch.ones_like(self.ids)
        self.mask[::2, 5:] = 0
        self.labels = torch.randint(0, 2, (count,), generator=generator)
        if words:
            self.labels = self.ids.masked_fill(self.mask == 0, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {
            "input_ids": self.ids[place],
            "attention_mask": self.mask[place],
            "labels": self.labels[place],
        }


def bert() -> Any:
    """Return a classifier of sentences, with dropout."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2(width: int = 16) -> Any:
    """Return a language model, which divides its loss by the number of words of all batches."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=60,
        n_embd=width,
        n_layer=1,
        n_head=2,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else it logs that it takes this one, which Dynamo refuses
    return model


def trained(
    kind: type,
    model: Any,
    rows: Rows,
    folder: Path,
    *,
    resume: str | None = None,
    back: pmt.Backend | None = None,
    **options: Any,
) -> tuple[dict[str, Any], Any]:
    """Train a copy of a model, compiled where there is a back end; return weights and trainer."""
    own = copy.deepcopy(model)
    if back is not None:
        torch._dynamo.reset()
        own.compile(backend=back, fullgraph=True, dynamic=False)
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "learning_rate": 1e-2,
        "eval_strategy": "epoch",
        "logging_steps": 1,
        "save_strategy": "no",
        **options.pop("settings", {}),
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    trainer = kind(
        model=own,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows,
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.state_dict(), trainer


def history(trainer: Any) -> list[Any]:
    """Return what was logged, but for times."""
    return [
        {key: value for key, value in entry.items() if "runtime" not in key and "per_s" not in key}
        for entry in trainer.state.log_history
    ]


def test_a_trainer_gives_the_weights_of_the_plain_one(tmp_path: Path) -> None:
    """With masks, accumulation and its remainder, clipping, a schedule and evaluation."""
    model, rows = bert(), Rows(10)
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
def test_the_plain_trainer_keeps_the_budget_of_a_back_end(make: Any, tmp_path: Path) -> None:
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
@pytest.mark.parametrize("count", [8, 9])
def test_the_number_of_words_scales_the_loss(count: int, tmp_path: Path) -> None:
    """As for all language models: it is a number of its own for each step; 9 rows end with one."""
    model, rows = gpt2(), Rows(count, words=True)
    expected, plain = trained(transformers.Trainer, model, rows, tmp_path)
    found, ours = trained(Trainer, model, rows, tmp_path, **QUICK)
    assert all(map(torch.equal, found.values(), expected.values()))
    assert history(ours) == history(plain)


@pytest.mark.slow
def test_training_resumes_within_an_epoch(tmp_path: Path) -> None:
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
def test_losses_of_a_users_own(tmp_path: Path) -> None:
    """A subclass's ``compute_loss``, a ``compute_loss_func``, and smoothed labels."""

    class Weighted:
        def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weight = torch.tensor([1.0, 3.0])
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weight)
            return (loss, outputs) if more or named.get("return_outputs") else loss

    class Plain(Weighted, transformers.Trainer):
        pass

    class Ours(Weighted, Trainer):
        pass

    def func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
        return losses / num_items_in_batch

    model, rows = bert(), Rows(4)
    cases: list[tuple[type, type, dict[str, Any]]] = [
        (Plain, Ours, {}),
        (transformers.Trainer, Trainer, {"compute_loss_func": func}),
        (transformers.Trainer, Trainer, {"settings": {"label_smoothing_factor": 0.1}}),
    ]
    for plain, ours, options in cases:
        expected, _ = trained(plain, model, rows, tmp_path, **copy.deepcopy(options))
        found, _ = trained(ours, model, rows, tmp_path, **options, **QUICK)
        assert all(map(torch.equal, found.values(), expected.values()))


@pytest.mark.slow
def test_a_budget_is_kept_with_pages(tmp_path: Path) -> None:
    """Options of `compile` are options of the trainer; measured costs, recomputing and paging."""
    model, rows = gpt2(), Rows(16, words=True)
    settings = {"per_device_train_batch_size": 8, "num_train_epochs": 1}
    expected, _ = trained(transformers.Trainer, model, rows, tmp_path, settings=settings)
    found, ours = trained(
        Trainer, model, rows, tmp_path, settings=settings, ram="80%", storage=tmp_path, gap=0.1
    )
    assert all(map(torch.equal, found.values(), expected.values()))
    assert ours.step.verify().within_budget
    assert ours.step.verify().equal


WHOLE: dict[str, Any] = {"gradient_accumulation_steps": 1, "optim": "adamw_torch"}
"""Settings of a trainer whose optimizer is a part of the step."""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["RAM", "storage"])
def test_the_optimizer_is_a_part_of_the_step(where: str, tmp_path: Path) -> None:
    """Weights and moments are those of the plain trainer, also where they lie on storage."""
    model, rows = gpt2(16 if where == "RAM" else 64), Rows(7, words=True)
    options: dict[str, Any] = {"ram": "100%", "device": "rpi4b"}
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
    resumed, _ = trained(
        Trainer,
        model,
        rows,
        tmp_path,
        settings=settings,
        whole_step=True,
        resume=str(tmp_path / "checkpoint-3"),
        **options,
    )
    assert all(map(torch.equal, resumed.values(), expected.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    rotating(["checkpointed", "bf16", "noise", "T5", "ViT", "LoRA"], ["checkpointed", "LoRA"]),
)
def test_models_and_settings_of_all_kinds(kind: str, tmp_path: Path) -> None:
    """Gradient checkpointing, autocast, noise in embeddings, pairs of texts, images, adapters."""
    torch.manual_seed(1)
    rows: Any = Rows(6, words=True)
    settings: dict[str, Any] = {
        "checkpointed": {"gradient_checkpointing": True},
        "bf16": {"bf16": True},
        "noise": {"neftune_noise_alpha": 5},
    }.get(kind, {})
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=60,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
    )
    if kind == "T5":
        config = transformers.T5Config(
            vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
            decoder_start_token_id=0,
        )  # fmt: skip
        model = transformers.T5ForConditionalGeneration(config)
    if kind == "ViT":
        config = transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            image_size=16, patch_size=8,
        )  # fmt: skip
        model = transformers.ViTForImageClassification(config)
        rows = [{"pixel_values": torch.randn(3, 16, 16), "labels": k % 2} for k in range(6)]
    if kind == "LoRA":
        peft = pytest.importorskip("peft")
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        model = peft.get_peft_model(model, adapters)
    settings = {"num_train_epochs": 1, "eval_strategy": "no", **settings}
    expected, _ = trained(transformers.Trainer, model, rows, tmp_path, settings=settings)
    found, _ = trained(Trainer, model, rows, tmp_path, settings=settings, **QUICK)
    assert all(map(torch.equal, found.values(), expected.values()))
    assert not all(map(torch.equal, found.values(), model.state_dict().values()))


def test_what_a_trainer_cannot_take_is_told(tmp_path: Path) -> None:
    """A budget that is too small where training begins; updates are the trainer's own."""
    with pytest.raises(BudgetError, match="is too little"):
        trained(Trainer, bert(), Rows(2), tmp_path, **{**QUICK, "ram": "1KiB"})
    with pytest.raises(InputError, match="gradient_accumulation_steps is 2"):
        trained(Trainer, bert(), Rows(2), tmp_path, **QUICK, whole_step=True)
    settings = {**WHOLE, "optim": "adamw_torch_fused"}
    with pytest.raises(CaptureError, match="fused"):
        trained(Trainer, bert(), Rows(2), tmp_path, settings=settings, **QUICK, whole_step=True)

    class Annealed(Trainer):
        def compute_loss(self, *args: Any, **named: Any) -> Any:
            return super().compute_loss(*args, **named) * min(1, self.state.global_step / 10)

    with pytest.raises(CaptureError, match=r"compute_loss reads state\.global_step, which would"):
        trained(Annealed, bert(), Rows(2), tmp_path, **QUICK)
    with pytest.raises(TypeError, match="ram"):
        Trainer(model=bert())
    with pytest.raises(TypeError, match="clip_grad_norm"):
        Trainer(model=bert(), ram="100%", clip_grad_norm=1.0)


@pytest.mark.slow
def test_models_of_transformers_return_what_they_do() -> None:
    """``out = step(**batch)`` is the output class of the model, without a cache, bit for bit."""
    for make, words in ((bert, False), (gpt2, True)):
        model = make()
        rows = Rows(4, words=words)
        batch = torch.utils.data.default_collate([rows[k] for k in range(4)])
        batch["output_hidden_states"] = True
        with pmt.compile(model, None, transformers.BatchEncoding(batch), **QUICK) as step:
            state = torch.get_rng_state()
            expected = copy.deepcopy(model)(**batch)
            torch.set_rng_state(state)
            found = step(**batch)
            assert type(found) is type(expected)
            assert torch.equal(found.loss, expected.loss)
            assert torch.equal(found.logits, expected.logits)
            assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
            assert getattr(found, "past_key_values", None) is None
            assert step.verify(**batch).equal
