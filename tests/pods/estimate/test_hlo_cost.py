"""Cycles, FLOPs and collectives of HLO text, handwritten and compiled for the CPU."""

import json

import jax
import jax.numpy as jnp
import pytest

from bert_jax.pods.chips import CHIPS
from bert_jax.pods.estimate import hlo_cost, hlo_text, kernel_cycles

# A loop of three trips with a matrix product, an all-reduce and a sort; then an update.
MODULE = """
HloModule step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%fused (p: bf16[8,16], q: bf16[16,32]) -> bf16[8,32] {
  %p = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %q = bf16[16,32]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %product = bf16[8,32]{1,0:T(8,128)(2,1)} convolution(%p, %q), dim_labels=bf_io->bf
}

%body (state: (s32[], bf16[8,32])) -> (s32[], bf16[8,32]) {
  %state = (s32[]{:T(128)}, bf16[8,32]{1,0:T(8,128)(2,1)}) parameter(0)
  %left = bf16[8,16]{1,0} constant({...})
  %right = bf16[16,32]{1,0} constant({...})
  %dense = bf16[8,32]{1,0:T(8,128)(2,1)} fusion(%left, %right), kind=kOutput, calls=%fused, \
metadata={op_name="jit(update_step)/jvp(PretrainingModel)/encoder/while/body/layers/query/\
dot_general"}, backend_config={"window_config":{"estimated_cycles":"100"}}
  %reduced = bf16[8,32]{1,0} all-reduce(%dense), replica_groups=REPLICAS, to_apply=%add
  %order = s32[8]{0} sort(%keys), dimensions={0}, to_apply=%add
  %index = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %next = (s32[], bf16[8,32]{1,0}) tuple(%index, %reduced)
}

%condition (state: (s32[], bf16[8,32])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, bf16[8,32]{1,0:T(8,128)(2,1)}) parameter(0)
  %bound = s32[]{:T(128)} constant(3)
  %index.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%index.1, %bound), direction=LT
}

ENTRY %main (start: (s32[], bf16[8,32])) -> bf16[8,32] {
  %start = (s32[], bf16[8,32]{1,0}) parameter(0)
  %loop = (s32[], /*index=1*/bf16[8,32]{1,0}) while(%start), condition=%condition, body=%body
  %result = bf16[8,32]{1,0} get-tuple-element(%loop), index=1
  ROOT %update = bf16[8,32]{1,0} fusion(%result), kind=kLoop, calls=%add, \
metadata={op_name="jit(update_step)/mul"}, backend_config={"estimated_cycles":"7"}
}
"""


def cost_of(replicas: str = "{{0,1,2,3},{4,5,6,7}}", **changes: str) -> hlo_cost.Cost:
    text = MODULE.replace("REPLICAS", replicas)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return hlo_cost.step_cost(text)


def test_loop_body_counts_once_per_trip():
    cost = cost_of()
    assert cost.cycles == {("attention", "forward"): 300, ("optimizer", "update"): 7}
    assert cost.cycles.total() == 307
    assert cost.flops == 3 * 2 * 8 * 16 * 32
    assert [(cycles, runs) for cycles, runs, _ in cost.costliest] == [(300, 3), (7, 1)]
    assert cost.loops_counted_once == []


def test_noted_trip_count_has_precedence_over_the_loop_condition():
    noted = 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    assert cost_of(**{"body=%body": noted}).cycles[("attention", "forward")] == 500


def test_loop_with_unknown_trip_count_is_reported_and_counted_once():
    cost = cost_of(**{"constant(3)": "parameter(1)"})
    assert cost.loops_counted_once == ["loop"] and cost.cycles.total() == 107


def test_loop_counts_as_often_as_the_caller_says_if_the_program_does_not():
    text = MODULE.replace("REPLICAS", "{{0,1,2,3},{4,5,6,7}}").replace(
        "constant(3)", "parameter(1)"
    )
    cost = hlo_cost.step_cost(text, unknown_trips=4)
    assert cost.loops_counted_once == [] and cost.cycles.total() == 407
    assert cost.exposed_link_bytes == 4 * hlo_cost.step_cost(text).exposed_link_bytes > 0


