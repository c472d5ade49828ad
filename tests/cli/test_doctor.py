"""`peagle doctor`: each silent loss is found, and healthy data is called healthy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from peagle.backends.vllm.released import released_models
from peagle.data.dataset import Dataset, DatasetWriter, Row, read_manifest
from peagle.doctor import check_drafts, template_frame
from tests.tiny.families import ADAPTED, FAMILIES
from tests.tiny.folders import byte_tokenizer, write_head, write_model
from tests.tiny.models import UNEVEN

from .fakes import Shell

OTHER_TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


def levels(shell: Shell) -> dict[str, str]:
    return {finding["check"]: finding["level"] for finding in shell.json}


def rewrite(data: str, folder: Path, change: Any = None, **made_by: Any) -> str:
    """The dataset with every row and its manifest changed."""
    source = Dataset(Path(data))
    manifest = read_manifest(Path(data))["made_by"] | made_by
    writer = DatasetWriter(folder, {k: v for k, v in manifest.items() if v != "absent"})
    for index in range(len(source)):
        row = source[index]
        tokens, mask = row.token_ids.tolist(), row.loss_mask.tolist()
        fields = {"id": row.id, "token_ids": tokens, "loss_mask": mask}
        writer.add(Row(**fields | (change(tokens, mask) if change else {})))
    writer.flush()
    return str(folder)


def test_healthy_data_has_no_errors(command: Shell, model: str, data: str) -> None:
    assert command("doctor", "--data", data, "--model", model, "--json") == 0
    found = levels(command)
    for check in ("tokenizer", "chat template", "row start", "answer start", "mask", "token ids"):
        assert found[check] == "ok", check
    assert "share of the loss per depth" in command.out


@pytest.mark.parametrize(
    ("check", "level", "change", "made_by"),
    [
        ("chat template", "error", None, {"chat_template": "0123"}),
        ("chat template", "warning", None, {"chat_template": None}),
        ("chat template", "warning", None, {"chat_template": "absent"}),
        ("tokenizer", "error", None, {"tokenizer": "0123"}),
        ("target", "warning", None, {"target": "another"}),
        ("mask on prompts", "error", lambda t, m: {"loss_mask": [1] * len(t)}, {}),
        ("answer start", "error", lambda t, m: {"loss_mask": [1] * len(t)}, {}),
        ("row start", "error", lambda t, m: {"token_ids": [65] * len(t)}, {}),
        ("token ids", "error", lambda t, m: {"token_ids": [9999] * len(t)}, {}),
        ("clipped", "warning", lambda t, m: {"clipped": True}, {}),
        ("loops", "warning", lambda t, m: {"looping": True}, {}),
        ("data", "error", lambda t, m: {"loss_mask": [0] * len(t)}, {}),
        (
            "loss shares",
            "warning",
            lambda t, m: {"loss_mask": [int(i % 3 == 0 and i > 3) for i in range(len(t))]},
            {},
        ),
    ],
)
def test_what_is_wrong_with_data_is_found(
    check: str,
    level: str,
    change: Any,
    made_by: dict[str, Any],
    command: Shell,
    model: str,
    data: str,
    tmp_path: Path,
) -> None:
    broken = rewrite(data, tmp_path, change, **made_by)
    code = command("doctor", "--data", broken, "--model", model, "--json")
    assert levels(command)[check] == level
    assert code == int("error" in levels(command).values())
    assert all(f["hint"] for f in command.json if f["level"] != "ok")


def test_a_template_of_the_target_that_changed_is_found(
    command: Shell, data: str, tmp_path: Path
) -> None:
    other = write_model(tmp_path, OTHER_TEMPLATE)
    assert command("doctor", "--data", data, "--model", str(other), "--json") == 1
    assert levels(command)["chat template"] == "error"


def examine_head(command: Shell, folder: Path, model: str, data: str, **changes: Any) -> Any:
    head = write_head(folder, Path(model), **changes)
    command("doctor", "--data", data, "--model", model, "--head", str(head), "--json")
    return levels(command)


def test_the_frame_is_what_all_templated_prompts_share() -> None:
    tokenizer = byte_tokenizer()
    start, end = template_frame(tokenizer)
    assert tokenizer.decode(start) == "<|"
    assert tokenizer.decode(end) == "\n<|assistant|>"


def test_an_untrained_head_is_found_by_its_acceptance(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    found = examine_head(command, tmp_path / "head", model, data)
    assert found["fit"] == found["layer ids"] == found["head's context"] == found["mask id"] == "ok"
    assert found["draft vocabulary"] == "ok"
    assert found["window"] == "warning"
    assert found["acceptance"] in ("error", "warning")


def test_what_is_wrong_with_a_head_is_found(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    row = Dataset(Path(data))[0]
    found = examine_head(
        command,
        tmp_path / "head",
        model,
        data,
        aux_hidden_state_layer_ids=(1, 2, 3),
        max_position_embeddings=64,
        draft_vocab_size=40,
        mask_token_id=int(row.token_ids[3]),
        target_model="another",
        sliding_window=8,
    )
    assert found["layer ids"] == found["head's context"] == "warning"
    assert found["head's target"] == "warning"
    assert found["mask id"] == found["draft vocabulary"] == "error"
    assert found["window"] == "ok"


def test_d2t_out_of_range_is_a_finding(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    head = write_head(tmp_path / "head", Path(model), draft_vocab_size=40)
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"][-1] = 10**6
    save_file(tensors, head / "model.safetensors")
    assert command("doctor", "--model", model, "--head", str(head), "--json") == 1
    (error,) = (f for f in command.json if f["level"] == "error")
    assert "d2t" in error["message"]


def test_a_head_that_does_not_fit_is_a_finding(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    found = examine_head(command, tmp_path / "head", model, data, target_hidden_size=64)
    assert found["head"] == "error"
    assert command.code == 1


def test_a_users_error_is_one_line(command: Shell, model: str, data: str) -> None:
    assert command("doctor", "--model", model) == 2
    assert "nothing to examine" in command.err
    assert command("doctor", "--model", "/missing", "--data", data) == 2


def test_findings_are_lines(command: Shell, model: str, tmp_path: Path) -> None:
    assert command("doctor", "--model", model, "--data", str(tmp_path)) == 1
    assert command.out.startswith("error    data: ")
    assert "hint: run `peagle prepare`" in command.out


def configs_of(folder: Path, *sources: str) -> list[str]:
    """Copies of the folders' config.json alone."""
    copies = []
    for number, source in enumerate(sources):
        copy = folder / str(number)
        copy.mkdir()
        (copy / "config.json").write_text((Path(source) / "config.json").read_text())
        copies.append(str(copy))
    return copies


