"""Triton kernels. Only imported where there is a GPU (or Triton's interpreter, in tests).

layers       a stack of decoder layers in few launches
linear       products of few rows, with norm, bias, gate and residual in one kernel
qkv          norm, rotation and cache write of a projection's heads
attention    few rows per sequence over the paged cache, and how they are divided
norms        norms and gates between two products of many rows
fp8          products with 8-bit weights, and what stands between two of them
experts      each row times the low-bit weight of its expert
argmax       the largest value of each row
best_token   greedy tokens straight from hidden states, without logits
sampling     a token per row of logits, and the distributions that tokens are drawn from
thresholds   which tokens top-k, top-p and min-p keep, without a sort
noise        Gumbel noise and uniforms as hashes
rejection    rejection sampling
correction   what stands between the products of a correction
trees        trees of drafts: candidates, the best nodes, which path the target keeps
gather       rows brought to where a step reads them
batch        the bookkeeping of a step
overlap      kernels that begin before the one ahead of them has ended
"""
