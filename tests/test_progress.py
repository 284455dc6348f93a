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
    """The steps between two logged ones, too. Steps are counted, not micro-batches."""
    run = train(*STEPS, BAR.format(0), "trainer.log_every_n_steps=4")
    truth = train(*STEPS, "trainer.log_every_n_steps=1", name="truth")
    rows = [json.loads(row) for row in (truth.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [f"{row['train/loss']:.4f}" for row in rows if "train/loss" in row]
    assert [line[:2] for line in lines_of(run)] == [(str(i + 1), losses[i]) for i in range(6)]
    assert lines_of(run)[-1][2] == "0:00:00"


def test_a_short_run_prints_its_first_and_last_step_and_the_size_of_each_validation(train):
    run = train(*STEPS, BAR.format(1e9))
    assert [step for step, *_ in lines_of(run)] == ["1", "6"]
    shown = [line.split()[0] for line in run.out.splitlines()]
    assert [label for label in shown if label in ("step", "validate")] == [
        "step", "validate", "step", "validate",
    ]  # fmt: skip
    assert "validate  2 batches" in run.out.splitlines()
