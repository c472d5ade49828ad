"""Tiny models and what the tests make of them, each defined once.

models    random targets and heads in three sizes
folders   a model with a tokenizer, and heads for it, on disk
caches    paged caches of NaN, block tables that are not in order
drafters  drafts without an engine
training  packed rows, a language that a head can learn, a recipe
"""
