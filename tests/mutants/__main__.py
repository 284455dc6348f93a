"""Plant random mutants in src/gptrain, one at a time, and print those that no test notices.

    python -m tests.mutants [FILES] --n 150 --seed 1

A mutant is a flipped comparison, a negated condition, a dropped keyword argument, a changed
constant, a removed statement or two swapped arguments. All work is done in a clone of the checkout,
so that only what is committed is tried. First, all tests run once, and coverage.py records which
test runs which line, also in forked ranks and in commands. This takes about half an hour. Then each
mutant is tried with the tests that run its line, until one fails or the time is over. Records and
verdicts of a commit are kept in outputs/mutants: type the same command again to continue an
interrupted campaign.
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
SETTINGS = str(Path(__file__).with_name("coverage.ini"))
# The time limit of a test holds for a mutant that lets it wait forever.
TRY = ("-m", "pytest", "-n", "0", "-x", "-m", "", "--timeout=60", "-p", "no:cacheprovider")
KINDS = {"fast": "not slow and not gpu", "slow": "slow and not gpu"}  # of tests, with their marks
LIMIT_S = 150  # time limit of the first 12 fast tests of a mutant, of all others, of the slow ones


def run(checkout: Path, *words: object, limit_s: float | None = None) -> int:
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


def record(checkout: Path, kind: str, data: Path) -> None:
    """Run the tests of a kind, and record which of those that pass runs which lines."""
    pytest = ("-m", "pytest", "-p", "tests.mutants.contexts", "-m", KINDS[kind], "tests")
    run(checkout, "-m", "coverage", "run", *pytest)
    run(checkout, "-m", "coverage", "combine", "-q")
    failed = checkout / ".pytest_cache" / "v" / "cache" / "lastfailed"
    data.with_suffix(".failed").write_text(failed.read_text() if failed.exists() else "{}")
    (checkout / "outputs" / "coverage" / "data").rename(data)


class Records:
    """Tests that run each line.

    Args:
        folder: Folder of the records, one for each kind of tests.
    """

    def __init__(self, folder: Path):
        self.places: dict[tuple[str, int], int] = {}  # file and line -> place of its bit
        self.lines: dict[str, int] = defaultdict(int)  # test -> its lines, as the bits of an integer
        self.slow: set[str] = set()  # tests that are tried last: slow ones, and files
        for kind in KINDS:
            data = CoverageData(str(folder / kind))
            data.read()
            failed = json.loads((folder / kind).with_suffix(".failed").read_text())
            tests = data.measured_contexts() - {""} - set(failed)
            self.slow |= {test for test in tests if kind == "slow" or "::" not in test}
            for file in data.measured_files():
                for line, contexts in data.contexts_by_lineno(file).items():
                    place = self.places.setdefault((file, line), len(self.places))
                    for test in tests.intersection(contexts):
                        self.lines[test] |= 1 << place

    def choose(self, file: Path, lines: set[int]) -> tuple[list[str], list[str]]:
        """Return the tests that run any of these lines of a file, in the order to run them.

        There is no time for all tests of a line that every training runs. Therefore the next test
        is always the one with the largest part of lines that no test before it runs, and of equal
        ones the shortest.

        Python does not report every line of an expression. For a single line that is not reported,
        the nearest line before it that a test runs is used.

        Returns:
            Fast tests, and slow ones.
        """
        numbers = {line for name, line in self.places if name == str(file)}
        if len(lines) == 1:
            numbers = {max((number for number in numbers if number <= min(lines)), default=0)}
        else:
            numbers &= lines
        needed = sum(1 << self.places[str(file), number] for number in numbers if number)
        left = {test: lines for test, lines in self.lines.items() if lines & needed}
        chosen, known = [], 0

        def rank(test: str) -> tuple[bool, float, int]:
            n_lines = left[test].bit_count()
            return test in self.slow, -(left[test] & ~known).bit_count() / n_lines, n_lines

        while left:
            chosen.append(min(left, key=rank))
            known |= left.pop(chosen[-1])
        n_fast = len(chosen) - len(self.slow.intersection(chosen))
        return chosen[:n_fast], chosen[n_fast:]


def try_mutant(mutant: Mutant, checkout: Path, records: Records) -> str:
    """Plant a mutant, and return whether a test of its line catches it."""
    file = checkout / mutant.path
    fast, slow = records.choose(file, mutant.lines)
    source = file.read_text()
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
    file.write_text(mutant.source())
    # Importing the files of all tests takes seconds, and most mutants need a few tests only.
    groups = filter(None, (fast[:12], fast[12:], slow))
    is_caught = any(run(checkout, *TRY, *group, limit_s=LIMIT_S) for group in groups)
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
    for kind in KINDS:
        if not (folder / kind).exists():
            record(checkout, kind, folder / kind)
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
