r"""How much text: 1, 10 and 100 MB, from scratch, continued, or with a replaced vocabulary.

    python experiments/text_sizes.py --workdir=runs/text_sizes

The text is the documentation of three providers of computers, from the packages that access them.
Each run has the model and the fields of vocabulary.py, and all are scored on the same held-out
documents. It is no table of a paper. At this scale only.
"""

import gzip
import json
import pathlib
import random
import re
import tempfile
import zipfile
from collections.abc import Iterator

from absl import app
from vocabulary import TRAINING, WORKDIR, pretrain, tool

from bert_corpus.identity import text_hash
from bert_jax.runtime.command_line import parse_flags
from bert_jax.tools.fetch_data import download_wheel, fetch

PACKAGES = ("botocore==1.44.8", "google-api-python-client==2.202.0", "oci==2.189.0")
REPORT = pathlib.Path(__file__).parent / "reports/text_sizes.md"
SIZES = (1, 10, 100)  # MB of text to train on.
DOCUMENT_SIZE = 2000  # Characters, at least, but of the last document of a file.
HELDOUT_FRACTION = 0.01
VOCAB_SIZE = 8000
SCRATCH, CONTINUED = "from scratch", "continued"
WAYS = (SCRATCH, CONTINUED, "continued, replaced vocabulary")
REPORT_TEXT = """\
# How much text

    python experiments/text_sizes.py --workdir=runs/text_sizes

Documentation of cloud services, in English: {sizes} MB to train on, and the same {heldout:,}
held-out documents for all. BERT_TINY (2 layers of hidden size 128) from scratch, with a vocabulary
of {vocab_size:,} pieces of the text; continued from weights for English text, with their
vocabulary; and with the new vocabulary in its place (`replace_vocab.py`). Each run has {num_steps}
steps of {batch_size} rows of 64 tokens, at a rate of {rate:g}; whole words are masked. Nats per
word: the held-out loss of a token times the tokens per word, of one seed. Epochs: how often the run
reads its text.

{table}
"""


def read_passages(wheel: pathlib.Path) -> Iterator[list[str]]:
    """Yields the passages of documentation in each file of a package, without markup."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py"):
                code = archive.read(name).decode("utf-8", errors="replace")
                passages = re.findall(r'"""(.*?)"""', code, re.DOTALL)
            elif name.endswith((".json", ".json.gz")):
                content = archive.read(name)
                content = gzip.decompress(content) if name.endswith(".gz") else content
                passages = [*descriptions(json.loads(content))]
            else:
                continue
            yield [" ".join(re.sub(r"<[^>]+>", " ", each).split()) for each in passages]


def descriptions(value) -> Iterator[str]:
    """Yields the texts under "documentation" and "description" in nested JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("documentation", "description") and isinstance(inner, str):
                yield inner
            else:
                yield from descriptions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from descriptions(inner)


def read_documents() -> list[str]:
    """Returns documents of consecutive passages, shuffled; no passage is in two of them."""
    seen, documents = set(), []
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as directory:
            for passages in read_passages(download_wheel(package, pathlib.Path(directory))):
                parts, size = [], 0
                for passage in passages:
                    if passage in seen or len(passage.split()) < 5:
                        continue
                    seen.add(passage)
                    parts.append(passage)
                    size += len(passage)
                    if size >= DOCUMENT_SIZE:
                        documents.append("\n".join(parts))
                        parts, size = [], 0
                if parts:
                    documents.append("\n".join(parts))
    random.Random(0).shuffle(documents)
    return documents


def write_texts(workdir: pathlib.Path) -> None:
    """Writes the held-out documents, and for each size those to train on, as JSON lines."""
    if (workdir / f"{SIZES[-1]}MB.jsonl").exists():
        return
    documents = read_documents()
    limit = HELDOUT_FRACTION * 2**64  # As prepare_corpus decides, with its seed of 0.
    heldout = [each for each in documents if text_hash(each, 0) < limit]
    rest = [each for each in documents if text_hash(each, 0) >= limit]
    write_lines(workdir / "heldout.jsonl", heldout)
    for megabytes in SIZES:
        size = total = 0
        while size < len(rest) and total < megabytes * 1e6:
            total += len(rest[size].encode())
            size += 1
        write_lines(workdir / f"{megabytes}MB.jsonl", rest[:size])


