"""The recipe `new_project`, as a new user types it: own net, data and tests in a project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.new_project import CHECKOUT, main

NET = '''
class Lookup(nn.Module):
    """A table of the logits of the next token."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)
'''


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """Run the command of the README, and return the folder of the new project."""
    monkeypatch.setattr(sys, "argv", ["new_project.py", "my_gpt", str(tmp_path / "my_gpt")])
    main()
    return tmp_path / "my_gpt"


def run(project: Path, *words: str) -> str:
    """Run Python in the project, which finds its packages and an installed gptrain."""
    environment = {n: text for n, text in os.environ.items() if not n.startswith("GPTRAIN_")}
    paths = {"PYTHONPATH": f"{project / 'src'}:{CHECKOUT / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=project, env=environment | paths, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_project_has_the_users_half_under_its_own_name(project):
    files = [path.relative_to(project) for path in project.rglob("*") if path.is_file()]
    names = {str(path) for path in files}
    assert names >= {
        "train.py", "conf/train.yaml", "conf/experiment/quickstart.yaml", "src/my_gpt/net.py",
        "src/recipes/chat.py", "tests/test_project.py", "tests/recipes/test_chat.py",
        "pyproject.toml", "README.md", ".gitignore", "outputs/.gitkeep",
    }  # fmt: skip
    assert not [name for name in names if "gptrain" in name or "src/project" in name]
    old = re.compile(r"^(from|import) project\b|_target_: project\.|src/project", re.MULTILINE)
    assert not [path for path in files if old.search((project / path).read_text())]
    requirement = re.search(r'"gptrain\S* @ (\S+)"', (project / "pyproject.toml").read_text())
    assert requirement and requirement[1] == CHECKOUT.as_uri()


@pytest.mark.slow
def test_the_own_net_and_the_tests_of_a_new_project_run(project):
    with (project / "src/my_gpt/net.py").open("a") as file:
        file.write(NET)
    node = "# The logits of the next token by the last one.\n_target_: my_gpt.net.Lookup\n"
    (project / "conf/model/lookup.yaml").write_text(f"{node}vocab_size: 10\n")
    words = ("model=lookup", "data=my_digits", "trainer.max_steps=2", "trainer.accelerator=cpu")
    assert "model     Lookup · 100 parameters" in run(project, "train.py", *words)
    assert list(project.glob("outputs/*/*/result.json"))
    run(project, "-m", "pytest", "-q", "tests/test_project.py")
