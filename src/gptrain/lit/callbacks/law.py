"""Says where a run leaves the law that a ladder of smaller ones has found."""

import logging
from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from gptrain.law import FILE, Law
from gptrain.lengths import Lengths
from gptrain.lit.lightning import data_of
from gptrain.problems import DONE, Problem
from gptrain.small_files import read_json

log = logging.getLogger(__name__)
LAWS = ("law", "stable")  # of runs that have cooled down, and before
AT_PEAK = 0.999  # of the learning rate: what rounding leaves


class LawWatch(Callback):
    """A warning at each validation whose loss lies outside the law's interval.

    The law is that of runs that have cooled down. At the peak learning rate the loss is compared
    with the law of the stable phase, while it decays with what lies between the two.

    Args:
        folder: of gptrain.ladder.   counts: the net's parameters, by gptrain.law.COUNTS.
        objective: the loss that the ladder was about.
    Raises: ValueError for a folder without laws.
    """

    def __init__(self, folder: str, counts: Mapping[str, int], objective: str, lengths: Lengths):
        try:
            facts = read_json(Path(folder).expanduser() / FILE)
            self.law, self.stable = (facts[key] and Law(**facts[key]) for key in LAWS)
            least = min(one["stable_tokens"] / one["parameters"]["all"] for one in facts["points"])
        except (OSError, LookupError, TypeError) as error:
            raise ValueError(f"no law in it: {error}") from error
        self.folder, self.objective, self.lengths = folder, objective, lengths
        self.n_parameters = counts[self.law.count]
        self.least_tokens = least * counts["all"]  # of fewer the law knows nothing

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss, step = trainer.callback_metrics.get(self.objective), trainer.global_step
        tokens = data_of(trainer).tokens
        if trainer.sanity_checking or loss is None or tokens < self.least_tokens:
            return
        group = trainer.optimizers[0].param_groups[0]
        is_stable = group["lr"] >= AT_PEAK * group.get("initial_lr", group["lr"])
        is_last = step == self.lengths.n_steps
        low, high = self.law.interval(self.n_parameters, tokens)
        if is_stable or not is_last:
            if self.stable is None:
                return
            other = self.stable.interval(self.n_parameters, tokens)
            low, high = other if is_stable else (low, other[1])
        if trainer.is_global_zero and not low <= float(loss) <= high:
            wrong = f"{tokens:.3g} tokens: {'above' if loss > high else 'below'} the {low:.4f} to "
            wrong += f"{high:.4f} of {self.folder}"
            log.warning(Problem(self.objective, f"{float(loss):.4f}", wrong, code=DONE).line)
