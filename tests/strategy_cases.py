"""Whole runs through Lightning's Trainer, on several ranks."""

import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from gptrain.lit.checkpoint_io import StoreIO

from gptrain.data import DummyTextDataset
from gptrain.lit import LanguageModel, TextDataModule
from gptrain.lit.strategies import spread_net
from gptrain.models import SimpleGPT
from gptrain.optim import Muon, muon_groups
from gptrain.optim import muon as muon_file
from gptrain.parallel.activation import compiles_loss
from gptrain.parallel.state import whole_net_state
from gptrain.plan import parallel_dims
from gptrain.resilience.store import CheckpointStore

V, SEQ_LEN, BATCH, ACCUMULATE, N_STEPS = 61, 16, 8, 2, 6
SAVED_STEP, STEP_3 = 3, "step-00000003"
NOISE = "k_proj.bias"  # see parallel_cases
RTOL, WEIGHT_RTOL = 1e-5, 1e-4
OPTIONS = {
    "tensor_parallel_size": None,
    "pipeline_parallel_size": None,
    "microbatches": None,
    "schedule": "1f1b",
    "timeout_s": 60.0,
    "reshard_after_forward": True,
    "accumulate_shards": False,
    "cpu_offload": False,
    "bucket_cap_mb": 25.0,
    "gradient_as_bucket_view": True,
    "static_graph": False,
    "find_unused_parameters": False,
    "comm_hook": "none",
}


class OnlyForward(torch.nn.Module):
    """A user's net that offers nothing but forward."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(V, 8), torch.nn.Linear(8, V))

    def forward(self, tokens):
        return self.layers(tokens)


TRUTH = {}


def make_net(dropout=0.0):
    return SimpleGPT(V, 32, n_heads=4, n_layers=4, max_seq_len=16, dropout=dropout)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), 1e-3)


def muon(net):
    return Muon(muon_groups(net, 0.1), 1e-3, fused=False)


def constant(step):
    return 1.0


class Steps(pl.Callback):
    """Losses of the steps of the whole world, and gradient norms before clipping; saves step 3."""

    def __init__(self, save_to):
        self.losses, self.norms, self.save_to = [], [], save_to

    def on_train_batch_end(self, trainer, module, *_):
        if not trainer.fit_loop._should_accumulate():
            loss = module.take_train_loss()
            if dist.is_initialized():
                dist.all_reduce(loss)
                loss /= dist.get_world_size()
            self.losses.append(loss.item())
            self.norms.append(module.grad_norm.item())
            if trainer.global_step == SAVED_STEP and self.save_to is not None:
                save(trainer, self.save_to)


def fit(
    name,
    n_steps=N_STEPS,
    *,
    make_net=make_net,
    make_optimizer=adamw,
    n_ranks=None,
    ckpt_path=None,
    save_to=None,
    seed=0,
    precision="32-true",
    device="cpu",
    **options,
):
    """A run of n_steps with a validation at the end; every rank calls it."""
    rank = dist.get_rank() if n_ranks is None and dist.is_initialized() else 0
    n_ranks = n_ranks or dist.get_world_size()
    made_of = {k: options.pop(k) for k in ("compile", "activation_checkpointing") if k in options}
    options = SimpleNamespace(name=name, **(OPTIONS | options))
    split = parallel_dims(
        name, n_ranks, options.tensor_parallel_size, options.pipeline_parallel_size
    )
    torch.manual_seed(seed)
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    net, strategy = spread_net(make_net, options, split, place, precision=precision, **made_of)
    torch.manual_seed(1 + rank)
    module = LanguageModel(
        net,
        make_optimizer,
        constant,
        compiles_loss=compiles_loss(made_of.get("compile", "none"), device),
    )
    data = TextDataModule(
        DummyTextDataset(500, SEQ_LEN, V, seed=3),
        DummyTextDataset(21, SEQ_LEN, V, seed=4),  # no multiple of the ranks
        batch_size=BATCH // split.data,
        accumulate=ACCUMULATE,
        n_steps=n_steps,
        rank=rank // split.tensor % split.data,
        world_size=split.data,
    )
    steps = Steps(save_to)
    trainer = pl.Trainer(
        accelerator=device,
        devices=n_ranks,
        strategy=strategy,
        precision=precision,
        max_steps=n_steps,
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=0.5,
        val_check_interval=n_steps * ACCUMULATE,
        check_val_every_n_epoch=None,
        callbacks=[steps],
        plugins=[StoreIO()],
        logger=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return SimpleNamespace(
        losses=steps.losses,
        norms=steps.norms,
        val_loss=trainer.callback_metrics["val/loss"].item(),
        weights=whole_net_state(net, aliases=strategy.aliases, stages=strategy.stages),
    )


def save(trainer, folder):
    def gather(value):
        if trainer.world_size == 1:
            return [value]
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    store = CheckpointStore(folder, "run")
    rank = trainer.global_rank
    kind = "sharded" if trainer.strategy.saves_shards else "full"
    with store.writing(trainer.global_step, kind=kind, rank=rank, gather=gather) as draft:
        trainer.save_checkpoint(draft.path, weights_only=False, storage_options=draft)


def one_process(**options):
    """The truth, computed on every rank alone."""
    return fit("single", n_ranks=1, **options)


def _in_fp32():
    """Muon's products, whatever the CPU has: in bf16 a last bit of fp32 may be one of 8."""
    return patch.object(muon_file, "native_dtype", lambda device: torch.float32)


