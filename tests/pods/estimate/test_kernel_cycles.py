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


def test_entries_of_kernels_have_the_names_that_the_report_looks_up():
    entries = {kernel_cycles.entry(shape) for shape in kernel_cycles.shapes("v4")}
    assert {
        "512 64 bfloat16 dropout",
        "512 128 bfloat16",  # ALBERT_XLARGE.
        "linear 512 768 768 bfloat16 dropout",
        "gelu 256 4096 1024 bfloat16 dropout",
        "gelu_tanh 512 3072 768 bfloat16",  # ALBERT_BASE.
    } <= entries
    # The kernels of v3 multiply no bfloat16 matrices.
    assert not any(
        "linear" in name for name in map(kernel_cycles.entry, kernel_cycles.shapes("v3"))
    )
