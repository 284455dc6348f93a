"""The recipe `docstrings`: questions about Python, fine-tuning on them, and scores on others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.docstrings import main
from recipes.scores import cleaned, read_questions

ROOT = next(path for path in Path(__file__).parents if (path / "train.py").is_file())


@pytest.fixture(scope="module")
def docs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["docstrings.py", str(folder)])
        main()
    return folder


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_question_is_answered_by_the_first_sentence_of_the_documentation(docs):
    pairs = read_lines(docs / "chats.jsonl") + read_lines(docs / "held_out.jsonl")
    answers = {pair["question"]: pair["answer"] for pair in pairs}
    assert len(answers) > 3000
    first = os.path.join.__doc__.strip().partition(".")[0]
    assert answers["What does os.path.join do?"] == " ".join(first.split()) + "."


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
def test_a_small_net_is_trained_fine_tuned_scored_and_asked(docs, tmp_path):
    """The README's story, with fewer steps and fewer questions."""
    for name, n_lines in (("held_out", 20), ("questions", 4)):
        lines = (docs / f"{name}.jsonl").read_text().splitlines()[:n_lines]
        (docs / f"{name}.jsonl").write_text("\n".join(lines))
    base, chat = tmp_path / "base", tmp_path / "chat"
    files = [
        f"data.{key}={docs}/{name}.jsonl"
        for key, name in (("path", "chats"), ("held_out", "held_out"))
    ]
    scores = f"callbacks.scores.files.docs={docs}/questions.jsonl"
    train = [sys.executable, "train.py", f"output_dir={tmp_path}", "trainer.max_steps=2"]

    def run(*words: str) -> str:
        return subprocess.run(words, cwd=ROOT, check=True, text=True, capture_output=True).stdout

    text = ["data.tokenizer=bpe", "model.vocab_size=512", f"data.path={ROOT}/src"]
    run(*train, "experiment=quickstart", f"run_dir={base}", *text)
    run(*train, "experiment=docstrings", f"init_from={base}", f"run_dir={chat}", *files, scores)
    module = (sys.executable, "-m")
    scored = run(*module, "gptrain.evaluate", f"from_run={chat}")
    assert {line.split("\t")[0] for line in scored.splitlines()} == {
        "eval/docs/acc", "eval/docs/acc_norm",
    }  # fmt: skip
    question = "What does os.path.join do?"
    ask = [f"from_run={chat}", f"prompt={question}", "chat=true", "n_tokens=8"]
    assert run(*module, "gptrain.generate", *ask)
