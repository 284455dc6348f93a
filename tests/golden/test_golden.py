"""What gptrain builds, composes, plans, prints and writes is as the golden files describe it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml

import gptrain
from tests.golden import as_lines, check, masked
from tests.refused.commands import Answer, answer
from tests.run import ROOT, Run, new_place, train

SMALL = (
    "model=gpt_nano model.d_model=16 model.n_heads=2 model.n_layers=1 data=text data.path=text.txt "
    "data.seq_len=16 data.batch_size=4 trainer.accelerator=cpu trainer.max_steps=6 "
    "trainer.val_check_interval=3 trainer.log_every_n_steps=2"
)


@cache
def folder() -> Path:
    """Return a folder with texts and conversations, in which the commands of this file run."""
    place = new_place().resolve()
    for name, word in (("text", "quick"), ("other", "slow")):
        lines = (f"line {n} of the {word} text\n" for n in range(1000))
        (place / f"{name}.txt").write_text("".join(lines))
    talks = ([("user", f"question {n}"), ("assistant", f"answer {n}")] for n in range(40))
    with open(place / "chats.jsonl", "w") as file:
        for talk in talks:
            messages = [{"role": role, "content": content} for role, content in talk]
            file.write(json.dumps({"messages": messages}) + "\n")
    return place


def run(*words: str, data: str = "data", **options: Any) -> Run:
    """Run train.py on the texts, with a folder for prepared data."""
    where = [f"output_dir={folder()}/{data}"]
    changed = [word.replace("=text.txt", f"={folder()}/text.txt") for word in words]
    return train(*changed, *where, **options)


# A run without a default, as far as its options can be together -> number of ranks.
BUILT = {
    """seed=5 model=gpt_nano model.d_model=32 model.n_heads=2 model.n_layers=2 model.dropout=0.2
    model.max_seq_len=24 model.activation=gelu_tanh module.loss.label_smoothing=0.1
    data=text data.path=text.txt data.seq_len=16 data.batch_size=2 data.global_batch_size=8
    data.num_workers=1 data.val_fraction=0.2 data.end_of_document=true model.vocab_size=300
    data.tokenizer=bpe
    optimizer.lr=0.003 optimizer.betas=[0.8,0.9] optimizer.eps=1e-7 optimizer.weight_decay=0.3
    optimizer.fused=false optimizer.lr_scaling=sqrt optimizer.reference_batch_size=2
    scheduler=warmup_stable_decay scheduler.warmup_steps=3 scheduler.decay_steps=4
    scheduler.total_steps=10 scheduler.start_factor=0.2 scheduler.min_factor=0.05
    trainer.accelerator=cpu trainer.max_steps=10 trainer.val_check_interval=4
    trainer.limit_val_batches=2 trainer.limit_test_batches=3 trainer.num_sanity_val_steps=1
    trainer.gradient_clip_val=0.5 +trainer.gradient_clip_algorithm=value
    trainer.log_every_n_steps=3 trainer.precision=bf16-mixed trainer.deterministic=true
    trainer.enable_progress_bar=false trainer.max_time=00:01:00:00
    +trainer.min_epochs=1 trainer.min_steps=2
    callbacks=ema callbacks.ema.decay=0.9 ~callbacks.sample
    +callbacks.stop={_target_:lightning.pytorch.callbacks.EarlyStopping,monitor:val/loss,patience:7}
    logger=csv profiler=simple checkpoint.keep=3 checkpoint.every_n_steps=3""": 1,
    """seed=6 model=llama_nano model.d_model=32 model.n_heads=4 model.n_kv_heads=2 model.d_ff=48
    model.n_layers=2 model.qk_norm=false model.max_seq_len=32 model.vocab_size=256
    module.loss.z_loss=0.001 data=mixture +data@data.parts.a=text +data@data.parts.b=text
    data.parts.a.path=text.txt data.parts.b.path=other.txt data.parts.b.documents=masked
    data.seq_len=16 data.batch_size=2 trainer.accumulate_grad_batches=2
    optimizer=muon optimizer.lr=0.002 optimizer.embedding_lr=0.1 optimizer.head_lr=0.02
    optimizer.vector_lr=0.03 optimizer.momentum=0.8 optimizer.weight_decay=0.2
    scheduler=warmup_linear scheduler.warmup_tokens=200 scheduler.min_factor=0.2
    max_tokens=1000 trainer.accelerator=cpu trainer.log_every_n_steps=1
    trainer.enable_progress_bar=false trainer.gradient_clip_val=null
    strategy=ddp strategy.bucket_cap_mb=3 strategy.gradient_as_bucket_view=false
    strategy.find_unused_parameters=true callbacks=none logger=none checkpoint=none
    trainer.detect_anomaly=true""": 2,
}


def test_a_built_run_has_the_options_that_were_typed():
    seen = []
    for number, (words, n_ranks) in enumerate(BUILT.items()):
        path = folder() / f"seen-{number}.json"
        look = f"+callbacks.look={{_target_:tests.golden.look.Look,path:'{path}'}}"
        other = words.replace("other.txt", f"{folder()}/other.txt")
        place = f"run_dir={folder()}/built"
        ended = run(*other.split(), look, f"{place}-{number}", data="built", ranks=n_ranks)
        assert ended.code == 0, ended.err
        seen.append(json.loads(path.read_text()))
    check("built.json", masked(as_lines(seen, depth=3), folder()))


HYBRID_MESH = ROOT / "tests/topologies/v100_hybrid_mesh.txt"
PLANS = (
    "hardware=h100_sxm model=gpt2 trainer.devices=8 trainer.precision=bf16-mixed",
    "hardware=h100_sxm model=llama_8b trainer.devices=8 trainer.num_nodes=2 optimizer=muon "
    "trainer.precision=bf16-mixed trainer.accumulate_grad_batches=3 max_tokens=1e10 "
    "data.seq_len=4096 model.activation_checkpointing=full strategy=fsdp strategy.replicas=2",
    "hardware=a100_sxm_80gb model=gpt2_xl trainer.devices=4 trainer.precision=bf16-true "
    "model.activation_checkpointing=selective data.batch_size=4 model.compile=blocks "
    "model.dropout=0.1 strategy=ddp strategy.bucket_cap_mb=50",
    "hardware=v100_sxm2 model=llama_124m trainer.devices=8 trainer.num_nodes=3 "
    "trainer.precision=32-true data.batch_size=4 data.seq_len=512",
    "hardware=v100_sxm2 topology=HYBRID_MESH model=gpt2 trainer.devices=8 data.batch_size=4",
    "hardware=t4 model=simple_gpt trainer.devices=1 trainer.precision=16-mixed",
    "hardware=rtx_4090 model=llama_1b trainer.devices=2 data.batch_size=1 data.seq_len=2048",
    "hardware=h200 model=qwen3_4b trainer.devices=4 strategy=tensor_parallel "
    "trainer.precision=bf16-mixed data.global_batch_size=64 data.batch_size=2 data.seq_len=1024",
    "hardware=l4 model=gpt2_medium trainer.devices=2 strategy=pipeline data.batch_size=16 "
    "strategy.microbatches=8 optimizer._target_=torch.optim.SGD ~optimizer.betas ~optimizer.eps",
)


def answer_here(line: str) -> Answer:
    """Run a command in the folder. HYBRID_MESH and CONF stand for two paths."""
    for name, path in (("HYBRID_MESH", HYBRID_MESH), ("CONF", ROOT / "conf")):
        line = line.replace(name, f"""\"'{path}'\"""")  # quoted for Hydra, and for the shell
    return answer(line, folder())


