"""What the kernels share: products, and float32 copies of blocks for chips that need them."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # Of a vector register.


def needs_float32(device_kind: str) -> bool:
    """Returns whether the kernel is to compute on float32 copies of bfloat16 blocks.

    Kernels on v2 and v3 multiply no bfloat16 matrices, only float32 ones, which the matrix unit
    rounds. Each conversion takes them ten instructions, of which none overlap.
    """
    return device_kind in ("TPU v2", "TPU v3")


class BlockedArray(NamedTuple):
    """The blocks in which programs read or write an array, and its shape."""

    spec: pl.BlockSpec
    shape: jax.ShapeDtypeStruct


class Float32Copy:
    """A bfloat16 block `[rows, length, lanes]`, copied so that kernels read and write float32.

    A 32-bit word of the block holds two positions, the odd one in its high bits. `buffer` is
    `[parts, rows, length, LANES]`: only arrays of LANES lanes have strides.
    """

    def __init__(self, block, buffer):
        self.block, self.buffer = block, buffer
        self.shape, self.dtype = block.shape, buffer.dtype

    @staticmethod
    def allocate(spec: pl.BlockSpec):
        """Returns the buffer for the block of `spec`."""
        *_, rows, length, lanes = spec.block_shape
        return pltpu.VMEM((lanes // LANES, rows, length, LANES), jnp.float32)

    def __getitem__(self, index):
        return self.buffer[self._place(*index)]

    def __setitem__(self, index, x):
        self.buffer[self._place(*index)] = x

    def _place(self, row, positions, lanes):
        return (lanes.start or 0) // LANES, row, positions

    def unpack(self):
        """Copies the block to the buffer."""
        for words, halves in self._words():
            bits = pltpu.bitcast(self.block[words], jnp.int32)
            for (copy, positions), x in zip(halves, (bits << 16, bits & -(2**16)), strict=True):
                copy[positions, :] = lax.bitcast_convert_type(x, jnp.float32)

    def pack(self):
        """Copies the buffer to the block, rounded to nearest, ties to even."""
        for words, halves in self._words():
            bits = (lax.bitcast_convert_type(x[at, :], jnp.int32) for x, at in halves)
            even, odd = (x + 2**15 - 1 + (lax.shift_right_logical(x, 16) & 1) for x in bits)
            bits = lax.shift_right_logical(even, 16) | (odd & -(2**16))
            self.block[words] = pltpu.bitcast(bits, self.block.dtype)

    def _words(self):
        """Yields the place of each tile in the block, and where its even and odd positions are."""
        parts, rows, length, _ = self.buffer.shape
        for part, row, start in itertools.product(range(parts), range(rows), range(0, length, 8)):
            halves = [
                (self.buffer.at[part, row], pl.ds(start + first, 4, stride=2)) for first in (0, 1)
            ]
            lanes = slice(part * LANES, (part + 1) * LANES)
            yield (row, pl.ds(start, 8), lanes), halves


def dot(left, right, left_axis: int, right_axis: int):
    """Returns the float32 product of matrices, summed over an axis of each."""
    axes = ((left_axis,), (right_axis,)), ((), ())
    return lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


def kernel_name(kernel: Callable, variant: str | int, has_dropout: bool) -> str:
    """Returns the name of a kernel in a compiled program, by which `hlo_cost` finds it."""
    return f"{kernel.__name__.strip('_')}_{variant}" + ("_dropout" if has_dropout else "")
