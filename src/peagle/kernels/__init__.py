"""Fast paths in other languages, each beside a reference in torch that it must agree with.

cpu             C, compiled where there is a compiler
gpu             Triton; imported only where tensors are on a GPU
reference       the GPU kernels' definition in torch, for any device
policy          which kernel takes which rows of a model
step_ops        a step's operations that exist twice, selected once per engine
device_batch    what the device knows of the running requests
rows            rows over a paged cache, as device tensors
layer_tensors   a decoder layer's parameters, as the kernels are given them
"""
