"""Multi-GPU training of GPT language models with PyTorch Lightning and Hydra."""

from importlib import import_module
from typing import Any

# Public name -> its module, which is imported at the first use, so that `import gptrain` does not
# import torch.
_MODULES = {
    "fit": "gptrain.assemble.fit",
    "generate": "gptrain.text.writing",
    "load": "gptrain.assemble.load",
    "score": "gptrain.text.scoring",
    "FinishedRun": "gptrain.assemble.fit",
    "RunFailed": "gptrain.assemble.fit",
    "ConfigError": "gptrain.core.errors",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]  # public names for completion in a notebook
