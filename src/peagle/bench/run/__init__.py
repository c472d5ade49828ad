"""From a plan to results: the grid, the load on a backend, the figures of each run.

bench            `bench(plan)`, the whole of it
plan             the keys of `peagle bench`
grid             the cells of a grid, the heads they need, and the order of their runs
runner           warm up, drive, measure and keep every run
run_files        the file of one run, with samples of its answers
driver           closed and open loop, one clock
client           the contract between the driver and a client
backend_client   an engine of this process as a client
endpoint_client  an OpenAI-compatible server as a client
server_metrics   acceptance from a server's Prometheus page
sessions         the engines, or the server, that a grid runs on
null_backend     a backend that computes nothing, which shows what the harness costs
measure          records of a run -> its figures
meters           memory and GPU use during a run
lossless         answers against those of the plain target, with the gap where they part
"""
