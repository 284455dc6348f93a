"""The collectives on real processes: what each rank gets, what is measured, what is kept of it."""

from __future__ import annotations

import json
import re
import runpy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forked import forked_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from gptrain.collectives import operations
from gptrain.collectives.command import (
    DEFAULTS,
    CollectivesRun,
    default_devices,
    main,
    run_rank,
)
from gptrain.config.cli import run_command
from gptrain.plan import measure as measurement
from gptrain.plan.__main__ import measure
from tests.command_line import compose_run


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


def check_pictures(text: str, n_ranks: int, n_pictures: int = 8) -> None:
    given = torch.tensor([[10 * rank + row for row in range(n_ranks)] for rank in range(n_ranks)])
    pictures = re.findall(r"^(\w+)\n((?:  rank .*\n)+)", text, re.MULTILINE)
    assert len(pictures) == n_pictures
    for name, lines in pictures:
        after = [line.partition("->")[2].strip(" []") for line in lines.splitlines()]
        words = ["-" if got is None else got.tolist() for got in expected(name, given)]
        assert [a if a == "-" else list(map(int, a.split())) for a in after] == words, name


def command_line() -> None:
    """Run `python -m gptrain.collectives` in this process."""
    runpy.run_module("gptrain.collectives", run_name="__main__")


@pytest.mark.slow  # the fast tests run its parts in one process
def test_each_rank_gets_the_collectives_result_and_sends_the_same_bytes_in_a_ring(typed, tmp_path):
    """The buffer of the last comparison has 8 MiB."""
    words = (f"run_dir='{tmp_path}/run #4%41'", "--explain", "trainer.accelerator=cpu")
    words += ("max_bytes=8388608",)
    with forked_ranks(tmp_path / "out", tmp_path / "err"):
        code, _, _ = typed(command_line, *words, "trainer.devices=4")
    assert code == 0, (tmp_path / "err").read_text()
    text = (tmp_path / "out").read_text()
    assert text.startswith("gloo, 4 ranks; the root is rank 0\n")
    assert "\nall-reduce of 8.0 MiB " in text
    assert "rank 0 sends n - 1 buffers" in text and "\n2(n - 1)/n buffers, all ranks" in text
    check_pictures(text, 4)
    # The ranks used this folder as their rendezvous.
    assert not list((tmp_path / "run #4%41" / ".beats").iterdir())
    # Of a buffer of S: (n - 1) S from rank 0 and S from each other; 2 (n - 1) / n S from each.
    sent = {
        name.strip(): (float(root), float(other))
        for name, root, other in re.findall(r"^(.{21})\s*([\d.]+) MiB\s+([\d.]+) MiB", text, re.M)
    }
    assert sent == {"through rank 0": (24.0, 8.0), "around a ring": (12.0, 12.0)}


def test_the_help_explains_the_command_and_the_smallest_buffer_has_64_kib(typed):
    code, out, _ = typed(main, "--explain", "--help")
    assert code == 0 and out.startswith("Run the eight collectives between processes")
    code, _, err = typed(main, "max_bytes=65535")
    assert code == 2 and "max_bytes=65535" in err and "65536" in err
    assert "(16 MiB)" in out and DEFAULTS == {"max_bytes": 16 * 2**20}
    readme = Path(operations.__file__).with_name("README.md").read_text()
    check_pictures(re.sub("^    ", "", readme, flags=re.MULTILINE), 2, 1)


def test_a_rank_has_the_threads_backend_and_time_limit_of_a_run(monkeypatch, tmp_path):
    class GroupMade(Exception):
        pass

    def start_group(*place):
        raise GroupMade(*place)

    threads = []
    monkeypatch.setattr(operations, "set_threads", threads.append)
    monkeypatch.setattr(operations, "start_group", start_group)
    words = ("trainer.accelerator=cpu", "trainer.devices=3", "strategy.timeout_s=5")
    words += ("strategy=ddp", f"run_dir={tmp_path}")
    for backend, word in (("gloo", "null"), ("mpi", "mpi")):
        cfg = compose_run(*words, f"strategy.backend={word}")
        with pytest.raises(GroupMade) as made, operations.process_group(cfg):
            pass
        assert made.value.args == (backend, torch.device("cpu"), 0, 3, 5.0, None, ())
    assert threads == [3, 3]
    monkeypatch.delenv("RANK", raising=False)
    assert default_devices() == "trainer.devices=2"
    monkeypatch.setenv("RANK", "0")
    assert default_devices() == "trainer.devices=auto"


