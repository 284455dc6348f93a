"""Installed versions that cannot work, or must not be run."""

from __future__ import annotations

import os
import re
import sys
from functools import cache

from gptrain.config.checks.run import Run
from gptrain.problems import BAD_CONFIG, DONE, Problem

MALICIOUS = {
    ("lightning", "2.6.2"): "GHSA-w37p-236h-pfx3",
    ("lightning", "2.6.3"): "GHSA-w37p-236h-pfx3",
    ("pytorch-lightning", "2.6.2"): "GHSA-w37p-236h-pfx3",
    ("pytorch-lightning", "2.6.3"): "GHSA-w37p-236h-pfx3",
}
# package: (lowest that works, first that is not tested)
RANGES = {
    "torch": ("2.11", "2.14"),
    "lightning": ("2.6.6", "2.7"),
    "hydra-core": ("1.3.8", "1.4"),
    "omegaconf": ("2.3", "2.4"),
}


def check_versions(run: Run) -> None:
    """Installed packages, by the folders of their metadata: none is imported."""
    run.problems += judge_versions({name: _installed(name) for name in [*RANGES, *_OTHERS]})


def judge_versions(installed: dict[str, str | None]) -> list[Problem]:
    """Problems of package versions; None where one is not installed."""
    problems = []
    for package, found in installed.items():
        if (package, found) in MALICIOUS:
            problems.append(
                Problem(
                    "",
                    None,
                    f"{package} {found} is a known malicious release: uninstall it and rotate all "
                    f"secrets of this machine ({MALICIOUS[package, found]})",
                    attempt="pip install 'lightning>=2.6.6'",
                )
            )
            continue
        low, high = RANGES.get(package, (None, None))
        if low is None:
            continue
        if found is None or _numbers(found) < _numbers(low):
            wrong = "is not installed" if found is None else f"{found} is too old"
            problems.append(
                Problem("", None, f"{package} {wrong}", attempt=f"pip install '{package}>={low}'")
            )
        elif _numbers(found) >= _numbers(high):
            code = BAD_CONFIG if package == "omegaconf" else DONE
            wrong = f"{package} {found} is newer than what is tested, below {high}"
            problems.append(Problem("", None, wrong, code=code))
    return problems


_OTHERS = sorted({package for package, _ in MALICIOUS} - RANGES.keys())


@cache
def _installed(package: str) -> str | None:
    # Names of folders alone: importlib.metadata takes longer to import than all that is checked.
    pattern = re.compile(rf"{package.replace('-', '[-_.]')}-([^-]+)\.dist-info", re.IGNORECASE)
    for name in _metadata_folders():
        if found := pattern.fullmatch(name):
            return found[1]
    return None


@cache
def _metadata_folders() -> list[str]:
    folders = [folder for folder in sys.path if os.path.isdir(folder or ".")]
    names = [name for folder in folders for name in os.listdir(folder or ".")]
    return [name for name in names if name.endswith(".dist-info")]


def _numbers(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
