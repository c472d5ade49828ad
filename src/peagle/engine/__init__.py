"""The embedded engine: token ids in, token ids out; text only at the edge.

engine         step(): schedule, launch, collect
scheduler      which rows a step computes: admission, prompt chunks, drafts, preemption
host_batch     what the host knows of all slots, as columns
request        one request: its tokens, what it asks for, how it ended
rests          which requests are left to the target alone, because a drafter would slow them down
runner         runs rows as a step, eagerly or as one of few CUDA graphs
cuda_graphs    a step as a CUDA graph: captured once, replayed from then on
step           one step as a function of tensors: verify, commit, draft for the next step
row_layouts    how its rows are laid out: exactly, or padded for graphs
sampler        how it samples and verifies tokens: coupled or by rejection
host_sampling  what the host does with logits: adjusts them, and reads logprobs off them
adjust         changes of logits that depend on the output: grammars, penalties, bad words, bias
grammar        structured outputs: which tokens a grammar permits behind each row's drafts
build          the models, caches and state that all steps share
layer_groups   which layers share a block table: those with the same sliding window
blocks         which cache blocks a sequence holds
prefix_cache   blocks that requests with the same beginning share
block_pools    where free blocks come from: ranges on a CPU, a stack on a GPU
free_ranges    a set of block numbers, kept as ranges
kv_cache       paged keys and values, and attention over them
memory         how many blocks there are, counted from bytes
clock          how long the device worked and waited
prompts        what a caller gives, checked and as token ids
answers        one prompt's requests, their text, and where it ends
detokenizer    tokens -> text as they come, and stop strings
loading        references -> target and drafter
offline        generate and stream, over any engine with add_request, step, abort_request
llm            LLM: the embedded engine behind them, as vLLM's users call it
"""
