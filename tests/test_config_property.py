"""Random mutations of valid commands: they may run, or are refused by clean lines; nothing else."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptrain.config import compose_command
from gptrain.config.compose import plain
from gptrain.core.small_files import flatten
from tests.command_line import answer

VALID = [
    ["model=gpt_nano"],
    ["model=gpt_nano", "data=text", "optimizer=muon"],
    ["model=gpt_nano", "strategy=fsdp", "trainer.devices=2"],
    ["experiment=quickstart", "scheduler=warmup_stable_decay"],
    ["model=gpt_nano", "checkpoint=every_n_steps", "trainer.max_steps=10"],
    ["model=gpt_nano", "strategy=pipeline", "trainer.devices=2", "data.batch_size=4"],
]
CODES = {0, 2, 65, 66, 73}
numbers = st.one_of(
    st.integers(-3, 40).map(str),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["1e-3", "-0.0", "1e308", "2**31", "0x10", "1_000", "9" * 30]),
)
words = st.one_of(
    st.sampled_from(["null", "true", "[]", "{}", "[1,2]", "{a:1}", "???", "''", "${seed}", "${x}"]),
    st.sampled_from(["none", "auto", "best", "ddp", "gpu", "16-mixed", "bf16", "every_n_steps"]),
    st.text(max_size=8),
    st.text(max_size=8).map(lambda text: f"'{text}'"),
)


@cache
def keys() -> list[str]:
    """Return the config keys of all commands in VALID."""
    names = set()
    for command in VALID:
        flat = flatten(plain(compose_command(command)))
        names |= {*flat, *(key.rpartition(".")[0] for key in flat)} - {""}
    return sorted(names)


@st.composite
def commands(draw: st.DrawFn) -> list[str]:
    """A valid command with one to three mutations."""
    command = list(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(keys()))
        kind = draw(st.sampled_from(["retype", "drop", "misspell", "add", "nest"]))
        value = draw(st.one_of(numbers, words))
        if kind == "misspell":
            place = draw(st.integers(0, len(key) - 1))
            key = key[:place] + draw(st.characters(categories=["L", "N", "P"])) + key[place + 1 :]
        if kind == "nest":
            key = f"{key}.{draw(st.sampled_from(['x', 'name', '0']))}"
        command.append({"drop": f"~{key}", "add": f"+{key}={value}"}.get(kind, f"{key}={value}"))
    return command


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(commands())
def test_a_mutated_command_is_accepted_or_refused_by_clean_lines(command):
    outputs = Path(os.environ["GPTRAIN_OUTPUT_DIR"])
    code, lines = answer(*(word for word in command if not word.startswith("-")))
    assert code in CODES, lines
    assert bool(code) == any(line.startswith("error: ") for line in lines)
    for line in lines:
        assert line.startswith(("error: ", "warning: ")) and line.isprintable(), line
        assert len(line) < 2000
    assert len(set(lines)) == len(lines)
    assert not [path for path in outputs.rglob("*") if path.is_file()]
