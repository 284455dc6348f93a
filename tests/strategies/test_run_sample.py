"""Text that a run samples at the end of its training. tests/test_sampling.py tests the sampling."""

import math
import re
from types import SimpleNamespace

import pytest
import runs as helpers
import torch
from torch import nn

from gptrain.data import load_tokenizer
from gptrain.lit.callbacks.sample import SampleText
from gptrain.text.sampling import Sampling, generate, terminal_text


def test_the_callback_samples_with_its_own_options(caplog):
    net = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
    trainer = SimpleNamespace(
        datamodule=SimpleNamespace(val=SimpleNamespace(tokenizer=load_tokenizer("bytes"))),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        fast_dev_run=False,
        is_global_zero=True,
        progress_bar_callback=None,
        global_step=0,
        loggers=[],
    )
    caplog.set_level("INFO")
    SampleText("ab", n_tokens=20).on_train_end(trainer, SimpleNamespace(net=net))
    made = generate(net, list(b"ab"), 20, Sampling(0.7), torch.Generator().manual_seed(0))
    tokens = [*b"ab", *made]
    text = terminal_text(load_tokenizer("bytes").decode(tokens)).replace("\n", "\n" + 10 * " ")
    assert caplog.messages == [f"{'sample':9} {text}"]
    for owner, name, value in (
        (trainer, "fast_dev_run", 1),
        (trainer.strategy, "parallel", SimpleNamespace(is_pipeline=True)),
        (trainer.datamodule.val, "tokenizer", None),
    ):
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        SampleText("ab").on_train_end(trainer, SimpleNamespace(net=net))
        setattr(owner, name, before)
    SampleText("ab").on_train_end(trainer, SimpleNamespace(other=net))  # a module without a net
    assert len(caplog.messages) == 1


@pytest.mark.slow
def test_a_sharded_net_samples_the_same_text_as_one_process(runs, tmp_path_factory):
    path = helpers.shared_folder(tmp_path_factory) / "text.txt"
    path.write_text("to be or not to be " * 400)
    words = (
        "trainer.max_steps=2", "+callbacks.sample._target_=gptrain.lit.callbacks.SampleText",
        "+callbacks.sample.prompt='not '", "+callbacks.sample.n_tokens=10",
    )  # fmt: skip
    texts = []
    for name in ("single", "tensor_parallel"):
        run = runs(
            *helpers.PLACES[name], *words, model=(*helpers.MODEL, "model.vocab_size=256"),
            data=("data=text", f"data.path={path}", f"output_dir={path.parent}"),
        )  # fmt: skip
        texts.append(re.search(r"^sample {4}(not .*)$", run.output, re.MULTILINE).group(1))
        bits = [nats / math.log(2) for nats in run.column("val/loss")]  # a token is a byte
        assert run.column("val/bits_per_byte") == pytest.approx(bits, rel=1e-6)
    assert texts[0] == texts[1] != "not "
