"""Long work shows how far it is, to a person at a terminal and to nobody else."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import sys
import termios

import pytest

from gptrain.progress import progress_bar
from gptrain.resilience import manifest
from gptrain.resilience.store import CheckpointStore


def shown(stream: io.TextIOBase, monkeypatch, rank: str = "0") -> None:
    """Half of some work, three seconds after it began, whose bar goes to this stream."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("RANK", rank)
    with progress_bar("verifying", 1000) as bar:
        if not bar.disable:
            bar.start_t = bar.last_print_t = bar.start_t - 3
        bar.update(500)


@pytest.mark.parametrize("rank, is_shown", [("0", True), ("1", False)])
def test_a_terminal_shows_it_once(rank, is_shown, monkeypatch):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with open(theirs, "w") as terminal:
        shown(terminal, monkeypatch, rank)
        terminal.write("end\n")
        terminal.flush()
        said = ""
        while "end" not in said:
            said += os.read(ours, 4096).decode()
    os.close(ours)
    assert ("verifying:  50%" in said) == is_shown and said.endswith("end\r\n")


def test_a_file_gets_nothing(monkeypatch):
    stream = io.StringIO()
    shown(stream, monkeypatch)
    assert stream.getvalue() == ""


class Count:
    """A bar that only counts."""

    def __init__(self, what: str, n_bytes: int):
        self.what, self.total, self.n = what, n_bytes, 0

    def update(self, n: int) -> None:
        self.n += n

    def __enter__(self) -> Count:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_verifying_a_checkpoint_counts_its_bytes(tmp_path, monkeypatch):
    store, made = CheckpointStore(tmp_path, "run"), []
    monkeypatch.setattr(manifest, "progress_bar", lambda *of: made.append(Count(*of)) or made[-1])
    with store.writing(1) as draft, draft.open("state.ckpt") as file:
        file.write(b"x" * 3_000_000)
    store.newest_good()
    assert [(bar.what, bar.n, bar.total) for bar in made] == [("verifying", 3_000_000, 3_000_000)]