def test_instruction_without_estimate_is_reported():
    assert cost_of().without_estimate == {"sort": 3}
    cost = cost_of(**{'"estimated_cycles":"7"': f'"estimated_cycles":"{2**63 - 1}"'})
    assert cost.without_estimate == {"sort": 3, "update": 1}


def test_custom_kernel_is_reported_by_its_target():
    kernel = 'custom-call(%keys), custom_call_target="tpu_custom_call"'
    cost = cost_of(**{"sort(%keys), dimensions={0}, to_apply=%add": kernel})
    assert cost.without_estimate == {"tpu_custom_call": 3}


@pytest.mark.parametrize(
    ("replicas", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[2,8]<=[16]", 8),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", 8),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", 2),
    ],
)
def test_link_bytes_of_an_all_reduce_depend_on_the_group_size(replicas, size):
    record = cost_of(replicas).collectives["all-reduce"]
    payload = 8 * 32 * 2
    assert (record["count"], record["bytes"]) == (3, 3 * payload)
    assert record["link_bytes"] == pytest.approx(3 * 2 * payload * (size - 1) / size)


def test_groups_in_an_unknown_notation_are_an_error():
    with pytest.raises(ValueError, match="expected groups of devices in one of three notations"):
        cost_of("everyone")


def test_all_reduce_to_a_wider_dtype_counts_its_result():
    wide = cost_of(**{"%reduced = bf16[8,32]{1,0}": "%reduced = f32[8,32]{1,0}"})
    assert wide.collectives["all-reduce"]["bytes"] == 3 * 8 * 32 * 4


def test_steps_of_one_channel_count_as_one_collective():
    reduce = "all-reduce(%dense), channel_id=5, replica_groups={{0,1}}"
    steps = cost_of(
        **{
            "all-reduce(%dense)": f"{reduce}\n  %again = bf16[8,32]{{1,0}} {reduce}",
            "kind=kLoop, calls=%add": "kind=kLoop, calls=%step",
            "%fused (p": f"%step (p: bf16[8,32]) -> bf16[8,32] {{\n  %dense = bf16[8,32]{{1,0}} "
            f"parameter(0)\n  ROOT %part = bf16[8,32]{{1,0}} {reduce}\n}}\n\n%fused (p",
        }
    )
    assert steps.collectives == cost_of("{{0,1}}").collectives  # Three trips, not seven.


def test_all_gather_counts_the_gathered_array_and_reduce_scatter_half_an_all_reduce():
    gather = cost_of(**{"all-reduce(%dense)": "all-gather(%dense)"}).collectives["all-gather"]
    assert gather["bytes"] == 3 * 4 * 8 * 32 * 2
    scatter = cost_of(
        **{
            "%add (a": "%all-reduce-scatter.1 (a",
            "ROOT %sum = f32[]{:T(128)} add(%a, %b)": "ROOT %sum = f32[] all-reduce(%a), "
            "replica_groups={{0,1}}",
            "fusion(%result), kind=kLoop, calls=%add": "fusion(%result), kind=kCustom, "
            "calls=%all-reduce-scatter.1",
        }
    ).collectives["reduce-scatter"]
    assert scatter == {"count": 1, "bytes": 4, "link_bytes": 2}


def test_collectives_are_listed_by_kind_and_arrays_in_order_of_bytes():
    name = 'metadata={op_name="jit(f)/NAME"}'
    again = f"channel_id=1, replica_groups={{{{0,1}}}}, {name}"
    gather = f"%all = f32[16,32]{{1,0:T(8,128)}} all-gather(%dense), {again}"
    collectives = cost_of(
        **{
            "%order =": "\n  ".join(
                gather.replace("%all", f"%all.{place}").replace("NAME", place) for place in "ab"
            )
            + "\n  %order ="
        }
    ).largest_collectives
    # Two gathers of one channel, as explicit ones have it, but from different places in the model.
    assert list(collectives) == ["all-gather f32[16,32]", "all-reduce bf16[8,32]"]
    assert collectives["all-gather f32[16,32]"]["count"] == 2 * 3
    assert collectives["all-gather f32[16,32]"]["bytes"] == 2 * 3 * 2 * 8 * 32 * 2


