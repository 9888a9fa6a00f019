import concurrent.futures
import hashlib
import json
import pickle
import random

import numpy as np
import pytest

from bert_corpus import writing
from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_jax.data import rows as rows_module
from bert_jax.data.packing import row_dtype
from bert_jax.data.rows import END_BYTES, FORMAT_VERSION, CorpusError, Rows
from bert_jax.tokenizers.tokenizer import tokenizer_from_bytes
from tests.helpers.legacy import make_legacy_corpus

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(50))]
TOKENIZER = tokenizer_from_bytes("vocab.txt", "\n".join(WORDS).encode())
SHARD = "train-00000-of-00002.array_record"


@pytest.fixture
def corpus(tmp_path):
    """Builds a corpus of two shards with blocks of 8 rows, whose last blocks are shorter."""
    generator = np.random.default_rng(0)
    documents = [
        "\n".join(" ".join(generator.choice(WORDS[5:], 6)) for _ in range(9)) for _ in range(60)
    ]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    config = CorpusConfig(
        max_seq_length=24,
        max_sequences=2,
        sentences="lines",
        heldout_fraction=0.2,
        block_rows=8,
        num_shards=2,
    )
    text = str(tmp_path / "text.txt")
    build_corpus(text, TOKENIZER, tmp_path / "corpus", config, num_processes=1)
    rows = Rows(tmp_path / "corpus")
    assert any(entry["rows"] % 8 for entry in rows.manifest["splits"]["train"]["shards"])
    return tmp_path / "corpus"


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_arrays_have_the_documented_shapes_and_dtypes(corpus):
    batch = Rows(corpus, "train", shuffle_seed=0).read(3, 10)
    assert {name: (value.shape, value.dtype.name) for name, value in batch.items()} == {
        "tokens": ((7, 24), "uint16"),
        "sequence_bounds": ((7, 2, 3), "uint16"),
        "nsp_labels": ((7, 2), "uint8"),
        "row_ids": ((7,), "uint32"),
        "epochs": ((7,), "uint32"),
    }


def test_every_epoch_has_every_row_once_in_a_different_order(corpus):
    rows = Rows(corpus, "train", shuffle_seed=0)
    size = rows.num_rows
    batch = rows.read(0, 3 * size)
    orders = batch["row_ids"].reshape(3, size)
    assert batch["epochs"].tolist() == [0] * size + [1] * size + [2] * size
    for order in orders:
        assert sorted(order) == list(range(size))
    assert len({order.tobytes() for order in orders}) == 3
    other_seed = Rows(corpus, "train", shuffle_seed=1).read(0, size)["row_ids"]
    assert other_seed.tolist() != orders[0].tolist()


def test_row_ids_follow_the_order_on_disk(corpus):
    in_order = Rows(corpus, "train").read(0, Rows(corpus).num_rows)
    assert in_order["row_ids"].tolist() == list(range(len(in_order["row_ids"])))
    shuffled = Rows(corpus, "train", shuffle_seed=5).read(0, 2 * len(in_order["row_ids"]))
    for name in ("tokens", "sequence_bounds", "nsp_labels"):
        np.testing.assert_array_equal(shuffled[name], in_order[name][shuffled["row_ids"]])


@pytest.mark.parametrize("batch_size", [1, 5, 8, 64])
def test_stream_does_not_depend_on_the_batch_size(corpus, batch_size):
    whole = Rows(corpus, "train", shuffle_seed=3).read(0, 320)
    rows = Rows(corpus, "train", shuffle_seed=3)
    # Backwards, so that nothing depends on what was read before.
    for start in reversed(range(0, 320, batch_size)):
        stop = min(start + batch_size, 320)
        expected = {name: value[start:stop] for name, value in whole.items()}
        assert_same(rows.read(start, stop), expected)


def test_stream_does_not_depend_on_threads_or_cache_size(corpus, monkeypatch):
    expected = Rows(corpus, "train", shuffle_seed=3).read(0, 640)
    monkeypatch.setattr(rows_module, "CACHED_WINDOWS", 2)
    rows = Rows(corpus, "train", shuffle_seed=3)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda start: rows.read(start, start + 10), range(0, 640, 10)))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in expected}
    assert_same(joined, expected)


def write_numbered_rows(directory, num_rows, block_rows, tokens=None):
    """Writes a corpus of short rows, without building it from text."""
    rows, files = np.zeros(num_rows, row_dtype(8, 1)), TOKENIZER.files()
    if tokens is not None:
        rows["tokens"] = tokens
    with writing.open_scratch(directory, []) as scratch:
        path = scratch / "train-00000-of-00001.array_record"
        shard = writing.write_shard(path, rows, block_rows)
        for name, content in files.items():
            (scratch / name).write_bytes(content)
        manifest = {
            "format_version": FORMAT_VERSION,
            "splits": {"train": {"rows": num_rows, "shards": [shard]}},
            "config": {"max_seq_length": 8, "max_sequences": 1, "block_rows": block_rows},
            "vocabulary": {
                "files": {name: hashlib.sha256(each).hexdigest() for name, each in files.items()},
                "size": TOKENIZER.vocab_size,
            },
        }
        writing.publish(scratch, directory, [path.name, *files], manifest)


