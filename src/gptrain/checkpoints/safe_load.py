"""Load files of torch.save without running code in them."""

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from gptrain.checkpoints.manifest import DamagedCheckpointError
from gptrain.core.errors import first_line
from gptrain.core.small_files import open_regular


class UnsafeCheckpointError(DamagedCheckpointError):
    """Raised if a file contains anything but tensors and plain values. It was not loaded."""


def load_file(path: str | Path, *, mmap: bool = False) -> Any:
    """Load a file of torch.save without running code in it, and return its content on the CPU.

    Args:
        path: Path of the file.
        mmap: Whether the tensors stay in the file until they are used. That halves the peak memory
            if they are copied to a device afterwards. Ignored for a file in torch's old format.

    Raises:
        UnsafeCheckpointError: If the file contains anything but tensors and plain values.
        DamagedCheckpointError: If the file is damaged, or no file of torch.save.
        FileNotFoundError: If the file is missing.
    """
    try:
        with open_regular(path) as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            is_mapped = mmap and zipfile.is_zipfile(file)
            file.seek(0)
            return torch.load(path if is_mapped else file, "cpu", weights_only=True, mmap=is_mapped)
    except FileNotFoundError:
        raise
    except Exception as error:  # unpickling damaged bytes may raise any exception
        if refused := re.search(r"GLOBAL (\w\S*\.\w+)", str(error)):
            name = re.sub(r"^posix\.", "os.", refused[1])  # os.system pickles as posix.system
            reason = f"contains {name}; refused: only tensors and plain values are loaded"
            raise UnsafeCheckpointError(path, reason) from error
        # Do not print torch's message: it advises to load the file without protection.
        is_pickle_error = isinstance(error, pickle.UnpicklingError | LookupError)
        reason = "not a file of torch.save" if is_pickle_error else first_line(error)
        raise DamagedCheckpointError(path, f"not a checkpoint ({reason})") from error