def test_all_branches_of_a_conditional_are_counted():
    called = "conditional(%p, %a, %b), branch_computations={%fused, %fused}"
    named = "conditional(%p, %a, %b), true_computation=%fused, false_computation=%fused"
    for conditional in (called, named):
        cost = cost_of(**{"fusion(%result), kind=kLoop, calls=%add": conditional})
        assert cost.flops == (3 + 2) * 2 * 8 * 16 * 32


def test_batched_product_as_a_dilated_convolution_counts_once_per_batch_element():
    cost = cost_of(
        **{
            "bf16[8,32]{1,0:T(8,128)(2,1)} convolution(%p, %q), dim_labels=bf_io->bf": (
                "f32[16,12,128,64] convolution(%p, %q), window={size=16x12 stride=15x11 "
                "lhs_dilate=16x12}, dim_labels=01bf_01oi->01bf"
            ),
            "%p = bf16[8,16]{1,0:T(8,128)(2,1)}": "%p = bf16[16,12,128,32]",
            "%q = bf16[16,32]{1,0:T(8,128)(2,1)}": "%q = bf16[16,12,64,32]",
        }
    )
    assert cost.flops == 3 * 2 * (16 * 12) * 128 * 64 * 32


def test_text_without_an_entry_computation_is_rejected():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo_cost.step_cost("HloModule nothing")


@pytest.mark.parametrize(
    ("op_name", "part"),
    [
        ("jit(f)/jvp(PretrainingModel)/encoder/embeddings/add", ("embeddings", "forward")),
        ("jit(f)/jvp(PretrainingModel)/mlm/dot_general", ("heads", "forward")),
        (
            "jit(f)/transpose(jvp(PretrainingModel))/encoder/while/body/layers/"
            "bhqd,bhkd->bhqk/dot_general",
            ("attention", "backward"),
        ),
        (
            "jit(f)/transpose(jvp(PretrainingModel))/encoder/while/body/layers/"
            "output_layer_norm/mul",
            ("LayerNorm", "backward"),
        ),
        ("jit(f)/jvp()/cond/branch_1_fun/reduce_sum", ("heads", "forward")),
        ("jit(f)/transpose(jvp())/mul", ("heads", "backward")),
        (
            "jit(f)/transpose(jvp(PretrainingModel))/encoder/layers/intermediate/cond/"
            "branch_1_fun/transpose(jvp())/dot_general",
            ("feed-forward", "backward"),
        ),
        ("jit(f)/vmap()/top_k", ("masking", "forward")),
        ("jit(f)/sqrt", ("optimizer", "update")),
        ("", ("other", "update")),
    ],
)
def test_op_name_decides_the_part_and_direction(op_name, part):
    assert hlo_cost.part_of(op_name) == part


def test_bytes_of_a_tuple_shape_are_the_sum_over_its_arrays():
    assert hlo_text.array_bytes("(f32[8,128]{1,0:T(8,128)}, s32[], bf16[3], pred[5])") == 4111


def test_flops_of_a_loop_compiled_for_the_cpu():
    @jax.jit
    def repeated(x, weights):
        return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]

    shapes = jnp.zeros((64, 256)), jnp.zeros((5, 256, 256))
    cost = hlo_cost.step_cost(repeated.lower(*shapes).compile().as_text())
    assert cost.flops == 5 * 2 * 64 * 256 * 256
    assert cost.cycles == {} and cost.loops_counted_once == []


