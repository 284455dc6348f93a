"""Table of the values that every run logs. Whatever needs their names reads this table.

To log another value, add its entry here and the line that computes it: in `Speed.read` (perf.py) if
it depends on measured time, in `TrainingMonitor._log_step` (callbacks/monitor.py) if it is another
value of a step, or in `LanguageModel.take_evaluation` (module.py) if it is a value of an
evaluation.
"""

from typing import NamedTuple


class LoggedValue(NamedTuple):
    """A value that every run logs.

    Attributes:
        meaning: Description of the value, with its unit.
        section: Section of TensorBoard that shows the curve, the first word of its tag. The
            sections are sorted by name, so that `loss` comes first. None for the first word of the
            logged name.
        is_averaged: Whether ranks have different values, of which the mean is logged.
    """

    meaning: str
    section: str | None = None
    is_averaged: bool = False


# A name without `perf/` promises the same value after an exact resume.
LOGGED = {
    # Values of a training step, by TrainingMonitor at each logged step
    "train/loss": LoggedValue("mean loss of the step's targets, in nats", "loss", is_averaged=True),
    "grad_norm": LoggedValue("norm of all gradients before they are clipped", "optim"),
    "lr": LoggedValue("learning rate of the first parameter group", "optim"),
    "tokens": LoggedValue("positions trained on since the run began", "perf"),
    "step": LoggedValue("optimizer steps done, the x axis of all loggers"),
    "perf/tokens_per_s": LoggedValue("positions per second on all ranks"),
    "perf/step_s": LoggedValue("seconds per optimizer step"),
    "perf/data_wait_s": LoggedValue("seconds per step in which training waits for a batch"),
    "perf/mfu": LoggedValue("model FLOP/s of a device relative to its peak, on rank 0"),
    "perf/gpu_mem_peak_gib": LoggedValue("peak memory on a CUDA device, in GiB"),
    "perf/slowest_rank": LoggedValue("rank that computes longest, if there are several ranks"),
    "perf/slowest_over_median": LoggedValue("its computing time relative to the median rank"),
    # Values of an evaluation, by LanguageModel. A test logs them under `test/` instead of `val/`.
    "val/loss": LoggedValue("mean cross entropy of all targets, in nats", "loss"),
    "val/perplexity": LoggedValue("exponential of the loss"),
    "val/bits_per_byte": LoggedValue("cross entropy per byte of text, if the bytes are known"),
}


def tag_of(name: str) -> str:
    """Return the TensorBoard tag of a logged name: its section, and what else is in the name.

    For example `loss/train` for `train/loss`, and `optim/lr` for `lr`. The tag of a name without a
    section in the table is the name.

    Args:
        name: Any logged name, also of a user's metric.
    """
    value = LOGGED.get(name.replace("test/", "val/", 1))
    if value is None or value.section is None:
        return name
    return f"{value.section}/{name.removesuffix(f'/{value.section}')}"
