"""C kernels for CPUs, optional: where there is no compiler, torch's own operations run.

library   compiles the C sources once, and finds the threads that torch runs on
ops       norms, rotation, gates, and attention over the paged cache (ops.c)
linear    packed weights, and the product with them (linear.c)
drafts    the best tokens of rows, trees of drafts and the walk through them (drafts.c)
layers    a stack of decoder layers in one call (layers.c)
"""
