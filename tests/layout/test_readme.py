"""The README is true: its commands, options, files, tables and exit codes."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec

import pytest

import gptrain
from gptrain.core import errors
from gptrain.core.strategies import STRATEGIES
from tests.command_line import refused
from tests.conftest import ROOT
from tests.forked import forked_ranks
from tests.run import new_place, redirected, run_script
from tests.tools.campaign.scenarios import SCENARIOS

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
TRAIN = [
    command.removeprefix(".venv/bin/")
    for line in COMMANDS
    for command in line.split(" && ")
    if "python train.py" in command
]
# These options come last and win: they make a command small enough for a test.
SMALL = [
    "trainer.accelerator=cpu", "model.d_model=16", "trainer.max_steps=2", "data.batch_size=2",
    "data.seq_len=17", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
    "trainer.enable_progress_bar=false",
]  # fmt: skip
SMALL_GPT = [
    "model.n_heads=2", "model.n_layers=2", "model.vocab_size=256", "trainer.precision=32-true",
]  # fmt: skip


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def small(words: list[str]) -> list[str]:
    """Return the options of a command, followed by the options that make it small."""
    if "--help" in words or "--cfg" in words:
        return words
    gpt = [] if "model=my_lstm" in words else SMALL_GPT
    steps = [f"trainer.max_steps={4 if 'ckpt_path=last' in words else 2}"]
    ranks = ["trainer.devices=2"] if any("devices=" in word for word in words) else []
    is_llama = "experiment=quickstart" in words
    data = ["model.n_kv_heads=2", f"data.path={ROOT / 'src'}"] if is_llama else []
    return [*words, *SMALL, *gpt, *steps, *ranks, *data]


def typed(words: list[str], module: str = "") -> str:
    """Run train.py, or a module, in this process; return what it prints."""
    place = new_place()
    with redirected(place), forked_ranks(place / "out", place / "err"):
        code = run_script(words, module)
    out, err = ((place / name).read_text() for name in ("out", "err"))
    assert code == 0, (module, words, out, err)
    return out


def run_verb(command: str) -> str:
    """Run the line `python -m gptrain.<verb> <words>`, and return what it prints."""
    _, _, module, *words = shlex.split(command)
    return typed(words, module)


@pytest.mark.slow
def test_every_train_command_runs(tmp_path, monkeypatch):
    """Commands run in the order of the README, because some resume an earlier run."""
    monkeypatch.chdir(tmp_path)
    assert len(TRAIN) > 8
    for number, command in enumerate(TRAIN):
        words = shlex.split(command)[2:]
        if not any(word.startswith(("run_dir=", "--")) for word in words):
            words.append(f"run_dir={tmp_path / str(number)}")  # two runs may begin in one second
        out = typed(small(words))
        if "experiment=quickstart" in words:
            assert re.search(r"^sample +def ", out, re.MULTILINE), out
    (export,) = [command for command in COMMANDS if "gptrain.export" in command]
    run_verb(export)
    # An earlier test may have imported the package of `python -m gptrain.generate`, which hides the
    # function of the same name.
    monkeypatch.delitem(vars(gptrain), "generate", raising=False)
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, {})


def test_the_options_that_the_readme_shows_for_own_parts_work(train):
    table = "".join(re.findall(r"^\|.*\n", section("I want to …"), re.MULTILINE))
    shown = [text for text in re.findall(r"`([^`]+)`", table) if re.match(r'"?\+?[\w.]+=', text)]
    shown = [text for text in shown if not re.search("my_|FOLDER|outputs/", text)]
    words = [word for text in shown for word in shlex.split(text)]
    assert len(words) > 4
    run = train(*words, "trainer.val_check_interval=2")
    assert run.code == 0, run.err
    assert 0 <= run.metrics["val/top1"] <= 1 and run.column("train/loss")


def test_files_that_the_readme_names_exist():
    named = re.findall(r"`((?:src|conf|tests|train|\.ci|\.github)\b[\w./]*)`", README)
    named += re.findall(r"\]\(([^)]+)\)", README)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert len(named) > 20 and missing == ["conf/local/default.yaml"]


def test_the_readme_of_a_package_names_its_files_and_what_they_define():
    for readme in sorted((ROOT / "src" / "gptrain").glob("*/README.md")):
        text = readme.read_text()
        stems = {path.stem for path in readme.parent.glob("*.py")} - {"__init__", "__main__"}
        unnamed = [stem for stem in stems if not re.search(rf"\b{stem}\b", text)]
        assert not unnamed, f"{readme} does not say what these files hold: {unnamed}"
        for name, file in re.findall(r"`(\w+)` \(`([\w/]+\.py)`\)", text):
            path = readme.parent / file
            assert not path.is_file() or re.search(rf"\b{name}\b", path.read_text()), (readme, name)
        roots = (readme.parent, readme.parents[1], readme.parents[2], ROOT)
        for file in re.findall(r"`([\w.]+/[\w./]+\.(?:py|md))`", text):
            assert any((root / file).is_file() for root in roots), (readme, file)
        for command in re.findall(r"python -m ([\w.]+)", text):
            assert find_spec(command), (readme, command)


def test_the_table_lists_what_each_strategy_needs_of_a_net():
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", section("Strategies"), re.MULTILINE)
    assert {name for name, _ in rows} == STRATEGIES.keys()
    for name, needs in rows[:5]:  # the mixes need what their parts need
        shown = set(re.findall(r"`(\w+)`", needs)) - {"forward"}
        assert shown <= set(STRATEGIES[name].needs), name
        assert "…" in needs or shown == set(STRATEGIES[name].needs), name


def test_the_readme_lists_the_exit_codes_and_the_number_of_faults():
    text = section("Resume and exit codes").partition("Exit codes:")[2]
    constants = (value for name, value in vars(errors).items() if name.isupper())
    codes = {code for code in constants if isinstance(code, int) and code <= errors.INTERRUPTED}
    assert set(map(int, re.findall(r"\d+", text))) == codes
    assert "in forty ways" in " ".join(README.split()) and len(SCENARIOS) >= 40


def test_the_answer_to_a_wrong_option_is_as_shown():
    (shown,) = re.findall(r"```\n\$ python train.py (.*)\n([^`]*)```", README)
    assert "\n".join(refused(*shown[0].split())) == shown[1].strip()


def test_what_is_known_before_a_run_is_printed():
    shown = [command for command in COMMANDS if command.startswith("python -m gptrain.plan")]
    assert len(shown) == 2 and all(map(run_verb, shown))
