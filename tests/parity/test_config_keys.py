"""Each key of `config.json`, changed: outputs as transformers, or an error that names it."""

import json
import re

import numpy as np
import pytest

import bert_jax
from bert_jax.tokenizers.export import transformers_files
from bert_jax.tokenizers.stored import Layout
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import with_layout

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
}
DISTILBERT_SIZES = {"vocab_size": 61, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40}
MODERNBERT_SIZES = SIZES | {
    "num_hidden_layers": 4,
    "local_attention": 4,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "bos_token_id": 2,
    "sep_token_id": 3,
    "eos_token_id": 3,
}
ESM_SIZES = SIZES | {
    "pad_token_id": 1,
    "mask_token_id": 4,
    "token_dropout": True,
    "position_embedding_type": "rotary",
}
DEBERTA_SIZES = SIZES | {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "conv_kernel_size": 3,
}
XLNET_SIZES = {"vocab_size": 61, "d_model": 24, "n_layer": 2, "n_head": 3, "d_inner": 40}
OTHER_SIZES = {
    "DistilBert": DISTILBERT_SIZES,
    "ModernBert": MODERNBERT_SIZES,
    "Esm": ESM_SIZES,
    "DebertaV2": DEBERTA_SIZES,
    "Longformer": SIZES | {"attention_window": 4, "type_vocab_size": 1},
    "XLNet": XLNET_SIZES,
}
# Keys that a configuration may have, but does not by default.
OTHER_KEYS = {
    "DebertaV2": DEBERTA_SIZES
    | {
        "conv_act": "tanh",
        "conv_groups": 1,
        "attention_head_size": 8,
        "pooler_hidden_size": 24,
        "embedding_size": 24,
        "cls_dropout": 0.1,
        "pooler_dropout": 0.1,
        "talking_head": False,
    }
}
CASES = [
    ("Bert", "ForMaskedLM"),
    ("DistilBert", "ForSequenceClassification"),
    ("Electra", "ForMultipleChoice"),
    ("Roberta", "ForMaskedLM"),
    ("Albert", "ForSequenceClassification"),
    ("XLMRoberta", "ForSequenceClassification"),
    ("Camembert", "ForMultipleChoice"),
    ("Data2VecText", "ForMaskedLM"),
    ("Ernie", "ForSequenceClassification"),
    ("Esm", "ForMaskedLM"),
    ("Esm", "ForSequenceClassification"),
    ("MPNet", "ForMaskedLM"),
    ("MPNet", "ForSequenceClassification"),
    ("ModernBert", "ForMaskedLM"),
    ("ModernBert", "ForSequenceClassification"),
    ("DebertaV2", "ForMaskedLM"),
    ("DebertaV2", "ForSequenceClassification"),
    ("Longformer", "ForMaskedLM"),
    ("Longformer", "ForSequenceClassification"),
    ("XLNet", "ForSequenceClassification"),
]
LAYOUTS = {  # As transformers is called below: XLNet's [CLS] is last, and all is segment 0.
    "XLNet": Layout(1, False, cls_last=True),
    "Longformer": Layout(2, False),
}
ACTIVATIONS = [
    "relu",
    "gelu_new",
    "gelu_pytorch_tanh",
    "silu",
    "gelu_fast",
    "quick_gelu",
    "gelu_10",
]
# Key -> values; of other keys a value of the same type.
VALUES = {
    "hidden_act": ACTIVATIONS,
    "activation": ACTIVATIONS,
    "ff_activation": ACTIVATIONS,
    "layer_norm_eps": [1e-2],
    "pad_token_id": [2, 3],
    "hidden_size": [36],
    "dim": [36],
    "d_model": [36],
    "n_head": [4],
    "attn_type": ["uni"],
    "clamp_len": [2],
    "num_attention_heads": [4],
    "n_heads": [4],
    "embedding_size": [8, 24],
    "inner_group_num": [2],
    "num_hidden_groups": [2],
    "problem_type": ["multi_label_classification", "single_label_classification"],
    "summary_type": ["last", "mean", "cls_index"],
    "summary_activation": ["tanh", None],
    "type_vocab_size": [1, 3],
    "classifier_dropout": [0.3],
    "position_embedding_type": ["absolute", "relative_key"],
    "id2label": [{0: "a", 1: "b", 2: "c"}],
    "pos_att_type": [["c2p"], "p2c", "P2C | c2p", []],
    "norm_rel_ebd": ["none", "batch_norm"],
    "conv_act": ACTIVATIONS,
    "conv_kernel_size": [0, 4, 5],
    "conv_groups": [3],
    "pooler_hidden_act": ACTIVATIONS,
    "max_relative_positions": [3, 30],
    "attention_window": [5, 8, [8, 4], [4, 4, 4]],
    "hidden_activation": ACTIVATIONS,
    "classifier_activation": ACTIVATIONS,
    "classifier_pooling": ["mean"],
    "local_attention": [2, 5, 6],
    "layer_types": [
        ["sliding_attention", "full_attention"],
        ["sliding_attention", "full_attention"] * 2,
        ["full_attention"] * 4,
    ],
    "rope_parameters": [
        {"full_attention": {"rope_type": "default", "rope_theta": 30.0}},
        {"sliding_attention": {"rope_type": "default", "rope_theta": 30.0}},
        {"full_attention": {"rope_type": "linear", "rope_theta": 30.0, "factor": 2.0}},
    ],
}
# What transformers computes in another dtype, we compute in float32; the rest is not arithmetic.
NOT_TESTED = {"architectures", "dtype", "model_type", "transformers_version", "label2id"}
NOT_TESTED |= {"_name_or_path", "is_encoder_decoder"}
NOT_TESTED |= {"output_attentions", "output_hidden_states", "return_dict"}


