"""What a model is pre-trained for: one file each, named by `config.objective`.

A file offers `Objective`, a frozen dataclass with

- `causal`, whether the model is left to right, and `main_loss`, the name of its main loss;
- `rules`, the sharding of parameters that its model adds to an architecture's;
- `max_predictions(config, given, length)`: the maximum number of targets per row;
- `from_config(config, tokenizer, max_predictions)`: the objective of a phase;
- `make_model(model_config, execution)`, and `example_batch()` to initialize it; the model has a
  `config` and an `execution`, its encoder's parameters are at "encoder" and, if there are others,
  `encoders` has the configuration of each by its path;
- `prepare(rows, key)`: the batch of packed rows, on the device that holds them;
- `counts(batch)`: what each loss is normalized by, over the global batch;
- `total_loss(losses)`: the loss to minimize, from the mean of each;
- `sums(model, params, batch, dropout)`: sums of losses and any correct predictions, and counts, as
  `training.pretrain_step.mean_metrics` names them;
- `flops_per_row(model_config, length, max_sequences)`.

One that learns from a teacher also has `with_teacher(settings)`, the objective with that teacher;
`frozen_params(teacher_params)`, which the step adds to the `params` of `sums` but does not update;
and `initial_params(teacher_params, modules)`, for a student that starts from the teacher.
"""
