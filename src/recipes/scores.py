"""Score multiple-choice questions during training, or with `task=validate` for a finished run.

Config: conf/callbacks/scores.yaml. A file of JSON lines has questions in the form of HellaSwag
(`ctx` or `ctx_a`, `ctx_b` and `activity_label`; `endings`, `label`) or of ARC (`question`,
`choices`, `answerKey`). Prompts and scores are those of lm-evaluation-harness.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from gptrain.core.errors import ConfigError, DataError
from gptrain.data import Tokenizer
from gptrain.lit.lightning import data_of, strategy_of
from gptrain.text.chat import ChatFormat

Encoder: TypeAlias = Callable[[str, str], tuple[list[int], list[int]]]  # a question and a choice


class Question(NamedTuple):
    """A multiple-choice question.

    Attributes:
        text: Text of the question.
        choices: Texts that may continue it.
        answer: Index of the right choice.
    """

    text: str
    choices: list[str]
    answer: int


class Scores(Callback):
    """Logs `eval/<name>/acc` and `eval/<name>/acc_norm` at each validation.

    The scores before the training are logged with them, as `eval/<name>/acc_start` and
    `eval/<name>/acc_norm_start`, so that the result line of the run shows both.

    `acc` is the share of questions whose most probable choice is right. For `acc_norm` the log
    probability of a choice is divided by its number of characters. Each rank answers its part of
    the questions. The result is the same on any number of ranks.

    Args:
        files: File of questions by name.
        chat: True if a question is a message of the user, which the chat template of the tokenizer
            renders, and a choice is the answer of the assistant.
    """

    def __init__(self, files: Mapping[str, str], chat: bool = False):
        self.chat = chat
        self.start: dict[str, float] = {}  # scores before the training
        self.questions = {name: read_questions(Path(file)) for name, file in files.items()}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the net can be called, and that the validation data have a tokenizer.

        Raises:
            ConfigError: Under a pipeline strategy, or without a tokenizer.
        """
        if strategy_of(trainer).parallel.is_pipeline:
            message = "a rank of a pipeline has a part of the net only; strategies: all others"
            raise ConfigError.of("callbacks.scores", None, message)
        self.tokenizer: Any = getattr(data_of(trainer).val, "tokenizer", None)
        if self.tokenizer is None:
            raise ConfigError.of("callbacks.scores", None, "data.val has no tokenizer")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score the net before its training. A run that resumes keeps the scores of its start."""
        if trainer.global_step > 0:
            return
        training = [module for module in pl_module.modules() if module.training]
        pl_module.eval()
        with torch.no_grad():
            scores = self.score(trainer, pl_module)
        self.start = {f"{name}_start": score for name, score in scores.items()}
        for module in training:
            module.training = True

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the scores, unless this is the sanity check."""
        if not trainer.sanity_checking:
            pl_module.log_dict(self.start | self.score(trainer, pl_module))

    def state_dict(self) -> dict[str, Any]:
        """Return the scores before the training, which a checkpoint keeps."""
        return {"start": self.start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scores before the training from a checkpoint."""
        self.start = state_dict["start"]

    def score(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Return logged name -> score of the net. All ranks must call it, in evaluation mode."""
        data, net = data_of(trainer), cast(nn.Module, pl_module.net)
        scores, encode = {}, self.encoder(self.tokenizer)
        for name, questions in self.questions.items():
            with trainer.precision_plugin.forward_context():
                counts = count(net, encode, questions, data.rank, data.world_size)
            total = cast(Tensor, trainer.strategy.reduce(counts, reduce_op="sum"))
            scores |= named_scores(name, total)
        return scores

    def encoder(self, tokenizer: Any) -> Encoder:
        """Return the function that encodes a question and one of its choices."""
        if self.chat:
            return partial(encode_answer, ChatFormat(tokenizer))
        return lambda text, choice: encode_pair(tokenizer, text, f" {choice}")


def count(
    net: nn.Module, encode: Encoder, questions: list[Question], rank: int = 0, n_ranks: int = 1
) -> Tensor:
    """Answer this rank's part of the questions, and count the right answers.

    All ranks must call this function. They call the net equally often, because a partitioned net
    needs all of them.

    Args:
        net: Net in evaluation mode.
        encode: Function that returns the tokens of a question and those of one of its choices.
        questions: Questions of all ranks.
        rank: Rank that answers the questions rank, rank + n_ranks and so on.
        n_ranks: Number of ranks that divide the questions.

    Returns:
        Number of this rank's questions that are right by `acc`, right by `acc_norm`, and of all,
        (3,) float32, on the device of the net.
    """
    counts = torch.zeros(3, device=next(net.parameters()).device)
    for first in range(0, len(questions), n_ranks):
        text, choices, answer = questions[min(first + rank, len(questions) - 1)]
        pairs = [encode(text, choice) for choice in choices]
        nats = torch.tensor(score_continuations(net, pairs))
        per_character = nats / torch.tensor([len(choice) for choice in choices])
        if first + rank < len(questions):
            counts[0] += int(nats.argmax()) == answer
            counts[1] += int(per_character.argmax()) == answer
            counts[2] += 1
    return counts


def encode_answer(chat: ChatFormat, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation before the answer, and those of the answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    tokens, is_target = chat.encode(messages)
    places = np.flatnonzero(is_target)  # the template may add tokens after the end token
    return tokens[: places[0]].tolist(), tokens[places[0] : places[-1] + 1].tolist()


def named_scores(name: str, counts: Tensor) -> dict[str, float]:
    """Return logged name -> fraction of right answers, for `acc` and `acc_norm`.

    Args:
        name: Name of the set of questions.
        counts: Numbers of questions that are right by `acc`, right by `acc_norm`, and of all, (3,).
    """
    n_acc, n_acc_norm, n_questions = counts.tolist()
    return {
        f"eval/{name}/acc": n_acc / n_questions,
        f"eval/{name}/acc_norm": n_acc_norm / n_questions,
    }


def read_questions(file: Path) -> list[Question]:
    """Return the questions of a file of JSON lines.

    Raises:
        DataError: If a line is no question in the form of HellaSwag or ARC, or if there is no
            question.
    """
    questions = []
    try:
        for line in file.expanduser().read_text("utf-8").split("\n"):
            questions += [read_question(json.loads(line))] if line.strip() else []
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(
            f"{file}: question {len(questions) + 1}: neither HellaSwag's form nor ARC's: {error}"
        ) from None
    if not questions:
        raise DataError(f"{file}: no question")
    return questions


def read_question(row: dict[str, Any]) -> Question:
    """Return a question with the prompt that lm-evaluation-harness would write.

    Args:
        row: Record in the form of HellaSwag (with `endings`) or ARC (with `choices`).
    """
    if "endings" in row:
        text = row.get("ctx", "")
        if "ctx_a" in row:
            text = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        return Question(
            cleaned(text), [cleaned(text) for text in row["endings"]], int(row["label"])
        )
    choices = row["choices"]
    answer = choices["label"].index(row["answerKey"])
    return Question(f"Question: {row['question']}\nAnswer:", choices["text"], answer)


def cleaned(text: str) -> str:
    """Return a text of HellaSwag without the marks in brackets that come from WikiHow."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


@torch.no_grad()
def score_continuations(
    net: nn.Module, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[float]:
    """Return the log probability in nats of each continuation after its context, in one pass.

    Args:
        net: Net with the contract of `gptrain.models`, in evaluation mode.
        pairs: Token ids of a context and of its continuation, at least one each, for at least one
            pair. If both together are longer than the net can read, the beginning is left out:
            first of the context, then of the continuation, whose scores then lack that beginning.
    """
    device = next(net.parameters()).device
    limit = getattr(net, "max_seq_len", None) or sys.maxsize - 1
    rows = [torch.tensor([*context, *tokens][-limit - 1 :]) for context, tokens in pairs]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)  # (B, T + 1)
    log_probs = net(tokens[:, :-1]).float().log_softmax(-1)  # (B, T, V)
    chosen = log_probs.gather(-1, tokens[:, 1:, None])[..., 0].double()  # (B, T)
    return [
        scores[: len(row) - 1][-len(continuation) :].sum().item()
        for scores, row, (_, continuation) in zip(chosen, rows, pairs, strict=True)
    ]


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Return the tokens of a context and the tokens of its continuation.

    Both are encoded as one text, so that they are the tokens that a net sees in a running text. The
    text is cut after as many tokens as the context alone has. As in lm-evaluation-harness, white
    space at the end of the context belongs to the continuation.

    Args:
        tokenizer: Tokenizer of the net.
        context: Text before the continuation.
        continuation: Text that follows, usually with a space at its beginning.

    Raises:
        DataError: If the text has a character that the tokenizer has no token for.
    """
    together = tokenizer.encode(context + continuation).tolist()
    n_context = len(tokenizer.encode(context.rstrip()))
    return together[:n_context], together[n_context:]
