"""Distillation: a student learns what a teacher, whose parameters stay as they are, computes.

The weights in `config.distillation.weights` choose the losses:

- "soft": the teacher's distribution over the vocabulary, "mlm": the masked tokens themselves, and
  "cosine": the direction of the last hidden states (DistilBERT; Sanh et al., 2019, section 3);
- "attention": attention scores, "hidden": the outputs of layers, and "embeddings": the input of
  the first layer (TinyBERT; Jiao et al., 2020, section 3.1). As in the released code, one dense
  layer maps the student's hidden states and embeddings to the width of the teacher.

All are means over what a model sees of its text, so that padding and packing change nothing; the
released code of TinyBERT counts padding in its means, with a difference of 0 of masked scores.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P

from bert_jax.model.architecture import architecture_of, config_from_settings
from bert_jax.model.dropout import Dropout
from bert_jax.model.encoder import Encoder, is_few
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layer_stack import layers_with, share_layers
from bert_jax.model.layers import Dense, cross_entropy, gather_positions, kl_divergence
from bert_jax.objectives import Batch, Sums
from bert_jax.objectives.masked_lm import MaskedLm

OF_TOKENS = {"soft", "mlm"}  # Losses at the masked positions.
OF_LAYERS = {"attention", "hidden", "embeddings"}  # Losses that need the states of every layer.

# Fields in which a student must agree with the teacher whose layers it starts from.
FIELDS_OF_LAYERS = (
    "architecture",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "embedding_size",
    "max_position_embeddings",
    "position_offset",
    "activation",
    "layer_norm_epsilon",
    "attention_window",
    "global_rope_base",
    "local_rope_base",
    "attention_bias",
    "feed_forward_bias",
    "norm_bias",
    "positions",
    "rope_base",
    "normalizes_embeddings",
    "token_dropout",
    "mask_id",
    "has_positions",
    "position_scores",
    "num_buckets",
    "max_distance",
    "shares_projections",
    "normalizes_distances",
    "convolution_width",
    "convolution_activation",
)


class DistillationModel(nn.Module):
    """A student or a teacher: an encoder, and what the losses need of it.

    Attributes:
      config: the model config.
      losses: names of the losses.
      layers: the layers to compare, counted from 1.
      projected_size: width to which hidden states and embeddings are mapped; None: they are not.
      plan: how it runs.
    """

    config: object
    losses: frozenset[str]
    layers: tuple[int, ...]
    projected_size: int | None = None
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        architecture = architecture_of(self.config)
        self.encoder = Encoder(self.config, self.plan)
        if self.losses & OF_TOKENS:
            self.mlm = architecture.LmHead(self.config)
        if self.projected_size:
            self.projection = Dense(self.projected_size, self.config.initializer_range)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | None = None
    ) -> dict[str, jax.Array]:
        """Returns what the losses compare, by their names.

        The batch has the inputs of `Encoder`, and int32 `target_positions` `[B, K]`. "mlm" and
        "soft" are float32 logits `[B, K, padded_vocab]`, "cosine" hidden states `[B, L, H]`,
        "hidden" `[layers, B, L, H]`, "embeddings" `[B, L, H]`, and "attention" float32 scores
        `[layers, B, heads, from, to]`, with "visible", bool `[layers, B, 1, from, to]`.
        """
        positions, outputs = batch["target_positions"], {}
        if self.losses <= OF_TOKENS:  # Nothing else is read of the last layer.
            at_targets = self.encoder(batch, dropout, positions)
        elif self.losses & OF_LAYERS:
            states = self.encoder.all_hidden_states(batch, dropout)
            outputs |= self._compare_layers(batch, states) | {"cosine": states[-1]}
            at_targets = gather_positions(states[-1], positions)
        else:
            outputs["cosine"] = self.encoder(batch, dropout)
            at_targets = gather_positions(outputs["cosine"], positions)
        if self.losses & OF_TOKENS:
            logits = self.mlm(at_targets, self.encoder.embeddings.token_embedding)
            outputs |= {"mlm": logits, "soft": logits}
        return outputs

    def _compare_layers(
        self, batch: dict[str, jax.Array], states: jax.Array
    ) -> dict[str, jax.Array]:
        outputs = {}
        if "attention" in self.losses:
            of_layers = self.encoder.attention_scores(batch, states)
            chosen = [of_layers[number - 1] for number in self.layers]
            outputs["attention"] = jnp.stack([scores for scores, _ in chosen])
            outputs["visible"] = jnp.stack([mask.pairs() for _, mask in chosen])
        project = self.projection if self.projected_size else lambda x: x
        if "hidden" in self.losses:
            outputs["hidden"] = jnp.stack([project(states[number]) for number in self.layers])
        if "embeddings" in self.losses:
            outputs["embeddings"] = project(states[0])
        return outputs


@dataclasses.dataclass(frozen=True, eq=False)
class Distillation:
    """The weighted sum of the losses of a student beside its teacher.

    Attributes:
      masked_lm: how rows are masked.
      weights: weight of each loss, by name.
      temperature: divides the logits of both for the loss "soft".
      layers: the teacher's layer for each layer of the student, counted from 1; if empty, in equal
        steps up to the last.
      init_layers: the teacher's layers from which the student's layers start; if empty, none.
      teacher: the teacher's model config.
    """

    masked_lm: MaskedLm
    weights: Mapping[str, float]
    temperature: float = 2.0
    layers: tuple[int, ...] = ()
    init_layers: tuple[int, ...] = ()
    teacher: object = None

    causal: ClassVar[bool] = False
    main_loss: ClassVar[str] = "mlm_loss"
    main_accuracy: ClassVar[str] = "mlm_accuracy"
    rules: ClassVar[tuple] = ((r"projection/kernel$", P("fsdp", "tensor")),)
    max_predictions = staticmethod(MaskedLm.max_predictions)

    @classmethod
    def from_config(cls, config, tokenizer, max_predictions: int) -> "Distillation":
        """Builds the objective of a phase, without its teacher. Raises ValueError."""
        settings = config.distillation
        if config.next_sentence:
            raise ValueError(
                "config.next_sentence=True: distillation has no sentence-pair loss, set it to False"
            )
        if not any(settings.weights.values()):
            names = ", ".join(settings.weights)
            raise ValueError(f"all of config.distillation.weights are 0: set one ({names})")
        if settings.layers and not any(settings.weights[name] for name in ("attention", "hidden")):
            raise ValueError(
                "config.distillation.layers says which layers the losses 'attention' and 'hidden' "
                "compare, and the weights of both are 0: set one of them, or leave layers out"
            )
        return cls(
            masked_lm=MaskedLm.from_config(config, tokenizer, max_predictions),
            weights=settings.weights.to_dict(),
            temperature=settings.temperature,
            layers=tuple(settings.layers),
            init_layers=tuple(settings.init_layers),
        )

    def with_teacher(self, settings: Mapping) -> "Distillation":
        """Returns the objective with the teacher that the `settings` of its checkpoint describe.

        Raises ValueError if the teacher lacks what the losses need.
        """
        teacher = config_from_settings(settings)
        if teacher.causal:
            raise ValueError(
                "config.distillation.teacher is left to right, and the student sees the tokens "
                "after a mask: choose a teacher that was trained with masked_lm"
            )
        if getattr(teacher, "has_query_stream", False):
            raise ValueError(
                f"config.distillation.teacher is an {teacher.architecture}, which has never seen "
                "masks: it predicts tokens in the query stream. Choose a teacher that was trained "
                "with masked_lm"
            )
        if self.weights["soft"] and "mlm" not in settings["modules"]:
            raise ValueError(
                "config.distillation.teacher has no head for masked tokens, which the loss 'soft' "
                "needs: set config.distillation.weights.soft=0, or choose a teacher with it"
            )
        return dataclasses.replace(self, teacher=teacher)

    @property
    def losses(self) -> frozenset[str]:
        """The names of the losses that are computed: also "mlm" for a student with "soft"."""
        names = {name for name, weight in self.weights.items() if weight}
        return frozenset(names | ({"mlm"} if "soft" in names else set()))

    def make_model(self, model_config, plan: ExecutionPlan) -> DistillationModel:
        """Builds the student. Raises ValueError if it does not fit the teacher."""
        if self.teacher is None:
            raise ValueError(
                "objective is distillation, and there is no teacher: set "
                "config.distillation.teacher=DIR, a model with the vocabulary of the corpus"
            )
        self._check_student(model_config)
        if self.losses & OF_LAYERS and plan.uses_kernels:
            # The fast path keeps no hidden states of single layers.
            reason = "the losses compare the hidden states of each"
            logging.warning("Layers run without the fast path for TPUs: %s", reason)
            plan = dataclasses.replace(plan, uses_kernels=False)
        maps_width = bool(self.losses & {"hidden", "embeddings"})
        layers = tuple(range(1, model_config.num_layers + 1))
        size = self.teacher.hidden_size if maps_width else None
        return DistillationModel(model_config, self.losses, layers, size, plan)

    def _check_student(self, model_config) -> None:
        teacher, prefix = self.teacher, "config.distillation"
        if self.losses & OF_LAYERS:
            teacher_layers(self.layers, model_config.num_layers, teacher.num_layers)
        for name, needed in (
            ("hidden_size", "cosine"),
            ("num_heads", "attention"),
            # It differs if `init_from` has another padding than the teacher.
            ("vocab_size", "soft"),
        ):
            ours, theirs = getattr(model_config, name), getattr(teacher, name)
            if self.weights[needed] and ours != theirs:
                raise ValueError(
                    f"model.{name} is {ours}, and the teacher's is {theirs}: the loss {needed!r} "
                    f"needs the same, or set --{prefix}.weights.{needed}=0"
                )
        if self.init_layers:
            self._check_initial_layers(model_config)

    def _check_initial_layers(self, model_config) -> None:
        chosen, field = self.init_layers, "config.distillation.init_layers"
        if not _are_layers(chosen, model_config.num_layers, self.teacher.num_layers):
            raise ValueError(
                f"--{field}={','.join(map(str, chosen))}: expected a layer of the teacher, 1 to "
                f"{self.teacher.num_layers}, for each of the student's {model_config.num_layers}"
            )
        if getattr(model_config, "shares_layers", False):
            raise ValueError(f"model.shares_layers is True: set it to False, or --{field}=()")
        # A teacher's segments may be dropped.
        has_segments = getattr(model_config, "type_vocab_size", 0)
        for name in (*FIELDS_OF_LAYERS, *["type_vocab_size"] * bool(has_segments)):
            ours, theirs = (getattr(each, name, None) for each in (model_config, self.teacher))
            if ours != theirs:
                raise ValueError(
                    f"model.{name} is {ours}, and the teacher's is {theirs}: with {field} they "
                    f"must be the same; set config.model.{name}={theirs}"
                )
        ours, theirs = (
            [_kind(layer) for layer in architecture_of(config).encoder_layers(config)]
            for config in (model_config, self.teacher)
        )
        for number, (kind, layer) in enumerate(zip(ours, chosen, strict=True), 1):
            if kind != theirs[layer - 1]:
                same = [str(other) for other, each in enumerate(theirs, 1) if each == kind]
                raise ValueError(
                    f"--{field}: layer {number} of the student is not of the kind of the teacher's "
                    f"layer {layer}, such as global or local: expected one of {', '.join(same)}"
                )

    def initial_params(self, teacher_params: Mapping, modules: Mapping) -> dict:
        """Returns the teacher's embeddings, `init_layers` and head, for a student to start from.

        `modules` has the modules of the student, of which the teacher may have more.
        """
        encoder = teacher_params["encoder"]
        chosen, owners = [number - 1 for number in self.init_layers], layers_with(self.teacher)
        layers = flatten_dict(share_layers(self.teacher, encoder["layers"]))
        for path, leaf in layers.items():
            having = [owners[path].index(layer) for layer in chosen if layer in owners[path]]
            layers[path] = np.asarray(leaf)[having]
        taken = {
            name: {part: encoder[name][part] for part in parts}
            for name, parts in modules["encoder"].items()
            if name != "layers"
        }
        params = {"encoder": taken | {"layers": unflatten_dict(layers)}}
        if "mlm" in modules and "mlm" in teacher_params:
            params["mlm"] = teacher_params["mlm"]
        return params

    def frozen_params(self, teacher_params: Mapping) -> dict:
        """Returns the part of the teacher's parameters that `sums` needs, under "teacher"."""
        encoder = {name: x for name, x in teacher_params["encoder"].items() if name != "pooler"}
        head = {"mlm": teacher_params["mlm"]} if self.weights["soft"] else {}
        return {"teacher": {"encoder": encoder} | head}

    def prepare(self, rows: Batch, key: jax.Array) -> Batch:
        """Unpacks and masks rows, as `MaskedLm` does."""
        return self.masked_lm.prepare(rows, key)

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the numbers of masked tokens, of tokens and of pairs of tokens; at least 1."""
        numbers = {name: jnp.sum(weights) for name, weights in loss_weights(batch).items()}
        return {f"{name}_loss": jnp.maximum(numbers[name], 1) for name in sorted(self.losses)}

    def total_loss(self, losses: dict[str, jax.Array | float]) -> jax.Array | float:
        """Returns the weighted sum of the mean losses."""
        return sum(self.weights[name] * losses[f"{name}_loss"] for name in sorted(self.losses))

    def sums(
        self,
        model: DistillationModel,
        params: dict,
        batch: Batch,
        dropout: Dropout | None = None,
    ) -> Sums:
        """Returns the losses over a batch and the masked-LM accuracy, as sums and counts.

        `params` has the student's parameters and, under "teacher", the result of `frozen_params`.
        """
        student = model.apply({"params": params}, batch, dropout)
        teacher = self._teacher_outputs(model, params["teacher"], batch)
        return self.compare(student, jax.lax.stop_gradient(teacher), batch)

    def compare(self, student: dict, teacher: dict, batch: Batch) -> Sums:
        """Returns the `sums` for what a student and a teacher return; see `DistillationModel`."""
        weights, found = loss_weights(batch), {}
        if "mlm" in self.losses:
            found["mlm"], correct = cross_entropy(student["mlm"], batch["targets"])
        if "soft" in self.losses:
            found["soft"] = kl_divergence(student["soft"], teacher["soft"], self.temperature)
        if "cosine" in self.losses:
            found["cosine"] = 1 - cosine(student["cosine"], teacher["cosine"])
        if "embeddings" in self.losses:
            found["embeddings"] = mean_square(student["embeddings"], teacher["embeddings"], -1)
        if "hidden" in self.losses:
            found["hidden"] = mean_square(student["hidden"], teacher["hidden"], -1).sum(0)
        if "attention" in self.losses:
            # Pairs outside of a window of either layer do not count: those that a token sees have
            # the weight of all pairs of the token, so that local layers weigh as much as others.
            visible = (student["visible"] & teacher["visible"])[:, :, 0]
            visible &= weights["attention"] > 0
            num_visible = jnp.maximum(jnp.sum(visible, axis=-1, keepdims=True), 1)
            scale = jnp.sum(weights["attention"], axis=-1, keepdims=True) / num_visible
            differences = mean_square(student["attention"], teacher["attention"], 2)
            found["attention"] = jnp.where(visible, differences * scale, 0.0).sum(0)
        sums = {}
        for name, losses in found.items():
            sums[f"{name}_loss"] = jnp.sum(losses * weights[name]), jnp.sum(weights[name])
        if "mlm" in self.losses:
            sums["mlm_accuracy"] = jnp.sum(correct * weights["mlm"]), sums["mlm_loss"][1]
        return sums

    def _teacher_outputs(self, student: DistillationModel, params: dict, batch: dict) -> dict:
        layers = ()
        if self.losses & OF_LAYERS:
            layers = teacher_layers(self.layers, student.config.num_layers, self.teacher.num_layers)
        losses = self.losses - {"mlm"}
        model = DistillationModel(self.teacher, losses, layers, plan=student.plan)
        return model.apply({"params": params}, batch)

    def flops_per_row(self, model_config, length: int, max_sequences: int) -> float:
        """Returns the FLOPs of a training step for one row, with the teacher's forward pass."""
        num_targets = self.masked_lm.masking.max_predictions
        needs_all = self.losses & (OF_LAYERS | {"cosine"}) or not is_few(num_targets, length)

        def forward(model_config, predicts):
            return architecture_of(model_config).flops_per_row(
                model_config,
                length,
                num_outputs=length if needs_all else num_targets,
                num_targets=num_targets if predicts else 0,
                num_pairs=0,
            )

        student = forward(model_config, bool(self.losses & OF_TOKENS))
        return 3 * student + forward(self.teacher, bool(self.weights["soft"]))


