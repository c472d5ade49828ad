"""The tokenizer of a folder whose tokenizer.json says everything, without transformers.

Importing transformers and its auto classes takes seconds; the Rust tokenizer behind them is read
in a tenth of one. It is used directly where transformers would use it as the file describes it:
where a class changes it after reading, or adds tokens to it, transformers' own is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from peagle.checkpoints.files import read_json

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import Model

NAMED = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Classes that take tokenizer.json as it is, and the families for which no other class is chosen.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
GENERIC_FAMILIES = ("llama", "qwen3")
QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
QWEN_FAMILIES = ("qwen2", "qwen3")
# Files and options that change the tokenizer after it is read, or choose between several.
OTHER_FILES = ("added_tokens.json", "additional_chat_templates")
OTHER_OPTIONS = (
    "auto_map",
    "fast_tokenizer_files",
    "fix_mistral_regex",
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "split_special_tokens",
    "model_specific_special_tokens",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
)
# Arguments of apply_chat_template that are not variables of the template.
RENDERED_BY_TRANSFORMERS = {
    *("documents", "continue_final_message", "tokenizer_kwargs"),
    *("padding", "truncation", "max_length"),
}

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class SpecialTokens(NamedTuple):
    named: dict[str, str]  # bos_token, eos_token, ...: chat templates see them
    extra: list[str]


class RustTokenizer:
    """What we ask of a tokenizer, answered by the Rust library.

    Anything else that transformers' tokenizers can do is done by the one of the same folder,
    which is loaded when it is first needed.
    """

    def __init__(
        self, folder: Path, backend: Tokenizer, chat_template: str | None, special: SpecialTokens
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self._folder, self._special = folder, special

    def encode(self, text: str, *, add_special_tokens: bool = True, **options: Any) -> list[int]:
        if options or not isinstance(text, str):
            ids = self._transformers.encode(text, add_special_tokens=add_special_tokens, **options)
        else:
            ids = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids  # type: ignore[no-any-return]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **options: Any) -> str:
        is_list = isinstance(token_ids, list) and all(type(token) is int for token in token_ids)
        decoder = self.backend_tokenizer if is_list and not options else self._transformers
        text: str = decoder.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return text

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        *,
        chat_template: str | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Any:
        template = self.chat_template if chat_template is None else chat_template
        one_conversation = (
            isinstance(conversation, list)
            and len(conversation) > 0
            and all(isinstance(message, dict) for message in conversation)
        )
        asks_for_more = any(
            name in RENDERED_BY_TRANSFORMERS or name.startswith("return_") for name in variables
        )
        # Python functions, which transformers describes as JSON schemas.
        has_functions = any(callable(tool) for tool in variables.get("tools") or ())
        asks_for_more = asks_for_more or has_functions
        if tokenize or not one_conversation or template is None or asks_for_more:
            return self._transformers.apply_chat_template(
                conversation,
                chat_template=chat_template,
                tokenize=tokenize,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        from peagle.checkpoints.chat_templates import compiled

        given = {"tools": None, "documents": None, **self._special.named, **variables}
        return compiled(template).render(
            messages=conversation, add_generation_prompt=add_generation_prompt, **given
        )

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def all_special_ids(self) -> list[int]:
        tokens = dict.fromkeys((*self._special.named.values(), *self._special.extra))
        ids = [self.backend_tokenizer.token_to_id(token) for token in tokens]
        return [number for number in ids if number is not None]

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._transformers(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks for what an object can do, as in copy and pickle
            raise AttributeError(name)
        return getattr(self._transformers, name)

    @cached_property
    def _transformers(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            self._folder, trust_remote_code=False, local_files_only=True
        )


def read_rust_tokenizer(folder: Path) -> RustTokenizer | None:
    """None where transformers would make something else of the folder than tokenizer.json says."""
    from tokenizers import Tokenizer

    try:
        config = read_json(folder / "tokenizer_config.json")
        family = read_json(folder / "config.json").get("model_type")
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the Rust library's is a bare one; transformers says what is wrong
        return None
    special = _special_tokens(config)
    added = backend.get_added_tokens_decoder()
    template = _chat_template(folder, config)
    taken_as_it_is = _is_generic(config, family) or (
        _is_qwen(config, family) and _splits_as_qwen(backend)
    )
    if (
        not taken_as_it_is
        or special is None
        or isinstance(template, list)
        or not _has_all(added, special)
        or not _same_added_tokens(config, added, folder)
        or any(config.get(option) for option in OTHER_OPTIONS)
        or any((folder / name).exists() for name in OTHER_FILES)
        or backend.padding is not None  # names a token, which transformers adds
        or (config.get("clean_up_tokenization_spaces") and not _is_bpe(backend.model))
    ):
        return None
    backend.no_truncation()  # as transformers does for every call that does not ask for it
    return RustTokenizer(folder, backend, template, special)


def _is_generic(config: dict[str, Any], family: Any) -> bool:
    return config.get("tokenizer_class") in GENERIC_CLASSES and family in GENERIC_FAMILIES


def _is_qwen(config: dict[str, Any], family: Any) -> bool:
    """transformers' class has defaults for these three tokens."""
    says_all = all(name in config for name in ("unk_token", "eos_token", "pad_token"))
    return config.get("tokenizer_class") in QWEN_CLASSES and family in QWEN_FAMILIES and says_all


