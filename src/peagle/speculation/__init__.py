"""Speculative decoding as pure functions: no models, no I/O, no state.

noise.py       random numbers as a hash of (seed, position, token): same in any batch
sampling.py    logits -> penalties -> filters -> token
verify.py      which drafts the target keeps, and how many that is on average
statistics.py  acceptance counters under vLLM's names (no torch)
looping.py     does an answer repeat itself (no torch)
"""