# Two gathers of 3/4 of 4 MiB, with arithmetic during both, then during the second.
GATHERS = """
HloModule step, is_scheduled=true

%body (state: (s32[], f32[1048576])) -> (s32[], f32[1048576]) {
  %state = (s32[], f32[1048576]) parameter(0)
  %shard = f32[262144] constant({...})
  %all-gather-start.1 = (f32[262144], f32[1048576]) all-gather-start(%shard), GROUPS
  %all-gather-start.2 = (f32[262144], f32[1048576]) all-gather-start(%shard), GROUPS
  %first = f32[8] fusion(%shard), kind=kLoop, calls=%add, \
backend_config={"estimated_cycles":"FIRST"}
  %all-gather-done.1 = f32[1048576] all-gather-done(%all-gather-start.1)
  %second = f32[8] fusion(%shard), kind=kLoop, calls=%add, \
backend_config={"estimated_cycles":"SECOND"}
  %all-gather-done.2 = f32[1048576] all-gather-done(%all-gather-start.2)
  ROOT %next = (s32[], f32[1048576]) tuple(%state, %all-gather-done.2)
}

%add (a: f32[]) -> f32[] {
  ROOT %a = f32[] parameter(0)
}

%condition (state: (s32[], f32[1048576])) -> pred[] {
  %bound = s32[] constant(10)
}

ENTRY %main (start: (s32[], f32[1048576])) -> f32[1048576] {
  %start = (s32[], f32[1048576]) parameter(0)
  %shard.1 = f32[262144] constant({...})
  %all-gather-start = (f32[262144], f32[1048576]) all-gather-start(%shard.1), GROUPS
  %loop = (s32[], f32[1048576]) while(%start), condition=%condition, body=%body
  %all-gather-done = f32[1048576] all-gather-done(%all-gather-start)
  ROOT %reduced = f32[1048576] all-reduce(%all-gather-done), GROUPS, to_apply=%add
}
"""


@pytest.mark.parametrize(
    ("first", "second", "exposed_gathers"),
    [
        # 3 MiB at 300 GB/s take 11,010 cycles at 1.05 GHz. The gather around the loop overlaps
        # with its arithmetic.
        (0, 0, 21),
        (11010, 0, 10),
        (5505, 0, 15),
        (11010, 11010, 0),
        (22020, 0, 0),
        (0, 22020, 10),  # The first is waited for before the second arithmetic starts.
    ],
)
def test_collectives_without_concurrent_arithmetic_are_exposed(first, second, exposed_gathers):
    text = GATHERS.replace("GROUPS", "replica_groups={{0,1,2,3}}, dimensions={0}")
    text = text.replace("FIRST", str(first)).replace("SECOND", str(second))
    cost = hlo_cost.step_cost(text, "v4")
    gather, reduce = 0.75 * 2**22, 1.5 * 2**22
    assert cost.collectives["all-gather"]["link_bytes"] == 21 * gather
    expected = exposed_gathers * gather + reduce
    assert cost.exposed_link_bytes == pytest.approx(expected, rel=1e-3)


def test_copy_on_the_chip_does_not_wait_for_links():
    text = GATHERS.replace("GROUPS", "replica_groups={{0,1,2,3}}, dimensions={0}")
    text = text.replace("FIRST", "11010").replace("SECOND", "11010")
    done = "  %all-gather-done.1 ="
    copy = "  %copy-start.1 = (f32[8], f32[8], u32[]) copy-start(%shard)\n"
    wait = "  %copy-done.1 = f32[8] copy-done(%copy-start.1)\n"
    first = "  %first = f32[8] fusion"
    cost = hlo_cost.step_cost(text.replace(first, copy + wait + first).replace(done, done), "v4")
    assert cost.exposed_link_bytes == pytest.approx(1.5 * 2**22, rel=1e-3)


