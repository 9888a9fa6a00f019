"""Options of the TPU compiler for update steps, and what it can overlap on a mesh."""

from absl import logging
from jax.sharding import Mesh

# The device kinds of v5p, v6e and tpu7x, whose SparseCores run collectives beside the matrix units.
SPARSE_CORE_KINDS = ("TPU v5", "TPU v6 lite", "TPU7x")
SPARSE_CORE_COLLECTIVES = (
    "reduce_scatter",
    "nd_reduce_scatter",
    "all_gather",
    "2d_all_gather",
    "3d_all_gather",
)


def compiler_options(mesh: Mesh, hidden_size: int, overlap_collectives: bool = False) -> dict:
    """Returns, and logs, the compiler's options for update steps on a mesh.

    By default, the compiler gathers parameters as an all-reduce of shards padded with zeros. An
    all-gather avoids this, but costs a copy per layer if shards do not fill tiles of 16 rows. With
    `overlap_collectives`, collectives are asynchronous only with options: on v5p, v6e and tpu7x
    they run on the SparseCores, on v4 and v5e they are all-to-alls, and start too late without the
    last option. On v4 the compiler aborts for some programs, such as lamb_64k.py, when it packs
    what is in on-chip memory again ("Peak memory usage ... exceeds the max size of alternate
    memory"); without that, steps take as many cycles. On v5e and v5p, matrix products use 16 MiB of
    on-chip memory by default; with 32 their tiles are larger.
    """
    kind, options = mesh.devices.flat[0].device_kind, {}
    on_sparse_cores = overlap_collectives and kind in SPARSE_CORE_KINDS
    if on_sparse_cores or (kind == "TPU v4" and hidden_size % (16 * mesh.shape["data"]) == 0):
        names = "xla_enable_async_all_gather", "xla_tpu_prefer_async_allgather_to_allreduce"
        options |= dict.fromkeys(names, True)
    if kind == "TPU v4":
        options["xla_msa_max_repacks"] = 0
    if kind in ("TPU v5 lite", "TPU v5"):
        options["xla_tpu_scoped_vmem_limit_kib"] = 32 * 1024
    if on_sparse_cores:
        for name in SPARSE_CORE_COLLECTIVES:
            options[f"xla_tpu_enable_sparse_core_collective_offload_{name}"] = True
    elif overlap_collectives and kind.startswith("TPU"):
        options["xla_tpu_enable_async_all_to_all"] = True
    if overlap_collectives and kind.startswith("TPU"):
        options["xla_max_concurrent_async_all_gathers"] = 8
        options["xla_lhs_prioritize_async_depth_over_stall"] = True
    if options:
        logging.info("Options of the TPU compiler: %s", options)
    return options


def why_not_overlapped(mesh: Mesh, hidden_size: int, num_microbatches: int) -> str:
    """Returns why collectives of layers cannot overlap with their computation; "" if they can."""
    if mesh.size == 1:
        return "one device has nothing to exchange"
    if mesh.shape["data"] != mesh.size:
        return f"the mesh {dict(mesh.shape)} is sharded over other axes than data"
    if num_microbatches > 1:
        return f"gradients are exchanged once, after the last of {num_microbatches} microbatches"
    # The compiler gathers shards that fill no tile with a copy, and synchronously.
    tile_rows = 8 if mesh.devices.flat[0].device_kind == "TPU7x" else 16
    if hidden_size % (tile_rows * mesh.shape["data"]):
        sizes = f"{tile_rows} times data={mesh.shape['data']}"
        return f"the hidden size {hidden_size} is not a multiple of {sizes}"
    if mesh.devices.flat[0].device_kind == "TPU v5 lite" and mesh.size > 16:
        return "the compiler for v5e supports no all-to-alls between more than 16 chips"
    return ""


def product_options(mesh: Mesh) -> dict:
    """Returns, and logs, the compiler's options for matrix products and kernels on a mesh.

    The compiler for TPUs can choose by estimated cost in which order a product adds its parts, in
    float32 either way. By default it does not, and short sums over many outputs take up to twice as
    long: the gradients of matrices at few rows per device, and products of small models.

    On tpu7x the compiler tiles bfloat16 arrays by 16 rows where it can, but those of kernels by 8,
    and copies all that the layers have saved from one to the other for each kernel. With the second
    option, all tiles have 8 rows.
    """
    kind = mesh.devices.flat[0].device_kind
    if not kind.startswith("TPU"):
        return {}
    options = {"xla_tpu_break_of_accum_cost_heuristic": True}
    if kind == "TPU7x":
        options["xla_tpu_control_large_2nd_minor_layout_for_x16"] = False
    logging.info("Options of the TPU compiler for products and kernels: %s", options)
    return options
