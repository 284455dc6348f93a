"""Classes of one's own: judged by their own signature, never by the ranges of ours."""

from __future__ import annotations

import textwrap

import pytest

from tests.command_line import accepted, refused

NANO = ("model=gpt_nano", "trainer.accelerator=cpu")
MINE = """
    import torch
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger
    from torch import nn
    from torch.utils.data import Dataset

    from gptrain.lit import LanguageModel


    class Net(nn.Module):
        def __init__(self, vocab_size, n_layers=(2,), activation="silu", n_heads=3, d_model=7):
            super().__init__()


    def make_net(width):
        return Net(width)


    class Opt(torch.optim.Optimizer):
        def __init__(self, params, lr=1, betas=(1, 2, 3), eps=(1, 2)):
            super().__init__(params, {})


    def make_optimizer(params, lr=1.0): ...


    class Data(Dataset):
        def __init__(self, path, tokenizer="gpt2", dtype="float32", seq_len=-1): ...

        @classmethod
        def from_hub(cls, name): ...

        def __getitem__(self, index): ...


    class Plain:
        def __getitem__(self, index): ...


    class Mine(Callback):
        def __init__(self, every=1): ...


    class Log(Logger): ...


    class Module(LanguageModel): ...


    def halving(step): ...
"""
YAML = {
    "model/net.yaml": "_target_: mine.Net\nvocab_size: 7\nn_layers: [2, 2, 6, 2]\n"
    "activation: silu\nd_model: 10\nn_heads: 3",
    "model/made.yaml": "_target_: mine.make_net\nwidth: wide",
    "model/linear.yaml": "_target_: torch.nn.Linear\nin_features: 3\nout_features: 3",
    "model/nested.yaml": "_target_: torch.nn.Sequential\n_args_: [{_target_: torch.nn.Identity}]",
    "optimizer/opt.yaml": "_target_: mine.Opt\nbetas: [0.9, 0.95, 0.99]\neps: [1, 2]",
    "optimizer/made.yaml": "_target_: mine.make_optimizer\nlr: 0.1",
    "optimizer/adafactor.yaml": "_target_: torch.optim.Adafactor\neps: [null, 1e-3]",
    "optimizer/sgd.yaml": "_target_: torch.optim.SGD\nmomentum: 0.9\nnesterov: true",
    "scheduler/halving.yaml": "_target_: mine.halving",
    "scheduler/torch.yaml": "_target_: torch.optim.lr_scheduler.CosineAnnealingLR\nT_max: 10",
    "data/mine.yaml": "batch_size: 4\nglobal_batch_size: null\nnum_workers: 0\npath: s3://bucket/x\n"
    "train: {_target_: mine.Data, path: '${data.path}', tokenizer: gpt2, dtype: float32}\n"
    "val: {_target_: mine.Data.from_hub, name: x}\ntest: {_target_: mine.Plain}",
    "callbacks/mine.yaml": "a: {_target_: mine.Mine, every: 3}\nb: null\n"
    "c: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/accuracy}",
    "logger/mine.yaml": "x: {_target_: mine.Log}",
    "profiler/mine.yaml": "_target_: lightning.pytorch.profilers.AdvancedProfiler",
    "module/mine.yaml": "defaults: [default]\n_target_: mine.Module\nmetrics:\n"
    "  acc: {_target_: torchmetrics.Accuracy, task: multiclass, num_classes: 256}",
}


@pytest.fixture
def mine(tmp_path, monkeypatch) -> tuple[str, ...]:
    """A user's own files; the words that bring them in."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))
    for name, text in YAML.items():
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    return "--config-dir", str(tmp_path / "conf"), *NANO


def test_every_class_of_ones_own_is_taken_as_it_is(mine):
    for name in YAML:
        choice = name.removesuffix(".yaml").replace("/", "=")
        assert accepted(*mine, "data=mine", choice) == [], name


def test_keys_that_our_code_reads_are_typed_for_any_class(mine):
    (line,) = refused(*mine, "model=net", "model.compile=fast")
    assert "model.compile=fast: unknown; allowed: none, blocks, model" in line
    assert "must be > 0" in refused(*mine, "optimizer=opt", "optimizer.lr=-1")[0]
    assert "must be an integer >= 1" in refused(*mine, "data=mine", "data.batch_size=0")[0]


# Words -> a piece of the line.
REFUSED = {
    "model=net +model.n_layer=3": "Net takes no such argument, did you mean model.n_layers?",
    "data=mine model=net ~model.vocab_size": "model.vocab_size: Net needs it",
    "model=net model._target_=mine.Nett": "nothing of that name in mine",
    "model=net model._target_=nosuch.Net": "no module named nosuch",
    "model=net model._target_=mine.Opt": "no Module, as this place needs",
    "model=net model._target_=torch.load": "no Module, as this place needs",
    "model=net model._target_=5": "not a dotted name",
    "optimizer=opt optimizer._target_=torch.hub.load": "no Optimizer",
    "trainer._target_=lightning.fabric.Fabric": "no Trainer",
    "scheduler=halving scheduler._target_=mine.Net": "no LRScheduler",
    "module=mine module._target_=mine.Net": "no LightningModule",
    "callbacks=mine callbacks.a._target_=mine.Net": "no Callback",
    "data=mine data.val._target_=mine.Mine": "no dataset",
    "+optimizer.nesterov=true": "AdamW takes no such argument",
    "+trainer.max_step=3": "did you mean trainer.max_steps?",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_class_or_keyword_is_one_line(mine, words):
    lines = refused(*mine, *words.split())
    assert any(REFUSED[words] in line for line in lines), lines
