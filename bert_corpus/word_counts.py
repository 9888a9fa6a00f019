"""Counts the words between the spaces of a text, on all cores."""

import collections

import tqdm

from bert_corpus.inputs import Unit, find_inputs, split_into_units
from bert_corpus.manifest import check_skipped
from bert_corpus.parallel import usable_cores, worker_processes
from bert_corpus.readers import read_documents
from bert_corpus.sentences import UNREADABLE, split_sentences


def count_spaced_words(
    inputs: list[str], text_field: str = "text", data_dir: str = "", num_processes: int = 0
) -> collections.Counter:
    """Returns how often each word occurs, punctuation marks included; all are kept in memory.

    Raises FileNotFoundError and ValueError as `find_inputs`, `read_documents` and `check_skipped`
    do, and ValueError for a text without words.
    """
    units = split_into_units(find_inputs(inputs, text_field, data_dir))
    counts: collections.Counter = collections.Counter()
    skipped: collections.Counter = collections.Counter()
    num_processes = num_processes or min(usable_cores(), len(units))
    with worker_processes(_count_units, num_processes) as ordered_map:
        for unit_counts, unit_skipped in tqdm.tqdm(ordered_map(units), "words", len(units)):
            counts.update(unit_counts)
            skipped.update(unit_skipped)
    check_skipped(skipped, text_field)
    if skipped["lines_without_text"]:
        print(f"lines without text in {text_field!r}: {skipped['lines_without_text']:,}")
    if skipped["unreadable_documents"]:
        print(f"documents with unreadable markup: {skipped['unreadable_documents']:,}")
    if not counts:
        raise ValueError("the input holds no words: it is blank, or holds only markup")
    return counts


def _count_units(units: list[Unit]) -> tuple[collections.Counter, collections.Counter]:
    counts: collections.Counter = collections.Counter()
    skipped: collections.Counter = collections.Counter()
    for unit in units:
        for document in read_documents(unit, skipped):
            try:
                sentences = split_sentences(document)
            except UNREADABLE:
                skipped["unreadable_documents"] += 1
                continue
            for sentence in sentences:
                counts.update(sentence.split())
    return counts, skipped
