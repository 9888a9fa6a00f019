"""The recipes of BERT's descendants, as an argument of the configurations for fine-tuning."""

import importlib

import pytest

from bert_jax.configs.finetune import glue, recipes, squad
from bert_jax.data.features import steps_per_epoch
from bert_jax.finetuning.finetune_fields import check_numbers

FIELDS = ("learning_rate", "batch_size", "num_epochs", "warmup_fraction", "weight_decay")


@pytest.mark.parametrize(
    ("name", "argument", "expected"),
    [
        ("glue", "mnli,roberta", (1e-5, 32, 10, 0.06, 0.1)),
        ("glue", "rte,roberta", (2e-5, 16, 10, 0.06, 0.1)),
        ("squad", "v1,roberta", (1.5e-5, 48, 2, 0.06, 0.01)),
        ("glue", "mnli,distilbert", (2e-5, 32, 3, 0.0, 0.0)),
        ("glue", "mnli,electra_small", (1e-4, 32, 3, 0.1, 0.01)),
        ("glue", "stsb,electra_base", (1e-4, 32, 10, 0.1, 0.01)),
        ("squad", "v2,electra_large", (5e-5, 32, 2, 0.1, 0.01)),
        ("squad", "v1,albert", (5e-5, 48, 2, 0.1, 0.01)),
        ("squad", "v2,albert", (3e-5, 48, 3, 0.1, 0.01)),
        ("squad", "v1,spanbert", (2e-5, 32, 4, 0.1, 0.01)),
        ("retrieval", "bi_encoder,e5", (2e-5, 256, 3, 0.04, 0.01)),
        ("contrastive", "large", (1e-4, 32_768, 20_000 / 8_240, 0.05, 0.01)),
        ("glue", "mnli", (2e-5, 32, 3, 0.1, 0.01)),  # BERT's own.
    ],
)
def test_recipe_has_the_published_values(name, argument, expected):
    config = importlib.import_module(f"bert_jax.configs.finetune.{name}").get_config(argument)
    assert tuple(config[field] for field in FIELDS) == expected


@pytest.mark.parametrize(
    ("recipe", "decay"),
    [("electra_small", 0.8), ("electra_base", 0.8), ("electra_large", 0.9), ("albert", 1.0)],
)
def test_only_electra_has_lower_rates_in_lower_layers(recipe, decay):
    assert glue.get_config(f"mnli,{recipe}").layer_decay == decay


@pytest.mark.parametrize(("task", "rate"), [("mnli", 0.0), ("qqp", 0.1), ("rte", 0.1)])
def test_albert_has_dropout_before_the_head_and_for_some_tasks_everywhere(task, rate):
    model = glue.get_config(f"{task},albert").model
    assert (model.dropout_rate, model.classifier_dropout_rate) == (rate, 0.1)


def test_distilbert_has_a_higher_dropout_before_its_classifiers():
    assert glue.get_config("mnli,distilbert").model.classifier_dropout_rate == 0.2


# Batch size, updates and warm-up of ALBERT's run_glue.sh; examples in train.
@pytest.mark.parametrize(
    ("task", "values", "num_examples"),
    [
        ("cola", (1e-5, 16, 5336, 320), 8551),
        ("sst2", (1e-5, 32, 20935, 1256), 67349),
        ("mrpc", (2e-5, 32, 800, 200), 3668),
        ("stsb", (2e-5, 16, 3598, 214), 5749),
        ("qqp", (5e-5, 128, 14000, 1000), 363849),
        ("mnli", (3e-5, 128, 10000, 1000), 392702),
        ("qnli", (1e-5, 32, 33112, 1986), 104743),
        ("rte", (3e-5, 32, 800, 200), 2490),
    ],
)
def test_albert_trains_for_the_published_number_of_steps(task, values, num_examples):
    config = glue.get_config(f"{task},albert")
    learning_rate, batch_size, num_steps, warmup_steps = values
    assert (config.learning_rate, config.batch_size) == (learning_rate, batch_size)
    # As FinetuneSetup counts them.
    assert round(config.num_epochs * steps_per_epoch(num_examples, batch_size)) == num_steps
    assert round(config.warmup_fraction * num_steps) == warmup_steps


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_recipes_are_valid_name_their_source_and_have_smoke_runs(recipe):
    assert recipes.RECIPES[recipe].source and recipes.RECIPES[recipe].dev_scores
    for module, task in ((glue, "cola"), (squad, "v2")):
        config = module.get_config(f"{task},{recipe}")
        check_numbers(config)
        smoke = module.get_config(f"{task},{recipe},runlocal")
        assert (smoke.num_epochs, smoke.batch_size, smoke.max_seq_length) == (1, 8, 32)
        assert smoke.learning_rate == config.learning_rate


@pytest.mark.parametrize(
    ("module", "argument", "message"),
    [
        (glue, "cola,electra", r"unknown argument 'electra'"),
        (squad, "v2,bert", r"unknown argument 'bert'"),
        (glue, "cola,albert,fast", "unknown argument 'fast' after the colon"),
    ],
)
def test_unknown_recipe_is_refused(module, argument, message):
    with pytest.raises(ValueError, match=message):
        module.get_config(argument)
