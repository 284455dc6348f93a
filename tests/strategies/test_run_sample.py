"""The text of a sample: drawn from the last position, in a window, by temperature and seed."""

import math
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import runs as claims
import torch
from torch import nn

from gptrain.data import ByteTokenizer
from gptrain.lit.callbacks.sample import SampleText, printable, sample

V = 12


class Counts(nn.Module):
    """Says the successor of the last token, as sure as `sharpness`; of the others, nonsense."""

    max_seq_len = 4

    def __init__(self, sharpness=50.0):
        super().__init__()
        self.sharpness, self.seen, self.modes = sharpness, [], []

    def forward(self, tokens):
        self.seen.append(tokens[0].tolist())
        self.modes.append(self.training)
        logits = torch.zeros(1, tokens.shape[1], V)
        logits[:, :, 0] = self.sharpness
        logits[:, -1] = self.sharpness * nn.functional.one_hot((tokens[:, -1] + 1) % V, V)
        return logits


def write(net, n_tokens, temperature=1.0, seed=0, prompt=(5,)):
    generator = torch.Generator().manual_seed(seed)
    return sample(net, torch.tensor(prompt), n_tokens, temperature, generator).tolist()


def test_the_last_position_says_what_comes_next():
    assert write(Counts(), 10) == [*range(5, 12), 0, 1, 2, 3]


def test_a_net_sees_as_much_as_it_can_and_is_in_evaluation_mode():
    net = Counts().train()
    write(net, 6, prompt=(1, 2))
    assert net.seen == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 7]]
    assert not any(net.modes) and net.training


def test_a_low_temperature_takes_the_likeliest_and_a_high_one_anything():
    net = Counts(sharpness=2.0)  # e^2 against eleven others: 40 %
    followed = {
        heat: sum(b == (a + 1) % V for a, b in pairwise(text)) / 400
        for heat in (0.1, 1.0, 100.0)
        for text in [write(net, 400, heat)]
    }
    assert followed[0.1] == 1.0
    assert followed[1.0] == pytest.approx(0.40, abs=0.1)  # four standard deviations
    assert followed[100.0] == pytest.approx(1 / V, abs=0.06)


def test_a_seed_decides_what_is_drawn_and_the_runs_own_numbers_stay():
    before = torch.get_rng_state()
    texts = [write(Counts(1.0), 20, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_callback_writes_by_its_own_options(caplog):
    net = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
    trainer = SimpleNamespace(
        datamodule=SimpleNamespace(val=SimpleNamespace(tokenizer=ByteTokenizer())),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        fast_dev_run=False,
        is_global_zero=True,
        progress_bar_callback=None,
        global_step=0,
        loggers=[],
    )
    caplog.set_level("INFO")
    options = {"n_tokens": 20, "temperature": 0.5, "seed": 3}
    SampleText("ab", **options).on_train_end(trainer, SimpleNamespace(net=net))
    tokens = write(net, **options, prompt=tuple(b"ab"))
    text = printable(ByteTokenizer().decode(tokens)).replace("\n", "\n" + 10 * " ")
    assert caplog.messages == [f"{'sample':9} {text}"]


def test_what_is_no_text_is_shown_as_a_dot():
    assert printable("a\x1b[31m\nb\t\N{REPLACEMENT CHARACTER}\x00") == "a·[31m\nb\t··"


def test_a_net_that_is_sharded_writes_what_one_process_writes(runs, tmp_path_factory):
    path = claims.shared_folder(tmp_path_factory) / "text.txt"
    path.write_text("to be or not to be " * 400)
    words = (
        "trainer.max_steps=2", "+callbacks.sample._target_=gptrain.lit.callbacks.SampleText",
        "+callbacks.sample.prompt='not '", "+callbacks.sample.n_tokens=10",
    )  # fmt: skip
    texts = []
    for name in ("single", "tensor_parallel"):
        run = runs(
            *claims.PLACES[name], *words, model=(*claims.MODEL, "model.vocab_size=256"),
            data=("data=text", f"data.path={path}", f"output_dir={path.parent}"),
        )  # fmt: skip
        texts.append(re.search(r"^sample {4}(not .*)$", run.said, re.MULTILINE).group(1))
        bits = [nats / math.log(2) for nats in run.column("val/loss")]  # a token is a byte
        assert run.column("val/bits_per_byte") == pytest.approx(bits, rel=1e-6)
    assert texts[0] == texts[1] != "not "
