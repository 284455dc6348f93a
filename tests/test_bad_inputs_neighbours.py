"""Neighbours of the catalogue: every key with every kind of wrong value."""

from __future__ import annotations

import pytest
from command_line import accepted, refused

from gptrain.config.checks.rules import Either, Flag, Listing, Number, Text, Word
from gptrain.config.checks.values import RULES, judge

NANO = ("model=gpt_nano", "trainer.accelerator=cpu")
# Keys that only these groups have; each line is one command, in which every key is wrong at once.
COMMANDS = {
    (): lambda key: True,
    ("data=text",): lambda key: key.startswith("data."),
    ("data=tokens", "data.train_path=a", "data.val_path=a"): lambda key: key == "data.dtype",
    ("optimizer=muon",): lambda key: key.startswith("optimizer."),
    ("scheduler=warmup_stable_decay",): lambda key: key.startswith("scheduler."),
}
ONLY_IN = {
    "data.path": "data=text",
    "data.pattern": "data=text",
    "data.tokenizer": "data=text",
    "data.val_fraction": "data=text",
    "data.train_path": "data=tokens",
    "data.val_path": "data=tokens",
    "data.dtype": "data=tokens",
    "data.num_samples": "data=dummy_text",
    "optimizer.momentum": "optimizer=muon",
    "scheduler.decay_fraction": "scheduler=warmup_stable_decay",
}


def refuses_all(wrong: dict[str, str]) -> None:
    """Each of these keys is refused by one line of its own, told with all others at once."""
    for groups, belongs in COMMANDS.items():
        here = {
            key: value
            for key, value in wrong.items()
            if belongs(key) and ONLY_IN.get(key, "data=dummy_text") in (*groups, "data=dummy_text")
        }
        if "data=dummy_text" not in groups and any(word.startswith("data=") for word in groups):
            here.pop("data.num_samples", None)
        if not here:
            continue
        lines = refused(*groups, *(f"{key}={value}" for key, value in here.items()))
        for key, value in here.items():
            told = [line for line in lines if line.startswith(f"error: {key}=")]
            assert len(told) == 1, f"{key}={value}: {told}"


def rules(kind: type) -> dict[str, object]:
    return {key: rule for key, rule in RULES.items() if isinstance(rule, kind)}


@pytest.mark.parametrize(
    "value", ["abc", "nan", "inf", "-inf", "true", "[]", "[1]", "{a:1}", "''", "1e400", "-7"]
)
def test_what_is_no_number_of_the_range_is_refused(value):
    refuses_all({key: value for key in rules(Number)})


def test_null_fractions_zeros_and_numbers_out_of_range_are_refused():
    numbers = rules(Number)
    refuses_all({key: "null" for key, rule in numbers.items() if not rule.null})
    refuses_all({key: "1.5" for key, rule in numbers.items() if rule.whole})
    refuses_all({key: "0" for key, rule in numbers.items() if rule.low > 0 or rule.above})
    refuses_all({key: f"{rule.low - 2:g}" for key, rule in numbers.items() if not rule.also})
    refuses_all({key: "9" * 23 for key, rule in numbers.items() if rule.high < 1e20})


def test_a_word_that_is_misspelt_names_the_right_one():
    for key, rule in rules(Word).items():
        for word in rule.words:
            if word in ("16-mixed", "default"):
                continue
            what, allowed, _ = judge(key, f"{word}x")
            assert "did you mean" in what or word in allowed
    for value in ("nonsense", "7", "[]", "true"):
        refuses_all({key: value for key in rules(Word)})
    refuses_all({key: "null" for key, rule in rules(Word).items() if not rule.null})


@pytest.mark.parametrize("value", ["maybe", "2", "1", "0", "[]", "1.0", "'yes'"])
def test_what_is_neither_true_nor_false_is_refused(value):
    refuses_all({key: value for key in rules(Flag)})


def test_a_fused_optimizer_is_a_flag_that_may_be_left_to_torch():
    (line,) = refused("optimizer.fused=maybe", *NANO)
    assert "allowed: true, false, null" in line
    for value in ("true", "false", "null"):
        accepted(f"optimizer.fused={value}", *NANO)


