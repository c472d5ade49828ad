"""nn.Modules used unchanged by training and by the engine.

config       what a decoder is made of, read from a transformers config
rope         inverse frequencies of rotary embeddings
attention    the attention seam: modules project, an Attention object attends
layers       RMSNorm, rotary embedding, attention block, MLP, decoder layers
experts      mixtures of experts: router, grouped products
meta         modules without values, to be filled from a checkpoint
fused        a stack of layers as one call of kernels, where those may stand in
fp8          a target's linear layers with 8-bit weights
target       the native target, one decoder for all families
adapter      any other causal language model as a target, by transformers' modules
head_config  what a head's config.json says
output       the last rows of either, before anybody needs their logits
correction   what a mask row predicts once the draft before it is known
eagle        the network that P-EAGLE and EAGLE-3 share
masks        who may attend to whom in training, as named predicates
rollouts     (anchor, depth) elements of parallel prediction, as flat rows
drafter      the drafter seam: what is new goes in, draft tokens come out
p_eagle      the P-EAGLE drafter: all drafts in one pass
eagle3       the EAGLE-3 drafter: one pass for each draft
ngram        the drafter without weights: what followed the same tokens before
binding      which kernels a model runs with, decided once after loading
"""
