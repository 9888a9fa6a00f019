"""Says in a few lines what a corpus holds, and what in it deserves attention."""

from bert_corpus.plan import Plan


def summarize(
    plan: Plan, manifest: dict, samples: dict, num_samples: int
) -> tuple[list[str], list[str]]:
    """Returns lines of text about a corpus, and warnings.

    The lines include the first `num_samples` dropped documents for each reason.
    """
    lines, warnings = [], []
    for split, counts in manifest["splits"].items():
        lines.append(_describe_split(split, counts, plan.config.rows))
        warnings += counts["warnings"]
    if manifest["skipped"]:
        lines.append(f"skipped while reading: {manifest['skipped']}")
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


def unknown_share(manifest: dict) -> float:
    """Returns the share of [UNK] in the tokens of the text."""
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
        f"fill {counts['fill']:.1%}, dropped {counts['dropped']}"
    )