def test_corpus_of_an_earlier_version_has_the_same_rows_and_tokenizer(corpus):
    rows = Rows(corpus, "train", shuffle_seed=3)
    earlier = Rows(make_legacy_corpus(corpus), "train", shuffle_seed=3)
    assert not (corpus / "tokenizer.json").exists()
    assert earlier.tokenizer.sha256 == rows.tokenizer.sha256
    assert_same(earlier.read(0, 40), rows.read(0, 40))
    (corpus / "vocab.txt").write_text("\n".join([*WORDS, "more"]))
    with pytest.raises(CorpusError, match=r"vocab\.txt is not the vocabulary of the corpus"):
        Rows(corpus, "train")


@pytest.mark.parametrize("batch_size", [32, 256])
def test_rows_that_share_a_batch_rarely_share_one_in_the_next_epoch(tmp_path, batch_size):
    num_rows, epochs = 124 * 256, 2
    write_numbered_rows(tmp_path / "corpus", num_rows, block_rows=256)
    row_ids = Rows(tmp_path / "corpus", shuffle_seed=0).read(0, epochs * num_rows)["row_ids"]
    batches = np.argsort(row_ids.reshape(epochs, num_rows), axis=1) // batch_size
    together = 0
    for members in np.argsort(batches[0]).reshape(-1, batch_size):
        together += np.sum(np.bincount(batches[1][members]) ** 2) - batch_size
    probability = together / (num_rows * (batch_size - 1))
    assert probability < 0.05, "256 / num_rows = 0.008 is ideal; in blocks of one batch it is 0.7"


def test_rows_can_be_pickled(corpus):
    rows = Rows(corpus, "heldout", shuffle_seed=2)
    assert_same(pickle.loads(pickle.dumps(rows)).read(0, 9), rows.read(0, 9))


def test_out_of_range_positions_raise(corpus):
    rows = Rows(corpus, "heldout")
    assert rows.read(4, 4)["tokens"].shape == (0, 24)
    for start, stop in ((-1, 2), (3, 2), (0, rows.num_rows + 1)):
        with pytest.raises(IndexError, match="there is one epoch"):
            rows.read(start, stop)


def edit_manifest(corpus, edit):
    """Changes the manifest, and removes its checksums, as if it were an older one."""
    manifest = json.loads((corpus / "manifest.json").read_text())
    manifest.pop("crc32", None)
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            shard.pop("crc32_of_ends", None)
    edit(manifest)
    (corpus / "manifest.json").write_text(json.dumps(manifest))


def truncate_shard(corpus):
    (corpus / SHARD).write_bytes((corpus / SHARD).read_bytes()[:-100])


def overwrite_shard(corpus):
    content = (corpus / SHARD).read_bytes()
    (corpus / SHARD).write_bytes(b"\x55" * len(content))
    edit_manifest(corpus, lambda manifest: None)


def damage_block(corpus):
    content = bytearray((corpus / SHARD).read_bytes())
    content[300:340] = b"\x55" * 40
    (corpus / SHARD).write_bytes(content)
    edit_manifest(corpus, lambda manifest: None)


def swap_vocabulary(corpus):
    other = tokenizer_from_bytes("vocab.txt", "\n".join([*WORDS, "more"]).encode())
    for name, content in other.files().items():
        (corpus / name).write_bytes(content)


def shrink_vocabulary(manifest):
    manifest["vocabulary"]["size"] = 20


def remove_entry(name):
    return lambda corpus: edit_manifest(corpus, lambda m: m["splits"]["train"].pop(name))


