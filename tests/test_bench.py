"""The bench compares its loops within a round."""

from __future__ import annotations

from types import SimpleNamespace

from tests.tools.bench.result import summarize


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
