"""The mutation campaign finds what the tests of a small package do not notice."""

from pathlib import Path

import pytest

NAMES = [
    "test_the_boundary_itself_is_not_looked_at",
    "test_a_line_that_only_a_forked_process_runs",
]
MODULE = """
FACTOR = 2


def is_adult(age):
    return age >= 18


def double(number):
    return FACTOR * number


def never_run():
    return 1
"""
TESTS = """
import multiprocessing

import pytest

from gptrain.small import double, is_adult


def test_the_boundary_itself_is_not_looked_at():
    assert is_adult(30) and not is_adult(17)


def check():
    assert double(3) == 6


@pytest.mark.slow
def test_a_line_that_only_a_forked_process_runs():
    process = multiprocessing.get_context("fork").Process(target=check)
    process.start()
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.engine("coverage")
def test_mutants_are_caught_by_tests_of_their_line_or_survive(tmp_path):
    from tests.mutants.__main__ import Records, record, try_mutant
    from tests.mutants.plant import find_mutants

    checkout, path = tmp_path / "checkout", "src/gptrain/small.py"
    for folder in ("src/gptrain", "tests"):
        (checkout / folder).mkdir(parents=True)
    (checkout / "src/gptrain/__init__.py").touch()
    (checkout / path).write_text(MODULE)
    (checkout / "tests/test_small.py").write_text(TESTS)
    (checkout / "tests/mutants").symlink_to(Path(__file__).with_name("mutants"))
    (checkout / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    gpu\n")
    record(checkout)
    records = Records(checkout)
    verdicts = {
        str(mutant).partition(": ")[2]: try_mutant(mutant, checkout, records)
        for mutant in find_mutants(path, MODULE)
    }
    assert verdicts == {
        "comparison flipped: age >= 18": "survived",
        "constant changed: 18": "survived",
        "constant changed: 2": "caught",
        "constant changed: 1": "survived",
    }
    assert (checkout / path).read_text() == MODULE
    # No test runs the line of a constant by itself: all tests of the file are tried.
    tests = [
        [name.partition("::")[2] for name in records.choose(checkout / path, line)]
        for line in (2, 6)
    ]
    assert sorted(tests[0]) == sorted(NAMES) and tests[1] == NAMES[:1]
