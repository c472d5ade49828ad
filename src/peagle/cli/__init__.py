"""The `peagle` command: one thin file per verb, nothing heavy imported at the top.

main            the app, and what a user sees when something goes wrong
flags           flags that verbs share
engines         where a verb gets its engine
prompt_files    prompts from the command line, text and jsonl files; bad lines named, others kept
render          tables, the stats line and error lines
help            what --help prints
demo            the same prompts with each method
generate        answers to prompts
chat            a conversation
prepare         a training dataset of the target's own answers
capture         the target's hidden states, to disk
train           a head from a recipe
evaluate        acceptance of a head, offline
bench           speed, latency and acceptance, measured
bench_progress  what it shows while it measures
tune            which method and K to run
simulate        predicted speed on a GPU that one does not have
report          results as HTML
serve           an OpenAI-compatible server
deploy          an endpoint on SageMaker
export          a head in vLLM's or the speculators library's layout
doctor          what silently costs acceptance
heads           the heads that ship, and released ones
env             hardware, versions and commit
"""
