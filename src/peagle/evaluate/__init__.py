"""Acceptance of a head for every K in one teacher-forced pass over the target's own text.

evaluator  acceptance length for K = 1, 2, ... of greedy drafts; `Evaluation`, the result
trees      the same for drafts that are trees, for every number of nodes
sampled    the same for sampled text: expected acceptance under both verifications
replay     the steps that an engine with a given K takes through a text
offline    head, target and text for an evaluation from the command line
"""
