"""The line is what the card or the user asked for, and names nothing that is not there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.backends.vllm.arguments import VllmCommand, build_command
from peagle.backends.vllm.drafting import has_windows
from peagle.backends.vllm.options import VllmOptions
from peagle.backends.vllm.released import released_models
from peagle.errors import ConfigError, HeadError, ModelError
from tests.tiny.folders import write_head, write_model

P_EAGLE = {"method": "p-eagle", "model": "org/head"}


def _build(model: str = "org/target", extra: tuple[str, ...] = (), **options: Any) -> VllmCommand:
    drafter = options.pop("drafter", {})
    return build_command(model, drafter=drafter, options=VllmOptions(**options), extra=extra)


def _value(command: VllmCommand, flag: str) -> str | None:
    words = command.arguments
    return words[words.index(flag) + 1] if flag in words else None


def _speculation(command: VllmCommand) -> dict[str, Any]:
    text = _value(command, "--speculative-config")
    assert text is not None
    config: dict[str, Any] = json.loads(text)
    return config


def _head(folder: Path, model: Path, **changes: Any) -> Path:
    return write_head(
        folder, model, aux_hidden_state_layer_ids=(1, 2, 3), mask_token_id=200, **changes
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _head(tmp_path_factory.mktemp("heads") / "mine", model)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_line_survives_a_shell() -> None:
    command = _build(drafter=P_EAGLE, extra=("--x", "it's", "a b"))
    assert shlex.split(command.line) == ["vllm", "serve", "org/target", *command.arguments]


def test_a_plain_hugging_face_id_is_passed_on_alone() -> None:
    assert _build().line == "vllm serve org/target"


@pytest.mark.parametrize("name", released_models())
def test_a_released_model_brings_head_k_and_options(name: str) -> None:
    released, command = released_models()[name], _build(name)
    assert command.target == released.target
    assert _speculation(command) == {
        "method": "eagle3",
        "model": released.head,
        "num_speculative_tokens": released.num_speculative_tokens,
        "parallel_drafting": True,
    }
    for option, value in released.options.given().items():
        flag = option.replace("_", "-")
        if isinstance(value, bool):
            assert f"--{flag}" if value else f"--no-{flag}" in command.arguments
        else:
            assert _value(command, f"--{flag}") == str(value)


def test_only_what_no_card_confirms_is_remarked_on() -> None:
    assert _build("gpt-oss-20b").notes == ()
    assert "could not be confirmed" in _build("gemma-4-31b-it").notes[0]


@pytest.mark.parametrize("option", released_models()["gpt-oss-20b"].options.given())
def test_a_given_option_wins_over_the_card(option: str) -> None:
    old = released_models()["gpt-oss-20b"].options.given()[option]
    new = {bool: lambda: not old, str: lambda: "bf16", int: lambda: old + 1, float: lambda: 0.5}[
        type(old)
    ]()
    flag = option.replace("_", "-")
    command = _build("gpt-oss-20b", **{option: new})
    if isinstance(new, bool):
        assert f"--{'' if new else 'no-'}{flag}" in command.arguments
        assert f"--{'' if old else 'no-'}{flag}" not in command.arguments
    else:
        assert _value(command, f"--{flag}") == str(new)
    assert len(command.arguments) == len(_build("gpt-oss-20b").arguments)


def test_words_for_vllm_win_over_the_card() -> None:
    command = _build("gpt-oss-20b", extra=("--kv_cache_dtype=auto", "--enable-prefix-caching"))
    assert "--kv-cache-dtype" not in command.arguments
    assert "--no-enable-prefix-caching" not in command.arguments
    assert command.arguments[-2:] == ("--kv_cache_dtype=auto", "--enable-prefix-caching")


def test_k_head_and_drafter_of_a_released_model_can_be_chosen() -> None:
    assert (
        _speculation(_build("gpt-oss-20b", drafter={"num_speculative_tokens": 3}))[
            "num_speculative_tokens"
        ]
        == 3
    )
    long = "amazon/gpt-oss-20b-p-eagle-long-context"
    chosen = _speculation(_build("gpt-oss-20b", drafter={"model": long}))
    assert (chosen["model"], chosen["num_speculative_tokens"]) == (long, 7)
    assert "--speculative-config" not in _build("gpt-oss-20b", drafter={"method": "none"}).arguments
    ngram = _speculation(_build("gpt-oss-20b", drafter={"method": "ngram"}))
    assert ngram == {"method": "ngram", "num_speculative_tokens": 5}


@given(
    tokens=st.integers(1, 64),
    num_seqs=st.none() | st.integers(1, 2048),
    name=st.sampled_from(["org/target", "qwen3-coder-30b-a3b-instruct"]),
)
def test_graphs_hold_all_rows_of_a_parallel_drafter(
    tokens: int, num_seqs: int | None, name: str
) -> None:
    drafter = {**P_EAGLE, "num_speculative_tokens": tokens}
    command = _build(name, drafter=drafter, max_num_seqs=num_seqs)
    served = int(_value(command, "--max-num-seqs") or 0)
    assert num_seqs is None or served == num_seqs
    assert int(_value(command, "--max-cudagraph-capture-size") or 0) == 2 * tokens * served


def test_the_card_s_graphs_grow_with_more_requests() -> None:
    command = _build("gpt-oss-20b", max_num_seqs=512)
    assert _value(command, "--max-cudagraph-capture-size") == str(2 * 7 * 512)
    assert _value(_build("gpt-oss-20b", max_num_seqs=1), "--max-cudagraph-capture-size") == "4096"


@pytest.mark.parametrize(
    "drafter",
    [{}, {"method": "none"}, {"method": "ngram"}, {"method": "eagle3", "model": "org/head"}],
)
def test_vllm_chooses_its_graphs_where_nothing_drafts_in_parallel(drafter: dict[str, Any]) -> None:
    for name in ("org/target", "gpt-oss-20b"):
        assert "--max-cudagraph-capture-size" not in _build(name, drafter=drafter).arguments or (
            name == "gpt-oss-20b" and drafter == {}
        )


@pytest.mark.parametrize(
    "changes", [{"drafter": {"method": "ngram"}}, {"pipeline_parallel_size": 2}], ids=str
)
def test_a_card_s_async_scheduling_is_for_its_own_head_on_one_stage(
    changes: dict[str, Any],
) -> None:
    assert "--async-scheduling" in _build("gpt-oss-20b").arguments
    assert "--async-scheduling" not in _build("gpt-oss-20b", **changes).arguments
    asked = _build("gpt-oss-20b", async_scheduling=True, **changes)
    assert "--async-scheduling" in asked.arguments


def test_eager_mode_asks_for_no_graphs() -> None:
    command = _build(drafter=P_EAGLE, enforce_eager=True)
    assert "--max-cudagraph-capture-size" not in command.arguments
    assert "--enforce-eager" in command.arguments


def test_every_option_is_a_flag_of_its_name() -> None:
    values: dict[Any, Any] = {bool | None: True, str | None: "fp8"}
    for name, kind in get_type_hints(VllmOptions).items():
        value = values.get(kind, 1)
        command = _build(**{name: value})
        flag = f"--{name.replace('_', '-')}"
        assert command.arguments == ((flag,) if value is True else (flag, str(value)))


def test_keys_of_vllm_alone_go_through() -> None:
    drafter = {**P_EAGLE, "draft_tensor_parallel_size": 1}
    assert _speculation(_build(drafter=drafter))["draft_tensor_parallel_size"] == 1


def test_vllm_s_own_way_to_ask_for_p_eagle_is_understood() -> None:
    drafter = {"method": "eagle3", "model": "org/head", "parallel_drafting": True}
    assert _speculation(_build(drafter=drafter)) == {**drafter, "num_speculative_tokens": 5}


def test_a_native_head_is_planned_in_the_cache_and_nothing_is_written(
    model: Path, head: Path, cache: Path
) -> None:
    command = _build(str(model), drafter={"model": str(head)})
    assert command.export is not None
    assert command.export.out.parent == cache / "exports"
    assert command.export.out.name.startswith("mine-")
    assert _speculation(command) == {
        "method": "eagle3",
        "model": str(command.export.out),
        "num_speculative_tokens": 3,  # the head's advice
        "parallel_drafting": True,
    }
    assert shlex.split(command.export.command)[:4] == [
        *("peagle", "export", str(head), str(command.export.out))
    ]
    assert not cache.exists()


def test_the_head_s_windows_do_not_cut_the_target_s_layers_into_groups(
    model: Path, head: Path, tmp_path: Path
) -> None:
    flag, windowed = "disable-hybrid-kv-cache-manager", tmp_path / "windowed"
    _head(windowed, model, sliding_window=32)
    for own, told in ((head, []), (windowed, [f"--{flag}"])):
        command = _build(str(model), drafter={"model": str(own)})
        assert [word for word in command.arguments if flag in word] == told
    drafter, asked = {"model": str(windowed)}, {flag.replace("-", "_"): False}
    assert f"--no-{flag}" in _build(str(model), drafter=drafter, **asked).arguments
    export = _build(str(model), drafter=drafter).export
    assert export
    export.run()
    assert f"--{flag}" in _build(str(model), drafter={"model": str(export.out)}).arguments


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, False),
        ({"sliding_window": None}, False),
        ({"sliding_window": 128}, True),
        ({"sliding_window": 128, "use_sliding_window": False}, False),
        ({"text_config": {"sliding_window": 128}}, True),
        ({"transformer_layer_config": {"sliding_window": 128}}, True),
    ],
)
def test_windows_are_found_in_every_layout(config: dict[str, Any] | None, expected: bool) -> None:
    assert has_windows(config) is expected


def test_another_head_or_target_is_another_export(model: Path, head: Path, tmp_path: Path) -> None:
    drafter = {"model": str(head)}
    first, again = (_build(str(model), drafter=drafter).export for _ in range(2))
    assert first == again
    other = _head(tmp_path / "mine", model, num_speculative_tokens=2)
    changed = _build(str(model), drafter={"model": str(other)}).export
    elsewhere = _build("org/target", drafter=drafter).export
    assert first
    assert changed
    assert elsewhere
    assert len({first.out, changed.out, elsewhere.out}) == 3


def test_an_export_is_done_once(model: Path, head: Path) -> None:
    export = _build(str(model), drafter={"model": str(head)}).export
    assert export
    assert not export.done
    export.run()
    assert export.done
    config = export.out / "config.json"
    written = config.stat().st_mtime_ns
    export.run()
    assert config.stat().st_mtime_ns == written
    served = _build(str(model), drafter={"model": str(export.out)})  # as any head of vLLM's layout
    assert served.export is None
    assert _speculation(served)["parallel_drafting"] is True
    assert _speculation(served)["num_speculative_tokens"] == 3
    with pytest.raises(ConfigError, match="trained for 4"):
        _build(str(model), drafter={"model": str(export.out), "num_speculative_tokens": 5})


def _foreign(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


RAW = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}


@pytest.mark.parametrize(
    ("config", "parallel", "tokens"),
    [
        ({**RAW, "ptd_token_id": 3}, True, 5),
        (RAW, False, 5),
        (
            {
                "speculators_model_type": "peagle",
                "speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]},
            },
            True,
            6,
        ),
        ({"speculators_model_type": "eagle3"}, False, 5),
    ],
)
def test_a_head_in_vllm_s_layouts_says_its_kind(
    tmp_path: Path, config: dict[str, Any], parallel: bool, tokens: int
) -> None:
    folder = _foreign(tmp_path / "head", **config)
    found = _speculation(_build(drafter={"model": str(folder)}))
    assert found.get("parallel_drafting", False) is parallel
    assert (found["model"], found["num_speculative_tokens"]) == (str(folder), tokens)


def test_a_head_that_ends_early_is_remarked_on(tmp_path: Path, model: Path) -> None:
    folder = _foreign(tmp_path / "head", **RAW, max_position_embeddings=100)
    drafter = {"model": str(folder)}
    assert "100 positions of 256" in _build(str(model), drafter=drafter).notes[0]
    assert _build(str(model), drafter=drafter, max_model_len=100).notes == ()


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"model": "org/head"}, "does not say what kind of head"),
        ({"method": "p-eagle"}, "needs a head"),
        ({**P_EAGLE, "num_speculative_tokens": 0}, "out of range"),
        ({**P_EAGLE, "verification": "coupled"}, "no option verification"),
        ({**P_EAGLE, "num_draft_nodes": 7}, "chains of drafts"),
        (
            {"model": "amazon/gpt-oss-20b-p-eagle", "num_speculative_tokens": 11},
            "was trained for 10",
        ),
        ({"model": "amazon/gpt-oss-20b-p-eagle", "method": "eagle3"}, "is a p-eagle head"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused(drafter: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _build(drafter=drafter)
    assert caught.value.hint


def test_a_head_for_another_target_is_refused(tmp_path: Path, model: Path) -> None:
    other = write_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"hidden_size": 512}))
    head = _head(tmp_path / "head", model)
    with pytest.raises(HeadError, match="hidden size 32 but the target has 512"):
        _build(str(other), drafter={"model": str(head)})


def test_a_folder_that_is_no_head_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(HeadError, match="neither a P-EAGLE nor an EAGLE-3 head"):
        _build(str(model), drafter={"model": str(model)})


def test_a_misspelt_name_is_met_with_the_nearest() -> None:
    with pytest.raises(ModelError, match="no model 'gpt-oss-12b'") as caught:
        _build("gpt-oss-12b")
    assert str(caught.value.hint).startswith("did you mean gpt-oss-120b?")


def test_a_built_in_target_is_named_without_fetching_it(cache: Path) -> None:
    command = _build("smollm2-135m", drafter={"model": "smollm2-135m-p-eagle"})
    assert command.target == str(cache / "models" / "smollm2-135m")
    assert _value(command, "--served-model-name") == "smollm2-135m"
    assert not cache.exists()
