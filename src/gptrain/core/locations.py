"""The project that a command works for: its conf/, and beside it train.py, src/ and outputs/.

The library does not know where it lies. train.py says which conf/ is its own; a command of the
library looks for a project from the working directory upwards, unless GPTRAIN_CONF names its conf/.
Outside of any project there are the library's own choices alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

VARIABLE = "GPTRAIN_CONF"
REPORT_VARIABLE = "GPTRAIN_REPORT"  # path of the file in which a run answers gptrain.fit
LIBRARY = Path(__file__).parents[1]  # of which this file is a part, wherever it is installed


def enter(conf: str | Path | None = None) -> None:
    """From here on, in the processes started from here too, this conf/ is the project's.

    Classes of the project's src/ can be imported then, installed or not.
    """
    if conf is not None:
        os.environ[VARIABLE] = os.path.abspath(conf)
    project = find_project()
    if project and str(project / "src") not in sys.path:
        sys.path.append(str(project / "src"))


def find_conf() -> Path | None:
    """The project's conf/, absolute; None outside of any project."""
    if named := os.environ.get(VARIABLE):
        return Path(named).absolute()
    here = Path.cwd()
    folders = (folder for folder in (here, *here.parents) if (folder / "train.py").is_file())
    return next((conf for folder in folders if (conf := folder / "conf").is_dir()), None)


def find_project() -> Path | None:
    """The folder around the project's conf/; None outside of any project."""
    conf = find_conf()
    return conf and conf.parent


def default_output_dir() -> str:
    """GPTRAIN_OUTPUT_DIR, or outputs/ of the project, wherever in it the command is typed."""
    project = find_project() or Path.cwd()
    return os.environ.get("GPTRAIN_OUTPUT_DIR") or str(project / "outputs")


def report_to_fit(**facts: object) -> None:
    """Write the facts as JSON to the file that `gptrain.fit` has named, once.

    Does nothing in a process that `gptrain.fit` did not start, or that has reported before.

    Args:
        facts: `folder`, the run folder of a run that starts, or `lines`, the error message of a
            run that is refused.
    """
    if path := os.environ.pop(REPORT_VARIABLE, None):
        Path(path).write_text(json.dumps(facts))


def train_script() -> str:
    """Return the path of the script that trains, as one types it in the current folder.

    It is the script that was typed. A command of the library, or a job that submitit starts, has
    none: there it is the project's train.py.
    """
    typed, project = Path(sys.argv[0]), find_project()
    is_own = typed.suffix == ".py" and typed.name != "__main__.py"
    if is_own and not {"site-packages", "dist-packages"} & set(typed.parts):
        return sys.argv[0]
    if project is None or not (project / "train.py").is_file():
        return "train.py"
    script = project / "train.py"
    return min(os.path.relpath(script), str(script), key=len)
