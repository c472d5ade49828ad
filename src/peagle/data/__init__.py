"""What a drafter is trained on: the target's own answers as token ids with a loss mask.

dataset       the prepared dataset on disk: written shard by shard, read by row
prompts       lines of prompts; conversations from files and Hugging Face datasets
fingerprints  which tokenizer and which chat template made a dataset
summary       a dataset in a few numbers
packing       several documents in one packed row, positions restarting with each
chat_formats  the reasoning and the tool calls of an answer, by model family
"""