def values_of(key: str, value) -> list:
    if key in VALUES:
        return VALUES[key]
    if isinstance(value, bool):
        return [not value]
    return [value + 1] if isinstance(value, int) else [value / 2] if value else []


def write_model(directory, family: str, head: str, **changes):
    """Writes and returns a random model of transformers and a vocabulary; None if it refuses."""
    torch.manual_seed(1)
    sizes = OTHER_SIZES.get(family, SIZES)
    sizes = sizes | ({"embedding_size": 24} if family in ("Albert", "Electra") else {})
    try:
        config = getattr(transformers, f"{family}Config")(**sizes | changes)
        model = getattr(transformers, f"{family}{head}")(config).eval()
    except Exception:  # transformers has no such model.
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(directory)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if "pad_token_id" not in changes and config.pad_token_id == 1:
        names = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
    pieces = [*names, *(f"w{index}" for index in range(56))]
    (directory / "vocab.txt").write_text("\n".join(pieces))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    if layout := LAYOUTS.get(family):
        tokenizer = with_layout(load_tokenizer(directory / "vocab.txt"), layout)
        for name, content in transformers_files(tokenizer.stored, 40).items():
            text = content if isinstance(content, str) else json.dumps(content)
            (directory / name).write_text(text)
    return model


def assert_equal_outputs(theirs, ours) -> None:
    text = "w1 w2 w30 w4"
    tokens = torch.tensor(ours.batch([text])["tokens"])
    with torch.no_grad():
        states = theirs.base_model(tokens).last_hidden_state[0].numpy()
        # The encoder alone has no global tokens; the head's outputs, below, are with them.
        chosen = {"global_positions": []} if hasattr(ours.config, "global_tokens") else {}
        found = ours.hidden_states(text, layers=-1, **chosen)[:, 0]
        np.testing.assert_allclose(found, states, atol=1e-5)
        head = type(theirs).__name__
        if head.endswith("ForMaskedLM") and not ours.config.causal:
            masked = torch.tensor(ours.batch(["w1 w2"])["tokens"])
            masked[0, 2] = ours.tokenizer.mask_id
            expected = torch.softmax(theirs(masked).logits[0, 2], -1).numpy()
            for fill in ours.fill_mask("w1 [MASK]", top_k=61):
                index = ours.tokenizer.token_to_id(fill.token)
                assert abs(fill.probability - expected[index]) < 1e-5
        if head.endswith("ForMultipleChoice"):
            scores = [each.score for each in ours.rank("w1", ["w2"])]
            pair = ours.batch([("w1", "w2")])
            inputs = {"input_ids": torch.tensor(pair["tokens"])[None]}
            if getattr(ours.config, "type_vocab_size", 0):
                inputs["token_type_ids"] = torch.tensor(pair["segment_ids"])[None]
            expected = theirs(**inputs).logits[0].numpy()
            np.testing.assert_allclose(scores, expected, atol=1e-5)
        if head.endswith("ForSequenceClassification"):
            logits = theirs(tokens).logits[0]
            is_multi = theirs.config.problem_type == "multi_label_classification"
            expected = (torch.sigmoid(logits) if is_multi else torch.softmax(logits, -1)).numpy()
            found = {
                each.label: each.probability for each in ours.classify(text, top_k=len(expected))
            }
            names = [theirs.config.id2label[index] for index in range(len(expected))]
            np.testing.assert_allclose([found[name] for name in names], expected, atol=1e-5)


@pytest.mark.parametrize(("family", "head"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_every_key_is_honored_or_refused_by_name(family, head, tmp_path):
    defaults = getattr(transformers, f"{family}Config")().to_dict() | OTHER_KEYS.get(family, {})
    refused, failed, count = set(), [], 0
    for key in sorted(defaults.keys() - NOT_TESTED):
        for number, value in enumerate(values_of(key, defaults[key])):
            directory = tmp_path / f"{key}_{number}"
            theirs = write_model(directory, family, head, **{key: value})
            if theirs is None:
                continue
            count += 1
            try:
                ours = bert_jax.load(directory)
            except ValueError as error:
                # A tensor of another shape is named where two keys contradict each other.
                if not re.search(key, str(error)):
                    failed.append(f"{key}={value!r} is refused without its name: {error}")
                refused.add(key)
                continue
            try:
                assert_equal_outputs(theirs, ours)
            except ValueError as error:
                if not re.search(key, str(error)):
                    failed.append(f"{key}={value!r}: {error}")
            except AssertionError as error:
                failed.append(f"{key}={value!r}: {str(error)[:300]}")
    assert not failed, "\n".join(failed)
    assert count > 10 and len(refused) <= (13 if family == "DebertaV2" else 7), refused
