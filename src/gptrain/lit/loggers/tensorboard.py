"""The TensorBoard logger. Its tags put the losses into the first section of TensorBoard's page."""

import textwrap
from collections.abc import Mapping
from typing import Any

import yaml
from lightning.pytorch import loggers as pl_loggers
from lightning.pytorch.utilities import rank_zero_only

from gptrain.lit.logged import tag_of

COMPARED = ("val/loss", "train/loss", "perf/tokens_per_s")  # metric columns of the HPARAMS tab
FLUSH_S = 5  # interval at which TensorBoard reads new points, in seconds


class TensorBoardLogger(pl_loggers.TensorBoardLogger):
    """Logger that writes TensorBoard events into `save_dir` itself, without subfolders.

    A resumed run therefore continues the same curves.

    Args:
        save_dir: Folder of the event files.
    """

    def __init__(self, save_dir: str):
        super().__init__(
            save_dir=save_dir, name="", version="", default_hp_metric=False, flush_secs=FLUSH_S
        )
        self._config = ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write one point per metric, under the tag of its name. The metric `epoch` is left out.

        Only rank 0 writes.

        Args:
            metrics: Logged name -> value.
            step: Number of optimizer steps done, the x value of the points. None writes nothing.

        Raises:
            OSError: If the event file cannot be written.
            ValueError: If TensorBoard does not take a value.
        """
        if step is not None:
            tagged = {tag_of(name): value for name, value in metrics.items()}
            tagged.pop("epoch", None)  # the epoch number has no use as a curve over steps
            try:
                super().log_metrics(tagged, step)
            except ValueError as error:  # Lightning turns every error of a write into a ValueError
                if isinstance(error.__cause__, OSError):
                    raise error.__cause__ from None
                raise

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *_: Any, **__: Any) -> None:
        """Write the overrides of the run and the metric columns into the HPARAMS tab, on rank 0.

        The full configuration is kept until `discard_after` writes it into the TEXT tab. Does
        nothing if `params` has no key `typed`: those are the hyperparameters that Lightning logs
        for a module with `save_hyperparameters()`, and the configuration contains them already.

        Args:
            params: Configuration of the run as nested dicts. `params["typed"]` holds the
                overrides that distinguish this run, and `params["objective"]` the logged name by
                which a sweep compares its jobs.
            *_: Positional arguments of Lightning's method, ignored.
            **__: Keyword arguments of Lightning's method, ignored.
        """
        if "typed" not in params:
            return
        self._config = yaml.safe_dump(params, sort_keys=False)
        names = (params["objective"], *COMPARED)
        # These values only name the columns. Without a step they draw no point.
        metrics = {tag_of(name): 0.0 for name in names}
        super().log_hyperparams(params["typed"], metrics)

    @rank_zero_only
    def log_note(self, name: str, text: str, step: int) -> None:
        """Write a text into the TEXT tab, on rank 0. It is shown as it is, not as Markdown.

        Args:
            name: Name of the text, such as `sample`. The tag is `run/<name>`, because TensorBoard
                opens only the first section of the tab.
            text: Text of one or more lines.
            step: Number of optimizer steps done.
        """
        self.experiment.add_text(f"run/{name}", textwrap.indent(text, "    "), step)

    @rank_zero_only
    def discard_after(self, step: int) -> None:
        """Make TensorBoard hide the points after `step`, and write the configuration as a text.

        The points stay in the event files. A SessionLog START event makes TensorBoard hide them.
        Only rank 0 writes.

        Args:
            step: Number of optimizer steps after which training starts or resumes.
        """
        from tensorboard.compat.proto import event_pb2

        proto: Any = event_pb2  # the generated protobuf module has no type stubs
        start = proto.SessionLog(status=proto.SessionLog.START)
        self.experiment._get_file_writer().add_event(proto.Event(step=step + 1, session_log=start))
        self.log_note("config", self._config, step)

    @rank_zero_only
    def save(self) -> None:
        """Write buffered events to disk, on rank 0.

        Lightning's method would also write hparams.yaml. The run folder does not need this file,
        because .hydra/config.yaml has the whole configuration.
        """
        self.experiment.flush()
