"""A small pre-training run, a run that is stopped, and what a run saved."""

import contextlib

import jax
import pytest

import bert_jax
from bert_jax.configs.pretrain import bert_tiny


def small_config(corpus, long_corpus=None, **changes):
    config = bert_tiny.get_config("runlocal")
    config.model.num_layers = 1  # Compiles faster; tests of models and steps have two.
    config.corpus = str(corpus)
    config.long_phase.num_steps = 3 if long_corpus else 0
    config.long_phase.corpus = str(long_corpus or "")
    config.num_steps = 6
    config.log_every = 2
    config.eval_every = 3
    config.checkpoint_every = 2
    config.batch_size = config.eval_batch_size = 8
    config.update(changes)
    return config.lock()


def saved_params(workdir) -> dict:
    return jax.device_get(bert_jax.load(workdir).params)


class Stopped(Exception):
    """Ends a run."""


@contextlib.contextmanager
def stopped_after_save(main):
    """Ends a run of `main`, the module of a program, when its first checkpoint is written."""

    class StoppingCheckpointer(main.Checkpointer):
        def save(self, state):
            super().save(state)
            self.wait()
            raise Stopped

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(main, "Checkpointer", StoppingCheckpointer)
        yield
