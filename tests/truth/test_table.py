"""Every strategy, and every option that changes numbers, equals a loop of plain torch.

The options of a row are nowhere at their defaults. The plain loop trains in fp64 on the samples
that all ranks of a run together have read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from gptrain.models import Llama, SimpleGPT
from tests.run import Run
from tests.run import train as run_train
from tests.truth.own import IGNORED, Ragged
from tests.truth.plain_loop import Batch, Recipe, train

N_STEPS, VAL_EVERY, BATCH, SEED = 4, 2, 12, 7
OWN = "tests.truth.own"
DOCUMENTS = Path(__file__).parent / "documents.jsonl"
# V = 61 and T = 15 are not multiples of two ranks.
LLAMA = {
    "vocab_size": 61, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_head": 10, "n_layers": 2,
    "d_ff": 40, "max_seq_len": 16, "rope_base": 1000.0, "qk_norm": True, "tie_head": False,
}  # fmt: skip
GPT = {
    "vocab_size": 61, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 16,
    "dropout": 0.0,
}  # fmt: skip
NETS = {
    "llama": (Llama, LLAMA, "model=llama_nano"),
    "llama of bytes": (Llama, LLAMA | {"vocab_size": 256}, "model=llama_nano"),
    "gpt": (SimpleGPT, GPT, "model=gpt_nano"),
}
WORDS = (
    f"seed={SEED}", f"trainer.max_steps={N_STEPS}", f"trainer.val_check_interval={VAL_EVERY}",
    "trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false",
    "callbacks=none", "logger=none", "strategy.timeout_s=60", "data.seq_len=15",
    f"+callbacks.record._target_={OWN}.Record",
)  # fmt: skip
EMA = "lightning.pytorch.callbacks.EMAWeightAveraging"
ACCUMULATED = "data.global_batch_size=12"
NATS = "+module.metrics.nats._target_=tests.lit.own.metrics.Nats"


def ragged(n_samples: int, seed: int) -> str:
    values = f"num_samples: {n_samples}, seq_len: 15, vocab_size: 61, seed: {seed}"
    return f"{{_target_: {OWN}.Ragged, {values}}}"


RAGGED = (f"data.train={ragged(200, 3)}", f"data.val={ragged(21, 4)}")
MIXTURE = (
    "data=mixture",
    f"+data.parts.a={{weight: 3, train: {ragged(90, 5)}, val: {ragged(9, 6)}}}",
    f"+data.parts.b={{weight: 1, train: {ragged(90, 7)}, val: {ragged(9, 8)}}}",
)
MASKED = ("data=text", f"data.path={DOCUMENTS}", "data.documents=masked", "data.val_fraction=0.2")

# eps is above the rounding errors of gradients near zero, which Adam would amplify.
RECIPE = Recipe(
    lr=5e-3, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3, max_norm=0.8, warmup_steps=2,
    total_steps=6, start_factor=0.2, min_factor=0.05,
)  # fmt: skip
LOSS = replace(RECIPE, label_smoothing=0.1, z_loss=0.02)
MUON = replace(RECIPE, momentum=0.9, lrs={"embedding": 2e-3, "head": 4e-3, "vector": 1e-3})


@dataclass
class Row:
    """A run: its strategy and other words, its net and data, and what the plain loop has, too.

    Attributes:
        rtol: Relative errors of losses, of gradient norms, and of the largest weight of a tensor.
    """

    ranks: int
    words: tuple[str, ...]
    recipe: Recipe
    net: str = "llama"
    data: tuple[str, ...] = RAGGED
    rtol: tuple[float, float, float] = (1e-5, 1e-5, 1e-5)  # the runs compute in fp32


# Newton-Schulz multiplies rounding errors in the directions of small singular values by 480. It
# would compute in bf16 where the CPU has bf16 instructions.
IN_FP32 = f"+callbacks.fp32._target_={OWN}.MuonInFp32"
OF_MUON = (1e-5, 2e-4, 2e-2)
OF_BF16 = (1e-4, 2e-3, 2e-2)  # a product has 8 bits, and the errors of many products average out
TABLE = {
    "single": Row(
        1, ("strategy=single", "data.batch_size=4", ACCUMULATED), replace(LOSS, penalty=0.01),
    ),
    "muon": Row(
        1, ("strategy=single", "data.batch_size=12", IN_FP32),
        replace(MUON, schedule="warmup_linear"), rtol=OF_MUON,
    ),
    "bf16": Row(
        1, ("strategy=single", "data.batch_size=4", "trainer.accumulate_grad_batches=3",
            "trainer.precision=bf16-mixed"),
        LOSS, rtol=OF_BF16,
    ),
    "masked documents": Row(
        1, ("strategy=single", "data.batch_size=6", ACCUMULATED, NATS),
        LOSS, "llama of bytes", MASKED,
    ),
    "mixture": Row(
        1, ("strategy=single", "data.batch_size=6", ACCUMULATED), RECIPE, "gpt", MIXTURE,
    ),
    "ddp": Row(
        2, ("strategy=ddp", "data.batch_size=2", ACCUMULATED, "strategy.bucket_cap_mb=0.01",
            "strategy.gradient_as_bucket_view=false", "model.activation_checkpointing=full",
            "strategy.comm_hook=powersgd"),  # which sends full gradients in its first 1,000 steps
        replace(RECIPE, schedule="warmup_constant", ema_decay=0.7, penalty=0.01,
                lrs={"first_block": 1e-3}), "gpt",
    ),
    "ddp, muon": Row(
        2, ("strategy=ddp", "data.batch_size=6", IN_FP32), MUON, rtol=OF_MUON,
    ),
    "fsdp": Row(
        2, ("strategy=fsdp", "data.batch_size=3", ACCUMULATED, IN_FP32,
            "model.activation_checkpointing=selective"),
        replace(MUON, schedule="warmup_stable_decay", decay_steps=3, label_smoothing=0.1),
        rtol=OF_MUON,
    ),
    "hsdp": Row(
        4, ("strategy=fsdp", "strategy.replicas=2", "data.batch_size=1", ACCUMULATED,
            "strategy.accumulate_shards=true", "strategy.reshard_after_forward=false",
            "strategy.cpu_offload=true"),
        LOSS,
    ),
    "tensor parallel": Row(
        2, ("strategy=tensor_parallel", "data.batch_size=6", ACCUMULATED,
            "model.activation_checkpointing=selective", NATS), LOSS,
    ),
    "pipeline": Row(
        2, ("strategy=pipeline", "data.batch_size=6", "trainer.accumulate_grad_batches=2",
            "strategy.microbatches=3", NATS),
        replace(LOSS, lrs={"first_block": 1e-3}),
    ),
    "context parallel": Row(
        2, ("strategy=context_parallel", "data.batch_size=6", ACCUMULATED, NATS), LOSS,
        "llama of bytes", MASKED,
    ),
    "context parallel, repeated heads": Row(
        4, ("strategy=context_parallel", "data.batch_size=12"), LOSS, "llama of bytes", MASKED,
    ),
    "fsdp and tensor parallel": Row(
        4, ("strategy=fsdp_tensor_parallel", "data.batch_size=3", ACCUMULATED, IN_FP32), MUON,
        rtol=OF_MUON,
    ),
    "ddp and pipeline": Row(
        4, ("strategy=ddp_pipeline", "data.batch_size=6", "strategy.schedule=gpipe",
            "strategy.microbatches=2", IN_FP32),
        MUON, "gpt", rtol=OF_MUON,
    ),
}  # fmt: skip
SLOW = {  # four processes; each half is fast above
    "context parallel, repeated heads", "fsdp and tensor parallel", "ddp and pipeline",
}  # fmt: skip


def words_of(recipe: Recipe) -> list[str]:
    """Return the overrides with the values of a recipe."""
    words = [
        f"optimizer.lr={recipe.lr}", f"optimizer.betas={[*recipe.betas]}",
        f"optimizer.eps={recipe.eps}", f"optimizer.weight_decay={recipe.weight_decay}",
        f"trainer.gradient_clip_val={recipe.max_norm}",
        f"module.loss.label_smoothing={recipe.label_smoothing}",
        f"module.loss.z_loss={recipe.z_loss}", f"scheduler={recipe.schedule}",
        f"scheduler.start_factor={recipe.start_factor}",
        f"scheduler.warmup_steps={recipe.warmup_steps}",
    ]  # fmt: skip
    if recipe.schedule != "warmup_constant":
        words.append(f"scheduler.total_steps={recipe.total_steps}")
        words.append(f"scheduler.min_factor={recipe.min_factor}")
    if recipe.decay_steps:
        words.append(f"scheduler.decay_steps={recipe.decay_steps}")
    if recipe.momentum is not None:
        words += ["optimizer=muon", f"optimizer.momentum={recipe.momentum}"]
        words += [f"optimizer.{kind}_lr={lr}" for kind, lr in recipe.lrs.items()]
    elif recipe.lrs:
        words.append(f"optimizer._target_={OWN}.FirstBlockAdamW")
        words += [f"+optimizer.{kind}_lr={lr}" for kind, lr in recipe.lrs.items()]
    if recipe.penalty:
        words += [f"module._target_={OWN}.Penalised", f"+module.penalty={recipe.penalty}"]
    if recipe.ema_decay is not None:
        words.append(f"+callbacks.ema={{_target_: {EMA}, decay: {recipe.ema_decay}}}")
    return words


def run_of(row: Row) -> Run:
    """Return the finished run of a row."""
    _, sizes, model = NETS[row.net]
    words = [*WORDS, model, *(f"model.{key}={value}" for key, value in sizes.items())]
    run = run_train(*words, *words_of(row.recipe), *row.data, *row.words, ranks=row.ranks)
    assert run.code == 0, run.err
    return run


def batches_of(run: Run, ranks: int) -> tuple[list[Batch], Batch]:
    """Return the samples of each step and of a validation, of which ranks may share some."""
    records = [torch.load(run.folder / f"batches-{rank}.pt") for rank in range(ranks)]
    steps = [
        distinct([batch for record in records for batch in record["steps"][step]])
        for step in range(N_STEPS)
    ]
    return steps, distinct([batch for record in records for batch in record["val"]])


def distinct(batches: list[Batch]) -> Batch:
    """Return the distinct samples of batches, without those that have no target."""
    rows = torch.stack([torch.cat(part) for part in zip(*batches, strict=True)], dim=1)
    rows = rows.unique(dim=0)  # (B, 2 or 3, T)
    rows = rows[(rows[:, 1] != IGNORED).any(dim=1)]
    return tuple(rows.unbind(dim=1))


def pairs(rows: object) -> set[tuple]:
    """Return samples as tuples of tokens and targets."""
    return {(*tokens.tolist(), *targets.tolist()) for tokens, targets, *_ in rows}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in TABLE]
)
def test_a_run_equals_the_plain_loop(name):
    row = TABLE[name]
    run = run_of(row)
    batches, val = batches_of(run, row.ranks)
    assert [len(tokens) for tokens, *_ in batches] == [BATCH] * N_STEPS
    make, sizes, _ = NETS[row.net]
    torch.manual_seed(SEED)
    truth = train(make(**sizes).double(), batches, row.recipe, val, VAL_EVERY)
    columns = {
        "train/loss": (truth.losses, row.rtol[0]), "val/loss": (truth.val_losses, row.rtol[0]),
        "grad_norm": (truth.gradient_norms, row.rtol[1]), "lr": (truth.lrs, 1e-12),
    }  # fmt: skip
    for column, (expected, rtol) in columns.items():
        assert run.column(column) == pytest.approx(expected, rel=rtol), column
    n_targets = int((val[1] != IGNORED).sum())
    nats = [loss * n_targets for loss in run.column("val/loss")]
    assert run.column("val/nats") == pytest.approx(nats if NATS in row.words else [], rel=1e-6)
    weights = run.state()["weights"]
    for key, weight in truth.weights.items():
        error = (weights[key] - weight).abs().max()
        assert error <= row.rtol[2] * max(weight.abs().max(), row.recipe.lr), key


def test_bf16_rounds_more_than_fp32():
    row = TABLE["bf16"]
    run, exact = run_of(row), run_of(replace(row, words=row.words[:-1]))
    assert run.column("grad_norm") != pytest.approx(exact.column("grad_norm"), rel=1e-4)


def test_a_run_reads_the_samples_of_its_dataset_once_in_an_epoch():
    batches, val = batches_of(run_of(TABLE["single"]), ranks=1)
    read = [sample for batch in batches for sample in zip(*batch, strict=True)]
    train_set, val_set = (
        [Ragged(n, 15, 61, seed)[i] for i in range(n)] for n, seed in ((200, 3), (21, 4))
    )
    assert pairs(read) <= pairs(train_set) and len(pairs(read)) == N_STEPS * BATCH
    assert pairs(zip(*val, strict=True)) == pairs(val_set)


def test_masked_documents_are_those_of_the_file():
    lines = map(json.loads, DOCUMENTS.read_text().splitlines())
    texts = [f"\n{line['text']}\n".encode() for line in lines]  # a line end is the context of each
    run = run_of(TABLE["masked documents"])
    batches, val = batches_of(run, ranks=1)
    n_documents = 0
    for batch in (*batches, val):
        for tokens, targets, numbers in zip(*(part.tolist() for part in batch), strict=True):
            for number in sorted(set(numbers)):
                of_document = zip(numbers, tokens, targets, strict=True)
                pairs_of = [(x, y) for n, x, y in of_document if n == number and y != IGNORED]
                if not pairs_of:  # padding of the last sample
                    continue
                piece, following = map(list, zip(*pairs_of, strict=True))
                assert following[:-1] == piece[1:]
                assert any(bytes([*piece, following[-1]]) in text for text in texts), bytes(piece)
                n_documents += 1
    assert n_documents > 2 * BATCH * N_STEPS
