"""New prompts from old ones, for more answers of the target itself.

    python recipes/vary_prompts.py prompts.jsonl.gz varied.jsonl.gz

Each prompt gets an instruction before or behind it, and three in ten a second question. Greedy
answers to them are new text of the kind that is served; a second answer to the same prompt has to
be sampled to be new. Ids stay, so that a held-out prompt's variant is held out as well.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peagle.data.prompts import Conversation, read_prompts
from peagle.errors import PeagleError
from peagle.files import write_atomic

MAX_CHARACTERS = 1800
SECOND_QUESTIONS = 0.3  # share of prompts
ABOUT_CODE = 0.7  # share of code prompts that get an instruction about code

INSTRUCTIONS = """\
Answer in one short paragraph.
Explain it step by step.
Give three examples.
Use simple words, as for a child.
Answer as a list of bullet points.
Be brief.
Write at least three paragraphs.
First give the answer, then the reasons.
Give the pros and cons.
Write it as a letter to a friend.
Write it as a dialogue between two people.
Use a table where it helps.
Explain why this matters.
End with a short summary.
Write in a formal tone.
Write in a casual tone.
Mention one common mistake.
Add a title.""".splitlines()

CODE_INSTRUCTIONS = """\
Write it in Python.
Write it in JavaScript.
Add comments to the code.
Also write a short test.
Only give the code.
Explain the code line by line.
Use a class.
Handle bad input as well.
Then say what its running time is.
Use only the standard library.
Write a docstring.""".splitlines()

QUESTIONS = """\
Can you explain that in more detail?
Give me another example.
Now rewrite your answer in half the length.
What are the limits of this?
Rewrite it for a ten-year-old.
Now make it more formal.
Which part is the most important, and why?
What would change if the numbers were doubled?
Summarize your answer in one sentence.
Turn it into a list of steps.
How could I check that this is right?
What should I read next about it?""".splitlines()

CODE_QUESTIONS = """\
Now write it in another language.
Add error handling.
Write tests for it.
Make it faster.
Explain how it works.
Add type hints and a docstring.
What is its time complexity?
Rewrite it without a loop.""".splitlines()


def varied(prompts: Sequence[Conversation], seed: int = 11) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    for conversation in rng.sample(prompts, len(prompts)):
        prompt = conversation.turns[0]
        if len(prompt) > MAX_CHARACTERS:
            continue
        is_code = conversation.category == "code" and rng.random() < ABOUT_CODE
        turns = [_with_instruction(prompt, is_code, rng)]
        if rng.random() < SECOND_QUESTIONS:
            turns.append(rng.choice(CODE_QUESTIONS if is_code else QUESTIONS))
        yield {"id": conversation.id, "category": conversation.category, "turns": turns}


def _with_instruction(prompt: str, is_code: bool, rng: random.Random) -> str:
    text = rng.choice(CODE_INSTRUCTIONS if is_code else INSTRUCTIONS)
    behind = f"{prompt.rstrip()} {text}"
    return rng.choice([behind, behind, behind, f"{text} {prompt}", f"{prompt}\n\n{text}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", help="jsonl, also .gz, as for `peagle prepare`")
    parser.add_argument("out", type=Path, help="a .jsonl.gz file")
    args = parser.parse_args()
    try:
        rows = varied(read_prompts(args.prompts).good)
    except PeagleError as error:
        parser.error(str(error))
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomic(args.out, gzip.compress(lines.encode()))


if __name__ == "__main__":
    main()
