"""Compares the memory of an update step on a GPU with and without the kernels of model/gpu.py.

python3 -m venv .venv-cuda
.venv-cuda/bin/pip install -e . jax==0.10.2 nvidia-cuda-nvcc-cu12 \
    jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2
.venv-cuda/bin/python benchmarks/gpu_memory.py

Needs no GPU: XLA compiles the step of configs/pretrain/bert_base.py for an H100 from a description
of it, Triton the kernels, and ptxas both. Rows of --length tokens, bfloat16, dropout 0.1. Temporary
memory, which holds the activations, is what XLA plans; parameters and optimizer state are apart.
On a GPU, XLA also tunes products, which can change the plan. Time is not estimated:
benchmarks/train_step.py measures it on a GPU.
"""

import os
import pathlib

import jax
import nvidia.cuda_nvcc
from absl import app, flags
from jax._src import xla_bridge
from jax.experimental import topologies

from bert_jax.configs.pretrain import bert_base
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.tpu import compilation
from bert_jax.training.pretrain_setup import setup_pretraining
from bert_jax.training.pretrain_step import make_pretrain_step

SIZES = flags.DEFINE_list("sizes", ["base", "large"], "Published sizes of the model.")
ROWS = flags.DEFINE_integer("rows", 32, "Number of rows of a step.", 1)
LENGTH = flags.DEFINE_integer("length", 512, "Number of tokens per row.", 1)

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800 memory_bandwidth: 3352320000000 device_memory_size: 84929347584
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def describe_gpu() -> jax.Device:
    """Returns an H100, to compile for it.

    Without a GPU, JAX cannot tell which platform "gpu" means (its issue 23971).
    """
    find = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name == "gpu" else find(name)
    topology = topologies.get_topology_desc("", "cuda", topology="1x1x1", target_config=H100)
    return topology.devices[0]


def compile_step(device: jax.Device, size: str, kernels: str) -> jax.stages.Compiled:
    config = bert_base.get_config()
    config.model.size = size
    config.model.kernels = kernels
    config.batch_size = config.long_phase.batch_size = ROWS.value
    lengths = LENGTH.value, LENGTH.value
    phase = compilation.planned_phases(config, lengths)[-1]
    setup = setup_pretraining(config, [phase], compilation.UNCASED_ENGLISH, [device])
    update_step = make_pretrain_step(
        setup.model,
        setup.optimizer,
        setup.shardings,
        setup.objective(phase),
        seed=config.seed,
        num_microbatches=1,
    )
    batch = compilation.abstract_batch(phase, batch_sharding(setup.mesh))
    return update_step.lower(setup.abstract_state, batch, {}).compile()


def main(_) -> None:
    cuda = pathlib.Path(nvidia.cuda_nvcc.__path__[0])
    # Autotuning needs a GPU; untuned, Triton's products are slower than cuBLAS.
    options = f"--xla_gpu_cuda_data_dir={cuda} --xla_gpu_autotune_level=0"
    options += " --xla_gpu_enable_triton_gemm=false"
    os.environ["XLA_FLAGS"] = f"{options} {os.environ.get('XLA_FLAGS', '')}"
    device = describe_gpu()
    print(f"{ROWS.value} rows of {LENGTH.value} tokens on one {device.device_kind}\n")
    print("| size | temporary memory, plain | kernels=gpu |\n| --- | --- | --- |")
    for size in SIZES.value:
        steps = [compile_step(device, size, kernels) for kernels in ("plain", "gpu")]
        plain, gpu = (step.memory_analysis().temp_size_in_bytes / 2**30 for step in steps)
        print(f"| {size} | {plain:.2f} GiB | {gpu:.2f} GiB |", flush=True)


if __name__ == "__main__":
    app.run(main)
