"""Model cards, read back with the hub's own library."""

import pytest
from huggingface_hub import ModelCard

from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.model_card import model_card
from bert_jax.checkpoints.read import read_model
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import write_weights

ENCODER = {"architecture": {"family": "bert", "causal": False}}
RETRIEVAL = {"max_query_length": 8}


def text(params=(), result=(), **settings):
    return model_card("mine", dict.fromkeys(params), ENCODER | settings, dict(result))


def card(*arguments, **settings):
    return ModelCard(text(*arguments, **settings)).data


@pytest.mark.parametrize(
    ("params", "head", "pipeline_tag", "library"),
    [
        (["encoder"], None, "feature-extraction", "transformers"),
        (["encoder", "mlm"], None, "fill-mask", "transformers"),
        (["head"], {"task": "classification"}, "text-classification", "transformers"),
        (["head"], {"task": "tagging"}, "token-classification", "transformers"),
        (["head"], {"task": "span"}, "question-answering", "transformers"),
        (["head"], {"task": "multiple_choice"}, "multiple-choice", "transformers"),
        (
            ["head"],
            {"task": "multiple_choice"} | RETRIEVAL,
            "text-ranking",
            "sentence-transformers",
        ),
        ([], {"task": "embedding"} | RETRIEVAL, "sentence-similarity", "sentence-transformers"),
    ],
)
def test_task_and_library_follow_the_head(params, head, pipeline_tag, library):
    data = card(params, head=head and head | {"labels": []})
    assert (data.pipeline_tag, data.library_name) == (pipeline_tag, library)
    assert data.license == "unknown" and not data.eval_results


def test_left_to_right_model_generates_text():
    assert (
        card(["mlm"], architecture={"family": "bert", "causal": True}).pipeline_tag
        == "text-generation"
    )


def test_results_have_the_scores_of_each_split_but_not_of_single_labels():
    result = {
        "seed": 0,
        "metric": "dev/f1",
        "dev": {"f1": 0.5, "f1/PER": 0.25},
        "test": {"f1": 0.125},
        "predictions": ["predictions/dev.tsv"],
    }
    data = {"dev": "/home/me/texts/valid.txt", "test": "tfds:conll2003"}
    settings = {"head": {"task": "tagging", "labels": ["O"]}, "data": data}
    found = [
        (each.dataset_split, each.dataset_name, each.metric_type, each.metric_value)
        for each in card(["head"], result, **settings).eval_results
    ]
    assert found == [("dev", "valid.txt", "f1", 0.5), ("test", "tfds:conll2003", "f1", 0.125)]
    assert "/home/me" not in text(["head"], result, **settings)


def test_results_of_pretraining_are_for_the_heldout_rows():
    result = {"mlm_loss": 1.5, "perplexity": 4.5, "mlm_accuracy": 0.625, "steps": 10}
    found = card(["mlm"], result, corpus="corpora/wiki").eval_results
    assert [(each.dataset_name, each.dataset_split, each.metric_type) for each in found] == [
        ("wiki", "heldout", "perplexity"),
        ("wiki", "heldout", "mlm_accuracy"),
    ]


@pytest.mark.parametrize(
    ("init_from", "base_model", "to_fill_in"),
    [
        ("", None, False),
        ("/home/me/minilm", None, True),
        ("cache/models--google-bert--bert-base-uncased", "google-bert/bert-base-uncased", False),
        ("models--intfloat--e5-small-v2/snapshots/ab12", "intfloat/e5-small-v2", False),
    ],
)
def test_unknown_base_model_is_to_be_filled_in(init_from, base_model, to_fill_in):
    assert card(["encoder"], init_from=init_from).base_model == base_model
    written = text(["encoder"], init_from=init_from)
    assert ("# base_model: OWNER/NAME" in written) == to_fill_in
    assert "/home/me" not in written


def corpus_of(rows: int, length: int, fill: float) -> dict:
    """What a checkpoint stores of a corpus: of its manifest the counts that the card needs."""
    return {
        "splits": {"train": {"rows": rows, "tokens": round(rows * length * fill), "fill": fill}}
    }


