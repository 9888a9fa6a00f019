"""Which head and which parameters a task takes over from the weights that it starts from."""

from collections.abc import Mapping
from types import ModuleType

from absl import logging
from ml_collections import ConfigDict

from bert_jax.model.heads import HEADS, Head


def use_labels_of_head(config: ConfigDict, module: ModuleType, found: Mapping | None) -> ConfigDict:
    """Returns `config` with the labels of the head `found`, if it has neither labels nor train.

    Args:
      config: of the fine-tuning.
      module: file of the task.
      found: description of the head that the weights have, None without one.

    Raises:
      ValueError: labels are needed and there is no head for the task, or as `check_same_head`.
    """
    data = config.data
    # An empty flag is parsed as one empty label.
    if data.get("train", True) or "labels" not in data or any(map(str, data.labels)):
        return config
    head: Head | None = module.get_head(config) if hasattr(module, "get_head") else None
    if not found or (head and head.name != found["task"]):
        has = f"a head for {found['task']}, not for {head.name}" if found else "no head"
        fix = ""
        if found and {head.name, found["task"]} == {"classification", "regression"}:
            fix = f", or set --config.data.regression={found['task'] == 'regression'}"
        raise ValueError(
            f"there is nothing to train on, and {config.init_from} has {has}: give "
            "--config.data.train=FILE, or as --config.init_from the workdir of a run that trained "
            f"one{fix}"
        )
    check_same_head(found, data)
    config = config.copy_and_resolve_references()
    config.data.labels = tuple(found["labels"])
    return config


def initial_params(params: Mapping, found: Mapping | None, wanted: Mapping, new_head: bool) -> dict:
    """Returns the parameters to start from: the encoder's, and the head's if it fits the task.

    Args:
      params: as read, with "head" if there is one.
      found: description of that head in the settings.
      wanted: description of the task's head.
      new_head: whether to initialize a new head in any case.

    Raises:
      ValueError: the head has other labels, or as `check_same_head`.
    """
    bert = dict(params["bert"])
    if not HEADS[wanted["task"]].pooled:
        bert.pop("pooler", None)
    elif "pooler" not in bert:
        logging.warning("The weights have no pooler: it is randomly initialized, as the head is")
    if "head" not in params:
        return {"bert": bert}
    if found["task"] != wanted["task"] or new_head:
        why = "new_head is set" if new_head else f"this task needs a head for {wanted['task']}"
        logging.info("Ignoring the head for %s in the weights: %s", found["task"], why)
        return {"bert": bert}
    check_same_head(found, wanted)
    # A regression's label is only a name.
    if found["labels"] != wanted["labels"] and wanted["task"] != "regression":
        raise ValueError(
            f"the weights have a head for the labels {', '.join(found['labels'])}, and the task "
            f"has {', '.join(wanted['labels'])}: set --config.new_head=True for a new head, or "
            "give the labels in the head's order in --config.data.labels"
        )
    if "scheme" in wanted and "scheme" not in found:
        logging.warning(
            "The head does not record its tagging scheme: assuming --config.data.scheme=%s",
            wanted["scheme"],
        )
    logging.info("Starting from the head in the weights, which has these labels")
    return {"bert": bert, "head": params["head"]}


def check_same_head(found: Mapping, given: Mapping) -> None:
    """Raises ValueError if both describe a head's features or tags, and differently."""
    for flag in ("features", "lstm_size", "data.scheme", "data.document_context"):
        name = flag.removeprefix("data.")
        if name in found and name in given and found[name] != given[name]:
            raise ValueError(
                f"the weights have a head with {name}={found[name]}, and the task has "
                f"{given[name]}: set --config.new_head=True for a new head, or "
                f"--config.{flag}={found[name]}"
            )
