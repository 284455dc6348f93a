"""The command `gptrain.evaluate`, and lm-evaluation-harness on a run folder."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from types import SimpleNamespace

import pytest
import torch

from gptrain.config.cli import run_command
from gptrain.evaluate.__main__ import EvaluateRun, evaluate, main
from gptrain.text.scoring import score_continuations
from gptrain.text.writing import generate

METRICS = [{"metric": "acc"}, {"metric": "acc_norm"}]


def test_its_help_says_what_it_does(typed):
    code, out, _ = typed(main, "--help")
    assert code == 0 and "python -m gptrain.evaluate from_run=" in out


def test_a_run_without_scores_or_without_a_tokenizer_is_one_line(
    speaker, saved_twice, tmp_path, capfd
):
    words = [f"from_run={speaker}", "+callbacks.removed=null"]
    assert run_command(evaluate, words, EvaluateRun, {}) == 2
    line = "error: callbacks: no callback of the run has a method evaluate(net, tokenizer); try: "
    assert capfd.readouterr().err == f"{line}callbacks=scores\n"
    assert run_command(evaluate, [f"from_run={tmp_path}/none"], EvaluateRun, {}) == 66
    capfd.readouterr()
    words = [
        f"from_run={saved_twice.folder}",
        "callbacks=scores",
        f"callbacks.scores.files={{a: {tmp_path}}}",
    ]
    assert run_command(evaluate, words, EvaluateRun, {}) == 2
    line = f"error: from_run={saved_twice.folder}: the folder has no tokenizer\n"
    assert capfd.readouterr().err == line


def test_the_requests_of_the_harness_are_read_without_its_package(speaker, monkeypatch):
    """The functions of lm_eval that are used, and the real package, are in the next test."""
    windows = []

    def divide(tokens, *how):
        windows.append((len(tokens), *how))
        return [([1], [2, 3]), ([1, 2, 3], [4])]

    utils = SimpleNamespace(
        get_rolling_token_windows=divide, make_disjoint_window=lambda pair: (pair[0][-1:], pair[1])
    )
    monkeypatch.setitem(sys.modules, "lm_eval.utils", utils)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", SimpleNamespace(TemplateLM=object))
    spec = importlib.util.find_spec("gptrain.evaluate.harness")
    harness = importlib.util.module_from_spec(spec)  # does not stay in sys.modules
    spec.loader.exec_module(harness)
    assert next(harness.RunModel(speaker, "meta").net.parameters()).device.type == "meta"
    model = harness.RunModel(speaker)
    pairs = [(model.tok_encode(text), model.tok_encode(" fox")) for text in ("the quick", "é")]
    requests = [(("", ""), *pair) for pair in pairs]
    scores = [pytest.approx(score) for score in score_continuations(model.net, pairs)]
    assert model._loglikelihood_tokens(requests) == scores
    (log_prob,) = model.loglikelihood_rolling([SimpleNamespace(args=("the fox",))])
    end_id, n_max = model.tokenizer.end_id, model.net.max_seq_len
    assert windows == [(len(model.tok_encode("the fox")), end_id, n_max, 1)]
    parts = score_continuations(model.net, [([1], [2, 3]), ([3], [4])])
    assert log_prob == pytest.approx(parts[0][0] + parts[1][0])
    (text,) = generate(model.net, model.tokenizer, ["the"], 20, temperature=0)
    pieces = [text[at : at + 2] for at in range(len(text) - 1)]
    # A stop text of which one character comes earlier, where possible.
    stop = max(pieces, key=lambda piece: text.index(piece) - min(map(text.index, piece)))
    limits = {"max_gen_toks": 20}
    options = [{"until": stop} | limits, {"until": ["none", stop]} | limits, {"max_gen_toks": 7}]
    requests = [SimpleNamespace(args=("the", option)) for option in options]
    short = generate(model.net, model.tokenizer, ["the"], 7, temperature=0)
    assert model.generate_until(requests) == [*2 * [text[: text.index(stop)]], *short]
    model.tokenizer.end_id = None
    assert model.eot_token_id == 0


@pytest.mark.engine("lm_eval")
def test_the_scores_are_those_of_lm_evaluation_harness(speaker, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    import lm_eval

    from gptrain.evaluate.harness import RunModel

    draw = random.Random(0)

    def text(most: int) -> str:
        return " ".join(draw.choices(["the", "quick", "fox", "é", "dog?"], k=draw.randint(1, most)))

    rows = {"hs": [], "arc": []}
    for _ in range(20):
        endings = [text(6) for _ in range(4)]
        rows["hs"].append({"ctx": text(40), "endings": endings, "label": draw.randrange(4)})
        choices = {"text": [text(4) for _ in range(3)], "label": ["A", "B", "C"]}
        key = draw.choice("ABC")
        rows["arc"].append({"question": text(9), "choices": choices, "answerKey": key})
    shared = {"dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"}
    forms = {
        "hs": ("ctx", "endings", "{{label}}"),
        "arc": (
            "Question: {{question}}\nAnswer:",
            "{{choices.text}}",
            "{{choices.label.index(answerKey)}}",
        ),
    }
    tasks = []
    for name, (question, choices, target) in forms.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows[name])))
        form = {"doc_to_text": question, "doc_to_choice": choices, "doc_to_target": target}
        data = {"dataset_kwargs": {"data_files": {"test": str(file)}}, "metric_list": METRICS}
        tasks.append({"task": name, **shared, **form, **data})
    model = RunModel(speaker)
    results = lm_eval.simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0)["results"]
    capfd.readouterr()
    files = ", ".join(f"{name}: {tmp_path}/{name}.jsonl" for name in forms)
    words = [f"from_run={speaker}", "callbacks=scores", f"callbacks.scores.files={{{files}}}"]
    assert run_command(evaluate, words, EvaluateRun, {}) == 0
    lines = [line.split("\t") for line in capfd.readouterr().out.splitlines()]
    assert {name: float(value) for name, value in lines} == {
        f"eval/{name}/{metric['metric']}": pytest.approx(results[name][f"{metric['metric']},none"])
        for name in forms
        for metric in METRICS
    }
    assert len(model.tok_encode("a b")) and model.eot_token_id == model.tokenizer.end_id
    long = "the quick brown fox jumps over a lazy dog. " * 20
    expected = []
    for text in ("the fox", long, ""):  # `long` has several windows
        tokens, n_max = model.tok_encode(text), model.net.max_seq_len
        log_prob = 0.0
        for start in range(0, len(tokens), n_max):
            read = [model.eot_token_id, *tokens[: start + n_max]][-n_max - 1 :]
            n_scored = len(tokens[start : start + n_max])
            log_probs = model.net(torch.tensor([read[:-1]])).log_softmax(-1)[0, -n_scored:]
            targets = torch.tensor(read[-n_scored:])
            log_prob += log_probs.gather(-1, targets[:, None]).sum().item()
        expected.append(log_prob)
    requests = [SimpleNamespace(args=(text,)) for text in ("the fox", long, "")]
    assert model.loglikelihood_rolling(requests) == pytest.approx(expected)
    request = SimpleNamespace(args=("the", {"until": [], "max_gen_toks": 7}))
    expected = generate(model.net, model.tokenizer, ["the"], 7, temperature=0)
    assert model.generate_until([request]) == expected
