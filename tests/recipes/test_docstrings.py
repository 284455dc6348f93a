"""The recipe `docstrings`: questions about Python, fine-tuning on them, and scores on others."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from gptrain.generate.__main__ import main as generate
from recipes.docstrings import main
from recipes.scores import cleaned, read_questions

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # the documentation is that of many modules, which are imported


@pytest.fixture(scope="module")
def docs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["docstrings.py", str(folder)])
        patch.setattr(sys, "stdout", io.StringIO())
        main()
        said = sys.stdout.getvalue()
    counts = [len(read_lines(folder / f"{name}.jsonl")) for name in ("chats", "held_out")]
    assert said == f"{folder}: {counts[0]} questions to train on, {counts[1]} held out\n"
    return folder


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_question_is_answered_by_the_first_sentence_of_the_documentation(docs):
    pairs = read_lines(docs / "chats.jsonl") + read_lines(docs / "held_out.jsonl")
    answers = {pair["question"]: pair["answer"] for pair in pairs}
    assert len(answers) > 3000
    first = os.path.join.__doc__.strip().partition(".")[0]
    assert answers["What does os.path.join do?"] == " ".join(first.split()) + "."
    # Functions of a package, methods of a class; no tests, and nothing that is private.
    assert {"What does json.load do?", "What does argparse.ArgumentParser.error do?"} <= {*answers}
    assert not any(part in question for question in answers for part in (" test.", "._"))


def test_functions_that_are_asked_about_are_not_trained_on(docs):
    trained = {pair["question"] for pair in read_lines(docs / "chats.jsonl")}
    held_out = {pair["question"]: pair["answer"] for pair in read_lines(docs / "held_out.jsonl")}
    questions = read_questions(docs / "questions.jsonl")
    assert len(questions) == len(held_out) > 300
    places = set()
    for question, choices, answer in questions:
        assert question not in trained
        assert len(set(choices)) == 4 and choices[answer] == cleaned(held_out[question])
        places.add(answer)
    assert places == {0, 1, 2, 3}


@pytest.mark.slow
def test_a_small_net_is_trained_fine_tuned_scored_and_asked(docs, run, train, tmp_path):
    """The story of the recipes' README, with fewer steps and fewer questions."""
    for name, n_lines in (("held_out", 20), ("questions", 4)):
        lines = (docs / f"{name}.jsonl").read_text().splitlines()[:n_lines]
        (docs / f"{name}.jsonl").write_text("\n".join(lines))
    base, chat = tmp_path / "base", tmp_path / "chat"
    files = [
        f"data.{key}={docs}/{name}.jsonl"
        for key, name in (("path", "chats"), ("held_out", "held_out"))
    ]
    scores = f"callbacks.scores.files.docs={docs}/questions.jsonl"
    start = (f"output_dir={tmp_path}", "trainer.max_steps=2")
    text = ("data.tokenizer=bpe", "model.vocab_size=512", f"data.path={ROOT}/src")
    train(*start, "experiment=quickstart", f"run_dir={base}", *text)
    train(*start, "experiment=docstrings", f"init_from={base}", f"run_dir={chat}", *files,
        scores)  # fmt: skip
    metrics = json.loads((chat / "result.json").read_text())["metrics"]
    assert metrics.keys() >= {"eval/docs/acc", "eval/docs/acc_norm"}
    question = "What does os.path.join do?"
    ask = [f"from_run={chat}", f"prompt={question}", "chat=true", "n_tokens=8"]
    assert run(generate, *ask)