def test_plans():
    plans = {}
    for words in PLANS:
        ended = answer_here(f"plan {words} --json")
        assert ended.code == 0, ended.err
        plans[words] = json.loads(
            "\n".join(ended.out), parse_float=lambda x: float(f"{float(x):.4g}")
        )
    check("plans.json", masked(as_lines(plans, depth=3), folder()))


def choices() -> list[str]:
    """Return words that take each choice of the two conf folders: one of each group at a time."""
    files = [*ROOT.glob("conf/*/*.yaml"), *ROOT.glob("src/gptrain/conf/*/*.yaml")]
    groups: dict[str, list[str]] = defaultdict(list)
    for group, name in sorted({(file.parent.name, file.stem) for file in files}):
        groups[group].append(f"{group}={name}")
    # A search needs a package of its own, and conf/local is that of this machine.
    alone = [groups.pop(name, []) for name in ("experiment", "hparams_search", "local")]
    rows = zip_longest(*groups.values())
    return [" ".join(filter(None, row)) for row in rows] + alone[0]


def flat(values: Any, key: str = "") -> dict[str, Any]:
    """Return the leaves of a config by their dotted keys."""
    if not isinstance(values, dict) or not values:
        return {key: values}
    return {
        k: v for name in values for k, v in flat(values[name], f"{key}.{name}".lstrip(".")).items()
    }


