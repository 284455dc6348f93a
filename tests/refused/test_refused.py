"""What is refused: the exit code and the key of each line are in refused.yaml.

The form of a refusal is asserted here, for all rows. The texts are in tests/golden/refused.txt,
and what a job finds that is accepted in tests/golden/accepted.txt.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from gptrain import config
from tests.golden import WRITE, as_lines, check, flat, masked, sections
from tests.refused.commands import RUN, VARIABLE, Answer, answer, planted
from tests.run import ROOT, new_place, redirected

TABLE = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
GOLDEN = ROOT / "tests" / "golden"
VALUES = {key: values.split() for key, values in TABLE["values"].items()}
N_COMMANDS = max(map(len, VALUES.values()))


@cache
def answer_of(line: str) -> Answer:
    """Run a line in the folder of planted files, once for all tests of this file."""
    return answer(line, planted())


def values_line(number: int) -> str:
    """Return the command of the values with this number, of each key that has as many."""
    return " ".join(
        shlex.quote(f"{key}={values[number]}")
        for key, values in VALUES.items()
        if number < len(values)
    )


def text_of(line: str) -> str:
    """Return a line and what is printed for it, as in the golden file."""
    short = line.replace(RUN, "RUN").replace("\r", "\\r")
    return masked("\n".join(["$ " + short, *answer_of(line).err]), planted())


def check_form(line: str) -> None:
    """Check that each problem is one line, printed once, without a traceback, as it was before."""
    answer = answer_of(line)
    if not os.environ.get(WRITE):
        assert text_of(line) in sections("refused.txt")
    for line in answer.err:
        assert line.startswith(("error: ", "warning: ")) and line.isprintable(), answer.err
    assert len(set(answer.err)) == len(answer.err)


@pytest.mark.parametrize("line", TABLE["before"])
def test_what_is_refused_writes_nothing_and_is_a_line_for_each_problem(line):
    answer = answer_of(line)
    assert " ".join([str(answer.code), *answer.keys()]) == str(TABLE["before"][line]), answer.err
    check_form(line)
    assert (answer.out, answer.written) == ([], [])


@pytest.mark.parametrize("line", TABLE["begun"])
def test_a_run_that_cannot_go_on_has_no_result_and_is_a_line_for_each_problem(line):
    answer = answer_of(f"{RUN} {line}")
    assert " ".join([str(answer.code), *answer.keys()]) == str(TABLE["begun"][line]), answer.err
    check_form(f"{RUN} {line}")
    assert not [name for name in answer.written if name.endswith("result.json")]


@pytest.mark.parametrize("number", range(N_COMMANDS))
def test_a_value_of_none_of_its_keys_forms_is_refused_with_all_others(number):
    answer = answer_of(values_line(number))
    keys = [key.rpartition(".")[2] for key in VALUES if number < len(VALUES[key])]
    assert answer.code == 2 and set(answer.keys()) >= set(keys), answer.err
    check_form(values_line(number))
    assert (answer.out, answer.written) == ([], [])


@cache
def accepted(line: str) -> dict[str, Any]:
    """Run a valid line, and return the config of its job and the variables that the job finds.

    The words are those of a script that calls `gptrain.config.main`.
    """
    place, found = new_place(), {}
    typed = shlex.split(line)
    words = [word for word in typed if not VARIABLE.fullmatch(word)]
    words = ["model=gpt_nano", "trainer.accelerator=cpu", f"output_dir={place}", *words]
    variables = dict(word.split("=", 1) for word in typed if VARIABLE.fullmatch(word))

    def job(cfg: Any) -> None:
        changed = {k: v for k, v in os.environ.items() if before.get(k) != v}
        found.update(flat(cfg.model_dump()), **changed)

    here = os.getcwd()
    os.chdir(planted())
    with pytest.raises(SystemExit) as left, redirected(place), patch.dict(os.environ, variables):
        del os.environ["GPTRAIN_CONF"]
        before = dict(os.environ)
        with patch.object(sys, "argv", ["train.py", *words]):
            config.main(job, conf=ROOT / "conf")
    os.chdir(here)
    assert (left.value.code or 0, (place / "err").read_text()) == (0, "")
    texts = {key: masked(masked(f"{value}", place), planted()) for key, value in found.items()}
    return {key: re.sub(r"\d{4}-\d\d-\d\d_\S+", "<time>", text) for key, text in texts.items()}


def changed(line: str) -> dict[str, str]:
    """Return what a line changes of that which the job of an empty line finds."""
    known, found = accepted("") if line else {}, accepted(line)
    gone = {f"~{key}": "" for key in known.keys() - found.keys()}
    return {key: text for key, text in found.items() if known.get(key) != text} | gone


@pytest.mark.parametrize("line", TABLE["accepted"])
def test_what_is_valid_is_accepted(line):
    known = json.loads((GOLDEN / "accepted.json").read_text())
    assert changed(line) == known.get(line) or os.environ.get(WRITE)


def test_what_jobs_find_is_that_of_the_golden_file():
    check("accepted.json", as_lines({line: changed(line) for line in TABLE["accepted"]}, depth=2))


def test_the_texts_are_those_of_the_golden_file():
    lines = [*TABLE["before"], *(f"{RUN} {line}" for line in TABLE["begun"])]
    lines += map(values_line, range(N_COMMANDS))
    check("refused.txt", "\n\n".join(map(text_of, lines)))
