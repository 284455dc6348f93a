"""Run `python -m tests.tools.campaign [--quick] [--only F01,F08] [--keep FOLDER]`."""

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.tools.campaign.runs import Lab
from tests.tools.campaign.scenarios import SCENARIOS

parser = argparse.ArgumentParser(prog="python -m tests.tools.campaign", description=__doc__)
parser.add_argument("--quick", action="store_true", help="a sample, about a minute")
parser.add_argument("--only", default="F", help="numbers of faults: F01,F08")
parser.add_argument("--keep", type=Path, help="keep all runs and their output in this folder")
asked, begun_s, n_tries, n_failed = parser.parse_args(), time.monotonic(), 0, 0
rows = [row for row in SCENARIOS if row.fault.startswith(tuple(asked.only.split(",")))]
counts = {row: 1 if asked.quick else row.tries for row in rows if row.quick or not asked.quick}
with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
    lab = Lab((asked.keep or Path(folder)).resolve(), n_steps=20 if asked.quick else 60)
    lab.folder.mkdir(parents=True, exist_ok=True)
    tries = {row: [pool.submit(row.attempt, lab, i) for i in range(n)] for row, n in counts.items()}
    for row, futures in tries.items():
        problems = [problem for future in futures if (problem := future.result())]
        held = len(futures) - len(problems)
        print(f"{row.fault}  {row.what:38}{held:5} of {len(futures)}", flush=True)
        print(*(f"     {problem}\n" for problem in problems), sep="", end="", flush=True)
        n_tries, n_failed = n_tries + len(futures), n_failed + len(problems)
print(f"{n_tries - n_failed} of {n_tries} held, {time.monotonic() - begun_s:.0f} s")
sys.exit(n_failed > 0)
