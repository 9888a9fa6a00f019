"""The side of transformers and torch in benchmarks/train_step.py and finetune.py.

Fine-tuning is plain loops with dynamic padding, the library's default: each batch is as long as its
longest example. Optimizer, schedule, clipping, batch size and epochs are the same as in bert_jax;
the order of the examples and the initial values of the head come from torch's generator.
"""

import os
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers

from bert_jax.model.modernbert_names import config_to_json


def bert_config(config) -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
    )


def bert(config) -> transformers.PreTrainedModel:
    """Returns a model of the size of a `BertConfig`, with random weights."""
    return transformers.BertForPreTraining(bert_config(config))


def modernbert(config, sparse: bool) -> transformers.PreTrainedModel:
    """Returns a model of the size of a `ModernBertConfig`, with random weights.

    `sparse`: it computes the logits of masked positions alone.
    """
    values = config_to_json(config) | {"sparse_prediction": sparse}
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**values))


def encoder_gradient(config, tokens: np.ndarray):
    """Returns a function that computes the gradient of the mean square of the hidden states."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if config.architecture == "bert":
        model = transformers.BertModel(bert_config(config), add_pooling_layer=False)
    else:
        ids = dict.fromkeys(["pad_token_id", "cls_token_id", "sep_token_id"], 0)
        ids |= dict.fromkeys(["bos_token_id", "eos_token_id"], 0)  # Within any vocabulary.
        values = config_to_json(config) | ids
        model = transformers.ModernBertModel(transformers.ModernBertConfig(**values))
    model.eval()  # Without dropout.
    tokens = torch.tensor(tokens, dtype=torch.long)

    def step():
        model.zero_grad()
        model(input_ids=tokens).last_hidden_state.square().mean().backward()

    return step


def pretrain_step(model, masked_rows: dict[str, np.ndarray], device: str):
    """Returns a function that runs one step and waits for it: eager on a CPU, compiled on a GPU."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = model.train().to(device)
    plain = [p for p in model.parameters() if p.ndim == 1]  # LayerNorm and biases.
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, eps=1e-6)
    rows = {name: torch.tensor(x, dtype=torch.long) for name, x in masked_rows.items()}
    labels = torch.full_like(rows["tokens"], -100)
    labels.scatter_(1, rows["mlm_positions"], rows["mlm_targets"])
    inputs = {
        "input_ids": rows["tokens"],
        "attention_mask": torch.ones_like(rows["tokens"]),
        "labels": labels,
    }
    if isinstance(model, transformers.BertForPreTraining):
        inputs["token_type_ids"] = rows["segment_ids"]
        inputs["next_sentence_label"] = torch.zeros(len(labels), dtype=torch.long)
    inputs = {name: x.to(device) for name, x in inputs.items()}
    run = torch.compile(model) if device == "cuda" else model

    def step():
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = run(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def prepare(seed: int) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.set_seed(seed)


def load(architecture, config, **settings):
    rates = dict.fromkeys(
        ("hidden_dropout_prob", "attention_probs_dropout_prob"), config.model.dropout_rate
    )
    return architecture.from_pretrained(config.init_from, **rates, **settings)


def train(model, collate: Callable, features: list, config) -> None:
    """Trains with a config of configs/finetune/; `collate(features)` returns a padded batch."""
    per_epoch = -(-len(features) // config.batch_size)
    num_steps = round(config.num_epochs * per_epoch)
    warmup = round(config.warmup_fraction * num_steps)
    plain = [p for name, p in model.named_parameters() if "bias" in name or "LayerNorm" in name]
    decayed = [p for p in model.parameters() if all(p is not q for q in plain)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, eps=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step / warmup if step < warmup else 1 - step / num_steps
    )
    model.train()
    step = 0
    while step < num_steps:
        order = torch.randperm(len(features)).tolist()
        for first in range(0, len(features), config.batch_size):
            if step == num_steps:
                break
            batch = [features[index] for index in order[first : first + config.batch_size]]
            model(**collate(batch)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1


def predict(model, collate: Callable, features: list, batch_size: int = 32) -> list:
    """Returns the outputs of each batch, in the order of the features."""
    model.eval()
    unlabeled = [{k: v for k, v in feature.items() if "label" not in k} for feature in features]
    starts = range(0, len(features), batch_size)
    with torch.inference_mode():
        return [model(**collate(unlabeled[start : start + batch_size])) for start in starts]


def finish(score: float, started: float, trained: float) -> dict:
    return {
        "score": score,
        "train_seconds": trained - started,
        "predict_seconds": time.perf_counter() - trained,
    }


def classification(config, train_set, test_set, seed: int) -> dict:
    """Returns the accuracy on `test_set`, and times; both sets are (texts, labels)."""
    prepare(seed)
    started = time.perf_counter()
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.init_from)
    labels = sorted(set(train_set[1]))

    def features(texts, names):
        ids = tokenizer(list(texts), truncation=True, max_length=config.max_seq_length)["input_ids"]
        return [
            {"input_ids": sequence, "labels": labels.index(name)}
            for sequence, name in zip(ids, names, strict=True)
        ]

    collate = transformers.DataCollatorWithPadding(tokenizer)
    model = load(transformers.BertForSequenceClassification, config, num_labels=len(labels))
    train(model, collate, features(*train_set), config)
    trained = time.perf_counter()
    outputs = predict(model, collate, features(*test_set))
    predicted = torch.cat([output.logits.argmax(-1) for output in outputs]).tolist()
    correct = [labels[index] == name for index, name in zip(predicted, test_set[1], strict=True)]
    return finish(sum(correct) / len(correct), started, trained)


def tagging(config, train_set, test_set, score: Callable, seed: int) -> dict:
    """Returns `score(predicted, tags)` on `test_set`, and times; sets are of (words, tags)."""
    prepare(seed)
    started = time.perf_counter()
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.init_from)
    labels = sorted({tag for _, tags in [*train_set, *test_set] for tag in tags})

    def features(sentences):
        encoded = tokenizer(
            [words for words, _ in sentences],
            is_split_into_words=True,
            truncation=True,
            max_length=config.max_seq_length,
        )
        examples = []
        for index, (_, tags) in enumerate(sentences):
            words, numbers = encoded.word_ids(index), []
            for position, word in enumerate(words):
                first = word is not None and word != words[position - 1]
                numbers.append(labels.index(tags[word]) if first else -100)
            examples.append({"input_ids": encoded["input_ids"][index], "labels": numbers})
        return examples

    collate = transformers.DataCollatorForTokenClassification(tokenizer)
    padded = transformers.DataCollatorWithPadding(tokenizer)
    model = load(transformers.BertForTokenClassification, config, num_labels=len(labels))
    train(model, collate, features(train_set), config)
    trained = time.perf_counter()
    test_features = features(test_set)
    predicted = []
    outputs = predict(model, padded, test_features)
    logits = (row for output in outputs for row in output.logits)
    for feature, (_, tags), scores in zip(test_features, test_set, logits, strict=True):
        best = scores.argmax(-1).tolist()
        names = [labels[b] for b, n in zip(best, feature["labels"], strict=False) if n != -100]
        predicted.append(names + ["O"] * (len(tags) - len(names)))  # Truncated words.
    return finish(score(predicted, [tags for _, tags in test_set]), started, trained)


def answers(config, train_set, test_set, score: Callable, seed: int) -> dict:
    """Returns `score({id: text})` on `test_set`, and times.

    Both sets are lists of (id, question, context, start, text). The windows equal bert_jax's
    token for token: `stride` is their overlap.
    """
    prepare(seed)
    started = time.perf_counter()
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.init_from)

    def windows(question, context):
        question_length = len(tokenizer(question, add_special_tokens=False)["input_ids"])
        room = config.max_seq_length - question_length - 3
        return tokenizer(
            [question],
            [context],
            truncation="only_second",
            max_length=config.max_seq_length,
            stride=max(room - config.data.doc_stride, 0),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )

    def features(examples):
        window_features, window_places = [], []
        for number, (_, question, context, begin, text) in enumerate(examples):
            encoded, end = windows(question, context), begin + len(text)
            for window, offsets in enumerate(encoded["offset_mapping"]):
                parts = encoded.sequence_ids(window)
                inside = [position for position, part in enumerate(parts) if part == 1]
                first = last = 0
                if offsets[inside[0]][0] <= begin and end <= offsets[inside[-1]][1]:
                    first = max(p for p in inside if offsets[p][0] <= begin)
                    last = min(p for p in inside if offsets[p][1] >= end)
                window_features.append(
                    {
                        "input_ids": encoded["input_ids"][window],
                        "token_type_ids": encoded["token_type_ids"][window],
                        "start_positions": first,
                        "end_positions": last,
                    }
                )
                window_places.append((number, offsets, inside))
        return window_features, window_places

    collate = transformers.DataCollatorWithPadding(tokenizer)
    model = load(transformers.BertForQuestionAnswering, config)
    train(model, collate, features(train_set)[0], config)
    trained = time.perf_counter()
    window_features, window_places = features(test_set)
    unlabeled = [
        {k: v for k, v in feature.items() if "positions" not in k} for feature in window_features
    ]
    best_answers: dict[int, tuple[float, str]] = {}
    rows = (
        pair
        for output in predict(model, collate, unlabeled)
        for pair in zip(output.start_logits, output.end_logits, strict=True)
    )
    for (example, offsets, inside), (starts, ends) in zip(window_places, rows, strict=True):
        best_starts, best_ends = (
            sorted(inside, key=lambda position, of=of: -of[position])[:20]
            for of in (starts.tolist(), ends.tolist())
        )
        for start in best_starts:
            for end in best_ends:
                if start <= end < start + 30:
                    text = test_set[example][2][offsets[start][0] : offsets[end][1]]
                    value = (float(starts[start] + ends[end]), text)
                    best_answers[example] = max(best_answers.get(example, value), value)
    texts = {test_set[example][0]: text for example, (_, text) in best_answers.items()}
    return finish(score(texts), started, trained)
