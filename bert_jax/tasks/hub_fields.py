"""Finds the splits and columns of a data set of the Hugging Face Hub, for `config.data`."""

from absl import logging
from ml_collections import ConfigDict

from bert_jax.data import hub
from bert_jax.tasks.tables import with_split

SPLITS = {
    "train": ("train",),
    "dev": ("validation", "dev", "valid", "val", "eval", "validation_matched"),
    "test": ("test",),
}
"""Of each field of `config.data`, the names of a split, of which the first that exists is read."""
# Of a text, or a pair, where there is no column "text": those of GLUE, SNLI, and many others.
TEXT_COLUMNS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("sentence",),
)


def with_hub_fields(config: ConfigDict) -> ConfigDict:
    """Returns `config` with data.train, dev and test for `data.hub`, and the columns of its texts.

    The columns are also those of "hub:NAME" in data.train. Fields that are set remain. Raises
    ValueError if both data.hub and one of the others are set, or if there is no split to train on;
    and errors as `open_hub_splits`.
    """
    address = config.data.get("hub", "")
    train = config.data.get("train", "")
    names_train = isinstance(train, str) and train.startswith(hub.PREFIX)
    if not address and not names_train:
        return config
    config = config.copy_and_resolve_references()
    data = config.data
    if address:
        if given := next((name for name in SPLITS if data[name]), ""):
            fix = f"set one of them: data.{given}={hub.PREFIX}{address}#SPLIT reads a single split"
            raise ValueError(f"config.data.hub={address} and config.data.{given} are set: {fix}")
        data.update({"hub": ""} | find_splits(f"{hub.PREFIX}{address}"))
    data.train = with_split(data.train, "train")
    if "text" in data:
        found = find_columns(hub.open_hub(data.train).column_names, data)
        data.update(found)
        if found:
            shown = ", ".join(f"data.{name}={column}" for name, column in found.items())
            logging.info("%s: columns %s", data.train, shown)
    return config


def find_splits(source: str) -> dict[str, str]:
    """Returns data.train, and data.dev and data.test if they exist; logs splits that are not used.

    Raises ValueError without a split to train on.
    """
    if not hub.has_splits(source):
        return {"train": source}
    splits = list(hub.open_hub_splits(source))
    found = {
        field: next((name for name in names if name in splits), "")
        for field, names in SPLITS.items()
    }
    if not found["train"]:
        fix = f"set config.data.train={source}#SPLIT, in place of data.hub"
        raise ValueError(f"{source} has no split train, only {', '.join(splits)}: {fix}")
    fields = {field: f"{source}#{name}" for field, name in found.items() if name}
    logging.info("Data: %s", ", ".join(f"{field}={each}" for field, each in fields.items()))
    if not found["dev"]:
        expected = f"has no split {', '.join(SPLITS['dev'][:-1])} or {SPLITS['dev'][-1]}"
        fix = f"set data.train={source}#train[:90%] and data.dev={source}#train[90%:]"
        logging.warning("%s %s: no split selects the checkpoint. %s", source, expected, fix)
    if others := [name for name in splits if name not in found.values()]:
        fix = f"set data.train, data.dev and data.test={source}#SPLIT, in place of data.hub"
        logging.warning("Splits that are not used: %s. To use them, %s", ", ".join(others), fix)
    return fields


def find_columns(names: list[str], data: ConfigDict) -> dict[str, str]:
    """Returns the columns of texts and labels that have known `names`, by field of `config.data`.

    Only fields that have their default value, which `names` lacks; none if several fit, so that
    reading the data raises an error that lists the names.
    """
    found = {}
    known = [texts for texts in TEXT_COLUMNS if {*texts} <= {*names}]
    known = [texts for texts in known if not any({*texts} < {*others} for others in known)]
    if data.text == "text" and not data.text_pair and "text" not in names and len(known) == 1:
        found = dict(zip(("text", "text_pair"), known[0], strict=False))
    names_label = data.label != "label" or data.label_columns
    if not names_label and "label" not in names and "labels" in names:
        found["label"] = "labels"
    return found
