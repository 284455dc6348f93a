"""The house is kept: imports go one way, and each room knows only what it is made of.

Rules about this repository; a project made from the template may delete this folder.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "gptrain"

LEAVES = {
    "models", "data", "optim", "loss", "parallel", "lengths", "law", "costs", "resilience",
    "sampling", "small_files", "home", "streams",
}  # fmt: skip
FOLDER = {"resilience", "small_files", "problems"}  # what reads and writes a run's folder is of
COMMAND = {"home", "streams", *FOLDER}
# Room -> rooms of gptrain that it may import.
NOTHING = ("models", "sampling", "small_files", "home", "optim", "law", "lengths", "progress",
           "conf", "problems", "__init__")  # fmt: skip
MAY_IMPORT = {
    **{room: set() for room in NOTHING},
    "core": {"lengths"},
    "loss": {"lengths"},
    "texts": {"data", "sampling", "problems"},
    "scoring": {"data", "loss"},
    "shell": {"home", "problems"},
    "fitting": {"nets", "data", *COMMAND},
    "costs": {"lengths", "parallel"},
    "measure": {"costs"},
    "streams": {"problems"},
    "data": {"loss", "small_files", "progress"},
    "resilience": {"small_files", "problems", "progress"},
    "runs": COMMAND,
    # Over a sharded vocabulary it is made of the same parts; the table says who needs what.
    "parallel": {"loss"},
    "ranks": {"parallel", "costs", "shell", *COMMAND},
    "lit": (LEAVES - {"models"}) | {"ranks", "measure", "problems", "shell"},
    "nets": {"config", "data", "parallel", *FOLDER},
    "config": {"ranks", "shell", "lengths", "costs", "parallel", "data", "runs", *COMMAND},
    "assemble": (LEAVES - {"models"}) | {"lit", "ranks", "config", "nets", "problems", "shell"},
}
# May import anything but each other (the ladder asks for the plan's machine), as do __main__.py and
# command.py of a room with a command.
COMMANDS = {"export", "collectives", "generate", "adopt", "plan", "launch", "ladder",
            "command"}  # fmt: skip
FOREIGN = {
    "lightning": {"lit", "assemble"},
    "hydra": {"config", "nets", "assemble", "ranks"},
    "pydantic": {"config", "core"},
}
PRIVATE = {  # of Lightning, and where: what correctness needs, see lit/lightning.py
    "_signal_connector": "lit/lightning.py",
    "_broadcast_sigterm_tensor": "lit/lightning.py",
    "_checkpoint_connector": "lit/lightning.py",
    "_user_managed": "lit/lightning.py",
    "_batches_that_stepped": "lit/lightning.py",
    "_restarting": "lit/lightning.py",
}


@cache
def modules() -> list[Path]:
    """Of the library; behind its template are files of this project."""
    return sorted(path for path in PACKAGE.rglob("*.py") if "template" not in path.parts)


def room(path: Path) -> str:
    if path.name in ("__main__.py", "command.py"):
        return "command"  # of whatever room: nobody imports it but the one who types it
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> set[str]:
    """Absolute names of all that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_a_room_imports_only_the_rooms_below_it():
    wrong = []
    for path in modules():
        here = room(path)
        if here in COMMANDS:
            continue
        names = {name for name in imports(path) if name.startswith("gptrain.")}
        others = {name.split(".")[1] for name in names} - {here, "core"}
        wrong += [
            f"{path.relative_to(PACKAGE)} imports {name}" for name in others - MAY_IMPORT[here]
        ]
    assert not wrong, "\n".join(wrong)


def test_the_order_of_the_rooms_has_no_cycle():
    TopologicalSorter(MAY_IMPORT).prepare()  # raises CycleError


def test_only_its_own_rooms_know_a_framework():
    for package, allowed in FOREIGN.items():
        knowing = {
            room(path) for path in modules() if package in {n.split(".")[0] for n in imports(path)}
        }
        assert knowing - COMMANDS <= allowed, package


def test_nothing_of_hydras_inside_is_imported():
    for path in modules():
        assert not any(name.startswith("hydra._internal") for name in imports(path)), path


def test_private_names_of_lightning_stand_in_one_file():
    pattern = re.compile(r"\b(?:trainer|loop|fit_loop|epoch_loop|connector)\.(_[a-z]\w+)")
    for path in modules():
        if room(path) in ("lit", "assemble"):
            for name in pattern.findall(path.read_text()):
                assert PRIVATE.get(name) == str(path.relative_to(PACKAGE)), f"{path}: {name}"


def test_the_private_names_that_are_relied_on_are_there():
    from lightning.pytorch import Trainer

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    assert callable(trainer._signal_connector.register_signal_handlers)
    assert callable(trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor)
    assert trainer._checkpoint_connector._user_managed is False
    assert trainer.fit_loop._restarting is False
    state = trainer.fit_loop.state_dict()
    assert "_batches_that_stepped" in state["epoch_loop.state_dict"]
    assert {
        "epoch_progress",
        "epoch_loop.batch_progress",
        "epoch_loop.scheduler_progress",
        "epoch_loop.automatic_optimization.optim_progress",
        "epoch_loop.val_loop.batch_progress",
    } <= state.keys()


def test_the_model_is_plain_torch():
    for path in (PACKAGE / "models").rglob("*.py"):
        assert not any(name.startswith("torch.distributed") for name in imports(path)), path


def test_the_planner_needs_the_standard_library_only():
    for path in [*(PACKAGE / "costs").rglob("*.py"), PACKAGE / "lengths.py"]:
        roots = {name.split(".")[0] for name in imports(path)} - {"gptrain"}
        assert roots <= sys.stdlib_module_names, path


def test_commands_are_made_in_one_place():
    """A command that is put together anywhere else is not quoted for Hydra and for the shell."""
    made = re.compile(
        r"import shlex|f\"[^\"]*python (train\.py|\{)|f\"(from_run|init_from|ckpt_path)=\{"
    )
    users = {str(path.relative_to(PACKAGE)) for path in modules() if made.search(path.read_text())}
    assert users == {"shell.py"}


def test_only_nets_instantiates():
    users = {room(path) for path in modules() if re.search(r"\binstantiate\(", path.read_text())}
    assert users <= {"nets", *COMMANDS}


def test_nothing_but_the_house_shows_at_the_top():
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    shown = {name.split("/")[0] for name in tracked if not name.startswith(".")}
    files = {"pyproject.toml", "README.md", "LICENSE", "train.py"}
    assert shown == files | {"conf", "src", "tests", "outputs"}


def count_code_lines(path: Path) -> int:
    """Count the lines of a file that are neither docstring nor comment nor blank."""
    text = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstrings |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    lines = (line.strip() for n, line in enumerate(text.splitlines(), 1) if n not in docstrings)
    return sum(bool(line) and not line.startswith("#") for line in lines)


def test_the_house_fits_in_the_head():
    lines = sum(map(count_code_lines, modules()))
    assert lines <= 15_200, f"src/gptrain has {lines} lines of code"  # may fall
    long = [path for path in modules() if count_code_lines(path) > 270]
    assert not long, long
