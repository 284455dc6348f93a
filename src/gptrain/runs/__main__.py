"""The command: which runs, and how they are shown."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import NoReturn

from gptrain import runs as package
from gptrain.problems import INPUT_NOT_FOUND, ConfigError, Parser, code_of
from gptrain.runs.folder import RunRecord, flatten, read_runs
from gptrain.runs.table import aligned, differing, names, printable, ranked, same, text_table

OUTPUTS = Path(__file__).parents[3] / "outputs"
AS_JSON = ("overrides", "metrics", "steps", "seconds", "ended")
EACH_ITS_OWN = {"overrides", "command", "started"}


def main() -> NoReturn:
    """The command line."""
    head = {"description": package.__doc__, "formatter_class": RawDescriptionHelpFormatter}
    parser = Parser("python -m gptrain.runs", allow_abbrev=False, **head)
    parser.add_argument("folders", nargs="*", help="run folders, or folders above them")
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="a list, the best run first")
    shown.add_argument("--html", metavar="FILE", help="one page: curves, table, differences")
    shown.add_argument("--diff", action="store_true", help="what differs between two runs")
    code = 0
    try:
        print(answer(parser.parse_args()), flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ConfigError as error:
        print(error, file=sys.stderr)
        code = error.code
    sys.exit(code)


def answer(args: Namespace) -> str:
    """What is printed. Raises: ConfigError."""
    runs = select(args)
    if args.diff:
        return difference(runs)
    metric, runs = ranked(runs)
    if args.html:
        from gptrain.runs.page import write_page

        try:
            write_page(Path(args.html), runs, metric)
        except OSError as error:
            raise ConfigError.of("--html", args.html, str(error), code=code_of(error)) from error
        return f"{args.html}: {len(runs)} runs"
    if args.json:
        facts = ({key: getattr(run, key) for key in AS_JSON} for run in runs)
        rows = [{"run": str(run.path)} | row for run, row in zip(runs, facts, strict=True)]
        return json.dumps(rows, indent=1)
    return text_table(runs, metric)


def select(args: Namespace) -> list[RunRecord]:
    """The runs that are asked for."""
    typed = args.folders or [os.environ.get("GPTRAIN_OUTPUT_DIR") or str(OUTPUTS)]
    where = [one.partition("=") for one in args.where]
    runs = read_runs(map(Path, typed))
    runs = [run for run in runs if all(has(run, key, value) for key, _, value in where)]
    if not runs:
        wrong = f"no run{' with ' * bool(where)}{' '.join(args.where)} in {' '.join(typed)}"
        raise ConfigError.of("", None, wrong, code=INPUT_NOT_FOUND)
    return runs


def has(run: RunRecord, key: str, value: str) -> bool:
    """Whether the run was typed or composed with this value, or ended so."""
    known = {"ended": run.ended} | run.typed
    return same((known if key in known else run.config).get(key, ""), value)


def difference(runs: list[RunRecord]) -> str:
    """Config, versions, code, machine and metrics where two runs differ."""
    if len(runs) != 2:
        raise ConfigError.of("--diff", None, f"compares two runs, and these are {len(runs)}")
    sides = [run.config | flatten(run.result) | {"ended": run.ended} for run in runs]
    rows = [["", *names(runs)]]
    for key in differing(sides):
        if key not in EACH_ITS_OWN:
            rows.append([printable(key), *(printable(side.get(key, "-")) for side in sides)])
    return aligned(rows)


if __name__ == "__main__":
    main()