def teacher_layers(layers: tuple[int, ...], num_layers: int, num_teacher: int) -> tuple[int, ...]:
    """Returns the teacher's layer for each of the student's; without `layers`, evenly spaced.

    Raises ValueError if they do not fit.
    """
    field = "config.distillation.layers"
    if not layers and num_teacher % num_layers:
        raise ValueError(
            f"the teacher's {num_teacher} layers are no multiple of the student's {num_layers}: "
            f"set {field}, the teacher's layer for each of the student's"
        )
    if not layers:
        step = num_teacher // num_layers
        return tuple(range(step, num_teacher + 1, step))
    if not _are_layers(layers, num_layers, num_teacher):
        raise ValueError(
            f"{field}={','.join(map(str, layers))}: expected a layer of the teacher, 1 to "
            f"{num_teacher}, for each of the student's {num_layers}"
        )
    return layers


def _are_layers(layers: tuple[int, ...], num_layers: int, num_teacher: int) -> bool:
    return len(layers) == num_layers and all(1 <= layer <= num_teacher for layer in layers)


def _kind(layer: nn.Module) -> dict:
    """Returns the fields that distinguish a layer from others of its model."""
    names = {field.name for field in dataclasses.fields(layer)} - {"config", "parent", "name"}
    return {name: getattr(layer, name) for name in names}


def loss_weights(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns float32 weights, 1 where a loss counts: masked tokens, tokens, or pairs of tokens.

    Pairs, `[B, from, to]`, are of tokens that attend to each other: of the same sequence.
    """
    sequence_ids = batch["sequence_ids"]
    tokens = (sequence_ids > 0).astype(jnp.float32)
    pairs = (sequence_ids[:, :, None] == sequence_ids[:, None]) * tokens[:, None]
    masked = batch["target_weights"]
    of_tokens = dict.fromkeys(("cosine", "hidden", "embeddings"), tokens)
    return {"mlm": masked, "soft": masked, "attention": pairs} | of_tokens


def cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the cosine of the angle between vectors on the last axis, float32 `[...]`."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    squares = jnp.sum(x**2, axis=-1) * jnp.sum(y**2, axis=-1)
    return jnp.sum(x * y, axis=-1) * jax.lax.rsqrt(squares + 1e-12)


def mean_square(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Returns the mean of squared differences over `axis`, in float32."""
    return jnp.mean(jnp.square(x.astype(jnp.float32) - y.astype(jnp.float32)), axis=axis)


Objective = Distillation
