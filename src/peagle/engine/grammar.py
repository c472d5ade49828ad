"""Structured outputs: which tokens a request's grammar permits behind each prefix of its drafts.

Grammars are llguidance's. The masks depend on the answer so far and on nothing else, so an answer
is the one that masked decoding without drafts gives.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peagle.engine.detokenizer import rust_tokenizer
from peagle.errors import RequestError
from peagle.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 128  # grammars that are kept
MAX_GRAMMAR_SIZE = 100_000  # symbols: about a second of compilation
MAX_DIVISOR = 50_000  # of multipleOf: half a second
DIVISOR = re.compile(r'"multipleOf"\s*:\s*-?(\d[\d.]{0,40})')
ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")


class Grammar:
    """Where one answer stands in its grammar.

    The matcher may be ahead of the answer by the drafts that it was asked about last. A token that
    ends the sequence ends the grammar as well: the matcher is never told of it.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self._vocab_size, self._eos_token_ids = matcher, vocab_size, eos_token_ids
        self._ahead: list[int] = []

    def accept(self, token_id: int) -> None:
        """The answer's next token."""
        self._go_to(())
        if token_id not in self._eos_token_ids:
            self._matcher.consume_token(token_id)

    def permitted(self, drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Which of a tree's nodes may stand where they stand; parents are rows, of which row 0 is
        the answer so far and row n + 1 node n. A token that ends the sequence is not worth a row:
        the row before it samples it."""
        paths: dict[int, list[int]] = {0: []}
        for node, (token, parent) in enumerate(zip(drafts, parents, strict=True)):
            if parent in paths and self._go_to([*paths[parent], token]):
                paths[node + 1] = [*paths[parent], token]
        return [row - 1 for row in paths if row]

    def masks(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """Bits of the tokens that are permitted behind each of the drafts' paths, 32 to an int32
        [R, V / 32]. All are where the path itself is forbidden: nobody reads what is sampled there.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        bits = allocate_token_bitmask(len(paths), self._vocab_size)
        for row, path in enumerate(paths):
            if self._go_to(path):
                fill_next_token_bitmask(self._matcher, bits, row)
                if self._matcher.is_error():  # it would permit the end of the sequence
                    bits[row] = 0
        return torch.from_numpy(bits)

    @property
    def error(self) -> str | None:
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def _go_to(self, path: Sequence[int]) -> bool:
        """Brings the matcher behind these drafts, or as far as it permits them: False."""
        common = 0
        for ahead, wanted in zip(self._ahead, path, strict=False):
            if ahead != wanted:
                break
            common += 1
        if len(self._ahead) > common:
            self._matcher.rollback(len(self._ahead) - common)
            del self._ahead[common:]
        rest = list(path[common:])
        if self._eos_token_ids.intersection(rest):
            return False
        taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._ahead += rest[:taken]
        return taken == len(rest)


def apply_mask(logits: Tensor, bits: Tensor) -> Tensor:
    """logits [R, V], bits [R, V / 32] int32, on any device -> [R, V]"""
    octets = bits.view(torch.uint8).to(logits.device)[:, :, None]  # little-endian
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    permitted = ((octets >> shifts) & 1).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(permitted == 0, -torch.inf)


class GrammarCompiler:
    """Grammars over one tokenizer's tokens. The last ones are kept, so that requests that share a
    schema compile it once."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiled = lru_cache(MAX_COMPILED)(self._matcher)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """A grammar at its beginning; raises RequestError where the constraint makes none."""
        matcher = self._compiled(
            params.kind, params.text, params.disable_any_whitespace, params.whitespace_pattern
        )
        size = max(self._vocab_size, self._tokens.vocab_size)
        return Grammar(matcher.deep_copy(), size, self._eos_token_ids)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        backend = rust_tokenizer(self._tokenizer)
        if backend is None or not self._eos_token_ids:
            lacks = "fast tokenizer" if backend is None else "end-of-sequence token"
            raise RequestError(f"structured outputs need a {lacks}, which this model does not have")
        size = max(self._vocab_size, backend.get_vocab_size(with_added_tokens=True))
        return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=sorted(self._eos_token_ids))

    def _matcher(
        self, kind: str, text: str, disable_any_whitespace: bool, whitespace_pattern: str | None
    ) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits, grammar_from

        limits = LLParserLimits(max_grammar_size=MAX_GRAMMAR_SIZE, verbose_errors=False)
        if kind in ("json", "grammar"):
            _check_divisors(text)
        try:
            if kind in ("json", "json_object"):
                options: dict[str, Any] = {"whitespace_flexible": not disable_any_whitespace}
                if whitespace_pattern is not None:
                    options["whitespace_pattern"] = whitespace_pattern
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
            elif kind == "choice":  # one terminal: of rules a parser may have 2,000 open at a time
                texts = " | ".join(map(json.dumps, json.loads(text)))
                grammar = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
            else:
                grammar = grammar_from(kind, text)  # type: ignore[arg-type]
            matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
            problem = matcher.get_error()
        except ValueError as error:  # of llguidance's own reading of schemas and GBNF
            if isinstance(error, RequestError):
                raise
            problem = str(error)
        if problem:
            raise RequestError(
                f"{kind} cannot be compiled: {_first_line(problem)}",
                hint="see docs/structured_output.md for what is supported",
            )
        return matcher


def _check_divisors(text: str) -> None:
    """Of a schema, or of those in a grammar. A multiple of n is told by an automaton of n states,
    one of n and of m by one of their common multiple, and llguidance sets no limit to them: a
    schema of forty characters would keep the engine for minutes. Zeros at the end cost nothing."""
    plain = ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)
    digits = (number.replace(".", "").strip("0") for number in DIVISOR.findall(plain))
    if math.lcm(*(int(some or 1) for some in digits)) > MAX_DIVISOR:
        raise RequestError(
            "the least common multiple of all multipleOf is too large",
            hint=f"use at most {MAX_DIVISOR}, but for powers of ten",
        )


def _first_line(message: str) -> str:
    """llguidance's errors go on with the grammar and the state of its parser."""
    lines = [line.strip() for line in message.splitlines()] or [""]
    reason = next((line for line in lines if line.startswith("error: ")), "")
    return f"{lines[0]} {reason.removeprefix('error: ')}".strip()[:300]
