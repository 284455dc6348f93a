"""What lies around weights besides them: a tokenizer's special tokens, a chat template, how text
is generated. It goes from what a run begins with into its folder, and on into its exports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gptrain.checkpoints import fileops
from gptrain.checkpoints.status import to_json
from gptrain.core.small_files import read_facts

TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
WITH_IT = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip


# Keys of config.json and generation_config.json: where a text begins and ends, and what pads it.
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
GENERATION = "generation_config.json"


def keep_around(sources: Iterable[Path], run_dir: Path) -> None:
    """Copy the files of a run's tokenizer from each source that has this tokenizer.

    Older folders of transformers have the ids of special tokens in config.json alone. The run gets
    them in its generation_config.json. Of two sources the first one counts.

    Args:
        sources: Folders of a tokenizer or of weights, or files in them.
        run_dir: Folder of a run. It has a tokenizer if the run's data have one. Otherwise it gets
            the tokenizer of the first source that has one.
    """
    folders = [source if source.is_dir() else source.parent for source in sources]
    own = _content(run_dir / TOKENIZER[0])
    if own is None:
        next(filter(None, (copy_around(folder, run_dir, TOKENIZER) for folder in folders)), None)
        own = _content(run_dir / TOKENIZER[0])
    for folder in reversed(folders):
        if _content(folder / TOKENIZER[0]) == own:
            copy_around(folder, run_dir, WITH_IT)
            generation = read_facts(folder / GENERATION)
            ids = read_ids(read_facts(folder / "config.json")) | read_ids(generation)
            if ids.keys() - generation.keys():
                fileops.replace(run_dir / GENERATION, to_json(generation | ids))


def read_ids(facts: Mapping[str, Any], vocab_size: int | None = None) -> dict[str, Any]:
    """Return the ids of special tokens in a configuration of transformers: a number or a list each.

    Args:
        vocab_size: Number of tokens of the net. An id that is not below it is left out: a default
            of transformers that is another tokenizer's.
    """
    found = {}
    for key in ID_KEYS:
        given = facts.get(key)
        ids = [
            one
            for one in (given if isinstance(given, list) else [given])
            if type(one) is int and one >= 0 and (vocab_size is None or one < vocab_size)
        ]
        if ids:
            found[key] = ids[0] if len(ids) == 1 else ids
    return found


def copy_around(folder: Path, to: Path, names: Iterable[str] = WITH_IT) -> list[str]:
    """Copy the files that are there, and return their names.

    Raises:
        OSError: If a file cannot be read or written.
    """
    found = {name: content for name in names if (content := _content(folder / name)) is not None}
    for name, content in found.items():
        fileops.replace(to / name, content)
    return [*found]


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None
