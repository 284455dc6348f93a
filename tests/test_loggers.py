"""Curves: several at once, and one line through a resume, without doubled points."""

from __future__ import annotations

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gptrain.checkpoints.lock import read_run_id
from gptrain.lit.loggers import JsonLinesLogger

EVERY_STEP = ("trainer.log_every_n_steps=1", "trainer.val_check_interval=2")


def json_rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder, name: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def wandb_records(file) -> list:
    """Return the records of a .wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(file))
    return [Record.FromString(data) for data in iter(store.scan_data, None)]


def test_a_resumed_run_continues_the_curves_of_two_loggers_without_duplicates(train):
    def curves(folder) -> tuple:
        logged = ("train/loss", "val/loss", "lr", "tokens", "grad_norm")
        objects = [[row.get(key) for key in ("step", *logged)] for row in json_rows(folder)]
        # A resumed run repeats the validation of its first step, with the same values.
        validated = sorted({*events(folder, "val/loss")})
        return objects, events(folder, "train/loss"), validated

    options = ("logger=[tensorboard,csv]", *EVERY_STEP, "trainer.max_steps=6")
    run = train(*options)
    assert run.code == 0, run.err
    whole = objects, losses, validated = curves(run.folder)
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in validated] == [2, 4, 6]
    assert [row[1] for row in objects] == pytest.approx([loss for _, loss in losses])
    run.cut_back(4)  # the logged values reach beyond the newest checkpoint
    again = train(*options, "ckpt_path=last")
    assert again.code == 0, again.err
    assert curves(run.folder) == whole
    # Lightning's CSVLogger, which cannot continue a file, writes one for each start.
    files = sorted(path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*.csv"))
    assert files == ["csv/version_0/metrics.csv", "csv/version_1/metrics.csv"]


def test_metrics_jsonl_has_one_object_per_step_after_a_crash(tmp_path):
    logger = JsonLinesLogger(str(tmp_path))
    for step in (1, 2, 3):
        logger.log_metrics({"train/loss": 1 / step, "perf/step_s": float("nan")}, step)
    logger.log_metrics({"val/loss": 0.25}, 3)
    logger.log_metrics({"train/loss": 0.25}, 4)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"step": 5, "tr')
    again = JsonLinesLogger(str(tmp_path))
    again.discard_after(4)
    again.log_metrics({"train/loss": 0.2}, 5)
    rows = json_rows(tmp_path)
    assert [(row["step"], row["train/loss"], row.get("val/loss")) for row in rows] == [
        (1, 1.0, None), (2, 0.5, None), (3, 1 / 3, 0.25), (4, 0.25, None), (5, 0.2, None)
    ]  # fmt: skip
    assert rows[0]["perf/step_s"] is None
    JsonLinesLogger(str(tmp_path)).discard_after(2)
    assert [row["step"] for row in json_rows(tmp_path)] == [1, 2]
    outside = file.rename(tmp_path / "outside.jsonl")
    file.symlink_to(outside)
    JsonLinesLogger(str(tmp_path)).log_metrics({"train/loss": 1.0}, 3)
    assert not file.is_symlink() and len(outside.read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.engine("wandb")
def test_wandb_resumes_the_run_of_the_folder(train, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = ("logger=wandb", "logger.wandb.project=mine", *EVERY_STEP, "scheduler=constant")
    run = train(*options, "trainer.max_steps=2")
    assert run.code == 0, run.err
    again = train(*options, "trainer.max_steps=4", "ckpt_path=last")
    assert again.code == 0, again.err
    assert wandb.run is None  # closed: the next job of a sweep opens its own
    run_id = read_run_id(run.folder)
    files = sorted(run.folder.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    steps = []
    for file in files:
        records = wandb_records(file)
        assert [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [0]
        (begun,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
        assert begun.project == "mine"
        for record in records:
            items = {item.nested_key[0]: item.value_json for item in record.history.item}
            if "train/loss" in items:
                steps.append(int(items["trainer/global_step"]))
    assert steps == [1, 2, 3, 4]
