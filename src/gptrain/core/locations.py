"""Where the files of a project are: conf/, train.py, src/ and outputs/ in one project folder.

The project folder is found through its conf/. train.py passes the path of its conf/ to `enter`,
which sets GPTRAIN_CONF for this process and its children. If GPTRAIN_CONF is not set, the project
is the nearest folder, from the working directory upwards, that has a train.py and a conf/. Without
a project only the config groups of the library are available.
"""

import json
import os
import sys
from pathlib import Path

VARIABLE = "GPTRAIN_CONF"
REPORT_VARIABLE = "GPTRAIN_REPORT"  # path of the file through which a run reports to gptrain.fit
LIBRARY = Path(__file__).parents[1]  # folder of the installed package gptrain


def enter(conf: str | Path | None = None) -> None:
    """Select the project of this process and of the processes that it starts.

    src/ of the project is appended to `sys.path`, so that its classes can be imported even if the
    project is not installed. Without a project nothing is changed.

    Args:
        conf: Path of the conf/ folder of the project. GPTRAIN_CONF is set to it, also if there is
            no such folder. None leaves GPTRAIN_CONF, and the project is that of `find_conf`.
    """
    if conf is not None:
        os.environ[VARIABLE] = os.path.abspath(conf)
    project = find_project()
    if project and str(project / "src") not in sys.path:
        sys.path.append(str(project / "src"))


def find_conf() -> Path | None:
    """Return the absolute path of the conf/ folder of the project, or None without a project.

    It is the path in GPTRAIN_CONF, which need not exist, or else that of the nearest folder, from
    the working directory upwards, with a train.py and a conf/.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named).absolute()
    here = Path.cwd()
    folders = (folder for folder in (here, *here.parents) if (folder / "train.py").is_file())
    return next((conf for folder in folders if (conf := folder / "conf").is_dir()), None)


def find_project() -> Path | None:
    """Return the folder of the project, which holds conf/, or None without a project."""
    conf = find_conf()
    return conf.parent if conf else None


def expand_home(path: str | os.PathLike) -> Path:
    """Return a path with the home folder in place of `~` or `~user` at its beginning.

    Unlike for `Path.expanduser`, an unknown user is no error: the path is then one in the working
    directory. A result that would begin with `~` is absolute, so that a second call keeps it.
    """
    expanded = Path(os.path.expanduser(path))
    return expanded.absolute() if str(expanded).startswith("~") else expanded


def default_output_dir() -> str:
    """Return the folder for run folders, which need not exist.

    It is GPTRAIN_OUTPUT_DIR, or else outputs/ in the project folder or the working directory.
    """
    project = find_project() or Path.cwd()
    return str(expand_home(os.environ.get("GPTRAIN_OUTPUT_DIR") or project / "outputs"))


def report_to_fit(**facts: object) -> None:
    """Write the facts as JSON to the file that `gptrain.fit` reads, if that started this process.

    The facts are `folder=<run folder>` of a run that starts, or `lines=[<error message>, ...]` of a
    run that is refused. Only the first call in a process has an effect. It also removes the
    variable GPTRAIN_REPORT, so that processes that start later do not report.
    """
    if path := os.environ.pop(REPORT_VARIABLE, None):
        Path(path).write_text(json.dumps(facts))


def train_script() -> str:
    """Return the path of the script that a printed command starts, without quotes.

    It is the running script as it was typed. In a module of a command, or in a process of
    submitit, it is train.py of the project, or of the working directory without a project.
    """
    script = Path(sys.argv[0])
    if script.suffix == ".py" and not script.name.startswith("_"):  # submitit's is _submit.py
        return sys.argv[0]
    script = (find_project() or Path.cwd()) / "train.py"
    return min(os.path.relpath(script), str(script), key=len)
