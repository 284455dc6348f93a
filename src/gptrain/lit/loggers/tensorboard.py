"""TensorBoard events, in the order in which a person reads them."""

import math
import textwrap
from collections.abc import Mapping
from typing import Any

import yaml
from lightning.pytorch import loggers as pl_loggers
from lightning.pytorch.utilities import rank_zero_only

from gptrain.lit.loggers.survive_trouble import SurvivesTrouble
from gptrain.runs.page import TAGS

LAYOUT = {  # of the tab Custom Scalars: section -> card -> its curves
    "loss": {"training and validation": ("Multiline", ["loss/train", "loss/val"])},
    "optimizer": {
        "learning rate": ("Multiline", ["optim/lr"]),
        "gradient norm": ("Multiline", ["optim/grad_norm"]),
    },
    "speed": {
        "tokens per second": ("Multiline", ["perf/tokens_per_s"]),
        "model FLOPs utilization": ("Multiline", ["perf/mfu"]),
        "seconds of a step, and of it waiting": ("Multiline", ["perf/step_s", "perf/data_wait_s"]),
        "peak GPU memory, GiB": ("Multiline", ["perf/gpu_mem_peak_gib"]),
    },
}
COMPARED = ("val/loss", "train/loss", "perf/tokens_per_s")  # in the tab HPARAMS
FLUSH_S = 5  # as often as TensorBoard looks for new points


class TensorBoardLogger(SurvivesTrouble, pl_loggers.TensorBoardLogger):
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
            super().log_metrics(tagged, step)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *_: Any, **__: Any) -> None:
        """Fills HPARAMS with what was typed and what runs are compared by; keeps all for Text."""
        self._config = yaml.safe_dump(params, sort_keys=False)
        names = (params["objective"], *COMPARED)
        metrics = {TAGS.get(name, name): math.nan for name in names}  # without a step: no point
        super().log_hyperparams(params["typed"], metrics)
        self.experiment.add_custom_scalars(LAYOUT)

    @rank_zero_only
    def log_note(self, name: str, text: str, step: int) -> None:
        """A text as it stands, in the tab Text, which opens its first section alone."""
        self.experiment.add_text(f"run/{name}", textwrap.indent(text, "    "), step)

    @rank_zero_only
    def go_on_from(self, step: int) -> None:
        """Makes readers forget the points after step, by the event meant for that."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self.experiment._get_file_writer().add_event(Event(step=step + 1, session_log=start))
        self.log_note("config", self._config, step)

    @rank_zero_only
    def save(self) -> None:
        """Writes what is still in memory, and no hparams.yaml: the config is in .hydra/."""
        self.experiment.flush()
