"""The recipe `chat`: its loss, conversations that are too long, and a chat with the net."""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path

import pytest
import torch

import gptrain
from gptrain.core.errors import DataError
from gptrain.generate.__main__ import main
from recipes.chat import ChatDataset

SIZES = ("model=llama_nano", "model.d_model=16", "model.n_heads=2", "model.n_kv_heads=1",
         "model.n_layers=1", "model.d_ff=32", "data.seq_len=256")  # fmt: skip
OPTIONS = {"seq_len": 256, "held_out": 0.1, "too_long": "cut", "documents": "separate"}


@pytest.fixture
def chats(tmp_path) -> Path:
    """300 conversations of one to four questions."""
    draw = random.Random(0)
    words = ["the", "net", "reads", "a", "é", "你", "file"]

    def text(n_words: int) -> str:
        return " ".join(draw.choices(words, k=n_words))

    with open(tmp_path / "chats.jsonl", "w") as file:
        for number in range(300):
            talk = [{"role": "system", "content": text(3)}] if number % 3 == 0 else []
            for _ in range(draw.randint(1, 4)):
                talk.append({"role": "user", "content": text(draw.randint(1, 5))})
                talk.append({"role": "assistant", "content": text(draw.randint(1, 7))})
            file.write(json.dumps({"messages": talk}) + "\n")
    return tmp_path / "chats.jsonl"


def own_loss(net: torch.nn.Module, talks: list[list[dict]]) -> float:
    """The mean loss over the bytes of the answers and their ends, one conversation at a time."""
    nats = n_targets = 0
    for talk in talks:
        tokens, counts = [], []
        for message in talk:
            answer = [*message["content"].encode(), 255]
            is_answer = message["role"] == "assistant"
            tokens += [254, *f"{message['role']}\n".encode(), *answer, *b"\n"]
            counts += [False] * (len(message["role"]) + 2) + [is_answer] * len(answer) + [False]
        logits = net(torch.tensor([tokens[:-1]]))[0].double()
        losses = torch.nn.functional.cross_entropy(
            logits, torch.tensor(tokens[1:]), reduction="none"
        )
        nats += losses[torch.tensor(counts[1:])].sum().item()
        n_targets += sum(counts)
    return nats / n_targets


def test_the_loss_is_that_of_a_plain_loop_and_the_run_is_a_chat(
    run, train, chats, tmp_path, monkeypatch
):
    words = ("experiment=chat", *SIZES, f"data.path={chats}", "data.tokenizer=bytes")
    here = ("trainer.accelerator=cpu", f"run_dir={tmp_path}/run")
    out = train(*words, *here, "data.held_out=0.5", "trainer.max_steps=4", "optimizer.lr=1e-2")
    talks = [json.loads(line)["messages"] for line in chats.read_text().splitlines()]
    answers = [message["content"] for message in talks[0] if message["role"] == "assistant"]
    # The example is the first conversation of the training set.
    assert all(f"«{answer}<|im_end|>»" in out for answer in answers)
    assert "150 conversations in " in out
    net = gptrain.load(tmp_path / "run", "last")
    with torch.no_grad():
        expected = own_loss(net, talks[1::2])
    metrics = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
    assert metrics["val/loss"] == pytest.approx(expected, abs=1e-5)
    err = train(*words, here[0], "data.seq_len=257", f"run_dir={tmp_path}/long", code=2)
    assert "data.seq_len=257: longer than the 256 positions of" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("reads?\nand?\n"))
    assert "reads" not in run(main, f"from_run={tmp_path}/run", "interactive=true", "n_tokens=3")


def dataset(path: Path, **options) -> ChatDataset:
    return ChatDataset(str(path), "train", "bytes", **{"keys": "messages", **OPTIONS, **options})


def test_a_conversation_that_is_too_long_is_cut_at_a_message_left_out_or_refused(
    chats, monkeypatch
):
    full = dataset(chats)
    longest = max(len(chat.tokens) for chat in full.chats)
    short = {"seq_len": longest // 2}
    cut, skipped = dataset(chats, **short), dataset(chats, **short, too_long="skip")
    exact = dataset(chats, seq_len=longest - 1, too_long="error")  # the first token is no target
    assert len(exact.chats) == len(full.chats)
    assert cut.n_cut == skipped.n_left_out - cut.n_left_out > 0
    for chat, original in zip(cut.chats[:3], full.chats[:3], strict=True):
        assert original.tokens[: len(chat.tokens)].tolist() == chat.tokens.tolist()
        assert len(chat.tokens) - 1 <= longest // 2 and chat.tokens[-2:].tolist() == [255, 10]
    with pytest.raises(DataError, match=r"data.too_long=no, data.documents=separate: allowed: cut"):
        dataset(chats, too_long="no")
    lengths = [len(chat.tokens) for chat in dataset(chats, held_out=0.5).chats]
    number = 2 * lengths.index(max(lengths)) + 1  # every second conversation is held out
    message = f"conversation {number}: {max(lengths)} tokens; try: data.too_long=cut"
    with pytest.raises(DataError, match=message):
        dataset(chats, seq_len=max(lengths) - 2, too_long="error", held_out=0.5)
    monkeypatch.setenv("HOME", str(chats.parent))
    assert len(dataset(Path("~") / chats.name).chats) == len(full.chats)


def test_a_conversation_without_an_answer_is_left_out_and_two_that_fit_share_a_sample(tmp_path):
    """The last conversation is too long even without its answer's end, so that none is left."""
    question, answer = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
    pair, too_long = [question, answer], [question, answer | {"content": "b" * 90}]
    talks = [pair, [question], pair, too_long]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    alone = dataset(file, held_out=0.0, seq_len=90)
    assert (len(alone), alone.n_left_out) == (2, 2)
    assert alone.tokenizer.chat_template  # is saved with the run
    assert (alone.end_id, len(alone.token_bytes)) == (255, 256)
    # The end is that of an answer, which the template decides.
    alone.tokenizer.save(tmp_path)
    template = "{% for message in messages %}{{ message.content }}<|im_start|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    options = {**OPTIONS, "keys": "messages", "held_out": 0.0}
    assert ChatDataset(str(file), "train", str(tmp_path), **options).end_id == 254
    n_positions = len(alone.chats[0].tokens) - 1
    assert len(dataset(file, held_out=0.0, seq_len=2 * n_positions, documents="masked")) == 1
    packed = dataset(file, held_out=0.0, seq_len=2 * n_positions + 2, documents="masked")
    (tokens, targets, documents), (of_one, targets_of_one) = packed[0], alone[0]
    assert documents.tolist() == [0] * n_positions + [1] * n_positions + [2] * 2
    for part in (slice(n_positions), slice(n_positions, -2)):
        assert torch.equal(tokens[part], of_one[:n_positions])
        assert torch.equal(targets[part], targets_of_one[:n_positions])
    assert targets[-2:].tolist() == [-100] * 2
