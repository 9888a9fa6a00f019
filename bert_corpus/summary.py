"""Summarizes a corpus in a few lines, with warnings."""

from bert_corpus.manifest import count_in_words
from bert_corpus.plan import Plan
from bert_jax.data.rows import corpus_warnings

MAX_LANGUAGES = 3  # that are shown


def summarize(
    plan: Plan, manifest: dict, samples: dict, num_samples: int
) -> tuple[list[str], list[str]]:
    """Returns lines of text about a corpus, and warnings.

    The lines include the first `num_samples` dropped documents for each reason.
    """
    lines, warnings = [_describe_documents(plan, manifest)], corpus_warnings(manifest)
    for split, counts in manifest["splits"].items():
        lines.append(_describe_split(split, counts, plan.config.rows))
    lines += describe_text(manifest["text"])
    if manifest["skipped"]:
        lines.append(f"skipped while reading: {count_in_words(manifest['skipped'])}")
    for reason, texts in samples["dropped"].items():
        lines += [f"dropped, {reason}: {text}" for text in texts[:num_samples]]
    fraction = plan.config.heldout_fraction
    if plan.heldout_limit > fraction * 2**64:
        num_documents = sum(split["documents"] for split in manifest["splits"].values())
        lines.append(
            f"--heldout_fraction={fraction} would hold out none of {num_documents:,} documents: "
            f"held out instead by its hash: {manifest['splits']['heldout']['documents']:,}"
        )
    return lines, warnings


def _describe_documents(plan: Plan, manifest: dict) -> str:
    """Returns a line on how many documents were found in which inputs."""
    num_documents = sum(split["documents"] for split in manifest["splits"].values())
    num_inputs, formats = len(plan.sources), {source.format for source in plan.sources}
    how = ", between the blank lines of text" if "text" in formats else ""
    how = ", each line of text as one" if "lines" in formats else how
    how = ", each text file as one" if "file" in formats else how
    median = manifest["median_sentences"]
    return (
        f"found {num_documents:,} documents in {num_inputs:,} input{'s' * (num_inputs > 1)}{how}; "
        f"the median document has {median:,} sentence{'s' * (median > 1)}"
    )


def describe_text(text: dict) -> list[str]:
    """Returns lines on the language, the vocabulary and the lengths of documents."""
    parts = []
    if languages := text.get("languages"):
        shares = [f"{code} {share:.0%}" for code, share in [*languages.items()][:MAX_LANGUAGES]]
        parts.append(f"identified as {', '.join(shares)}")
    parts.append(f"{text['tokens_per_word']:.2f} tokens per word")
    if "accented_words" in text:
        parts.append(f"{text['accented_words']:.1%} of the words lose accents")
    cut = {int(n): share for n, share in text["beyond_length"].items() if share}
    lines = [f"text ({text['documents']} documents, sampled): {'; '.join(parts)}"]
    if cut:
        shares = ", ".join(f"{share:.1%} at {length:,}" for length, share in cut.items())
        lines.append(f"tokens lost if each document is truncated: {shares}")
    return lines


def unknown_share(manifest: dict) -> float:
    """Returns the fraction of the text's tokens that are [UNK]."""
    splits = manifest["splits"].values()
    unknown = sum(split["unknown_tokens"] for split in splits)
    return unknown / sum(split["tokens"] - split["special_tokens"] for split in splits)


def _describe_split(split: str, counts: dict, rows: str) -> str:
    sequences = f"{counts['pairs']:,} sequences"
    if sum(counts["nsp_labels"].values()):
        not_next = counts["nsp_labels"]["not_next"] / counts["pairs"]
        name = "swapped" if rows == "sentence_order" else "NotNext"
        sequences = f"{counts['pairs']:,} pairs ({not_next:.1%} {name})"
    return (
        f"{split}: {counts['documents']:,} documents, {counts['sentences']:,} sentences, "
        f"{sequences}, {counts['rows']:,} rows, {counts['tokens']:,} tokens, "
        f"{counts['fill']:.1%} full; dropped: {count_in_words(counts['dropped'])}"
    )
