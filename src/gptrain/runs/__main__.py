"""Compare runs by reading the files in their folders.

    python -m gptrain.runs outputs/train      a table, the best run first
    python -m gptrain.runs outputs --json     the same as a JSON list

The arguments are folders of runs, or folders above them. Without any it is the output folder.
"""

import argparse
import json
import sys
from pathlib import Path

from gptrain.core.errors import DONE, INPUT_NOT_FOUND
from gptrain.core.locations import default_output_dir
from gptrain.runs.table import rank_runs, read_runs, text_table


def main() -> None:
    """Print a comparison of the runs that the words in `sys.argv` name, and exit."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, default=[Path(default_output_dir())])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not (runs := read_runs(args.folders)):
        print(f"error: no run in {' '.join(map(str, args.folders))}", file=sys.stderr)
        sys.exit(INPUT_NOT_FOUND)
    metric, runs = rank_runs(runs)
    if args.json:
        rows = []
        for run in runs:
            facts = {"run": str(run.path), "overrides": run.overrides, "metrics": run.metrics}
            rows.append(facts | {"steps": None, "seconds": None, "ended": run.ended} | run.times)
        print(json.dumps(rows, indent=1))
    else:
        print(text_table(runs, metric))
    sys.exit(DONE)


if __name__ == "__main__":
    main()