def _splits_as_qwen(backend: Tokenizer) -> bool:
    """transformers' class builds the tokenizer anew, in its own way; is it the file's?"""
    split = {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated"}
    parts = _described(backend.pre_tokenizer).get("pretokenizers", [])
    model, added = backend.model, backend.get_added_tokens_decoder()
    size = backend.get_vocab_size(with_added_tokens=False)
    return (
        _described(backend.normalizer) == {"type": "NFC"}
        and _described(backend.decoder).get("type") == "ByteLevel"
        and len(parts) == 2
        and parts[0] == {**split, "invert": False}
        and (parts[1]["type"], parts[1].get("add_prefix_space")) == ("ByteLevel", False)
        and parts[1].get("use_regex") is False
        and _is_bpe(model)
        and not (model.unk_token or model.dropout or model.fuse_unk or model.byte_fallback)
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and not model.ignore_merges
        and sorted(added) == list(range(size, size + len(added)))
    )


def _described(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as it stands in tokenizer.json."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _is_bpe(model: Model) -> bool:
    """transformers never cleans up the spaces of these."""
    return type(model).__name__ == "BPE"


def _chat_template(folder: Path, config: dict[str, Any]) -> Any:
    file = folder / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")


def _special_tokens(config: dict[str, Any]) -> SpecialTokens | None:
    """None for roles that only some classes know, and for tokens in other words than text."""
    roles = {name for name, value in config.items() if name.endswith("_token") and _text(value)}
    unread = [name for name in NAMED if name not in roles and config.get(name) is not None]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    texts = [_text(token) for token in extra] if isinstance(extra, list) else [None]
    if unread or not roles <= set(NAMED) or None in texts:
        return None
    named = {name: _text(config[name]) for name in NAMED if name in roles}
    return SpecialTokens(named, texts)  # type: ignore[arg-type]


def _text(token: Any) -> str | None:
    """A special token stands as its text or as an object with it."""
    is_object = isinstance(token, dict) and token.get("__type") == "AddedToken"
    content = token.get("content") if is_object else token
    return content if isinstance(content, str) else None


def _has_all(added: dict[int, AddedToken], special: SpecialTokens) -> bool:
    """transformers adds special tokens that the file lacks."""
    known = {token.content for token in added.values() if token.special}
    return {*special.named.values(), *special.extra} <= known


def _same_added_tokens(config: dict[str, Any], added: dict[int, AddedToken], folder: Path) -> bool:
    """Whether nothing beside tokenizer.json says otherwise."""
    from tokenizers import AddedToken

    if "added_tokens_decoder" not in config:
        return not (folder / "special_tokens_map.json").exists()
    try:
        named = {int(i): AddedToken(**t) for i, t in config["added_tokens_decoder"].items()}
    except (TypeError, ValueError, AttributeError):
        return False
    return {i: repr(token) for i, token in named.items()} == {i: repr(t) for i, t in added.items()}
