"""A project of one's own: the copy that gptrain.adopt makes, under another name, without parts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gptrain.adopt import __main__ as adopt
from tests.conftest import TINY
from tests.house.copies import Copy

FAST = "tests/test_dims.py"


def run(monkeypatch, capsys, *words: str) -> tuple[int, str, list[str]]:
    monkeypatch.setattr(sys, "argv", ["adopt", *words])
    with pytest.raises(SystemExit) as left:
        adopt.main()
    out, err = capsys.readouterr()
    return left.value.code or 0, out, err.splitlines()


def test_a_copy_without_any_part_is_whole(monkeypatch, capsys, tmp_path):
    """Nothing of the name is left, all tests are collected, fast ones pass, and it trains."""
    to = tmp_path / "mine" / "my_project"
    words = ("my_project", "--to", str(to), "--without", ",".join(adopt.read_parts()))
    assert run(monkeypatch, capsys, *words)[0] == 0
    files = [path for path in to.rglob("*") if path.is_file()]
    assert not [path for path in files if "gptrain" in f"{path}{path.read_bytes()}".lower()]
    assert not list((to / "outputs").rglob("[!.]*"))
    assert os.access(to / ".ci" / "run", os.X_OK)
    house = Copy(tmp_path)
    house.folder = to
    for words in (
        ["-m", "pytest", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider"],
        ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", FAST],
        ["train.py", *TINY, "trainer.fast_dev_run=true"],
    ):
        house.python(*words)
    house.end()
    for words in ("check", "."), ("format", "--check", "."):
        command = [sys.executable, "-m", "ruff", *words, "-n"]
        assert subprocess.run(command, cwd=to, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "words, said",
    [
        (["a-b", "--to", "new"], "error: name=a-b: no name that Python imports"),
        (["torch", "--to", "new"], "error: name=torch: no name that Python imports, or that of a"),
        (["another", "--to", "."], "error: --to=.: is there already"),
        (["another", "--to", "new", "--without", "pipes"], "error: --without=pipes: no such part"),
        (["another"], "error: the following arguments are required: --to; try: python -m gptrain"),
    ],
)
def test_what_cannot_be_copied_is_a_line(words, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, (line,) = run(monkeypatch, capsys, *words)
    assert code == 2 and not out and line.startswith(said)
    assert not list(tmp_path.iterdir())
