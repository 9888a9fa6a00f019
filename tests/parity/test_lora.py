"""LoRA against peft: outputs, twenty steps of AdamW, and both formats, both ways."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from bert_jax.checkpoints.export import params_to_huggingface
from bert_jax.checkpoints.peft import peft_format
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.transformers_config import format_of
from bert_jax.data.features import ModelInput, RowShape, finetune_batches, unpack_rows
from bert_jax.finetuning.step import make_finetune_step
from bert_jax.model.architecture import architecture_of, config_from_settings
from bert_jax.model.config import pools_last
from bert_jax.model.heads import CLASSIFICATION, make_model
from bert_jax.model.lora import (
    Lora,
    choose_layers,
    dense_layers,
    init_adapters,
    merge,
    run_adapted,
    split_params,
)
from bert_jax.sharding.mesh import BATCH_SPEC, make_mesh
from bert_jax.sharding.rules import TASK_RULES, infer_shardings, stack_shardings
from bert_jax.training.optimizer import Hyperparameters, make_optimizer
from bert_jax.training.state import TrainState
from tests.helpers.models import TORCH_SIZES, write_torch_model

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

EXAMPLES, LENGTH, STEPS, RATE = 16, 16, 20, 1e-3
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERN = {
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "mlp_dropout": 0.0,
    "classifier_dropout": 0.0,
    "global_attn_every_n_layers": 2,
    "local_attention": 8,
    "pad_token_id": 0,
}
CASES = {
    "bert": ("BertForSequenceClassification", NO_DROPOUT, ["query", "value"], "query|value"),
    "bert, all layers": (
        "BertForSequenceClassification",
        NO_DROPOUT,
        r".*encoder\.layer\..*(query|key|value|dense)",
        "",
    ),
    "modernbert, fused": (
        "ModernBertForSequenceClassification",
        MODERN,
        ["Wqkv", "Wi"],
        "query|key|value|intermediate|gate",
    ),
}


def make_features() -> list[ModelInput]:
    """Returns texts of one length, so that torch needs no padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 40, (EXAMPLES, LENGTH), dtype=np.int32)
    return [ModelInput((each,), (LENGTH,), number % 3) for number, each in enumerate(tokens)]


