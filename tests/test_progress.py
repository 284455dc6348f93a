"""Long work shows how far it is, to a person at a terminal and to nobody else."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from gptrain.core.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "stream, rank, is_shown",
    [(Terminal, "0", True), (Terminal, "1", False), (io.StringIO, "0", False)],
)
def test_a_terminal_shows_it_once_and_a_file_gets_nothing(stream, rank, is_shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("RANK", rank)
    with progress_bar("verifying", 1000) as bar:
        if not bar.disable:
            bar.start_t = bar.last_print_t = bar.start_t - 3  # pretend a start 3 s ago
        bar.update(500)
    output = sys.stderr.getvalue()
    if not is_shown:
        assert not output
        return
    assert "verifying:  50%" in output and "| 500/1.00k [" in output and "B/s" in output
    assert output.endswith("\r")  # the bar was removed from the screen


STEPS = (
    "trainer.enable_progress_bar=true", "trainer.max_steps=6", "data.batch_size=2",
    "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=3", "logger=none",
    "checkpoint=none",
)  # fmt: skip
BAR = "+callbacks.bar={{_target_: gptrain.lit.callbacks.progress.ProgressBar, every_s: {}}}"


def lines_of(run) -> list[tuple[str, ...]]:
    """Return step, loss and remaining time of each printed line of a step."""
    assert run.code == 0 and "\r" not in run.out, run.err
    return re.findall(r"(?m)^step +(\d+)/6 · train/loss (\S+) · lr .* · left (\S+)$", run.out)


def test_without_a_terminal_a_line_has_the_values_of_its_own_step(train):
    """Each logged step, and no other, may print a line. Steps are counted, not micro-batches."""
    run = train(*STEPS, BAR.format(0), "trainer.log_every_n_steps=4")
    rows = [json.loads(row) for row in (run.folder / "metrics.jsonl").read_text().splitlines()]
    logged = [(str(r["step"]), f"{r['train/loss']:.4f}") for r in rows if "train/loss" in r]
    assert [line[:2] for line in lines_of(run)] == logged
    assert [step for step, _ in logged] == ["1", "3", "4", "6"]
    assert lines_of(run)[-1][2] == "0:00:00"
