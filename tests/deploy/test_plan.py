"""A plan: what it says of models, memory, prices and drafting, without AWS; refused if wrong."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.backends.vllm.arguments import VllmServer, plan_server
from peagle.backends.vllm.models import Target
from peagle.backends.vllm.options import VllmOptions
from peagle.backends.vllm.released import released_models
from peagle.bench.results.document import save_results
from peagle.cli.main import main
from peagle.deploy.config import DeployConfig
from peagle.deploy.container import ACCOUNT, default_image
from peagle.deploy.instances import Memory, choose_instance, instances, memory_of
from peagle.deploy.plan import DeployPlan, make_plan
from peagle.errors import ConfigError
from tests.bench.made import make_cell, make_results, modelled_grid

from .conftest import ROLE, instance_types

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def planned(
    model: str = "gpt-oss-20b", drafter: dict[str, Any] | None = None, **asked: Any
) -> DeployPlan:
    return make_plan(
        model,
        DeployConfig(**asked),
        region="us-east-1",
        drafter=drafter or {},
        options=VllmOptions(),
        now=NOW,
    )


@pytest.fixture
def shell(alone: None, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str) -> tuple[int, str, str]:
        code = main(["deploy", "sagemaker", *words])
        return code, *capsys.readouterr()

    return run


def test_a_plan_needs_neither_credentials_nor_boto3(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)  # its import fails
    monkeypatch.setitem(sys.modules, "botocore", None)
    code, out, _ = shell("plan", "gpt-oss-120b", "--region", "us-west-2", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["jumpstart_id"] == "openai-reasoning-gpt-oss-120b"
    assert document["requests"]["endpoint"]["EndpointName"] == "peagle-gpt-oss-120b"
    code, _, err = shell("status", "--region", "us-west-2")
    assert code == 2
    assert "boto3 is not installed" in err
    assert "peagle[deploy]" in err
    code, _, err = shell("plan", "gpt-oss-120b")
    assert code == 2
    assert "no AWS region is named" in err


@pytest.mark.parametrize("name", released_models())
def test_published_pairs_are_known_by_name_and_jumpstart_id(name: str) -> None:
    model = released_models()[name]
    plan = planned(name)
    assert plan.environment["SM_VLLM_MODEL"] == model.target
    config = plan.environment["SM_VLLM_SPECULATIVE_CONFIG"]
    assert json.loads(config) == {
        "method": "eagle3",
        "model": model.head,
        "num_speculative_tokens": model.num_speculative_tokens,
        "parallel_drafting": True,
    }
    assert config.isascii(), "straight quotes"
    assert plan.environment["SM_VLLM_TENSOR_PARALLEL_SIZE"] == "1"
    if model.jumpstart_id:
        again = planned(model.jumpstart_id)
        assert (again.name, again.digest) == (plan.name, plan.digest)


def test_requests_are_exact() -> None:
    plan = planned("qwen3-coder-30b-a3b-instruct", name="coder", role=ROLE, max_hours=4)
    tags = [
        {"Key": "peagle:plan", "Value": plan.digest},
        {"Key": "peagle:model", "Value": "qwen3-coder-30b-a3b-instruct"},
        {"Key": "peagle:drafting", "Value": "p-eagle K=10"},
        {"Key": "peagle:end", "Value": "2026-01-02T07:04:05+00:00"},
    ]
    image = "763104351884.dkr.ecr.us-east-1.amazonaws.com/vllm:server-sagemaker-cuda-v2.4"
    assert plan.requests() == {
        "model": {
            "ModelName": "coder",
            "ExecutionRoleArn": ROLE,
            "PrimaryContainer": {
                "Image": image,
                "Environment": {
                    "SM_VLLM_MODEL": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
                    "SM_VLLM_SPECULATIVE_CONFIG": '{"method": "eagle3", "model": '
                    '"amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE", '
                    '"num_speculative_tokens": 10, "parallel_drafting": true}',
                    "SM_VLLM_TENSOR_PARALLEL_SIZE": "1",
                    "SM_VLLM_MAX_MODEL_LEN": "16384",
                    "SM_VLLM_MAX_NUM_SEQS": "128",
                    "SM_VLLM_NO_ENABLE_PREFIX_CACHING": "",
                    "SM_VLLM_MAX_CUDAGRAPH_CAPTURE_SIZE": "2560",
                    "SM_VLLM_ASYNC_SCHEDULING": "",
                },
            },
            "Tags": tags,
        },
        "endpoint_config": {
            "EndpointConfigName": "coder",
            "ProductionVariants": [
                {
                    "VariantName": "AllTraffic",
                    "ModelName": "coder",
                    "InstanceType": "ml.g7e.2xlarge",
                    "InitialInstanceCount": 1,
                    "InitialVariantWeight": 1.0,
                    "ContainerStartupHealthCheckTimeoutInSeconds": 1800,
                    "InferenceAmiVersion": "al2023-ami-sagemaker-inference-gpu-4-1",
                }
            ],
            "Tags": tags,
        },
        "endpoint": {"EndpointName": "coder", "EndpointConfigName": "coder", "Tags": tags},
    }


def test_the_text_shows_what_the_document_holds(shell: Any) -> None:
    words = ("plan", "gpt-oss-20b", "--region", "us-east-1", "--dollars-per-hour", "2")
    words += ("--instance-count", "2", "--autoscale", "1:4")
    _, out, err = shell(*words)
    document = json.loads(shell(*words, "--json")[1])
    container = document["requests"]["model"]["PrimaryContainer"]
    for name, value in container["Environment"].items():
        assert f"environment  {name}={value}\n" in out
    for tag in document["requests"]["endpoint"]["Tags"]:
        assert f"{tag['Key']}={tag['Value']}\n" in out
    assert container["Image"] in out
    assert "2 x ml.g6e.xlarge" in out
    assert "price $4.00 per hour\n" in out
    assert json.dumps(document["caller_policy"], indent=2) in out
    assert json.dumps(document["role_policy"], indent=2) in out
    assert "1 to 4 instances" in out
    assert "`up` needs --role" in err


def test_a_plan_is_known_by_what_it_makes() -> None:
    plan = planned()
    assert planned(max_hours=3).digest == plan.digest, "its end is not among it"
    assert planned(drafter={"num_speculative_tokens": 5}).digest != plan.digest
    assert planned(instance_type="ml.g6e.2xlarge").digest != plan.digest
    assert planned(autoscale="1:2").digest != plan.digest


def test_every_instance_type_of_ours_is_sagemakers() -> None:
    assert set(instances()) <= set(instance_types())


@given(
    target=st.floats(0.1, 1500.0),
    head=st.floats(0.0, 10.0),
    parallel=st.none() | st.sampled_from([1, 2, 4, 8]),
    utilization=st.floats(0.3, 1.0),
)
def test_the_chosen_instance_is_the_first_with_room(
    target: float, head: float, parallel: int | None, utilization: float
) -> None:
    options = VllmOptions(tensor_parallel_size=parallel, gpu_memory_utilization=utilization)
    server = VllmServer(target=Target(given="m", reference="org/m"), drafting=None, options=options)
    memory = Memory(target_gb=target, head_gb=head, cache_gb=None)

    def room(name: str) -> float:
        instance = instances()[name]
        gpus = parallel or instance.num_gpus
        enough = gpus <= instance.num_gpus
        return gpus * (instance.gb * utilization - 4) if enough else -1.0

    fitting = [name for name in instances() if target + head <= room(name)]
    if not fitting:
        with pytest.raises(ConfigError, match="no known instance type"):
            choose_instance(None, server, memory, skip_check=False)
        return
    chosen = choose_instance(None, server, memory, skip_check=False)
    assert chosen == (fitting[0], parallel or instances()[fitting[0]].num_gpus)
    for name in instances():
        if name in fitting:
            assert choose_instance(name, server, memory, skip_check=False)[0] == name
        else:
            with pytest.raises(ConfigError, match=r"need|asked for"):
                choose_instance(name, server, memory, skip_check=False)


def test_memory_is_that_of_weights_head_and_one_request(model: str, head: str) -> None:
    options = VllmOptions(max_model_len=128, dtype="float32")
    server = plan_server(model, drafter={"model": head}, options=options)
    memory = memory_of(server, None, None)
    weights = (Path(model) / "model.safetensors").stat().st_size
    assert memory.target_gb == weights / 1e9
    assert memory.head_gb == (Path(head) / "model.safetensors").stat().st_size / 1e9
    config = json.loads((Path(model) / "config.json").read_text())
    kv = config["num_key_value_heads"] * config["head_dim"]
    values = 2 * kv * config["num_hidden_layers"]
    assert memory.cache_gb == pytest.approx(values * 128 * 2 / 1e9)
    assert memory_of(server, None, 70.0).target_gb == 70.0
    in_fp8 = replace(server, options=replace(options, kv_cache_dtype="fp8"))
    assert memory_of(in_fp8, None, None).cache_gb == pytest.approx(values * 128 / 1e9)


def test_gpus_are_shared_as_the_targets_heads_allow(model: str) -> None:
    heads = json.loads((Path(model) / "config.json").read_text())["num_attention_heads"]
    plan = planned(model, bucket="b", instance_type="ml.g5.48xlarge")
    shared = int(plan.environment["SM_VLLM_TENSOR_PARALLEL_SIZE"])
    assert shared == max(n for n in range(1, 9) if heads % n == 0)


def test_a_model_of_unknown_size_needs_an_instance_type(alone: None) -> None:
    with pytest.raises(ConfigError, match="is not known here") as caught:
        planned("org/model", {"method": "none"})
    assert "--weights-gb" in str(caught.value.hint)
    plan = planned("org/model", {"method": "none"}, instance_type="ml.g6.xlarge")
    assert any("size unknown: target" in note for note in plan.notes)
    plan = planned("org/model", {"method": "none"}, weights_gb=60.0)
    assert plan.instance_type == "ml.g7e.2xlarge"


def test_the_hub_says_how_large_a_models_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a.safetensors": 40e9, "b.safetensors": 20e9, "a.bin": 60e9, "config.json": 1e3}

    def listed(hub: object, repository: str, **_: object) -> SimpleNamespace:
        assert repository == "org/model"
        siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in files.items()]
        return SimpleNamespace(siblings=siblings)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", listed)
    plan = planned("org/model", {"method": "none"})
    assert (plan.memory.target_gb, plan.instance_type) == (60.0, "ml.g7e.2xlarge")


def test_an_instance_type_of_tomorrow_can_be_taken_unchecked() -> None:
    plan = planned(instance_type="ml.p9.48xlarge", skip_memory_check=True)
    assert plan.instance_type == "ml.p9.48xlarge"


def test_images_come_from_the_regions_own_registry() -> None:
    assert default_image("us-east-1").startswith(f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/")
    assert default_image("ap-east-1").startswith("871362719292.dkr.ecr.ap-east-1.")
    assert ".amazonaws.com.cn/" in default_image("cn-north-1")
    assert planned(image="mine:1").model_request()["PrimaryContainer"]["Image"] == "mine:1"


def test_policies_are_those_of_the_partition() -> None:
    plan = replace(planned(role=ROLE), region="us-gov-west-1", s3_uri="s3://b/peagle/x/1/")
    text = json.dumps([plan.caller_policy(), plan.role_policy()])
    assert "arn:aws:s3" not in text
    assert "arn:aws-us-gov:s3:::b/peagle/x/1/*" in text
    assert ROLE in text


def test_method_and_k_follow_what_was_measured(shell: Any, tmp_path: Path) -> None:
    results = str(save_results(modelled_grid(loads=(1, 512)), tmp_path))
    words = ("plan", "org/model", "--region", "us-east-1", "--instance-type", "ml.g6e.xlarge")
    words += ("--spec-model", "org/head", "--tuned", results, "--dollars-per-hour", "3.6", "--json")
    code, out, err = shell(*words, "--tuned-concurrency", "1")
    assert code == 0, err
    assert "was measured with smollm2-135m, not with org/model" in err
    document = json.loads(out)
    variables = document["requests"]["model"]["PrimaryContainer"]["Environment"]
    config = json.loads(variables["SM_VLLM_SPECULATIVE_CONFIG"])
    assert config["model"] == "org/head", "what is given wins"
    assert config["parallel_drafting"] is True
    advised = config["num_speculative_tokens"]
    assert advised in (3, 5, 7)
    assert document["drafting"] == f"p-eagle K={advised}"
    assert document["dollars_per_million_tokens"] > 0
    code, out, err = shell(*words, "--tuned-concurrency", "512")
    variables = json.loads(out)["requests"]["model"]["PrimaryContainer"]["Environment"]
    assert "no speculation" in err
    assert "SM_VLLM_SPECULATIVE_CONFIG" not in variables
    code, _, err = shell("plan", "org/m", "--region", "us-east-1", "--tuned-concurrency", "7")
    assert (code, err.count("hint: add --tuned DIR")) == (2, 1)
    code, _, err = shell(*words, "--tuned-concurrency", "7")
    assert code == 2
    assert "has no load 7" in err


def test_dollars_per_million_tokens_follow_from_speed_and_price(shell: Any, tmp_path: Path) -> None:
    fast = make_cell("ngram", 3, (1000.0, 1000.0, 1000.0))
    results = str(save_results(make_results([make_cell(), fast]), tmp_path))
    words = ("plan", "org/m", "--region", "us-east-1", "--instance-type", "ml.g6e.xlarge")
    code, out, _ = shell(*words, "--tuned", results, "--dollars-per-hour", "3.6", "--json")
    assert code == 0
    assert json.loads(out)["dollars_per_million_tokens"] == pytest.approx(1.0)


def test_a_tree_is_not_something_that_vllm_runs(shell: Any, tmp_path: Path) -> None:
    tree = replace(make_cell("p-eagle", 5, (300.0, 301.0, 299.0)), num_draft_nodes=15)
    results = str(save_results(make_results([make_cell(), tree]), tmp_path))
    code, _, err = shell("plan", "org/m", "--region", "us-east-1", "--tuned", results)
    assert code == 2
    assert "vLLM drafts chains of a fixed K alone" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gpt-oss-21b",), "did you mean gpt-oss-20b"),
        (("gpt-oss-20b", "--region", "mars"), "is not an AWS region"),
        (("gpt-oss-20b", "--region", "us-iso-east-1"), "give --image"),
        (("gpt-oss-20b", "--name", "a_b"), "is not a name that SageMaker takes"),
        (("gpt-oss-20b", "--role", "me"), "is not the ARN of a role"),
        (("gpt-oss-20b", "--instance-type", "ml.g6e.xlarg"), "did you mean ml.g6e.xlarge"),
        (("gpt-oss-120b", "--instance-type", "ml.g6e.xlarge"), "use ml.g7e.2xlarge or larger"),
        (("gpt-oss-20b", "-tp", "2", "--instance-type", "ml.g6e.xlarge"), "No such option"),
        (("gpt-oss-20b", "--instance-type=ml.g5.xlarge", "--tensor-parallel-size=2"), "has fewer"),
        (("gpt-oss-20b", "--autoscale", "3:1"), "--autoscale 3:1"),
        (("gpt-oss-20b", "--instance-count", "0"), "--instance-count 0"),
        (("gpt-oss-20b", "--max-hours", "-1"), "--max-hours -1"),
        (("gpt-oss-20b", "--startup-timeout", "30"), "--startup-timeout 30"),
        (("gpt-oss-20b", "--spec-tokens", "11"), "was trained for 10"),
        (("gpt-oss-20b", "--json", "--terraform"), "several forms"),
        (("gpt-oss-20b", "--region", "us-east-1,eu-west-1"), "takes one region"),
        (("org/m", "--instance-type", "ml.g5.xlarge", "--speculative-config",
          json.dumps({"method": "ngram", "x": "y" * 1100})), "SageMaker takes 1024"),
    ],
)  # fmt: skip
def test_a_users_error_is_one_line_and_a_hint(
    shell: Any, words: tuple[str, ...], message: str
) -> None:
    region = () if "--region" in words else ("--region", "us-east-1")
    code, _, err = shell("plan", *words, *region)
    assert code == 2
    assert message in err
    assert err.count("error:") == err.count("hint:") == 1


def test_an_end_is_hours_from_now() -> None:
    end = planned(max_hours=0.5).end
    assert end is not None
    assert datetime.fromisoformat(end) == NOW + timedelta(minutes=30)