def test_exchange_all_to_all_takes_the_links_of_the_devices_between():
    text = """
ENTRY %main (x: bf16[64,8]) -> bf16[64,8] {
  %x = bf16[64,8] parameter(0)
  ROOT %all-to-all = bf16[64,8] all-to-all(%x), replica_groups=[1,64]<=[64], dimensions={0}
}
"""
    for chip, hops in (("v4", 3), ("v5e", 4)):  # On 4 x 4 x 4 and 8 x 8 devices.
        cost = hlo_cost.step_cost(text, chip).collectives["all-to-all"]
        assert cost["bytes"] == 1024
        assert cost["link_bytes"] == pytest.approx(1024 * 63 / 64 * hops)


@pytest.mark.parametrize(
    ("name", "opcode", "calls"),
    [
        ("wrapped", "async", "calls=%gather"),
        # On a SparseCore.
        ("gather.call", "call", 'async_execution_thread="sparsecore", to_apply=%gather'),
    ],
)
def test_collective_that_is_wrapped_to_run_asynchronously_is_exposed_too(name, opcode, calls):
    wrapped = (
        f"%{name}-start = ((f32[262144]), f32[1048576]) {opcode}-start(%shard.1), {calls}\n"
        f"  %{name}-done = f32[1048576] {opcode}-done(%{name}-start)"
    )
    text = GATHERS.replace(
        "ROOT %reduced = f32[1048576] all-reduce(%all-gather-done), GROUPS, to_apply=%add", wrapped
    )
    gather = "%gather (p: f32[262144]) -> f32[1048576] {\n  %p = f32[262144] parameter(0)\n"
    gather += "  ROOT %gathered = f32[1048576] all-gather(%p), GROUPS\n}\n\nENTRY"
    text = text.replace("ENTRY", gather).replace("FIRST", "22020").replace("SECOND", "0")
    text = text.replace("GROUPS", "replica_groups={{0,1,2,3}}, dimensions={0}")
    cost = hlo_cost.step_cost(text, "v4")
    assert cost.exposed_link_bytes == pytest.approx(0.75 * 2**22, rel=1e-3)


KERNEL = """
HloModule step, is_scheduled=true

ENTRY %main (qkv: bf16[12,8,128,768]) -> bf16[12,8,128,256] {
  %layer = s32[1] parameter(0)
  %ids = s32[8,1,128] parameter(1)
  %columns = s32[8,128,1] parameter(2)
  %scale = f32[1,1] parameter(3)
  %qkv = bf16[12,8,128,768]{3,2,1,0} parameter(4)
  %bias = f32[1,768]{1,0} parameter(5)
  %context = bf16[12,8,128,256]{3,2,1,0} parameter(6)
  ROOT %forward_kernel.1 = (bf16[12,8,128,256]{3,2,1,0}, f32[8,2,2,128]{3,2,1,0}) \
custom-call(%layer, %ids, %columns, %scale, %qkv, %bias, %context), \
custom_call_target="tpu_custom_call", \
metadata={op_name="jit(step)/encoder/attention/forward_kernel_64/pallas_call"}
}
"""


@pytest.mark.parametrize(("name", "entry"), [("64", ""), ("64_dropout", " dropout")])
def test_kernel_of_attention_costs_what_its_table_says(tmp_path, monkeypatch, name, entry):
    table = tmp_path / "kernels.json"
    table.write_text(f'{{"v4": {{"128 64 bfloat16{entry}": {{"forward": 1000}}}}, "v5e": {{}}}}')
    monkeypatch.setattr(hlo_cost, "KERNEL_TABLE", table)
    program = KERNEL.replace("forward_kernel_64", f"forward_kernel_{name}")
    cost = hlo_cost.step_cost(program, "v4")
    # Two programs of four rows for each of two blocks of 128 lanes, on two cores.
    assert cost.cycles == {("attention kernel", "forward"): 2000}
    assert cost.flops == 2 * 2 * 8 * 128 * 128 * 256
    assert not cost.without_estimate
    for chip in ("v5e", "v6e"):  # Without this entry, and without any.
        message = f"no entry '128 64 bfloat16{entry}' for {chip}: .*kernel_cycles.py --chip={chip}`"
        with pytest.raises(hlo_cost.MissingKernelCycles, match=message):
            hlo_cost.step_cost(program, chip)


