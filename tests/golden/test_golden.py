"""What gptrain builds, composes, plans, prints and writes is as the golden files describe it."""

from __future__ import annotations

import csv
import glob
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import gptrain
from gptrain import data, loss, models, optim
from gptrain.text import sampling
from recipes.chat import ChatDataset
from tests.golden import as_lines, check, flat, masked
from tests.refused.commands import RUN, Answer, answer
from tests.run import ROOT, Run, new_place, train

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called", "ignore:data.tokenizer:")
ROWS = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text())
# Keys of the values that no second run repeats.
UNSTEADY = re.compile(
    r"_s$|seconds|saved_at|perf/|sha256|run_id|host$|time$|goodput|mfu|version|memory|elapsed"
    r"|traceback|^(phase_s|bytes|git|pid|rng)$"
)
HYBRID_MESH = ROOT / "tests/topologies/v100_hybrid_mesh.txt"


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
    for name, content in ROWS["files"].items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return place


def run(*words: str, data: str = "data", **options: Any) -> Run:
    """Run train.py on the texts, with a folder for prepared data."""
    where = [f"output_dir={folder()}/{data}"]
    changed = [word.replace("=text.txt", f"={folder()}/text.txt") for word in words]
    return train(*changed, *where, **options)


def full(line: str) -> str:
    """Return a row with the words for which its names stand."""
    for name, words in ROWS["names"].items():
        line = line.replace(name, words)
    return line


def test_a_built_run_has_the_options_that_were_typed():
    seen = []
    for number, row in enumerate(ROWS["built"]):
        path = folder() / f"seen-{number}.json"
        look = f"+callbacks.look={{_target_:tests.golden.look.Look,path:'{path}'}}"
        other = row["words"].replace("other.txt", f"{folder()}/other.txt")
        place = f"run_dir={folder()}/built"
        ended = run(*other.split(), look, f"{place}-{number}", data="built", ranks=row["ranks"])
        assert ended.code == 0, ended.err
        seen.append(json.loads(path.read_text()))
    check("built.json", masked(as_lines(seen, depth=3), folder()))


def answer_here(line: str) -> Answer:
    """Run a command in the folder. HYBRID_MESH and CONFIGS stand for two paths."""
    for name, path in (("HYBRID_MESH", HYBRID_MESH), ("CONFIGS", ROOT / "conf")):
        line = line.replace(name, f"""\"'{path}'\"""")  # quoted for Hydra, and for the shell
    line, _, code = full(line).partition(" # ")
    ended = answer(line, folder())
    assert ended.code == int(code or 0), ended.err
    return ended


def test_plans():
    plans = {}
    for words in ROWS["plans"]:
        ended = answer_here(f"plan {words} --json")
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


@cache
def outputs() -> tuple[str, ...]:
    """Run the commands, and runs of other kinds, and return what they have printed."""
    parts = []
    for row in ROWS["runs"]:
        place = f"run_dir={folder()}/{row['run_dir']}"
        words = full(row["words"]).split()
        ended = run(*words, place, ranks=row["ranks"], env=row.get("env"))
        assert ended.code == row["code"], ended.err
        parts += [f"$ {row['words']} run_dir={row['run_dir']}", *ended.out.splitlines()]
        parts += [*(f"stderr: {line}" for line in ended.err.splitlines()), ""]
    for words in ROWS["commands"]:
        ended = answer_here(words)
        parts += [f"$ {words}", *ended.out, *(f"stderr: {line}" for line in ended.err), ""]
    run_folders()  # before the calls of Python change them
    return tuple(parts)


def test_what_is_printed():
    check("output.txt", masked("\n".join(outputs()), folder()))


def shown(value: Any) -> Any:
    """Return a value as JSON: tensors as lists, numbers with four digits."""
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if hasattr(value, "tolist"):
        return shown(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): shown(entry) for key, entry in value.items()}
    return [*map(shown, value)] if isinstance(value, Iterable) else repr(value)


