"""Tiny models and what the tests make of them, each defined once.

models    random targets and heads in three sizes
families  a config of every family that there is a native target for
folders   a model with a tokenizer, and heads for it, on disk
caches    paged caches of NaN, block tables that are not in order
jobs      requests that tests make of an engine
naive     their answers by plain decoding, each token from the whole prefix
drafters  drafters that follow a script, and drafts without an engine
engines   engines whose every step is watched
training  packed rows, a language that a head can learn, a recipe
"""
