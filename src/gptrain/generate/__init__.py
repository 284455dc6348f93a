"""Text from a trained net, shown as it is made; each prompt is told with what follows it.

    python -m gptrain.generate from_run=outputs/a prompt="def "
    python -m gptrain.generate from_run=outputs/a interactive=true     reads prompts until Ctrl-D
    python -m gptrain.generate from_run=outputs/a prompt='["if ","for "]' stop=$'\\n\\n'

    from_run     a run, a checkpoint of it, an exported folder; ckpt_path  best, last: of a run
    prompt       a text, or a list of them; interactive  true: they are typed
    n_tokens     at most; stop  a text or a list of them: ends before it; seed
    temperature  0: the most probable token; top_k  top_p  leave out improbable tokens
    cache        true: each position is computed once; false: for comparison

A run's tokenizer lies in its folder; where there is none (data=tokens), a text is token ids.
"""

import sys
from types import ModuleType
from typing import Any


class _Command(ModuleType):
    """`gptrain.generate(...)` from Python, also where this package of the same name is imported."""

    def __call__(self, *args: Any, **options: Any) -> list[str]:
        from gptrain.texts import generate  # torch

        return generate(*args, **options)


sys.modules[__name__].__class__ = _Command
