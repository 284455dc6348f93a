"""Plant random mutants in src/gptrain, one at a time, and print those that no test notices.

    python -m tests.mutants [FILES] --n 150 --seed 1

A mutant is a flipped comparison, a negated condition, a dropped keyword argument, a changed
constant, a removed statement or two swapped arguments. All work is done in a clone of the checkout,
so that only what is committed is tried. First, every file of tests runs once by itself, and
coverage.py records which test runs which line, also in forked ranks and in commands. This takes
about half an hour and prints nothing. Then each mutant is tried with the tests that run its line,
until one fails or the time is over: first with those that do not train, then with trainings that
have little in common. Records and verdicts of a commit are kept in outputs/mutants: type the same
command again to continue an interrupted campaign.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired, check_output

from coverage import CoverageData

from tests.mutants.plant import Mutant, find_mutants

ROOT = Path(__file__).parents[2]
PYTEST = ("-m", "pytest", "-n", "0", "-x", "--timeout=60")  # the time limit holds for each test
SETTINGS = str(Path(__file__).with_name("coverage.ini"))
LIMIT_S = 150  # time limit of the first 12 tests of a mutant, and of all others together
TRAINING_LINES = 1000  # a test that trains runs more lines of src/gptrain


def run(checkout: Path, *words: object, limit_s: float = 1200) -> int:
    """Run Python with these words in the checkout, and return the exit code, 0 after the limit."""
    command = (sys.executable, *map(str, words))
    env = {**os.environ, "PYTHONPATH": str(checkout / "src"), "COVERAGE_RCFILE": SETTINGS}
    process = Popen(command, cwd=checkout, env=env, stdout=DEVNULL, start_new_session=True)
    try:
        return process.wait(limit_s)
    except TimeoutExpired:
        return 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # kill the processes that tests have left


def record(checkout: Path, tests: Path, data: Path) -> None:
    """Run a file of tests, and record which of its tests runs which lines, if all tests pass."""
    code = run(checkout, "-m", "coverage", "run", *PYTEST, tests)
    if run(checkout, "-m", "coverage", "combine", "-q") == 0 and code == 0:
        (checkout / "outputs" / "coverage" / "data").rename(data)


class Records:
    """Tests that run each line, and the lines that each test runs, as the bits of an integer.

    The process that a test starts does not know the name of the test. For the lines of such a
    process, all tests of the file are one test.

    Args:
        folder: Folder of the records, one for each file of tests.
    """

    def __init__(self, folder: Path):
        self.places: dict[tuple[str, int], int] = {}  # file and line -> place of its bit
        self.lines: dict[str, int] = defaultdict(int)  # test -> its lines
        for path in folder.glob("tests:*"):
            tests = Path(path.name.replace(":", "/"))
            data = CoverageData(str(path))
            data.read()
            for file in data.measured_files():
                for line, contexts in data.contexts_by_lineno(file).items():
                    place = self.places.setdefault((file, line), len(self.places))
                    for context in contexts:
                        module, _, name = context.rpartition(".")
                        test = f"{tests}::{name}" if module == tests.stem else str(tests)
                        self.lines[test] |= 1 << place

    def choose(self, file: Path, lines: set[int]) -> list[str]:
        """Return the tests that run any of these lines of a file, in the order to run them.

        There is no time for all tests of a line that every training runs. Therefore tests without a
        training come first. The next test is always the one with the largest part of lines that no
        test before it runs, and of equal ones the shortest. Files of which all tests are one test
        come last. Of several lines, as for a constant, the tests that run little else come first.

        Python does not report every line of an expression. For a single line that is not reported,
        the nearest line before it that a test runs is used.
        """
        numbers = {line for name, line in self.places if name == str(file)}
        if len(lines) == 1:
            numbers = {max((number for number in numbers if number <= min(lines)), default=0)}
        else:
            numbers &= lines
        needed = sum(1 << self.places[str(file), number] for number in numbers if number)
        left = [test for test, run_lines in self.lines.items() if run_lines & needed]
        is_single = len(numbers) == 1
        chosen, known = [], 0
        while left:
            counted = (-1 if is_single else needed) & ~known
            left.sort(key=lambda test: self.rank(test, counted, is_single))
            chosen.append(left.pop())
            known |= self.lines[chosen[-1]]
        return chosen

    def rank(self, test: str, counted: int, is_single: bool) -> tuple[tuple, float, int]:
        """Return a key that is largest for the test to run next.

        Args:
            test: Name of a test, or of a file.
            counted: Lines that count, as bits: those that no test before it runs.
            is_single: Whether one line is tested. The order then depends on the kind of test, too.
        """
        n_lines = self.lines[test].bit_count()
        n_new = (self.lines[test] & counted).bit_count()
        kind = ("::" in test, n_lines < TRAINING_LINES) if is_single else ()
        return kind, n_new / n_lines, -n_lines


def try_mutant(mutant: Mutant, checkout: Path, records: Records) -> str:
    """Plant a mutant, and return whether a test of its line catches it."""
    file = checkout / mutant.path
    tests = records.choose(file, mutant.lines)
    source = file.read_text()
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
    file.write_text(mutant.source())
    # Importing the files of all tests takes seconds, and most mutants need a few tests only.
    groups = filter(None, (tests[:12], tests[12:]))
    is_caught = any(run(checkout, *PYTEST, *group, limit_s=LIMIT_S) for group in groups)
    file.write_text(source)
    return "caught" if is_caught else "survived"


def draw(checkout: Path, paths: list[str], n: int, seed: int) -> list[Mutant]:
    """Return random mutants: one of every file in random order, then a second one, and so on."""
    chance = random.Random(seed)
    drawn = []
    for path in sorted(paths):
        mutants = find_mutants(path, (checkout / path).read_text())
        mutants = sorted(mutants, key=lambda mutant: chance.random())
        drawn += [(turn, chance.random(), mutant) for turn, mutant in enumerate(mutants)]
    return [mutant for _, _, mutant in sorted(drawn)[:n]]


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
    shutil.rmtree(checkout, ignore_errors=True)  # an interrupted campaign may have left a mutant
    check_output(("git", "clone", "-q", ROOT, checkout))
    for path in sorted(checkout.glob("tests/**/test_*.py")):
        tests = path.relative_to(checkout)
        data = folder / str(tests).replace("/", ":")
        if not data.exists():
            record(checkout, tests, data)
    records = Records(folder)

    library = [path for path in ROOT.glob("src/gptrain/**/*.py") if "template" not in path.parts]
    paths = [str(Path(path).resolve().relative_to(ROOT)) for path in typed.files or library]
    mutants = draw(checkout, paths, typed.n, typed.seed)
    verdicts = json.loads(results.read_text()) if results.exists() else {}
    for mutant in mutants:
        if str(mutant) not in verdicts:
            verdicts[str(mutant)] = try_mutant(mutant, checkout, records)
            results.write_text(json.dumps(verdicts, indent=1))
        print(verdicts[str(mutant)], mutant, flush=True)
    survivors = [mutant for mutant in mutants if verdicts[str(mutant)] == "survived"]
    print(f"{len(survivors)} of {len(mutants)} survived:", *survivors, sep="\n")


if __name__ == "__main__":
    main()
