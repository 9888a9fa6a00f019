"""Writes the tokenizers of experiments/family.py, and its proteins as text.

    python experiments/family_data.py cls_last runs/studies/laptop/bpe.json \
        runs/studies/laptop/cls_last
    python tools/fetch_data.py proteins runs/studies/data/proteins
    python experiments/family_data.py proteins runs/studies/data/proteins \
        runs/studies/data/protein-text

The first is the tokenizer of a vocabulary for XLNet: the same pieces, in sequences that end in
[CLS]. The second writes one protein on each line of proteins.txt, every one once and without the
mark of its end, and ESM's tokenizer.
"""

import pathlib
import sys

from bert_jax.tokenizers.stored import Layout
from bert_jax.tokenizers.tokenizer import LibraryTokenizer, load_tokenizer

ESM_PIECES = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>"]
ESM_PIECES += ["<mask>"]


def cls_last(source: str) -> dict[str, bytes]:
    """Returns the files of a byte-level BPE with XLNet's order of special tokens."""
    tokenizer = load_tokenizer(source)
    layout = Layout(num_separators=1, has_segments=False, cls_last=True)
    assert isinstance(tokenizer, LibraryTokenizer)
    return type(tokenizer)(tokenizer.stored._replace(layout=layout)).files()


def proteins(source: str) -> dict[str, bytes]:
    """Returns the text of the FASTA files of a directory, and the files of ESM's tokenizer."""
    sequences = []
    for path in sorted(pathlib.Path(source).glob("*.faa")):
        for record in path.read_text(encoding="ascii").split(">")[1:]:
            _, *lines = record.splitlines()
            sequences.append("".join(lines).rstrip("*"))
    text = "".join(f"{sequence}\n" for sequence in dict.fromkeys(sequences))
    return {
        "proteins.txt": text.encode(),
        "vocab.txt": "\n".join(ESM_PIECES).encode(),
        "tokenizer_config.json": b'{"tokenizer_class": "EsmTokenizer"}',
    }


def main(kind: str, source: str, output: str) -> None:
    files = {"cls_last": cls_last, "proteins": proteins}[kind](source)
    unfinished = pathlib.Path(f"{output}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (unfinished / name).write_bytes(content)
    unfinished.rename(output)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("cls_last", "proteins"):
        sys.exit("family_data: expected cls_last or proteins, the source, and the output")
    main(*sys.argv[1:])
