"""The losses of search models: what each reads from files, and what it refuses."""

import numpy as np
import pytest

from bert_jax import finetune
from bert_jax.configs.finetune import retrieval as config_file
from bert_jax.tasks import retrieval
from bert_jax.tasks.retrieval_losses import LOSSES, find_loss
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_vocabulary
from tests.helpers.json_lines import write_lines
from tests.helpers.models import write_weights

PAIRS = [
    {"sentence1": "old river", "sentence2": "the river grew old", "score": 0.75},
    {"sentence1": "king", "sentence2": "a road", "score": 0.0},
]
TAUGHT = [
    {
        "query": "king",
        "positive": "a king",
        "negatives": ["the city", "a road"],
        "positive_score": 5.5,
        "negative_scores": [1.5, -2],
    }
]
TEXTS = [{"text": text, "label": label} for text, label in (("a king", 7), ("north", 5))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("v") / "vocab.txt"))


def make_task(tmp_path, tokenizer, role, name, lines, **fields):
    config = config_file.get_config(f"{role},runlocal")
    config.data.train = str(write_lines(tmp_path / "train.jsonl", lines))
    config.update_from_flattened_dict({"loss.name": name, **fields})
    return retrieval.get_task(config, tokenizer)


def texts_of(tokenizer, feature):
    return [tokenizer.decode(sequence.tolist()) for sequence in feature.sequences]


def test_pairs_are_read_with_their_labels(tmp_path, tokenizer):
    task = make_task(tmp_path, tokenizer, "bi_encoder", "cosent", PAIRS)
    assert [feature.label for feature in task.train] == [0.75, 0]
    assert texts_of(tokenizer, task.train[1]) == ["[CLS] king [SEP]", "[CLS] a road [SEP]"]
    task = make_task(tmp_path, tokenizer, "cross_encoder", "binary_cross_entropy", PAIRS)
    assert [feature.label for feature in task.train] == [0.75, 0]
    assert texts_of(tokenizer, task.train[1]) == ["[CLS] king [SEP] a road [SEP]"]


def test_scores_of_a_teacher_are_those_of_the_chosen_negatives(tmp_path, tokenizer):
    fields = {"data.num_negatives": 1}
    for role in LOSSES:
        task = make_task(tmp_path, tokenizer, role, "margin_mse", TAUGHT, **fields)
        np.testing.assert_array_equal(task.train[0].label, np.float32([5.5, 1.5]))


def test_scores_of_a_teacher_that_a_loss_does_not_use_are_counted(tmp_path, tokenizer):
    note = "train lines with a teacher's scores, which this loss does not use"
    counts = {
        name: make_task(
            tmp_path, tokenizer, "bi_encoder", name, TAUGHT, **{"data.num_negatives": 1}
        ).notes.get(note, 0)
        for name in ("in_batch", "margin_mse")
    }
    assert counts == {"in_batch": 1, "margin_mse": 0}


def test_classes_of_texts_are_numbered(tmp_path, tokenizer):
    task = make_task(tmp_path, tokenizer, "bi_encoder", "batch_hard_triplet", TEXTS)
    assert [feature.label for feature in task.train] == [1, 0]
    assert texts_of(tokenizer, task.train[0]) == ["[CLS] a king [SEP]"]


@pytest.mark.exhaustive
def test_model_trained_on_pairs_guides_another(tmp_path):
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    config = config_file.get_config("bi_encoder,runlocal")
    config.init_from = str(write_weights(tmp_path / "weights", vocabulary))
    config.data.train = config.data.dev = str(write_lines(tmp_path / "pairs.jsonl", PAIRS * 5))
    config.data.evaluation, config.loss.name = "similarity", "cosent"
    result = finetune.train_and_evaluate(config.lock(), tmp_path / "guide")
    assert -1 <= result["dev"]["spearman"] <= 1

    config = config_file.get_config("bi_encoder,runlocal")
    config.init_from = str(tmp_path / "weights")
    config.data.train = config.data.dev = str(write_lines(tmp_path / "train.jsonl", TAUGHT * 5))
    config.data.num_negatives, config.loss.name = 2, "guided_in_batch"
    config.loss.matryoshka_sizes = (16, 8)
    with pytest.raises(ValueError, match=r"config\.teacher is not set"):
        finetune.train_and_evaluate(config, tmp_path / "none")
    config.teacher = str(tmp_path / "guide")
    result = finetune.train_and_evaluate(config.lock(), tmp_path / "run")
    assert result["dev"]["mrr_at_10"] > 0


BAD_FIELDS = {
    "name of the other role": ({"loss.name": "lambda"}, "loss.name=lambda: .*in_batch"),
    "setting of another loss": ({"loss.margin": 1.0}, "loss.margin=1.*in_batch.*guided"),
    "setting of the other role": ({"loss.k": 3}, "loss.k=3"),
    "temperature": (
        {"loss.name": "cosine_similarity", "similarity.temperature": 0.1},
        "similarity.temperature=0.1",
    ),
    "distance": (
        {"loss.name": "contrastive", "loss.distance": "manhattan"},
        "loss.distance=manhattan.*euclidean.*cosine",
    ),
    "equal sizes": ({"loss.matryoshka_sizes": (8, 8)}, "matryoshka_sizes"),
    "weights": (
        {"loss.matryoshka_sizes": (8, 4), "loss.matryoshka_weights": (1.0,)},
        r"matryoshka_weights=\(1.0,\)",
    ),
    "weights without sizes": ({"loss.matryoshka_weights": (1.0,)}, "matryoshka_weights"),
    "dot products": (
        {"loss.matryoshka_sizes": (8, 4), "similarity.normalize": False},
        "similarity.normalize=True",
    ),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_bad_field_is_named(case):
    fields, message = BAD_FIELDS[case]
    config = config_file.get_config("bi_encoder,runlocal")
    config.update_from_flattened_dict(fields)
    with pytest.raises(ValueError, match=message):
        find_loss(config)


BAD_LINES = {
    "cosine above 1": ("cosine_similarity", [*PAIRS, PAIRS[0] | {"score": 4.2}], "line 3.* 4.2"),
    "fraction above 1": ("contrastive", [*PAIRS, PAIRS[0] | {"score": 2}], "line 3.* 2"),
    "neither 0 nor 1": ("online_contrastive", PAIRS, "line 1.* 0.75"),
    "no teacher": (
        "margin_mse",
        [{"query": "king", "positive": "a king", "negatives": ["the city"]}],
        "line 1.* 'positive_score'",
    ),
    "one score too few": (
        "margin_mse",
        [TAUGHT[0] | {"negative_scores": [1.5]}],
        "line 1.*'negative_scores'.*1.*2",
    ),
    "no negatives": (
        "triplet",
        [{"query": "king", "positive": "a king"}],
        "config.data.num_negatives",
    ),
    "one class": ("batch_hard_triplet", TEXTS[:1], "config.data.train=.*two classes"),
    "class that is null": (
        "batch_hard_triplet",
        [*TEXTS, {"text": "a", "label": None}],
        "line 3: 'label'",
    ),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line_is_named(case, tmp_path, tokenizer):
    name, lines, message = BAD_LINES[case]
    fields = {"data.num_negatives": 1} if name == "margin_mse" else {}
    with pytest.raises(ValueError, match=message):
        make_task(tmp_path, tokenizer, "bi_encoder", name, lines, **fields)
