"""Decoding without asking the host: the engine's form for GPUs.

Each running request has a lane, a row of tensors on the device (kernels/lane_state.py). A step
reads and writes lanes alone, so it can be captured in a CUDA graph, and the host launches the
next step before it has read the last one's tokens.

caches     the tensors that all steps share
choosing   how a step chooses: coupled or by rejection
steps      one step as a function of static tensors: decode and prefill
graphs     steps captured as CUDA graphs, made when first used
shapes     which few shapes there are graphs for
table      what the host knows of all lanes, as columns
seats      who sits in which lane, which blocks they hold
prompts    prefill beside decoding; prefill: its inputs
uploads    which blocks lanes have gained
clock      how long the device worked and waited
engine     LaneEngine: admit, prefill, decode, collect
"""
