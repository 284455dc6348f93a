"""Plant random mutants in src/gptrain, one at a time, and print those that no test notices.

    python -m tests.mutants [FILES] --n 150 --seed 1

A mutant is a flipped comparison, a negated condition, a dropped keyword argument, a changed
constant, a removed statement or two swapped arguments. All work is done in a clone of the checkout,
so that only what is committed is tried. First, all tests run once, slow ones too, and coverage.py
records which test runs which line, also in forked ranks and in commands. This takes about half an
hour. Then each mutant is tried with the tests that run its line, until one fails or the time is
over. The clone and the verdicts of a commit are kept in outputs/mutants: type the same command
again to continue an interrupted campaign.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
from collections import defaultdict
from contextlib import suppress
from itertools import chain, zip_longest
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired, check_output

from coverage import CoverageData

from tests.mutants.plant import Mutant, find_mutants

ROOT = Path(__file__).parents[2]
SETTINGS = str(Path(__file__).with_name("coverage.ini"))
RECORD = ("-p", "contexts", "-m", "not gpu", "tests")
TRY = ("-n", "0", "-x", "-m", "", "-p", "no:cacheprovider", "--timeout=60")
LIMIT_S = 150  # time limit of the first 12 tests of a mutant, of all others, and of their files


def run(checkout: Path, *words: object, limit_s: float | None = None) -> int:
    """Run Python with these words in the checkout, and return the exit code, 0 after the limit."""
    command = (sys.executable, *map(str, words))
    paths = f"{checkout / 'src'}:{Path(__file__).parent}"  # the latter has the plugin
    env = {**os.environ, "PYTHONPATH": paths, "COVERAGE_RCFILE": SETTINGS}
    process = Popen(command, cwd=checkout, env=env, stdout=DEVNULL, start_new_session=True)
    try:
        return process.wait(limit_s)
    except TimeoutExpired:
        return 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # kill the processes that tests have left


def record(checkout: Path) -> None:
    """Run all tests, and record the lines and the seconds of each in outputs/coverage."""
    run(checkout, "-m", "coverage", "run", "-m", "pytest", *RECORD)
    run(checkout, "-m", "coverage", "combine", "-q")


class Records:
    """Lines and seconds of the tests.

    Args:
        checkout: The checkout in which the tests were recorded.
    """

    def __init__(self, checkout: Path):
        folder = checkout / "outputs" / "coverage"
        self.seconds = json.loads((folder / "seconds.json").read_text())
        self.places: dict[tuple[str, int], int] = {}  # file and line -> place of its bit
        self.lines: dict[str, int] = defaultdict(
            int
        )  # test -> its lines, as the bits of an integer
        data = CoverageData(str(folder / "data"))
        data.read()
        for file in data.measured_files():
            for line, tests in data.contexts_by_lineno(file).items():
                place = self.places.setdefault((file, line), len(self.places))
                for test in tests:
                    if self.seconds.get(test, math.inf) < math.inf:
                        self.lines[test] |= 1 << place

    def choose(self, file: Path, lines: set[int]) -> list[str]:
        """Return the tests that run any of these lines of a file, in the order to run them.

        There is no time for all tests of a line that every training runs. Therefore the next test
        is always the one that adds the most lines per second to those that the tests before it run.
        """
        places = {line: place for (name, line), place in self.places.items() if name == str(file)}
        needed = sum(1 << places[line] for line in lines & places.keys())
        left = [test for test, run_lines in self.lines.items() if run_lines & needed]
        left.sort(key=self.seconds.__getitem__)
        chosen, known = [], 0
        while left:
            gains = [(self.lines[test] & ~known).bit_count() / self.seconds[test] for test in left]
            chosen.append(left.pop(gains.index(max(gains))))
            known |= self.lines[chosen[-1]]
        return chosen


def try_mutant(mutant: Mutant, checkout: Path, records: Records) -> str:
    """Plant a mutant, and return whether a test of its line catches it."""
    file = checkout / mutant.path
    tests = records.choose(file, mutant.lines)
    source = file.read_text()
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
    file.write_text(mutant.source())
    # Importing the files of all tests takes seconds, and most mutants need a few tests only. The
    # files come last because their tests share some runs, which are recorded for one test only.
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    groups = filter(None, (tests[:12], tests[12:], files))
    is_caught = any(
        run(checkout, "-m", "pytest", *TRY, *group, limit_s=LIMIT_S) for group in groups
    )
    file.write_text(source)
    return "caught" if is_caught else "survived"


def draw(checkout: Path, paths: list[str], n: int, seed: int) -> list[Mutant]:
    """Return random mutants: one of every file in random order, then a second one, and so on."""
    chance = random.Random(seed)
    files = []
    for path in chance.sample(sorted(paths), len(paths)):
        mutants = list(find_mutants(path, (checkout / path).read_text()))
        files.append(chance.sample(mutants, len(mutants)))
    turns = zip_longest(*files)
    return [mutant for mutant in chain.from_iterable(turns) if mutant is not None][:n]


def main() -> None:
    """Record the tests, try the mutants, and print the survivors."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("files", nargs="*", help="files of src/gptrain; default: all")
    parser.add_argument("--n", type=int, default=150, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1, help="another seed plants other mutants")
    typed = parser.parse_args()
    commit = check_output(("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, text=True)
    folder = ROOT / "outputs" / "mutants" / commit.strip()
    checkout, results = folder / "checkout", folder / "verdicts.json"
    if not (checkout / "outputs" / "coverage" / "data").exists():
        shutil.rmtree(checkout, ignore_errors=True)
        check_output(("git", "clone", "-q", ROOT, checkout))
        record(checkout)
    # An interrupted campaign may have left a mutant.
    check_output(("git", "restore", "."), cwd=checkout)
    records = Records(checkout)

    library = [path for path in ROOT.glob("src/gptrain/**/*.py") if "template" not in path.parts]
    paths = [str(Path(path).resolve().relative_to(ROOT)) for path in typed.files or library]
    verdicts = json.loads(results.read_text()) if results.exists() else {}
    mutants = draw(checkout, paths, typed.n, typed.seed)
    for mutant in mutants:
        if str(mutant) not in verdicts:
            verdicts[str(mutant)] = try_mutant(mutant, checkout, records)
            results.write_text(json.dumps(verdicts, indent=1))
        print(verdicts[str(mutant)], mutant, flush=True)
    survivors = [mutant for mutant in mutants if verdicts[str(mutant)] == "survived"]
    print(f"{len(survivors)} of {len(mutants)} survived:", *survivors, sep="\n")


if __name__ == "__main__":
    main()
