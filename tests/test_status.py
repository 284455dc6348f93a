"""status.json: the first failing rank writes the cause."""

import json
import multiprocessing
import os
import socket

import pytest

from gptrain.checkpoints.status import clear_status, read_status, write_result, write_status

FORK = multiprocessing.get_context("fork")


def test_the_first_rank_that_fails_tells(tmp_path):
    facts = {"cause": "error", "exit_code": 70, "rank": 1, "step": 12, "message": "the reason"}
    assert write_status(tmp_path, checkpoint=tmp_path / "step-00000010", **facts)
    assert not write_status(tmp_path, cause="error", exit_code=70, rank=0, message="lost a peer")
    about = {"checkpoint": f"{tmp_path}/step-00000010", "pid": os.getpid()}
    about["host"] = socket.gethostname()
    assert read_status(tmp_path).items() >= (facts | about).items()
    assert os.listdir(tmp_path) == ["status.json"]  # no temporary files


def test_a_rank_that_fails_when_another_is_done_is_heard_and_the_parent_last(tmp_path):
    write_status(tmp_path, cause="preempted", exit_code=75)
    clear_status(tmp_path)
    assert write_status(tmp_path, cause="done", exit_code=0, rank=0)
    assert write_status(tmp_path, cause="error", exit_code=70, rank=1)
    assert not write_status(tmp_path, cause="done", exit_code=0, rank=0)
    assert read_status(tmp_path)["rank"] == 1
    assert write_status(tmp_path, cause="killed", exit_code=70, rank=2, replace=True)
    assert read_status(tmp_path)["rank"] == 2


def _fail(run_dir, rank, start, answers):
    start.wait()
    answers.put((rank, write_status(run_dir, cause="error", exit_code=70, rank=rank)))


def test_exactly_one_of_several_failing_ranks_writes_the_status(tmp_path):
    start, answers = FORK.Event(), FORK.Queue()
    ranks = [FORK.Process(target=_fail, args=(tmp_path, r, start, answers)) for r in range(8)]
    for rank in ranks:
        rank.start()
    start.set()
    first = [rank for rank, won in (answers.get(timeout=60) for _ in ranks) if won]
    for rank in ranks:
        rank.join()
    assert first == [read_status(tmp_path)["rank"]]


@pytest.mark.parametrize("text", ["", "[]", '{"exit_code": "x"}'])
def test_an_invalid_status_file_is_ignored(tmp_path, text):
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None
    with pytest.raises(OSError):  # a status that cannot be written is an error
        write_status(tmp_path / "missing", cause="done", exit_code=0)


def test_a_result_is_plain_json_also_when_a_metric_is_not_finite(tmp_path):
    metrics, facts = {"val/loss": 1.5, "test/loss": float("nan")}, {"steps": 60, "tokens": 1920}
    for _ in range(2):  # a resumed run writes its result over the old one
        write_result(tmp_path / "result.json", metrics, **facts)
    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert result == {"metrics": {"val/loss": 1.5, "test/loss": None}, **facts}
    assert os.listdir(tmp_path) == ["result.json"]
