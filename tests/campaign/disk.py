"""Faults of the disk under a run. Each function is one try."""

from __future__ import annotations

import os
import random

from tests.campaign.expect import ends, goes_on_as_if_nothing
from tests.campaign.lab import EVERY, Lab
from tests.campaign.plant import Fault
from tests.campaign.saves import damage, flip
from tests.campaign.truth import difference

SAVE_OPERATIONS = 16  # of a save of one file, about; later counts fall into the next save


def killed_in_a_save(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """SIGKILL of rank 0 before some file operation of a save."""
    fault = Fault("kill", 0, "operation", 10, count=draw.randrange(1, SAVE_OPERATIONS))
    background = draw.random() < 0.5
    attempt = lab.start(lab.new("kill-save"), fault=fault, background=background)
    found = ends(attempt, 70, "killed", 0)
    # In the background steps go on before there is a checkpoint: here up to the next one's step.
    redo = 2 * EVERY if background else EVERY
    return found or goes_on_as_if_nothing(lab, attempt.run_dir, reference, redo)


def refused_by_the_disk(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """An error of a file operation: 74, what it was, and the run goes on from the save before."""
    act = draw.choice(("no_space", "io_error", "limit_files"))
    count = 2 if act == "limit_files" else draw.randrange(2, 10)
    background = draw.random() < 0.5
    fault = Fault(act, 0, "operation", 10, count=count)
    attempt = lab.start(lab.new(act), fault=fault, background=background)
    if attempt.wait() == 0 and ": cannot be re" in attempt.text():
        return difference(attempt.run_dir, reference)  # an older one: it goes another time
    if found := ends(attempt, 74, "disk"):
        return found
    message = attempt.status()["message"]
    if "cannot save" not in message or "bytes free" not in message:
        return f"it is not told: {message}"
    if list((attempt.run_dir / "checkpoints").glob(".draft*")):
        return "the half save was left"
    redo = 2 * EVERY if background else EVERY
    return goes_on_as_if_nothing(lab, attempt.run_dir, reference, redo)


def read_only_midway(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """The checkpoint folder can no longer be written: an end with 73, not a lost save."""
    attempt = lab.start(lab.new("read-only"), fault=Fault("read_only", 0, "operation", 10, count=2))
    found = ends(attempt, 73, "disk")
    return found or goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)


def full_for_the_log(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """TensorBoard's file can take no more: one warning, and the same run."""
    fault = Fault("fill_log", 0, "log", draw.randrange(1, lab.n_steps - 5))
    attempt = lab.start(lab.new("full-log"), "logger=[csv,tensorboard]", fault=fault)
    if found := ends(attempt, 0) or difference(attempt.run_dir, reference):
        return found
    told = attempt.text().count("TensorBoardLogger stops")
    return None if told == 1 else f"{told} warnings: {attempt.text()[-500:]}"


def no_room_at_the_start(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    attempt = lab.start(lab.new("full"), fault=Fault("fill_disk", 0, "setup"))
    if found := ends(attempt, 73, "disk"):
        return found
    return None if not (attempt.run_dir / "witness-0.txt").exists() else "it trained"


def all_damaged(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """No good checkpoint is left: 65 with each and its reason, and nothing from the beginning."""
    attempt = lab.start(lab.new("all-damaged"), fault=Fault("term", 1, "forward", 12))
    attempt.wait()
    folders = sorted((attempt.run_dir / "checkpoints").iterdir())
    for folder in folders:
        flip(folder / "state.ckpt", draw)
    again = lab.resume(attempt.run_dir)
    code, text = again.wait(), again.text()
    if code != 65:
        return f"exit {code}: {text[-300:]}"
    unnamed = [folder.name for folder in folders if folder.name not in text]
    return f"{unnamed} are not named: {text}" if unnamed else None


def newest_damaged(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """The newest is set aside, also where the older one's files are of the year 2099."""
    attempt = lab.start(lab.new("damaged"), fault=Fault("term", 1, "forward", 12))
    attempt.wait()
    older, newest = sorted((attempt.run_dir / "checkpoints").glob("step-*"))[-2:]
    damage(newest, draw)
    year_2099_s = 4_070_908_800
    for path in (older, *older.iterdir()):
        os.utime(path, (year_2099_s, year_2099_s))
    found = goes_on_as_if_nothing(lab, attempt.run_dir, reference, lab.n_steps)
    aside = list((attempt.run_dir / "checkpoints").glob("*.corrupt"))
    return found or (None if aside else "it was not set aside")
