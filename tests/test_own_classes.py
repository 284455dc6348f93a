"""User classes are checked by their own signature, never by the ranges of gptrain's classes."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from gptrain.assemble import run as assemble
from gptrain.config.cli import run_command

NANO = ("model=gpt_nano", "trainer.accelerator=cpu")
MINE = """
    import torch
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.profilers import Profiler
    from torch import nn
    from torch.utils.data import Dataset

    from gptrain.lit import LanguageModel


    class Net(nn.Module):
        def __init__(self, vocab_size, n_layers=(2,), activation="silu", n_heads=3, d_model=8,
                     dropout=-1, max_seq_len="any"):
            super().__init__()
            self.table, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

        def forward(self, tokens):
            return self.head(self.table(tokens))


    class Any(Net):
        def __init__(self, vocab_size, **more):
            super().__init__(vocab_size)


    def make_net(width, *, make=None):
        return Net(width)


    class Opt(torch.optim.Optimizer):
        def __init__(self, params, lr=1, betas=(1, 2, 3), eps=(1, 2), foreach=None):
            super().__init__(params, {"lr": lr})


    class NoRate(torch.optim.Optimizer):
        def __init__(self, params, *, rho, inner=None):
            super().__init__(params, {})


    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
            super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

        def step(self, closure=None):
            with torch.enable_grad():
                closure()
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.sub_(p.grad.sign(), alpha=group["lr"])


    def make_optimizer(params, lr=1.0):
        return torch.optim.SGD(params, lr)


    class Data(Dataset):
        def __init__(self, path, tokenizer="gpt2", dtype="float32", seq_len=-1, split=None, **more):
            self.path = path

        @classmethod
        def from_hub(cls, name, split="train"):
            return cls(name)

        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.full((8,), index), torch.full((8,), index + 1)


    def make_data(n):
        return Data(n)


    class Plain:
        def __getitem__(self, index): ...
        def __len__(self): ...


    class Mine(Callback):
        def __init__(self, every=1, options=None):
            pass


    class Log(Logger):
        def __init__(self, project=None, **options): ...


    class Clock(Profiler):
        def start(self, action): ...
        def stop(self, action): ...


    class Module(LanguageModel):
        def __init__(self, *args, alpha=1, table=None, **more):
            super().__init__(*args, **more)


    class Alone(LightningModule):
        def __init__(self, net, temperature, steps=()):
            super().__init__()

        def training_step(self, batch):
            return None


    class Step(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer, milestones, last_epoch=-1):
            super().__init__(optimizer, last_epoch)

        def get_lr(self):
            return self.base_lrs


    def halving(step):
        return 0.5**step


    def noam(step, d_model, warmup_steps, scale=(1, 2)):
        return 1.0