@pytest.mark.parametrize("value", ["''", "' '", "s3://bucket/x", "https://a/x", "[]", "' /tmp/x '"])
def test_a_path_that_is_empty_remote_or_no_text_is_refused(value):
    paths = [key for key, rule in rules(Text).items() if rule.path and key != "from_run"]
    refuses_all({key: value for key in paths})


WRONG_FORMS = {
    "trainer.devices": "0 -2 two 1.5 true null [] [0,0] [0,-1] [a] '0,0' 1e3 {a:1} ''",
    "trainer.max_time": "abc 01:00 00:00:00:00 5 [] {hour:1} {hours:-1} {} '' true",
    "trainer.limit_train_batches": "-1 1.5 -0.5 abc true [] nan inf 0",
    "trainer.limit_val_batches": "-1 1.5 -0.5 abc true [] nan",
    "trainer.limit_test_batches": "-1 1.5 -0.5 abc true [] nan",
    "trainer.overfit_batches": "-1 1.5 abc true [] null",
    "trainer.val_check_interval": "0 0.0 -1 1.5 abc null nan [] true",
    "trainer.fast_dev_run": "-1 maybe 1.5 [] null",
    "scheduler.warmup_steps": "-1 1.5 abc nan true [] -0.5",
    "optimizer.betas": "[] [0.9] [0.9,1.0] [0.9,-0.1] 0.9 [0.9,a] [0.9,0.9,0.9] null abc",
    "name": "'' ../x /x 'a/../../b' [] null ~/x",
    "allow_changes": "[modle] [1] x null",
    "data.path": "[] 5 s3://b [1] ''",
}


def test_a_value_that_has_none_of_its_keys_forms_is_refused():
    columns = {key: values.split() for key, values in WRONG_FORMS.items()}
    for i in range(max(map(len, columns.values()))):
        refuses_all({key: values[i] for key, values in columns.items() if i < len(values)})


def test_every_rule_is_of_a_kind_that_is_tested():
    others = rules((Either, Listing)).keys() - WRONG_FORMS.keys()
    assert others == {
        "allowed_targets",
        "data.train_path",
        "data.val_path",
        "trainer.limit_predict_batches",
    }


def test_each_example_that_is_offered_is_right():
    for key, rule in RULES.items():
        assert rule.example is None or rule.wrong(rule.example) is None, key


# Typed -> the key or words that the answer names.
NEAREST = {
    "trainer.device=2": "trainer.devices",
    "trainer.precison=32": "trainer.precision",
    "model.n_layer=3": "model.n_layers",
    "model.hidden_size=3": "model.d_model",
    "n_heads=2": "model.n_heads",
    "lr=1e-3": "optimizer.lr",
    "learning_rate=1e-3": "optimizer.lr",
    "optimizer.learning_rate=1": "optimizer.lr",
    "batch_size=3": "data.batch_size",
    "devices=2": "trainer.devices",
    "gpus=2": "trainer.devices",
    "++trainer.gpus=2": "trainer.devices",
    "epochs=3": "trainer.max_epochs",
    "optimiser=adamw": "optimizer",
    "optimiser.lr=1": "optimizer.lr",
    "schedular.warmup_steps=3": "scheduler.warmup_steps",
    "strategy.tensor_paralel_size=2": "strategy.tensor_parallel_size",
    "checkpoint.every_n_step=2": "checkpoint.every_n_steps",
    "launcher.max_restart=2": "launcher.max_restarts",
    "ckpt=x": "ckpt_path",
    "sede=3": "seed",
    "hydra.run.dri=x": "hydra.run.dri",
    "model.name=gpt3": "model=gpt2",
    "trainer.logger=csv": "logger=csv",
    "+trainer.callbacks=x": "callbacks=default",
    "trainer.resume_from_checkpoint=x": "ckpt_path",
    "strategy.nam=ddp": "strategy.name",
    "+strategy.foo=1": "unknown key",
    "model.d_model.x=1": "model.d_model is one value",
}


