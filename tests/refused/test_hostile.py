"""Files of another person run no code and change nothing of the victim.

Each comes in through a command that a user would type, or through `gptrain.load`, and is refused in
one line. The rows are in hostile.yaml and hostile.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml

import gptrain
from gptrain.checkpoints.manifest import DamagedCheckpointError
from gptrain.data import DataError
from gptrain.models import SimpleGPT
from tests.refused import hostile
from tests.refused.commands import RUN, answer
from tests.refused.hostile import config, fill, plant, victim_and_payloads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TABLE = yaml.safe_load(Path(__file__).with_name("hostile.yaml").read_text())
SMALL = f"{RUN} {hostile.NET}"
REFUSALS = (
    gptrain.ConfigError, DamagedCheckpointError, DataError, FileNotFoundError,
    ValueError,
)  # fmt: skip


@pytest.fixture(autouse=True)
def world(tmp_path, monkeypatch):
    with victim_and_payloads(tmp_path, monkeypatch):
        yield tmp_path


def refuses(line: str, folder: Path) -> None:
    """Check that a command ends with a code of the user's files or words, and one line."""
    ended = answer(line, folder)
    assert ended.code in (2, 65, 66, 73), ended.err
    errors = [line for line in ended.err if not line.startswith("warning: ")]
    assert len(errors) == 1 and errors[0].startswith("error: "), ended.err
    assert not [name for name in ended.written if name.endswith("result.json")]


def refuses_to_load(path: Path, trust: bool = True) -> None:
    """Check that `gptrain.load` raises one of its documented errors, with a short message."""
    with pytest.raises(REFUSALS) as caught:
        gptrain.load(path, trust=trust)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 4 and all(len(line) < 1000 for line in lines), lines


def test_the_payloads_are_armed(world):
    torch.load("evil.pt", weights_only=False)
    (world / "ran").unlink()


@pytest.mark.parametrize("attack", TABLE["overrides"])
def test_the_overrides_of_a_run_are_data(attack, world):
    words = TABLE["overrides"][attack]
    text = words if isinstance(words, str) else yaml.safe_dump(words)
    fill(world, {
        "old/.hydra/overrides.yaml": text.encode(), "link": "/etc/hostname",
        "links/a.txt": b"a text", "links/b.txt": "/etc/hostname", "chain/inside": "../links",
        "tok/tokenizer.json": b'{"type": "bytes"}\n', "tok/chat_template.jinja": "/etc/passwd",
    })  # fmt: skip
    ended = answer("from_run=old trainer.fast_dev_run=true", world)
    assert ended.code in (2, 65) and ended.written == [], ended.err
    assert all(line.startswith("error: ") for line in ended.err) and ended.err


@pytest.mark.parametrize("command", ["export", "generate"])
def test_the_overrides_of_a_run_are_data_for_a_command(command, world):
    words = ["trust=true", "model._target_=antigravity.fly"]
    fill(world, {"old/.hydra/overrides.yaml": yaml.safe_dump(words).encode()})
    os.mkfifo(world / "old" / ".hydra" / "signature")
    refuses(f"{command} from_run=old", world)
    fill(world, {"deep/.hydra/overrides.yaml": b"[" * 20_000})
    refuses(f"{command} from_run=deep", world)


def test_an_export_writes_nothing_through_a_link(world):
    fill(world, {"old/.hydra/overrides.yaml": b"[model=gpt_nano]", "out/.hydra": "../victim"})
    refuses("export from_run=old trust=true run_dir=out", world)


def test_an_intact_folder_loads(world):
    plant(world / "old")
    assert isinstance(
        gptrain.load(config(world / "old", {"model": hostile.MODEL}), trust=True), SimpleGPT
    )


@pytest.mark.parametrize("attack", TABLE["configs"])
def test_the_config_of_a_folder_is_data(attack, world):
    plant(world / "old")
    refuses_to_load(config(world / "old", TABLE["configs"][attack]), trust=False)
    values = TABLE["configs"][attack]
    if isinstance(values, dict) and "_target_" in values.get("model", ()):
        torch.save({"state_dict": {}, "model": values["model"]}, world / "x.ckpt")
        refuses_to_load(world / "x.ckpt", trust=False)


@pytest.mark.parametrize("attack", hostile.STATES)
def test_a_checkpoint_holds_tensors_or_is_refused(attack, world):
    plant(world / "old", {"state.ckpt": hostile.STATES[attack]()})
    fill(
        world,
        {"x.ckpt": hostile.STATES[attack](), "old/.hydra/overrides.yaml": b"[model=gpt_nano]"},
    )
    for source in ("init_from=x.ckpt", "run_dir=old ckpt_path=last")[: 1 + (attack == "a payload")]:
        refuses(f"{SMALL} {source}", world)


@pytest.mark.parametrize("attack", hostile.MANIFESTS)
def test_a_manifest_is_data(attack, world):
    path = plant(world / "old", **hostile.MANIFESTS[attack])
    refuses_to_load(config(world / "old", {"model": hostile.MODEL}))
    refuses_to_load(path)
    if attack == "outside":
        refuses(f"{SMALL} run_dir=old ckpt_path=last", world)


@pytest.mark.parametrize("attack", hostile.SHARDS)
def test_shards_hold_tensors_and_their_places_are_data(attack, world):
    plant(world / "old", {"model.safetensors": hostile.SHARDS[attack]})
    refuses_to_load(config(world / "old", {"model": hostile.MODEL}))


@pytest.mark.parametrize("attack", hostile.WEIGHTS)
def test_a_folder_of_weights_is_data(attack, world):
    fill(world / "hf", hostile.WEIGHTS[attack])
    refuses(f"{SMALL} init_from=hf", world)


def tokens(*head: int) -> bytes:
    words = [20240520, *head, *[0] * 253]
    return b"".join(word.to_bytes(4, "little", signed=True) for word in words) + bytes(64)


FILES = {
    "data=tokens data.train_path=x.bin data.val_path=x.bin": (
        tokens(1, 2**31 - 1), tokens(1, -5), tokens(9, 1),
    ),
    "data=text data.path=text.txt data.tokenizer=x": (
        b"{}", b'{"model": {"vocab": 5}}', b'{"type": "bytes"',
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", FILES, ids=("tokens", "a tokenizer"))
def test_a_file_of_data_is_data(words, world):
    for content in FILES[words]:
        name = "x.bin" if "tokens" in words else "x/tokenizer.json"
        fill(world, {name: content, "text.txt": b"a text\n" * 99})
        refuses(f"{SMALL} {words}", world)


@pytest.mark.parametrize("attack", TABLE["links"])
def test_a_run_writes_and_removes_nothing_through_a_link(attack, world):
    fill(world / "run", TABLE["links"][attack])
    ended = answer(f"{RUN} trainer.max_steps=1 run_dir=run ckpt_path=last", world)
    assert ended.code in (0, 65, 73), ended.err
    errors = [line for line in ended.err if not line.startswith("warning: ")]
    assert len(errors) == bool(ended.code) and all(x.startswith("error: ") for x in errors), errors
