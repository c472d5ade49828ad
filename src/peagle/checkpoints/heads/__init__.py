"""Heads, the checkpoints of drafters: ours, vLLM's raw layout and the speculators library's.

references          what a user may write for a head -> its folder
layouts             which of three layouts a folder has
config              config.json in any layout -> HeadConfig
vllm_layout         config.json of vLLM's raw layout, written and read
speculators_layout  config.json of the speculators library's layout, written and read
tensors             stored tensors -> those of our network, and back
loading             a folder -> the network bound to its target; saved in our layout
checks              what vLLM would run wrongly
exporting           a head -> a folder that vLLM or the speculators library loads
"""
