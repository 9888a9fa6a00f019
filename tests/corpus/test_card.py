"""The card of a corpus."""

import json
import struct

from bert_corpus import card
from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import random_text, write_vocabulary


def test_card_has_the_counts_of_the_manifest_and_samples(tmp_path):
    documents = random_text(40).split("\n\n")
    (tmp_path / "text.txt").write_text("\n\n".join([*documents, documents[0], "the river ."]))
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    settings = {"heldout_fraction": 0.2, "sentences": "lines", "min_words": 5}
    config = CorpusConfig(max_seq_length=64, **settings)
    output = tmp_path / "corpus"
    manifest = build_corpus(str(tmp_path / "text.txt"), tokenizer, output, config, num_processes=1)
    card.write_card(output)
    text = (output / "card.md").read_text()
    train, heldout = (manifest["splits"][name] for name in ("train", "heldout"))
    for name in ("documents", "pairs", "rows", "tokens"):
        assert f"| {name} | {train[name]:,} | {heldout[name]:,} |" in text
    assert f"`{tmp_path}/text.txt`, {manifest['config']['inputs'][0]['bytes']:,} bytes" in text
    assert "## Dropped: short documents\n\n- `the river .`\n" in text
    assert "| duplicates | " in text and "`[CLS] " in text and "![" in text
    picture = (output / "card.png").read_bytes()
    assert struct.unpack(">II", picture[16:24]) == (900, 320)


def test_card_names_some_of_many_inputs(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02d}.txt").write_text(random_text(3, number))
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    config = CorpusConfig(max_seq_length=64, heldout_fraction=0, sentences="lines")
    build_corpus(f"{tmp_path}/??.txt", tokenizer, tmp_path / "corpus", config, num_processes=1)
    manifest = json.loads((tmp_path / "corpus" / "manifest.json").read_text())
    text = card.describe(manifest, card.read_samples(tmp_path / "corpus"))
    assert "19.txt`" in text and "20.txt" not in text and "- and 10 more, in" in text
