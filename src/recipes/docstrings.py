"""Questions and answers from the documentation strings of Python's standard library.

`python -m recipes.docstrings FOLDER` writes three files for conf/experiment/docstrings.yaml.
`What does os.path.join do?` is answered by the first sentence of its documentation string. One
function in ten is kept out of `chats.jsonl`: it is asked in `held_out.jsonl`, and in
`questions.jsonl` with four answers to choose from, its own and those of three other functions.
"""

import ast
import json
import random
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo"}
ALIASES = {"posixpath": "os.path"}  # names under which people know a module
LENGTHS = range(20, 121)  # characters of an answer
N_CHOICES = 4


def main() -> None:
    """Write the files into the folder that the command line names."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m recipes.docstrings FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    # A property is defined several times, with one text for each of its functions.
    pairs = list({f"What does {name} do?": text for name, text in documented_names()}.items())
    random.Random(0).shuffle(pairs)
    held_out, trained = pairs[::10], [pair for i, pair in enumerate(pairs) if i % 10]
    write_lines(folder / "chats.jsonl", map(as_record, trained))
    write_lines(folder / "held_out.jsonl", map(as_record, held_out))
    write_lines(folder / "questions.jsonl", multiple_choice(held_out))
    print(f"{folder}: {len(trained)} questions to train on, {len(held_out)} held out")


def documented_names() -> Iterator[tuple[str, str]]:
    """Yield each public function and class of the standard library with its first sentence."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        if "._" in f".{module}" or LEFT_OUT & set(parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some files contain invalid escape sequences
            tree = ast.parse(file.read_bytes())
        yield from documented_in(tree, ALIASES.get(module, module))


def documented_in(node: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the public names that are defined in a module or class, with their first sentences.

    Names whose first sentence is shorter or longer than LENGTHS allow are left out.
    """
    for child in node.body:
        is_definition = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if not is_definition or child.name.startswith("_"):
            continue
        name = f"{prefix}.{child.name}"
        text = " ".join((ast.get_docstring(child) or "").split())
        sentence = text.partition(". ")[0].removesuffix(".") + "."
        if len(sentence) in LENGTHS:
            yield name, sentence
        if isinstance(child, ast.ClassDef):
            yield from documented_in(child, name)


def multiple_choice(pairs: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield a question in HellaSwag's form for each pair of a question and its answer."""
    draw = random.Random(0)
    answers = sorted({answer for _, answer in pairs})
    for question, answer in pairs:
        texts = draw.sample([text for text in answers if text != answer], N_CHOICES - 1)
        texts.insert(draw.randrange(N_CHOICES), answer)
        yield {"ctx": question, "endings": texts, "label": texts.index(answer)}


def as_record(pair: tuple[str, str]) -> dict[str, str]:
    """Return a conversation in the form of `data.keys=[question,answer]`."""
    return {"question": pair[0], "answer": pair[1]}


def write_lines(file: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write records as JSON lines."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main()