def remove_rows(manifest):
    manifest["splits"]["train"]["shards"][0]["rows"] -= 8


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda c: (c / SHARD).unlink(), CorpusError, f"{SHARD} is missing; build"),
        (truncate_shard, CorpusError, rf"{SHARD} has [\d,]+ bytes"),
        (overwrite_shard, CorpusError, r"has 0 blocks"),
        (damage_block, CorpusError, f"{SHARD}, block [0-9]+: damaged"),
        (lambda c: edit_manifest(c, remove_rows), CorpusError, r"has \d+ blocks"),
        (
            swap_vocabulary,
            CorpusError,
            "not the vocabulary of the corpus.* would stand for other tokens",
        ),
        (
            lambda c: (c / "tokenizer.json").unlink(),
            CorpusError,
            "cannot read the vocabulary of the corpus",
        ),
        (lambda c: edit_manifest(c, shrink_vocabulary), CorpusError, "outside the corpus's vocab"),
        (lambda c: (c / "manifest.json").unlink(), FileNotFoundError, "build was interrupted"),
        (lambda c: (c / "manifest.json").write_text("{"), CorpusError, "not intact JSON"),
        (lambda c: (c / "manifest.json").write_text("[1]"), CorpusError, "None, expected 3; build"),
        (remove_entry("rows"), CorpusError, r"json is damaged: KeyError\('rows'\)"),
        (remove_entry("shards"), CorpusError, r"json is damaged: KeyError\('shards'\)"),
        (
            lambda c: edit_manifest(c, lambda m: m["config"].update(block_rows="8")),
            CorpusError,
            r"json is damaged: TypeError\(",
        ),
        (
            lambda c: edit_manifest(c, lambda m: m["splits"]["train"].update(rows=1)),
            CorpusError,
            r"json counts 1 rows of split 'train', but \d+ in its shards",
        ),
        (
            lambda c: edit_manifest(c, lambda m: m.update(format_version=9)),
            CorpusError,
            "format_version 9",
        ),
        (
            lambda c: edit_manifest(c, lambda m: m["splits"].pop("train")),
            ValueError,
            "has no split 'train'",
        ),
    ],
)
def test_damaged_corpus_is_a_clear_error(corpus, damage, error, message):
    damage(corpus)
    with pytest.raises(error, match=message):
        Rows(corpus, "train").read(0, 8)


def read_all(corpus):
    """Returns the rows of both splits, the manifest without its checksum, and the tokenizer."""
    splits = [Rows(corpus, split) for split in ("train", "heldout")]
    fields = [rows.read(0, rows.num_rows) for rows in splits]
    # The checksum is the last entry. If a bit of its name has changed, the content is intact.
    content = list(splits[0].manifest.items())[:-1]
    return fields, content, splits[0].tokenizer.files()


def assert_error_or_no_effect(corpus, intact) -> bool:
    """Returns whether reading a changed corpus is an error; otherwise it has the same content."""
    try:
        fields, *others = read_all(corpus)
    except CorpusError as error:
        assert str(corpus) in str(error)
        return True
    assert others == list(intact[1:])
    for found, expected in zip(fields, intact[0], strict=True):
        assert_same(found, expected)
    return False


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_changed_bits_of_each_file_are_errors_or_have_no_effect(corpus, count):
    rng, intact = random.Random(count), read_all(corpus)
    read = [path for path in sorted(corpus.iterdir()) if path.name != "samples.json"]
    assert len(read) > 3
    for path in read:
        content, errors = path.read_bytes(), 0
        for _ in range(count):
            changed = bytearray(content)
            changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            errors += assert_error_or_no_effect(corpus, intact)
        path.write_bytes(content)
        assert errors > count / 2, path


def test_a_changed_bit_in_the_middle_of_a_shard_is_an_error(tmp_path):
    """Where the checksum of its ends does not reach, but that of the block does."""
    tokens = np.random.default_rng(0).integers(0, TOKENIZER.vocab_size, (1 << 16, 8))
    write_numbered_rows(tmp_path / "corpus", 1 << 16, block_rows=1 << 10, tokens=tokens)
    path = next((tmp_path / "corpus").glob("*.array_record"))
    content = path.read_bytes()
    assert len(content) > 4 * END_BYTES
    rng, intact = random.Random(0), Rows(tmp_path / "corpus").read(0, 1 << 16)
    for _ in range(12):
        changed = bytearray(content)
        changed[rng.randrange(END_BYTES, len(content) - END_BYTES)] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            assert_same(Rows(tmp_path / "corpus").read(0, 1 << 16), intact)
        except CorpusError as error:
            assert "block" in str(error)


def test_shards_that_are_exchanged_are_an_error(tmp_path):
    """They have as many rows and bytes: ArrayRecord pads files."""
    for name, token in (("corpus", 5), ("other", 6)):
        write_numbered_rows(tmp_path / name, 64, block_rows=16, tokens=token)
    path, other = (next((tmp_path / n).glob("*.array_record")) for n in ("corpus", "other"))
    assert path.stat().st_size == other.stat().st_size
    path.write_bytes(other.read_bytes())
    with pytest.raises(CorpusError, match="damaged, or another shard"):
        Rows(tmp_path / "corpus")


def test_an_older_corpus_without_checksums_is_read_as_before(corpus):
    intact = read_all(corpus)[0]
    edit_manifest(corpus, lambda manifest: None)
    for found, expected in zip(read_all(corpus)[0], intact, strict=True):
        assert_same(found, expected)
