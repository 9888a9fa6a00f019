"""Extended models, exported, against transformers' resize_token_embeddings and tokenizers."""

import functools
import shutil

import numpy as np
import pytest

import bert_jax
from bert_corpus.token_vectors import token_vectors
from bert_jax.checkpoints.change_vocabulary import extend_vocab, replace_vocab
from bert_jax.tools.convert_checkpoint import convert
from tests.helpers.models import write_torch_model
from tests.helpers.tokenizers import NEW_WORDS, random_texts, write_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NUM_TEXTS = 10_000
ROBERTA = {"type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id"), 1)
MODERNBERT = IDS | {"sep_token_id": 2, "tie_word_embeddings": False}
CASES = {
    "BertForMaskedLM": ("wordpiece", {}),
    "DistilBertForMaskedLM": ("cased wordpiece with added tokens", {}),
    "ElectraForMaskedLM": ("wordpiece", {"embedding_size": 16}),
    "RobertaForMaskedLM": ("bpe", ROBERTA),
    "ModernBertForMaskedLM": ("bpe with added tokens", MODERNBERT),
    "AlbertForMaskedLM": ("albert", {"embedding_size": 16}),
    "XLMRobertaForMaskedLM": ("xlm-r", ROBERTA),
    "DebertaV2ForMaskedLM": ("deberta", {"legacy": True}),
}


@pytest.mark.parametrize("class_name", CASES)
def test_an_exported_model_equals_a_resized_one(class_name, tmp_path, capsys):
    kind, settings = CASES[class_name]
    source = tmp_path / "source"
    tokenizer = write_tokenizer(kind, tmp_path / "tokenizer")
    spare = 3  # rows that no token has
    sizes = {"vocab_size": tokenizer.vocab_size + spare, "max_position_embeddings": 64}
    torch_model = write_torch_model(source, class_name, **sizes, **settings)
    (source / "vocab.txt").unlink()  # Of `write_torch_model`.
    for path in (tmp_path / "tokenizer").iterdir():
        if path.name != "config.json":
            shutil.copy(path, source)
    tokenizer = bert_jax.load(source).tokenizer

    words = [w for w in NEW_WORDS if is_usable(tokenizer, w)]
    (tmp_path / "words.txt").write_text("\n".join(words))
    extend_vocab(str(source), str(tmp_path / "new"), words_path=str(tmp_path / "words.txt"))
    extended = bert_jax.load(tmp_path / "new")
    convert(tmp_path / "new", tmp_path / "exported", "huggingface")

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    texts = random_texts(NUM_TEXTS)
    expected = theirs([*texts], add_special_tokens=False, verbose=False)["input_ids"]
    actual = extended.tokenizer.encode_batch(texts)
    wrong = [t for t, a, b in zip(texts, actual, expected, strict=True) if a != list(b)]
    assert not wrong, f"{len(wrong)} of {NUM_TEXTS} differ, first: {wrong[0]!r}"

    new = [extended.tokenizer.encode(f"x {word}")[-1] for word in words]
    old = [tokenizer.encode(f"x {word}")[len(tokenizer.encode("x")) :] for word in words]
    used = {index for ids in actual for index in ids}
    assert len(used & {*new}) == len(new) == len({*new})
    torch_model.resize_token_embeddings(extended.config.vocab_size, mean_resizing=False)
    with torch.no_grad():
        output = torch_model.get_output_embeddings()
        tables = {torch_model.get_input_embeddings().weight, output.weight, output.bias}
        for table in tables:
            before = table.clone()
            for index, pieces in zip(new, old, strict=True):
                table[index] = before[pieces].mean(dim=0)
    exported = getattr(transformers, class_name).from_pretrained(tmp_path / "exported").eval()
    for model in (exported, torch_model):
        assert model.get_input_embeddings().num_embeddings == extended.config.vocab_size
    reference = torch_model.state_dict()
    for name, value in exported.state_dict().items():
        torch.testing.assert_close(value, reference[name], rtol=1e-6, atol=1e-7, msg=name)
    ids = extended.tokens("x of a stent dlrs, the troponin")
    row = torch.tensor([theirs("x of a stent dlrs, the troponin")["input_ids"]])
    assert row[0].tolist() == [extended.tokenizer.token_to_id(t) for t in ids.tokens]
    with torch.no_grad():
        logits = torch_model(row).logits[0]
        torch.testing.assert_close(exported(row).logits[0], logits, rtol=1e-5, atol=1e-5)
    batch = extended.batch("x of a stent dlrs, the troponin")
    our_logits = extended.module.apply({"params": extended.params}, batch)[0]
    size = extended.config.vocab_size
    np.testing.assert_allclose(np.asarray(our_logits)[0, :, :size], logits, rtol=1e-3, atol=2e-4)


def is_usable(tokenizer, word: str) -> bool:
    ids = tokenizer.encode(f"x {word}")[len(tokenizer.encode("x")) :]
    is_word = tokenizer.stored.kind != "BPE" or word.isalpha()
    return len(ids) > 1 and tokenizer.unk_id not in ids and is_word


@pytest.mark.parametrize(
    ("class_name", "kind", "other", "settings"),
    [
        ("BertForMaskedLM", "wordpiece", "cased wordpiece with added tokens", {}),
        ("RobertaForMaskedLM", "bpe", "xlm-r", ROBERTA),
    ],
)
def test_an_exported_model_with_another_vocabulary_is_the_same(
    class_name, kind, other, settings, tmp_path
):
    source = tmp_path / "source"
    tokenizer, new = (write_tokenizer(name, tmp_path / name) for name in (kind, other))
    write_torch_model(source, class_name, vocab_size=tokenizer.vocab_size, **settings)
    (source / "vocab.txt").unlink()
    for path in (tmp_path / kind).iterdir():
        if path.name != "config.json":
            shutil.copy(path, source)
    texts = random_texts(NUM_TEXTS)
    (tmp_path / "text.txt").write_text("\n\n".join(texts[:2000]).replace("\0", ""))
    replace_vocab(
        str(source),
        str(tmp_path / other),
        str(tmp_path / "new"),
        functools.partial(token_vectors, [str(tmp_path / "text.txt")]),
    )
    convert(tmp_path / "new", tmp_path / "exported", "huggingface")
    ours = bert_jax.load(tmp_path / "new")
    assert ours.tokenizer.sha256 == new.sha256
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    expected = theirs([*texts], add_special_tokens=False, verbose=False)["input_ids"]
    actual = ours.tokenizer.encode_batch(texts)
    wrong = [t for t, a, b in zip(texts, actual, expected, strict=True) if a != list(b)]
    assert not wrong, f"{len(wrong)} of {NUM_TEXTS} differ, first: {wrong[0]!r}"
    exported = getattr(transformers, class_name).from_pretrained(tmp_path / "exported").eval()
    with torch.no_grad():
        row = torch.tensor([theirs("x of a stent")["input_ids"]])
        logits = exported(row).logits[0]
    our_logits = ours.module.apply({"params": ours.params}, ours.batch("x of a stent"))[0]
    found = np.asarray(our_logits)[0, :, : ours.config.vocab_size]
    np.testing.assert_allclose(found, logits, rtol=1e-3, atol=2e-4)
