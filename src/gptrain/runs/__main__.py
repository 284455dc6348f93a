"""The command: which runs, and how they are shown."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from gptrain import runs as package
from gptrain.core.errors import INPUT_NOT_FOUND, ConfigError, Parser, printable
from gptrain.core.locations import default_output_dir
from gptrain.runs.folder import RunRecord, read_runs
from gptrain.runs.prune import prune
from gptrain.runs.table import aligned, differing, names, ranked, text_table
from gptrain.runtime.streams import flush_output, prepare_streams

AS_JSON = ("overrides", "metrics", "steps", "seconds", "ended")
EACH_ITS_OWN = {"overrides", "command", "started"}


def main() -> NoReturn:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    head: dict[str, Any] = {"description": package.__doc__, "formatter_class": raw}
    parser = Parser("python -m gptrain.runs", allow_abbrev=False, **head)
    outputs = Path(default_output_dir())
    parser.add_argument("folders", nargs="*", type=Path, default=[outputs], help="or above them")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="a list, the best run first")
    shown.add_argument("--diff", action="store_true", help="what differs between two runs")
    shown.add_argument("--prune", action="store_true", help="deletes all but best and newest")
    parser.add_argument("--yes", action="store_true", help="of --prune: deletes without a question")
    prepare_streams(is_run=False)
    try:
        print(answer(parser.parse_args()))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)
    sys.exit(flush_output())


def answer(args: argparse.Namespace) -> str:
    """What is printed. Raises: ConfigError."""
    if args.yes and not args.prune:
        raise ConfigError.of("--yes", None, "confirms --prune, which was not typed")
    if args.prune and args.folders == [Path(default_output_dir())]:
        raise ConfigError.of("--prune", None, "needs a folder", hint="--prune FOLDER")
    runs = read_runs(args.folders)
    if not runs:
        message = f"no run in {' '.join(map(str, args.folders))}"
        raise ConfigError.of("", None, message, code=INPUT_NOT_FOUND)
    if args.prune:
        return prune(runs, args.yes)
    if args.diff:
        return difference(runs)
    metric, runs = ranked(runs)
    if args.json:
        rows = [{"run": str(run.path)} | {k: getattr(run, k) for k in AS_JSON} for run in runs]
        return json.dumps(rows, indent=1)
    return text_table(runs, metric)


def difference(runs: list[RunRecord]) -> str:
    """Config, versions, code, machine and metrics where two runs differ."""
    if len(runs) != 2:
        raise ConfigError.of("--diff", None, f"compares two runs, and these are {len(runs)}")
    sides = [run.config | run.result | {"ended": run.ended} for run in runs]
    rows = [["", *map(printable, names(runs))]]
    for key in differing(sides):
        if key not in EACH_ITS_OWN:
            rows.append([printable(key), *(printable(side.get(key, "-")) for side in sides)])
    return aligned(rows)


if __name__ == "__main__":
    main()