def test_card_lists_each_phase_and_the_scores_are_the_last_ones():
    settings = {
        "corpus": "/home/me/wiki128",
        "num_steps": 900,
        "batch_size": 256,
        "long_phase": {"corpus": "/home/me/wiki512", "num_steps": 100, "batch_size": 64},
        "corpora": [corpus_of(5000, 128, 0.9712), corpus_of(1300, 512, 0.4567)],
        "trained_length": 512,
    }
    written = text(["mlm"], {"perplexity": 4.5}, **settings)
    assert "- wiki128: 5,000 rows of 128 tokens, 900 steps of 256 rows\n" in written
    assert "- wiki512: 1,300 rows of 512 tokens, 100 steps of 64 rows\n" in written
    assert "- trained on inputs of at most: 512 tokens\n" in written
    assert "num_steps: 900" not in written and "/home/me" not in written
    (score,) = card(["mlm"], {"perplexity": 4.5}, **settings).eval_results
    assert score.dataset_name == "wiki512"


def test_card_lists_the_corpora_of_a_mixture_with_their_shares():
    mixed = corpus_of(5000, 128, 0.9) | {
        "mixture": [corpus_of(700, 128, 0.9)],
        "weights": [3.0, 1.0],
    }
    settings = {
        "corpus": "/home/me/wiki:3,gs://bucket/books:1",
        "num_steps": 90,
        "batch_size": 16,
        "corpora": [mixed],
    }
    written = text(["mlm"], **settings)
    parts = "wiki: 5,000 rows of 128 tokens (0.75 of all) + books: 700 rows of 128 tokens (0.25 of"
    assert f"- {parts} all), 90 steps of 16 rows\n" in written
    (score,) = card(["mlm"], {"perplexity": 4.5, "perplexity/books": 5}, **settings).eval_results
    assert score.dataset_name == "wiki + books" and score.metric_value == 4.5


def test_card_of_an_earlier_version_lists_the_corpora_of_a_mixture():
    mixed = corpus_of(5000, 128, 0.9) | {
        "mixture": [corpus_of(700, 128, 0.9)],
        "weights": [1.0, 0.5],
    }
    settings = {
        "corpus": "/home/me/wiki",
        "mixture": [["/home/me/books", 0.5]],
        "num_steps": 90,
        "batch_size": 16,
        "later_phases": {
            "phase_3": {"num_steps": 10, "batch_size": 32},
            "phase_4": {"num_steps": 5, "corpus": "/home/me/wiki"},
        },
        "corpora": [mixed, mixed, corpus_of(5000, 128, 0.9)],
    }
    written = text(["mlm"], **settings)
    both = (
        "- wiki: 5,000 rows of 128 tokens (0.667 of all) + books: 700 rows of 128 tokens (0.333 of "
        "all)"
    )
    assert f"{both}, 90 steps of 16 rows\n{both}, 10 steps of 32 rows\n" in written
    assert "\n- wiki: 5,000 rows of 128 tokens, 5 steps of 32 rows\n" in written


@pytest.mark.parametrize(
    ("languages", "expected"),
    [([], None), (["en"], None), ([None], None), (["de"], ["de"]), (["fr", "de"], ["de", "fr"])],
)
def test_language_is_that_of_the_corpora_unless_it_may_be_the_default(languages, expected):
    written = text(["mlm"], languages=languages)
    assert ModelCard(written).data.language == expected
    assert ("# language: en" in written) == (expected is None)


def test_front_matter_names_what_is_to_be_filled_in():
    front_matter = text().split("---")[1]
    assert "# license: " in front_matter and "# language: en" in front_matter


@pytest.mark.parametrize("result", [None, {"dev": {"accuracy": 0.75}}])
def test_export_has_a_card_with_the_scores_if_they_are_given(tmp_path, result):
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    weights = write_weights(tmp_path / "weights", vocabulary, head=("north", "south"))
    save_huggingface(tmp_path / "topics", *read_model(weights)[:3], result)
    written = (tmp_path / "topics/README.md").read_text()
    assert "# topics\n" in written and "- north\n- south\n" in written
    data = ModelCard(written).data
    assert data.pipeline_tag == "text-classification"
    assert [each.metric_value for each in data.eval_results or ()] == ([0.75] if result else [])
