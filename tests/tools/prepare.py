"""Compare the time of preparing a corpus with that of `datasets.map` and the same tokenizer.

python -m tests.tools.prepare    60 MB of JSONL, three turns each; needs `pip install datasets`
python -m tests.tools.prepare 600 1    600 MB, one turn each

The records are files of the standard library. Both programs write one file of tokens, as training
reads it, on all cores and without a cache. Each turn is a new process, whose imports do not count.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from gptrain.data import train_bpe

VOCAB_SIZE = 8192
OURS = """
from gptrain.data import TextDataset
start = time.perf_counter()
words = "train", 128, source, tokenizer, folder
made = TextDataset(*words, val_fraction=0.0001, end_of_document=True)
n_tokens = made.n_tokens
"""
THEIRS = """
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # datasets starts processes instead
import datasets, numpy, tokenizers
datasets.disable_progress_bars()
known = tokenizers.Tokenizer.from_file(tokenizer)
end = known.token_to_id("<|endoftext|>")
def encode(batch):
    return {"ids": [encoding.ids + [end] for encoding in known.encode_batch_fast(batch["text"])]}
start = time.perf_counter()
texts = datasets.load_dataset("json", data_files=source, split="train", cache_dir=folder)
made = texts.map(encode, batched=True, num_proc=os.cpu_count(), remove_columns=["text"])
n_tokens = 0
with open(f"{folder}/tokens.bin", "wb") as file:
    for first in range(0, len(made), 1000):
        tokens = numpy.concatenate(made[first : first + 1000]["ids"]).astype(numpy.uint16)
        tokens.tofile(file)
        n_tokens += len(tokens)
"""
HEAD = "import os, sys, time\nsource, tokenizer, folder = sys.argv[1:]\n"
TAIL = "print('took', time.perf_counter() - start, n_tokens)\n"


def write_records(file: Path, n_bytes: int) -> list[str]:
    """Write JSON lines {"text": ...}, and return the first thousand texts."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(library.rglob("*.py")) if "site-packages" not in file.parts]
    texts = [file.read_text(errors="replace") for file in files]
    with open(file, "w") as lines:
        for text in itertools.cycle(texts):
            if lines.write(json.dumps({"text": text}) + "\n") and lines.tell() > n_bytes:
                return texts[:1000]


def main() -> None:
    megabytes, n_turns = [*map(int, sys.argv[1:]), *(60, 3)[len(sys.argv) - 1 :]]
    with tempfile.TemporaryDirectory() as place:
        source, tokenizer = Path(place) / "records.jsonl", Path(place) / "tokenizer.json"
        train_bpe(write_records(source, megabytes * 1_000_000), VOCAB_SIZE, tokenizer, True)
        rates = {"ours": [], "datasets.map": []}
        for turn in range(n_turns):
            for name, code in zip(rates, (OURS, THEIRS), strict=True):
                with tempfile.TemporaryDirectory(dir=place) as folder:
                    words = [sys.executable, "-c", HEAD + code + TAIL, source, tokenizer, folder]
                    made = subprocess.run(words, stdout=subprocess.PIPE, text=True)
                seconds, n_tokens = made.stdout.partition("took")[2].split()
                rates[name].append(source.stat().st_size / 1e6 / float(seconds))
                print(f"{turn} {name:13}{rates[name][-1]:7.2f} MB/s {n_tokens} tokens")
        ours, theirs = map(statistics.median, rates.values())
        print(f"median: ours {ours:.2f} MB/s, datasets.map {theirs:.2f} MB/s: {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
