"""The OpenAI-compatible HTTP server on the embedded engine, for `peagle serve`.

config       what the server is told at start: address, keys, limits
serving      starts the engine's process and the HTTP server, and ends both
engine_loop  the engine's side: requests in, steps, tokens out; in a process of its own
async_llm    the HTTP side of it: many open requests, a bounded queue, deadlines, cancellation
protocol     bodies of requests and answers, in OpenAI's shapes
params       a request's body as SamplingParams, within the server's limits
prompts      texts, token ids and conversations of a request's body as token ids
tool_calls   tool calls in an answer's text, found as it grows
responses    answers and streams of server-sent events, from an open request
app          the routes
guards       what is checked and written around every request: key, size, headers, ids, logs
metrics      Prometheus counters and histograms under vLLM's names
errors       errors in OpenAI's shape, with their status
page         the page at /
"""