"""
NET, MODULE = "_target_: mine.Net\nvocab_size: 256\n", "_target_: mine.Module\n"
ANY = "_target_: mine.Any\nvocab_size: 256\n"
DATA = "batch_size: 4\nglobal_batch_size: null\nnum_workers: 0\n"
VAL = "val: {_target_: mine.Data, path: x}\n"
LIGHTNING = "_target_: lightning.pytorch"
SCHEDULES = "_target_: torch.optim.lr_scheduler"
YAML = {
    "model/net": f"{NET}n_layers: [2, 2, 6, 2]\nactivation: [relu, silu]\nn_heads: 3\nd_model: 10\n"
    "dropout: -0.5\nmax_seq_len: 0",
    "model/text": f"{NET}d_model: small\nn_heads: null\nn_layers: {{encoder: 2, decoder: 4}}",
    "model/any_key": f"{ANY}rope_theta: 1e6\nmoe: {{experts: 8, top: 2}}\ntied: no\nd_ff: null\n"
    "names: []\nmap: {}\nname: a name, with = and []\nurl: https://example.org/x?y=z\nlr: 3\n"
    "strategy: ring\nseed: x\ncallbacks: [1]\neps: 1e-12\nbig: 10000000000000\ninfinite: .inf",
    "model/made": "_target_: mine.make_net\nwidth: wide",
    "model/partial": "_target_: mine.make_net\nwidth: 1\n"
    "make: {_target_: mine.Net, _partial_: true, n_layers: 3}",
    "model/nested": "_target_: torch.nn.Sequential\n"
    "_args_: [{_target_: torch.nn.Linear, in_features: 3, out_features: 3}]",
    "model/deep": f"{ANY}parts: [{{_target_: torch.nn.GELU}}, "
    "{of: {_target_: torch.nn.Linear, in_features: 2, out_features: 3}}]",
    "model/ours_with_own": "defaults: [gpt_nano]\n_target_: mine.Any\nkv_heads: 1",
    "optimizer/opt": "_target_: mine.Opt\nbetas: [0.9, 0.95, 0.99]\neps: [1, 2]",
    "optimizer/no_rate": "_target_: mine.NoRate\nrho: 0.05\ninner: {name: adam, betas: [1]}",
    "optimizer/lion": "_target_: mine.Lion\nlr: 1e-4\nweight_decay: 1.0",
    "optimizer/made": "_target_: mine.make_optimizer\nlr: 0.1",
    "optimizer/adafactor": "_target_: torch.optim.Adafactor\neps: [null, 1e-3]\nd: 1.0",
    "optimizer/sgd": "_target_: torch.optim.SGD\nmomentum: 0.9\nnesterov: true\nlr: 0.1",
    "optimizer/adamw": "_target_: torch.optim.AdamW\namsgrad: true\nbetas: [0.9, 0.95]\neps: 1e-8",
    "scheduler/halving": "_target_: mine.halving",
    "scheduler/noam": "_target_: mine.noam\nd_model: 512\nscale: [1, 3]",
    "scheduler/own_class": "_target_: mine.Step\nmilestones: [10, 20]",
    "scheduler/one_cycle": f"{SCHEDULES}.OneCycleLR\nmax_lr: 0.1\ntotal_steps: 10",
    "data/mine": f"{DATA}path: s3://bucket/x\ntrain: {{_target_: mine.Data, path: '${{data.path}}',"
    " tokenizer: gpt2, dtype: float32}\nval: {_target_: mine.Data.from_hub, name: x}\n"
    "test: {_target_: mine.Plain}",
    "data/hub": f"{DATA}train: {{_target_: mine.Data.from_hub, name: org/set, split: 'a[:1%]'}}\n"
    f"{VAL}",
    "data/made": f"{DATA}train: {{_target_: mine.make_data, n: 3}}\n{VAL}",
    "data/lists": f"{DATA}train: {{_target_: mine.Data, path: [a, b], seq_len: [8, 16],"
    f" tokenizer: null, mask: {{p: 2}}}}\n{VAL}",
    "data/nested": f"{DATA}train: {{_target_: torch.utils.data.ConcatDataset, "
    f"datasets: [{{_target_: mine.Data, path: a}}, {{_target_: mine.Data, path: b}}]}}\n{VAL}",
    "data/own_words": f"{DATA}language: de\nweights: {{a: 1, b: -2}}\nsplit: ~\nseq_len: long\n"
    "vocab_size: many\nparts: 3\n"
    f"train: {{_target_: mine.Data, path: a, weights: '${{data.weights}}'}}\n{VAL}",
    "callbacks/mine": "a: {_target_: mine.Mine, every: 3}\nb: null\n"
    "c: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/accuracy}",
    "callbacks/options": "a: {_target_: mine.Mine, options: {x: [1, {y: null}]}}",
    "callbacks/lightnings": f"a: {{{LIGHTNING}.callbacks.ModelCheckpoint, monitor: val/loss,"
    f" save_top_k: 3, mode: min}}\nb: {{{LIGHTNING}.callbacks.EMAWeightAveraging, decay: 0.99}}\n"
    f"c: {{{LIGHTNING}.callbacks.LearningRateMonitor, logging_interval: step}}\n"
    f"d: {{{LIGHTNING}.callbacks.Timer, duration: '00:01:00:00'}}",
    "logger/options": "x: {_target_: mine.Log, project: p, tags: [a], mode: offline, save_dir: x}",
    "logger/lightning": f"x: {{{LIGHTNING}.loggers.CSVLogger, save_dir: '${{run_dir}}', name: y}}",
    "profiler/mine": "_target_: mine.Clock",
    "profiler/advanced": f"{LIGHTNING}.profilers.AdvancedProfiler\nline_count_restriction: 2.0",
    "module/mine": f"defaults: [default]\n{MODULE}metrics:\n"
    "  acc: {_target_: torchmetrics.Accuracy, task: multiclass, num_classes: 256}",
    "module/keys": f"{MODULE}alpha: high\ntable: {{a: {{b: [1, null]}}}}",
    "module/keyword": f"{MODULE}loss: {{label_smoothing: 0.1, z_loss: 0}}\nalpha: [1]",
    "module/nested": f"{MODULE}table: {{_target_: torch.nn.Embedding, num_embeddings: 2,"
    " embedding_dim: 3}",
    "module/alone": "_target_: mine.Alone\ntemperature: hot\nsteps: [1, 2]",
    "module/metrics": "defaults: [default]\nmetrics:\n  top5: {_target_: "
    "torchmetrics.classification.MulticlassAccuracy, num_classes: 256, top_k: 5}\n"
    "  ppl: {_target_: torchmetrics.text.Perplexity, ignore_index: -100}",
    "trainer/own": "defaults: [default]\nlimit_predict_batches: 3",
    "experiment/all": "# @package _global_\ndefaults: [{override /model: net}, "
    "{override /data: mine}, {override /optimizer: lion}, {override /callbacks: options}]\n"
    "name: mine",
}

ALONE = ("module/alone", "experiment/all")  # choices that do not fit other groups' entries
GROUPS: dict[str, list[str]] = {}
for group, choice in (name.split("/") for name in YAML if name not in ALONE):
    GROUPS.setdefault(group, []).append(f"{group}={choice}")
N_ROWS = max(map(len, GROUPS.values()))
# Each entry has one choice of every group, and together the entries have all choices.
TOGETHER = [[choices[n % len(choices)] for choices in GROUPS.values()] for n in range(N_ROWS)]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A user's own files."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(textwrap.dedent(MINE))
    for name, text in YAML.items():
        file = folder / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return folder


@pytest.fixture
def user_words(written, monkeypatch) -> tuple[str, ...]:
    """Return the words of the command line that select the user's classes."""
    monkeypatch.syspath_prepend(written)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return "--config-dir", str(written / "conf"), *NANO


@pytest.mark.parametrize("words", [*TOGETHER, ["module=alone"], ["experiment=all"]], ids=str)
def test_every_user_class_is_used_unchanged(user_words, words, capfd):
    """Both checks of train.py accept the classes: that of the config and that of built objects."""
    code = run_command(assemble.check, [*user_words, *words])
    assert (code, capfd.readouterr().err) == (0, "")


@pytest.mark.parametrize(
    "words",
    ["experiment=all data=hub scheduler=noam", "data=mine model=any_key module=keys optimizer=sgd"],
)
def test_user_classes_can_be_trained(user_words, words, train):
    small = ("trainer.max_steps=2", "logger=none", "trainer.enable_progress_bar=false")
    run = train(*user_words[:2], *user_words[3:], *words.split(), *small, tiny=False)
    assert run.code == 0, run.err
