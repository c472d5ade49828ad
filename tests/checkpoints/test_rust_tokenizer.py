"""The Rust tokenizer alone gives the ids and texts that transformers' tokenizers give."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.checkpoints.rust_tokenizer import RustTokenizer, read_rust_tokenizer
from peagle.engine.detokenizer import decoder_of

CHATML = (
    "{% for message in messages %}\n    {%- if message.role == 'bad' %}"
    "{{ raise_exception('no such role') }}{% endif %}\n"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAD = {"__type": "AddedToken", "content": "<|im_end|>", "special": True, "normalized": False}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = (
    "Hello, world! It's 2 + 2 = 4.",
    " leading and trailing ",
    "<|im_start|>user\nhi <|im_end|>\n",
    "Zähle ½ ٣ 日本語 🙂 e\u0301",
    "",
    "tabs\tand\r\nlines\n\n\n",
)
MESSAGES = [
    {"role": "system", "content": "Be brief"},
    {"role": "user", "content": "What is <b>2 + 2</b>?\n"},
]


def byte_level(split: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split or pre.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, "the quick brown fox " * 5], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def write(
    folder: Path, tokenizer: Tokenizer, family: str = "llama", **options: Any
) -> dict[str, Any]:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML,
        **options,
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return config


def plain(folder: Path) -> RustTokenizer:
    tokenizer = read_rust_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def agree(ours: Any, theirs: Any, texts: tuple[str, ...] = TEXTS) -> None:
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert ours.all_special_ids == theirs.all_special_ids
    assert repr(ours.added_tokens_decoder) == repr(theirs.added_tokens_decoder)
    assert ours.chat_template == theirs.chat_template
    for text in texts:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                want = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == want
                if ids:
                    decoder = decoder_of(ours)
                    assert decoder.decode(ids, skip_special_tokens=skip) == want


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    bos = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    return tokenizer


def with_an_ordinary_added_token(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens([AddedToken("world", lstrip=True, normalized=False)])
    return tokenizer


def with_truncation(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.enable_truncation(4)
    return tokenizer


def padded(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.enable_padding(length=64)
    return tokenizer


def as_it_is(tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer


@pytest.mark.parametrize(
    "change", [as_it_is, with_bos, with_an_ordinary_added_token, with_truncation]
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_generic_tokenizer_agrees_with_transformers(
    change: Callable[[Tokenizer], Tokenizer], family: str, tmp_path: Path
) -> None:
    write(tmp_path, change(byte_level()), family)
    agree(plain(tmp_path), AutoTokenizer.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"clean_up_tokenization_spaces": True},
        {"unk_token": "<|endoftext|>", "pad_token": PAD},
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
        {"bos_token": None, "add_bos_token": False},
        {"chat_template": None},
    ],
)
def test_options_mean_what_they_mean_to_transformers(
    options: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, byte_level(), **options)
    agree(plain(tmp_path), AutoTokenizer.from_pretrained(tmp_path))


def test_what_transformers_saves_is_read_back(tmp_path: Path) -> None:
    write(tmp_path, byte_level())
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").is_file()
    agree(plain(tmp_path), AutoTokenizer.from_pretrained(tmp_path))


def added_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        str(number): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for number, token in tokenizer.get_added_tokens_decoder().items()
    }


def qwen(folder: Path, **options: Any) -> None:
    base = byte_level()
    state = json.loads(base.to_str())["model"]
    merges = [tuple(pair) for pair in state["merges"]]
    made = Qwen2Tokenizer(vocab=state["vocab"], merges=merges).backend_tokenizer
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "add_prefix_space": False,
        "add_bos_token": False,
        "added_tokens_decoder": added_tokens(made),
    }
    write(folder, made, "qwen3", **config | options)


def test_a_qwen_tokenizer_agrees_with_transformers(tmp_path: Path) -> None:
    qwen(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert type(theirs) is Qwen2Tokenizer
    agree(plain(tmp_path), theirs)


def change_qwen_normalizer(folder: Path) -> None:
    qwen(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.save(str(folder / "tokenizer.json"))


def change_qwen_split(folder: Path) -> None:
    qwen(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))


def file(name: str, content: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        write(folder, byte_level())
        (folder / name).write_text(content)

    return prepare


def option(**options: Any) -> Callable[[Path], None]:
    return lambda folder: write(folder, byte_level(), **options) and None


LEFT_TO_TRANSFORMERS: dict[str, Callable[[Path], Any]] = {
    "another class": option(tokenizer_class="GPT2Tokenizer"),
    "no class": option(tokenizer_class=None),
    "a family with a class of its own": lambda f: write(f, byte_level(), "qwen2"),
    "a special token that is not in the file": option(pad_token="<pad>"),
    "an extra token that is not in the file": option(additional_special_tokens=["<extra>"]),
    "a role of its own": option(image_token="<|im_start|>"),
    "special tokens are split": option(split_special_tokens=True),
    "several templates": option(chat_template=[{"name": "default", "template": CHATML}]),
    "other added tokens": option(
        added_tokens_decoder={"0": {"content": "<|endoftext|>", "special": True}}
    ),
    "a map of special tokens": file("special_tokens_map.json", '{"pad_token": "<|im_end|>"}'),
    "padding in the file": lambda f: write(f, padded(byte_level())),
    "added tokens of old": file("added_tokens.json", '{"<new>": 323}'),
    "qwen, other normalizer": change_qwen_normalizer,
    "qwen, other split": change_qwen_split,
    "qwen, tokens left to defaults": lambda f: qwen(f) or _without(f, "unk_token"),
}


def _without(folder: Path, key: str) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config[key]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("prepare", LEFT_TO_TRANSFORMERS.values(), ids=LEFT_TO_TRANSFORMERS)
def test_what_transformers_would_change_is_left_to_it(
    prepare: Callable[[Path], Any], tmp_path: Path
) -> None:
    prepare(tmp_path)
    assert read_rust_tokenizer(tmp_path) is None
    tokenizer = load_tokenizer(tmp_path)
    assert not isinstance(tokenizer, RustTokenizer)
    assert tokenizer.encode("Hello") == AutoTokenizer.from_pretrained(tmp_path).encode("Hello")


TEMPLATES = {
    "chatml": CHATML,
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m.content | trim }}{% endfor %}",
    "json": "{{ messages | tojson }}\n{{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n"
    "{% endfor %}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ tools is none }}",
    "date": "{{ strftime_now('%Y') }}{{ enable_thinking | default('unset') }}",
    "white space": "  {% if true %}\n  a\n  {% endif %}\n\n",
}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[RustTokenizer, Any]:
    write(tmp_path, byte_level())
    return plain(tmp_path), AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False, "bos_token": "B"}])
def test_templates_render_as_transformers_renders_them(
    template: str, generation: bool, variables: dict[str, Any], pair: tuple[RustTokenizer, Any]
) -> None:
    options: dict[str, Any] = {
        "chat_template": template,
        "tokenize": False,
        "add_generation_prompt": generation,
        **variables,
    }
    ours, theirs = (t.apply_chat_template(copy.deepcopy(MESSAGES), **options) for t in pair)
    assert ours == theirs
    assert "_transformers" not in vars(pair[0])


# Pieces of templates in which white space, escapes and what transformers adds show.
PIECES = (
    *("\n", "  ", " a ", "{%- if add_generation_prompt %}g{% endif %}\n", "{{- bos_token -}}"),
    *("{{ m.content }}", "{{ m['role'] | upper }}", "{{ m | tojson(indent=1) }}", "{# note #}\n"),
    *("\n  {% if loop.last %}\n  z{% endif %}", "{% if loop.index0 == 2 %}{% break %}{% endif %}"),
    *("{% if m.role == 'system' %}{% continue %}{% endif %}", "{{ strftime_now('%d %b %Y') }}"),
    *("{% generation %}\n{{ m.content | trim }}{% endgeneration %}", "{{ m.content | e }}"),
    *("{{ tools is none }}{{ documents is none }}", "{% set n.x = n.x + 1 %}{{ n.x }}"),
    "{{ raise_exception('stop') if m.content == 'stop' }}",
)
ROLES = st.sampled_from(["system", "user", "assistant"])
CONTENTS = st.one_of(st.text(max_size=12), st.sampled_from(["stop", "<b>&'\"", "  x\n"]))
CONVERSATIONS = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": CONTENTS}), min_size=1, max_size=4
)


@functools.cache
def any_pair() -> tuple[RustTokenizer, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), byte_level())
        return plain(Path(folder)), AutoTokenizer.from_pretrained(folder)


def rendered(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> tuple[str, str]:
    try:
        return "text", tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except TemplateError as error:
        return "refused", str(error)


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=8), CONVERSATIONS, st.booleans())
def test_any_template_renders_any_conversation_as_transformers_does(
    pieces: list[str], messages: list[dict[str, str]], generation: bool
) -> None:
    body = "".join(pieces)
    template = "{%- set n = namespace(x=0) %}{% for m in messages %}" + body + "{% endfor %}"
    options = {"chat_template": template, "add_generation_prompt": generation}
    ours, theirs = (rendered(t, copy.deepcopy(messages), **options) for t in any_pair())
    assert ours == theirs


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (CHATML, "no such role"),
        ("{{ messages.append(1) }}", "append"),
        ("{% for %}", "for"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_a_template_error(
    template: str, named: str, pair: tuple[RustTokenizer, Any]
) -> None:
    messages = [{"role": "bad", "content": "x"}]
    for tokenizer in pair:
        with pytest.raises(TemplateError):
            tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)


def test_what_else_transformers_can_do_is_done_by_it(pair: tuple[RustTokenizer, Any]) -> None:
    ours, theirs = pair
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    template = "{{ tools | tojson }}"
    options: dict[str, Any] = {"chat_template": template, "tokenize": False, "tools": tools}
    assert ours.apply_chat_template(MESSAGES, **options) == theirs.apply_chat_template(
        MESSAGES, **options
    )
    assert ours.apply_chat_template(MESSAGES).input_ids == (
        theirs.apply_chat_template(MESSAGES).input_ids
    )
    assert ours("Hello").input_ids == theirs("Hello").input_ids
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.decode(5) == theirs.decode(5)
    assert ours.encode("Hello", max_length=1, truncation=True) == ours.encode("Hello")[:1]
    with pytest.raises(AttributeError):
        _ = ours.no_such_attribute


def test_a_copy_is_a_tokenizer_too(pair: tuple[RustTokenizer, Any]) -> None:
    assert copy.copy(pair[0]).encode("Hello") == pair[1].encode("Hello")


@functools.cache
def built_in() -> tuple[Any, Any]:
    folder = resolve_model("smollm2-135m")
    return plain(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.network
@pytest.mark.slow
def test_the_built_in_tokenizer_agrees_with_transformers() -> None:
    ours, theirs = built_in()
    agree(ours, theirs)
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    for messages in (MESSAGES, MESSAGES[1:]):
        text = ours.apply_chat_template(messages, **options)
        assert text == theirs.apply_chat_template(messages, **options)


@pytest.mark.network
@pytest.mark.slow
@given(st.text(max_size=60))
def test_the_built_in_tokenizer_agrees_on_any_text(text: str) -> None:
    ours, theirs = built_in()
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids)
