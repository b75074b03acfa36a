"""Models of other libraries are captured as eager runs them, with masks; small random ones."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import poetmodel.torch as pmt  # noqa: E402
from kit.eager_steps import keep_all  # noqa: E402
from pytorch.coverage import REFUSED, WORKS, ModelRun, tried  # noqa: E402
from pytorch.models import TRIALS, Trial  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.large,
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]

QUICK = ("transformers BERT", "transformers GPT-2, gradient checkpointing")
SAMPLE = (
    "BERT, autocast to bfloat16",
    "BERT, LoRA of PEFT",
    "DistilBERT",
    "Llama, gradient checkpointing",
    "Mixtral",
    "T5",
    "Mamba",
    "Whisper",
    "Wav2Vec2",
    "Wav2Vec2, no SpecAugment, no layerdrop",
    "ViT",
    "Swin",
    "Segformer",
    "DETR, a loss of one's own",
    "DETR, its own loss",
)
"""Models of transformers that differ in kind; the record of `pytorch.coverage` has all."""
OTHERWISE_COMPILED = ("Mamba",)
"""Models that ask whether Dynamo compiles them, and compute in another way then."""
SEEDED = "transformers Wav2Vec2, no SpecAugment"


def compiled(name: str, **options: Any) -> tuple[Trial, pmt.Step]:
    """Return a model of another library, and its step with room for everything."""
    torch.manual_seed(0)
    trial = TRIALS[name]()
    step = keep_all(trial.model, trial.loss_fn, trial.inputs, **options)
    return trial, step


def without_padding(trial: Trial) -> dict[str, Any]:
    """Return the batch of a model with a mask that masks nothing."""
    (batch,) = trial.inputs
    return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}


@pytest.mark.parametrize("name", QUICK)
def test_masks_are_read_and_guarded(name: str) -> None:
    """Another mask runs, equal to eager; one that masks nothing would run otherwise: refused."""
    trial, step = compiled(name)
    assert step.verify().equal
    assert step.verify(*trial.other).equal
    with pytest.raises(pmt.CaptureError, match=r"masking_utils.py:\d+ .* was False and is True"):
        step(without_padding(trial))


def test_a_mask_that_masks_nothing_is_compiled_for_if_asked() -> None:
    """Both programs are there from then on: batches with padding, and batches without."""
    trial, step = compiled(QUICK[0], dynamic="retrace")
    first = step.compiled
    assert step.verify(without_padding(trial)).equal
    assert step.compiled is not first
    assert step.verify(*trial.other).equal
    assert step.compiled is first


def test_layers_that_are_dropped_at_random_are_refused() -> None:
    """The sentence says that a random number decides, and where."""
    with pytest.raises(pmt.CaptureError, match=r"random number .*modeling_wav2vec2"):
        compiled(SEEDED)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_models_of_other_libraries(name: str, tmp_path: Any) -> None:
    """Each is equal to eager on two batches and in a smaller budget, or refused."""
    found = tried(ModelRun(model=f"transformers {name}"), folder=str(tmp_path))
    assert found["back_end"]["status"] in (WORKS, REFUSED) or name in OTHERWISE_COMPILED
    assert found["back_end"].get("within", True)
    if found["status"] == REFUSED:
        assert "cannot" in found["reason"] or "would" in found["reason"]
        return
    assert (found["status"], found["other"]) == (WORKS, WORKS)
    assert found["budget"] is None or (found["budget"]["equal"] and found["budget"]["within"])
