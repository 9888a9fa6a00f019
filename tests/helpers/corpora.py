"""Small texts, vocabularies, corpora and TFDS datasets."""

import pathlib
import random

import sentencepiece

from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_corpus.vocabulary import train_byte_pair
from bert_jax.tokenizers.stored import Layout, make_tokenizer, template, tokenizer_json
from bert_jax.tokenizers.tokenizer import load_tokenizer

VOCABULARY = (
    "the a of and river mountain village people water stone old new small large north south built "
    "found made grew year city king war road field"
)


WORDS = VOCABULARY.split()


def random_text(num_documents: int, seed: int = 0) -> str:
    """Returns random documents, a sentence per line, with blank lines between documents."""
    rng = random.Random(seed)
    documents = []
    for _ in range(num_documents):
        sentences = [
            " ".join(rng.choices(WORDS, k=rng.randint(4, 12))) + " ."
            for _ in range(rng.randint(6, 14))
        ]
        documents.append("\n".join(sentences))
    return "\n\n".join(documents) + "\n"


def texts(count: int, seed: int = 0) -> list[str]:
    """Returns texts of 1 to 60 words: some are longer than the rows of most tests."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) for _ in range(count)]


def random_sequences() -> list[str]:
    """Returns sequences of DNA in both cases, with other characters here and there."""
    rng = random.Random(0)
    texts = ["", " ", "acgt[MASK]ACGTACG", "[CLS]", "ACGTA\nCGTACG", "éACGTACÄ"]
    for _ in range(300):
        letters = "".join(rng.choices("ACGTacgt", k=rng.randint(0, 60)))
        for other in rng.choices(["", "N", " ", "-", "NNNN", "RY", "\t", "u"], k=3):
            place = rng.randint(0, len(letters))
            letters = letters[:place] + other + letters[place:]
        texts.append(letters)
    return texts


def write_vocabulary(path: pathlib.Path, words=WORDS, pad_id: int = 0) -> pathlib.Path:
    pieces = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "##s", "##ing", *words]
    pieces.insert(pad_id, "[PAD]")
    path.write_text("".join(f"{piece}\n" for piece in pieces))
    return path


def write_esm_vocabulary(directory: pathlib.Path) -> None:
    """Writes the tokenizer of the released ESM models."""
    letters = "LAGVSERTIDPKQNFYMHWCXBUZO.-"
    pieces = ["<cls>", "<pad>", "<eos>", "<unk>", *letters, "<null_1>", "<mask>"]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.txt").write_text("\n".join(pieces))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}')


def train_bpe(directory: pathlib.Path, text: str, size: int = 300):
    """Writes the `bpe.json` of a byte-level BPE that is trained on a text; returns it, loaded."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "bpe_text.txt").write_text(text)
    content = train_byte_pair(str(directory / "bpe_text.txt"), size)
    (directory / "bpe.json").write_bytes(content)
    return load_tokenizer(directory / "bpe.json")


def store_tokenizer(tokenizer, directory: pathlib.Path):
    """Writes the files of a tokenizer into a new directory; returns it, read from there."""
    directory.mkdir(parents=True)
    for name, content in tokenizer.files().items():
        (directory / name).write_bytes(content)
    return load_tokenizer(directory)


def without_special_tokens(tokenizer):
    """Returns a tokenizer of the same vocabulary that adds no special tokens around texts."""
    return with_layout(tokenizer, Layout(0, True, is_bare=True))


def with_layout(tokenizer, layout: Layout, **names: str):
    """Returns a tokenizer of the same vocabulary that joins texts in another way.

    `names` are of special tokens that are others.
    """
    spec, special_tokens = tokenizer_json(tokenizer.stored), tokenizer.stored.special_tokens
    special_tokens = special_tokens._replace(**names)
    spec["post_processor"] = template(layout, spec, special_tokens)
    stored = make_tokenizer(spec, special_tokens, layout, "", "test")
    return type(tokenizer)(stored)


def write_albert_vocabulary(path: pathlib.Path) -> None:
    """Writes a SentencePiece model of some 40 pieces, with ALBERT's special tokens."""
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(random_text(20).split("\n")),
            model_writer=file,
            vocab_size=40,
            hard_vocab_limit=False,
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            pad_piece="<pad>",
            unk_piece="<unk>",
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            minloglevel=2,
        )


def build_small_corpus(
    directory: pathlib.Path, vocabulary=None, num_documents: int = 60, **settings
) -> pathlib.Path:
    """Builds a corpus of random documents in `directory`/corpus; WordPiece by default."""

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "text.txt").write_text(random_text(num_documents))
    defaults = {
        "max_seq_length": 64,
        "max_sequences": 4,
        "heldout_fraction": 0.2,
        "sentences": "lines",
        "block_rows": 16,
    }
    build_corpus(
        str(directory / "text.txt"),
        load_tokenizer(vocabulary or write_vocabulary(directory / "vocab.txt")),
        directory / "corpus",
        CorpusConfig(**(defaults | settings)),
        num_processes=1,
    )
    return directory / "corpus"


def write_tfds(directory, name: str, splits: dict[str, list[dict]], features: dict, prepared=True):
    """Prepares the TFDS dataset `name`, such as "glue/mrpc", in `directory`, as ArrayRecord.

    `features` are types of TFDS. Without `prepared` it looks as if prepared as TFRecord, which only
    TensorFlow can do. Returns `directory`.
    """
    import tensorflow_datasets as tfds

    dataset, _, config = name.partition("/")

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        url_infos = None  # There are no downloads.
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, download_manager):
            return {split: enumerate(examples) for split, examples in splits.items()}

        def _generate_examples(self):
            raise NotImplementedError  # `_split_generators` yields the examples.

    Builder.name = dataset
    builder = Builder(data_dir=str(directory), file_format="array_record")
    builder.download_and_prepare()
    if not prepared:
        info = pathlib.Path(builder.data_dir, "dataset_info.json")
        info.write_text(info.read_text().replace("array_record", "tfrecord"))
    return directory