def test_what_is_set_elsewhere_is_no_list_of_keys():
    words = ("logger=true", "callbacks=null", "profiler=simple", "default_root_dir=/x")
    for line in refused(*(f"trainer.{word}" for word in words)):
        assert "it is set elsewhere; try: " in line and "allowed" not in line


def test_an_unknown_key_names_the_one_that_was_meant():
    lines = refused(*NEAREST)
    for word, meant in NEAREST.items():
        key = word.lstrip("+").partition("=")[0]
        told = [line for line in lines if line.startswith((f"error: {key}=", f"error: {key}:"))]
        assert len(told) == 1 and meant in told[0], (word, told)


# A key of another choice of its group -> the choice that lacks it, and a key that it has.
OF_ANOTHER_CHOICE = {
    "data=text data.num_samples=64": ("data.num_samples=64: data=text has no", "val_fraction"),
    "data.path=x": ("data.path=x: data=dummy_text has no", "num_samples"),
    "optimizer.momentum=0.9": ("optimizer.momentum=0.9: optimizer=adamw has no", "betas"),
    "data=text ~data.num_samples": ("data.num_samples: data=text has no", "val_fraction"),
}


@pytest.mark.parametrize("words", OF_ANOTHER_CHOICE)
def test_a_key_that_the_choice_lacks_is_not_offered_again(words):
    (line,) = refused(*words.split())
    assert all(piece in line for piece in OF_ANOTHER_CHOICE[words]), line
    assert "did you mean" not in line


# A data set that is not there -> pieces of the answer.
NO_DATA_SET = {
    "data.val=null": ("data.val=null: missing, every run validates", "trainer.limit_val_batches=0"),
    "~data.val": ("data.val: missing, every run validates", "trainer.limit_val_batches=0"),
    "data.train=null": ("data.train=null: missing", "data=<choice>"),
    "data.val=5": ("data.val=5: not a mapping with a _target_", "trainer.limit_val_batches=0"),
}


@pytest.mark.parametrize("words", NO_DATA_SET)
def test_a_run_without_a_data_set_is_refused(words):
    (line,) = refused(words)
    assert all(piece in line for piece in NO_DATA_SET[words]), line


# Words that are no override, or no choice -> a piece of the answer.
UNREADABLE = {
    "seed": "seed=<value>",
    "=1": "no key",
    "seed=[1,": "\"seed='[1,'\"",
    "name=é": "\"name='é'\"",
    "name=a=b": "\"name='a=b'\"",
    "run_dir=/x/ü=1": "'/x/ü=1'",
    "trainer.devices=0,1": "'trainer.devices=[0,1]'",
    "optimizer.lr=1e-3,1e-4": "-m for a sweep",
    "data.seq_len=range(1,9)": "-m for a sweep",
    "model=null": "gpt_nano",
    "logger=null": "logger=none",
    "data=5": "dummy_text",
    "model@x=gpt2": "model=gpt2",
    "hydra/launcher=slurm": "basic",
    "experiment=quik": "quickstart",
    "callbacks=nope": "default",
    "checkpoint=bset": "every_n_steps",
    "launcher=foo": "launcher.<key>",
    "seed=${nope}": "nope",
    "data.seq_len=${oc.env:NO_SUCH_VARIABLE}": "NO_SUCH_VARIABLE",
    "data.seq_len=${data.seq_len}": "data.seq_len",
    "~nothing": "unknown key",
    "~trainer.devices": "missing",
    "~data.batch_size": "missing",
    "~trainer": "missing",
    "~seed": "missing",
    "--foo": "--help",
    "--config-dir=/nope": "no such folder",
    "--config-path=nope": "no such folder",
    "--config-name=trian": "train",
    "--experimental-rerun=x": "from_run",
}


@pytest.mark.parametrize("word", UNREADABLE)
def test_a_word_that_cannot_be_read_shows_how_to_type_it(word):
    (line,) = refused(word)
    assert UNREADABLE[word] in line, line


