"""Command line of `python -m gptrain.runs`."""

import argparse
import json
import sys
from pathlib import Path
from typing import NoReturn

from gptrain import runs as package
from gptrain.core.errors import DONE, INPUT_NOT_FOUND
from gptrain.core.locations import default_output_dir
from gptrain.runs.table import rank_runs, read_runs, text_table

JSON_FIELDS = ("overrides", "metrics", "steps", "seconds", "ended")


def main() -> NoReturn:
    """Run the command `python -m gptrain.runs` with the words in `sys.argv`, and exit.

    The command prints a table of runs.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m gptrain.runs", description=package.__doc__, formatter_class=raw
    )
    outputs, text = [Path(default_output_dir())], "run folders, or folders above them"
    parser.add_argument("folders", nargs="*", type=Path, default=outputs, help=text)
    parser.add_argument("--json", action="store_true", help="print a JSON list, the best run first")
    args = parser.parse_args()
    if not (runs := read_runs(args.folders)):
        print(f"error: no run in {' '.join(map(str, args.folders))}", file=sys.stderr)
        sys.exit(INPUT_NOT_FOUND)
    metric, runs = rank_runs(runs)
    if args.json:
        rows = [
            {"run": str(run.path)} | {k: getattr(run, k) for k in JSON_FIELDS} | run.goodput
            for run in runs
        ]
        print(json.dumps(rows, indent=1))
    else:
        print(text_table(runs, metric))
    sys.exit(DONE)


if __name__ == "__main__":
    main()
