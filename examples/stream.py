"""Stream the answer to a conversation, as a chat client would show it.

python examples/stream.py
"""

from __future__ import annotations

from peagle import LLM, SamplingParams


def main() -> None:
    llm = LLM("smollm2-135m", speculative_config={"model": "smollm2-135m-p-eagle"})
    messages = [{"role": "user", "content": "Write one sentence about the sea."}]
    shown = ""
    for partial in llm.stream(messages, SamplingParams(temperature=0.7, seed=1, max_tokens=32)):
        text = partial.outputs[0].text  # all of it so far; a step adds one or more tokens
        print(text.removeprefix(shown), end="", flush=True)
        shown = text
    print()


if __name__ == "__main__":
    main()
