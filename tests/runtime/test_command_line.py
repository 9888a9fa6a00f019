"""Wrong flags end in a line that says what is meant."""

import pytest
from absl import flags
from ml_collections import config_flags

from bert_jax.runtime.flag_errors import parse_flags


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data.train=", "there is no field 'train'; there are directory, labels, metric, name"),
        ("grid.x=1", "there is no field 'grid'; there are batch_size, clip_norm, data, "),
        ("learning_rat=1", "'learning_rat': Did you mean \"learning_rate\""),
    ],
)
def test_field_that_is_not_there_is_named_beside_those_that_are(argument, message, monkeypatch):
    arguments = ["--config=configs/finetune/glue.py:mrpc", f"--config.{argument}"]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    monkeypatch.setattr(flags, "FLAGS", values)
    monkeypatch.setattr("sys.argv", ["finetune.py"])
    with pytest.raises(SystemExit) as ended:
        parse_flags(["finetune", *arguments])
    assert str(ended.value).startswith(f"finetune: {message}")
