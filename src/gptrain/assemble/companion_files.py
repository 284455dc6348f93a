"""Copy the files that accompany weights: special tokens, chat template, generation config.

They are copied from the source of a run into its folder, and from there into its exports.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptrain.checkpoints import files
from gptrain.core.locations import expand_home
from gptrain.core.schema import RunConfig
from gptrain.core.small_files import read_facts
from gptrain.data.tokenizers import COMPANIONS, Tokenizer, copy_files

# Keys of config.json and generation_config.json with the ids of special tokens.
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
GENERATION = "generation_config.json"
TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")


def write_tokenizer(cfg: RunConfig, train: Any) -> None:
    """Write the files of the tokenizer to the run folder, on rank 0, before a fit.

    The tokenizer is that of the training set. If the set has none, the files are copied from the
    folder of `data.tokenizer`, or else of `init_from`, if these have any. From those of the two
    folders whose tokenizer.json is the run's (or missing, as the run's), the chat template, the
    generation config and other small files are copied, too; `data.tokenizer` wins. The end token of
    the training set becomes the first `eos_token_id` of the run's generation config.

    Args:
        cfg: Configuration of the run, whose folder must exist.
        train: Training set. Its attributes `tokenizer` and `end_id` are read if it has them.

    Raises:
        OSError: If a file cannot be read or written.
    """
    run_dir = Path(cfg.run_dir)
    if isinstance(tokenizer := getattr(train, "tokenizer", None), Tokenizer):
        tokenizer.save(run_dir)
    paths = [expand_home(path) for path in (cfg.value_of("data.tokenizer"), cfg.init_from) if path]
    folders = [path if path.is_dir() else path.parent for path in paths]
    for folder in folders:
        if not _content(run_dir):
            copy_files(folder, run_dir, TOKENIZER)
    for folder in reversed(folders):
        if _content(folder) == _content(run_dir):
            copy_files(folder, run_dir, (*COMPANIONS, GENERATION))
    if (end_id := getattr(train, "end_id", None)) is not None:
        generation = read_facts(run_dir / GENERATION)
        others = [token_id for token_id in read_ends(generation) if token_id != end_id]
        ends = {"eos_token_id": [end_id, *others] if others else end_id}
        files.replace(run_dir / GENERATION, files.to_json(generation | ends))


def read_ends(generation: Mapping[str, Any]) -> list[int]:
    """Return the valid ids under `eos_token_id` in a parsed config, in order. [] without any."""
    ends = read_ids(generation).get("eos_token_id", [])
    return ends if isinstance(ends, list) else [ends]


def read_ids(facts: Mapping[str, Any], vocab_size: int | None = None) -> dict[str, Any]:
    """Return the ids of special tokens in a parsed config.json or generation_config.json.

    Ids that are no integers, that are negative or that are not below `vocab_size` are left out. The
    last are defaults of transformers for another tokenizer.

    Args:
        facts: Content of the file.
        vocab_size: Number of token ids of the net. None sets no bound.

    Returns:
        Key of ID_KEYS -> id, or list of ids if there are several. A key without an id is missing.
    """
    special_ids, end = {}, vocab_size or sys.maxsize
    for key in ID_KEYS:
        given = facts.get(key)
        given = given if isinstance(given, list) else [given]
        if ids := [value for value in given if type(value) is int and 0 <= value < end]:
            special_ids[key] = ids[0] if len(ids) == 1 else ids
    return special_ids


def _content(folder: Path) -> bytes:
    """Return the content of a folder's tokenizer.json, or b"" without this file."""
    file = folder / TOKENIZER[0]
    return file.read_bytes() if file.is_file() else b""
