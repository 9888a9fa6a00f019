"""ModernBERT: its model config, `config.json`, and a run from pre-training to a loaded classifier.

`tests/parity/test_families.py` compares its arithmetic with transformers.
"""

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import finetune, pretrain
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.configs.finetune import text_classification
from bert_jax.configs.pretrain import bert_tiny, modernbert_base
from bert_jax.model.encoder import Encoder
from bert_jax.model.modernbert import ModernBertConfig, flops_per_row
from bert_jax.model.modernbert_names import config_from_json, config_to_json
from bert_jax.objectives.replaced_tokens import GeneratorSettings
from bert_jax.training.pretrain_setup import make_model_config
from bert_jax.training.pretrain_step import step_dropout
from tests.helpers.corpora import build_small_corpus, write_vocabulary
from tests.helpers.models import assert_trees_equal
from tests.helpers.runs import saved_params, small_config, stopped_after_save

SMALL = {
    "architecture": "modernbert",
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 2,
    "intermediate_size": 48,
    "attention_window": 8,
    "dropout_rate": 0.1,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"hidden_size": 36, "num_heads": 12}, r"hidden_size \(36\)"),
        ({"attention_window": 127}, "attention_window is 127"),
        ({"attention_pattern": "gx"}, "attention_pattern is 'gx'"),
        ({"attention_pattern": ""}, "attention_pattern is ''"),
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"classifier_pooling": "max"}, "classifier_pooling is 'max'"),
        ({"local_rope_base": 0.0}, "local_rope_base"),
        ({"embedding_dropout_rate": 1.0}, "embedding_dropout_rate"),
    ],
)
def test_invalid_model_config_is_an_error(fields, message):
    with pytest.raises(ValueError, match=f"ModernBertConfig.{message}"):
        ModernBertConfig(**fields)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_activation": "quick_gelu"}, "hidden_activation is 'quick_gelu'"),
        ({"layer_types": ["full_attention"], "num_hidden_layers": 2}, "layer_types has 1"),
        ({"layer_types": ["chunked"], "num_hidden_layers": 1}, "layer_types has chunked"),
        ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0"),
        ({"local_attention": 5}, "attention_window is 5"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters.full_attention.rope_type is 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling is"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}},
            "rope_parameters has rope_",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "factor": 4}}},
            "rope_parameters.full_attention has factor",
        ),
        ({"local_rope_theta": "x"}, "local_rope_theta is 'x'"),
        ({"hidden_size": 768.0}, "hidden_size is 768.0"),
        ({"mlp_bias": 1}, "mlp_bias is 1"),
        ({"hidden_size": "768"}, "hidden_size"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_config_json_with_an_unsupported_switch_is_an_error(values, message):
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        config_from_json(values)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention_pattern": "gl", "num_layers": 5, "attention_window": 64},
        {"attention_pattern": "lgg", "num_layers": 4, "global_rope_base": 1e6},
        {"num_layers": 2, "pooler_activation": "tanh", "activation": "silu"},
        {"dropout_rate": 0.1, "classifier_pooling": "mean", "ties_embeddings": False},
    ],
    ids=str,
)
def test_model_config_is_the_same_after_config_json(fields):
    config = ModernBertConfig(**fields)
    again = config_from_json(config_to_json(config))
    pattern = [config.is_global(layer) for layer in range(config.num_layers)]
    assert [again.is_global(layer) for layer in range(again.num_layers)] == pattern
    assert again.attention_pattern == config.attention_pattern
    for name in ("embedding_dropout_rate", "attention_dropout_rate"):
        assert getattr(again, name) == config.dropout_rate
    fixed = config.fixed_fields
    assert [getattr(again, name) for name in fixed] == [getattr(config, name) for name in fixed]


def test_rate_that_transformers_does_not_have_is_logged(caplog):
    values = config_to_json(ModernBertConfig(attention_output_dropout_rate=0.1))
    assert values == config_to_json(ModernBertConfig())
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("not exported: attention_output_dropout_rate=0.1; transformers has")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dropout_rate", "embedding_dropout_rate", "attention_output_dropout_rate"]
)
def test_each_rate_of_dropout_has_an_effect_in_training(name):
    rates = {"dropout_rate": 0.0, "embedding_dropout_rate": 0.0, "attention_dropout_rate": 0.0}
    rates["attention_output_dropout_rate"] = 0.0
    rows, key = {"dropout_rows": np.arange(2)}, jax.random.key(0)
    config = ModernBertConfig(50, 16, 2, 2, intermediate_size=8, **rates | {name: 0.5})
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    names = ("tokens", "position_ids", "segment_ids", "sequence_ids")
    batch = dict.fromkeys(names, np.ones_like(tokens)) | {"tokens": tokens}
    encoder = Encoder(config)
    params = jax.jit(encoder.init)(key, batch)["params"]
    states, dropped = (
        encoder.apply({"params": params}, batch, each)
        for each in (None, step_dropout(config, rows, key))
    )
    assert np.abs(states - dropped).max() > 1e-4


def test_window_may_be_wider_than_all_positions():
    config = config_from_json({"max_position_embeddings": 32})
    assert (config.attention_window, config.max_position_embeddings) == (128, 32)


def test_local_base_of_null_is_that_of_global_layers():
    config = config_from_json({"local_rope_theta": None, "global_rope_theta": 5e4})
    assert config.local_rope_base == config.global_rope_base == 5e4


def test_sizes_of_ettin_have_one_base_and_fewer_positions():
    config = ModernBertConfig.named("ettin-32m", vocab_size=50)
    assert (config.local_rope_base, config.max_position_embeddings) == (160e3, 7999)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (10, 384, 576)
    run = bert_tiny.get_config()
    run.model = {"architecture": "modernbert", "size": "ettin-32m"}
    assert make_model_config(run, 50) == config


