"""Run a line as a shell would, in this process and in a folder of unusable files."""

from __future__ import annotations

import fcntl
import gzip
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

from tests.forked import forked_ranks
from tests.run import new_place, redirected, run_script

COMMANDS = ("collectives", "export", "generate", "plan", "runs")
VARIABLE = re.compile(r"([A-Z_]+)=(.*)")
KEY = re.compile(r"error: ([^\s=:]+)[=:]")
# A small run, whose options a row may replace.
RUN = (
    "model=gpt_nano model.d_model=16 model.n_heads=2 model.n_layers=1 data.seq_len=17 "
    "data.batch_size=4 trainer.accelerator=cpu trainer.max_steps=2 logger=none callbacks=none "
    "trainer.enable_progress_bar=false"
)


@dataclass
class Answer:
    """How a command ended.

    Attributes:
        code: Exit code.
        out: Lines on stdout.
        err: Lines on stderr.
        written: Names of the files that the command has made or changed, below the folder.
    """

    code: int
    out: list[str]
    err: list[str]
    written: list[str]

    def keys(self) -> list[str]:
        """Return the last word of the key of each error line, or the name of its file; sorted."""
        names = []
        for line in self.err:
            if line.startswith("error: "):
                name = (found := KEY.match(line)) and found[1].rpartition("/")[2]
                is_file = name in PLANTED or name in TEXTS
                names.append(name if is_file or not name else name.rpartition(".")[2])
        return sorted(name or "-" for name in names)


WORDS = """{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "unk_token": "a",
"vocab": {"a": 0, "b": 299}}}"""
TEXTS = {
    "a.txt": "a text\n",
    "empty.txt": "",
    "file": "",
    "text.txt": "a line of the text\n" * 100,
    "commas.csv": "text\n" + "a line, of the text\n" * 100,
    "no.safetensors": "# not one",
    "t.json": "{}",
    "bad.jsonl": '{"text": "a"}\n{"text"',
    "other.jsonl": '{"body": "a"}\n',
    "finished/result.json": "{}",
    "held/.lock": "",
    "two/nothing": "",
    "broken/.hydra/overrides.yaml": "- [x",
    "aliased/.hydra/overrides.yaml": "[&a x, *a]",
    "net/config.json": '{"text_config": {"vocab_size": 300}}',
    "words/tokenizer.json": WORDS,
    "own/experiment/old.yaml": "# @package _global_\nfrom_run: run\n",
    "own/model/mine.yaml": "_target_: torch.nn.Identity\nvocab_size: 256\nown: 1\n",
}
PLANTED = {
    "latin.txt": "café\n".encode("latin-1") * 100,
    "cut.jsonl.gz": gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-20],
    "odd.bin": b"abc",
    "short.bin": bytes(20),
    "large.bin": bytes(200) + b"\xff\xff",
    "header.bin": (20240520).to_bytes(4, "little") + bytes(8),
}


@cache
def planted() -> Path:
    """Make the folder in which the lines run: files, a trained run, and a damaged copy of it."""
    folder = new_place().resolve()
    for name, content in (TEXTS | PLANTED).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    lock = os.open(folder / "held" / ".lock", os.O_RDWR)  # open until this process ends
    fcntl.flock(lock, fcntl.LOCK_EX)
    ended = answer(f"{RUN} run_dir=run", folder)
    assert ended.code == 0, ended.err
    shutil.copytree(folder / "run", folder / "damaged")
    for path in (folder / "damaged" / "checkpoints").glob("*/*"):
        path.write_bytes(path.read_bytes()[:-9])
    return folder


def answer(line: str, folder: Path) -> Answer:
    """Run a line in a folder and return how it ended.

    The line begins with variables of the environment, then with the name of a command of gptrain.
    Without such a name it is a line for train.py. Its last words may be `< file`, for its stdin.
    The command writes into `outputs`, which is removed afterwards.
    """
    words = shlex.split(line)
    variables = {}
    while words and (variable := VARIABLE.fullmatch(words[0])):
        variables[variable[1]] = variable[2]
        words.pop(0)
    output = new_place()
    module = f"gptrain.{words.pop(0)}" if words and words[0] in COMMANDS else ""
    before, outputs = files(folder), folder / "outputs"
    outputs.mkdir()
    variables["GPTRAIN_OUTPUT_DIR"] = str(outputs)
    here = os.getcwd()
    os.chdir(folder)
    started = forked_ranks(output / "out", output / "err")
    read = words.pop() if "<" in words else os.devnull
    words = [word for word in words if word != "<"]
    try:
        with (
            open(read) as file, patch.object(sys, "stdin", file), redirected(output),
            patch.dict(os.environ, variables), started,
        ):  # fmt: skip
            code = run_script(words, module)
    finally:
        os.chdir(here)
    after = files(folder)
    shutil.rmtree(outputs)
    out, err = ((output / name).read_text().splitlines() for name in ("out", "err"))
    return Answer(code, out, err, sorted(name for name in after if before.get(name) != after[name]))


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of change of each file in a folder, links not followed."""
    found = {}
    for parent, _, names in os.walk(folder):
        for path in (Path(parent) / name for name in names):
            if path.suffix != ".pyc":
                about = path.lstat()
                found[str(path.relative_to(folder))] = about.st_size, about.st_mtime_ns
    return found
