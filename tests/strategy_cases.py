"""What the ranks of tests/test_strategies.py do: whole runs through Lightning's Trainer."""

import datetime
import os
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from gptrain.data import DummyTextDataset
from gptrain.lit import LanguageModel, TextDataModule
from gptrain.lit.checkpoint_io import StoreIO
from gptrain.lit.strategies import spread_net
from gptrain.models import SimpleGPT
from gptrain.parallel.state import whole_net_state
from gptrain.plan import degrees
from gptrain.resilience.store import CheckpointStore

V, SEQ_LEN, BATCH, ACCUMULATE, N_STEPS = 61, 16, 8, 2, 6
NOISE = "k_proj.bias"  # see parallel_cases
RTOL, WEIGHT_RTOL = 1e-5, 1e-4
OPTIONS = {
    "tensor_parallel_size": None,
    "pipeline_parallel_size": None,
    "microbatches": None,
    "schedule": "1f1b",
    "timeout_s": 60.0,
    "reshard_after_forward": True,
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


def constant(step):
    return 1.0


class Steps(pl.Callback):
    """Losses of the steps of the whole world, and gradient norms before clipping."""

    def __init__(self):
        self.losses, self.norms = [], []

    def on_train_batch_end(self, trainer, module, *_):
        if not trainer.fit_loop._should_accumulate():
            loss = module.take_train_loss()
            if dist.is_initialized():
                dist.all_reduce(loss)
                loss /= dist.get_world_size()
            self.losses.append(loss.item())
            self.norms.append(module.grad_norm.item())


def fit(
    name,
    n_steps=N_STEPS,
    *,
    make_net=make_net,
    n_ranks=None,
    ckpt_path=None,
    save_to=None,
    seed=0,
    precision="32-true",
    **options,
):
    """A run of n_steps with a validation at the end; every rank calls it."""
    rank = dist.get_rank() if n_ranks is None and dist.is_initialized() else 0
    n_ranks = n_ranks or dist.get_world_size()
    made_of = {k: options.pop(k) for k in ("compile", "activation_checkpointing") if k in options}
    options = SimpleNamespace(name=name, **(OPTIONS | options))
    split = degrees(name, n_ranks, options.tensor_parallel_size, options.pipeline_parallel_size)
    torch.manual_seed(seed)
    net, strategy = spread_net(
        make_net, options, split, torch.device("cpu"), precision=precision, **made_of
    )
    torch.manual_seed(1 + rank)
    module = LanguageModel(net, lambda net: torch.optim.AdamW(net.parameters(), 1e-3), constant)
    data = TextDataModule(
        DummyTextDataset(500, SEQ_LEN, V, seed=3),
        DummyTextDataset(21, SEQ_LEN, V, seed=4),  # no multiple of the ranks
        batch_size=BATCH // split.data,
        accumulate=ACCUMULATE,
        n_steps=n_steps,
        rank=rank // split.tensor % split.data,
        world_size=split.data,
    )
    steps = Steps()
    trainer = pl.Trainer(
        accelerator="cpu",
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
    if save_to is not None:
        save(trainer, save_to, "sharded" if strategy.saves_shards else "full")
    return SimpleNamespace(
        losses=steps.losses,
        norms=steps.norms,
        val_loss=trainer.callback_metrics["val/loss"].item(),
        weights=whole_net_state(net, aliases=strategy.aliases, stages=strategy.stages),
        trainer=trainer,
    )


def save(trainer, folder, kind):
    def gather(value):
        if trainer.world_size == 1:
            return [value]
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    store = CheckpointStore(folder, "run")
    rank = trainer.global_rank
    with store.writing(trainer.global_step, kind=kind, rank=rank, gather=gather) as draft:
        trainer.save_checkpoint(draft.path, weights_only=False, storage_options=draft)


def one_process(**options):
    """The truth, computed on every rank alone."""
    return fit("single", n_ranks=1, **options)


def check_same_run(run, truth):
    for mine, expected in zip(run.losses, truth.losses, strict=True):
        assert abs(mine / expected - 1) < RTOL
    for mine, expected in zip(run.norms, truth.norms, strict=True):
        assert abs(mine / expected - 1) < RTOL
        assert mine > 0.5  # clipped
    assert abs(run.val_loss / truth.val_loss - 1) < RTOL, (run.val_loss, truth.val_loss)
    for name, weight in run.weights.items():  # on rank 0
        if NOISE not in name:
            assert (weight - truth.weights[name]).abs().max() < WEIGHT_RTOL * weight.abs().max()


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


CASES = {
    2: [
        ddp_run_equals_one_process,
        fsdp_run_equals_one_process,
        tensor_parallel_run_equals_one_process,
        pipeline_run_equals_one_process,
        interleaved_pipeline_run_equals_one_process,
    ],
    4: [],
}


def run_rank(rank, world_size, folder):
    """One rank's life: every case of this world size, each result into a file of its own."""
    torch.set_num_threads(1)
    TRUTH["plain"] = one_process()  # before there is a group: metrics are alone then
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "tests",
    }
    store = dist.FileStore(str(Path(folder, f"store_{world_size}")), world_size)
    timeout = datetime.timedelta(seconds=30)  # a rank that failed leaves the others waiting
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    for case in CASES[world_size]:
        try:
            case()
            result = "passed"
        except Exception:
            result = traceback.format_exc()
        Path(folder, f"{case.__name__}.{rank}").write_text(result)
        if result != "passed":
            return  # the group is out of step
    dist.destroy_process_group()
