"""The exit code and the line of an exception."""

from __future__ import annotations

import errno

import pytest

from gptrain.checkpoints.files import SaveFailedError
from gptrain.checkpoints.status import (
    NonFiniteError,
    PreemptedError,
)
from gptrain.checkpoints.store import DamagedCheckpointError
from gptrain.checkpoints.tensors import UnsafeCheckpointError
from gptrain.core.errors import (
    ConfigError,
    ConfigIssue,
    code_of,
    ending_of,
    first_line,
    show,
)
from gptrain.data import DataError


@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [
        (PreemptedError(5), 75, "preempted"),
        (NonFiniteError("step 3 is not finite", 3), 79, "nonfinite"),
        (ConfigError([ConfigIssue("a", 1, "wrong")]), 2, "config"),
        (ConfigError([ConfigIssue("a", 1, "gone", code=66)]), 66, "config"),
        (
            ConfigError([ConfigIssue("a", 1, "gone", code=66), ConfigIssue("a", 1, "gone")]),
            2,
            "config",
        ),
        (DamagedCheckpointError("step-1", "state.ckpt is missing"), 65, "data"),
        (UnsafeCheckpointError("step-1", "contains os.system"), 65, "data"),
        (SaveFailedError(errno.ENOSPC, "checkpoints", 3), 74, "disk"),
        (SaveFailedError(errno.EROFS, "checkpoints", 3), 73, "disk"),
        (OSError(errno.ENOENT, "refused", "/some/file"), 70, "error"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), 70, "peer"),
    ],
)
def test_every_exception_has_an_exit_code_and_one_line(error, code, cause):
    ending = ending_of(error, doing="step 7")
    assert (ending.code, ending.cause) == (code, cause)
    assert ending.line and "\n" not in ending.line
    assert bool(ending.trace) == (cause in ("error", "memory"))
    assert ("at step 7" in ending.line) == (cause == "error")
    expected_rank = {SaveFailedError: 3}.get(type(error))
    assert ending.rank == expected_rank


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PreemptedError(5), "asked to stop: saved at step 5"),
        (PreemptedError(0), "asked to stop: saved at step 0"),
        (PreemptedError(), "asked to stop: there was nothing to save"),
        (DataError("a.txt: empty"), "error: a.txt: empty"),
        (OSError(errno.EIO, "x", "f"), "error: OSError: [Errno 5] x: 'f'"),
        (ModuleNotFoundError("no wandb", name="wandb"), "error: no wandb; try: pip install wandb"),
        (ModuleNotFoundError("needs pyarrow"), "error: needs pyarrow"),
        (RuntimeError("Timed out waiting 9ms"), "error: a collective timed out: Timed out waiting"),
        (RuntimeError("Connection closed by peer"), "error: another rank has exited: Connection "),
        (ValueError("wrong"), "error: ValueError: wrong; at step 7"),
    ],
)
def test_the_line_of_an_exception_says_what_happened_and_what_to_try(error, line):
    assert ending_of(error, doing="step 7").line.startswith(line)
    assert code_of(OSError("without a number")) == 70


def test_the_first_line_of_an_error_leaves_out_values_of_tensors_and_the_traceback_of_a_worker():
    in_worker = "Caught ValueError in DataLoader worker process 0.\nTraceback\na.ValueError: broken"
    for message, line in (
        ("not in tensor([1, (2)]): a\nb", "not in tensor(…): a"), ("a:\n\n b\nc", "a: b"),
        (" \n a\nb", "a"), ("", "ValueError"), (in_worker, "broken"),
    ):  # fmt: skip
        assert first_line(ValueError(message)) == line


def test_a_problem_that_was_found_twice_is_one_line():
    gone, wrong = ConfigIssue("a", 1, "gone"), ConfigIssue("a", 1, "wrong")
    assert ConfigError([gone, wrong, gone]).lines == ["error: a=1: gone", "error: a=1: wrong"]


def test_a_value_is_shown_as_it_is_typed_and_a_long_one_is_cut():
    assert show([True, None, {"a": 1.5}]) == "[true,null,{a:1.5}]"
    assert [show("x" * n) for n in (200, 201)] == ["x" * 200, "x" * 200 + "..."]


def test_an_error_of_the_memory_of_a_gpu_ends_with_what_is_free():
    needs = "Tried to allocate 12.49 GiB. GPU 0 has a total capacity of 139.80 GiB of which 9.8 GiB"
    others = "Process 462 has 920.00 MiB memory in use. If reserved memory is large try setting …"
    error = RuntimeError(f"CUDA out of memory. {needs} is free. {others}")
    assert ending_of(error).line == f"error: out of memory: {needs} is free"