def test_fields_of_bert_are_not_taken_for_those_of_modernbert():
    """BERT's rows of 512 and its dropout would otherwise pass silently."""
    config = bert_tiny.get_config()
    config.model.architecture, config.model.size = "modernbert", "base"
    with pytest.raises(ValueError, match=r"embedding_size: .*configs/pretrain/modernbert_base\.py"):
        make_model_config(config, 100)
    config = modernbert_base.get_config()
    # Its first phase has other rotations than the released model, which ends with longer rows.
    recipe = {"global_rope_base": 10_000.0, "attention_output_dropout_rate": 0.1}
    assert make_model_config(config, 50368) == ModernBertConfig(**recipe)
    config.model.update(dict.fromkeys((*recipe, "local_rope_base", "max_position_embeddings")))
    config.model.size = "ettin-17m"
    assert make_model_config(config, 100) == ModernBertConfig.named("ettin-17m", vocab_size=100)


def test_its_configuration_has_the_generator_of_replaced_tokens():
    config = modernbert_base.get_config()
    settings = GeneratorSettings(**config.generator)
    generator = settings.config(make_model_config(config, 100))
    sizes = [getattr(generator, name) for name in generator.size_fields]
    assert sizes == [22, 192, 3, 288] and not settings.ties_embeddings


def test_local_layers_count_the_flops_of_their_window():
    config = ModernBertConfig(num_layers=3, attention_pattern="gll")
    all_global = ModernBertConfig(num_layers=3, attention_pattern="g")
    counts = {"num_outputs": 1024, "num_targets": 0, "num_pairs": 0}
    saved = flops_per_row(all_global, 1024, **counts) - flops_per_row(config, 1024, **counts)
    assert saved == 2 * 2 * (2 * 1024 * (1024 - 129) * 768)


@pytest.mark.slow
def test_a_token_sees_its_window_in_local_layers_and_all_in_global_ones():
    local = ModernBertConfig(
        50, 16, 1, 2, intermediate_size=8, attention_pattern="l", attention_window=4
    )
    reached = {}
    for pattern in ("l", "g"):
        config = ModernBertConfig(**vars(local) | {"attention_pattern": pattern})
        tokens = np.arange(12, dtype=np.int32)[None]
        batch = {"tokens": tokens, "position_ids": tokens, "segment_ids": 0 * tokens}
        batch["sequence_ids"] = np.ones_like(tokens)
        encoder = Encoder(config)
        params = encoder.init(jax.random.key(0), batch)["params"]
        changed = batch | {"tokens": np.where(tokens == 6, 40, tokens)}
        states, others = (encoder.apply({"params": params}, each) for each in (batch, changed))
        reached[pattern] = np.flatnonzero(np.abs(states - others).max(-1)[0] > 1e-6).tolist()
    assert reached["l"] == [4, 5, 6, 7, 8] and reached["g"] == list(range(12))


@pytest.mark.exhaustive
def test_it_is_pretrained_finetuned_loaded_and_exported(tmp_path):
    corpus = build_small_corpus(tmp_path, write_vocabulary(tmp_path / "vocab.txt"))
    config = small_config(corpus)
    with config.unlocked():
        config.model = SMALL  # With a head for pairs, which is not exported.
        config.mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    pretrain.train_and_evaluate(config, tmp_path / "pretrained")
    with stopped_after_save(pretrain):
        pretrain.train_and_evaluate(config, tmp_path / "resumed")
    pretrain.train_and_evaluate(config, tmp_path / "resumed")
    resumed, whole = (saved_params(tmp_path / name) for name in ("resumed", "pretrained"))
    assert_trees_equal(resumed, whole)
    model = bert_jax.load(tmp_path / "pretrained")
    save_huggingface(str(tmp_path / "mlm"), model.params, model.settings, model.tokenizer)
    assert bert_jax.load(tmp_path / "mlm").fill_mask("the [MASK]") == model.fill_mask("the [MASK]")
    assert isinstance(model.config, ModernBertConfig) and len(model.fill_mask("the [MASK]")) == 5
    maps = model.attention("the river a town the river a town the river").probabilities
    assert maps.shape[0] == 4 and np.abs(maps.sum(-1) - 1).max() < 1e-5
    assert (maps[0] > 0).all() and (maps[1][:, 0, 6:] == 0).all()  # Global, then windows.

    (tmp_path / "train.csv").write_text("text,label\n" + "the river,a\na town,b\n" * 8)
    config = text_classification.get_config()
    config.init_from = str(tmp_path / "pretrained")
    config.data.train = config.data.dev = str(tmp_path / "train.csv")
    config.max_seq_length, config.batch_size, config.num_epochs = 16, 8, 1.0
    config.layer_decay = 0.9
    finetune.train_and_evaluate(config.lock(), tmp_path / "run")
    classifier = bert_jax.load(tmp_path / "run")
    probability = classifier.classify("the river").probability
    save_huggingface(
        tmp_path / "exported", classifier.params, classifier.settings, classifier.tokenizer
    )
    again = bert_jax.load(tmp_path / "exported").classify("the river").probability
    assert abs(again - probability) < 1e-6

    # Two seeds in one program, which learn from the first run.
    config.teacher, config.num_seeds = str(tmp_path / "run"), 2
    finetune.train_and_evaluate(config, tmp_path / "seeds")
    seeds = [saved_params(tmp_path / "seeds" / f"seed_{seed}") for seed in range(2)]
    kernels = [params["head"]["kernel"] for params in seeds]
    assert np.isfinite(kernels).all() and np.abs(kernels[0] - kernels[1]).max() > 1e-3