@pytest.mark.parametrize("name", ["train2", "schema"])
def test_only_configs_that_can_run_are_offered(name):
    (line,) = refused(f"--config-name={name}")
    assert line.endswith("; allowed: train")


@pytest.mark.parametrize(
    "content", ["defaults:\n  - override /model: gpt_nano\n", "trainer:\n  max_steps: 3\n"]
)
def test_an_experiment_without_its_first_line_is_told_to_have_it(tmp_path, content):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(content)
    (line,) = refused(f"--config-dir={tmp_path}", "experiment=mine")
    assert line.startswith("error: experiment=mine: ") and "# @package _global_" in line
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{content}")
    accepted(f"--config-dir={tmp_path}", "experiment=mine", *NANO)


# Words -> what is said of them, in words that need no second reading.
PLAIN = {
    "trainer.devices=9999": "too many processes for",
    "strategy=pipeline trainer.devices=4 strategy.microbatches=2": "one microbatch per stage (4)",
    "trainer.max_time=00:00:00:00": "must be longer than 0 s",
    "trainer.max_time={hours:0}": "must be longer than 0 s",
    "-m optimizer.lr=interval(0,1)": "basic sweeper cannot sample an interval",
}


@pytest.mark.parametrize("words", PLAIN)
def test_what_is_wrong_is_said_plainly(words):
    assert any(PLAIN[words] in line for line in refused(*words.split()))


# Options that would be accepted without effect, or cannot be together -> the key that is named.
TOGETHER = {
    "strategy=ddp strategy.tensor_parallel_size=2 trainer.devices=2": "strategy.tensor_parallel",
    "strategy=ddp strategy.pipeline_parallel_size=2 trainer.devices=2": "strategy.pipeline",
    "strategy=fsdp strategy.comm_hook=fp16 trainer.devices=2": "strategy.comm_hook",
    "strategy=fsdp strategy.microbatches=2 trainer.devices=2": "strategy.microbatches",
    "strategy=ddp strategy.cpu_offload=true trainer.devices=2": "strategy.cpu_offload",
    "strategy=ddp strategy.schedule=gpipe trainer.devices=2": "strategy.schedule",
    "strategy=single trainer.devices=2": "trainer.devices",
    "strategy=single strategy.backend=gloo": "strategy.backend",
    "strategy=pipeline trainer.devices=8": "strategy.pipeline_parallel_size",
    "strategy=pipeline strategy.pipeline_parallel_size=9 trainer.devices=9": "strategy.pipeline",
    "strategy=pipeline trainer.devices=2 strategy.microbatches=3": "strategy.microbatches",
    "strategy=pipeline trainer.devices=4 strategy.microbatches=2": "strategy.microbatches",
    "strategy=pipeline trainer.devices=2 data.batch_size=3": "data.batch_size",
    "strategy=tensor_parallel trainer.devices=3": "strategy.tensor_parallel_size",
    "strategy=fsdp_tensor_parallel trainer.devices=3": "strategy",
    "strategy=fsdp trainer.precision=16-mixed trainer.devices=2": "trainer.precision",
    "strategy=fsdp model.compile=model trainer.devices=2": "model.compile",
    "strategy.backend=nccl trainer.accelerator=cpu": "strategy.backend",
    "strategy=fsdp strategy.cpu_offload=true trainer=cpu trainer.devices=2": "strategy.cpu_offload",
    "trainer.precision=16-true": "trainer.precision",
    "data.global_batch_size=64 trainer.accumulate_grad_batches=2": "trainer.accumulate_grad",
    "data.global_batch_size=16": "data.global_batch_size",
    "checkpoint=none checkpoint.every_n_steps=5": "checkpoint.every_n_steps",
    "checkpoint=every_n_steps checkpoint.every_n_steps=null": "checkpoint.every_n_steps",
    "trainer.max_time=00:01:00:00 trainer.max_epochs=null": "scheduler.total_steps",
    "trainer.gradient_clip_algorithm=value": "trainer.gradient_clip_algorithm",
    "data.seq_len=514": "data.seq_len",
    "data.train.seq_len=1000": "data.train.seq_len",
    "data.train.num_samples=0": "data.train.num_samples",
    "data=text data.seq_len=513": "data.seq_len",
    "data=text model.vocab_size=100": "model.vocab_size",
    "ckpt_path=a init_from=b": "init_from",
    "max_tokens=10": "max_tokens",
    "objective=val/bits_per_byte": "objective",
    "checkpoint.monitor=val/bits_per_byte": "checkpoint.monitor",
    "trainer.num_nodes=2": "trainer.num_nodes",
    "trainer.devices=100000": "trainer.devices",
    "data.num_workers=5000": "data.num_workers",
    "trainer.reload_dataloaders_every_n_epochs=1": "trainer.reload_dataloaders_every_n_epochs",
    "+callbacks.x=1": "callbacks.x",
}


