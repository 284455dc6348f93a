"""The bench runs its loops on the same work and reports consistent figures."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.tools.bench.__main__ import main
from tests.tools.bench.loops import TutorialGPT, train
from tests.tools.bench.result import summarize

LOOP = """
from itertools import count
from tests.tools.bench.turns import Turns
turns = Turns(lambda: None, lambda: step)
for step in count(1):
    turns.step_done()
"""


@pytest.fixture
def answer(typed):
    """Runs `python -m tests.tools.bench <words>`: exit code, stdout, stderr."""
    n_threads = torch.get_num_threads()
    yield lambda *words: typed(main, *words)
    torch.set_num_threads(n_threads)


def test_ratios_are_taken_within_a_round():
    ours = {"name": "ours", "n_ranks": 2, "peak_bytes": 30, "steps_s": [4.0, 1.0, 2.0]}
    bare = {"name": "bare", "n_ranks": 2, "peak_bytes": 20, "steps_s": [2.0, 2.0, 3.0]}
    loops = [SimpleNamespace(**ours), SimpleNamespace(**bare)]
    spec = {"batch_size": 2, "seq_len": 6, "flops_per_token": 3, "peak_flops_per_s": 60.0}
    our_result, bare_result = summarize(loops, spec)
    assert our_result["tokens_per_s"] == {
        "median": 2 * 10 / 2,
        "low": 2 * 10 / 4,
        "high": 2 * 10 / 1,
    }
    assert our_result["mfu"] == 3 * 10 / 2 / 60  # of one rank's device
    assert bare_result["ours_ratio"] == {"median": 1.5, "low": 0.5, "high": 2.0}
    assert bare_result["added_s"] == {"median": -1.0, "low": -1.0, "high": 2.0}
    assert bare_result["memory_ratio"] == 1.5


def test_the_plain_loop_clips_the_gradients_of_every_step():
    sizes = {"vocab_size": 9, "d_model": 4, "n_heads": 2, "n_layers": 1, "max_seq_len": 4}
    spec = {"model": {**sizes, "dropout": 0.0}, "precision": "32-true", "clip": 1e-3}
    net, norms = TutorialGPT(spec), []

    def step_done():
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])))

    tokens, optimizer = torch.randint(9, (3, 2, 4)), torch.optim.SGD(net.parameters(), 0.1)
    turns = SimpleNamespace(step_done=step_done)
    train(zip(tokens, tokens, strict=True), net, optimizer, spec, torch.device("cpu"), turns)
    assert norms == pytest.approx([1e-3] * 3, rel=1e-2)


def test_a_turn_has_as_many_steps_as_it_was_given():
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", LOOP], **options) as loop:
        replies = [json.loads(loop.stdout.readline())]
        for steps in (3, 1):
            loop.stdin.write(f"{steps}\n")
            loop.stdin.flush()
            replies.append(json.loads(loop.stdout.readline()))
        loop.stdin.close()
    assert [reply["peak_bytes"] for reply in replies] == [1, 1 + 3, 1 + 3 + 1]
