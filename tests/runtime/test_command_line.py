"""Invalid flags give a one-line message that helps to correct them."""

import pytest
from absl import flags
from ml_collections import config_flags

from bert_jax.runtime.command_line import parse_flags


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data.train=", "there is no field 'train'; there are directory, labels, metric, name"),
        ("grid.x=1", "there is no field 'grid'; there are batch_size, clip_norm, data, "),
        ("learning_rat=1", "'learning_rat': Did you mean \"learning_rate\""),
    ],
)
def test_unknown_field_is_named_with_the_known_ones(argument, message, monkeypatch):
    arguments = ["--config=configs/finetune/glue.py:mrpc", f"--config.{argument}"]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    monkeypatch.setattr(flags, "FLAGS", values)
    monkeypatch.setattr("sys.argv", ["finetune.py"])
    with pytest.raises(SystemExit) as exited:
        parse_flags(["finetune", *arguments])
    assert str(exited.value).startswith(f"finetune: {message}")
