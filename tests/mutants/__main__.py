"""Plant random mutants in src/gptrain, one at a time, and print those that no test notices.

    python -m tests.mutants [FILES] --n 150 --seed 1

A mutant is a flipped comparison, a negated condition, a dropped keyword argument, a changed
constant, a removed statement or two swapped arguments. All work is done in a copy of the checkout.
First every file of tests runs once by itself, and it is recorded which test runs which line, also
in forked ranks and in commands. Then each mutant is tried with the tests that run its line, the
quickest first. Records and results lie in --folder, for each commit by itself: the same command
continues after a stop. Nothing that is not committed is tried.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from itertools import accumulate, count
from pathlib import Path

from tests.mutants.plant import Mutant, find_mutants

ROOT, RECORDER = Path(__file__).parents[2], Path(__file__).parent / "recorder"
TESTS_S = 90  # what the recorded tests of one mutant may take together
LIMIT_S = 60  # limit of a run of pytest; three times what its tests took in the record is added


def copy_checkout(folder: Path) -> None:
    """Copy what is committed into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = subprocess.run(
        ("git", "archive", "HEAD"), cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    subprocess.run(("tar", "-x", "-C", folder), input=archive.stdout, check=True)


def run_tests(checkout: Path, words: list[str], limit_s: float, notes: str = "") -> str:
    """Run tests in a copy of the checkout and return pytest's output, "" where the time ran out.

    Args:
        words: Files and tests, as typed for pytest.
        notes: File for the notes of the recorder; "": record nothing, and stop at a failure.
    """
    typed, said = checkout.with_suffix(".words"), checkout.with_suffix(".said")
    typed.write_text("\n".join(words))
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--tb=no"]
    command += [f"@{typed}", *(("-p", "sitecustomize") if notes else ("-x",))]
    path = f"{RECORDER}{os.pathsep}{checkout / 'src'}"
    changed = {"PYTHONPATH": path, "MUTANTS_CHECKOUT": str(checkout), "MUTANTS_NOTES": notes}
    where = {"cwd": checkout, "env": os.environ | changed, "start_new_session": True}
    with open(said, "w") as file, subprocess.Popen(command, stdout=file, **where) as process:
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and processes that tests have left
    return said.read_text(errors="replace")


def record(test_file: str, checkout: Path, folder: Path) -> None:
    """Run a file of tests, and note which of its tests runs which lines of src/gptrain."""
    notes = folder / f"{test_file.replace('/', '.')}.notes"
    if not notes.exists():
        folder.mkdir(parents=True, exist_ok=True)
        begun = notes.with_suffix(".begun")
        begun.write_text("")
        run_tests(checkout, [test_file], 1200, str(begun))
        begun.rename(notes)
        print(f"recorded {test_file}", flush=True)


class Records:
    """Which tests run which lines, and how long they take; tests that failed are left out.

    Args:
        folder: The folder of the notes.
    """

    def __init__(self, folder: Path):
        self.seconds, self.of_line = defaultdict(float), defaultdict(set)
        for path in folder.glob("*.notes"):
            notes = [line.split("\t") for line in path.read_text().splitlines()]
            failed = {name for name, words in notes if words == "failed:1"}
            for name, words in notes:
                place, _, number = words.rpartition(":")
                if place == "seconds":
                    self.seconds[name] += float(number)
                elif name not in failed:
                    self.of_line[place, int(number)].add(name)

    def choose(self, mutant: Mutant) -> tuple[list[str], float]:
        """Return the quickest tests that run a mutant's line, and their seconds together.

        Where no test runs the line, for it is part of an expression or runs at import, they are
        those of the nearest line before it. The first test may take any time.
        """
        lines = ((mutant.path, line) for line in range(mutant.line, 0, -1))
        names = next((self.of_line[line] for line in lines if line in self.of_line), ())
        names = sorted(names, key=self.seconds.__getitem__)
        until = list(accumulate(self.seconds[name] for name in names))
        n_chosen = max(1, sum(total_s <= TESTS_S for total_s in until))
        return names[:n_chosen], sum(until[n_chosen - 1 : n_chosen])


def try_mutant(mutant: Mutant, checkout: Path, records: Records) -> str:
    """Plant a mutant in a copy of the checkout and return the verdict."""
    target, (tests, expected_s) = checkout / mutant.path, records.choose(mutant)
    code = target.read_text()
    for compiled in target.parent.glob(f"__pycache__/{target.stem}.*"):
        compiled.unlink()  # Python compares seconds and sizes, which may be equal
    target.write_text(mutant.plant(checkout)[0])
    said = run_tests(checkout, tests, LIMIT_S + 3 * expected_s) if tests else " passed"
    target.write_text(code)
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed or " passed" not in said:
        return f"caught: {failed[0] if failed else said[-200:] or 'time limit'}"
    return f"survived: {len(tests)} tests, {expected_s:.0f} s"


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.mutants", None, __doc__, formatter_class=how)
    parser.add_argument("files", nargs="*", help="files of src/gptrain; default: all")
    parser.add_argument("--n", type=int, default=150, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1, help="another seed plants other mutants")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "mutants")
    asked = parser.parse_args()
    commit = subprocess.check_output(("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, text=True)
    folder = asked.folder.resolve() / commit.strip()  # records and results hold for this commit
    checkout, results = folder / "copy", folder / "results.json"
    copy_checkout(checkout)
    for path in sorted(checkout.glob("tests/**/test_*.py")):
        record(str(path.relative_to(checkout)), checkout, folder / "records")
    records = Records(folder / "records")
    library = [one for one in ROOT.glob("src/gptrain/**/*.py") if "template" not in one.parts]
    paths = sorted(str(Path(one).resolve().relative_to(ROOT)) for one in asked.files or library)
    mutants = [mutant for path in paths for mutant in find_mutants(checkout, path)]
    random.Random(asked.seed).shuffle(mutants)
    number = defaultdict(count)
    mutants.sort(key=lambda one: next(number[one.path]))  # one of every file, then a second one
    mutants = mutants[: asked.n]
    verdicts = json.loads(results.read_text()) if results.exists() else {}
    for mutant in mutants:
        if str(mutant) not in verdicts:
            verdicts[str(mutant)] = try_mutant(mutant, checkout, records)
            results.write_text(json.dumps(verdicts, indent=1))
        print(f"{mutant.path}:{mutant.line}: {verdicts[str(mutant)]}", flush=True)
    survivors = [one for one in mutants if verdicts[str(one)].startswith("survived")]
    for mutant in survivors:
        print(f"\n{mutant.path}:{mutant.line}: {mutant.kind}\n{mutant.plant(checkout)[1]}")
    print(f"\n{len(survivors)} of {len(mutants)} survived: {len(survivors) / len(mutants):.1%}")


if __name__ == "__main__":
    main()
