"""What lies around weights besides them: a tokenizer's special tokens, a chat template, how text
is generated. It goes from what a run begins with into its folder, and on into its exports.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gptrain.checkpoints import fileops

TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
WITH_IT = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def keep_around(sources: Iterable[Path], run_dir: Path) -> None:
    """Copies what belongs to the tokenizer of a run from the first source that has this tokenizer.

    Args:
        sources: folders, of a tokenizer or of weights, or files in them.
        run_dir: of a run whose tokenizer is there, if its data have one; else it gets the source's.
    """
    own = _content(run_dir / TOKENIZER[0])
    for source in sources:
        folder = source if source.is_dir() else source.parent
        is_its = own is None or _content(folder / TOKENIZER[0]) == own
        if is_its and copy_around(folder, run_dir, WITH_IT if own else (*TOKENIZER, *WITH_IT)):
            return


def copy_around(folder: Path, to: Path, names: Iterable[str] = WITH_IT) -> list[str]:
    """Names of the files that were there and have been copied.   Raises: OSError."""
    found = {name: content for name in names if (content := _content(folder / name)) is not None}
    for name, content in found.items():
        fileops.replace(to / name, content)
    return [*found]


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None