def check_same_run(run, truth):
    assert_close(run.losses, truth.losses)
    assert_close(run.norms, truth.norms)
    assert min(run.norms) > 0.5  # clipped
    assert_close([run.val_loss], [truth.val_loss])
    for name, weight in run.weights.items():  # on rank 0
        if NOISE not in name:
            assert (weight - truth.weights[name]).abs().max() < WEIGHT_RTOL * weight.abs().max()


def assert_close(mine, expected, rtol=RTOL):
    for a, b in zip(mine, expected, strict=True):
        assert abs(a / b - 1) < rtol, (mine, expected)


def broadcast(value):
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def check_equals_one_process(name, **options):
    check_same_run(fit(name, **options), TRUTH["plain"])


def ddp_run_equals_one_process():
    check_equals_one_process("ddp")


def fsdp_run_equals_one_process():
    check_equals_one_process("fsdp")


def tensor_parallel_run_equals_one_process():
    check_equals_one_process("tensor_parallel")


def pipeline_run_equals_one_process():
    check_equals_one_process("pipeline")


def interleaved_pipeline_run_equals_one_process():
    check_equals_one_process("pipeline", schedule="interleaved_1f1b")


def muon_of_cut_matrices_equals_one_process():
    with _in_fp32():
        for name in ("fsdp", "tensor_parallel"):
            check_same_run(fit(name, make_optimizer=muon), TRUTH["muon"])


def a_net_with_forward_alone_trains_under_ddp():
    run = fit("ddp", make_net=OnlyForward)
    assert_close(run.losses, TRUTH["only_forward"].losses)


def other_strategies_name_what_such_a_net_lacks():
    lacks = {
        "fsdp": "blocks",
        "tensor_parallel": "tensor_plan, n_heads, head",
        "pipeline": "embed, blocks, norm, head",
    }
    for name, words in lacks.items():
        with pytest.raises(ValueError, match=words):
            fit(name, make_net=OnlyForward)


def dropout_makes_the_same_run_twice():
    for name in PLAIN_NAMES:
        runs = [fit(name, 2, make_net=partial(make_net, dropout=0.2)) for _ in range(2)]
        assert runs[0].losses == runs[1].losses
        assert abs(runs[0].losses[1] / TRUTH["plain"].losses[1] - 1) > RTOL


