"""Writes the card of a corpus: its inputs, what was dropped, and examples of rows."""

import io
import json

import fsspec

from bert_corpus.manifest import count_in_words
from bert_corpus.plan import SAMPLES
from bert_corpus.summary import describe_text
from bert_jax.data.rows import MANIFEST, corpus_warnings

CARD, PICTURE = "card.md", "card.png"
NUM_EXAMPLES = 5
MAX_INPUTS = 20
CHARACTERS = 400  # of an example


def write_card(directory: str) -> None:
    """Writes card.md and card.png beside the manifest. Raises OSError."""
    files, path = fsspec.core.url_to_fs(str(directory))
    manifest = json.loads(files.cat_file(f"{path}/{MANIFEST}"))
    for name, content in card_files(manifest, read_samples(directory)).items():
        files.pipe_file(f"{path}/{name}", content)


def card_files(manifest: dict, samples: dict) -> dict[str, bytes]:
    """Returns the files of the card, by name."""
    card = describe(manifest, samples)
    return {CARD: card.encode(), PICTURE: draw_histograms(manifest)}


def read_samples(directory: str) -> dict:
    """Returns the texts of some "rows" and, by reason, of some "dropped" documents."""
    files, path = fsspec.core.url_to_fs(str(directory))
    return json.loads(files.cat_file(f"{path}/{SAMPLES}"))


def draw_histograms(manifest: dict) -> bytes:
    """Returns a PNG: the lengths of pairs, and how full the rows are, in both splits."""
    import matplotlib.figure  # here, because worker processes import this file too

    max_length = manifest["config"]["max_seq_length"]
    figure = matplotlib.figure.Figure((9, 3.2), layout="constrained")
    panels = (
        ("pair_lengths", "Lengths of the sequences", "tokens of a sequence"),
        ("row_tokens", "How full the rows are", "tokens of a row"),
    )
    for axes, (name, title, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for split, style in (("train", {"alpha": 0.5}), ("heldout", {"fill": False})):
            if entry := manifest["splits"].get(split):
                counts = entry["histograms"][name]
                edges = [max_length * n / len(counts) for n in range(len(counts) + 1)]
                shares = [count / max(sum(counts), 1) for count in counts]
                axes.stairs(shares, edges, label=split, **({"fill": True} | style))
        axes.set(title=title, xlabel=label, ylabel="share", xlim=(0, max_length), yscale="log")
        axes.legend()
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=100, metadata={"Software": None})
    return stream.getvalue()


def describe(manifest: dict, samples: dict) -> str:
    """Returns the card, in Markdown."""
    config, splits = manifest["config"], manifest["splits"]
    inputs = config["inputs"]
    total = sum(source["bytes"] for source in inputs)
    plural = "s" if len(inputs) > 1 else ""
    lines = ["# Corpus card", "", f"{len(inputs)} input{plural}, {total:,} bytes:", ""]
    lines += [f"- `{source['path']}`, {source['bytes']:,} bytes" for source in inputs[:MAX_INPUTS]]
    if len(inputs) > MAX_INPUTS:
        lines.append(f"- and {len(inputs) - MAX_INPUTS} more, in `{MANIFEST}`")
    settings = ", ".join(f"`{n}={v}`" for n, v in config.items() if n != "inputs" and v != "")
    lines += ["", f"Vocabulary: {manifest['vocabulary']['size']:,} pieces."]
    lines += [f"Settings: {settings}.", "", "## Counts", ""]
    names = ("documents", "sentences", "text_tokens", "pairs", "rows", "tokens", "special_tokens")
    names = (*names, "repeated_tokens", "copied_tokens", "mean_pair_length", "fill")
    rows = [(name.replace("_", " "), *(f"{s[name]:,}" for s in splits.values())) for name in names]
    labels = [s["nsp_labels"]["not_next"] / s["pairs"] for s in splits.values()]
    label = "swapped" if config["rows"] == "sentence_order" else "NotNext"
    rows.append((f"share labeled {label}", *(f"{share:.3f}" for share in labels)))
    rows.append(("share of [UNK]", *(f"{s['unknown_share']:.4f}" for s in splits.values())))
    lines += [*_table(("", *splits), rows), ""]
    lines.append(
        "Each pass uses every token of the text that is not dropped; copied tokens are in several "
        "pairs: random second spans, and sentences used twice. Documents and sentences include "
        "the dropped ones. In each split:\n\n"
        "    (text - duplicates + repeated) x passes + copied\n"
        "        = tokens - special + truncated + tokens of parts without pairs"
    )
    reasons = sorted({reason for split in splits.values() for reason in split["dropped"]})
    dropped = [
        (reason.replace("_", " "), *(f"{s['dropped'].get(reason, 0):,}" for s in splits.values()))
        for reason in reasons
    ]
    lines += ["", "## Dropped", "", *_table(("", *splits), dropped)]
    lines += ["", "## Text", "", *(f"- {line}" for line in describe_text(manifest["text"]))]
    if manifest["skipped"]:
        lines += ["", f"Skipped while reading: {count_in_words(manifest['skipped'])}."]
    for warning in corpus_warnings(manifest):
        lines += ["", f"**Warning:** {warning}"]
    lines += ["", "## Lengths", "", f"![Histograms of lengths]({PICTURE})", "", "## Rows", ""]
    lines += [_quote(text) for text in samples["rows"][:NUM_EXAMPLES]]
    for reason, texts in samples["dropped"].items():
        lines += ["", f"## Dropped: {reason.replace('_', ' ')}", ""]
        lines += [_quote(text) for text in texts[:NUM_EXAMPLES]]
    return "\n".join(lines) + "\n"


def _table(header: tuple, rows: list[tuple]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows)]


def _quote(text: str) -> str:
    text = text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} …"
    return f"- `{text.replace('`', chr(39))}`"
