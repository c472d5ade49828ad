"""A drafter over text that the target wrote, all anchors at once.

Training runs this pass with gradients, offline evaluation without them.

features     the target's hidden states of a packed row: the contract, and the target in process
attention    who sees whom among the rows: a dense mask on CPU, FlexAttention on GPU
partition    a packed row's elements as segments: rows of one pass, and rows that the loss reads
draft_model  one segment forward, by P-EAGLE or by EAGLE-3's test-time training
"""