@pytest.mark.parametrize("words", TOGETHER)
def test_options_that_cannot_be_together_are_refused(words):
    code = 66 if "ckpt_path=a" in words else 2
    lines = refused(*words.split(), code=2 if code == 66 else code)
    assert any(line.startswith(f"error: {TOGETHER[words]}") for line in lines), lines


WARNINGS = {
    "scheduler.warmup_steps=5000": "longer than the run of 936 steps",
    "scheduler.total_steps=10": "shorter than the run of 936 steps",
    "trainer.val_check_interval=5000": "longer than the run",
    "strategy=ddp": "one device",
    "strategy.bucket_cap_mb=50": "no effect on one device",
    "scheduler=constant scheduler.warmup_steps=10": "no effect",
    "optimizer.reference_batch_size=64": "no effect",
    "task=test": "no ckpt_path",
    "allow_changes=[seed]": "no effect without ckpt_path",
    "launcher.max_restarts=2": "no effect on one device",
    "optimizer.lr=5": "above 1",
    "trainer.gradient_clip_val=null trainer.gradient_clip_algorithm=norm": "no effect",
}


@pytest.mark.parametrize("words", WARNINGS)
def test_what_has_less_effect_than_it_seems_is_one_warning(words):
    (line,) = accepted(*words.split(), "trainer.accelerator=cpu")
    assert line.startswith("warning: ") and WARNINGS[words] in line


RIGHT = [
    "trainer.devices=auto",
    "trainer.devices=-1",
    "trainer.devices='2'",
    "trainer.devices=[0,1]",
    "trainer.precision=32",
    "trainer.precision=bf16",
    "trainer.precision=auto",
    "trainer.max_time=00:01:00:00 trainer.max_epochs=null scheduler=warmup_constant",
    "trainer.max_time=00:01:00:00 trainer.max_epochs=null scheduler.total_steps=900",
    "trainer.max_time={hours:1}",
    "trainer.max_epochs=-1 trainer.max_steps=5",
    "trainer.limit_train_batches=0.5",
    "trainer.limit_val_batches=0",
    "trainer.gradient_clip_val=null",
    "trainer.deterministic=warn",
    "trainer.fast_dev_run=2",
    "data.seq_len=257",
    "data.global_batch_size=64",
    "data=text",
    "data=text data.tokenizer=bpe",
    "optimizer=muon",
    "scheduler.warmup_steps=0.1",
    "scheduler.start_factor=0",
    "name=a/b",
    "~callbacks.sample",
    "logger=[tensorboard,csv]",
    "profiler=simple",
    "profiler=torch",
    "strategy=fsdp trainer.devices=2",
    "strategy=pipeline trainer.devices=2",
    "strategy=tensor_parallel trainer.devices=2",
    "strategy=fsdp_tensor_parallel trainer.devices=4",
    "strategy=ddp_pipeline trainer.devices=4",
    "experiment=quickstart",
    "seed=4294967295",
    "hydra/job_logging=disabled",
    "hydra.verbose=true",
]


@pytest.mark.parametrize("words", RIGHT)
def test_what_is_right_is_accepted(words):
    lines = accepted(*NANO, *words.split())
    assert not [line for line in lines if "more processes than" not in line]