def write_lines(path: pathlib.Path, documents: list[str]) -> None:
    lines = (json.dumps({"text": each}) + "\n" for each in documents)
    path.write_text("".join(lines), encoding="utf-8")


def make_corpus(workdir: pathlib.Path, megabytes: int, tokenizer: pathlib.Path) -> pathlib.Path:
    """Returns the corpus of a size of text, with the held-out documents."""
    corpus = workdir / f"corpus/{megabytes}MB-{tokenizer.stem}"
    if not corpus.exists():
        inputs = f"{workdir}/{megabytes}MB.jsonl,{workdir}/heldout.jsonl"
        flags = (f"--input={inputs}", f"--vocab={tokenizer}", f"--output={corpus}")
        rows = ("--rows=document_sentences", "--max_seq_length=64", "--language=en")
        tool("prepare_corpus", *flags, *rows, f"--heldout_fraction={HELDOUT_FRACTION}")
    return corpus


def start(workdir: pathlib.Path, megabytes: int, way: str) -> pathlib.Path:
    """Returns the tokenizer of a way to begin, which is also the weights unless from scratch."""
    english, own = workdir / "english", workdir / f"{megabytes}MB.txt"
    if way == CONTINUED:
        return english
    if not own.exists():
        text = f"--input={workdir}/{megabytes}MB.jsonl"
        tool("train_vocab", text, f"--output={own}", f"--size={VOCAB_SIZE}")
    if way == SCRATCH:
        return own
    replaced = workdir / f"replaced-{megabytes}MB"
    if not replaced.exists():
        text = f"--input={workdir}/{min(megabytes, 10)}MB.jsonl"  # Enough for similar words.
        model = f"--model={english}"
        tool("replace_vocab", model, f"--vocab={own}", text, f"--output={replaced}")
    return replaced


def train(workdir: pathlib.Path, megabytes: int, way: str) -> list[str]:
    """Runs a pre-training; returns its line of the table."""
    tokenizer = start(workdir, megabytes, way)
    corpus = make_corpus(workdir, megabytes, tokenizer)
    run = workdir / f"runs/{megabytes}MB-{tokenizer.stem}"
    result = pretrain(run, corpus, None if way == SCRATCH else tokenizer, {})
    manifest = json.loads((corpus / "manifest.json").read_text(encoding="utf-8"))
    per_word = result["tokens_per_word"]
    num_rows = manifest["splits"]["train"]["rows"]
    return [
        f"{megabytes} MB",
        way,
        f"{TRAINING['num_steps'] * TRAINING['batch_size'] / num_rows:.2f}",
        f"{per_word:.2f}",
        f"{result['mlm_loss'] * per_word:.2f}",
        f"{result['unigram_entropy'] * per_word:.2f}",
    ]


def main(argv: list[str]) -> None:
    del argv
    workdir = pathlib.Path(WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    fetch("bert-tiny-mlm", workdir / "english")
    write_texts(workdir)
    header = [
        "text",
        "way",
        "epochs",
        "tokens per word",
        "nats per word",
        "word frequencies",
    ]
    lines = [header, ["---"] * len(header)]
    for megabytes in SIZES:
        lines += [train(workdir, megabytes, way) for way in WAYS]
    heldout = (workdir / "heldout.jsonl").read_text(encoding="utf-8")
    text = REPORT_TEXT.format(
        sizes=", ".join(map(str, SIZES)),
        heldout=heldout.count("\n"),
        vocab_size=VOCAB_SIZE,
        num_steps=TRAINING["num_steps"],
        batch_size=TRAINING["batch_size"],
        rate=TRAINING["learning_rate"],
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
    )
    print(text)
    REPORT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
