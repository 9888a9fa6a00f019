"""Settings of a corpus."""

import dataclasses
import importlib.util
import math

from bert_corpus.languages import check_language
from bert_corpus.pairs import SPECIAL_TOKENS_PER_PAIR
from bert_corpus.sentences import MODES

MAX_POSITIONS = 1 << 16  # positions in rows are uint16
DOCUMENTS = ("blank_lines", "lines", "files")
LABELED_ROWS = ("sentence_pairs", "released_pairs", "sentence_order")
ROWS = (
    "sentence_pairs",
    "full_sentences",
    "document_sentences",
    "single_segments",
    "released_pairs",
    "sentence_order",
)


def default_max_sequences(max_seq_length: int) -> int:
    """Returns the maximum number of sequences in a row of `max_seq_length` tokens."""
    return max(8, max_seq_length // 64)


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """Settings of a corpus, recorded in its manifest. Raises ValueError for an invalid field."""

    # "sentence_pairs"; "released_pairs" (a span of one sentence is always NotNext);
    # "sentence_order" (of two consecutive spans, which is first?); or, without labels,
    # "full_sentences" (a sequence may continue in another document), "document_sentences" (a
    # sequence ends with its document) or "single_segments" (of a document, also cut within
    # sentences).
    rows: str = "sentence_pairs"
    max_seq_length: int = 128  # tokens per row
    max_sequences: int | None = None  # per row; None: 8, or one per 64 tokens of longer rows
    short_seq_prob: float = 0.1  # probability that a document is cut into shorter pairs
    dupe_factor: int = 1  # number of times each training document is turned into (different) pairs
    heldout_fraction: float = 0.01  # decided by a hash of the text, so that copies share a split
    seed: int = 0
    # Of text files: what "blank_lines" separate, or each of the "lines", or each of the "files".
    documents: str = "blank_lines"
    sentences: str = "split"  # "split" for free text, "lines" for one sentence per line
    language: str = "en"  # for the sentence splitter, ISO 639-1
    block_rows: int = 256  # rows per record
    repeat: str = ""  # "GLOB:N,...": inputs whose training documents are used N times
    num_shards: int = 0  # of the train split; 0 chooses by the size of the input
    data_dir: str = ""  # directory of prepared TFDS datasets; "" means TFDS's default
    text_field: str = "text"  # of JSON, tables and datasets; or "GLOB:NAME,...,NAME"
    drop_duplicates: bool = True  # exact copies of earlier documents
    near_duplicates: float = 0.0  # minimum Jaccard similarity of dropped documents; 0 keeps all
    min_words: int = 0  # of a document
    max_words: int = 0  # of a document; 0 means any number
    only_language: str = ""  # ISO 639-1; drops documents that are identified as another one

    def __post_init__(self):
        if self.max_sequences is None:
            object.__setattr__(self, "max_sequences", default_max_sequences(self.max_seq_length))
        bounds = dict.fromkeys(("max_sequences", "dupe_factor", "block_rows"), (1, math.inf))
        bounds |= {
            "max_seq_length": (SPECIAL_TOKENS_PER_PAIR + 2, MAX_POSITIONS - 1),
            "short_seq_prob": (0, 1),
            "heldout_fraction": (0, 0.5),
            "seed": (0, math.inf),
            "num_shards": (0, 99_999),
            "near_duplicates": (0, 0.99),
            "min_words": (0, math.inf),
            "max_words": (0, math.inf),
        }
        if self.max_words:
            bounds["max_words"] = (self.min_words, math.inf)
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}={value}; expected {low} to {high}")
        for name, values in (("documents", DOCUMENTS), ("sentences", MODES), ("rows", ROWS)):
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name}={value!r}; expected one of {', '.join(values)}")
        check_language("language", self.language)
        if self.only_language:
            check_language("only_language", self.only_language)
        for field, package in (("near_duplicates", "datasketch"), ("only_language", "py3langid")):
            if getattr(self, field) and not importlib.util.find_spec(package):
                raise ImportError(f"--{field} needs {package}: pip install 'bert_jax[cleaning]'")
        if self.only_language:
            import py3langid

            known = sorted(language for language, _ in py3langid.rank(""))
            if self.only_language not in known:
                raise ValueError(
                    f"only_language={self.only_language!r}; expected one of {', '.join(known)}"
                )
