"""Where the time of a training step goes: one table, and a trace that ui.perfetto.dev opens.

Lightning's PyTorchProfiler steps at the end of `training_step`, so that backward and optimizer
belong to no step, and its table is of the loop it saw last, the validation.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from lightning.pytorch.profilers import PassThroughProfiler
from torch.profiler import ProfilerActivity, record_function, schedule

N_ROWS = 60  # of the table, those that take longest themselves
HISTORY = 100_000  # allocations of a GPU's memory that are kept
BATCH, STEP = "run_training_batch", ".optimizer_step"  # actions of Lightning's loop
PARTS = {  # likewise -> row of the table; torch itself records Optimizer.step, and collectives
    "training_step": "forward",
    "backward": "backward",
    "configure_gradient_clipping": "clip",
}


class TorchProfiler(PassThroughProfiler):
    """Records whole optimizer steps of training, after two that it leaves out, in every rank.

    Writes fit-profile-<rank>.txt, .json.gz, and on a GPU .pickle for pytorch.org/memory_viz.

    Args:
        n_steps: that are recorded; they wait in memory until they are written.
    """

    def __init__(self, dirpath: str, n_steps: int = 5):
        super().__init__(dirpath=dirpath, filename="profile")
        self.n_steps, self._stepped = n_steps, False
        self._profile: torch.profiler.profile | None = None

    @contextmanager
    def profile(self, action_name: str) -> Iterator[None]:
        if action_name == BATCH and self._profile is None:
            self._begin()
        part = PARTS.get(action_name.rpartition(".")[2])
        with record_function(part) if part else nullcontext():
            yield
        self._stepped |= action_name.endswith(STEP)
        if action_name == BATCH and self._stepped:
            self._stepped = False
            self._profile.step()  # after the last that is recorded it costs nothing

    def teardown(self, stage: str | None) -> None:
        if self._profile is not None:
            self._profile.stop()  # writes what there is of a run that is shorter
            self._profile = None
        super().teardown(stage)

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=HISTORY)
        plan = schedule(wait=1, warmup=1, active=self.n_steps, repeat=1)
        self._profile = torch.profiler.profile(
            activities=activities, schedule=plan, on_trace_ready=self._write
        )
        self._profile.start()

    def _write(self, recorded: torch.profiler.profile) -> None:
        place, has_gpu = Path(self.dirpath), torch.cuda.is_available()
        order = f"self_{'cuda' if has_gpu else 'cpu'}_time_total"
        table = recorded.key_averages().table(order, N_ROWS, max_name_column_width=50)
        (place / self._prepare_filename(extension=".txt")).write_text(table)
        recorded.export_chrome_trace(str(place / self._prepare_filename(extension=".json.gz")))
        if has_gpu:
            torch.cuda.memory._dump_snapshot(place / self._prepare_filename(extension=".pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
