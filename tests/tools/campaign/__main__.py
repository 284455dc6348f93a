"""Run `python -m tests.tools.campaign [--quick] [--only F01,F08] [--keep FOLDER]`."""

import argparse
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gptrain.checkpoints.files import read_rows
from gptrain.checkpoints.timeline import measure
from tests.tools.campaign.lab import Lab
from tests.tools.campaign.recovery import recovery_times
from tests.tools.campaign.scenarios import SCENARIOS


def print_times(folder: Path, faults: list[str]) -> None:
    """Print goodput and time to recover by fault.

    The campaign restarts a run as soon as it has ended, in a process that has imported torch.
    """
    print("median over the runs of a fault:")
    for fault in dict.fromkeys(("reference", *faults, "")):
        paths = sorted(folder.glob(f"*-{fault}*/timeline.jsonl"))
        timelines = [read_rows(path) for path in paths]
        goodputs = [times["goodput"] for timeline in timelines if (times := measure(timeline))]
        recoveries = [seconds for timeline in timelines for seconds in recovery_times(timeline)]
        if goodputs:
            line = f"{fault or 'all':10}goodput {statistics.median(goodputs):.2f}"
            if recoveries:
                line += f"  time to recover {statistics.median(recoveries):6.1f} s"
                line += f"  ({len(recoveries)} recoveries)"
            print(line)


parser = argparse.ArgumentParser(prog="python -m tests.tools.campaign", description=__doc__)
parser.add_argument("--quick", action="store_true", help="a sample, about a minute")
parser.add_argument("--only", default="F", help="numbers of faults: F01,F08")
parser.add_argument("--keep", type=Path, help="keep all runs and their output in this folder")
asked, begun_s, n_tries, n_failed = parser.parse_args(), time.monotonic(), 0, 0
rows = [row for row in SCENARIOS if row.fault.startswith(tuple(asked.only.split(",")))]
counts = {row: row.quick if asked.quick else row.full for row in rows}
rows = [row for row in rows if counts[row]]
with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
    lab = Lab((asked.keep or Path(folder)).resolve(), n_steps=20 if asked.quick else 60)
    lab.folder.mkdir(parents=True, exist_ok=True)
    tries = {row: [pool.submit(row.attempt, lab, i) for i in range(counts[row])] for row in rows}
    for row, futures in tries.items():
        problems = [problem for future in futures if (problem := future.result())]
        held = len(futures) - len(problems)
        print(f"{row.fault}  {row.what:38}{held:5} of {len(futures)}", flush=True)
        print(*(f"     {problem}\n" for problem in problems), sep="", end="", flush=True)
        n_tries, n_failed = n_tries + len(futures), n_failed + len(problems)
    print_times(lab.folder, [row.fault for row in rows])
print(f"{n_tries - n_failed} of {n_tries} held, {time.monotonic() - begun_s:.0f} s")
sys.exit(n_failed > 0)
