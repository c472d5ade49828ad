"""The GPU kernels' definition in torch: same names, same signatures, any device.

linear       products, norms and gates of a decoder layer
qkv          norm, rotation and cache write of a projection's heads
attention    attention over the paged cache
fp8          rows as 8-bit floats, and products of two such matrices
experts      low-bit weights of experts, and each row times that of its own
best_token   greedy tokens from hidden states
sampling     a token per row of logits, and the distributions that tokens are drawn from
rejection    rejection sampling
trees        trees of drafts: candidates, the best nodes, which path the target keeps
gather       rows brought to where a step reads them
batch        the bookkeeping of a step
"""
