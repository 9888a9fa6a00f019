"""Tagging of words in your own files: named entities, chunks, parts of speech.

Source: Devlin et al. (2018), section 5.3 and appendix A.3: batch 16 or 32, learning rate 5e-5, 3e-5
or 2e-5, 2 to 4 epochs.

Expected time and result: depend on your data; conll2003.py is an example.

    python -m bert_jax.finetune --config=configs/finetune/tagging.py --workdir=runs/tagger \
        --config.init_from=runs/base --config.data.train=train.txt --config.data.dev=dev.txt

A file has CoNLL columns: a word and its tag on each line and a blank line after each sentence. If a
line has a tab, only tabs separate its columns, and words may contain spaces. A .jsonl file has a
sentence on each line: {"tokens": ["in", "Rome"], "tags": ["O", "B-LOC"]}. Tags may be IOB1, IOB2,
BIOES or BILOU, or with scheme=io plain types: O, PER, LOC. A line of JSONL may also be a text with
spans of characters, as Prodigy and doccano write them: {"text": "in Rome", "spans": [{"start": 3,
"end": 7, "label": "LOC"}]} or {"text": "in Rome", "label": [[3, 7, "LOC"]]}. -DOCSTART- lines and
comments, such as CoNLL-U's, are skipped. For the parts of speech in CoNLL-U, set word_column=1,
tag_column=3 and scheme=none. A `test` file without tags, or with fewer columns than `train`, is
predicted but not scored.
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import fields
from bert_jax.runtime.config_fields import Field

DATA_PATHS = {
    "data.train": Field("", "Sentences to train on."),
    "data.dev": Field("", "Its F1 selects the best checkpoint."),
    "data.test": Field("", "Only predicted by the best checkpoint, and scored if it has tags."),
    "data.hub": fields.HUB,
}
DATA = {
    "data.word_column": Field(0, "Of files with columns; the first is 0, the last -1."),
    "data.tag_column": Field(-1, "As word_column; default: the last column."),
    "data.tags": Field(
        "",
        "Key of the tags in JSONL; default: tags, or the only one in _tags. Of the spans of a "
        "text: spans, label or labels.",
    ),
    "data.scheme": Field(
        "iob2",
        "Scheme to train on, whatever the files use: iob1, iob2, bioes or bilou. With "
        '"io" tags are plain types (O, PER, LOC), and a run of equal types is an entity. With '
        '"none" the tags, such as parts of speech, mark no entities and are scored by accuracy.',
    ),
    "data.repair_tags": Field(
        False,
        "Reads tags that are invalid in their scheme as conlleval does, where a stray I- begins "
        "an entity; the log counts them. By default they are an error.",
    ),
    "data.labels": Field(
        (),
        "Default: the labels in train. For tags that are numbers: their names, in the order from "
        "0.",
    ),
    "data.document_context": Field(
        False,
        "As in the paper: neighboring sentences of the document fill the window. Much slower, "
        "since every sentence takes max_seq_length tokens. A file without document marks is one "
        'document; each line of JSONL names its own in the field "document".',
    ),
}


def get_config(arg: str = "") -> ConfigDict:
    config = fields.make_task_config("tagging", DATA_PATHS | DATA)
    config.max_seq_length = 128
    config.batch_size = 32
    config.num_epochs = 4.0
    config.learning_rate = 5e-5
    return fields.apply_runlocal(config, arg)
