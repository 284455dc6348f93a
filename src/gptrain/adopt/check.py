"""What a library refuses of a project's conf/: after an upgrade, keys and choices that are gone."""

from __future__ import annotations

from pathlib import Path

from gptrain.config.check import check_config
from gptrain.config.compose import compose_and_explain
from gptrain.config.schema import Run
from gptrain.problems import Problem

OTHERS = {"hydra", "hparams_search", "local"}  # Hydra's own keys, and this machine's


def unknown_in_conf(conf: Path) -> list[str]:
    """A line for each problem, with the file of conf/ that brings it."""
    found: dict[str, str] = {}
    files = [conf / "train.yaml", *sorted(conf.glob("*/*.yaml"))]
    for file in (file for file in files if file.parent.name not in OTHERS):
        words = [] if file.parent == conf else [f"{file.parent.name}={file.stem}"]
        try:
            cfg, problems = compose_and_explain(words)
            problems = problems or [one for one in check_config(cfg, Run).problems if one.code]
        except Exception as error:  # of train.yaml itself; whatever it is, it is a line
            problems = [Problem("", None, " ".join(str(error).split()))]
        for problem in problems:
            found.setdefault(problem.line, f"conf/{file.relative_to(conf)}")
    return [f"{file}: {line}" for line, file in found.items()]