def test_two_configs_alone_say_what_fits_and_what_it_needs(
    command: Shell, model: str, head: str, tmp_path: Path
) -> None:
    target, drafter = configs_of(tmp_path, model, head)
    assert command("doctor", drafter, "--model", target, "--json") == 0
    found = {finding["check"]: finding for finding in command.json}
    assert "llama is native and runs by the fused kernels" in found["target"]["message"]
    assert "p-eagle, 3 draft tokens unless told, 4 at most" in found["drafts"]["message"]
    assert "KiB of cache for each token" in found["memory"]["message"]
    assert found["fit"]["level"] == "ok"


@pytest.mark.parametrize(
    ("name", "level", "message"),
    [
        ("gpt-oss", "ok", "gpt_oss is native and runs by its modules"),
        ("gpt2", "warning", "gpt2 runs by transformers' modules, slower"),
    ],
)
def test_a_head_for_another_target_does_not_fit(
    name: str, level: str, message: str, command: Shell, head: str, tmp_path: Path
) -> None:
    (FAMILIES | ADAPTED)[name]().save_pretrained(tmp_path / "target")
    assert command("doctor", head, "--model", str(tmp_path / "target"), "--json") == 1
    found = {finding["check"]: finding for finding in command.json}
    assert found["fit"]["level"] == "error"
    assert "vocabulary" in found["fit"]["message"]
    assert found["target"]["level"] == level
    assert message in found["target"]["message"]


