"""Train the same net on the same data in one process and with each strategy, step by step."""

# V vocab, T time: neither is a multiple of two ranks

from contextlib import nullcontext
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from gptrain.checkpoints.store import CheckpointStore
from gptrain.checkpoints.tensors import MODEL, OPTIMIZER, SavedTensors, load_file
from gptrain.core.strategies import default_options, parallel_dims
from gptrain.lit.strategies import build_strategy
from gptrain.loss import PLAIN_CROSS_ENTROPY
from gptrain.models import SimpleGPT
from gptrain.models.attention import layout_argument
from gptrain.parallel.base import Batch
from gptrain.parallel.mesh import gather
from gptrain.parallel.placement import full_tensor, local_shard
from gptrain.parallel.state import (
    NO_STAGES,
    load_net_state,
    load_optimizer_state,
    named_groups,
    named_parameters,
    optimizer_state,
    over_stages,
    saved_tensors,
)
from gptrain.parallel.step_mean import StepMean

CPU = torch.device("cpu")
V, D, T, BATCH, ACCUMULATE, MAX_NORM = 61, 32, 15, 8, 2, 0.5
LOSS_RTOL, GRADIENT_RTOL = 1e-5, 1e-4  # fp32 sums in another order differ by 1e-6
# Softmax ignores a bias on the keys. Its gradient is rounding noise, which Adam amplifies.
NOISE = "k_proj.bias"


def close(a, b, rtol):
    """Check that the difference is at most `rtol` times the largest element of `b`."""
    assert (a - b).abs().max() <= rtol * b.abs().max(), f"{((a - b).abs().max() / b.abs().max())}"


def broadcast(value):
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def make_net():
    return SimpleGPT(V, D, n_heads=8, n_layers=4, max_seq_len=16, dropout=0.0)


def make_batch(step, micro_step):
    generator = torch.Generator().manual_seed(ACCUMULATE * step + micro_step)
    tokens = torch.randint(V, (BATCH, T + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for sample in range(BATCH):  # the count differs per micro-step, data rank and microbatch
        targets[sample, : (3 * sample + 4 * micro_step) % 11] = -100
    return tokens[:, :-1], targets


def make_documents():
    """Return document numbers (B, T) of which each sample has a new one at other positions."""
    begins = [torch.arange(T) % (3 + sample) == sample for sample in range(BATCH)]
    return torch.stack(begins).cumsum(1)


def micro_batches(step, rank=0, n_ranks=1, packs=False):
    """Return the micro-batches of one data rank, with documents if `packs`."""
    rows = slice(rank, None, n_ranks)
    batches = [make_batch(step, micro_step) for micro_step in range(ACCUMULATE)]
    batches = [(*batch, make_documents()) if packs else batch for batch in batches]
    return [tuple(part[rows] for part in batch) for batch in batches]


def count(batches):
    """Count the targets that are not ignored."""
    return sum(int((targets != -100).sum()) for _, targets, *_ in batches)


def make_optimizer(net):
    decayed = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim == 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0, "lr": 3e-3},
    ]
    # eps is above the rounding error of near-zero gradients, which Adam would amplify.
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-6, foreach=True)


class OneProcess:
    """The reference: training in one process. `Parallel` has the same interface."""

    extra_parameters: ClassVar[dict] = {}  # name -> parameter of the module outside net
    stages = NO_STAGES  # the pipeline's stages, which states need

    saves_together = False  # whether all ranks have a part of the net
    packs = False  # whether samples are packed documents that do not see each other

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.net = make_net()
        self.optimizer = make_optimizer(self.net)

    def step(self, step):
        batches, total = micro_batches(step, packs=self.packs), 0.0
        for tokens, targets, *documents in batches:
            logits = self.net(tokens, **layout_argument(*documents or [None])).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / count(batches)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), MAX_NORM)
        return total, norm.item()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self):
        first, named = self.stages.aliases, self.net.named_parameters()
        return {first.get(name, name): full_tensor(p.grad) for name, p in named}

    def parameters(self):
        return named_parameters(self.net, self.stages) | self.extra_parameters

    def save(self, folder):
        """Save net and optimizer as all ranks of a run do, and return the folder."""
        tensors, values = optimizer_state(self.parameters(), self.optimizer)
        rest = {
            "values": {k: v for part in over_stages(values, self.stages) for k, v in part.items()},
            "groups": named_groups(self.parameters(), self.optimizer, self.stages),
        }
        store = CheckpointStore(folder, "a" * 32)
        files = {MODEL: saved_tensors(self.net, self.stages), OPTIMIZER: tensors}
        ranks = {"rank": dist.get_rank(), "gather": gather} if self.saves_together else {}
        store.save(1, files, rest, **ranks)
        return store.newest()

    def load(self, folder):
        load_net_state(self.net, SavedTensors(folder), stages=self.stages)
        rest, source = load_file(folder / "state.ckpt"), SavedTensors(folder, OPTIMIZER)
        about = rest["values"], rest["groups"]
        load_optimizer_state(self.parameters(), self.optimizer, source, *about)


