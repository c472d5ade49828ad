"""Long conversations from short prompts, for a head that is to draft behind long contexts.

    python recipes/long_prompts.py smollm2-135m prompts.jsonl.gz long.jsonl.gz
    peagle prepare --model smollm2-135m --prompts long.jsonl.gz --max-tokens 256 --out data/long

Each conversation gets a length of its own between --shortest and --longest, in even proportion
over the powers of two. A random share of it is texts to read, before the first question; then come
further questions while they and their answers fit. Texts and questions are prompts of the file,
each used once, in an order that the seed gives. System messages are left out.

The first question's id is the conversation's, and all of its prompts lie on the same side of the
split into rows to train on and rows that are held out: what is held out of the short prompts is
held out here.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.checkpoints.references import load_config, load_tokenizer, resolve_model
from peagle.data.dataset import is_held_out
from peagle.data.prompts import Conversation, read_prompts
from peagle.errors import ConfigError, PeagleError
from peagle.files import atomic_file, writing
from peagle.models.config import DecoderConfig
from peagle.prepare.dialogue import chat_renderer
from peagle.train.recipe import DataSection

HEADING = "Read these texts first.\n\n"
BETWEEN = "\n\n---\n\n"
QUESTION = "Now to something else.\n\n"


@dataclass(frozen=True)
class Lengths:
    """In tokens of the target."""

    num_tokens: Callable[[str], int]  # of a turn, with what the chat template puts around it
    shortest: int  # of a conversation, its answers included
    longest: int
    max_tokens: int  # of an answer

    def asked(self, conversation: Conversation) -> int:
        return sum(self.num_tokens(turn) + self.max_tokens for turn in conversation.turns)

    def read(self, conversation: Conversation) -> int:
        return self.num_tokens(HEADING + text_of(conversation) + BETWEEN + QUESTION)

    def drawn(self, rng: random.Random) -> int:
        return round(math.exp(rng.uniform(math.log(self.shortest), math.log(self.longest))))


def text_of(conversation: Conversation) -> str:
    return "\n\n".join(conversation.turns)


def long_conversations(
    prompts: Sequence[Conversation], lengths: Lengths, held_out_share: float, seed: int
) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    sides: tuple[list[Conversation], ...] = ([], [])
    for prompt in rng.sample(prompts, len(prompts)):
        sides[is_held_out(prompt.id, held_out_share)].append(prompt)
    while any(sides):
        (left,) = rng.choices(sides, [len(side) for side in sides])
        first, length = left.pop(), lengths.drawn(rng)
        used = lengths.asked(first)
        if used > lengths.longest:
            continue
        texts = taken(left, rng.random() * (length - used), lengths.read)
        first = behind(texts, first)
        more = taken(left, length - lengths.asked(first), lengths.asked)
        turns = [turn for conversation in (first, *more) for turn in conversation.turns]
        yield {"id": first.id, "category": first.category, "turns": turns}


def taken(
    left: list[Conversation], room: float, cost: Callable[[Conversation], int]
) -> list[Conversation]:
    """The last ones of `left`, as many as fit, taken off it."""
    found: list[Conversation] = []
    while left and (room := room - cost(left[-1])) >= 0:
        found.append(left.pop())
    return found


def behind(texts: Sequence[Conversation], asked: Conversation) -> Conversation:
    """The conversation with the texts before its first question."""
    if not texts:
        return asked
    question = QUESTION + asked.turns[0]
    first = HEADING + BETWEEN.join([*map(text_of, texts), question])
    return Conversation(asked.id, (first, *asked.turns[1:]), category=asked.category)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the target: a folder, a Hugging Face id or smollm2-135m")
    parser.add_argument("prompts", help="jsonl, also .gz, as for `peagle prepare`")
    parser.add_argument("out", type=Path, help="a .jsonl.gz file")
    parser.add_argument("--shortest", type=int, default=1024, help="tokens of a conversation")
    parser.add_argument("--longest", type=int, help="default: the model's context")
    parser.add_argument(
        "--max-tokens", type=int, default=256, help="of an answer, as for `peagle prepare`"
    )
    parser.add_argument(
        "--held-out-share",
        type=float,
        default=DataSection.held_out_share,
        help="data.held_out_share of the recipe",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    try:
        write(args)
    except PeagleError as error:
        raise SystemExit(f"error: {error.message}\nhint: {error.hint}") from None


def write(args: argparse.Namespace) -> None:
    folder = resolve_model(args.model)
    render = chat_renderer(load_tokenizer(folder))
    context = DecoderConfig.from_transformers(load_config(folder)).max_position_embeddings
    longest = context if args.longest is None else min(args.longest, context)
    if not 1 <= args.shortest <= longest:
        raise ConfigError(
            f"--shortest {args.shortest} is out of range", hint=f"use a number from 1 to {longest}"
        )
    lengths = Lengths(
        lambda turn: len(render([{"role": "user", "content": turn}])),
        *(args.shortest, longest, args.max_tokens),
    )
    prompts = read_prompts(args.prompts).good
    rows = long_conversations(prompts, lengths, args.held_out_share, args.seed)
    with (
        writing(args.out),
        atomic_file(args.out) as temporary,
        temporary.open("wb") as file,
        # No name and no time in the header: the same arguments give the same bytes.
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed,
    ):
        for row in rows:
            packed.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


if __name__ == "__main__":
    main()
