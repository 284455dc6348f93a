"""The mutation campaign finds what the tests of a small package do not notice."""

from pathlib import Path

import pytest

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


def test_in_this_process():
    assert is_adult(30) and not is_adult(17)


def check(function, argument, value):
    assert function(argument) == value


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("case", [(double, 3, 6), (is_adult, 30, True)])
def test_another_process(method, case):
    process = multiprocessing.get_context(method).Process(target=check, args=case)
    process.start()
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.engine("coverage")
def test_mutants_are_caught_by_tests_of_their_line_or_survive(tmp_path):
    from tests.tools.mutants.__main__ import Records, is_caught
    from tests.tools.mutants.plant import find_mutants

    checkout, path = tmp_path / "checkout", "src/gptrain/small.py"
    for folder in ("src/gptrain", "tests"):
        (checkout / folder).mkdir(parents=True)
    (checkout / "src/gptrain/__init__.py").touch()
    (checkout / path).write_text(MODULE)
    (checkout / "tests/test_small.py").write_text(TESTS)
    (checkout / "tests/tools").mkdir()
    (checkout / "tests/tools/mutants").symlink_to(Path(__file__).parent / "tools/mutants")
    (checkout / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    gpu\n")
    records = Records(checkout, ["tests"])
    verdicts = {
        str(mutant).partition(": ")[2]: is_caught(mutant, checkout, records)
        for mutant in find_mutants(checkout, path)
    }
    assert verdicts == {
        "comparison flipped: age >= 18": False,
        "constant changed: 18": False,
        "constant changed: 2": True,
        "constant changed: 1": False,
    }
    assert (checkout / path).read_text() == MODULE
    other = "test_another_process[case{}-{}]"
    methods = ("fork", "spawn", "forkserver")
    double = {other.format(0, method) for method in methods}
    adult = {other.format(1, method) for method in methods} | {"test_in_this_process"}
    (checkout / "constants.py").write_text("LENGTHS = [\n    2,\n]")
    (constant,) = find_mutants(checkout, "constants.py")
    assert constant.lines == {2}  # a file without functions
    # A constant is used in the functions.
    for code, expected in (("2", double | adult), ("age >= 18", adult), ("1", set())):
        (mutant,) = (m for m in find_mutants(checkout, path) if str(m).endswith(f": {code}"))
        tests = records.choose(checkout / path, mutant.lines)
        assert {test.partition("::")[2] for test in tests} == expected
