"""The catalogue of wrong inputs: each is one line that names key, value and a way out."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from gptrain.config.check import check_config, find_world_size
from gptrain.config.cli import compose_command
from gptrain.config.compose import resolved
from gptrain.config.preflight import check_paths
from gptrain.config.preflight.devices import check_devices, check_memory, check_visible
from gptrain.config.suggest import OPTION_ALIASES, find_alias, nearest_key
from gptrain.core.errors import INPUT_NOT_FOUND
from gptrain.runtime.devices import accelerator_of
from tests.command_line import accepted, answer, compose_run, refused

NANO = ("model=gpt_nano", "trainer.accelerator=cpu")

# Words -> pieces that the one line must hold.
ONE_LINE = {
    "trainer.devices=0": ["trainer.devices=0", "at least 1"],
    "trainer.devices=1025": ["trainer.devices=1025", "too large (max 1024)"],
    "trainer.devices=two": ["trainer.devices=two", "not a number", '"auto"'],
    "strategy=ddpp": ["strategy=ddpp", 'did you mean "ddp"', "auto, context_parallel, ddp", "fsdp"],
    "strategy=dp": ["strategy=dp", 'did you mean "ddp"', "try: strategy=ddp"],
    "trainer.precision=fp12": ["trainer.precision=fp12", "32-true, bf16-mixed, 16-mixed"],
    "trainer.precision=transformer-engine": ["=transformer-engine: unknown", "32-true, bf16-mixed"],
    "trainer.precision=16-mixed trainer.accelerator=cpu": ["16-mixed", "on CPU", "bf16-mixed"],
    "strategy=tensor_parallel trainer.devices=4 strategy.tensor_parallel_size=4 model.n_heads=6 "
    "model.d_model=510": ["strategy.tensor_parallel_size=4", "model.n_heads=6", "1, 2, 3, 6"],
    "model.dropout=1": ["model.dropout=1", "must be < 1"],
    "optimizer.lr=-1e-3": ["optimizer.lr=-0.001", "must be > 0"],
    "scheduler.warmup_steps=2000 scheduler.total_steps=1000": [
        "scheduler.warmup_steps=2000", "<= scheduler.total_steps=1000; try: ", "warmup_steps=100",
    ],
    "optimizer.name=adamz": ["optimizer.name=adamz", 'did you mean "adamw"', "optimizer=adamw"],
    "trainer.max_steps=-5": ["trainer.max_steps=-5", "must be -1 or >= 1"],
    "trainer.max_epochs=-1": ["no stop condition", "max_steps", "try: trainer.max_epochs=3"],
    "trainer.gradient_clip_val=-1": ["trainer.gradient_clip_val=-1", ">= 0; 0 or null for off"],
    "model=llama_nano model.d_model=100 model.n_heads=3 model.n_kv_heads=3 model.d_head=7": [
        "model.d_head=7: odd", "6, 8",
    ],
    "model=llama_nano model.n_kv_heads=3": [
        "model.n_kv_heads=3: does not divide model.n_heads=4", "1, 2, 4",
    ],
    "model.d_model=100 model.n_heads=3": ["model.d_model=100", "model.n_heads=3", "99, 102"],
    "data.seq_len=4096 model.max_seq_len=1024": [
        "data.seq_len=4096", "model.max_seq_len=1024; try: data.seq_len=1024 or ", "_seq_len=4095",
    ],
    "model.dropout=1.5": ["model.dropout=1.5", "must be < 1"],
    "model.vocab_size=9223372036854775808": ["=9223372036854775808", "<= 2147483647"],
    "data.batch_size=0": ["data.batch_size=0", ">= 1"],
    "ckpt_path=https://example.com/x.ckpt": ["ckpt_path=https://", "remote", "local path"],
    "modell.d_model=1": ["modell.d_model", "did you mean model.d_model?"],
    "model=gptx": ["model=gptx", "gpt_nano", "simple_gpt"],
    "data=text data.path=???": ["data.path", "required and not set"],
    "model._target_=os.system": ["model._target_=os.system", "Python's standard library"],
    "run_dir=": ["run_dir=", "not a path"],
    "callbacks.sample.prompt=": ["callbacks.sample.prompt=", "at least 1 character"],
    "+module.metrics.x=3": ["module.metrics.x=3", "not a group of keys"],
    "optimizer._target_=torch.optim.Adafactor": ["'betas'", "conf/optimizer/mine.yaml"],
    "logger=tensorbord": ["logger=tensorbord", 'did you mean "tensorboard"'],
    "data.global_batch_size=10 data.batch_size=1 trainer.devices=4": [
        "data.global_batch_size=10", "4 ranks x data.batch_size 1", "8, 12",
    ],
    "data.global_batch_size=3 data.batch_size=1 trainer.devices=4": ["nearest: 4"],
    "data.num_samples=3": ["data.num_samples=3", "one step needs 32"],
    "data.seq_len=1": ["data.seq_len=1", ">= 2"],
    "data=text data.val_fraction=0": ["data.val_fraction=0", "must be > 0"],
    "data=text data.val_fraction=1": ["data.val_fraction=1", "must be < 1"],
    # No key of this choice, or no key at all -> the one that was meant.
    "model.hidden_size=3": ["unknown key of this model", "d_model"],
    "lr=1e-3": ["optimizer.lr"],
    "strategy=fsdp strategy.cpu_ofload=true trainer.devices=2": ["strategy.cpu_offload"],
    "model.name=gpt3": ["model=gpt2"],
    "trainer.logger=csv": ["logger=csv"],
    "data=text data.num_samples=64": ["data.num_samples=64: unknown key of this data", "val_frac"],
    "data.val=null": ["data.val=null: not a group of keys"],
    "data=mixture +data@data.parts.a=dummy_text ~data.parts.a.val": [
        "data.parts.a.val: missing, but required",
    ],
    # Options that would be without effect, or that cannot be together.
    "strategy=fsdp strategy.comm_hook=fp16 trainer.devices=2": [
        "no effect under strategy=fsdp; allowed: under strategy=ddp",
    ],
    "strategy=tensor_parallel trainer.devices=2 model.compile=blocks "
    "model.activation_checkpointing=full": ["model.compile=blocks", "checkpointing=none"],
    "data.global_batch_size=64 trainer.accumulate_grad_batches=2": [
        "data.global_batch_size=64: excludes trainer.accumulate_grad_batches=2",
    ],
    "strategy=ddp strategy.schedule=gpipe": ["strategy.schedule", "under strategy=pipeline"],
    "strategy=single trainer.devices=2": ["trainer.devices=2", "strategy=ddp"],
    "strategy=pipeline trainer.devices=8": ["strategy.pipeline_parallel_size", "model.n_layers=6"],
    "trainer.devices=2 strategy.static_graph=true trainer.accumulate_grad_batches=2": ["=false"],
    "trainer.devices=2 strategy.static_graph=true data.batch_size=2 data.global_batch_size=8": [
        "gradient accumulation; try: strategy.static_graph=false",
    ],
    "strategy=pipeline trainer.devices=2 data.batch_size=11": ["4 microbatches; try: ", "_size=8"],
    "strategy=pipeline trainer.devices=4 strategy.microbatches=2": ["strategy.microbatches=8,"],
    "strategy=fsdp strategy.replicas=3 trainer.devices=4": ["strategy.replicas=3", "1, 2, 4"],
    "strategy=tensor_parallel trainer.devices=3": ["tensor_parallel_size", "n_heads=8", "4, 8"],
    "model=llama_nano strategy=tensor_parallel trainer.devices=4 model.n_kv_heads=2": [
        "does not divide model.n_kv_heads=2; a head is not split over ranks; allowed: 1, 2",
    ],
    "strategy=context_parallel trainer.devices=4 model.n_heads=6 model.d_model=510": [
        "strategy.context_parallel_size=null: does not divide model.n_heads=6",
    ],
    "strategy=fsdp_tensor_parallel trainer.devices=3": [
        "there are 3 ranks; tensor_parallel_size must divide 3: 1, 3",
    ],
    "strategy=fsdp trainer.precision=16-mixed trainer.devices=2": ["the loss", "=bf16-mixed"],
    "strategy=fsdp model.compile=model trainer.devices=2": ["model.compile=blocks"],
    "strategy.backend=nccl trainer.accelerator=cpu": ["NCCL needs GPUs; try: ", ".backend=gloo"],
    "strategy.backend=mpi": ["strategy.backend=mpi", "was built without this backend", "gloo"],
    "trainer.max_time=00:01:00:00": ["scheduler.total_steps", "scheduler=warmup_constant"],
    "data=text model.vocab_size=100": ["model.vocab_size=100", "256"],
    "data=text data.tokenizer=bpe model.vocab_size=255": ["model.vocab_size=255", "=bpe has at le"],
    "scheduler=warmup_stable_decay scheduler.decay_tokens=9 scheduler.decay_steps=1": [
        "scheduler.decay_tokens=9: excludes scheduler.decay_steps=1: ", "try: scheduler.decay_st",
    ],
    "scheduler.total_tokens=9 scheduler.total_steps=7": [
        "scheduler.total_tokens=9: excludes scheduler.total_steps=7: ", "try: scheduler.total_st",
    ],
    "max_tokens=10 trainer.max_steps=3": ["max_tokens=10", "try: trainer.max_steps=-1, or"],
    "strategy=fsdp_tensor_parallel strategy.tensor_parallel_size=3 model.n_heads=6 "
    "model.d_model=510 trainer.devices=4": [
        "strategy.tensor_parallel_size=3",
        "there are 4 ranks; tensor_parallel_size must divide 4: 1, 2, 4",
    ],
    "trainer.num_nodes=2": ["trainer.num_nodes=2", "torchrun --nnodes=2"],
    # Words that cannot be read.
    "seed": ["seed: not key=value; try: ", "--help"],
    "seed=[1,": ["\"seed='[1,'\""],
    "name=é": ["\"name='é'\""],
    "trainer.devices=0,1": ["'trainer.devices=[0,1]'"],
    "optimizer.lr=1e-3,1e-4": ["-m for a sweep"],
    "model=null": ["gpt_nano"],
    "data.train.seed=${nope}": ["data.train.seed", "nope"],
    "data.seq_len=${data.seq_len}": ["data.seq_len"],
    "+callbacks.a={_target_:project.callback.MyCallback,path:'a/${ckpt_path}/x'}": [
        "callbacks.a.path=a/${ckpt_path}/x: the run replaces", "trainer.ckpt_path in a hook",
    ],
    "~nothing": ["unknown key"],
    "experiment=quickstart callbacks=none": ["callbacks.sample._target_", "'~callbacks.sample'"],
    "--foo": [" --help"],
    "--config-dir=/nope": ["no such folder"],
    "hydra.mode=x": ["hydra.mode=x: Invalid value 'x'"],
    "hydra.mode=MULTIRUN": ["hydra.mode=MULTIRUN", "try: -m"],
    # Options of other projects.
    "+trainer.strategy=ddp": ["try: strategy=ddp"],
    "n_embd=64": ["n_embd=64: unknown key; try: model.d_model=64"],
    "model.net.d_model=64": ["model.d_model"],
    "optimized_metric=val/loss": ["unknown key"],
}  # fmt: skip


# Words whose error is about no key, or about a key of another group.
WITHOUT_KEY = ("trainer.max_epochs=-1", "trainer.max_time=00:01:00:00", "--foo")


@pytest.mark.parametrize("words", ONE_LINE)
def test_a_wrong_input_is_one_line_with_key_value_and_hint(words):
    (line,) = refused(*words.split())
    assert all(piece in line for piece in ONE_LINE[words]), line
    key = line.removeprefix("error: ").partition(": ")[0]
    groups = {re.split("[.=]", word.lstrip("+~"))[0] for word in words.split()}
    assert words in WITHOUT_KEY or re.split("[.=]", key)[0] in groups, line


# Key -> values that it must not have.
WRONG = {
    "trainer.devices": "-2 1.5 true null [] [0,0] [0,-1] [a] '0,0' 1e3 {a:1} ''",
    "trainer.max_time": "abc 01:00 5 [] {hour:1} {hours:-1} '' true",
    "trainer.limit_train_batches": "-1 1.5 -0.5 abc true [] nan 0 0.0",
    "trainer.val_check_interval": "0 0.0 -1 1.5 abc null nan [] true",
    "trainer.fast_dev_run": "-1 maybe 1.5 [] null",
    "trainer.benchmark": "maybe 2 1 0 [] 1.0 'yes'",
    "trainer.log_every_n_steps": "0 -1 abc null 1.5 99999999999",
    "scheduler.warmup_steps": "-1 1.5 abc nan true [] -0.5",
    "optimizer.betas": "[] [0.9] [0.9,1.0] [0.9,-0.1] 0.9 [0.9,a] [0.9,0.9,0.9] null abc",
    "optimizer.lr": "0 abc nan inf true [] 1e400 ''",
    "optimizer.fused": "maybe 1 []",
    "optimizer.weight_decay": "-0.1",
    "seed": "-1 18446744073709551616 abc",
    "data.num_workers": "5000",
    "module.loss.label_smoothing": "1 -0.1 abc null",
    "checkpoint.mode": "best null 1",
    "checkpoint.keep": "1 0 null",
    "strategy.timeout_s": "0 -1 abc null inf",
    "name": "'' ../x /x 'a/../../b' [] null ~/x",
    "output_dir": "'' ' ' s3://b [] null",
    "run_dir": "'' null",
    "allow_changes": "[1] x null",
    "on_nonfinite": "halt true null []",
}


ALIASES = {
    "trainer.logger=true": "logger=csv",
    "trainer.callbacks=[]": "callbacks=default",
    "trainer.strategy=ddp": "strategy=ddp",
    "learning_rate=0.1": "optimizer.lr=0.1",
    "model.n_embd=64": "model.d_model=64",
    "block_size=64": "model.max_seq_len=64",
    "per_device_train_batch_size=8": "data.batch_size=8",
    "epochs=3": "trainer.max_epochs=3",
    "max_iters=100": "trainer.max_steps=100",
    "trainer.gpus=": "trainer.devices=<value>",
}


def test_an_option_of_another_project_names_the_override_to_type_here():
    assert len(ALIASES) == len(OPTION_ALIASES)
    for typed, override in ALIASES.items():
        key, _, value = typed.partition("=")
        assert find_alias(key, value) == override
    assert find_alias("data.batch_sizes", "8") is None
    # A similar key of the same group is meant rather than the same name in another group.
    assert nearest_key("data.max_len", ["model.max_len", "data.max_lens"]) == "data.max_lens"
    # Of several keys with the same last part, the one with the fewest parts is meant.
    assert nearest_key("lrr", ["a.lr", "a.b.lr", "b.lr"]) == "a.lr"
    assert nearest_key("x.max_lens", ["a.max_len"]) == "a.max_len"
    assert nearest_key("x.max_lens", ["a.min_len"]) is None  # similar, but not nearly equal


@pytest.mark.parametrize("number", range(11))
def test_a_value_of_none_of_its_keys_forms_is_refused_with_all_others(number):
    values_by_key = {
        key: values.split() for key, values in WRONG.items() if number < len(values.split())
    }
    words = {key: values[number] for key, values in values_by_key.items()}
    lines = refused(*(f"{key}={value}" for key, value in words.items()))
    for key in words:
        key_lines = [line for line in lines if line.startswith(f"error: {key}=")]
        assert len(key_lines) == 1, (key, words[key], lines)


def test_all_problems_are_reported_at_once():
    words = ["trainer.devices=-2", "optimizer.lr=0", "model.dropout=-1", "modell.x=1"]
    lines = refused(*words, "strategy=ddpp", "model=gptx", "name=é", "data.global_batch_size=0")
    keys = [line.removeprefix("error: ").split("=")[0] for line in lines]
    assert sorted(keys) == sorted(
        ["trainer.devices", "optimizer.lr", "model.dropout", "modell.x", "strategy", "model",
         "name", "data.global_batch_size"]
    )  # fmt: skip
    lines = refused("modell.x=1", "data.train.seed=${nope}")
    assert [line.split(": ")[1] for line in lines] == ["modell.x=1", "data.train.seed"]


def test_a_wrong_word_does_not_make_words_that_need_a_later_one_wrong(tmp_path):
    """Choices of an added folder, and keys of a choice, may be typed before these."""
    (tmp_path / "model").mkdir()
    node = "_target_: torch.nn.Identity\nvocab_size: 256\nown: 1\n"
    (tmp_path / "model" / "mine.yaml").write_text(node)
    words = ("model.own=2", "model=mine", "modell.x=1", f"hydra.searchpath=['file://{tmp_path}']")
    (line,) = refused(*words)
    assert line.startswith("error: modell.x=1: ")
    (line,) = refused("+trainer.min_epochs=2\r")
    assert line.startswith("error: trainer.min_epochs=2\\r: ends with a carriage return")
    assert line.endswith("; try: dos2unix <script>, or sed -i 's/\\r$//' <script>")


WARNINGS = {
    "scheduler.warmup_steps=5000": "longer than the run of 936 steps",
    "data=text trainer.max_steps=10 scheduler.warmup_steps=50": "longer than the run of 10 steps",
    "strategy=ddp": "one device; try: trainer.devices=2",
    "task=test": "no ckpt_path: the task evaluates the initial weights; try: ckpt_path=best",
}


@pytest.mark.parametrize("words", WARNINGS)
def test_an_option_with_less_effect_than_expected_is_one_warning(words):
    (line,) = accepted(*words.split(), "trainer.accelerator=cpu")
    assert line.startswith("warning: ") and WARNINGS[words] in line


RIGHT = [
    "", "trainer.devices=auto", "trainer.devices=-1", "trainer.devices='2'",
    "trainer.devices=[0,1]",
    "trainer.precision=32", "trainer.precision=bf16", "trainer.precision=auto",
    "trainer.max_time=00:01:00:00 scheduler=warmup_constant",
    "trainer.max_steps=5 scheduler.warmup_steps=5",
    "trainer.max_time={hours:1} scheduler.total_steps=900", "max_tokens=1e6",
    "trainer.max_time={hours:1} scheduler.total_tokens=1e6",
    "trainer.max_epochs=-1 trainer.max_steps=5", "trainer.limit_train_batches=0.5",
    "trainer.limit_val_batches=0", "trainer.gradient_clip_val=null", "trainer.deterministic=warn",
    "trainer.fast_dev_run=2 trainer.max_epochs=-1", "data.seq_len=257",
    "data.seq_len=2 data.num_samples=32",
    "data.global_batch_size=64", "data=text",
    "data=text data.tokenizer=bpe", "optimizer=muon", "optimizer.fused=null",
    "scheduler.warmup_steps=900 scheduler.total_steps=900 trainer.max_steps=10",
    "scheduler.warmup_steps=0.1", "scheduler.start_factor=0", "name=a/b", "~callbacks.sample",
    "logger=[tensorboard,csv]", "profiler=simple", "profiler=torch", "callbacks=ema",
    "strategy=fsdp trainer.devices=2",
    "strategy=pipeline trainer.devices=3 model.n_layers=3 strategy.microbatches=3 "
    "data.batch_size=3",
    "strategy=tensor_parallel trainer.devices=2", "strategy=ddp_pipeline trainer.devices=4",
    "strategy=fsdp_tensor_parallel trainer.devices=4", "experiment=quickstart", "seed=4294967295",
    "model=llama_nano strategy=context_parallel trainer.devices=4 model.n_kv_heads=2",
    "hydra/job_logging=disabled name=a/${hydra:job.name}", "hydra.verbose=true",
    "objective=val/accuracy",
    "checkpoint.monitor=val/accuracy checkpoint.mode=max", "+trainer.min_epochs=2",
]  # fmt: skip


@pytest.mark.parametrize("words", RIGHT)
def test_valid_input_is_accepted(words):
    lines = accepted(*NANO, *words.split())
    assert not [line for line in lines if "more processes than" not in line]


def test_a_run_that_began_from_other_weights_may_be_evaluated_by_a_path_of_its_checkpoint():
    """`init_from` is then an override of the earlier run, and names no second source of weights."""
    values = resolved(compose_command([*NANO, "init_from=/weights", "ckpt_path=/a/step-00000005"]))
    assert [problem.key for problem in check_config(values).errors] == ["init_from"]
    for name in ("last", "best"):  # the checkpoints of a run that began from other weights
        assert check_config(values | {"ckpt_path": name}).errors == []
    assert check_config(values | {"from_run": "/a", "task": "test"}).errors == []
    # Weights of `init_from` are no initial weights: an evaluation of them is no reason to warn.
    assert check_config(values | {"ckpt_path": None, "task": "test"}).problems == []


def test_the_ranks_of_a_job_are_those_of_all_its_nodes():
    run = compose_run("trainer.devices=[0,3]", "trainer.num_nodes=3")
    assert find_world_size(run) == 6
    assert find_world_size(run.changed({"trainer.devices": "auto"})) is None


@pytest.mark.parametrize("devices", ["8", "[0,2]"])
def test_more_gpus_than_visible_names_how_many_and_the_variable(devices):
    run = check_config(resolved(compose_command([f"trainer.devices={devices}"])))
    (problem,) = check_visible(run, n_visible=2, variable="0,1")
    assert "only 2 GPUs visible (CUDA_VISIBLE_DEVICES=0,1)" in problem.line
    assert not list(check_visible(run, n_visible=8, variable=None))
    # A launcher may show each rank its own GPU alone.
    assert not list(check_visible(run, n_visible=1, variable="3", is_rank=True))


def test_the_gpus_of_a_process_are_enough_for_its_ranks_and_their_smallest_memory(
    launched, monkeypatch
):
    """A rank of torchrun may see its own GPU alone. The memory is that of the smallest GPU."""
    memory = [2**40]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(memory))
    facts = SimpleNamespace
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: facts(total_memory=memory[i])
    )
    words = ["trainer.devices=2", "trainer.accelerator=gpu", "strategy=ddp"]
    checked = check_config(resolved(compose_command(words)))
    (line,) = (problem.line for problem in check_devices(checked))
    assert "only 1 GPU visible" in line and line.endswith("; try: trainer.devices=1")
    memory.append(3)
    for other in (["trainer.devices=1"], ["strategy=fsdp", "strategy.cpu_offload=true"]):
        unlike = check_config(resolved(compose_command([*words, *other])))
        assert not [p for p in check_devices(unlike) if "GiB" in p.message]
    del memory[1]
    launched("torchrun", 1, 2, 1, 2)
    assert not list(check_devices(checked))
    memory.append(3)
    (line,) = (problem.line for problem in check_devices(checked))
    assert line.startswith("warning: model: weights, gradients") and "a device has 0 GiB" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    (line,) = refused("trainer.accelerator=gpu")
    assert "trainer.accelerator=gpu: no GPU on this machine; try: trainer=cpu" in line
    for name, device in (("mps", "Apple GPU"), ("tpu", "TPU")):
        if accelerator_of(name) is None:
            (line,) = refused(f"trainer.accelerator={name}")
            assert f"trainer.accelerator={name}: no {device} on this machine" in line


def test_devices_that_differ_from_the_launchers_are_refused(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    (line,) = refused("trainer.devices=2", *NANO)
    assert "trainer.devices=2: 2 x trainer.num_nodes=1 = 2, but WORLD_SIZE=4" in line
    assert "trainer.devices=4" in line


def test_a_model_larger_than_the_machine_is_a_warning_by_its_real_types():
    gib = []
    for precision in ("32-true", "bf16-true"):
        words = ("model=gpt_7b", "model.n_layers=32000", f"trainer.precision={precision}")
        (line,) = accepted(*words, "trainer.accelerator=cpu")
        needed = "warning: model: weights, gradients and optimizer states need about "
        assert line.startswith(needed)
        gib.append(int(line.removeprefix(needed).split()[0]))
        assert " GiB, this machine has " in line
        assert line.endswith(" GiB; try: strategy=fsdp or a smaller model")
    assert gib[0] == pytest.approx(2 * gib[1], rel=0.01)
    (line,) = accepted(*words, "trainer.accelerator=cpu", "trainer.devices=2")
    assert int(line.removeprefix(needed).split()[0]) == pytest.approx(
        2 * gib[1], rel=0.01
    )  # ranks share a CPU's memory
    evaluation = resolved(compose_command([*words, "trainer=cpu", "task=test", "ckpt_path=best"]))
    assert list(check_memory(check_config(evaluation), "cpu", n_local=1, world_size=1)) == []


def test_files_that_are_not_there_are_not_found(tmp_path, monkeypatch):
    (line,) = refused("data=text", "data.path=/x/y", *NANO, code=66)
    assert "data.path=/x/y: no such file or folder; try: data.path=<file or folder>" in line
    train_path = f"data.train_path={__file__}"
    (line,) = refused("data=tokens", train_path, "data.val_path=/x/y", *NANO, code=66)
    assert "data.val_path=/x/y: no such file" in line
    (tmp_path / "a.txt").write_text("a text")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert accepted("data=text", "data.path='~/*.txt'", *NANO) == []
    (line,) = refused("data=text", f"data.path={tmp_path}/*.md", *NANO, code=66)
    assert "*.md: no such file" in line
    (line,) = refused("data=text", "data.tokenizer=/x/t.json", *NANO, code=66)
    assert "data.tokenizer=/x/t.json: no such file" in line
    part = ("data=mixture", "+data@data.parts.a=text", "data.parts.a.path=/x/y")
    (line,) = refused(*part, *NANO, code=66)
    assert "data.parts.a.path=/x/y: no such file" in line
    (line,) = refused("data=text", "data.path=/dev/null", *NANO, code=65)
    assert "data.path=/dev/null: empty; try: data.path=<file>" in line
    (line,) = refused("ckpt_path=missing.ckpt", *NANO, code=66)
    assert "ckpt_path=missing.ckpt: no such file" in line and "ckpt_path=last" in line
    (line,) = refused("init_from=best", *NANO, code=66)
    assert "init_from=best: no such file" in line


def test_a_warning_in_front_of_an_error_does_not_change_the_exit_code():
    words = ("strategy=ddp", "trainer.devices=1", "ckpt_path=missing.ckpt")
    code, lines = answer(*words, *NANO)
    assert [line.partition(":")[0] for line in lines] == ["warning", "error"], lines
    assert code == INPUT_NOT_FOUND


def test_an_output_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for key in ("run_dir", "hydra.run.dir", "output_dir"):
        (line,) = refused(f"{key}={tmp_path}/file/below", *NANO, code=73)
        assert f": cannot write ({tmp_path}/file is a file); try: run_dir=<folder>" in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_holds_a_finished_run(tmp_path, launched):
    (tmp_path / "result.json").write_text("{}")
    (line,) = refused(f"run_dir={tmp_path}", *NANO, code=73)
    assert "already holds a finished run" in line and "ckpt_path=last" in line
    accepted(f"run_dir={tmp_path}", "ckpt_path=last", *NANO)
    launched("torchrun", 1, 2, 1, 2)
    checked = check_config(resolved(compose_command(["trainer.devices=2", *NANO])))
    # Rank 0 may have written its record before rank 1 checks the config.
    assert not list(check_paths(checked, str(tmp_path)))
