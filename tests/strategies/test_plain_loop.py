"""Every strategy equals a training loop in plain torch, step by step.

The other files of this folder compare strategies with each other. They would not see a fault that
all strategies share.
"""

import pytest
import runs as helpers
import torch
from own_parts import Ragged
from plain_loop import Recipe, train

from gptrain.models import Llama

N_STEPS, RESUME_AT = 10, 5
SIZES = {
    "vocab_size": 61, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "d_ff": 40,
    "max_seq_len": 16, "rope_base": 1000.0, "qk_norm": True, "tie_head": False,
}  # fmt: skip
MODEL = ("model=llama_nano", *(f"model.{key}={value}" for key, value in SIZES.items()))
# A warm-up of 0.15 * 20 = 3 steps. The run ends in the middle of its schedule.
RECIPE = Recipe(
    lr=5e-3, first_block_lr=2e-3, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.3, max_norm=0.88,
    label_smoothing=0.1, warmup_steps=3, total_steps=20, start_factor=0.2, min_factor=0.05,
)  # fmt: skip
WORDS = (
    "seed=7", "data.global_batch_size=12",
    "module.loss.label_smoothing=0.1",
    "optimizer._target_=own_parts.FirstBlockAdamW", "+optimizer.first_block_lr=2e-3",
    "optimizer.lr=5e-3", "optimizer.betas=[0.8,0.9]", "optimizer.weight_decay=0.3",
    "trainer.gradient_clip_val=0.88", "scheduler.warmup_steps=0.15", "scheduler.total_steps=20",
    "scheduler.start_factor=0.2", "scheduler.min_factor=0.05", "trainer.val_check_interval=5",
)  # fmt: skip
PLACES = {  # two micro-steps of 6 sequences each
    "single": ("strategy=single", "data.batch_size=6"),
    "ddp": ("strategy=ddp", "trainer.devices=2", "data.batch_size=3"),
    "fsdp": ("strategy=fsdp", "trainer.devices=2", "data.batch_size=3"),
    # No size of the model is divisible by three ranks, and one rank has neighbours on both sides.
    "fsdp on three ranks": ("strategy=fsdp", "trainer.devices=3", "data.batch_size=2"),
}


def run_with_resume(runs, name):
    """Return a run of five steps, and its resumed copy of ten steps."""
    words = (*PLACES[name], *WORDS)
    begun = runs(*words, f"trainer.max_steps={RESUME_AT}", model=MODEL)
    words = (*words, f"trainer.max_steps={N_STEPS}", "ckpt_path=last")
    return begun, runs(*words, model=MODEL, begun=begun)


def batches_of(records):
    """Yield tokens and targets of every step, from the samples that all ranks together read."""
    dataset = Ragged(num_samples=200, seq_len=15, vocab_size=61, seed=3)
    for of_ranks in zip(*(record["samples"] for record in records), strict=True):
        samples = [dataset[number] for samples in of_ranks for number in samples]
        tokens, targets = zip(*samples, strict=True)
        yield torch.stack(tokens), torch.stack(targets)  # (12, T)


@pytest.fixture(scope="module")
def truth(runs):
    """Return the history of the plain loop over the batches that one process reads."""
    begun, resumed = run_with_resume(runs, "single")
    batches = [batch for run in (begun, resumed) for batch in batches_of([run.record()])]
    torch.manual_seed(7)
    return train(Llama(**SIZES).double(), batches, RECIPE)


@pytest.mark.parametrize(
    "name",
    [
        *("single", "ddp", "fsdp"),
        pytest.param("fsdp on three ranks", marks=pytest.mark.slow),  # two ranks are fast
    ],
)
def test_ten_steps_with_a_resume_equal_the_plain_loop(name, runs, truth):
    _, run = run_with_resume(runs, name)
    assert [float(step) for step in run.column("step")] == list(range(1, N_STEPS + 1))
    helpers.check_close(run.column("train/loss"), truth.losses)
    helpers.check_close(run.column("grad_norm"), truth.gradient_norms)
    helpers.check_close(run.column("lr"), truth.lrs)
    assert max(truth.gradient_norms) > RECIPE.max_norm > min(truth.gradient_norms)
    for step in (RESUME_AT, N_STEPS):
        weights = run.weights(step)
        assert weights.keys() == truth.weights[step - 1].keys()
        for key, weight in truth.weights[step - 1].items():
            error = (weights[key] - weight).abs().max() / weight.abs().max()
            assert error < helpers.WEIGHT_RTOL, (step, key, error)
