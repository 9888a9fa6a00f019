"""Batch `s` has the same rows on any devices and hosts; evaluation sees every row once."""

import jax
import numpy as np
import pytest

from bert_jax.data import batches
from bert_jax.data.batches import heldout_batches, local_row_ranges, pretrain_batches
from bert_jax.data.rows import Rows
from bert_jax.sharding.mesh import batch_sharding, make_mesh

BATCH = 16


class HostSharding:
    """A batch sharding as process `index` of `count` sees it, with only its own devices.

    Its devices are contiguous in the mesh, or alternate with the devices of other processes.
    """

    def __init__(self, sharding, index: int, count: int, contiguous: bool = True):
        self.sharding, self.index, self.count, self.contiguous = sharding, index, count, contiguous

    def __getattr__(self, name):
        return getattr(self.sharding, name)

    def addressable_devices_indices_map(self, shape):
        slices = sorted(
            self.sharding.devices_indices_map(shape).items(), key=lambda item: item[0].id
        )
        size = len(slices) // self.count
        block = slice(self.index * size, (self.index + 1) * size)
        return dict(slices[block] if self.contiguous else slices[self.index :: self.count])


def sharding_over(num_devices: int):
    return batch_sharding(make_mesh(devices=jax.devices()[:num_devices]))


@pytest.fixture
def local_batches_only(monkeypatch):
    """Leaves batches as this host's rows, since one process cannot hold the rows of other hosts."""
    monkeypatch.setattr(batches, "make_global_batch", lambda batch, sharding, batch_size: batch)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_rows_of_all_hosts_are_the_batch_of_one_host(
    corpus, local_batches_only, num_hosts, contiguous
):
    rows = Rows(corpus, "train", shuffle_seed=0)
    positions, parts = [], []
    for host in range(num_hosts):
        sharding = HostSharding(sharding_over(8), host, num_hosts, contiguous)
        ranges = local_row_ranges(sharding, BATCH)
        assert len(ranges) == (1 if contiguous or num_hosts == 1 else 8 // num_hosts)
        positions += [position for start, stop in ranges for position in range(start, stop)]
        # Each host opens the corpus itself.
        host_rows = Rows(corpus, "train", shuffle_seed=0)
        parts.append(list(pretrain_batches(host_rows, sharding, BATCH, 0, 41)))
    assert sorted(positions) == list(range(BATCH))
    for step in (0, 3, 40):  # 40 is epochs later.
        whole = rows.read(step * BATCH, (step + 1) * BATCH)
        for name, values in whole.items():
            joined = np.concatenate([part[step][name] for part in parts])
            np.testing.assert_array_equal(values[positions], joined)


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "tensor": 4}])
def test_batches_are_the_same_on_any_mesh(corpus, axes):
    rows = Rows(corpus, "train", shuffle_seed=0)
    sharding = batch_sharding(make_mesh(**({"data": 1} | axes)))
    batches = list(pretrain_batches(rows, sharding, BATCH, 0, 3))
    assert len(batches) == 3
    for step, batch in enumerate(batches):
        expected = rows.read(step * BATCH, (step + 1) * BATCH)
        for name in expected:
            np.testing.assert_array_equal(np.asarray(batch[name]), expected[name])


def test_resuming_gives_the_same_batches(corpus):
    rows = Rows(corpus, "train", shuffle_seed=0)
    sharding = sharding_over(1)
    from_start = list(pretrain_batches(rows, sharding, BATCH, 0, 12))
    resumed = list(pretrain_batches(rows, sharding, BATCH, 7, 12))
    assert len(resumed) == 5
    for expected, batch in zip(from_start[7:], resumed, strict=True):
        np.testing.assert_array_equal(batch["tokens"], expected["tokens"])
        np.testing.assert_array_equal(batch["epochs"], expected["epochs"])


def test_batches_of_an_epoch_hold_every_row_once(corpus):
    rows = Rows(corpus, "train", shuffle_seed=0)
    num_batches = -(-rows.num_rows // 8)
    seen = np.concatenate(
        [
            np.asarray(batch["row_ids"])[np.asarray(batch["epochs"]) == 0]
            for batch in pretrain_batches(rows, sharding_over(8), 8, 0, num_batches)
        ]
    )
    np.testing.assert_array_equal(np.sort(seen), np.arange(rows.num_rows))


def test_evaluation_sees_every_row_exactly_once(corpus):
    rows = Rows(corpus, "heldout")
    assert rows.num_rows % BATCH, "this test needs a partial last batch"
    seen = []
    for batch in heldout_batches(rows, sharding_over(8), BATCH):
        seen += np.asarray(batch["row_ids"])[np.any(batch["tokens"], axis=1)].tolist()
        assert batch["tokens"].shape[0] == BATCH
    assert sorted(seen) == list(range(rows.num_rows))


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("num_hosts", [2, 4])
def test_evaluation_rows_of_all_hosts_are_every_row_once(
    corpus, local_batches_only, num_hosts, contiguous
):
    rows = Rows(corpus, "heldout")
    seen = []
    for host in range(num_hosts):
        sharding = HostSharding(sharding_over(8), host, num_hosts, contiguous)
        batches = list(heldout_batches(rows, sharding, 64))
        # Every host has equally many batches of one size, though only the first has the last rows.
        assert len(batches) == -(-rows.num_rows // 64)
        assert {len(batch["tokens"]) for batch in batches} == {64 // num_hosts}
        positions = [
            position for bounds in local_row_ranges(sharding, 64) for position in range(*bounds)
        ]
        for number, batch in enumerate(batches):
            real = [
                number * 64 + position
                for position in positions
                if number * 64 + position < rows.num_rows
            ]
            assert batch["row_ids"][batch["tokens"].any(axis=1)].tolist() == real
            seen += real
    assert sorted(seen) == list(range(rows.num_rows))
