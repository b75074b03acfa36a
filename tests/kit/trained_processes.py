"""Comparison of compiled and eager training by loops of other libraries, under ``torchrun``."""

import copy
import os
import sys
import tempfile

import torch
from torch.utils.data import DataLoader

import poetmodel.torch as pmt

ROWS, LENGTH, WORDS = 96, 64, 64
"""Number of texts, tokens of a text, and size of the vocabulary.

From the fifth of six steps on, all processes use the plans that the first one chose, also if only
every other step exchanges gradients.
"""
OPTIONS = {"fullgraph": True, "dynamic": False}


def network():
    """Return a small text classifier with the same weights in every call."""
    import transformers

    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=WORDS,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            problem_type="single_label_classification",
        )
    )


def rows():
    """Return the same random texts with labels in every call."""
    torch.manual_seed(1)
    return [
        {"input_ids": torch.randint(WORDS, (LENGTH,)), "labels": torch.randint(2, ())}
        for _ in range(ROWS)
    ]


def train_by_trainer(model):
    """Train a model for one epoch by the Trainer of Transformers."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=8,
            num_train_epochs=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        transformers.Trainer(model=model, args=args, train_dataset=rows()).train()


def train_by_accelerate(model):
    """Train a model for one epoch by a loop of Accelerate, with two batches per update."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(rows(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


def main():
    """Train an eager and a compiled model by both loops, and assert that their bits are equal.

    Prints "trained", and ends the process with status 0.
    """
    torch.set_num_threads(1)
    for train in (train_by_trainer, train_by_accelerate):
        torch._dynamo.reset()
        eager = network()
        model, back = copy.deepcopy(eager), pmt.backend("70%")
        model.compile(backend=back, **OPTIONS)
        for each in (eager, model):
            torch.manual_seed(2)
            train(each)
        equal = all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))
        (choice,) = back._steps.choices
        assert choice.peak_bytes <= choice.budget_bytes < choice.keep_all_bytes
        assert equal, train.__name__
    assert torch.distributed.get_world_size() == 2
    torch.distributed.barrier()
    sys.stdout.write("trained\n")
    sys.stdout.flush()
    os._exit(0)  # PyTorch's profiler leaves a running thread


if __name__ == "__main__":
    main()
