"""Descriptions of what gptrain does, as files that are read as a diff.

    python -m tests.golden

writes all files again, and `git diff` shows what has changed. The tests compare.
"""

import json
import os
import re
from difflib import unified_diff
from pathlib import Path
from typing import Any

WRITE = "GPTRAIN_WRITE_GOLDEN"
ROOT = Path(__file__).parents[2]
NUMBER = r"-?[\d,]+(\.\d+)?(e[+-]\d+)?"
UNITS = r"tokens/s|samples/s|GFLOP/s|TFLOP/s|GiB|s\b"
# What differs between two runs of the same code.
MASKS = {
    r"\d{4}-\d\d-\d\d[ _T]\d\d[-:]\d\d[-:]\d\d([,.]\d+)?( \+0000)?(-\d+)?": "<time>",
    r"events\.out\.tfevents[\w.-]+": "events.out.tfevents",
    rf"(?<=[\s(]){NUMBER}(?= ({UNITS}))": "#",
    rf"(?<=(tokens/s|amples/s) ){NUMBER}": "#",
    rf"\b(mfu|goodput|loss|perplexity|bits_per_byte|grad_norm|my_accuracy|score:) {NUMBER}": (
        r"\1 #"
    ),
    # A table of runs: its times, and losses.
    r"(?m)^run .* ended$": lambda heading: " ".join(heading[0].partition("  steps ")[0].split()),
    r"(?m)^(\S+lr_\S+)( +\S+) .* (steps done:.*|refused:.*)$": r"\1\2 # \3",
    r'(?m)^( +"(seconds|goodput|\w+_s|\w+/\w+|grad_norm|lr)": )[\d.e+-]+': r"\1#",
    r"(?m)^(through rank 0|around a ring|gloo) .*\d$": r"\1 #",
    r"left [\d:]+": "left #",
    rf"(?<=val/loss=){NUMBER}": "#",
    r"(?m)^stderr: {2,}.*\n": "",  # the lines of a traceback
    r"(?<=\.py):\d+(?=: )": "",
    r"(?m)^stderr: W\d{4} .*\n": "",  # torch's log, which other tests may have silenced
    # What the doctor sees of a machine.
    r"\d+ cores; try: OMP_NUM_THREADS=\d+": "# cores; try: OMP_NUM_THREADS=#",
    r"cpu \(\w+\)": "cpu (#)",
    r" at 0x\w+|(?<=process) \d+": "",
    r"\d+ GPUs, port": "# GPUs, port",
    r"(?m)^warning: /dev/shm.*\n": "",
    r"goodput # \([^)]*\)": "goodput #",  # a phase of less than 0.05 s is left out
    r"'<root>/([\w/.]+)'": r"<root>/\1",  # quoted where the path of the project has a space
    r"(?<=/)[0-9a-f]{16}(?=/|$)": "<state of the files>",
    # A line is printed after some seconds, too: keep the first and the last one.
    r"(?m)^.*\bstep      (?!1/)(\d+)/(?!\1 ).*\n": "",
    r"(?<=sample    )\n( {10}.*\n)+": "<text>\n",
}


def masked(text: str, folder: Path) -> str:
    """Replace paths, times, speeds and losses in a text."""
    for path, name in ((folder, "<folder>"), (ROOT, "<root>")):
        text = text.replace(str(path), name)
    for pattern, name in MASKS.items():
        text = re.sub(pattern, name, text)
    return text


def flat(values: Any, key: str = "") -> dict[str, Any]:
    """Return the leaves of a config by their dotted keys."""
    if not isinstance(values, dict) or not values:
        return {key: values}
    return {
        k: v for name in values for k, v in flat(values[name], f"{key}.{name}".lstrip(".")).items()
    }


def as_lines(values: Any, depth: int, indent: str = "") -> str:
    """Return JSON with one line for each entry at this depth."""
    if depth == 0 or not isinstance(values, dict | list) or not values:
        return json.dumps(values, ensure_ascii=False, sort_keys=True)
    inner = indent + " "
    if isinstance(values, list):
        items = [as_lines(value, depth - 1, inner) for value in values]
    else:
        items = [
            f"{json.dumps(key, ensure_ascii=False)}: {as_lines(values[key], depth - 1, inner)}"
            for key in sorted(values)
        ]
    begin, end = "[]" if isinstance(values, list) else "{}"
    return begin + "\n" + ",\n".join(inner + item for item in items) + "\n" + indent + end


def sections(name: str) -> list[str]:
    """Return the parts of a golden file, each of which begins with a command."""
    text = Path(__file__).with_name(name).read_text().rstrip("\n")
    return [part.rstrip("\n") for part in re.split(r"(?m)^(?=\$ )", text)]


def check(name: str, text: str) -> None:
    """Compare a text with the golden file of this name, or write the file again."""
    path = Path(__file__).with_name(name)
    if os.environ.get(WRITE):
        path.write_text(text.rstrip("\n") + "\n")
    expected = path.read_text().splitlines()
    changed = [*unified_diff(expected, text.splitlines(), lineterm="", n=0)]
    assert not changed, "\n".join(["python -m tests.golden; git diff", *changed[:40]])
