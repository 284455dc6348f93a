"""What is refused: the exit code and the key of each line are in refused.yaml.

The form of a refusal is asserted here, for all rows. The texts are in tests/golden/refused.txt.
"""

from __future__ import annotations

import os
import shlex
import sys
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from gptrain import config
from tests.golden import check, masked
from tests.refused.commands import RUN, Answer, answer, planted
from tests.run import ROOT, new_place, redirected

TABLE = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
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


def check_form(answer: Answer) -> None:
    """Check that each problem is one line, printed once, without a traceback."""
    for line in answer.err:
        assert line.startswith(("error: ", "warning: ")) and line.isprintable(), answer.err
    assert len(set(answer.err)) == len(answer.err)


@pytest.mark.parametrize("line", TABLE["before"])
def test_what_is_refused_writes_nothing_and_is_a_line_for_each_problem(line):
    answer = answer_of(line)
    assert " ".join([str(answer.code), *answer.keys()]) == str(TABLE["before"][line]), answer.err
    check_form(answer)
    assert (answer.out, answer.written) == ([], [])


@pytest.mark.parametrize("line", TABLE["begun"])
def test_a_run_that_cannot_go_on_has_no_result_and_is_a_line_for_each_problem(line):
    answer = answer_of(f"{RUN} {line}")
    assert " ".join([str(answer.code), *answer.keys()]) == str(TABLE["begun"][line]), answer.err
    check_form(answer)
    assert not [name for name in answer.written if name.endswith("result.json")]


@pytest.mark.parametrize("number", range(N_COMMANDS))
def test_a_value_of_none_of_its_keys_forms_is_refused_with_all_others(number):
    answer = answer_of(values_line(number))
    keys = [key.rpartition(".")[2] for key in VALUES if number < len(VALUES[key])]
    assert answer.code == 2 and set(answer.keys()) >= set(keys), answer.err
    check_form(answer)
    assert (answer.out, answer.written) == ([], [])


@pytest.mark.parametrize("line", TABLE["accepted"])
def test_what_is_valid_is_accepted(line, monkeypatch):
    """The job does nothing. The words are those of a script that calls `gptrain.config.main`."""
    place = new_place()
    words = ["model=gpt_nano", "trainer.accelerator=cpu", f"output_dir={place}", *line.split()]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(SystemExit) as left, redirected(place), patch.dict(os.environ):
        config.main(lambda cfg: None, conf=ROOT / "conf")
    ended = Answer(left.value.code or 0, [], (place / "err").read_text().splitlines(), [])
    assert (ended.code, ended.err) == (0, [])


def test_the_texts_are_those_of_the_golden_file():
    lines = [*TABLE["before"], *(f"{RUN} {line}" for line in TABLE["begun"])]
    lines += map(values_line, range(N_COMMANDS))
    parts = []
    for line in lines:
        short = line.replace(RUN, "RUN")
        parts += ["$ " + short.replace("\r", "\\r"), *answer_of(line).err, ""]
    check("refused.txt", masked("\n".join(parts), planted()))
