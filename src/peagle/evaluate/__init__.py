"""Acceptance of a head for every K in one teacher-forced pass over the target's own text.

evaluator  acceptance length for K = 1, 2, ... of greedy drafts; `Evaluation`, the result
recall     how often the right token is among the best, and what an oracle would make of that
contexts   acceptance by context length
trees      acceptance of drafts that are trees, for every number of nodes
beams      what EAGLE-3's trees grow from: its beam at many tokens at once
sampled    sampled text: expected acceptance under both verifications
replay     the steps that an engine with a given K takes through a text
offline    head, target and text for an evaluation from the command line
"""
