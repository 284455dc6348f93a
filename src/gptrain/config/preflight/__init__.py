"""Checks of this machine before a rank starts: launcher, folder, files, classes, devices, memory.

The checks run after the config itself was found valid. `check_paths` does not import torch,
`check_machine` does.
"""

from collections.abc import Iterator

from gptrain.config.check import CheckedConfig
from gptrain.config.preflight.classes import check_classes
from gptrain.config.preflight.devices import check_devices
from gptrain.config.preflight.launcher import check_launcher
from gptrain.config.preflight.paths import check_files, check_folder
from gptrain.core.errors import ConfigIssue
from gptrain.runtime.process import this_process


def check_paths(checked: CheckedConfig, folder: str) -> Iterator[ConfigIssue]:
    """Yield the problems of the launcher, the run folder and the input files. Imports no torch.

    The run folder is checked by rank 0 only.

    Args:
        checked: Config that was checked by the rules about its values.
        folder: Folder into which the job will write.

    Raises:
        ConfigError: If the environment variables of a launcher contradict each other.
    """
    yield from check_launcher(checked)
    if this_process().rank == 0 and not checked.wrong_keys & {"run_dir", "name"}:
        yield from check_folder(checked, folder)
    yield from check_files(checked)


def check_machine(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Yield the problems of classes, devices and memory.

    Imports torch and the modules of the user's classes, but creates no CUDA context.

    Args:
        checked: Config without errors.
    """
    yield from check_classes(checked)
    yield from check_devices(checked)
