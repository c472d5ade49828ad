"""Flags of the verbs that let a target answer prompts: prepare and evaluate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli.flags import System, doc_of, parse_json_object
from peagle.cli.flags.sampling import TEMPERATURE
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.prepare.dataset_spec import DatasetSpec

Limit = Annotated[int | None, typer.Option(help="Only the first N prompts.", metavar="N", min=1)]
Split = Annotated[str, typer.Option(help="Split of a Hugging Face dataset.")]


def template_kwargs(text: str | None) -> dict[str, Any]:
    return {} if text is None else parse_json_object("--chat-template-kwargs", text)


def _help(name: str) -> str:
    doc = doc_of(SamplingParams, name)
    assert doc is not None
    return doc.text


def _answers(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Answers")


@dataclass(frozen=True, kw_only=True)
class AnswerFlags:
    """How answers are sampled. What these cannot say would not be the target's own distribution."""

    temperature: Annotated[float | None, _answers("0, the default, is greedy.")] = None
    top_p: Annotated[float, _answers(_help("top_p"))] = SamplingParams.top_p
    top_k: Annotated[int, _answers(_help("top_k"))] = SamplingParams.top_k
    seed: Annotated[int, _answers("Same seed, same answers.")] = 0
    system: System = None
    raw: Annotated[bool, _answers("Do not apply the chat template.", "--raw")] = False
    chat_template_kwargs: Annotated[
        str | None, _answers("Variables of the chat template, as served: a reasoning mode.")
    ] = None

    def spec(
        self, target: str, max_tokens: int, *, cut_loops: int | None = None, answers_from: str = ""
    ) -> DatasetSpec:
        from peagle.prepare.dataset_spec import EMBEDDED, DatasetSpec

        if self.raw and self.system is not None:
            raise ConfigError("--system needs the chat template, --raw turns it off")
        if self.raw and self.chat_template_kwargs is not None:
            raise ConfigError("--chat-template-kwargs needs the chat template, --raw turns it off")
        return DatasetSpec(
            target=target,
            params=self.params(max_tokens),
            seed=self.seed,
            system=self.system,
            raw=self.raw,
            cut_loops=cut_loops,
            answers_from=answers_from or EMBEDDED,
            chat_template_kwargs=template_kwargs(self.chat_template_kwargs),
        )

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=TEMPERATURE if self.temperature is None else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=max_tokens,
        )
