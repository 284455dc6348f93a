"""The house is kept: imports go one way, and each room knows only what it is made of.

Rules about this repository; a project made from the template may delete this folder.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "gptrain"

LEAVES = {
    "models",
    "data",
    "optim",
    "loss",
    "parallel",
    "lengths",
    "law",
    "costs",
    "resilience",
    "sampling",
    "small_files",
    "home",
    "streams",
}
# Room -> rooms of gptrain that it may import.
MAY_IMPORT = {
    "models": set(),
    "loss": {"lengths"},
    "sampling": set(),
    "small_files": set(),
    "conf": set(),  # yaml
    "home": set(),
    "optim": set(),
    "lengths": set(),
    "law": {"small_files"},
    "texts": {"data", "sampling", "problems"},
    "scoring": {"data", "loss"},
    "fitting": {"home", "resilience", "small_files", "nets", "data", "problems"},
    "costs": {"lengths", "parallel"},
    "measure": {"costs"},
    "progress": set(),
    "streams": {"problems"},
    "data": {"loss", "small_files", "progress"},
    "resilience": {"small_files", "problems", "progress"},
    "runs": {"home", "streams", "resilience", "small_files", "problems"},
    # Over a sharded vocabulary it is made of the same parts; the table says who needs what.
    "parallel": {"loss"},
    "problems": set(),  # the one home of exit codes
    "ranks": {"home", "streams", "parallel", "costs", "resilience", "small_files", "problems"},
    "lit": (LEAVES - {"models"}) | {"ranks", "measure", "problems"},
    "nets": {"config", "data", "parallel", "resilience", "small_files", "problems"},
    "config": {
        "home",
        "streams",
        "ranks",
        "lengths",
        "costs",
        "parallel",
        "data",
        "resilience",
        "runs",
        "small_files",
        "problems",
    },
    "assemble": (LEAVES - {"models"}) | {"lit", "ranks", "config", "nets", "problems"},
}
# May import anything but each other (the ladder asks for the plan's machine), as do __main__.py and
# command.py of a room with a command.
COMMANDS = {"export", "collectives", "generate", "adopt", "plan", "launch", "ladder",
            "command"}  # fmt: skip
FOREIGN = {
    "lightning": {"lit", "assemble"},
    "hydra": {"config", "nets", "assemble", "ranks"},
    "pydantic": {"config"},
}
PRIVATE = {  # of Lightning, and where: what correctness needs, see lit/lightning.py
    "_signal_connector": "lit/lightning.py",
    "_broadcast_sigterm_tensor": "lit/lightning.py",
    "_batches_that_stepped": "lit/lightning.py",
    "_restarting": "lit/lightning.py",
}


def modules() -> list[Path]:
    """Of the library; behind its template are files of this project."""
    return sorted(path for path in PACKAGE.rglob("*.py") if "template" not in path.parts)


def room(path: Path) -> str:
    if path.name in ("__main__.py", "command.py"):
        return "command"  # of whatever room: nobody imports it but the one who types it
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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
        if here in COMMANDS or here == "__init__":
            continue
        names = {name for name in imports(path) if name.startswith("gptrain.")}
        others = {name.split(".")[1] for name in names} - {here, "problems"}
        allowed = MAY_IMPORT[here] | ({"problems"} if "problems" in MAY_IMPORT[here] else set())
        wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in others - allowed]
        if "problems" not in MAY_IMPORT[here] and "gptrain.problems" in {n[:16] for n in names}:
            wrong.append(f"{path.relative_to(PACKAGE)} imports problems")
    assert not wrong, "\n".join(wrong)


def test_the_order_of_the_rooms_has_no_cycle():
    left = {room: set(others) for room, others in MAY_IMPORT.items()}
    while left:
        free = [room for room, others in left.items() if not others & left.keys()]
        assert free, f"a cycle among {sorted(left)}"
        for one in free:
            del left[one]


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
    assert trainer.fit_loop._restarting is False
    state = trainer.fit_loop.state_dict()
    assert {
        "epoch_progress",
        "epoch_loop.state_dict",
        "epoch_loop.batch_progress",
        "epoch_loop.scheduler_progress",
        "epoch_loop.automatic_optimization.optim_progress",
        "epoch_loop.val_loop.batch_progress",
    } <= state.keys()
    assert "_batches_that_stepped" in state["epoch_loop.state_dict"]


def test_the_model_is_plain_torch():
    for path in (PACKAGE / "models").rglob("*.py"):
        assert not any(name.startswith("torch.distributed") for name in imports(path)), path


def test_the_planner_needs_the_standard_library_only():
    for path in [*(PACKAGE / "costs").rglob("*.py"), PACKAGE / "lengths.py"]:
        roots = {name.split(".")[0] for name in imports(path)} - {"gptrain"}
        assert roots <= sys.stdlib_module_names, path


def test_models_are_reached_by_target_only():
    for path in modules():
        if room(path) not in {"models", *COMMANDS}:
            assert not any(name.startswith("gptrain.models") for name in imports(path)), path


def test_only_nets_instantiates():
    users = {room(path) for path in modules() if re.search(r"\binstantiate\(", path.read_text())}
    assert users <= {"nets", *COMMANDS}


def test_nothing_but_the_house_shows_at_the_top():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    shown = {name.split("/")[0] for name in tracked if not name.startswith(".")}
    house = [
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "conf",
        "src",
        "tests",
        "outputs",
        "train.py",
    ]
    assert shown == set(house)


def test_the_house_fits_in_the_head():
    lines = sum(len(path.read_text().splitlines()) for path in modules())
    assert lines <= 19_970, f"src/gptrain has {lines} lines"  # may fall; 14,500 is the goal
    long = [path for path in modules() if len(path.read_text().splitlines()) > 350]
    assert not long, long
