"""Speculative decoding as pure functions: no models, no I/O, no state.

noise         random numbers as a hash of (seed, position, token): the same in any batch
sampling      logits -> penalties -> filters -> token
verify        which drafts the target keeps
acceptance    how likely it keeps a sampled draft
trees         drafts as trees: several continuations of one prefix
budget        how many drafts a step verifies: as many as pay (no torch)
node_budget   the same for trees whose rows are exact (no torch)
costs         what steps cost, by their requests and rows (no torch)
draft_limit   how many drafts a request may have
statistics    acceptance counters under vLLM's names (no torch)
looping       whether an answer repeats itself (no torch)
"""
