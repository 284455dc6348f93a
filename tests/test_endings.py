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
    ending_of,
)


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
