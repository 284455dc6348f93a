"""Ends of a run other than being done, each told by an exception that every rank raises alike."""


class Preempted(BaseException):
    """The run was asked to stop, saved itself and left; the same command goes on with it.

    No Exception, as KeyboardInterrupt is none: a signal's handler may raise it inside any library,
    whose `except Exception` would make another error of it (Hydra: "Error locating target").

    Attributes:
        step: optimizer steps that are done and saved; None where there was nothing to save.
    """

    def __init__(self, step: int | None = None) -> None:
        super().__init__(
            "asked to stop: there was nothing to save"
            if step is None
            else f"asked to stop: saved at step {step}"
        )
        self.step = step


class FolderFull(Exception):
    """There is no room for what the run will write; found out before its first step."""


class NonFinite(Exception):
    """A loss or a gradient was NaN or infinite; the weights are those of the step before.

    Attributes:
        step: the optimizer step that was not taken, counted from 0.
        rank: the first rank whose own loss was not finite, None where only gradients were.
        samples: those that the step had read: that rank's, or all.
    """

    def __init__(self, step: int, rank: int | None, samples: list[int]) -> None:
        where = "the gradients of all ranks" if rank is None else f"the loss of rank {rank}"
        super().__init__(f"{where} at step {step} is not finite; samples: {shorten(samples)}")
        self.step, self.rank, self.samples = step, rank, samples


def shorten(samples: list[int]) -> str:
    """The first of many numbers."""
    return ", ".join(map(str, samples[:16])) + (", …" if len(samples) > 16 else "")
