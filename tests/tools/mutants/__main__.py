"""Plant random mutants in src/gptrain, one at a time, and print those that no test notices.

    python -m tests.tools.mutants [FILES] --n 150 --seed 1 --only tests/truth,tests/golden

A mutant is a flipped comparison, a negated condition, a dropped keyword argument, a changed
constant, a removed statement or two swapped arguments. All work is done in a clone of the checkout,
so that only what is committed is tried. First, all tests run once, slow ones too, or those in the
folders of `--only`, and coverage.py records which test runs which line, also in forked ranks and in
commands. All tests take about half an hour. Then each mutant is tried with the tests that run its
line, until one fails or the time is over. The clone and the verdicts of a commit are kept in
outputs/mutants: type the same command again to continue an interrupted campaign.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from itertools import count
from pathlib import Path
from statistics import mean

from coverage import CoverageData

from tests.tools.mutants.plant import Mutant, find_mutants

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RECORD = ("coverage", "run", "-m", "pytest", "-p", "contexts", "-m", "not gpu")
TRY = ("pytest", "-n", "0", "-x", "-m", "", "-p", "no:cacheprovider", "--timeout=60")


def run(checkout: Path, *module: str, limit_s: int = 150) -> bool:
    """Run a Python module in the checkout, and return whether it failed within the time limit."""
    paths = f"{checkout / 'src'}:{HERE}"  # the latter has the plugin
    record = {"COVERAGE_RCFILE": str(HERE / "coverage.ini")}
    record["COVERAGE_FILE"] = str(checkout / "outputs" / "coverage" / "data")  # in any folder
    env = {**os.environ, "PYTHONPATH": paths, **record}
    # GNU timeout also ends the processes that the tests have started.
    command = ("timeout", "--kill-after=5", str(limit_s), sys.executable, "-m", *module)
    done = subprocess.run(command, cwd=checkout, env=env, stdout=subprocess.DEVNULL)
    return done.returncode not in (0, 124, 137)  # the last two: after the limit


class Records:
    """Lines and seconds of the tests, which are recorded if they are not there.

    Args:
        checkout: The checkout in which the tests run.
        paths: Files and folders of the tests.
    """

    def __init__(self, checkout: Path, paths: list[str]):
        folder = checkout / "outputs" / "coverage"
        if not (folder / "data").exists():
            run(checkout, *RECORD, *paths, limit_s=7200)
            run(checkout, "coverage", "combine", "-q")
        self.seconds = json.loads((folder / "seconds.json").read_text())
        assert self.seconds, f"no test has passed in {checkout}"
        of_file = defaultdict[str, list[float]](list)
        for test, seconds in self.seconds.items():
            of_file[test.partition("::")[0]].append(seconds)
        # Some tests are quick only because another test of their file has made the same run.
        self.pace = {test: mean(of_file[test.partition("::")[0]]) for test in self.seconds}
        self.places = defaultdict[tuple[str, int], int](count().__next__)  # place of a line's bit
        self.lines = defaultdict[str, int](int)  # test -> its lines, as the bits of an integer
        data = CoverageData(str(folder / "data"))
        data.read()
        for file in data.measured_files():
            for line, tests in data.contexts_by_lineno(file).items():
                for test in tests:
                    self.lines[test] |= 1 << self.places[file, line]

    def choose(self, file: Path, lines: set[int]) -> list[str]:
        """Return the tests that run any of these lines of a file, in the order to run them.

        There is no time for all tests of a line that every training runs. Therefore the next test
        is always the one that adds the most lines of the file per second to those that the tests
        before it run; among equals, the one that adds the most lines of all files.
        """
        needed = sum(1 << self.places[str(file), line] for line in lines)
        near = sum(1 << place for (name, _), place in self.places.items() if name == str(file))
        left = [test for test in self.seconds if self.lines[test] & needed]
        chosen, known = [], 0
        while left:
            new = [(self.lines[test] & ~known, self.seconds[test]) for test in left]
            gains = [((bits & near).bit_count() / s, bits.bit_count() / s) for bits, s in new]
            chosen.append(left.pop(gains.index(max(gains))))
            known |= self.lines[chosen[-1]]
        return chosen


def is_caught(mutant: Mutant, checkout: Path, records: Records) -> bool:
    """Plant a mutant, and return whether a test of its line fails."""
    file = checkout / mutant.path
    tests = records.choose(file, mutant.lines)
    # Importing the files of all tests takes seconds, and most mutants need a few tests only. The
    # files come last because their tests share some runs, which are recorded for one test only.
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    source = file.read_text()
    file.write_text(mutant.source())
    first, others = (sorted(part, key=records.pace.get) for part in (tests[:12], tests[12:]))
    groups = (first, others, files)  # most mutants fail a test of a quick file
    caught = any(group and run(checkout, *TRY, *group) for group in groups)
    file.write_text(source)
    return caught


def draw(checkout: Path, paths: list[str], n: int, seed: int) -> list[Mutant]:
    """Return random mutants: one of every file in random order, then a second one, and so on."""
    mutants = [mutant for path in sorted(paths) for mutant in find_mutants(checkout, path)]
    random.Random(seed).shuffle(mutants)
    turns = defaultdict(count)  # file -> 0, 1, 2 ... for its first mutant, its second one ...
    return sorted(mutants, key=lambda mutant: next(turns[mutant.path]))[:n]


def main() -> None:
    """Record the tests, try the mutants, and print the survivors."""
    parser = argparse.ArgumentParser("python -m tests.tools.mutants", description=__doc__)
    parser.add_argument("files", nargs="*", help="files of src/gptrain; default: all")
    parser.add_argument("--n", type=int, default=150, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1, help="another seed plants other mutants")
    parser.add_argument("--only", default="tests", help="tests that judge, separated by commas")
    typed = parser.parse_args()
    commit = subprocess.check_output(("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, text=True)
    judges = "" if typed.only == "tests" else "-" + typed.only.replace("/", "_")
    checkout = ROOT / "outputs" / "mutants" / (commit.strip() + judges)
    if not checkout.exists():
        subprocess.check_call(("git", "clone", "-q", ROOT, checkout))
    # An interrupted campaign may have left a mutant.
    subprocess.check_call(("git", "restore", "."), cwd=checkout)
    records = Records(checkout, typed.only.split(","))
    results = checkout / "outputs" / "verdicts.json"
    verdicts = json.loads(results.read_text()) if results.exists() else {}
    library = checkout.glob("src/gptrain/**/*.py")
    files = [str(file.relative_to(checkout)) for file in library]
    mutants = {str(m): m for m in draw(checkout, typed.files or files, typed.n, typed.seed)}
    for name, mutant in mutants.items():
        if name not in verdicts:
            verdicts[name] = "caught" if is_caught(mutant, checkout, records) else "survived"
            results.write_text(json.dumps(verdicts, indent=1))
        print(verdicts[name], name, flush=True)
    survivors = [name for name in mutants if verdicts[name] == "survived"]
    print(f"{len(survivors)} of {len(mutants)} survived:", *survivors, sep="\n")


if __name__ == "__main__":
    main()
