"""vLLM behind the contract, and as a server of its own. Only `backend` and `engine` import vLLM.

options    options of vLLM's engine, under vLLM's names
released   the models of the P-EAGLE posts, and how their makers serve them
models     what a user writes for a target and a head -> what vLLM is given for it
drafting   the drafter that was asked for -> vLLM's speculative_config
arguments  all of these -> the arguments of vLLM's engine, or the `vllm serve` line
install    the vLLM on this machine: where it is, and whether it is new enough
engine     vLLM's engine in this process, started and ended
backend    that engine behind the contract
requests   one request there: sampling parameters and outputs
stats      acceptance as vLLM counts it
server     vLLM's server as a child process
log        the line of vLLM's log that says why it died
"""