LONG_KERNEL = """
HloModule step, is_scheduled=true

ENTRY %main (qkv: bf16[12,2,2048,768]) -> bf16[12,2,2048,256] {
  %layer = s32[1] parameter(0)
  %first = s32[2,8] parameter(1)
  %end = s32[2,8] parameter(2)
  %qkv = bf16[12,2,2048,768]{3,2,1,0} parameter(3)
  %bounds = s32[2,16,2,128]{3,2,1,0} parameter(4)
  %context = bf16[12,2,2048,256]{3,2,1,0} parameter(5)
  ROOT %forward_kernel.1 = (bf16[12,2,2048,256]{3,2,1,0}, f32[2,2,16,2,128]{4,3,2,1,0}) \
custom-call(%layer, %first, %end, %qkv, %bounds, %context), \
custom_call_target="tpu_custom_call", \
metadata={op_name="jit(step)/encoder/attention/forward_kernel_long_64_keys512/pallas_call"}
}
"""


def test_kernel_of_attention_in_long_rows_costs_the_blocks_that_it_reads(tmp_path, monkeypatch):
    table, entry = (
        tmp_path / "kernels.json",
        {"program": 7, "tile": 10, "group": 100, "block": 1000},
    )
    table.write_text(
        json.dumps(
            {
                "v4": {
                    "long_64_keys512 256 bfloat16": {"forward": entry},
                    "long_64_band256 256 bfloat16": {"forward": entry | {"block": 0}},
                }
            }
        )
    )
    monkeypatch.setattr(hlo_cost, "KERNEL_TABLE", table)
    cost = hlo_cost.step_cost(LONG_KERNEL, "v4")
    # Two programs for each of two rows, on two cores. Eight groups read four blocks each.
    assert cost.cycles == {("attention kernel", "forward"): 2 * (7 + 16 * 10 + 8 * 100 + 32 * 1000)}
    assert cost.flops == 2 * 2 * 2 * 2048**2 * 256
    band = LONG_KERNEL.replace("keys512", "band256")
    cost = hlo_cost.step_cost(band, "v4", document_tokens=100)
    assert cost.cycles == {("attention kernel", "forward"): 2 * (7 + 16 * 10 + 8 * 100)}
    assert cost.flops == 2 * 2 * 2 * 2048 * 256 * 256


def test_kernel_of_rows_in_segments_costs_its_visits(tmp_path, monkeypatch):
    table = tmp_path / "kernels.json"
    parts = {"program": 7, "tile": 10, "group": 100, "block": 1000, "finish": 50, "next": 60}
    names = "long_64_segments512x1024_keys512", "long_64_segments1024x1024_band256"
    entries = {f"{name} 256 bfloat16": {"forward": parts} for name in names}
    table.write_text(json.dumps({"v4": entries}))
    monkeypatch.setattr(hlo_cost, "KERNEL_TABLE", table)
    kernel = LONG_KERNEL.replace("%end,", "%end, %first, %end,")
    cost = hlo_cost.step_cost(kernel.replace("long_64_keys512", names[0]), "v4")
    # Eight groups see both segments of keys, which four segments of queries visit.
    expected = 2 * (2 * 4 * 7 + 16 * 10 + 8 * 50 + 16 * 100 + 32 * 1000)
    assert cost.cycles == {("attention kernel", "forward"): expected}
    cost = hlo_cost.step_cost(kernel.replace("long_64_keys512", names[1]), "v4")
    # A segment of keys meets three of queries, and two tiles see another segment.
    expected = 2 * (2 * 3 * 7 + 16 * 10 + 8 * 50 + 8 * 100 + 2 * 60)
    assert cost.cycles == {("attention kernel", "forward"): expected}


