"""Note which lines of gptrain run in this process, and during which test.

Python imports this module at the start of every process that has its folder on PYTHONPATH. So lines
are also noted in ranks that are forked, and in commands that a test starts. The tracer follows
gptrain's own files line by line, and no other function. To pytest this module is a plugin.

A line of the notes is `test TAB file:line`, or `test TAB seconds:<number>`, or `test TAB failed:1`.
"""

import os
import sys
import threading

CHECKOUT, NOTES = os.environ["MUTANTS_CHECKOUT"] + os.sep, os.environ["MUTANTS_NOTES"]
PACKAGE = os.path.join(CHECKOUT, "src", "gptrain", "")
noted = {"": ""}  # what this process has noted since the test began; under "" the test's name


def trace(frame, event, argument):
    """Note the line of a frame of gptrain, and return the tracer of the frame's next lines."""
    path = frame.f_code.co_filename
    if not path.startswith(PACKAGE):
        return None
    note(f"{path[len(CHECKOUT) :]}:{frame.f_lineno}")
    return trace


def note(words):
    """Append a note to the file that all processes share."""
    if words not in noted:
        noted[words] = ""
        with open(NOTES, "a") as file:
            file.write(f"{noted['']}\t{words}\n")


def begin():
    """Note every line again, because a test or a process begins."""
    noted.clear()
    with open(NOTES + ".test") as file:
        noted[""] = file.read()
    threading.settrace(trace)
    sys.settrace(trace)


def pytest_runtest_setup(item):
    """Tell all processes which test begins.

    A test that shares what a fixture of its file or session has made is noted under the name of its
    file, because another test of the file may have run the lines for it.
    """
    definitions = [one for many in item._fixtureinfo.name2fixturedefs.values() for one in many]
    shares = any(one.scope != "function" and one.baseid for one in definitions)
    with open(NOTES + ".test", "w") as file:
        file.write(item.nodeid.partition("::")[0] if shares else item.nodeid)
    begin()


def pytest_runtest_makereport(item, call):
    """Note the seconds of a part of a test, and whether it failed."""
    note(f"seconds:{call.duration}")
    if call.excinfo is not None and call.excinfo.typename != "Skipped":
        note("failed:1")


if NOTES:
    os.register_at_fork(after_in_child=begin)
    # pytest and the server that forks ranks import for seconds before a test begins.
    if "pytest" not in sys.orig_argv and not any("forkserver" in one for one in sys.orig_argv):
        begin()
