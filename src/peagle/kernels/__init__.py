"""Fast paths in other languages, each beside a plain torch one that it must agree with.

cpu, linear, layer   C kernels for CPUs; library, compiling: how they are made and found
device               where Triton kernels may stand in for torch's operations
rows, device_batch   what a step reads and writes, as tensors
step_ops             a step's operations that exist twice, chosen once per engine
plain                the GPU kernels' references in torch: their definition
gpu                  Triton; imported only where tensors are on a GPU
"""