def test_groups_read_fewer_blocks_if_documents_are_short():
    assert hlo_cost.read_blocks(8192, 256, 512, None) == 32 * 16
    counts = [hlo_cost.read_blocks(8192, 256, 512, tokens) for tokens in (100, 2000, 10**6)]
    assert 32 < counts[0] < counts[1] < counts[2] <= 32 * 16


SUBLAYER = """\
HloModule step, is_scheduled=true

ENTRY %main (inputs: bf16[12,16,128,3072]) -> bf16[2048,768] {
  %layer = s32[1] parameter(0)
  %inputs = bf16[12,2048,3072]{2,1,0} parameter(1)
  %sums = bf16[12,2048,768]{2,1,0} parameter(2)
  %xs = bf16[12,2048,768]{2,1,0} parameter(3)
  %outputs = bf16[13,2048,768]{2,1,0} parameter(4)
  %matrices = bf16[12,3072,768]{2,1,0} parameter(5)
  %vector = f32[1,768]{1,0} parameter(6)
  %inner = f32[1,3072]{1,0} parameter(7)
  ROOT %forward_kernel.1 = (bf16[12,2048,768]{2,1,0}, bf16[13,2048,768]{2,1,0}) \
custom-call(%layer, %inputs, %sums, %xs, %outputs, %matrices, %vector, %vector, %vector, %inner), \
custom_call_target="tpu_custom_call", \
metadata={op_name="jit(step)/encoder/sublayer/forward_kernel_gelu/pallas_call"}
}
"""


def test_kernel_of_a_sublayer_costs_what_its_table_says_for_blocks_of_tokens(tmp_path, monkeypatch):
    table = tmp_path / "kernels.json"
    table.write_text('{"v4": {"gelu 512 3072 768 bfloat16": {"forward": 1000}}, "v5e": {}}')
    monkeypatch.setattr(hlo_cost, "KERNEL_TABLE", table)
    cost = hlo_cost.step_cost(SUBLAYER, "v4")
    assert cost.cycles == {("sublayer output kernel", "forward"): 4 * 1000 / 2}
    assert cost.flops == 2 * 2048 * 3072 * 768
    message = "no entry 'gelu 512 3072 768 bfloat16' for v5e: add"
    with pytest.raises(hlo_cost.MissingKernelCycles, match=message):
        hlo_cost.step_cost(SUBLAYER, "v5e")


def test_kernel_of_gated_output_costs_what_its_table_says(tmp_path, monkeypatch):
    table = tmp_path / "kernels.json"
    table.write_text('{"v4": {"gated_gelu 256 1152 768 bfloat16": {"backward": 1000}}}')
    monkeypatch.setattr(hlo_cost, "KERNEL_TABLE", table)
    text = """
HloModule step, is_scheduled=true

ENTRY %main (inputs: bf16[12,4096,2304]) -> bf16[4096,2304] {
  %layer = s32[1] parameter(0)
  %inputs = bf16[12,4096,2304]{2,1,0} parameter(1)
  %dy = bf16[4096,768]{1,0} parameter(2)
  %matrix = bf16[1152,768]{1,0} parameter(3)
  ROOT %backward_kernel.1 = (bf16[4096,2304]{1,0}, bf16[4096,1152]{1,0}) \
custom-call(%layer, %inputs, %dy, %matrix), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(step)/transpose(jvp())/gated_output/backward_kernel_gated_gelu/pallas_call"}
}
"""
    cost = hlo_cost.step_cost(text, "v4")
    assert cost.cycles == {("sublayer output kernel", "backward"): 16 * 1000 / 2}
    assert cost.flops == 2 * 4096 * 1152 * 768


def test_the_table_has_the_kernels_of_every_chip():
    table = json.loads(hlo_cost.KERNEL_TABLE.read_text())
    assert table.keys() == CHIPS.keys()
    for chip, entries in table.items():
        expected = {
            (kernel_cycles.entry(shape, kernel), kernel)
            for shape in kernel_cycles.shapes(chip)
            for kernel in ("forward", "backward")
        }
        assert {(name, kernel) for name, entry in entries.items() for kernel in entry} == expected
