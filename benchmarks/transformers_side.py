"""Fine-tuning and inference by transformers and torch, for benchmarks/finetune.py to compare with.

Plain loops with dynamic padding, the library's default: each batch is as long as its longest
example. The same optimizer, schedule, clipping, batch size and epochs as ours; the order of the
examples and the head's first values come from torch's generator.
"""

import os
import time
from collections.abc import Callable

import torch
import transformers


def prepare(seed: int) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.set_seed(seed)


def train(model, collate: Callable, features: list, config) -> None:
    """`config` has the fields of configs/finetune/; `collate(features)` gives a padded batch."""
    per_epoch = -(-len(features) // config.batch_size)
    num_steps = round(config.num_epochs * per_epoch)
    warmup = round(config.warmup_fraction * num_steps)
    plain = [p for name, p in model.named_parameters() if "bias" in name or "LayerNorm" in name]
    others = [p for p in model.parameters() if all(p is not other for other in plain)]
    groups = [
        {"params": others, "weight_decay": config.weight_decay},
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
            chosen = [features[index] for index in order[first : first + config.batch_size]]
            model(**collate(chosen)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1


def predict(model, collate: Callable, features: list, batch_size: int = 32) -> list:
    """The outputs of each batch, in the order of the features."""
    model.eval()
    unlabeled = [{k: v for k, v in each.items() if "label" not in k} for each in features]
    starts = range(0, len(features), batch_size)
    with torch.inference_mode():
        return [model(**collate(unlabeled[start : start + batch_size])) for start in starts]


def classification(weights: str, config, train_set, test_set, labels, seed: int) -> dict:
    """Accuracy on `test_set`, and seconds; both sets are (texts, labels)."""
    prepare(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    started = time.perf_counter()

    def features(texts, names):
        ids = tokenizer(list(texts), truncation=True, max_length=config.max_seq_length)["input_ids"]
        return [
            {"input_ids": each, "labels": labels.index(name)}
            for each, name in zip(ids, names, strict=True)
        ]

    collate = transformers.DataCollatorWithPadding(tokenizer)
    model = transformers.BertForSequenceClassification.from_pretrained(
        weights, num_labels=len(labels)
    )
    train(model, collate, features(*train_set), config)
    trained = time.perf_counter()
    outputs = predict(model, collate, features(*test_set))
    finished = time.perf_counter()
    predicted = torch.cat([output.logits.argmax(-1) for output in outputs]).tolist()
    right = [labels[index] == name for index, name in zip(predicted, test_set[1], strict=True)]
    return {
        "score": sum(right) / len(right),
        "train_seconds": trained - started,
        "predict_seconds": finished - trained,
    }
