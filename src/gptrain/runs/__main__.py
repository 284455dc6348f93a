"""Command line of `python -m gptrain.runs`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from gptrain import runs as package
from gptrain.checkpoints.timeline import TIMES
from gptrain.core.errors import INPUT_NOT_FOUND, ConfigError, printable
from gptrain.core.locations import default_output_dir
from gptrain.core.parser import Parser
from gptrain.runs.folder import RunRecord, read_runs
from gptrain.runs.prune import prune
from gptrain.runs.table import align_columns, differing_keys, rank_runs, run_names, text_table
from gptrain.runtime.streams import flush_output, prepare_streams

JSON_FIELDS = ("overrides", "metrics", "steps", "seconds", "ended")
# Keys that --diff leaves out: what was typed is compared by value, and equal runs differ in times.
NEVER_COMPARED = {"overrides", "command", "started", "goodput", *(f"{name}_s" for name in TIMES)}


def main() -> NoReturn:
    """Run the command `python -m gptrain.runs` with the words in `sys.argv`, and exit.

    The command prints a table of runs, compares two runs, or deletes checkpoints. A ConfigError is
    printed on stderr, and its code is the exit code.
    """
    raw = argparse.RawDescriptionHelpFormatter
    head: dict[str, Any] = {"description": package.__doc__, "formatter_class": raw}
    parser = Parser("python -m gptrain.runs", allow_abbrev=False, **head)
    outputs = Path(default_output_dir())
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[outputs],
        help="run folders, or folders above them",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print a JSON list, the best run first")
    shown.add_argument(
        "--diff", action="store_true", help="print the keys in which two runs differ"
    )
    shown.add_argument(
        "--prune", action="store_true", help="delete all checkpoints but the best and newest"
    )
    parser.add_argument("--yes", action="store_true", help="with --prune: delete without asking")
    prepare_streams(is_run=False)
    try:
        print(answer(parser.parse_args()))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)
    sys.exit(flush_output())


def answer(args: argparse.Namespace) -> str:
    """Return the text that the command prints. With --prune, delete checkpoints, too.

    Args:
        args: Parsed command line: folders, and the flags json, diff, prune and yes.

    Raises:
        ConfigError: If the arguments do not fit together, no run is found, or a run cannot be
            pruned.
        OSError: If `prune` raises it.
    """
    if args.yes and not args.prune:
        raise ConfigError.of("--yes", None, "has an effect with --prune only")
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
    metric, runs = rank_runs(runs)
    if args.json:
        rows = [
            {"run": str(run.path)} | {k: getattr(run, k) for k in JSON_FIELDS} | run.goodput
            for run in runs
        ]
        return json.dumps(rows, indent=1)
    return text_table(runs, metric)


def difference(runs: list[RunRecord]) -> str:
    """Return the keys of config.yaml and result.json in which two runs differ, as a table.

    Args:
        runs: The two runs, which are the columns of the table.

    Raises:
        ConfigError: If there are not exactly two runs.
    """
    if len(runs) != 2:
        raise ConfigError.of("--diff", None, f"needs exactly two runs, found {len(runs)}")
    sides = [run.config | run.result | {"ended": run.ended} for run in runs]
    rows = [["", *map(printable, run_names(runs))]]
    for key in differing_keys(sides):
        if key not in NEVER_COMPARED:
            rows.append([printable(key), *(printable(side.get(key, "-")) for side in sides)])
    return align_columns(rows)


if __name__ == "__main__":
    main()
