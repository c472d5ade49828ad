"""Answer several prompts at once with a P-EAGLE drafter, and see that it changes nothing.

python examples/generate.py
"""

from __future__ import annotations

from peagle import LLM, SamplingParams

PROMPTS = ["The capital of France is", "1, 2, 3, 4,"]
DRAFTER = {"model": "smollm2-135m-p-eagle", "num_speculative_tokens": 5}


def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    drafted = LLM("smollm2-135m", speculative_config=DRAFTER).generate(PROMPTS, params)
    plain = LLM("smollm2-135m").generate(PROMPTS, params)
    for result, expected in zip(drafted, plain, strict=True):
        answer = result.outputs[0]
        print(f"{result.prompt}{answer.text}")
        print(f"  tokens per step: {result.stats.mean_acceptance_length:.2f}")
        print(f"  as without a drafter: {answer.token_ids == expected.outputs[0].token_ids}")


if __name__ == "__main__":
    main()
