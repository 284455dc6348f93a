"""TensorBoard events, in the order in which a person reads them."""

import textwrap
from collections.abc import Mapping
from typing import Any

import yaml
from lightning.pytorch import loggers as pl_loggers
from lightning.pytorch.utilities import rank_zero_only

# Logged name -> TensorBoard's tag. It sorts its sections by what stands before the slash: so losses
# come first, then the optimizer, then perf/*. A name that is not here is its own tag.
TAGS = {
    "train/loss": "loss/train",
    "val/loss": "loss/val",
    "test/loss": "loss/test",
    "lr": "optim/lr",
    "grad_norm": "optim/grad_norm",
    "tokens": "perf/tokens",
}
COMPARED = ("val/loss", "train/loss", "perf/tokens_per_s")  # in the tab HPARAMS
FLUSH_S = 5  # as often as TensorBoard looks for new points


class TensorBoardLogger(pl_loggers.TensorBoardLogger):
    """Events in `save_dir` itself: a resumed run goes on in the same place."""

    def __init__(self, save_dir: str):
        super().__init__(
            save_dir=save_dir, name="", version="", default_hp_metric=False, flush_secs=FLUSH_S
        )
        self._config = ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if step is not None:
            tagged = {TAGS.get(name, name): value for name, value in metrics.items()}
            tagged.pop("epoch", None)  # a staircase over steps
            try:
                super().log_metrics(tagged, step)
            except ValueError as error:  # what Lightning makes of all that a write may raise
                if isinstance(error.__cause__, OSError):
                    raise error.__cause__ from None
                raise

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *_: Any, **__: Any) -> None:
        """Fills HPARAMS with what was typed and what runs are compared by; keeps all for Text."""
        self._config = yaml.safe_dump(params, sort_keys=False)
        names = (params["objective"], *COMPARED)
        metrics = {TAGS.get(name, name): 0.0 for name in names}  # columns: without a step no point
        super().log_hyperparams(params["typed"], metrics)

    @rank_zero_only
    def log_note(self, name: str, text: str, step: int) -> None:
        """A text as it stands, in the tab Text, which opens its first section alone."""
        self.experiment.add_text(f"run/{name}", textwrap.indent(text, "    "), step)

    @rank_zero_only
    def go_on_from(self, step: int) -> None:
        """Makes readers forget the points after step, by the event meant for that."""
        from tensorboard.compat.proto import event_pb2

        proto: Any = event_pb2  # it has no types
        start = proto.SessionLog(status=proto.SessionLog.START)
        self.experiment._get_file_writer().add_event(proto.Event(step=step + 1, session_log=start))
        self.log_note("config", self._config, step)

    @rank_zero_only
    def save(self) -> None:
        """Writes what is still in memory, and no hparams.yaml: the config is in .hydra/."""
        self.experiment.flush()
