"""The embedded engine: token ids in, token ids out; text only at the edge.

blocks       which cache blocks a sequence holds
block_pools  where free blocks come from: ranges on a CPU, a stack on a GPU (free_ranges)
memory       how many blocks there are, counted from bytes
kv_cache     paged keys and values, and attention over them
request      one request: its tokens, its state, what the drafter has not seen of it
scheduler    who computes how many tokens in this step; admission and preemption
adjust       logit changes that depend on a request's history
sampler      logits and drafts -> committed tokens; draws drafts with the shared noise
engine       step(): schedule, propose, verify, commit
lanes        the form for GPUs: steps as CUDA graphs, the host one step behind
build        which form serves a target
detokenizer  tokens -> text, stop strings
loading      references -> target, drafter, tokenizer
llm          LLM: generate, chat, stream; open, step, abort
"""
