"""Table of the values that every run logs, with their meaning and how loggers show them.

To log another value, add its entry here and the line that computes it: in `Speed.read` (perf.py) if
it depends on measured time, in `TrainingMonitor._log_step` (callbacks/monitor.py) if it is another
value of a step, or in `LanguageModel.take_evaluation` (module.py) if it is a value of an
evaluation.
"""

from typing import NamedTuple


class LoggedValue(NamedTuple):
    """Facts about one value that every run logs.

    Attributes:
        meaning: Description of the value, with its unit.
        section: Section of the TensorBoard page that shows the curve. TensorBoard takes the section
            from the text before the first slash of a tag, and sorts sections by name, so that
            `loss` comes before `optim` and `perf`. None leaves the logged name as the tag.
        is_averaged: Whether the ranks may have different values, of which the mean is logged. False
            if the value is the same on all ranks, or that of rank 0 is logged.
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
    # Values of an evaluation, by LanguageModel. A test logs them under `test/` instead of `val/`.
    "val/loss": LoggedValue("mean cross entropy of all targets, in nats", "loss"),
    "val/perplexity": LoggedValue("exponential of the loss"),
    "val/bits_per_byte": LoggedValue("cross entropy per byte of text, if the bytes are known"),
}


def tag_of(name: str) -> str:
    """Return the TensorBoard tag for a logged name, which decides in which section a curve appears.

    The tag is the section of the name in `LOGGED`, followed by the rest of the name: `loss/train`
    for `train/loss`, and `optim/lr` for `lr`. A name that begins with `test/` has the section of
    the same name with `val/`. A name without a section in this table is its own tag.

    Args:
        name: Any logged name, also that of a user's metric.
    """
    value = LOGGED.get(name.replace("test/", "val/", 1))
    if value is None or value.section is None:
        return name
    return f"{value.section}/{name.removesuffix(f'/{value.section}')}"