class Pair:
    """The same base model and adapter, in torch and here."""

    def __init__(self, directory, case: str):
        class_name, settings, torch_targets, targets = CASES[case]
        base = write_torch_model(
            directory / "base", class_name, std=0.3, num_labels=3, **NO_DROPOUT | settings
        )
        self.directory = directory
        config = peft.LoraConfig(
            task_type="SEQ_CLS", r=4, lora_alpha=6, target_modules=torch_targets
        )
        base.name_or_path = str(directory / "base")
        self.torch_model = peft.get_peft_model(base, config).train()
        read = read_model(directory / "base")
        self.head = read.settings["head"]
        config = config_from_settings(read.settings)
        self.model = make_model(dataclasses.replace(config, dropout_rate=0.0), self.head)
        self.rows = RowShape(LENGTH, 1, CLASSIFICATION.label_layout, 0)
        row = self.rows.build([], 1)
        batch = row | unpack_rows(row, pools_last(config))
        trained, self.frozen = split_params(read.params, read.params)
        self.lora = Lora(
            4,
            6.0,
            choose_layers(
                self.frozen["encoder"],
                dense_layers(self.model, batch),
                targets,
                format_of(config).fused_layers(),
            ),
        )
        shapes = trained | {"lora": {}}
        merged = read.params
        self.format = peft_format(
            self.lora, config, self.head, shapes, merged, str(directory / "base")
        )
        self.trained = trained | {"lora": self.adapters_of_torch()}

    def adapters_of_torch(self) -> dict:
        tensors = peft.get_peft_model_state_dict(self.torch_model)
        adapters = {}
        for path, names in self.format.modules.items():
            for kind, letter in (("a", "A"), ("b", "B")):
                names_of_kind = [f"base_model.model.{name}.lora_{letter}.weight" for name in names]
                layers = [tensors[name].detach().numpy().T.copy() for name in names_of_kind]
                is_stacked = path.startswith("encoder/layers/")
                adapters[f"{path}/{kind}"] = np.stack(layers) if is_stacked else layers[0]
        return unflatten_dict(adapters, sep="/")

    def torch_outputs(self, model=None) -> np.ndarray:
        tokens = torch.tensor(np.stack([each.sequences[0] for each in make_features()])).long()
        with torch.no_grad():
            logits = (model or self.torch_model)(
                input_ids=tokens, attention_mask=torch.ones_like(tokens)
            ).logits
        return logits.numpy()

    def outputs(self, function) -> np.ndarray:
        """Returns the outputs of (batch) -> outputs for all texts."""
        rows = self.rows.build([[each] for each in make_features()], EXAMPLES)
        batch = rows | unpack_rows(rows, pools_last(self.model.config))
        return np.asarray(function(batch))[:, 0]

    def train_torch(self) -> None:
        decayed = {True: [], False: []}
        for name, parameter in self.torch_model.named_parameters():
            if parameter.requires_grad:
                decayed[not name.endswith("bias")].append(parameter)
        groups = [
            {"params": decayed[True], "weight_decay": 0.01},
            {"params": decayed[False], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-6)
        features = make_features()
        for step in range(STEPS):
            epoch, position = divmod(step, EXAMPLES // 4)
            order = np.random.default_rng((0, epoch)).permutation(EXAMPLES)
            chosen = [features[i] for i in order[4 * position : 4 * position + 4]]
            tokens = torch.tensor(np.stack([each.sequences[0] for each in chosen])).long()
            loss = self.torch_model(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                labels=torch.tensor([each.label for each in chosen]),
            ).loss
            optimizer.zero_grad()
            loss.backward()
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()

    def train(self) -> dict:
        """Returns the trained parameters after the same batches."""
        mesh = make_mesh(devices=jax.devices()[:1])
        optimizer = make_optimizer("adamw", lambda step: RATE)
        state = TrainState(np.int32(0), self.trained, optimizer.init(self.trained))
        rules = (*TASK_RULES, *architecture_of(self.model.config).RULES)
        shardings = infer_shardings(state, mesh, rules)
        stack = functools.partial(jax.tree.map, lambda leaf: np.asarray(leaf)[None])
        state = jax.device_put(state.map_trials(stack), shardings.map_trials(stack_shardings))
        update = make_finetune_step(
            self.model, CLASSIFICATION, lambda _: optimizer, shardings, 2, 4, self.lora
        )
        batches = finetune_batches(
            make_features(),
            self.rows,
            NamedSharding(mesh, P("trial", *BATCH_SPEC)),
            batch_size=4,
            rows_per_microbatch=2,
            seeds=[0],
            start=0,
            stop=STEPS,
        )
        keys, numbers = jax.random.split(jax.random.key(0), 1), Hyperparameters(*np.zeros((5, 1)))
        for rows, num_microbatches in batches:
            state, _ = update(state, rows, num_microbatches, keys, numbers, self.frozen)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[0], state.params)


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_equal_those_of_peft_and_each_reads_what_the_other_writes(case, tmp_path):
    pair = Pair(tmp_path, case)
    before = flatten_dict(pair.trained, sep="/")
    pair.train_torch()
    trained = pair.train()
    merged = merge(pair.lora, trained, pair.frozen)
    (tmp_path / "ours").mkdir()
    for name, content in pair.format.files(trained["lora"], merged, {}).items():
        (tmp_path / "ours" / name).write_bytes(content)
    pair.torch_model.save_pretrained(tmp_path / "theirs")

    ours, theirs = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")
    )
    # Of ModernBERT, also the frozen pooler, which an exported base model does not have.
    assert all(".head." in name for name in ours.keys() ^ theirs.keys())
    worst = max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)
    moved = max(
        float(np.abs(leaf - before[path]).max())
        for path, leaf in flatten_dict(trained, sep="/").items()
    )
    model, lora, frozen = pair.model, pair.lora, pair.frozen
    unmerged = pair.outputs(lambda batch: run_adapted(model, lora, trained, frozen, batch))
    as_merged = pair.outputs(lambda batch: model.apply({"params": merged}, batch))
    imported = read_model(tmp_path / "theirs")
    as_imported = pair.outputs(lambda batch: model.apply({"params": imported.params}, batch))
    expected = pair.torch_outputs()
    base = type(pair.torch_model.get_base_model()).from_pretrained(tmp_path / "base")
    loaded = pair.torch_outputs(peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval())
    apart = {
        "unmerged": np.abs(unmerged - expected).max(),
        "merged": np.abs(as_merged - expected).max(),
        "merged and unmerged": np.abs(as_merged - unmerged).max(),
        "read here": np.abs(as_imported - expected).max(),
        "read by peft": np.abs(loaded - expected).max(),
    }
    shown = ", ".join(f"{name} {value:.1e}" for name, value in apart.items())
    print(f"{case}: moved by up to {moved:.3f}, parameters {worst:.1e} apart; outputs: {shown}")
    assert moved > 0.01 and worst < 1e-5 and max(apart.values()) < 1e-5


