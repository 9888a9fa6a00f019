"""The cycles of a kernel, from the compiler's text of its schedule."""

from bert_jax.tools.kernel_cycles import count_cycles

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