def test_the_command_names_its_phases_and_a_wrong_all_reduce(monkeypatch):
    phases, explained, compared = [], [], []
    guard = SimpleNamespace(heartbeat=SimpleNamespace(beat=lambda phase: phases.append(phase)))
    cpu = torch.device("cpu")
    monkeypatch.setattr(operations, "process_group", lambda cfg: nullcontext(cpu))
    monkeypatch.setattr(operations, "explain", lambda *words: explained.append(words))
    compare_all_reduces = operations.compare_all_reduces
    monkeypatch.setattr(operations, "compare_all_reduces", lambda *words: compared.append(words))
    assert run_rank(SimpleNamespace(max_bytes=65537), guard) == {}
    assert phases == [*operations.COLLECTIVES] and compared == [(cpu, 65537)]
    assert explained == [(name, cpu) for name in phases]
    monkeypatch.setattr(operations, "gather", lambda value: [value])
    monkeypatch.setattr(operations, "all_reduce_by_center", lambda buffer: 0)
    monkeypatch.setattr(operations, "all_reduce_by_ring", lambda buffer: int(buffer.add_(1)[0, 0]))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        with pytest.raises(RuntimeError, match=r"around a ring differs .* on rank 1$"):
            compare_all_reduces(cpu, 65536)
    finally:
        dist.destroy_process_group()


def test_the_time_of_a_call_is_the_median_of_the_slowest_rank_without_the_first_batch(monkeypatch):
    """The other rank takes three times as long. Waiting for a GPU takes 6 s in each batch."""
    now = SimpleNamespace(s=0.0)
    seconds = iter(duration for batch in (100, 2, 9, 4, 5, 7) for duration in 3 * [batch])

    def advance(by_s):
        now.s += by_s

    monkeypatch.setattr(operations, "time", SimpleNamespace(perf_counter=lambda: now.s))
    monkeypatch.setattr(dist, "barrier", lambda: advance(1000.0))
    monkeypatch.setattr(operations, "wait_for", lambda device: advance(6.0))
    monkeypatch.setattr(operations, "gather", lambda value: [value, 3 * value])
    measured = operations.time_calls(lambda: advance(next(seconds)), torch.device("cpu"), 3)
    assert measured == 3 * (5 + 6 / 3)


@pytest.mark.slow
def test_under_torchrun_only_rank_0_prints(command, tmp_path):
    words = ["-m", "gptrain.collectives", "trainer.accelerator=cpu"]
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
    done = command(*torchrun, *words, "max_bytes=65536", f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    check_pictures(done.stdout, 2)
    assert (tmp_path / "run").is_dir()  # the other words are not lost


# Bus bandwidth of three ranks, relative to the bytes of a rank's buffer per second.
FACTORS = {"broadcast": 1, "reduce": 1, "all_reduce": 4 / 3} | dict.fromkeys(
    ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), 2 / 3
)


@pytest.mark.slow
def test_bus_bandwidth_is_that_of_nccl_tests_and_the_result_is_kept(tmp_path):
    (tmp_path / "machine.json").write_text("{}")  # damaged
    for n_ranks in (2, 3):
        out = tmp_path / f"out-{n_ranks}"
        words = ["trainer.accelerator=cpu", f"trainer.devices={n_ranks}", "max_bytes=65536",
                 f"output_dir={tmp_path}", f"run_dir={tmp_path}/run-{n_ranks}"]  # fmt: skip
        with forked_ranks(out, tmp_path / "err"):
            code = run_command(measure, words, CollectivesRun, DEFAULTS)
        assert code == 0, (tmp_path / "err").read_text()
    text = out.read_text()
    tables = dict(re.findall(r"^(\w+) +bytes .*\n((?: +\d+ .*\n)+)", text, re.MULTILINE))
    assert len(tables) == 8
    for name, factor in FACTORS.items():
        for row in tables[name].splitlines():
            n_bytes, micros, algorithm, bus = map(float, row.split())
            assert algorithm == pytest.approx(n_bytes / micros / 1e3, rel=0.01, abs=1e-3)
            assert bus == pytest.approx(factor * algorithm, abs=2e-3)  # three decimals
    facts = json.loads((tmp_path / "machine.json").read_text())
    assert facts.keys() == {
        "threads", "flops_per_s", "memory_bytes_per_s", "op_s", "links"
    }  # fmt: skip
    assert facts["flops_per_s"].keys() == {"float32", "bfloat16"}
    assert 1e8 < facts["memory_bytes_per_s"] < 1e13 and 1e-8 < facts["op_s"] < 1e-2
    assert facts["links"]["gloo"].keys() == {"2", "3"}  # the second run kept the first's
    for link in facts["links"]["gloo"].values():
        assert link["latency_s"] > 0 and link["bytes_per_s"] > 0
        assert 0 <= link["wait_s"] < 1


