"""From prompts to a training dataset: the target's own answers as token ids with a loss mask.

preparation   prompts -> answers -> rows; resumable
dialogue      one conversation: its questions, and the rows of its answers
dataset_spec  how a dataset is made: what its manifest records
answers       where answers come from: the embedded engine, vLLM in this process, or
endpoint      an OpenAI-compatible server
"""
