"""A project made by gptrain.adopt: small, whole, with your own files; and a newer library in it."""

from __future__ import annotations

import filecmp
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gptrain.adopt import __main__ as command
from gptrain.adopt.__main__ import main
from gptrain.adopt.library import check_paths, copy_library
from gptrain.adopt.project import TEMPLATE, fill_readme
from gptrain.core.locations import LIBRARY, VARIABLE
from tests.conftest import ROOT

QUICK = "trainer.max_steps=2 trainer.limit_val_batches=1 data.path=src/gptrain/models"


@pytest.fixture
def run(typed, monkeypatch):
    """Exit code and lines of `python -m gptrain.adopt <words>`, in this process."""

    def answer(*words: str, cwd: Path) -> tuple[int, list[str]]:
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.chdir(cwd)
        code, out, err = typed(main, *words)
        return code, (out + err).splitlines()

    return answer


@pytest.fixture
def project(run, tmp_path) -> Path:
    """Return a project that was made outside of any other project, as from an installed library."""
    assert run("my_project", "--to", "new project", cwd=tmp_path)[0] == 0
    return tmp_path / "new project"


def inside(project: Path, *command: str) -> subprocess.CompletedProcess:
    """Run a command in a project, with the project's package on the import path."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GPTRAIN_")}
    environment["PYTHONPATH"] = str(project / "src")
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    options = {"capture_output": True, "text": True, "timeout": 600, "env": environment}
    return subprocess.run(command, cwd=project, check=False, **options)


def own_files(project: Path) -> dict[str, str]:
    files = {str(path.relative_to(project)): path for path in project.rglob("*") if path.is_file()}
    names = [name for name in files if not re.search("^src/gptrain/|__pycache__", name)]
    return {name: files[name].read_text() for name in names}


def test_help_describes_every_option(run, tmp_path):
    code, lines = run("--help", cwd=tmp_path)
    assert code == 0
    for option in ("name", "--to FOLDER", "--upgrade", "--check"):
        assert re.search(rf"^  {option}\s+\S+ \S+", "\n".join(lines), re.M), option


def test_a_project_is_small_and_the_library_in_it_as_it_is(project):
    files = own_files(project)
    assert len(files) <= 40
    assert sum(len(text.splitlines()) for text in files.values()) <= 1500
    assert os.access(project / ".ci" / "run", os.X_OK)
    for name, text in files.items():
        assert not re.search("<(vendored|required|needed)>", text), name
        assert not re.search(r"_target_: project|(from|import) project|src/project", text), name
        assert "recipes." not in text, name
    for path in LIBRARY.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            copy = project / "src" / "gptrain" / path.relative_to(LIBRARY)
            assert filecmp.cmp(path, copy, shallow=False), path
            assert not copy.is_symlink()


def test_its_readme_names_what_is_there(project):
    readme = (project / "README.md").read_text()
    for name in re.findall(r"`((?:src|conf|tests|train|\.ci)[\w./]*)`", readme):
        assert (project / name).exists() or name == "conf/local/default.yaml", name
    for name in re.findall(r"`(\w+\.py)`", readme):
        assert list(project.glob(name)) or (project / "src" / "my_project" / name).exists()


def test_every_choice_fits_and_its_commands_find_it(project):
    done = inside(project, sys.executable, "-m", "gptrain.adopt", "--check")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    done = inside(project, sys.executable, "-m", "gptrain.plan", "--cfg", "job", "model=my_lstm")
    assert "my_project.net.MyLSTM" in done.stdout, done.stderr


def test_required_values_and_choices_for_user_data_are_right(project, run):
    """`???` is left to the command line; a net may be made for one dataset, a callback for both."""
    digits = (project / "conf" / "data" / "my_digits.yaml").read_text()
    own = {
        "data/typed.yaml": f"{digits}\npath: ???\nn_words: ???\nsame: ${{data.path}}\n",
        "data/words.yaml": f"{digits}\nn_classes: 10\n",
        "model/cnn.yaml": "_target_: my_project.net.MyLSTM\nvocab_size: ${data.n_classes}\n"
        "d_model: 8\n",
        "callbacks/shown.yaml": "shown: {_target_: my_project.callback.MyCallback,"
        " every_n_steps: '${data.n_classes}', of: '${model.d_model}'}\n",
        "data/wrong.yaml": digits.replace("batch_size: null", "batch_size: -1") + "path: ???\n",
        "model/wrong.yaml": "_target_: my_project.net.MyLSTM\nvocab_size: ${data.nothing}\n",
    }
    own["local/wrong.yaml"] = "data: {batch_size: -1}\n"  # may be for another machine
    (project / "conf" / "local").mkdir()
    for name, text in own.items():
        (project / "conf" / name).write_text(text)
    done = inside(project, sys.executable, "-m", "gptrain.adopt", "--check")
    lines = done.stdout.splitlines()
    assert done.returncode == 2 and len(lines) == 2, done.stdout
    assert lines[0].startswith("conf/data/wrong.yaml: error: data.global_batch_size=-1")
    assert lines[1].startswith("conf/model/wrong.yaml: error: ") and "data.nothing" in lines[1]


def test_the_users_dependencies_are_kept_and_copied(project, run, tmp_path):
    pytest.importorskip("setuptools")
    from setuptools.config.pyprojecttoml import read_configuration

    (project / "requirements.txt").open("a").write("peft>=0.10\n")
    assert run("other", "--to", f"{tmp_path}/other", cwd=project)[0] == 0
    for folder in (project, tmp_path / "other"):
        needed = read_configuration(folder / "pyproject.toml")["project"]["dependencies"]
        assert "peft>=0.10" in needed and any(
            requirement.startswith("torch>=") for requirement in needed
        )


def test_the_readme_of_a_project_names_its_own_files_and_no_command_without_them(
    project, run, tmp_path
):
    package = project / "src" / "my_project"
    (package / "net.py").rename(package / "lora.py")
    (project / "conf" / "model" / "my_lstm.yaml").rename(project / "conf" / "model" / "lora.yaml")
    (project / "tests" / "test_project.py").unlink()
    assert run("other", "--to", f"{tmp_path}/other", cwd=project)[0] == 0
    readme = (tmp_path / "other" / "README.md").read_text()
    assert "`lora.py`" in readme and "`net.py`" not in readme and "`conf/model`" in readme
    assert "test_project.py" not in readme
    assert "model=my_lstm" not in readme and "python train.py --cfg job" in readme
    kept = "python train.py model=lora  # not model=gone\n"
    block = f"```bash\n{kept}python train.py model=gone\n```\n"
    assert fill_readme(block, tmp_path / "other", "other") == f"```bash\n{kept}```\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_its_readme_works(project):
    blocks = re.findall(r"```bash\n(.*?)```", (project / "README.md").read_text(), re.DOTALL)
    commands = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    ran = [command.replace(".venv/bin/", "") for command in commands if "-m venv" not in command]
    first, *others = ran
    assert "quickstart" in first and len(others) > 5

    def check(command: str) -> None:
        done = inside(project, *shlex.split(command))
        assert done.returncode == 0, (command, done.stdout, done.stderr)

    check(f"{first} {QUICK}")  # the run of this command is shown by gptrain.runs
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(check, others))
    for words in ("check", "."), ("format", "--check", "."):
        done = inside(project, sys.executable, "-m", "ruff", *words, "--no-cache")
        assert done.returncode == 0, done.stdout
    assert not (project.parent / "outputs").exists()


def test_your_own_files_come_along_and_what_stays_is_named(project, run, tmp_path):
    package = project / "src" / "my_project"
    (package / "words.bin").write_bytes(b"\0\xff")
    (package / "more.py").write_text("from my_project import net\n")
    (project / "conf" / "model" / "more.yaml").write_text('{_target_: "my_project.more.Net"}\n')
    (project / "conf" / "local").mkdir()
    (project / "conf" / "local" / "default.yaml").write_text("seed: 1\n")
    (project / "notes.txt").touch()
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    recipe = ("recipes=[chat]", "--to", f"{tmp_path}/b;c d")
    code, lines = run("other", *recipe, cwd=project / "conf")
    assert code == 0 and shlex.split(lines[-1])[:4] == ["next", "cd", f"{tmp_path}/b;c d", "&&"]
    left = {line.split()[1] for line in lines if line.startswith("left")}
    written = {"README.md", "pyproject.toml", ".gitignore", ".ci/run"}
    assert left == {"notes.txt"} | written
    to = tmp_path / "b;c d"
    assert (to / "src" / "other" / "words.bin").read_bytes() == b"\0\xff"
    assert (to / "src" / "other" / "more.py").read_text() == "from other import net\n"
    assert '"other.more.Net"' in (to / "conf" / "model" / "more.yaml").read_text()
    assert "`chat.py`" in (to / "README.md").read_text()
    assert not (to / "conf" / "local").exists()
    # `docstrings` also needs recipes that were not chosen.
    assert not (to / "conf" / "experiment" / "docstrings.yaml").exists()
    assert "_target_: other.chat.ChatDataset" in (to / "conf/experiment/chat.yaml").read_text()
    assert "from other.chat import" in (to / "tests/recipes/test_chat.py").read_text()
    done = inside(to, sys.executable, "-m", "gptrain.adopt", "--check")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    library = "library=git+https://example.org/gptrain"
    for name in ("src/recipes/mine.py", "tests/recipes/test_mine.py"):
        (project / name).parent.mkdir()
        (project / name).touch()
    thin = ("thin", library, "recipes=[mine]", "--to", f"{tmp_path}/thin")
    _, lines = run(*thin, cwd=project)
    assert (tmp_path / "thin" / "src" / "thin" / "mine.py").exists()
    assert "left      src/gptrain/__init__.py" in lines  # your copy may have changes
    assert not (tmp_path / "thin" / "requirements.txt").exists()  # only a vendored library reads it
    code, (line,) = run("again", "recipes=[chat]", "--to", f"{tmp_path}/e", cwd=to)
    assert code == 2 and line == (
        "error: recipes=chat: the project already has a different file chat.py; try: rename it"
    )


def test_a_newer_library_takes_the_place_of_the_old_and_says_what_it_does_not_know(
    project, typed, tmp_path, monkeypatch
):
    newer = tmp_path / "newer"
    shutil.copytree(project / "src" / "gptrain", newer / "src" / "gptrain")
    base = newer / "src" / "gptrain" / "conf" / "base.yaml"
    base.write_text(base.read_text().replace("debug: false", "debug: true"))
    (newer / "src" / "gptrain" / "conf" / "trainer" / "gpu.yaml").unlink()
    (newer / "src" / "gptrain" / "conf" / "local").mkdir()
    (newer / "src" / "gptrain" / "conf" / "local" / "default.yaml").write_text("seed: 1\n")
    (project / "conf" / "train.yaml").open("a").write("old_key: 1\n")
    (project / "src" / "gptrain" / "gone.py").touch()
    files = own_files(project)
    wheel = shutil.make_archive(f"{newer}.whl", "zip", newer / "src").removesuffix(".zip")
    Path(f"{wheel}.zip").rename(wheel)
    done = inside(project, sys.executable, "-m", "gptrain.adopt", "--upgrade", f"library={wheel}")
    assert done.returncode == 2, done.stderr
    assert "conf/train.yaml: error: old_key=1: unknown" in done.stdout
    assert "conf/experiment/gpt2_124m.yaml: error: " in done.stdout  # trainer: gpu
    assert own_files(project) == files
    assert not (project / "src" / "gptrain" / "gone.py").exists()
    assert not (project / "src" / "gptrain" / "conf" / "local").exists()
    assert "debug: true" in (project / "src" / "gptrain" / "conf" / "base.yaml").read_text()
    assert sorted(path.name for path in (project / "src").iterdir()) == ["gptrain", "my_project"]
    # From a library outside of the project, after an upgrade that was killed between its renames.
    (project / "src" / "gptrain").rename(project / "src" / ".gptrain-old")
    (project / "src" / ".gptrain-new").mkdir()
    monkeypatch.delenv("PYTHONPATH", raising=False)
    upgrade = ("--upgrade", f"library={wheel}", "--to", str(project))
    monkeypatch.setenv(VARIABLE, f"{ROOT}/conf")  # is not the conf/ of the upgraded project
    monkeypatch.chdir(tmp_path)
    code, out, _ = typed(main, *upgrade)
    lines = out.splitlines()
    assert code == 2 and lines[0] == "replaced  src/gptrain"
    assert any(line.startswith("conf/train.yaml: error: old_key=1") for line in lines)
    assert any(line.startswith("conf/experiment/gpt2_124m.yaml: error: ") for line in lines)
    assert not any(line.startswith(".ci/run: ") for line in lines)
    script = project / ".ci" / "run"  # an older library had this file at another path
    script.write_text(script.read_text().replace("adopt/files/constraints", "constraints"))
    (line,) = check_paths(project)
    assert line.startswith(".ci/run: error: src/gptrain/constraints.txt: no such file")
    monkeypatch.setattr(command, "find_problems", lambda *_: [])  # conf/ has no mistake
    monkeypatch.setattr(sys, "path", [*sys.path])  # --check adds the project's src/
    code, out, _ = typed(main, "--check", "--to", str(project))
    assert (code, out) == (2, f"{line}\n")
    assert sorted(path.name for path in (project / "src").iterdir()) == ["gptrain", "my_project"]


def test_the_files_of_an_interrupted_upgrade_are_replaced(project, tmp_path):
    for name in (".gptrain-old", ".gptrain-new"):
        (project / "src" / name).mkdir()
        (project / "src" / name / "loss.py").touch()
    copy_library(LIBRARY, project)
    assert sorted(path.name for path in (project / "src").iterdir()) == ["gptrain", "my_project"]


def test_a_library_that_would_lose_changes_or_is_the_same_is_refused(project, run, monkeypatch):
    word = f"library={project}"
    code, (line,) = run("--upgrade", word, cwd=project)
    assert code == 2 and line.startswith("error: library=")
    assert line.endswith("the project uses this copy already; try: library=<a newer checkout>")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], cwd=project, check=True)
    (project / "src" / "gptrain" / "loss.py").write_text("# mine\n")
    monkeypatch.setenv("HOME", str(ROOT.parent))
    code, (line,) = run("--upgrade", f"library=~/{ROOT.name}", cwd=project)
    assert code == 2 and "has changes that are not committed" in line
    assert (project / "src" / "gptrain" / "loss.py").read_text() == "# mine\n"
    subprocess.run(["git", "checkout", "-q", "src/gptrain"], cwd=project, check=True)
    (project / "src" / "gptrain" / "untracked.py").touch()  # keeps nobody from upgrading
    copy_library(LIBRARY, project)
    assert not (project / "src" / "gptrain" / "untracked.py").exists()
    code, (line,) = run("--upgrade", f"library={project / 'conf'}", cwd=project)
    assert code == 2 and "conf: neither a checkout nor a wheel of gptrain; clone an" in line
    (project / "src" / "another").mkdir()
    (project / "src" / "another" / "__init__.py").touch()
    code, (line,) = run("mine", "--to", "../mine", cwd=project)
    assert code == 2
    assert line.endswith("src: must contain exactly one package, not ['another', 'my_project']")


def test_an_external_library_is_a_requirement(run, tmp_path, monkeypatch):
    address = "git+https://example.org/gptrain@v1#subdirectory=here"
    assert run("wanted", "--to", "new", f"library={address}", cwd=tmp_path)[0] == 0
    project = tmp_path / "new"
    text = (project / "pyproject.toml").read_text()
    assert f'dependencies = ["gptrain @ {address}"]' in text and "src/gptrain" not in text
    assert [path.name for path in (project / "src").iterdir()] == ["wanted"]
    assert "src/gptrain`" not in (project / "README.md").read_text()
    monkeypatch.setenv("HOME", str(ROOT.parent))
    code, lines = run("--upgrade", f"library=~/{ROOT.name}", cwd=project)
    assert code == 0 and lines[0] == f"required  gptrain @ {ROOT.as_uri()}"
    assert "pip install -e ." in lines[-1]
    assert (
        f'dependencies = ["gptrain @ {ROOT.as_uri()}"]' in (project / "pyproject.toml").read_text()
    )
    assert run("second", "--to", "second", f"library={address}", cwd=tmp_path)[0] == 0
    code, _ = run("--upgrade", f"library={address}2", "--to", f"{tmp_path}/second", cwd=project)
    assert code == 0 and f"{address}2" in (tmp_path / "second" / "pyproject.toml").read_text()
    assert f"{address}2" not in (project / "pyproject.toml").read_text()
    code, (line,) = run("third", "--to", "../second/pyproject.toml/third", cwd=project)
    assert code == 73 and line.startswith("error: NotADirectoryError: ")
    code, (line,) = run("--upgrade", cwd=project)
    assert code == 2 and line.startswith("error: library=vendored: the project neither contains")
    assert line.endswith("; try: library=<a folder, a wheel, git+https://...>")
    doubled = f'{(project / "pyproject.toml").read_text()}# "gptrain @ file:///old"\n'
    (project / "pyproject.toml").write_text(doubled)
    code, (line,) = run("--upgrade", f"library={address}", cwd=project)
    assert code == 2 and line.startswith(f"error: library=gptrain @ {address}: the project neither")
    assert (project / "pyproject.toml").read_text() == doubled


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["a-b", "--to", "new"],
            "error: name=a-b: not a name that Python can import, or the name of an installed"
            " package; try: my_project",
        ),
        (["torch", "--to", "new"], "error: name=torch: not a name that Python can import, or the"),
        (["class", "--to", "new"], "error: name=class: not a name that Python can import, or the"),
        (["another", "--to", "."], "error: --to=.: already exists"),
        (
            ["another", "--to", "new", "library=/no/where"],
            "error: library=/no/where: not a library; allowed: vendored, a folder of gptrain, a ",
        ),
        (
            ["another", "--to", "new", "recipes=[x]"],
            "error: recipes=x: no recipe of this name; allowed: chat, distill, ",
        ),
        (
            ["--check", "recipes=[x]"],
            "error: recipes=[x]: only a new project gets recipes; try: copy the recipe's files",
        ),
        (
            ["another"],
            "error: --to: needed: the folder in which the project is made; try: --to ../mine",
        ),
        ([], "error: name: one name is needed; try: python -m gptrain.adopt --help"),
        (["mine", "--check"], "error: name=mine: no name is needed; try: python -m gptrain."),
        (["--upgrade"], "error: --to: no project here"),
        (["--upgrade", "--check"], "error: argument --check: not allowed with argument --upgrade"),
    ],
)
def test_a_project_that_cannot_be_created_is_one_line(words, message, run, tmp_path):
    code, (line,) = run(*words, cwd=tmp_path)
    assert code == 2 and line.startswith(message)
    assert not list(tmp_path.iterdir())


def test_a_project_is_not_made_inside_another(run, tmp_path):
    before = sorted(ROOT.iterdir())
    code, (line,) = run("another", "--to", "src/new", cwd=ROOT)
    assert code == 2
    assert line == "error: --to=src/new: lies inside this project; try: ../my_project"
    assert sorted(ROOT.iterdir()) == before and not (ROOT / "src" / "new").exists()
    # The name of the project itself is free, although its package can be imported.
    assert run("project", "--to", f"{tmp_path}/same", cwd=ROOT)[0] == 0


def test_the_template_leads_to_the_files_of_this_checkout():
    for name in (
        "train.py",
        "conf",
        "src/project",
        "src/recipes",
        "tests/recipes",
        "tests/test_project.py",
    ):
        assert (TEMPLATE / name).resolve() == ROOT / name
    assert (
        LIBRARY / "adopt" / "files" / "constraints.txt"
    ).resolve() == ROOT / ".ci" / "constraints.txt"