class Trained(nn.Module):
    """A net and its loss in one module, like a LightningModule."""

    def __init__(self, net, parallel):
        super().__init__()
        self.net, self.parallel = net, parallel

    def forward(self, tokens, targets, documents=None):
        batch = Batch(tokens, targets, documents)
        return self.parallel.mean_loss(self.net, batch, PLAIN_CROSS_ENTROPY)


class Parallel(OneProcess):
    """Training with a strategy and its options on all ranks of the group."""

    saves_together = True

    def __init__(self, name, seed=0, recomputes="none", compile="none", **options):
        torch.manual_seed(seed)
        self.options = default_options(name).model_copy(update=options)
        self.recomputes = recomputes
        self.dims = parallel_dims(self.options, dist.get_world_size())
        self.net, strategy = build_strategy(
            make_net,
            self.options,
            self.dims,
            CPU,
            compile=compile,
            activation_checkpointing=recomputes,
        )
        self.parallel, self.stages = strategy.parallel, strategy.parallel.stages
        self.parallel.step_mean = StepMean(self.parallel.data_group, CPU)
        self.optimizer = make_optimizer(self.net)
        self.module, self.without_gradient_sync = (
            Trained(self.net, self.parallel),
            self.parallel.without_gradient_sync,
        )
        self.parallel.prepare(self.module, self.optimizer)
        if self.parallel.ddp_arguments is not None:
            self.module = nn.parallel.DistributedDataParallel(
                self.module, **self.parallel.ddp_arguments
            )
            self.without_gradient_sync = self.module.no_sync

    def step(self, step):
        data, mean = self.parallel.data_group, self.parallel.step_mean
        batches = micro_batches(step, data.rank(), data.size(), self.packs)
        total = torch.zeros(())
        mean.begin_step(count(batches), ACCUMULATE)
        for micro_step, batch in enumerate(batches):
            is_last = micro_step == ACCUMULATE - 1
            mean.counted = (batch[1], batch[1]._version)
            with nullcontext() if is_last else self.without_gradient_sync():
                loss = self.module(*batch) / ACCUMULATE
                loss.backward()
            total += loss.detach() / data.size()
        dist.all_reduce(total, group=data)
        self.parallel.finish_gradients()
        norm = self.parallel.measure_and_clip([*self.net.parameters()], MAX_NORM)
        return total.item(), norm.item()


def check_equals_one_process(partitioned, packs=False):
    """Check loss, gradient norm and gradients of a step against one process.

    With `packs`, samples are packed documents that do not see each other.
    """
    truth = OneProcess()
    truth.packs = partitioned.packs = packs
    loss, norm = partitioned.step(0)
    true_loss, true_norm = truth.step(0)
    assert abs(loss / true_loss - 1) < LOSS_RTOL
    assert abs(norm / true_norm - 1) < LOSS_RTOL
    assert norm > MAX_NORM  # clipping is active
    expected = truth.gradients()
    for name, gradient in partitioned.gradients().items():
        if NOISE not in name:
            close(gradient, expected[name], GRADIENT_RTOL)


def check_logits_of_documents(partitioned):
    """Check the logits for metrics of packed documents, on the ranks that compute them."""
    (tokens, targets), documents = make_batch(0, 0), make_documents()
    parallel = partitioned.parallel
    chunks = [*parallel.logits(partitioned.net, Batch(tokens, targets, documents))]
    if parallel.is_pipeline and parallel.rank != parallel.last:
        assert not chunks
        return
    with torch.no_grad():
        expected = OneProcess().net(tokens, **layout_argument(documents))[targets != -100]
    close(torch.cat([logits for logits, _ in chunks]), expected, GRADIENT_RTOL)
    assert torch.equal(torch.cat([kept for _, kept in chunks]), targets[targets != -100])


def training_bytes(partitioned):
    """Return the bytes of parameters, gradients and optimizer states on this rank."""
    parameters = list(partitioned.net.parameters())
    tensors = parameters + [p.grad for p in parameters]
    tensors += [value for state in partitioned.optimizer.state.values() for value in state.values()]
    storages = [local_shard(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