def compose(words: str) -> dict[str, Any]:
    ended = answer(f"--cfg job {words}", folder())
    assert ended.code == 0, ended.err
    return flat(yaml.load("\n".join(ended.out), yaml.CSafeLoader))


def test_each_choice_composes_to_the_same_config():
    default = compose("")
    configs = {"": default}
    for words in choices():
        composed = compose(words)
        gone = {f"~{key}": None for key in default.keys() - composed.keys()}
        changed = {k: v for k, v in composed.items() if k not in default or default[k] != v}
        configs[words] = changed | gone
    check("configs.json", masked(as_lines(configs, depth=2), folder()))


STOPS = "{_target_:tests.lit.own.callbacks.Stop,how:SIGTERM,at:on_train_batch_end,step:3}"
TINY = (
    "data=text data.path=text.txt data.seq_len=16 data.batch_size=4 trainer.accelerator=cpu "
    "trainer.max_steps=2 trainer.limit_val_batches=2 logger=none"
)
LLAMA = (
    "model=llama_nano model.d_model=16 model.n_heads=2 model.n_kv_heads=1 model.d_ff=24 "
    "model.n_layers=1 model.max_seq_len=64"
)
COMMANDS = (
    f"{SMALL} run_dir=one logger=csv",
    "from_run=one ckpt_path=one trainer.max_steps=9 allow_changes=[scheduler] run_dir=two",
    "from_run=one task=test run_dir=three",
    "from_run=one task=validate ckpt_path=best objective=val/my run_dir=four",
    "generate from_run=one prompt=line n_tokens=5 temperature=0",
    "export from_run=one run_dir=five",
    f"{SMALL} logger=none checkpoint.mirror=copies run_dir=mirrored",
    f"{SMALL} logger=none checkpoint.mirror=copies run_dir=restored ckpt_path=last",
    f"{LLAMA} {TINY} run_dir=llama",
    "export from_run=llama format=hf dtype=bf16 run_dir=hf",
    f"{LLAMA} experiment=chat init_from=llama data.path=chats.jsonl data.seq_len=64 "
    "trainer.max_steps=2 trainer.accelerator=cpu logger=none run_dir=chat",
    "generate from_run=chat prompt=Hello n_tokens=3 temperature=0",
    "model=my_lstm data=my_digits module=my_module callbacks=[ema,my_callback] trainer.max_steps=2 "
    "trainer.accelerator=cpu logger=none run_dir=yours",
    "model=gpt_nano ~data +data._target_=tests.lit.own.data.DataModule +data.num_samples=44 "
    "trainer.max_steps=3 trainer.accelerator=cpu logger=none callbacks=none run_dir=datamodule",
    f"{TINY} model=gpt_nano -m optimizer.lr=1e-3,2e-3 run_dir=sweep",
    f"{TINY} model=gpt_nano -m optimizer.lr=1e-3,3e-3 run_dir=sweep ckpt_path=last",
    "runs sweep",
    "plan hydra.searchpath=[CONF] hardware=t4 model=my_lstm trainer.devices=2",
    "plan hardware=v100_sxm2 topology=HYBRID_MESH model=gpt2 trainer.devices=8 max_tokens=1e9",
    "collectives trainer.devices=2 trainer.accelerator=cpu",
)


