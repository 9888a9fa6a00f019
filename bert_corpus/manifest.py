"""Builds the manifest of a corpus: inputs, counts, and what was dropped and why."""

import collections
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence

from bert_corpus.config import LABELED_ROWS, CorpusConfig
from bert_corpus.inputs import Source
from bert_corpus.steps import HISTOGRAM_BINS, INPUT_LENGTHS, Report
from bert_corpus.text_check import check_text, has_accents
from bert_jax.data.packing import token_dtype
from bert_jax.data.rows import FORMAT_VERSION
from bert_jax.tokenizers.tokenizer import Tokenizer

# Incremented when the same input and settings give other rows, or other held-out documents.
BUILD_VERSION = 3
# Without a warning:
MAX_UNKNOWN = 0.01  # of the tokens
MAX_TRUNCATED = 0.15  # of the tokens; about half a sentence of each pair is
TRUNCATED_PER_ROW = 16  # tokens; rows that are short on purpose lose a larger share
MIN_HELDOUT = 100  # documents
MAX_ACCENTED = 0.001  # of the pieces, where accents are stripped
MIN_SENTENCES = 5  # of the median document, if blank lines separate documents
MAX_LINES_WITHOUT_TEXT = 0.01  # of the lines of JSON, and of the rows of tables


def count_in_words(counts: dict[str, int]) -> str:
    """Returns "truncated tokens 1,234, duplicates 5", or "nothing"."""
    shown = (f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items() if count)
    return ", ".join(shown) or "nothing"


def check_skipped(skipped: Mapping[str, int], text_field: str) -> None:
    """Raises ValueError if too many lines of the input have no text, by what readers `skipped`."""
    lines, without = skipped["lines"], skipped["lines_without_text"]
    if without > MAX_LINES_WITHOUT_TEXT * lines:
        raise ValueError(
            f"{without:,} of {lines:,} lines (of JSON, or rows of a table) have no text in "
            f"{text_field!r}, more than {MAX_LINES_WITHOUT_TEXT:.0%}: expected one JSON object per "
            "line, or an array of objects; name the field with --text_field, or repair the lines "
            "without it and those that are not JSON"
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
    splits = {
        split: _describe_split(split, report.counts, entries, config)
        for split, entries in shards.items()
    }
    median = _median_sentences(report.counts)
    num_documents, num_symbols = (
        sum(count.get(name, 0) for count in report.counts.values())
        for name in ("documents", "documents_without_punctuation")
    )
    is_symbols = 2 * num_symbols > num_documents
    texts = [text for _, text in report.texts]
    text, text_warnings = check_text(texts, tokenizer, config, is_symbols)
    return {
        "format_version": FORMAT_VERSION,
        "build_version": BUILD_VERSION,
        "token_dtype": token_dtype(tokenizer.vocab_size),
        "splits": splits,
        "median_sentences": median,
        "warnings": [
            *_advise(splits, sources, config, median, is_symbols),
            *_advise_on_accents(tokenizer),
            *text_warnings,
        ],
        "text": text | {"beyond_length": _beyond_length(report.counts)},
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
            "files": {
                name: hashlib.sha256(content).hexdigest()
                for name, content in tokenizer.files().items()
            },
            "size": tokenizer.vocab_size,
        },
    }


def _median_sentences(counts: dict[str, dict[str, int]]) -> int:
    """Returns the median number of sentences of a document; of a long one, of its first piece."""
    numbers, prefix = collections.Counter(), "documents_of_sentences_"
    for split_counts in counts.values():
        for name, count in split_counts.items():
            if name.startswith(prefix):
                numbers[int(name.removeprefix(prefix))] += count
    below, middle = 0, numbers.total() / 2
    for number in sorted(numbers):
        below += numbers[number]
        if below >= middle:
            return number
    return 0


def _beyond_length(counts: dict[str, dict[str, int]]) -> dict[str, float]:
    """Returns the share of the text that is beyond each length of an input in its document."""
    splits = counts.values()
    total = sum(count["text_tokens"] for count in splits)
    return {
        str(length): round(sum(c.get(f"tokens_beyond_{length}", 0) for c in splits) / total, 4)
        for length in INPUT_LENGTHS
    }


def _advise(
    splits: dict[str, dict],
    sources: Sequence[Source],
    config: CorpusConfig,
    median: int,
    is_symbols: bool,
) -> list[str]:
    """Returns warnings about the corpus as a whole.

    `median` is the number of sentences of the median document; `is_symbols` says whether most
    documents are sequences of symbols, such as DNA, which have a single sentence.
    """
    warnings, train = [], splits["train"]
    num_documents = sum(split["documents"] for split in splits.values())
    warnings += _advise_on_copies(splits, sources, config)
    num_files = sum(source.format == "text" for source in sources)
    if median < MIN_SENTENCES and 0 < 2 * num_files < num_documents and not is_symbols:
        fix = "put blank lines only between documents"
        if num_files > 1:
            fix = f"if each of the {num_files:,} text files is one, use --documents=files; or {fix}"
        warnings.append(
            f"the median document has {median} sentence{'s' * (median > 1)}: the blank lines look "
            f"like those between paragraphs, not documents; {fix}"
        )
    num_tokens = train["text_tokens"] + train["repeated_tokens"]
    num_tokens -= train["dropped"].get("duplicate_tokens", 0)
    truncated = train["dropped"].get("truncated_tokens", 0) / (config.dupe_factor * num_tokens)
    if truncated > max(MAX_TRUNCATED, TRUNCATED_PER_ROW / config.max_seq_length):
        warnings.append(
            f"{truncated:.1%} of the tokens are truncated, as pairs of sentences are cut to "
            f"{config.max_seq_length} tokens: a larger --max_seq_length truncates fewer, "
            "--rows=full_sentences none"
        )
    if "heldout" not in splits:
        warnings.append(
            f"no document is held out, as --heldout_fraction={config.heldout_fraction}: "
            "bert_jax.pretrain evaluates on held-out documents and refuses the corpus"
        )
    elif (num_heldout := splits["heldout"]["documents"]) < MIN_HELDOUT:
        fraction = min(0.2, math.ceil(100 * MIN_HELDOUT / num_documents) / 100)
        fix = f"--heldout_fraction={fraction} holds out about {fraction * num_documents:.0f}"
        if fraction * num_documents < MIN_HELDOUT:
            fix += f", and more text more: {MIN_HELDOUT} or more are enough"
        warnings.append(
            f"only {num_heldout} of {num_documents:,} documents "
            f"{'are' if num_heldout > 1 else 'is'} held out, with "
            f"{splits['heldout']['tokens']:,} tokens: scores on them are noisy; "
            f"{fix if fraction > config.heldout_fraction else 'only more text helps'}"
        )
    return warnings