def options_that_save_memory_change_no_number():
    for name, mode in zip(PLAIN_NAMES, ("full", "selective") * 2, strict=True):
        run = fit(name, 2, activation_checkpointing=mode)
        assert_close(run.losses, TRUTH["plain"].losses[:2])
    for option in ("cpu_offload", "accumulate_shards"):
        run = fit("fsdp", 2, **{option: True})
        assert_close(run.losses, TRUTH["plain"].losses[:2])


def bf16_trains_close_to_fp32():
    for name in PLAIN_NAMES:
        run = fit(name, 2, precision="bf16-mixed")
        assert_close(run.losses, TRUTH["plain"].losses[:2], 1e-2)  # 8 bits of mantissa


def a_run_of_any_strategy_goes_on_under_any_other():
    folder = Path(broadcast(tempfile.mkdtemp()))
    for source, target in pairwise([*PLAIN_NAMES, PLAIN_NAMES[0]]):
        fit(source, save_to=folder / source)
        run = fit(target, 6, seed=1, ckpt_path=folder / source / STEP_3)
        assert_close(run.losses, TRUTH["plain"].losses[3:])
        assert_close([run.val_loss], [TRUTH["plain"].val_loss])


def any_strategy_reads_a_whole_checkpoint():
    saved = Path(broadcast(str(TRUTH["saved"])))
    for name in PLAIN_NAMES:
        run = fit(name, 6, seed=1, ckpt_path=saved)
        assert_close(run.losses, TRUTH["plain"].losses[3:])


def fsdp_by_tensor_parallel_run_equals_one_process():
    check_equals_one_process("fsdp_tensor_parallel")


def ddp_by_pipeline_run_equals_one_process():
    check_equals_one_process("ddp_pipeline", microbatches=2)


def muon_of_matrices_cut_twice_equals_one_process():
    with _in_fp32():
        check_same_run(fit("fsdp_tensor_parallel", make_optimizer=muon), TRUTH["muon"])


def a_run_goes_on_from_one_mix_to_the_other():
    folder = Path(broadcast(tempfile.mkdtemp()))
    names = ["fsdp_tensor_parallel", "ddp_pipeline"]
    for source, target in (names, reversed(names)):
        fit(source, save_to=folder / source, microbatches=2)
        path = folder / source / STEP_3
        run = fit(target, 6, seed=1, ckpt_path=path, microbatches=2)
        assert_close(run.losses, TRUTH["plain"].losses[3:])


PLAIN_NAMES = ["ddp", "fsdp", "tensor_parallel", "pipeline"]
CASES = {
    2: [
        ddp_run_equals_one_process,
        fsdp_run_equals_one_process,
        tensor_parallel_run_equals_one_process,
        pipeline_run_equals_one_process,
        interleaved_pipeline_run_equals_one_process,
        muon_of_cut_matrices_equals_one_process,
        a_net_with_forward_alone_trains_under_ddp,
        other_strategies_name_what_such_a_net_lacks,
        dropout_makes_the_same_run_twice,
        options_that_save_memory_change_no_number,
        bf16_trains_close_to_fp32,
        a_run_of_any_strategy_goes_on_under_any_other,
        any_strategy_reads_a_whole_checkpoint,
    ],
    4: [
        fsdp_by_tensor_parallel_run_equals_one_process,
        ddp_by_pipeline_run_equals_one_process,
        muon_of_matrices_cut_twice_equals_one_process,
        a_run_goes_on_from_one_mix_to_the_other,
    ],
}


def find_truths(folder):
    """Runs of one process, by each rank alone, before there is a group for metrics to join."""
    TRUTH["plain"] = one_process(save_to=folder)
    TRUTH["saved"] = folder / STEP_3
    with _in_fp32():
        TRUTH["muon"] = one_process(make_optimizer=muon)
    TRUTH["only_forward"] = one_process(make_net=OnlyForward)