@cache
def outputs() -> tuple[str, ...]:
    """Run the commands, and two runs of other kinds, and return what they have printed."""
    parts = []
    for words in COMMANDS:
        ended = answer_here(words)
        assert ended.code == 0, ended.err
        parts += [f"$ {words}", *ended.out, *(f"stderr: {line}" for line in ended.err), ""]
    for name, words, ranks, code in (
        ("six", f"{SMALL} logger=none strategy=fsdp callbacks=none", 2, 0),
        ("seven", f"{SMALL} logger=none callbacks=none +callbacks.stop={STOPS}", 1, 75),
    ):
        ended = run(*words.split(), f"run_dir={folder()}/{name}", ranks=ranks)
        assert ended.code == code, ended.err
        parts += [f"$ {words} run_dir={name}", *ended.out.splitlines()]
        parts += [*(f"stderr: {line}" for line in ended.err.splitlines()), ""]
    return tuple(parts)


def test_what_is_printed():
    check("output.txt", masked("\n".join(outputs()), folder()))


def test_what_python_returns():
    outputs()
    net, tokenizer = gptrain.load(folder() / "one", with_tokenizer=True)
    scores = gptrain.score(net, tokenizer, ["line", "a longer text " * 40], context=200)
    words = ["model=gpt_nano", "trainer.accelerator=cpu", "trainer.max_steps=3", "logger=none"]
    with pytest.raises(gptrain.ConfigError) as refused:
        gptrain.fit([*words, "model.dropout=2", "seed=x"])
    with pytest.raises(gptrain.RunFailed) as failed:
        gptrain.fit([*words, f"run_dir={folder()}/python", "optimizer.lr=1e30"])
    seen = {
        "net": repr(net),
        "scores": [[round(score.nats, 2), len(score.log_probs), score.n_bytes] for score in scores],
        "refused": refused.value.lines,
        "failed": [failed.value.code, failed.value.folder.name, *failed.value.lines],
    }
    check("python.json", masked(as_lines(seen, depth=2), folder()))


def test_a_log_is_what_is_printed():
    outputs()
    lines = (folder() / "one" / "train.log").read_text()
    check("train.log.txt", masked(lines, folder()))


def keys_of(file: Path) -> list[str] | None:
    """Return the keys of a file of a run, or None for a file without keys."""
    if file.suffix == ".json" and file.name != "tokenizer.json":
        keys = flat(json.loads(file.read_text()))
        # Outside of a git checkout, and with other packages, these two hold other keys.
        return sorted({re.sub(r"^(git|versions)\..*", r"\1", key) for key in keys})
    if file.suffix == ".jsonl":
        return sorted({key for line in file.read_text().splitlines() for key in json.loads(line)})
    if file.suffix == ".csv":
        return file.read_text().splitlines()[0].split(",")
    return None


def test_the_files_of_a_run_folder_and_their_keys():
    outputs()
    described: dict[str, Any] = {}
    for name in ("six", "seven", *re.findall(r"(?:run_dir|mirror)=(\w+)", " ".join(COMMANDS))):
        place = folder() / name
        files = sorted(path for path in place.rglob("*") if path.is_file())
        names = {masked(str(path.relative_to(place)), folder()): path for path in files}
        has_keys = name in ("one", "two", "three", "five", "six", "seven", "hf")
        described[name] = {n: keys_of(path) for n, path in names.items()} if has_keys else [*names]
    check("files.json", masked(as_lines(described, depth=2), folder()))
