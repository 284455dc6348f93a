"""The recipe `scores`: right answers are counted, at validations and for a finished run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gptrain.core.errors import DataError
from gptrain.data import load_tokenizer
from recipes.scores import Scores, count, named_scores, read_questions

HELLASWAG = [
    {"ctx": "a", "endings": ["bb", "cccc", "d"], "label": "1"},
    {"activity_label": "A", "ctx_a": "x", "ctx_b": "y  z", "endings": ["p [q]", "r"], "label": 0},
    {"ctx": "b", "endings": ["c", "ddd"], "label": 1},
    # The second is more probable per character, the first per token with its space.
    {"ctx": "c", "endings": ["d", "bbbbb"], "label": 1},
]
ARC = [
    {"question": "q?", "choices": {"text": ["bb", "c"], "label": ["A", "B"]}, "answerKey": "B"},
    {"question": "r?", "choices": {"text": ["d", "eee"], "label": ["1", "2"]}, "answerKey": "1"},
]


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    for name, rows in (("hs", HELLASWAG), ("arc", ARC)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {name: tmp_path / f"{name}.jsonl" for name in ("hs", "arc")}


def test_questions_have_the_form_of_hellaswag_or_arc(files, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_questions(Path("~/hs.jsonl"))[1] == ("A: x Y z", ["p ", "r"], 0)
    assert read_questions(files["arc"])[0] == ("Question: q?\nAnswer:", ["bb", "c"], 1)
    assert read_questions(files["arc"])[1].answer == 0  # a number names the choice
    odd = HELLASWAG[0] | {"ctx": "a\u2028b"}  # JSON lines end at \n alone
    (tmp_path / "odd.jsonl").write_text(json.dumps(odd, ensure_ascii=False), encoding="utf-8")
    assert read_questions(tmp_path / "odd.jsonl")[0].text == "a\u2028b"
    (tmp_path / "wrong.jsonl").write_text('{"question": "q"}')
    with pytest.raises(
        DataError, match="question 1: neither HellaSwag's form nor ARC's: 'choices'"
    ):
        read_questions(tmp_path / "wrong.jsonl")
    (tmp_path / "wrong.jsonl").write_text(f"{json.dumps(ARC[0])}\n\n{{}}\n")
    with pytest.raises(DataError, match="question 2: neither"):
        read_questions(tmp_path / "wrong.jsonl")
    (tmp_path / "wrong.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"wrong\.jsonl: no question"):
        read_questions(tmp_path / "wrong.jsonl")


class Unigram(torch.nn.Module):
    """A net that gives each byte the same probability after every text."""

    max_seq_len = 8  # shorter than some questions

    def __init__(self, logits: dict[str, float]):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(256))
        for byte, logit in logits.items():
            self.logits.data[ord(byte)] = logit

    def forward(self, tokens):
        return self.logits.expand(*tokens.shape, 256)


def test_the_most_probable_choice_counts_also_by_character_and_over_ranks(files):
    net, questions = Unigram({"b": 1.0, "c": 2.0, "d": 3.0}), read_questions(files["hs"])
    log_z = torch.logsumexp(net.logits.detach(), 0).item()
    space = -log_z
    by_hand = []
    for _, choices, answer in questions:
        logits = [[net.logits[ord(c)].item() - log_z for c in choice] for choice in choices]
        nats = [space + sum(row) for row in logits]
        normed = [value / len(choice) for value, choice in zip(nats, choices, strict=True)]
        by_hand.append([nats.index(max(nats)) == answer, normed.index(max(normed)) == answer])
    expected = [*torch.tensor(by_hand).sum(0).tolist(), 4]
    callback, tokenizer = Scores({"hs": str(files["hs"])}), load_tokenizer("bytes")
    encode = callback.encoder(tokenizer)
    assert encode("a ", "b") == ([97], [32, 32, 98])  # lm-evaluation-harness moves the space, too
    assert count(net, encode, questions).tolist() == expected
    # Three ranks do not divide four questions: none of them counts twice.
    parts = [count(net, encode, questions, rank, 3) for rank in range(3)]
    assert sum(parts).tolist() == expected
    scores = named_scores("hs", torch.tensor(expected))
    assert scores == {"eval/hs/acc": expected[0] / 4, "eval/hs/acc_norm": expected[1] / 4}


def test_with_chat_a_choice_is_the_answer_to_a_message_of_the_user(files):
    encode = Scores({"hs": str(files["hs"])}, chat=True).encoder(load_tokenizer("bytes"))
    assert encode("q?", "bb") == (
        [254, *b"user\nq?", 255, *b"\n", 254, *b"assistant\n"], [*b"bb", 255],
    )  # fmt: skip


@pytest.mark.parametrize(
    "ranks",
    [
        (),
        # The ranks of a context group answer the same questions, and hold shards of the weights.
        pytest.param(("trainer.devices=2", "strategy=context_parallel"), marks=pytest.mark.slow),
    ],
)
def test_a_run_logs_its_scores_and_its_best_checkpoint_is_chosen_by_them(
    train, ranks, files, tmp_path
):
    words = ("model=llama_nano", "model.d_model=16", "model.n_heads=2", "model.n_kv_heads=1",
             "model.n_layers=1", "model.d_ff=32", "data=text", f"data.path={Path(__file__)}",
             "data.seq_len=32", "data.batch_size=2", "trainer.accelerator=cpu", *ranks)  # fmt: skip
    scored = (
        "callbacks=scores",
        f"callbacks.scores.files={{hs: {files['hs']}, arc: {files['arc']}}}",
    )
    monitored = ("checkpoint.monitor=eval/hs/acc_norm", "checkpoint.mode=max")
    here = ("trainer.max_steps=2", f"run_dir={tmp_path}/run", f"output_dir={tmp_path}")
    train(*words, *scored, *monitored, *here)
    metrics = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
    logged = {name: value for name, value in metrics.items() if name.startswith("eval/")}
    start = {name: logged.pop(name) for name in [*logged] if name.endswith("_start")}
    assert start.keys() == {f"{name}_start" for name in logged} and len(logged) == 4
    words = (f"from_run={tmp_path}/run", "ckpt_path=last", f"run_dir={tmp_path}/new")
    train(*words, "task=validate", f"+callbacks.scores.files.second={files['arc']}")
    metrics = json.loads((tmp_path / "new" / "result.json").read_text())["metrics"]
    for name in ("acc", "acc_norm"):
        logged[f"eval/second/{name}"] = logged[f"eval/arc/{name}"]
    assert {name: pytest.approx(metrics[name], rel=1e-5) for name in logged} == logged