def _advise_on_accents(tokenizer: Tokenizer) -> list[str]:
    """Returns a warning if a vocabulary has pieces with accents, which its tokenizer strips."""
    if not tokenizer.strips_accents:
        return []
    pieces = [tokenizer.id_to_token(index) for index in range(tokenizer.vocab_size)]
    accented = [piece for piece in pieces if has_accents(piece)]
    if len(accented) <= MAX_ACCENTED * len(pieces):
        return []
    return [
        f"{len(accented):,} pieces of the vocabulary have accents, such as {accented[0]!r}, but "
        "its tokenizer strips accents from texts, so these are never used: if the vocabulary was "
        "trained with accents, give the directory of its model, or put a tokenizer_config.json "
        'with {"do_lower_case": true, "strip_accents": false} beside it'
    ]


def _advise_on_copies(
    splits: dict[str, dict], sources: Sequence[Source], config: CorpusConfig
) -> list[str]:
    """Returns a warning if whole inputs are dropped as copies of others."""
    first, repeated = {}, []
    for source in sources:
        key = (source.size, source.head) if source.head else source.path
        if (other := first.setdefault(key, source)) is not source:
            is_copy = source.path != other.path
            repeated.append(source.path + f", a copy of {other.path}" * is_copy)
    if not repeated or not (config.drop_duplicates or config.near_duplicates):
        return []
    reasons = ("duplicates", "near_duplicates")
    num_dropped = sum(
        split["dropped"].get(name, 0) for split in splits.values() for name in reasons
    )
    without = " and no --near_duplicates" if config.near_duplicates else ""
    return [
        f"{len(repeated):,} of {len(sources):,} inputs repeat{'s' * (len(repeated) == 1)} others "
        f"({repeated[0]}{', ...' * (len(repeated) > 1)}), and {num_dropped:,} documents were "
        "dropped as duplicates: a text that is given twice counts once; "
        f"--nodrop_duplicates{without} keeps every copy"
    ]


def _cause_of_labels(too_many: bool, split: str, config: CorpusConfig) -> str:
    """Returns why too many or too few pairs of a split are NotNext, and how to change that."""
    if too_many:
        fix = "remove blank lines inside documents, or use --documents=files"
        fix = fix if config.documents == "blank_lines" else "use longer documents"
        fix += ", or --rows=full_sentences, which has no pairs"
        return f"a one-sentence document has no true next sentence; {fix}"
    fix = "separate them by blank lines"
    if split == "heldout":
        fix = "hold out more (--heldout_fraction)"
    elif config.documents == "files":
        fix = "add files, or use --documents=blank_lines"
    return f"a random next sentence needs other documents: {fix}"


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
    if not rows and split == "heldout" and num_documents == 1:
        fix = {
            "blank_lines": "separate documents, or the chapters of a book, by blank lines, or use "
            "--documents=lines for one document per line",
            "lines": "add lines, or separate documents by blank lines and leave out "
            "--documents=lines",
            "files": "add files, or use --documents=blank_lines or --documents=lines",
        }
        raise ValueError(
            "the input is a single document, so none can be held out for evaluation: "
            f"{fix[config.documents]}. With --heldout_fraction=0 it can be built, but pre-training "
            "needs held-out documents"
        )
    if not rows:
        reasons = f" (dropped: {count_in_words(dropped)})" if any(dropped.values()) else ""
        fix = "Add files" if config.documents == "files" else "Cut long documents by blank lines"
        raise ValueError(
            f"{count['documents']} of {num_documents} documents are in the {split} split, which "
            f"has no sentence pair{reasons}; pre-training needs other documents in each split. "
            f"{fix}, or add more text; or change "
            f"--heldout_fraction={config.heldout_fraction} or --seed"
        )
    warnings, has_labels = [], config.rows in LABELED_ROWS
    # In splits of under 400 pairs 2 standard deviations are more than 5 %.
    tolerance = max(0.05, 1 / pairs**0.5)
    if config.rows == "sentence_pairs" and abs(not_next / pairs - 0.5) > tolerance:
        warnings.append(
            f"{not_next / pairs:.1%} of the {split} pairs are NotNext, expected "
            f"{50 - 100 * tolerance:.0f} to {50 + 100 * tolerance:.0f} %: "
            + _cause_of_labels(not_next > pairs / 2, split, config)
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
        "repeated_tokens": count["repeated_tokens"],
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
