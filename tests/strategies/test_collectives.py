"""python -m gptrain.collectives on real processes: what each rank gets, and a wrong sum."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gptrain import collectives
from tests.strategies.ranks import on_ranks

ROOT = Path(__file__).parents[2]


def expected(name: str, given: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the result of a collective on each rank, computed with indexing and sums only.

    Args:
        name: Name of the collective.
        given: Input of the ranks, of shape (n, n). Row r is the input of rank r.
    """
    n_ranks = len(given)
    on_root = lambda rows: [rows] + [None] * (n_ranks - 1)  # noqa: E731
    return {
        "broadcast": [given[0]] * n_ranks,
        "reduce": on_root(given.sum(0)),
        "all_reduce": [given.sum(0)] * n_ranks,
        "scatter": list(given[0].split(1)),
        "gather": on_root(given[:, 0]),
        "all_gather": [given[:, 0]] * n_ranks,
        "reduce_scatter": list(given.sum(0).split(1)),
        "all_to_all": list(given.T),
    }[name]


def check_pictures(text: str, n_ranks: int) -> None:
    given = torch.tensor([[10 * rank + row for row in range(n_ranks)] for rank in range(n_ranks)])
    pictures = re.findall(r"^(\w+)\n((?:  rank .*\n)+)", text, re.MULTILINE)
    assert len(pictures) == 8
    for name, lines in pictures:
        after = [line.partition("->")[2].strip(" []") for line in lines.splitlines()]
        words = ["-" if got is None else got.tolist() for got in expected(name, given)]
        assert [a if a == "-" else list(map(int, a.split())) for a in after] == words, name
    assert re.findall(r"^(through rank 0|around a ring|gloo|nccl) +[\d.]+ +[\d.]+$", text, re.M)


@on_ranks(3)
def test_each_rank_gets_the_result_and_a_wrong_sum_is_an_error():
    with redirect_stdout(io.StringIO()) as out:
        collectives.run_rank(dist.get_rank(), False, 2**16)
    if dist.get_rank() == 0:
        assert out.getvalue().startswith("gloo, 3 ranks; the root is rank 0\n")
        check_pictures(out.getvalue(), 3)
    with (
        patch.object(collectives, "reduce_by_ring", lambda buffer: buffer.zero_()),
        pytest.raises(RuntimeError, match=f"around a ring: wrong result on rank {dist.get_rank()}"),
        redirect_stdout(io.StringIO()),
    ):
        collectives.compare_all_reduces(torch.device("cpu"), 2**16)


@pytest.mark.gpu
def test_nccl_gives_every_rank_the_same():
    n_ranks = torch.cuda.device_count()
    if n_ranks < 2:
        pytest.skip("one GPU has nobody to talk to")
    words = ["-m", "gptrain.collectives", f"trainer.devices={n_ranks}"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"nccl, {n_ranks} ranks")
    check_pictures(done.stdout, n_ranks)
