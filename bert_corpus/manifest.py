"""The manifest of a corpus: what it was made of, counts, and what was dropped and why."""

import collections
import dataclasses
import math
from collections.abc import Sequence

from bert_corpus.config import LABELED_ROWS, CorpusConfig
from bert_corpus.inputs import Source
from bert_corpus.steps import HISTOGRAM_BINS, Report
from bert_jax.data.packing import token_dtype
from bert_jax.data.rows import FORMAT_VERSION
from bert_jax.tokenization import Tokenizer

MAX_UNKNOWN = 0.01  # of the tokens, without a warning
MAX_LINES_WITHOUT_TEXT = 0.01  # of the lines of JSON, and of the rows of Parquet


def check_skipped(report: Report, config: CorpusConfig) -> None:
    """Raises ValueError if too many lines of the input have no text."""
    lines, without = report.skipped["lines"], report.skipped["lines_without_text"]
    if without > MAX_LINES_WITHOUT_TEXT * lines:
        raise ValueError(
            f"{without:,} of {lines:,} lines (of JSON, or rows of Parquet) have no text in "
            f"{config.text_field!r}, expected at most {MAX_LINES_WITHOUT_TEXT:.0%}: name the field "
            "with --text_field, or repair the input"
        )


def make_manifest(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    config: CorpusConfig,
    shards: dict[str, list[dict]],
    report: Report,
) -> dict:
    """Returns the manifest; `shards` are the entries of `write_shard` of each split, in order.

    Raises ValueError for an input without text, or a split without rows.
    """
    return {
        "format_version": FORMAT_VERSION,
        "token_dtype": token_dtype(tokenizer.vocab_size),
        "splits": {
            split: _describe_split(split, report.counts, entries, config)
            for split, entries in shards.items()
        },
        "skipped": {
            name: count
            for name, count in sorted(report.skipped.items())
            if count and name != "lines"  # of which some may be without text
        },
        "config": {
            **dataclasses.asdict(config),
            "inputs": [{"path": source.path, "bytes": source.size} for source in sources],
        },
        "vocabulary": {
            "filename": tokenizer.filename,
            "sha256": tokenizer.sha256,
            "size": tokenizer.vocab_size,
        },
    }


def _describe_split(
    split: str, counts: dict[str, dict[str, int]], shards: list[dict], config: CorpusConfig
) -> dict:
    """Returns the manifest's entry of a split. Raises ValueError if it has no rows."""
    count = collections.Counter(counts.get(split, {}))
    num_documents = sum(split_counts["documents"] for split_counts in counts.values())
    if not num_documents:
        raise ValueError("the input holds no document: it is blank, or a dump without articles")
    rows, pairs, tokens, not_next = (count[n] for n in ("rows", "pairs", "tokens", "not_next"))
    names = sorted(name for name in count if name.startswith("dropped_"))
    dropped = {name.removeprefix("dropped_"): count[name] for name in names}
    if not rows:
        reasons = f" (dropped: {dropped})" if any(dropped.values()) else ""
        raise ValueError(
            f"{count['documents']} of {num_documents} documents are in the {split} split, which "
            f"has no sentence pair{reasons}; pre-training needs other documents in each split. Cut "
            "long documents by blank lines, or add more text; or change "
            f"--heldout_fraction={config.heldout_fraction} or --seed"
        )
    warnings, has_labels = [], config.rows in LABELED_ROWS
    # In small splits 3 standard deviations are more than 5 %.
    tolerance = max(0.05, 1.5 / pairs**0.5)
    if config.rows == "sentence_pairs" and abs(not_next / pairs - 0.5) > tolerance:
        cause = (
            "a one-sentence document has no true next sentence; remove blank lines inside documents"
            if not_next > pairs / 2
            else "a random next sentence needs other documents: separate them by blank lines"
        )
        warnings.append(
            f"{not_next / pairs:.1%} of the {split} pairs are NotNext, expected 45 to 55 %: {cause}"
        )
    unknown = count["unknown_tokens"] / max(tokens - count["special_tokens"], 1)
    if unknown > MAX_UNKNOWN:
        warnings.append(
            f"{unknown:.1%} of the {split} tokens are [UNK], expected at most {MAX_UNKNOWN:.0%}: "
            "is the vocabulary of another language, or of another case (--cased, --nocased)?"
        )
    return {
        "documents": count["documents"],
        "sentences": count["sentences"],
        "pairs": pairs,
        "rows": rows,
        "blocks": sum(math.ceil(shard["rows"] / config.block_rows) for shard in shards),
        "text_tokens": count["text_tokens"],
        "copied_tokens": count["copied_tokens"],
        "special_tokens": count["special_tokens"],
        "tokens": tokens,
        "unknown_tokens": count["unknown_tokens"],
        "unknown_share": round(unknown, 6),
        "fill": round(tokens / (rows * config.max_seq_length), 4),
        "mean_pair_length": round(tokens / pairs, 2),
        "histograms": {
            name: [count[f"{name}_{number:02d}"] for number in range(HISTOGRAM_BINS)]
            for name in ("pair_lengths", "row_tokens")
        },
        "nsp_labels": {"is_next": has_labels * (pairs - not_next), "not_next": not_next},
        "dropped": dropped,
        "warnings": warnings,
        "shards": shards,
    }
