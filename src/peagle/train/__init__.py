"""Training of P-EAGLE and EAGLE-3 heads.

recipe        what a run is told: YAML sections and overrides
inputs        what is read before any weight: sizes of target and head, rows
setup         from a recipe to the parts of a run: head, planning, sources, devices, compiling
batches       packed rows with their drawn elements, built ahead of the step
cod           which rollouts are trained this time (COnditional Drop-token)
partition     one packed row's elements as segments of equal work
attention     who sees whom among training rows: dense on CPU, FlexAttention on GPU
features      the target's hidden states: computed in process, read from disk, or from
vllm_features a vLLM server; vllm_source opens it, vllm_server starts it, vllm_client asks it
losses        KL and cross-entropy over charged rows, in chunks
p_eagle       one segment forward, to a loss
eagle3        the same by test-time training
loop          steps, logs, evaluation, checkpoints
journal       metrics, TensorBoard, curves
run_state     checkpoints to resume from
memory        bytes of rows, weights and the loss, counted from shapes
footprint     a run's memory by what it is for; forecast: its minutes, measured
evaluate      acceptance length for every K in one teacher-forced pass
sampled       the same for sampled text: expected acceptance
walks         the steps that an engine takes through a text
offline       head, target and text for an evaluation from the command line
prepare       prompts -> the target's answers -> rows; resumable
conversations one conversation on its way to rows
answers       where answers come from: the embedded engine, or
endpoint      an OpenAI-compatible server
making        what a dataset's manifest records
storing       `peagle capture` from references
doctor        what in data silently costs acceptance; doctor_head: what in a head
"""
