"""Command line of `python -m gptrain.runs`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from gptrain import runs as package
from gptrain.core.errors import DONE, INPUT_NOT_FOUND, ConfigError
from gptrain.core.locations import default_output_dir
from gptrain.core.parser import Parser
from gptrain.runs.folder import read_runs
from gptrain.runs.table import rank_runs, text_table
from gptrain.runtime.streams import prepare_streams

JSON_FIELDS = ("overrides", "metrics", "steps", "seconds", "ended")


def main() -> NoReturn:
    """Run the command `python -m gptrain.runs` with the words in `sys.argv`, and exit.

    The command prints a table of runs. A ConfigError is printed on stderr, and its code is the exit
    code.
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
    parser.add_argument("--json", action="store_true", help="print a JSON list, the best run first")
    prepare_streams(is_run=False)
    try:
        print(answer(parser.parse_args()))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)
    sys.exit(DONE)


def answer(args: argparse.Namespace) -> str:
    """Return the text that the command prints.

    Args:
        args: Parsed command line: folders, and the flag json.

    Raises:
        ConfigError: If no run is found.
    """
    runs = read_runs(args.folders)
    if not runs:
        message = f"no run in {' '.join(map(str, args.folders))}"
        raise ConfigError.of("", None, message, code=INPUT_NOT_FOUND)
    metric, runs = rank_runs(runs)
    if args.json:
        rows = [
            {"run": str(run.path)} | {k: getattr(run, k) for k in JSON_FIELDS} | run.goodput
            for run in runs
        ]
        return json.dumps(rows, indent=1)
    return text_table(runs, metric)


if __name__ == "__main__":
    main()
