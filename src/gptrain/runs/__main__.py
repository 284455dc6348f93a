"""The command: which runs, and how they are shown."""

from __future__ import annotations

import json
import os
import shutil
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from glob import glob
from pathlib import Path
from typing import NoReturn

from gptrain import runs as package
from gptrain.problems import INPUT_NOT_FOUND, ConfigError, Parser, Problem
from gptrain.runs.folder import RunRecord, find_runs, flatten, read_config, read_run
from gptrain.runs.table import direction, printable, ranked, same, text_table
from gptrain.small_files import UnreadableFile

OUTPUTS = Path(__file__).parents[3] / "outputs"
AS_JSON = ("overrides", "metrics", "steps", "seconds", "ended")
EACH_ITS_OWN = ("overrides", "command", "checkpoint", "started", "config.run_dir", "config.name")


def main() -> NoReturn:
    """The command line."""
    head = {"description": package.__doc__, "formatter_class": RawDescriptionHelpFormatter}
    parser = Parser("python -m gptrain.runs", allow_abbrev=False, **head)
    parser.add_argument("folders", nargs="*", help="run folders, folders above them, patterns")
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--last", type=int, metavar="N", help="the N that started last")
    parser.add_argument("--metric", help="to sort by, in place of the runs' objective")
    parser.add_argument("--mode", choices=["min", "max"], help="which of its values is the best")
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
    objective, mode = direction(runs)
    metric, known = args.metric or objective, sorted({name for run in runs for name in run.metrics})
    if args.metric and args.metric not in known:
        raise ConfigError.of("--metric", metric, "no run has it", allowed=", ".join(known))
    runs = ranked(runs, metric, args.mode or mode)
    if args.html:
        from gptrain.runs.page import write_page

        write_page(Path(args.html), runs, metric)
        return f"{args.html}: {len(runs)} runs"
    if args.json:
        rows = [
            {"run": str(run.path)} | {key: getattr(run, key) for key in AS_JSON} for run in runs
        ]
        return json.dumps(rows, indent=1)
    return text_table(
        runs, metric, shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    )


def select(args: Namespace) -> list[RunRecord]:
    """The runs that are asked for; one that cannot be read is a warning."""
    typed = args.folders or [os.environ.get("GPTRAIN_OUTPUT_DIR") or str(OUTPUTS)]
    above = [Path(path) for one in typed for path in sorted(glob(one)) or [one]]
    runs, where = [], [one.partition("=") for one in args.where]
    for folder in dict.fromkeys(path for one in above for path in find_runs(one)):
        try:
            run = read_run(folder)
            if all(has(run, key, value) for key, _, value in where):
                runs.append(run)
        except (UnreadableFile, OSError, RecursionError) as error:
            print(Problem("", None, f"{folder}: {error}", code=0).line, file=sys.stderr)
    if not runs:
        wrong = f"no run{' with ' * bool(where)}{' '.join(args.where)} in {' '.join(typed)}"
        raise ConfigError.of("", None, wrong, code=INPUT_NOT_FOUND)
    return sorted(runs, key=lambda run: run.started_s)[-args.last :] if args.last else runs


def has(run: RunRecord, key: str, value: str) -> bool:
    """Whether the run was typed or composed with this value, or ended so."""
    known = {"ended": run.ended} | run.typed
    return same((known if key in known else read_config(run.path)).get(key, ""), value)


def difference(runs: list[RunRecord]) -> str:
    """Config, versions, code, machine and metrics where two runs differ."""
    if len(runs) != 2:
        raise ConfigError.of("--diff", None, f"compares two runs, and these are {len(runs)}")
    sides = [flatten({"config": read_config(r.path)} | r.result | {"ended": r.ended}) for r in runs]
    rows = [["", *(str(run.path) for run in runs)]]
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        values = [
            str(side.get(key, "-")).replace(str(side.get("config.run_dir")), "<run_dir>")
            for side in sides
        ]
        if not key.startswith(EACH_ITS_OWN) and not same(*values):
            rows.append([key.removeprefix("config."), *values])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(map(str.ljust, map(printable, row), widths)).rstrip() for row in rows
    )


if __name__ == "__main__":
    main()
