"""python -m tests.campaign [--quick] [--only F01,F08] [--seed 0] [--keep FOLDER]"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.campaign.lab import Lab
from tests.campaign.scenarios import SCENARIOS
from tests.campaign.trial import Scenario


def main() -> None:
    """Runs the campaign, prints the table, and exits with 1 where anything did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample, about a minute")
    parser.add_argument("--only", default="", help="numbers of faults: F01,F08")
    parser.add_argument("--tries", type=int, help="of each scenario, whatever the table says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep all runs and their output in this folder")
    asked = parser.parse_args()
    names, started_s = set(filter(None, asked.only.split(","))), time.monotonic()
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="gptrain-campaign-"))
    folder.mkdir(parents=True, exist_ok=True)
    lab, n_tries, n_failed = Lab(folder.resolve(), 20 if asked.quick else 60), 0, 0

    def attempts(row: Scenario) -> tuple[Scenario, list[str | None], float]:
        counted = row.quick if asked.quick else row.full
        tries, begun_s = range(asked.tries or counted), time.monotonic()
        results = [row.attempt(lab, number, asked.seed) for number in tries]
        return row, results, time.monotonic() - begun_s

    rows = [row for row in SCENARIOS if not names or row.fault in names]
    rows = [row for row in rows if row.quick or not asked.quick]
    with ThreadPoolExecutor(2) as pool:  # a run waits half of its time
        for row, results, seconds in pool.map(attempts, rows):
            held = results.count(None)
            print(f"{row.fault}  {row.what:38}{held:5} of {len(results):<5}{seconds:7.1f} s")
            for number, problem in enumerate(results):
                if problem:
                    print(f"     try {number}: {problem}", flush=True)
            n_tries, n_failed = n_tries + len(results), n_failed + len(results) - held
    print(f"{n_tries - n_failed} of {n_tries} held, {time.monotonic() - started_s:.0f} s")
    if not asked.keep:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(n_failed > 0)


if __name__ == "__main__":
    main()
