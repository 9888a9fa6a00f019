"""The cycles of a kernel, from the compiler's text of its schedule."""

import pytest

from bert_jax.pods.estimate import kernel_cycles
from bert_jax.pods.estimate.kernel_cycles import count_cycles

SCHEDULE = """
= control target key start
     0   :  { %s1 = inlined_call_operand.hbm [shape: s32[1], index: 0] }
 0x10 LB: > { %v1 = vld [vmem:[%s1] sm:$0xff]  ;;  %2 = vst [vmem:[%s3] sm:$0xff] /* (2,
0, 4) */  ;;  %9 = vdelay 4 }
 0x11   : > { %v4 = vadd.f32 %v1, %v1  ;;  %10 = vdelay 2 }
 0x12   : > { %5 = sbr.rel (!%p6) target = $region1  ;;  %11 = vnop }
 0x13   :  { %12 = vsyncpa [#allocation12], 1  ;;  %13 = vdelay 7 }
"""


def test_cycles_are_bundles_and_delays_of_the_loop_over_the_grid():
    assert count_cycles(SCHEDULE) == 3 + 4 + 2


BRANCHES = """
 0x10 LB: > { %v1 = vld [vmem:[%s1] sm:$0xff] }
 0x11   : > { %5 = sbr.rel (%p6) target = $region9 /* a copy */ }
 0x12   : > { %6 = dma.general %s2 }
 0x13 PF: > { %7 = vnop } /* Start/End empty region 9 */
 0x14   : > { %8 = sbr.rel (%p7) target = $region12 } /* End region 10 */
 0x15   : > { %v9 = vadd.f32 %v1, %v1 }
 0x16   : > { %v10 = vadd.f32 %v9, %v1  ;;  %11 = vdelay 3 }
 0x17   : > { %v12 = vadd.f32 %v9, %v1 }
 0x18 PF: > { %13 = vnop } /* Start/End empty region 12 :: Start region 13 */
 0x19   :  { %14 = vsyncpa [#allocation12], 1 }
"""


def test_branches_count_as_often_as_they_are_taken(monkeypatch):
    monkeypatch.setattr(kernel_cycles, "SHORTEST_BRANCH", 3)
    # Of the ten bundles in the loop, the branch has four, with three cycles more.
    assert count_cycles(BRANCHES) == 9 + 3
    assert count_cycles(BRANCHES, (1,)) == 9 + 3
    assert count_cycles(BRANCHES, (4,)) == 4 * 5 + 4 * (4 + 3)
    with pytest.raises(ValueError, match="1 branches: expected 2"):
        count_cycles(BRANCHES, (1, 1))


LOOPS = """
 0x10   :  { %1 = vnop }
 0x11 LB: > { %v1 = vld [vmem:[%s1] sm:$0xff] } /* Start region 1 */
 0x12 LB: >> { %v2 = vadd.f32 %v1, %v1 } /* Start region 2 :: Start region 3 */
 0x13   : > { %3 = sbr.rel (!%p6) target = $region2  ;;  %4 = vdelay 4 }
 0x14   : >> { %5 = vst [vmem:[%s1] sm:$0xff] /*vst_source=*/%v2 } /* End region 2 */
 0x15 LB: >> { %v6 = vadd.f32 %v1, %v1 } /* Start region 4 */
 0x16   : >> { %v7 = vadd.f32 %v1, %v1 }
 0x17 LB: >>> { %v8 = vadd.f32 %v1, %v1 } /* Start region 5 */
 0x18   : >> { %9 = sbr.rel (!%p7) target = $region5 }
 0x19   : >>> { %v10 = vadd.f32 %v1, %v1 } /* End region 5 */
 0x1a   : > { %11 = sbr.rel (!%p8) target = $region4 }
 0x1b   : >> { %12 = vnop } /* End region 4 */
 0x1c   : > { %13 = vnop }
 0x1d   :  { %14 = sbr.rel (!%p9) target = $region1 }
 0x1e   : > { %15 = vnop } /* End region 1 */
"""


def test_each_loop_has_its_own_cycles():
    # With its branch, and the bundle that is executed after it.
    assert kernel_cycles.count_loops(LOOPS) == [(0, 4), (1, 3 + 4), (1, 4), (2, 3)]
    assert kernel_cycles.long_attention_cycles(LOOPS, 1024, is_band=False) == {
        "program": 4,
        "tile": 4,  # Two in an iteration of seven cycles.
        "group": 4,
        "block": 3,
    }
    with pytest.raises(ValueError, match="the loops of the schedule are"):
        kernel_cycles.long_attention_cycles(LOOPS, 1024, is_band=True)


def test_rows_in_segments_have_loops_of_their_own(monkeypatch):
    # Prepares tiles and states, adds keys, finishes groups, and backward the tiles.
    loops = [(0, 4), (1, 6), (1, 5), (1, 7), (2, 9), (1, 11), (1, 2)]
    monkeypatch.setattr(kernel_cycles, "count_loops", lambda _: loops)
    cycles = kernel_cycles.long_attention_cycles("", 1024, is_band=False, is_segmented=True)
    assert cycles == {
        "program": 4,
        "tile": 4,
        "group": 7,
        "block": 9,
        "finish": 5 + 11,
        "next": 0,
    }
    # With a window, adds keys of the same segment, then of another.
    loops[4] = 1, 3
    cycles = kernel_cycles.long_attention_cycles("", 1024, is_band=True, is_segmented=True)
    assert cycles == {
        "program": 4,
        "tile": 4,
        "group": 7,
        "block": 0,
        "finish": 5 + 11,
        "next": 3,
    }


def test_entries_of_kernels_have_the_names_that_the_report_looks_up():
    entries = {
        kernel_cycles.entry(shape, kernel)
        for shape in kernel_cycles.shapes("v4")
        for kernel in ("forward", "backward")
    }
    assert {
        "512 64 bfloat16 dropout",
        "512 128 bfloat16",  # ALBERT_XLARGE.
        "long_64_keys512 256 bfloat16 dropout",  # BERT in rows of 2,048 tokens.
        "long_64_rotary_band256 512 bfloat16",  # ModernBERT's windows.
        "long_64_rotary_segments1024x2048_keys512 512 bfloat16",  # In rows of 8,192 tokens.
        "long_64_rotary_segments512x2048_keys512 512 bfloat16",  # Its gradient.
        "linear 512 768 768 bfloat16 dropout",
        "gelu 256 4096 1024 bfloat16 dropout",
        "gelu_tanh 512 3072 768 bfloat16",  # ALBERT_BASE.
        "gated_gelu 256 1152 768 bfloat16",  # ModernBERT-base.
        "gated_gelu 512 384 256 bfloat16",  # Ettin's smallest.
    } <= entries
    # The kernels of v3 multiply no bfloat16 matrices.
    assert not any(
        "linear" in name for name in map(kernel_cycles.entry, kernel_cycles.shapes("v3"))
    )
