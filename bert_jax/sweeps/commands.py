"""The command that runs a trial of a sweep alone."""

import json
import keyword
import shlex

from absl import flags
from ml_collections import ConfigDict

from bert_jax.finetuning.finetune_fields import known_fields
from bert_jax.runtime.command_line import define_config
from bert_jax.runtime.config_fields import flatten


def read_config(path: str) -> ConfigDict:
    """Returns the configuration that `--config=path` reads. Raises ValueError."""
    values, argv = flags.FlagValues(), ["finetune", f"--config={path}"]
    define_config("", known_fields, values, argv)
    try:
        values(argv)
    except (flags.Error, OSError) as error:
        raise ValueError(
            f"config.base_config={path}: {error}. Expected the --config of bert_jax.finetune, "
            "such as configs/finetune/glue.py:mrpc"
        ) from error
    return values.config


def finetune_command(base_config: str, trial: ConfigDict, workdir: str) -> str:
    """Returns the command that fine-tunes with the configuration `trial`, a flag a line.

    `base_config` is the path and argument of the file that `base` of the sweep is from. Empty if it
    is, or if no flags turn its configuration into `trial`.
    """
    if not base_config:
        return ""
    default, wanted = flatten(read_config(base_config)), flatten(trial)
    changed = {
        name: value for name, value in wanted.items() if repr(default.get(name)) != repr(value)
    }
    if default.keys() != wanted.keys() or None in changed.values():
        return ""
    parts = [f"python -m bert_jax.finetune --config={shlex.quote(base_config)}"]
    parts += [f"--workdir={shlex.quote(workdir)}"]
    parts += [f"--config.{name}={shlex.quote(flag_text(v))}" for name, v in changed.items()]
    return " \\\n    ".join(parts)


def flag_text(value: object) -> str:
    """Returns text that a flag parses as `value`, if possible one that needs no shell quotes.

    For example, returns "balanced" for ("balanced",), and "1.0,2.5" for (1.0, 2.5).
    """
    if not isinstance(value, tuple | list):
        return str(value)
    if len(value) == 1 and isinstance(value[0], str):
        if value[0].isidentifier() and not keyword.iskeyword(value[0]):
            return value[0]
    elif len(value) > 1 and all(type(each) in (int, float) for each in value):
        return ",".join(map(repr, value))
    # Double quotes, because the shell quotes are single.
    texts = [
        json.dumps(each, ensure_ascii=False) if isinstance(each, str) else repr(each)
        for each in value
    ]
    return f"({', '.join(texts)}{',' * (len(value) == 1)})"
