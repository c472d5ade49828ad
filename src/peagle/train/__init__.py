"""Training of P-EAGLE and EAGLE-3 heads.

recipe       what a run is told: YAML sections and overrides
recipe_yaml  a recipe as commented YAML, and what its keys take
inputs       what is read before any weight: sizes of target and head, rows
head         the head that a run trains: its sizes and first weights
setup        from a recipe to the parts of a run
cod          which rollouts are trained this time (COnditional Drop-token)
planner      a packed row's drawn elements, laid out as segments
batches      packed rows in a seeded order, planned ahead of the step
features     the target's hidden states from disk or from vLLM
losses       KL and cross-entropy over the rows that carry a loss, in chunks
trainer      one optimiser step
optimizer    AdamW and the learning rate's schedule
distributed  several processes under torchrun
loop         steps, logs, evaluations and checkpoints until the schedule ends
run_folder   what a run writes, and the checkpoints that it resumes from
journal      metrics.jsonl, TensorBoard, curves
memory       bytes of a run by what they are for, counted from shapes
forecast     minutes and disk of a run, measured on its first steps
"""
