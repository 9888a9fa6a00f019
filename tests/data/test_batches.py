"""Batch `s` is the same rows for any devices and hosts, and evaluation sees every row once."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax import partitioning
from bert_jax.data.batches import (
    eval_batches,
    local_eval_batches,
    local_rows,
    train_batches,
)
from bert_jax.data.rows import Rows

BATCH = 16


class HostSharding:
    """A batch sharding as process `index` of `count` sees it: only its own devices answer."""

    def __init__(self, sharding, index: int, count: int):
        self.sharding, self.index, self.count = sharding, index, count

    def __getattr__(self, name):
        return getattr(self.sharding, name)

    def addressable_devices_indices_map(self, shape):
        slices = sorted(
            self.sharding.devices_indices_map(shape).items(), key=lambda item: item[0].id
        )
        each = len(slices) // self.count
        return dict(slices[self.index * each : (self.index + 1) * each])


def sharding_over(num_devices: int):
    return partitioning.batch_sharding(partitioning.make_mesh(devices=jax.devices()[:num_devices]))


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_the_hosts_parts_are_the_batch_of_one_host(corpus, num_hosts):
    rows = Rows(corpus, "train", shuffle_seed=0)
    for step in (0, 3, 40):  # 40 is epochs later.
        whole = rows.stream(step * BATCH, (step + 1) * BATCH)
        parts = []
        for host in range(num_hosts):
            start, stop = local_rows(HostSharding(sharding_over(8), host, num_hosts), BATCH)
            assert stop - start == BATCH // num_hosts
            # Each host opens the corpus for itself.
            own = Rows(corpus, "train", shuffle_seed=0)
            parts.append(own.stream(step * BATCH + start, step * BATCH + stop))
        for name in whole:
            np.testing.assert_array_equal(
                whole[name], np.concatenate([part[name] for part in parts])
            )


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "tensor": 4}])
def test_any_mesh_holds_the_same_batches(corpus, axes):
    rows = Rows(corpus, "train", shuffle_seed=0)
    sharding = partitioning.batch_sharding(partitioning.make_mesh(**({"data": 1} | axes)))
    batches = list(train_batches(rows, sharding, BATCH, 0, 3))
    assert len(batches) == 3
    for step, batch in enumerate(batches):
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


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_evaluation_parts_of_hosts_add_up(corpus, num_hosts):
    rows = Rows(corpus, "heldout")
    seen = []
    for host in range(num_hosts):
        sharding = HostSharding(sharding_over(8), host, num_hosts)
        batches = list(local_eval_batches(rows, sharding, 64))
        # As many batches of one size on each host, though the last rows are on the first alone.
        assert len(batches) == -(-rows.num_rows // 64)
        assert {len(batch["tokens"]) for batch in batches} == {64 // num_hosts}
        for batch in batches:
            seen += batch["row_ids"][batch["row_weights"] > 0].tolist()
    assert sorted(seen) == list(range(rows.num_rows))


def test_batch_that_the_devices_do_not_divide_is_an_error():
    with pytest.raises(ValueError, match="batch_size 12 is not divisible by the 8 devices"):
        local_rows(sharding_over(8), 12)


def test_rows_of_one_process_must_adjoin():
    mesh = partitioning.make_mesh()
    odd = NamedSharding(mesh, P("data"))

    class Scattered(HostSharding):
        def addressable_devices_indices_map(self, shape):
            return dict(list(self.sharding.devices_indices_map(shape).items())[::2])

    with pytest.raises(ValueError, match="do not adjoin"):
        local_rows(Scattered(odd, 0, 1), BATCH)