# What config.json says of the published targets, at their own sizes: no weight is needed.
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
WINDOWS = ["sliding_attention", "full_attention"]
QWEN3_CODER = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "vocab_size": 262144,
    },
    "tie_word_embeddings": True,
}
PUBLISHED: dict[str, tuple[dict[str, Any], str, str]] = {  # config, by what, memory in GiB
    "gpt-oss-20b": (
        GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32, "layer_types": WINDOWS * 12},
        "; its experts, in MXFP4, by a grouped product",
        "12.8 + 3.2 GiB",
    ),
    "gpt-oss-120b": (
        GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": WINDOWS * 18},
        "; its experts, in MXFP4, by a grouped product",
        "60.8 + 3.2 GiB",
    ),
    "qwen3-coder-30b-a3b-instruct": (
        QWEN3_CODER,
        "; its experts by a grouped product",
        "56.9 + 1.7 GiB",
    ),
    "qwen3-coder-30b-a3b-instruct-fp8": (
        QWEN3_CODER | {"quantization_config": QWEN3_FP8},
        "; its experts, in FP8, by a grouped product",
        "29.9 + 1.7 GiB",
    ),
    "gemma-4-31b-it": (GEMMA4, "", "57.2 + 9.1 GiB"),
}


def released_head(target: dict[str, Any]) -> dict[str, Any]:
    """In the layout of the released ones: four layers, tables of its own, full vocabulary."""
    text = target.get("text_config", target)
    layers, same = text["num_hidden_layers"], ("hidden_size", "vocab_size", "head_dim")
    same += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    return {name: text[name] for name in same} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "intermediate_size": 4 * text["hidden_size"],
        "num_hidden_layers": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "draft_vocab_size": text["vocab_size"],
        "ptd_token_id": text["vocab_size"] - 68,
        "pard_token": text["vocab_size"] - 68,
        "target_hidden_size": text["hidden_size"],
        "num_aux_hidden_states": 3,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3],
            "use_aux_hidden_state": True,
        },
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def write_configs(folder: Path, **configs: dict[str, Any]) -> list[str]:
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return [str(folder / name) for name in configs]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_pairs_fit_by_their_configs(
    name: str, command: Shell, tmp_path: Path
) -> None:
    config, by, memory = PUBLISHED[name]
    head, target = write_configs(tmp_path, head=released_head(config), target=config)
    assert command("doctor", head, "--model", target, "--json") == 0
    assert {finding["level"] for finding in command.json} == {"ok"}
    found = {finding["check"]: finding["message"] for finding in command.json}
    assert found["target"].endswith(f"is native and runs by its modules{by}")
    assert "p-eagle" in found["drafts"]
    assert found["memory"].startswith(memory)
    assert ("low-bit" in found["memory"]) == (", in " in by)
    released = released_models().get(name)
    if released is not None:  # what its table says of the sizes, in 1e9 bytes
        gib = float(memory.split(" ")[0])
        assert gib * 2**30 == pytest.approx(released.target_gb * 1e9, rel=0.03)


def test_what_a_released_heads_card_says_of_k_stands_beside_its_config() -> None:
    """Its layout has no place for the depth that it was trained for."""
    config = UNEVEN.head_config(num_speculative_tokens=3)
    finding = check_drafts(config, "amazon/gpt-oss-20b-p-eagle")
    assert "its card serves it with 7, which was trained for 10" in finding.message
    assert (finding.level, finding.hint) == ("warning", "give --spec-tokens 7")
    assert check_drafts(config, "somebody/else").level == "ok"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5", "d_model": 8, "num_layers": 2, "num_heads": 2}, "of type t5"),
        ({"model_type": "vit"}, "'vit' is no causal language model"),
        ({"model_type": "of_tomorrow"}, "of_tomorrow"),
    ],
)
def test_an_architecture_that_nothing_runs_gets_one_line(
    config: dict[str, Any], message: str, command: Shell, head: str, tmp_path: Path
) -> None:
    (target,) = write_configs(tmp_path, target=config)
    assert command("doctor", head, "--model", target, "--json") == 1
    (finding,) = command.json
    assert finding["level"] == "error"
    assert message in finding["message"]


def test_data_of_another_reasoning_mode_is_found(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    model = str(shutil.copytree(model, tmp_path / "thinking"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template += (
        "{% if not enable_thinking | default(true) %}<think></think>{% endif %}"
    )
    tokenizer.save_pretrained(model)
    mode = {"enable_thinking": False}
    other = rewrite(data, tmp_path / "data", chat_template_kwargs=mode)
    command("doctor", "--data", other, "--model", model, "--json")
    assert levels(command)["reasoning mode"] == "warning"
    given = ("--chat-template-kwargs", '{"enable_thinking": false}')
    command("doctor", "--data", other, "--model", model, *given, "--json")
    assert levels(command)["reasoning mode"] == "ok"
