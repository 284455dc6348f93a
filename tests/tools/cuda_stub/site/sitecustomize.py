"""Runs in every Python process under the stub, and prepares modules as soon as they are imported.

The kernels of the stub compute nothing, so that every value on a device is arbitrary. The checks
below read such values and would end a run at random; they are switched off.
"""

import importlib.machinery
import os
import sys
from pathlib import Path


def prepare_torch(torch) -> None:
    """Switch off cuDNN attention, and load the object collectives of the stub."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # the real libcudnn needs a driver
    path = Path(os.environ["STUB_AFTER"])
    exec(compile(path.read_text(), path, "exec"), {"torch": torch})


def accept_any_step(guard) -> None:
    """Let a training step have no target, and be refused."""
    guard.StepGuard.read = lambda *_: None


def accept_any_evaluation(module) -> None:
    """Let an evaluation have no target: `float` is that of the number of its targets."""
    module.float = lambda n_targets: 1.0


def count_all_positions(loss) -> None:
    """Let a metric count all positions: a kernel computes how many rows `hidden[mask]` has."""

    def logits_in_chunks(hidden, head, targets, chunk_tokens=None):
        yield head(hidden.flatten(0, -2)).detach().float(), targets.flatten()

    loss.logits_in_chunks = logits_in_chunks


def log_at_step_of_trainer(connector) -> None:
    """Log metrics at the trainer's step: a kernel computes the mean of the step that is logged."""
    log_metrics = connector._LoggerConnector.log_metrics

    def log_at_step(self, metrics, step=None):
        others = {name: value for name, value in metrics.items() if name != "step"}
        log_metrics(self, others, self.trainer.global_step)

    connector._LoggerConnector.log_metrics = log_at_step


CONNECTOR = "lightning.pytorch.trainer.connectors.logger_connector.logger_connector"
PREPARE = {
    "torch": prepare_torch,
    CONNECTOR: log_at_step_of_trainer,
    "gptrain.lit.guard": accept_any_step,
    "gptrain.lit.module": accept_any_evaluation,
    "gptrain.loss": count_all_positions,
}


class PrepareModules:
    """Finder that calls the function of PREPARE after a module was executed."""

    def find_spec(self, name, path=None, target=None):
        """Return the spec of a module in PREPARE, and None for all other modules."""
        if name not in PREPARE:
            return None
        prepare = PREPARE.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_prepare(module) -> None:
            execute(module)
            prepare(module)

        spec.loader.exec_module = execute_and_prepare
        return spec


if os.environ.get("LD_PRELOAD", "").endswith("libstubcuda.so"):
    sys.meta_path.insert(0, PrepareModules())
