"""Batch `s` is the same rows for any devices and hosts, and evaluation sees every row once."""

import jax
import numpy as np
import pytest

from bert_jax import partitioning
from bert_jax.data import batches
from bert_jax.data.batches import (
    eval_batches,
    local_eval_batches,
    local_rows,
    train_batches,
)
from bert_jax.data.rows import Rows

BATCH = 16


class HostSharding:
    """A batch sharding as process `index` of `count` sees it: only its own devices answer.

    Its devices adjoin in the mesh, or take turns with those of the others.
    """

    def __init__(self, sharding, index: int, count: int, adjoin: bool = True):
        self.sharding, self.index, self.count, self.adjoin = sharding, index, count, adjoin

    def __getattr__(self, name):
        return getattr(self.sharding, name)

    def addressable_devices_indices_map(self, shape):
        slices = sorted(
            self.sharding.devices_indices_map(shape).items(), key=lambda item: item[0].id
        )
        each = len(slices) // self.count
        own = slice(self.index * each, (self.index + 1) * each)
        return dict(slices[own] if self.adjoin else slices[self.index :: self.count])


def sharding_over(num_devices: int):
    return partitioning.batch_sharding(partitioning.make_mesh(devices=jax.devices()[:num_devices]))


@pytest.fixture
def parts_only(monkeypatch):
    """Batches stay this host's part of them: one process cannot place those of others."""
    monkeypatch.setattr(batches, "place", lambda batch, sharding, batch_size: batch)


@pytest.mark.parametrize("adjoin", [True, False])
@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_the_hosts_parts_are_the_batch_of_one_host(corpus, parts_only, num_hosts, adjoin):
    rows = Rows(corpus, "train", shuffle_seed=0)
    places, parts = [], []
    for host in range(num_hosts):
        sharding = HostSharding(sharding_over(8), host, num_hosts, adjoin)
        ranges = local_rows(sharding, BATCH)
        assert len(ranges) == (1 if adjoin or num_hosts == 1 else 8 // num_hosts)
        places += [place for start, stop in ranges for place in range(start, stop)]
        # Each host opens the corpus for itself.
        own = Rows(corpus, "train", shuffle_seed=0)
        parts.append(list(train_batches(own, sharding, BATCH, 0, 41)))
    assert sorted(places) == list(range(BATCH))
    for step in (0, 3, 40):  # 40 is epochs later.
        whole = rows.stream(step * BATCH, (step + 1) * BATCH)
        for name, values in whole.items():
            found = np.concatenate([part[step][name] for part in parts])
            np.testing.assert_array_equal(values[places], found)


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "tensor": 4}])
def test_any_mesh_holds_the_same_batches(corpus, axes):
    rows = Rows(corpus, "train", shuffle_seed=0)
    sharding = partitioning.batch_sharding(partitioning.make_mesh(**({"data": 1} | axes)))
    found = list(train_batches(rows, sharding, BATCH, 0, 3))
    assert len(found) == 3
    for step, batch in enumerate(found):
        expected = rows.stream(step * BATCH, (step + 1) * BATCH)
        for name in expected:
            np.testing.assert_array_equal(np.asarray(batch[name]), expected[name])


def test_starting_later_gives_the_same_later_batches(corpus):
    rows = Rows(corpus, "train", shuffle_seed=0)
    sharding = sharding_over(1)
    from_start = list(train_batches(rows, sharding, BATCH, 0, 12))
    resumed = list(train_batches(rows, sharding, BATCH, 7, 12))
    assert len(resumed) == 5
    for one, two in zip(from_start[7:], resumed, strict=True):
        np.testing.assert_array_equal(one["tokens"], two["tokens"])
        np.testing.assert_array_equal(one["epochs"], two["epochs"])


def test_an_epoch_of_batches_holds_every_row_once(corpus):
    rows = Rows(corpus, "train", shuffle_seed=0)
    num_batches = -(-rows.num_rows // 8)
    seen = np.concatenate(
        [
            np.asarray(batch["row_ids"])[np.asarray(batch["epochs"]) == 0]
            for batch in train_batches(rows, sharding_over(8), 8, 0, num_batches)
        ]
    )
    np.testing.assert_array_equal(np.sort(seen), np.arange(rows.num_rows))


def test_evaluation_sees_every_row_exactly_once(corpus):
    rows = Rows(corpus, "heldout")
    assert rows.num_rows % BATCH, "the last batch must be a partial one for this test to bite"
    seen, weights = [], 0.0
    for batch in eval_batches(rows, sharding_over(8), BATCH):
        real = np.asarray(batch["row_weights"]) > 0
        seen += np.asarray(batch["row_ids"])[real].tolist()
        weights += float(batch["row_weights"].sum())
        assert batch["tokens"].shape[0] == BATCH
    assert sorted(seen) == list(range(rows.num_rows)) and weights == rows.num_rows


@pytest.mark.parametrize("adjoin", [True, False])
@pytest.mark.parametrize("num_hosts", [2, 4])
def test_evaluation_parts_of_hosts_add_up(corpus, num_hosts, adjoin):
    rows = Rows(corpus, "heldout")
    seen = []
    for host in range(num_hosts):
        sharding = HostSharding(sharding_over(8), host, num_hosts, adjoin)
        found = list(local_eval_batches(rows, sharding, 64))
        # As many batches of one size on each host, though the last rows are on the first alone.
        assert len(found) == -(-rows.num_rows // 64)
        assert {len(batch["tokens"]) for batch in found} == {64 // num_hosts}
        places = [place for each in local_rows(sharding, 64) for place in range(*each)]
        for number, batch in enumerate(found):
            real = [number * 64 + place for place in places if number * 64 + place < rows.num_rows]
            assert batch["row_ids"][batch["row_weights"] > 0].tolist() == real
            seen += real
    assert sorted(seen) == list(range(rows.num_rows))


def test_batch_that_the_devices_do_not_divide_is_an_error():
    with pytest.raises(ValueError, match="batch_size 12 is not divisible by the 8 devices"):
        local_rows(sharding_over(8), 12)
