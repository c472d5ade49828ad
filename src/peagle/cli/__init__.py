"""The `peagle` command: one thin file per verb, nothing heavy imported at the top.

main         the app, and what a user sees when something goes wrong
flags        a dataclass of options becomes flags of a verb
options      sampling, engine and drafter flags -> SamplingParams, EngineConfig, SpeculativeConfig
prompt_files prompts from the command line, text and jsonl files; bad lines named, others kept
render       tables, the stats line and error lines
answer_flags flags of the verbs that let a target answer prompts
vllm_flags   vLLM's engine options
generate, chat, demo, prepare, capture, evaluate, serve, doctor, heads, env   the verbs
"""
