"""Start a project of your own, which requires gptrain instead of containing it.

    python -m recipes.new_project my_gpt ../my_gpt

Copies the files that are yours to a new folder: train.py, conf/, src/project under the new name,
the recipes, and their tests. Its pyproject.toml requires gptrain by the path of this checkout.
"""

import re
import shutil
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
COPIED = ("train.py", "conf", "src/project", "src/recipes", "tests/test_project.py",
          "tests/recipes", ".gitignore", "outputs/.gitkeep")  # fmt: skip
LEFT_OUT = ("__pycache__", "local", "new_project.py", "test_new_project.py")
PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.10"
dependencies = [
    "gptrain[export] @ {url}", # or: @ git+https://...@tag
]

[project.optional-dependencies]
dev = ["pytest>=8"]

[tool.setuptools.packages.find]
where = ["src"]

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["src"]
addopts = "-m 'not slow'"
markers = ["slow: takes long", "engine(package, ...): needs these packages"]
"""


def main() -> None:
    """Copy the files, rename the package in them, and write pyproject.toml and README.md."""
    name, project = sys.argv[1], Path(sys.argv[2])
    if not name.isidentifier():
        sys.exit(f"error: {name}: not the name of a Python package")
    project.mkdir(parents=True)
    for path in map(Path, COPIED):
        copy = project / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (CHECKOUT / path).is_dir():
            shutil.copytree(CHECKOUT / path, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        else:
            shutil.copy(CHECKOUT / path, copy)
    (project / "src/project").rename(project / "src" / name)
    for file in (file for suffix in ("py", "yaml", "md") for file in project.rglob(f"*.{suffix}")):
        text = re.sub(r"(?m)^(from|import) project\b", rf"\1 {name}", file.read_text())
        text = re.sub(r"(_target_: )project\.", rf"\1{name}.", text)
        file.write_text(text.replace("src/project", f"src/{name}"))
    text = PYPROJECT.format(name=name, url=CHECKOUT.as_uri())
    (project / "pyproject.toml").write_text(text)
    (project / "README.md").write_text(f"# {name}\n")


if __name__ == "__main__":
    main()
