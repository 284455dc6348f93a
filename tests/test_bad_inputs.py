"""The catalogue of wrong inputs: each is one line that names key, value and a way out."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from command_line import accepted, answer, refused

from gptrain.config.checks.machine import check_visible
from gptrain.config.checks.run import Run
from gptrain.config.checks.versions import judge_versions
from gptrain.config.cli import compose_command
from gptrain.resilience.lock import RunLock
from gptrain.resilience.store import CheckpointStore

NANO = ("model=gpt_nano", "trainer.accelerator=cpu")

# Words -> pieces that the one line must hold.
ONE_LINE = {
    "trainer.devices=0": ["trainer.devices=0", "at least 1", "trainer.devices=1"],
    "trainer.devices=two": ["trainer.devices=two", "not a number", '"auto"'],
    "strategy=ddpp": ["strategy=ddpp", 'did you mean "ddp"', "auto, ddp", "fsdp"],
    "trainer.precision=fp12": [
        "trainer.precision=fp12",
        "32-true, bf16-mixed, 16-mixed, bf16-true",
    ],
    "trainer.precision=16-mixed trainer.accelerator=cpu": ["16-mixed", "on CPU", "bf16-mixed"],
    "strategy.tensor_parallel_size=4 model.n_heads=6 model.d_model=510": [
        "strategy.tensor_parallel_size=4",
        "model.n_heads=6",
        "1, 2, 3, 6",
    ],
    "optimizer.lr=-1e-3": ["optimizer.lr=-0.001", "must be > 0"],
    "scheduler.warmup_steps=2000 scheduler.total_steps=1000": [
        "scheduler.warmup_steps=2000",
        "<= scheduler.total_steps=1000",
    ],
    "optimizer.weight_decay=-0.1": ["optimizer.weight_decay=-0.1", ">= 0"],
    "optimizer.name=adamz": ["optimizer.name=adamz", 'did you mean "adamw"', "optimizer=adamw"],
    "trainer.max_steps=-5": ["trainer.max_steps=-5", ">= 1, or -1", "trainer.max_time"],
    "trainer.max_epochs=null": ["no stop condition", "trainer.max_steps", "trainer.max_time"],
    "trainer.gradient_clip_val=0": ["trainer.gradient_clip_val=0", "> 0, or null for off"],
    "trainer.gradient_clip_val=-1": ["trainer.gradient_clip_val=-1", "> 0, or null for off"],
    "model.d_model=100 model.n_heads=3": ["model.d_model=100", "model.n_heads=3", "99, 102"],
    "data.seq_len=4096 model.max_seq_len=1024": ["data.seq_len=4096", "model.max_seq_len=1024"],
    "model.dropout=1.5": ["model.dropout=1.5", "[0, 1)"],
    "model.vocab_size=9223372036854775808": ["model.vocab_size=9223372036854775808", "2^31-1"],
    "data.batch_size=0": ["data.batch_size=0", ">= 1"],
    "ckpt_path=https://example.com/x.ckpt": ["ckpt_path=https://", "remote", "local path"],
    "modell.d_model=1": ["modell.d_model", "did you mean model.d_model?"],
    "model=gptx": ["model=gptx", "gpt_nano", "simple_gpt"],
    "data=text data.path=???": ["data.path", "required and not set"],
    "model._target_=os.system": ["model._target_=os.system", "allowed"],
    "seed=-1": ["seed=-1", "0 .. 4294967295"],
    "seed=18446744073709551616": ["seed=18446744073709551616", "0 .. 4294967295"],
    "logger=tensorbord": ["logger=tensorbord", 'did you mean "tensorboard"'],
}


@pytest.mark.parametrize("words", ONE_LINE)
def test_a_wrong_input_is_one_line_with_key_value_and_way_out(words):
    (line,) = refused(*words.split())
    assert all(piece in line for piece in ONE_LINE[words]), line


@pytest.mark.parametrize("devices, right", [("8", False), ("[0,2]", False), ("2", True)])
def test_more_gpus_than_visible_names_how_many_and_the_variable(devices, right):
    run = Run.of(compose_command([f"trainer.devices={devices}"]))
    check_visible(run, visible=2, shown="0,1")
    assert bool(run.problems) != right
    for problem in run.problems:
        assert f"trainer.devices={devices}" in problem.line
        assert "only 2 GPUs visible (CUDA_VISIBLE_DEVICES=0,1)" in problem.line


def test_a_rank_may_see_its_own_gpu_alone():
    for devices in ("4", "[0,2]"):
        run = Run.of(compose_command([f"trainer.devices={devices}"]))
        check_visible(run, visible=1, shown="3", is_rank=True)
        assert not run.problems
        check_visible(run, visible=1, shown="3", is_rank=False)
        assert run.problems


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    (line,) = refused("trainer.accelerator=gpu")
    assert "trainer.accelerator=gpu" in line and "no GPU" in line and "trainer=cpu" in line
    assert any("no GPU" in line for line in refused("trainer=gpu"))


def test_devices_that_are_not_what_the_launcher_started(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    (line,) = refused("trainer.devices=2", *NANO)
    assert "trainer.devices=2 x" in line.replace(": 2 x", " x") and "WORLD_SIZE=4" in line
    assert "trainer.devices=4" in line


def test_a_tensor_parallel_size_that_does_not_divide_the_ranks():
    lines = refused(
        "strategy=fsdp_tensor_parallel", "strategy.tensor_parallel_size=3", "trainer.devices=4"
    )
    assert any("does not divide 4 ranks; allowed: 1, 2, 4" in line for line in lines)


def test_a_model_that_does_not_fit_says_how_much_it_needs():
    (line,) = refused("model=gpt_7b", "model.n_layers=32000", "trainer.accelerator=cpu")
    assert line.startswith("error: model: needs about ") and line.count("GiB") == 2


def test_a_global_batch_that_does_not_divide_names_the_nearest():
    (line,) = refused("data.global_batch_size=10", "data.batch_size=1", "trainer.devices=4", *NANO)
    assert "data.global_batch_size=10" in line and "4 ranks x data.batch_size 1" in line
    assert "8, 12" in line


def test_data_that_is_missing_is_not_found():
    (line,) = refused("data=text", "data.path=/x/y", *NANO, code=66)
    assert "data.path=/x/y: no such file" in line


@pytest.fixture
def tokens(tmp_path):
    """Writes token files; returns the words that train on them."""

    def write(train: list[int], val: list[int] | None = None) -> tuple[str, ...]:
        for name, content in (("train", train), ("val", val or list(range(200)))):
            np.array(content, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
        return (
            "data=tokens",
            f"data.train_path={tmp_path}/train.bin",
            f"data.val_path={tmp_path}/val.bin",
            "data.seq_len=16",
            *NANO,
        )

    return write


def test_token_files_that_are_right_are_accepted(tokens):
    accepted(*tokens(list(range(256)) * 10), "data.batch_size=2")


def test_data_without_a_token(tokens):
    (line,) = refused(*tokens([]), code=65)
    assert "data.train_path" in line and "0 tokens" in line


def test_data_shorter_than_one_sequence(tokens):
    (line,) = refused(*tokens([1] * 10), code=65)
    assert "10 tokens; need at least seq_len+1 = 17" in line


def test_fewer_sequences_than_one_step_takes(tokens):
    (line,) = refused(*tokens([1] * 50), "data.batch_size=8", code=65)
    assert "3 sequences, one step needs 8" in line and "data.global_batch_size" in line
    (line,) = refused("data.num_samples=3")
    assert "data.num_samples=3" in line and "one step needs 32" in line


def test_a_token_outside_the_vocabulary_is_named_with_its_place(tokens):
    (line,) = refused(*tokens([1] * 500 + [300] + [1] * 500), code=65)
    assert "token 300 at offset 500" in line and "256" in line


def test_prepared_data_that_changed_is_not_trained_on(tmp_path):
    from gptrain.data import prepare_text

    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes Jack a dull boy\n" * 200)
    prepared = prepare_text(text, "bytes", tmp_path / "cache")
    content = bytearray(prepared.train_file.read_bytes())
    content[7] ^= 1
    prepared.train_file.write_bytes(content)
    lines = refused(
        "data=tokens",
        f"data.train_path={prepared.train_file}",
        f"data.val_path={prepared.val_file}",
        "data.seq_len=16",
        "data.batch_size=2",
        *NANO,
        code=65,
    )
    line = next(line for line in lines if "data.train_path" in line)
    assert "sha256 differs" in line and "prepare" in line


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path):
    vocabulary = {f"t{i}": i for i in range(300)}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    (line,) = refused("data=text", f"data.tokenizer={file}", *NANO)
    assert "tokenizer has 300 tokens, model.vocab_size=256" in line
    assert "model.vocab_size=320" in line


def save_checkpoint(folder, config, content: bytes = b"\0" * 100):
    store = CheckpointStore(folder / "checkpoints", "run")
    with store.writing(500, config=config) as draft, draft.open("state.ckpt") as file:
        file.write(content)
    return folder / "checkpoints" / "step-00000500"


def test_a_checkpoint_that_is_missing_is_not_found(tmp_path):
    save_checkpoint(tmp_path / "train" / "a", {})
    (line,) = refused("ckpt_path=missing.ckpt", f"output_dir={tmp_path}", code=66)
    assert "ckpt_path=missing.ckpt: no such file" in line
    assert f"newest here: {tmp_path}/train/a/checkpoints/step-00000500" in line


@pytest.mark.parametrize("below", ["", "/checkpoints"])
def test_a_run_folder_is_no_checkpoint_and_its_newest_is_offered(tmp_path, below):
    newest = save_checkpoint(tmp_path, {})
    (line,) = refused(f"ckpt_path={tmp_path}{below}", *NANO, code=65)
    assert "a run folder, not a checkpoint" in line and line.endswith(f"try: ckpt_path={newest}")


def test_a_checkpoint_of_another_model_names_both_sizes(tmp_path):
    path = save_checkpoint(tmp_path, {"model.d_model": 256, "model.n_layers": 8})
    lines = refused(f"ckpt_path={path}", *NANO)
    assert any("model.d_model=128" in line and "256" in line for line in lines)
    assert any("model.n_layers=4" in line and "8" in line for line in lines)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, {})
    (path / "state.ckpt").write_bytes(b"\1" * 100)
    (line,) = refused(f"ckpt_path={path}", *NANO, code=65)
    assert f"ckpt_path={path}" in line and "damaged (sha256)" in line
    (path / "state.ckpt").write_bytes(b"\1" * 50)
    (line,) = refused(f"ckpt_path={path}", *NANO, code=65)
    assert "50 bytes" in line


def test_a_pickle_with_foreign_code_is_named_and_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            import os

            return os.system, (f"touch {tmp_path}/ran",)

    torch.save({"state_dict": Evil()}, tmp_path / "x.ckpt")
    (line,) = refused(f"ckpt_path={tmp_path}/x.ckpt", *NANO, code=65)
    assert "os.system" in line and not (tmp_path / "ran").exists()


def test_an_output_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (f"{tmp_path}/file", f"{tmp_path}/file/below", "/proc/x"):
        (line,) = refused(f"run_dir={folder}", *NANO, code=73)
        assert f"run_dir={folder}" in line
        (line,) = refused(f"hydra.run.dir={folder}", *NANO, code=73)
        assert f"hydra.run.dir={folder}" in line
    (line,) = refused(f"output_dir={tmp_path}/file", *NANO, code=73)
    assert "output_dir=" in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_holds_a_finished_run(tmp_path):
    (tmp_path / "result.json").write_text("{}")
    (line,) = refused(f"run_dir={tmp_path}", *NANO, code=73)
    assert "already holds a finished run" in line and "ckpt_path=last" in line
    accepted(f"run_dir={tmp_path}", "ckpt_path=last", *NANO)


def test_a_folder_that_another_run_holds(tmp_path):
    with RunLock(tmp_path):
        (line,) = refused(f"run_dir={tmp_path}", *NANO, code=73)
    assert "held by process" in line


def test_versions_that_must_not_run():
    good = {
        "torch": "2.13.0+cpu",
        "lightning": "2.6.6",
        "hydra-core": "1.3.8",
        "omegaconf": "2.3.1",
    }
    assert judge_versions(good) == []
    (problem,) = judge_versions({**good, "lightning": "2.6.3"})
    assert "malicious" in problem.line and "GHSA-w37p-236h-pfx3" in problem.line
    for package, version in (("torch", "2.10.1"), ("hydra-core", "1.3.7"), ("lightning", "2.5.0")):
        (problem,) = judge_versions({**good, package: version})
        assert f"{package} {version} is too old" in problem.line and problem.code == 2


# Habits from lightning-hydra-template: typed -> what the answer names.
HABITS = {
    "trainer=ddp": "strategy=ddp",
    "trainer.strategy=ddp": "strategy=ddp",
    "+trainer.strategy=ddp": "strategy=ddp",
    "trainer=ddp_sim": "trainer=cpu trainer.devices=2",
    "model.optimizer.lr=0.1": "optimizer.lr",
    "model.scheduler.warmup_steps=3": "scheduler.warmup_steps",
    "model.net.d_model=64": "model.d_model",
    "debug=fdr": "trainer.fast_dev_run=true",
    "debug=overfit": "trainer.overfit_batches=1",
    "debug=profiler": "profiler=torch",
    "train=False": "task=test",
    "test=False": "task=fit",
    "logger=many_loggers": "logger=[csv,tensorboard]",
    "optimized_metric=val/loss": "objective",
    "task_name=mine": "name=mine",
    "paths.output_dir=/x": "output_dir=/x",
}


@pytest.mark.parametrize("word", HABITS)
def test_a_habit_of_another_template_is_answered_by_our_name(word):
    (line,) = refused(word)
    assert HABITS[word] in line and line.startswith(f"error: {word.lstrip('+').split('=')[0]}=")


def test_a_strategy_of_lightning_is_answered_by_one_that_exists():
    answers = {"ddp_spawn": "ddp", "deepspeed_stage_3": "fsdp", "pipeline": "pipeline", "x": "auto"}
    for typed, ours in answers.items():
        (line,) = refused(f"trainer.strategy={typed}")
        assert line.endswith(f"try: strategy={ours}")


def test_all_problems_are_told_at_once():
    words = [
        "trainer.devices=-2",
        "optimizer.lr=0",
        "model.dropout=-1",
        "modell.x=1",
        "strategy=ddpp",
    ]
    lines = refused(*words, "data=text", "data.path=/nope", "name=é")
    for key in ("trainer.devices", "optimizer.lr", "model.dropout", "modell.x", "strategy"):
        assert any(line.startswith(f"error: {key}=") for line in lines), key
    assert any("data.path=/nope" in line for line in lines)
    assert any("name=é" in line and "'é'" in line for line in lines)
    assert len(lines) == 7


def test_a_right_command_has_nothing_to_tell():
    assert answer(*NANO).lines == []