def test_biases_patterns_and_rank_stabilized_scales_of_peft_are_read(tmp_path):
    base = write_torch_model(tmp_path / "base", "BertForSequenceClassification", num_labels=3)
    config = peft.LoraConfig(
        task_type="SEQ_CLS",
        r=4,
        lora_alpha=6,
        use_rslora=True,
        bias="all",
        lora_dropout=0.1,
        init_lora_weights=False,
        target_modules=["query", "intermediate.dense"],
        rank_pattern={"query": 2},
        alpha_pattern={"layer.0.intermediate.dense": 3},
        layers_to_transform=[0],
    )
    model = peft.get_peft_model(base, config).eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    values = json.loads(path.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}
    path.write_text(json.dumps(values))
    read = read_model(tmp_path / "adapter")
    network = make_model(config_from_settings(read.settings), read.settings["head"])
    tokens = np.arange(5, 5 + LENGTH, dtype=np.int32)[None] % TORCH_SIZES["vocab_size"]
    rows = {"tokens": tokens, "sequence_bounds": np.array([[[0, LENGTH, LENGTH]]], np.int32)}
    actual = network.apply({"params": read.params}, rows | unpack_rows(rows))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(tokens).long()).logits.numpy()
    np.testing.assert_allclose(actual[:, 0], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["Roberta", "Electra"])
def test_peft_reads_an_adapted_pooler_that_is_part_of_the_head(name, tmp_path):
    """It is in the encoder here, and is stored whole: peft would apply an adapter twice."""
    class_name = f"{name}ForSequenceClassification"
    settings = NO_DROPOUT | {"num_labels": 3, "tokenizer_class": "BertTokenizer"}
    base = write_torch_model(tmp_path / "base", class_name, std=0.3, **settings)
    read = read_model(tmp_path / "base")
    config, head = config_from_settings(read.settings), read.settings["head"]
    row = RowShape(LENGTH, 1, CLASSIFICATION.label_layout, 0).build([], 1)
    batch = row | unpack_rows(row, pools_last(config))
    trained, frozen = split_params(read.params, read.params)
    layers = dense_layers(make_model(config, head), batch)
    lora = Lora(4, 6.0, choose_layers(frozen["encoder"], layers, "encoder/", ()))
    assert ("encoder/pooler/dense",) in lora.groups
    shapes = jax.eval_shape(lambda: init_adapters(jax.random.key(0), lora, frozen["encoder"]))
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(lambda leaf: np.float32(rng.normal(0, 0.1, leaf.shape)), shapes)
    merged = merge(lora, trained | {"lora": adapters}, frozen)
    stored = peft_format(lora, config, head, trained, merged, str(tmp_path / "base"))
    (tmp_path / "ours").mkdir()
    for file, content in stored.files(adapters, merged, {}).items():
        (tmp_path / "ours" / file).write_bytes(content)
    unmerged = type(base).from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(unmerged, tmp_path / "ours").eval()
    tensors = params_to_huggingface(merged, config, head)
    missing = base.load_state_dict(
        {name: torch.tensor(tensor) for name, tensor in tensors.items()}, strict=False
    )
    assert not missing.missing_keys and not missing.unexpected_keys
    base.eval()
    tokens = np.stack([each.sequences[0][:8] for each in make_features()])
    tokens = torch.tensor(tokens).long()
    with torch.no_grad():
        np.testing.assert_allclose(
            loaded(input_ids=tokens).logits, base(input_ids=tokens).logits, atol=1e-5
        )
