"""Commands that are printed can be pasted: a real shell and Hydra's parser read what was meant."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gptrain.checkpoints.status import read_status
from gptrain.config.compose import compose_words
from gptrain.core import labels, locations, shell
from tests.conftest import ROOT, TINY

ODD = [
    "lr=1e-3", "run #2", "été", "model (v2)", "a,b", "it's", 'say "x"', "$HOME and `id`", "[1] {2}",
    "-x", "~x", "!!", "back\\slash'", "a;b&c|d", "*?", "null", "0x1", "新加卷", "100%", "${a}",
]  # fmt: skip


def read_by_a_shell(line: str) -> list[str]:
    """Return the words that bash makes of a pasted line, without running the program."""
    python = shlex.quote(sys.executable)
    print_words = f"{python} -c 'import sys; print(*sys.argv[1:], sep=chr(0), end=\"\")' "
    done = subprocess.run(
        ["bash", "-c", print_words + line], capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")


def value_of(word: str) -> object:
    """Return the value of an override, as Hydra composes it."""
    cfg, problems = compose_words([f"++pasted.{word}"])
    assert not problems, word
    (value,) = cfg.pasted.values()
    return value


@pytest.mark.parametrize("name", ODD)
def test_a_shell_and_hydra_read_any_text_as_it_is(name):
    for text in (name, f"out/{name}", f"/tmp/{name}/x"):
        line = shell.command("python", "train.py", shell.override("key", text))
        words = read_by_a_shell(line)
        assert words[:2] == ["python", "train.py"] and len(words) == 3
        assert value_of(words[2]) == text
        assert shlex.split(line) == words


def test_other_values_keep_their_types():
    for value in (3, 1e-4, True, None, [1, 2]):
        assert value_of(shell.override("key", value)) == value


def test_words_that_need_no_quotes_have_none():
    words = [shell.override("run_dir", "outputs/train/2026-11-25_10:00"), "ckpt_path=last"]
    assert shell.command(*words) == "run_dir=outputs/train/2026-11-25_10:00 ckpt_path=last"
    assert shell.option("from_run", "a b") == "\"from_run='a b'\""


def test_a_home_folder_is_expanded_once_and_a_name_with_a_tilde_stays_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    assert locations.expand_home("~/runs") == Path("/home/me/runs")
    for typed in ("./~", "./~x", "~nobody-of-this-name/x"):
        folder = locations.expand_home(typed)
        assert locations.expand_home(folder) == folder == tmp_path / typed


def test_numbers_have_their_noun_and_a_long_list_is_cut():
    assert [labels.count_text(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert labels.shorten(list(range(16))).endswith("13, 14, 15")
    assert labels.shorten(list(range(17))).endswith("13, 14, 15, …")
    assert labels.line("run", "a\nb") == "run       a\n          b"
    assert labels.line("strategies", "a") == "strategies a"


def test_the_script_is_found_from_the_current_folder(tmp_path, monkeypatch):
    for name in ("conf", "inner"):
        (tmp_path / name).mkdir()
    (tmp_path / "train.py").touch()
    monkeypatch.delenv(locations.VARIABLE)
    monkeypatch.chdir(tmp_path / "inner")
    for typed in ("/x/site-packages/submitit/core/_submit.py", "gptrain/export/__main__.py"):
        monkeypatch.setattr(sys, "argv", [typed])
        assert locations.train_script() == "../train.py"
    deep = tmp_path / "/".join(["inner"] * 50)
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert locations.train_script() == f"{tmp_path}/train.py"  # shorter than the relative path
    monkeypatch.setattr(sys, "argv", ["../mine.py"])
    assert locations.train_script() == "../mine.py"
    monkeypatch.setattr(sys, "argv", ["gptrain/export/__main__.py"])
    (tmp_path / "train.py").unlink()
    for conf in (None, tmp_path / "conf"):  # no project, and a project without the script
        if conf:
            monkeypatch.setenv(locations.VARIABLE, str(conf))
        assert locations.train_script() == "train.py"


@pytest.mark.parametrize("name", ["lr=1e-3", "#2 été, (v2)", "-it's $HOME ~[x]"])
def test_the_lines_at_the_end_of_a_run_and_in_its_status_run_as_they_are_pasted(
    name, train, tmp_path, monkeypatch
):
    folder = tmp_path / name
    monkeypatch.setenv("HOME", str(tmp_path))
    typed = f"~/{name}" if name.startswith("-") else folder
    words = (*TINY, "logger=none", "callbacks=none", "trainer.max_steps=1")
    run = train(*words, shell.override("run_dir", typed), tiny=False)
    assert run.code == 0, run.err
    (line,) = [line for line in run.out.splitlines() if line.startswith("next ")]
    test, board = line.removeprefix("next").split("; ")
    assert read_by_a_shell(board) == ["tensorboard", f"--logdir={folder}"]
    python, script, *pasted = read_by_a_shell(test)
    assert (python, script) == ("python", str(ROOT / "train.py"))
    tested = train(*pasted, tiny=False, name="tested")
    assert tested.code == 0 and "test/loss" in tested.metrics, tested.err
    resume = read_by_a_shell(read_status(folder)["resume"])[2:]
    more = train(*resume, "trainer.max_steps=2", tiny=False, name="unused")
    assert more.code == 0 and "from step 1 to 2" in more.out, more.err


def test_the_best_of_a_sweep_in_an_odd_folder_is_tested_by_the_line_that_is_shown(train, tmp_path):
    folder = tmp_path / "sweep lr=1e-3, (é)"
    words = (*TINY, "logger=none", "callbacks=none", "trainer.max_steps=1")
    sweep = train("-m", *words, "seed=1,2", shell.override("run_dir", folder), tiny=False)
    assert sweep.code == 0, sweep.err
    (line,) = [line for line in sweep.out.splitlines() if line.startswith("next ")]
    pasted = read_by_a_shell(line[line.index("python ") :])
    more = train(*pasted[2:], tiny=False, name="unused")
    assert more.code == 0 and "test      from step 1" in more.out, more.err


def test_a_printed_line_has_its_text_in_column_ten_on_every_row():
    rows = labels.line("result", "3 steps\nloss 2.5").split("\n")
    assert rows == ["result    3 steps", "          loss 2.5"]
    assert labels.line("epoch 123456", Path("a")) == "epoch 123456 a"
