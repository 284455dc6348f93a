"""The bench runs its loops on the same work and tells figures that fit each other."""

from __future__ import annotations

import json

import pytest


def test_two_loops_take_turns_and_are_compared(command, tmp_path):
    options = ("size=tiny", "rounds=2", "steps=2", "loops=[bare,ours]", f"output_dir={tmp_path}")
    run = command("-m", "gptrain.bench", *options, "--json", timeout_s=300)
    assert run.returncode == 0, run.stderr
    loops = {loop["name"]: loop for loop in json.loads(run.stdout)["loops"]}
    assert loops.keys() == {"bare", "ours", "loader"}  # the loader's own throughput besides
    for loop in (loops["bare"], loops["ours"]):
        step_s, tokens_per_s = loop["step_s"], loop["tokens_per_s"]
        assert step_s["low"] <= step_s["median"] <= step_s["high"]
        assert tokens_per_s["high"] == pytest.approx(
            4 * 16 / step_s["low"]
        )  # sequences x positions
        assert loop["peak_bytes"] > 100e6  # torch alone
    ratio = loops["bare"]["memory_ratio"]
    assert ratio == pytest.approx(loops["ours"]["peak_bytes"] / loops["bare"]["peak_bytes"])


def test_a_size_that_is_not_known_is_one_line_and_nothing_is_written(command, tmp_path):
    run = command("-m", "gptrain.bench", "size=huge", f"output_dir={tmp_path}")
    assert run.returncode == 2
    assert run.stderr.startswith("error: size=huge") and run.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_another_optimizer_than_the_others_is_no_comparison(command, tmp_path):
    run = command("-m", "gptrain.bench", "size=tiny", "optimizer=muon", f"output_dir={tmp_path}")
    assert run.returncode == 2
    assert "optimizer._target_=gptrain.optim.Muon: the loops beside ours have" in run.stderr


@pytest.mark.parametrize("verb, word", [("bench", "rounds"), ("export", "format")])
def test_help_is_about_the_verb(command, verb, word):
    run = command("-m", f"gptrain.{verb}", "--help")
    assert run.returncode == 0 and f"python -m gptrain.{verb}" in run.stdout and word in run.stdout