def test_a_measurement_has_the_bandwidths_of_nccl_tests_and_of_all_ranks_memory(
    tmp_path, monkeypatch, capsys
):
    """Every call takes 1 ms here. Each of three ranks reads and writes 2^18 fp32 values in a pass.

    A ring all-reduce of three ranks has four messages.
    """
    phases, timed = [], []
    guard = SimpleNamespace(heartbeat=SimpleNamespace(beat=lambda phase: phases.append(phase)))
    cpu = torch.device("cpu")

    def time_calls(call, device, n_calls, *_):
        timed.append(n_calls)
        return 1e-3

    monkeypatch.setattr(measurement, "process_group", lambda cfg: nullcontext(cpu))
    monkeypatch.setattr(measurement, "time_calls", time_calls)
    monkeypatch.setattr(measurement, "measure_matmul", lambda *_: 1e9)
    monkeypatch.setattr(measurement, "gather", lambda value: [value, value / 2, value])
    cfg = SimpleNamespace(max_bytes=2**20, output_dir=str(tmp_path / "output"))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        assert measurement.measure(cfg, guard) == {}
        seconds = iter((1e-3, 5e-3, 8e-3))  # sending, computing, and both
        monkeypatch.setattr(measurement, "time_calls", lambda *_: next(seconds))
        link = measurement.measure_link([(4096, 1e-5), (65536, 2e-5), (2**20, 5e-5)], cpu)
    finally:
        dist.destroy_process_group()
    out = capsys.readouterr().out
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(measurement, "time_calls", time_calls)
        measurement.sweep("reduce", torch.device("meta"), 2**28)
        measurement.write_speeds([(4096, 1e-5)], cpu, tmp_path / "machine.json")
    finally:
        dist.destroy_process_group()
    alone = json.loads((tmp_path / "machine.json").read_text())
    assert alone["links"] == {"fake": {}}  # a single rank has no link
    assert phases == list(operations.COLLECTIVES)
    tables = dict(re.findall(r"^(\w+) +bytes .*\n((?: +\d+ .*\n)+)", out, re.MULTILINE))
    assert tables.keys() == FACTORS.keys()
    for name, factor in FACTORS.items():
        rows = [list(map(float, row.split())) for row in tables[name].splitlines()]
        # Three rows of fp32 values are at most 4 KiB, 64 KiB and 1 MiB.
        assert [row[0] for row in rows] == [4092, 65532, 1048572]
        for n_bytes, micros, algorithm, bus in rows:
            assert micros == 1000.0
            assert algorithm == pytest.approx(n_bytes / 1e6, abs=1e-3)
            assert bus == pytest.approx(factor * n_bytes / 1e6, abs=1e-3)
    assert timed[:3] == [20, 20, 16]  # calls of at most 16 MiB in all, but at least one call
    assert timed[-7:-2] == [20, 20, 16, 1, 1]
    path = tmp_path / "output" / "machine.json"
    assert f"kept in {path}" in out
    facts = json.loads(path.read_text())
    assert facts["flops_per_s"] == {"float32": 5e8, "bfloat16": 5e8}  # of the slowest rank
    assert facts["memory_bytes_per_s"] == pytest.approx(3 * 2 * 4 * 2**18 / 1e-3)
    assert facts["op_s"] == 1e-3 and facts["threads"] == torch.get_num_threads()
    assert facts["links"].keys() == {"fake"} and facts["links"]["fake"].keys() == {"3"}
    assert link["latency_s"] == pytest.approx(1e-3 / 4)
    assert link["bytes_per_s"] == pytest.approx(4 / 3 * (2**20 - 4096) / 4e-5)
    assert link["wait_s"] == pytest.approx(2e-3)


@pytest.mark.gpu
def test_nccl_gives_every_rank_the_same(command, tmp_path):
    n_ranks = torch.cuda.device_count()
    if n_ranks < 2:
        pytest.skip("one GPU has nobody to talk to")
    words = ["--explain", "trainer=gpu", f"trainer.devices={n_ranks}", f"output_dir={tmp_path}"]
    done = command("-m", "gptrain.collectives", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"nccl, {n_ranks} ranks")
    check_pictures(done.stdout, n_ranks)