@pytest.mark.parametrize("rows", ["python", "results"])
def test_what_python_returns(rows, monkeypatch):
    if rows == "results":
        outputs()
    monkeypatch.chdir(folder())
    names = {"gptrain": gptrain, "json": json, "np": np, "torch": torch, "gzip": gzip}
    names["glob"] = glob
    names |= {"read": load_file, "RUN": RUN.split(), "ChatDataset": ChatDataset}
    names["answer"] = answer_here
    for module in (data, models, optim, loss, sampling):
        names |= vars(module)
    parts = []
    for line in ROWS[rows]:
        try:
            value = shown(eval(line, names))
        except Exception as error:
            value = {type(error).__name__: shown(vars(error) or str(error))}
        parts += [f">>> {line}", json.dumps(value, ensure_ascii=False), ""]
    check(f"{rows}.txt", masked("\n".join(parts), folder()))


def test_a_log_is_what_is_printed():
    outputs()
    lines = (folder() / "one" / "train.log").read_text()
    check("train.log.txt", masked(lines, folder()))


def steady(value: Any, key: str = "") -> Any:
    """Return a value of a file with three digits, and # for what no second run repeats."""
    if UNSTEADY.search(key) and value is not None:
        return sorted(value) if key == "phase_s" else "#"
    if isinstance(value, dict):
        return {str(name): steady(value[name], f"{name}") for name in value}
    if isinstance(value, list | tuple):
        return [steady(entry, key) for entry in value]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), *value.shape]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def as_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def privacy(file: Path) -> str:
    """Return a mark for a file that other users cannot read, or in a folder that they cannot."""
    is_private = any(not path.stat().st_mode & 0o077 for path in (file, file.parent))
    return " (private)" if is_private else ""


def content_of(file: Path) -> Any:
    """Describe the content of a file of a run, or return None for a form that others show."""
    if file.suffix == ".safetensors":
        tensors = load_file(file).values()
        norm = sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5
        dtypes = " ".join(sorted({str(tensor.dtype) for tensor in tensors}))
        numbers = sum(tensor.numel() for tensor in tensors)
        with safe_open(file, "pt") as opened:
            about = " ".join(sorted(f"{k}={v:.9}" for k, v in opened.metadata().items()))
        return f"{len(tensors)} of {dtypes}, {numbers} numbers, norm {norm:.3g}, {about}"
    if file.suffix == ".ckpt":
        return steady(torch.load(file, weights_only=False))
    if file.suffix == ".json" and file.name != "tokenizer.json":
        return steady(json.loads(file.read_text()))
    if file.suffix == ".jsonl":
        return steady([*map(json.loads, file.read_text().splitlines())])
    if file.suffix == ".csv":
        rows = csv.DictReader(file.read_text().splitlines())  # without times, which may be 0
        named = [{k: as_number(v) for k, v in row.items() if k[-2:] != "_s"} for row in rows]
        return steady(named)
    if "tfevents" in file.name:
        events = EventFileLoader(str(file)).Load()
        return [f"{event.step} {value.tag}" for event in events for value in event.summary.value]
    return yaml.safe_load(file.read_text()) if file.name == "overrides.yaml" else None


@cache
def run_folders() -> str:
    """Describe the files that the commands have left."""
    described: dict[str, Any] = {}
    names = re.findall(r"(?:run_dir|mirror)=(\w+)", " ".join(ROWS["commands"]))
    for name in ["data", *(row["run_dir"] for row in ROWS["runs"]), *names]:
        place = folder() / name
        files = sorted(path for path in place.rglob("*") if path.is_file())
        # Of the checkpoints the last one is described.
        last = max((file.parts[-2] for file in files if "step-" in file.parts[-2]), default="")
        described[name] = {
            f"{file.relative_to(place)}{privacy(file)}": content_of(file)
            if file.parts[-2] == last or "step-" not in file.parts[-2]
            else None
            for file in files
        }
    return masked(as_lines(described, depth=2), folder())


def test_the_files_of_a_run_folder_and_their_content():
    outputs()
    check("files.json", run_folders())
