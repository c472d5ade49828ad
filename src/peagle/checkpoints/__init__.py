"""Model references to local folders, and the weights and heads inside them.

references       what a user may write for a model -> its folder, its config, its tokenizer
builtin          the built-in model: fetched, checked, converted and kept in the cache
gguf             a Llama GGUF file -> a model folder
files            JSON and safetensors of model folders
stored_tensors   a folder's tensors under our names and in our shapes, low-bit ones expanded
weights          named tensors -> module parameters, each exactly once
decoder_configs  a target's config.json -> the sizes of its decoder
targets          a model folder -> the native target
rust_tokenizer   tokenizer.json, without transformers
chat_templates   Jinja templates, as transformers renders them
heads            drafters' checkpoints in three layouts
"""
