"""Endpoints made and removed, against moto's server: whole, interrupted, failed and twice."""

from __future__ import annotations

import json
import os
import re
import signal
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from peagle.deploy.container import AMI

from .aws_proxy import Gate, Lost, Refusal
from .conftest import NOTHING, REGION, ROLE, UP, Account
from .test_reaper import backend, make_endpoints

pytestmark = pytest.mark.slow

ARN = f"arn:aws:sagemaker:{REGION}:123456789012"
ALL = {"model": ["oss"], "endpoint_config": ["oss"], "endpoint": ["oss"]}


def status_is(status: str, **more: Any) -> Any:
    return lambda document: {**document, "EndpointStatus": status, **more}


def failing(reason: str) -> list[Any]:
    """DescribeEndpoint of one that starts and fails."""
    missing = Refusal("ValidationException", "Could not find endpoint")
    failed = status_is("Failed", FailureReason=reason)
    return [missing, *[status_is("Creating")] * 3, failed]


def test_up_status_and_down_in_processes_of_their_own(aws: Account) -> None:
    process = aws.start(*UP, "--dollars-per-hour", "1.86", "--json")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["endpoints"][0]["name"] == "oss"
    assert "in service: oss in us-east-1" in err
    assert "$1.86 per hour" in err
    assert aws.left() == ALL

    process = aws.start("deploy", "sagemaker", "status", "--json")
    out, err = process.communicate()
    (found,) = json.loads(out.splitlines()[-1])["endpoints"]
    assert (found["status"], found["drafting"]) == ("InService", "p-eagle K=7")
    assert found["dollars"] == pytest.approx(found["hours"] * 1.86)

    process = aws.start("deploy", "sagemaker", "down", "oss", "--json")
    out, err = process.communicate()
    deleted = json.loads(out.splitlines()[-1])["deleted"]
    assert deleted == {REGION: ["endpoint", "endpoint_config", "model"]}
    assert aws.left() == NOTHING


def test_what_is_made_is_what_the_plan_says(aws: Account) -> None:
    words = ("gpt-oss-20b", "--name", "oss", "--role", ROLE)
    assert aws.verb("plan", *words, "--json") == 0
    planned = aws.json["requests"]
    assert aws.verb("up", *words) == 0
    sagemaker = aws.client("sagemaker")
    model = sagemaker.describe_model(ModelName="oss")
    assert model["PrimaryContainer"] == planned["model"]["PrimaryContainer"]
    assert model["ExecutionRoleArn"] == ROLE
    config = sagemaker.describe_endpoint_config(EndpointConfigName="oss")
    assert config["ProductionVariants"] == planned["endpoint_config"]["ProductionVariants"]
    assert config["ProductionVariants"][0]["InferenceAmiVersion"] == AMI
    endpoint = sagemaker.describe_endpoint(EndpointName="oss")
    assert endpoint["EndpointConfigName"] == "oss"
    for arn in (model["ModelArn"], config["EndpointConfigArn"], endpoint["EndpointArn"]):
        assert sagemaker.list_tags(ResourceArn=arn)["Tags"] == planned["model"]["Tags"]


def test_a_second_up_makes_nothing(aws: Account) -> None:
    assert aws(*UP) == 0
    made = [call for call in aws.behaviour.calls if ":Create" in call]
    assert len(made) == 3
    assert aws(*UP, "--max-hours", "2") == 0
    assert [call for call in aws.behaviour.calls if ":Create" in call] == made
    tags = aws.client("sagemaker").list_tags(
        ResourceArn=f"arn:aws:sagemaker:{REGION}:123456789012:endpoint/oss"
    )["Tags"]
    assert any(tag["Key"] == "peagle:end" for tag in tags), "an end can be set later"


def test_other_settings_under_the_same_name_are_refused(aws: Account) -> None:
    assert aws(*UP) == 0
    assert aws(*UP, "--spec-tokens", "5") == 2
    assert "other settings" in aws.err
    assert "down oss" in aws.err
    assert aws.left() == ALL


def test_a_second_down_is_harmless(aws: Account) -> None:
    assert aws(*UP) == 0
    assert aws.verb("down", "oss") == 0
    assert aws.verb("down", "oss") == 0
    assert "there is nothing of oss" in aws.err
    assert aws.left() == NOTHING


def test_what_others_made_stays(aws: Account) -> None:
    container = {"Image": "i"}
    aws.client("sagemaker").create_model(
        ModelName="oss", ExecutionRoleArn=ROLE, PrimaryContainer=container
    )
    for verb in (("down", "oss"), UP[2:]):
        assert aws.verb(*verb) == 2
        assert "was not made by peagle" in aws.err
    assert aws.left()["model"] == ["oss"]


def test_a_failed_creation_is_explained_and_rolled_back(aws: Account) -> None:
    lines = ["loading weights", "torch.OutOfMemoryError: CUDA out of memory"]
    aws.log(*lines)
    aws.behaviour.rules["DescribeEndpoint"] = failing("The container did not pass the ping.")
    assert aws(*UP) == 2
    assert aws.err.count("oss is Creating") == 1, "the same status is told once"
    assert "CUDA out of memory" in aws.err
    assert "error: the endpoint oss is Failed: The container did not pass" in aws.err
    assert "hint: the container's last log lines" in aws.err
    assert aws.left() == NOTHING
    assert aws.verb("logs", "oss") == 0
    assert aws.out.splitlines() == lines


@pytest.mark.parametrize("operation", ["DescribeLogStreams", "GetLogEvents"])
def test_a_log_that_may_not_be_read_hides_no_failure_and_stops_no_roll_back(
    aws: Account, operation: str
) -> None:
    aws.log("loading weights")
    aws.behaviour.rules["DescribeEndpoint"] = failing(
        "Unable to provision ML compute capacity due to InsufficientInstanceCapacity error."
    )
    aws.behaviour.rules[operation] = [Refusal("AccessDeniedException", "not authorized")]
    assert aws(*UP) == 2
    assert f"log cannot be shown: AWS refuses {operation}: AccessDeniedException" in aws.err
    assert "error: the endpoint oss is Failed: Unable to provision" in aws.err
    assert "hint: try another --instance-type or region" in aws.err
    assert aws.left() == NOTHING


@pytest.mark.parametrize("kind", ["Model", "EndpointConfig", "Endpoint"])
def test_a_creation_whose_answer_was_lost_is_ours(aws: Account, kind: str) -> None:
    again = Refusal("ValidationException", f'Cannot create already existing {kind} "arn"')
    aws.behaviour.rules[f"Create{kind}"] = [Lost(), again]
    assert aws(*UP) == 0, aws.err
    assert aws.behaviour.called(f"Create{kind}") == 2
    assert aws.left() == ALL


def test_what_somebody_made_meanwhile_is_neither_taken_nor_rolled_back(aws: Account) -> None:
    assert aws(*UP, "--spec-tokens", "5") == 0
    missing = Refusal("ValidationException", "Could not find it")
    for kind in ("Model", "EndpointConfig", "Endpoint"):  # it was not there at first
        aws.behaviour.rules[f"Describe{kind}"] = [missing]
    exists = Refusal("ValidationException", 'Cannot create already existing model "arn"')
    aws.behaviour.rules["CreateModel"] = [exists]
    assert aws(*UP) == 2
    assert "with other settings" in aws.err
    assert aws.left() == ALL


def test_a_followed_log_ends_with_its_endpoint(aws: Account) -> None:
    assert aws(*UP) == 0
    aws.log("one", "two")

    def speak(document: dict[str, Any]) -> dict[str, Any]:
        aws.log("four", stream="AllTraffic/i-2")
        return document

    def first(document: dict[str, Any]) -> dict[str, Any]:
        aws.log("three")
        return document

    gone = Refusal("ValidationException", "Could not find endpoint")
    # Each look at the endpoint comes before one at its log.
    aws.behaviour.rules["DescribeEndpoint"] = [None, first, speak, None, gone]
    assert aws.verb("logs", "oss", "--follow", "--lines", "1") == 0
    assert aws.out.splitlines() == ["two", "three", "four"]


@pytest.mark.parametrize(
    ("operation", "num_made", "verb"),
    [
        ("CreateModel", 0, UP[2:]),
        ("CreateEndpointConfig", 2, ("down", "oss")),
        ("CreateEndpoint", 3, UP[2:]),
        ("CreateEndpoint", 3, ("down", "oss")),
    ],
)
def test_killed_in_the_middle_up_goes_on_and_down_cleans_up(
    aws: Account, operation: str, num_made: int, verb: tuple[str, ...]
) -> None:
    gate = Gate(passed_on=num_made > 0)
    aws.behaviour.rules[operation] = [gate]
    process = aws.start(*UP)
    assert gate.reached.wait(60)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert sum(len(names) for names in aws.left().values()) == num_made
    assert aws.verb(*verb) == 0
    assert aws.left() == (NOTHING if verb[0] == "down" else ALL)


def test_down_waits_while_an_endpoint_is_being_created(aws: Account) -> None:
    assert aws(*UP) == 0
    aws.behaviour.rules["DescribeEndpoint"] = [status_is("Creating")] * 3
    calls = len(aws.behaviour.calls)
    assert aws.verb("down", "oss") == 0
    later = aws.behaviour.calls[calls:]
    assert later.index("sagemaker:DeleteEndpoint") > 3
    assert "oss is Creating" in aws.err
    assert aws.left() == NOTHING


def test_an_endpoint_that_failed_before_is_made_anew(aws: Account) -> None:
    assert aws(*UP) == 0
    aws.behaviour.rules["DescribeEndpoint"] = [status_is("Failed")] * 2
    assert aws(*UP) == 0
    assert aws.behaviour.called("DeleteEndpoint") == 1
    assert aws.behaviour.called("CreateEndpoint") == 2
    assert aws.left() == ALL


def test_throttled_requests_are_sent_again(aws: Account) -> None:
    throttled = Refusal("ThrottlingException", "Rate exceeded")
    aws.behaviour.rules = {"CreateModel": [throttled] * 2, "DescribeModel": [throttled]}
    assert aws(*UP) == 0
    assert aws.behaviour.called("CreateModel") == 3
    assert aws.left() == ALL


@pytest.mark.parametrize(
    ("operation", "refusal", "hint"),
    [
        ("DescribeEndpoint", Refusal("AccessDeniedException", "not authorized"), "IAM policy"),
        ("CreateModel", Refusal("AccessDeniedException", "not authorized"), "IAM policy"),
        ("CreateEndpoint", Refusal("ResourceLimitExceeded", "limit is 0"), "Service Quotas"),
        (
            "CreateEndpointConfig",
            Refusal("ValidationException", "instance type ml.g6e.xlarge is not available"),
            "another of either",
        ),
        ("DescribeEndpoint", Refusal("ExpiredTokenException", "expired"), "aws sso login"),
        ("CreateModel", Refusal("ValidationException", "Could not assume role r."), "trusts"),
        ("CreateEndpoint", Refusal("ServiceQuotaExceededException", "0"), "Service Quotas"),
        ("CreateModel", Refusal("ValidationException", "a constraint"), "plan --json"),
    ],
)
def test_what_aws_refuses_is_one_line_with_its_code_and_a_hint(
    aws: Account, operation: str, refusal: Refusal, hint: str
) -> None:
    missing = Refusal("ValidationException", "Could not find it")
    first = [missing] if operation == "DescribeEndpoint" and "Denied" in refusal.code else []
    aws.behaviour.rules[operation] = [*first, refusal] if first else [refusal]
    assert aws(*UP) == 2
    errors = [line for line in aws.err.splitlines() if line.startswith("error:")]
    assert errors == [f"error: AWS refuses {operation}: {refusal.code}: {refusal.message}"]
    assert hint in next(line for line in aws.err.splitlines() if line.startswith("hint:"))
    assert "Traceback" not in aws.err
    aws.behaviour.rules.clear()
    assert aws.left() == NOTHING, "what was made before is removed"


def test_a_token_reaches_the_container_and_nothing_that_is_shown(
    aws: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "hf_sEcReT"
    gated = (*UP, "--pass-hf-token")
    assert aws(*gated) == 2
    assert "$HF_TOKEN is not set" in aws.err
    monkeypatch.setenv("HF_TOKEN", token)
    echo = Refusal("ValidationException", f"Value '{{HF_TOKEN={token}}}' failed a constraint")
    aws.behaviour.rules["CreateModel"] = [echo]
    shown = []
    assert aws(*gated) == 2
    shown += [aws.out, aws.err]
    assert "HF_TOKEN=***" in aws.err
    assert aws(*gated) == 0
    shown += [aws.out, aws.err]
    for form in ("--json", "--terraform", "--cloudformation"):
        assert aws.verb("plan", *gated[3:], form) == 0
        shown += [aws.out, aws.err]
    reason = f"the container was started with {token}"
    aws.behaviour.rules["DescribeEndpoint"] = [None, status_is("Failed", FailureReason=reason)]
    assert aws.verb("status", "oss", "--json") == 0
    assert aws.json["endpoints"][0]["failure"] == "the container was started with ***"
    assert token not in "".join([*shown, aws.out, aws.err])
    made = aws.client("sagemaker").describe_model(ModelName="oss")
    assert made["PrimaryContainer"]["Environment"]["HF_TOKEN"] == token


def test_without_credentials_it_is_said_before_anything_is_asked(
    aws: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    for words in (UP[2:], ("status",), ("down", "oss"), ("reap",), ("logs", "oss")):
        assert aws.verb(*words) == 2
        assert "no AWS credentials (NoCredentialsError)" in aws.err
        assert "hint: run `aws configure`" in aws.err
    assert aws.behaviour.calls == []


def test_a_region_without_the_service_is_named(aws: Account) -> None:
    assert aws.verb("status", "--region", "us-east-9") == 2
    assert "no SageMaker in region 'us-east-9' (UnknownRegion)" in aws.err
    assert "did you mean us-east-" in aws.err
    assert aws.verb("status", "--region", "Virginia") == 2
    assert "is not an AWS region" in aws.err


def test_autoscaling_comes_and_goes_with_the_endpoint(aws: Account) -> None:
    assert aws(*UP, "--autoscale", "1:4", "--autoscale-target", "8") == 0
    scaling = aws.client("application-autoscaling")
    (target,) = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    assert target["ResourceId"] == "endpoint/oss/variant/AllTraffic"
    assert (target["MinCapacity"], target["MaxCapacity"]) == (1, 4)
    (policy,) = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    assert policy["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] == 8
    assert aws.verb("down", "oss") == 0
    assert not scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]


def test_an_endpoint_that_answered_before_is_not_rolled_back(aws: Account) -> None:
    scaled = (*UP, "--autoscale", "1:4")
    assert aws(*scaled) == 0
    for status in ("InService", "SystemUpdating"):
        aws.behaviour.rules["DescribeEndpoint"] = [status_is(status)]
        aws.behaviour.rules["RegisterScalableTarget"] = [Refusal("AccessDeniedException")]
        assert aws(*scaled) == 2
        assert aws.left() == ALL


def test_several_regions_have_endpoints_of_their_own(aws: Account) -> None:
    both = ("--region", "us-east-1,eu-west-1")
    assert aws(*UP, *both) == 0
    assert aws.left("us-east-1") == aws.left("eu-west-1") == ALL
    image = aws.client("sagemaker", "eu-west-1").describe_model(ModelName="oss")
    assert ".eu-west-1." in image["PrimaryContainer"]["Image"]
    assert aws.verb("status", "--json", *both) == 0
    assert [one["region"] for one in aws.json["endpoints"]] == ["us-east-1", "eu-west-1"]
    assert aws.verb("down", "oss", "--region", "eu-west-1") == 0
    assert (aws.left("us-east-1"), aws.left("eu-west-1")) == (ALL, NOTHING)


def test_a_region_that_fails_keeps_no_other_running(aws: Account) -> None:
    assert aws(*UP) == 0
    aws.behaviour.rules["DescribeEndpoint"] = [Refusal("AccessDeniedException", "not authorized")]
    assert aws.verb("down", "oss", "--region", "eu-west-1,us-east-1", "--json") == 2
    assert aws.json["deleted"] == {"us-east-1": ["endpoint", "endpoint_config", "model"]}
    assert "eu-west-1: AWS refuses DescribeEndpoint" in aws.err
    assert aws.left() == NOTHING


def test_a_dry_run_asks_and_changes_nothing(aws: Account) -> None:
    assert aws(*UP, "--dry-run") == 0
    assert aws.err.count("would create") == 3
    assert aws.left() == NOTHING
    assert aws(*UP) == 0
    assert aws(*UP, "--dry-run") == 0
    assert aws.err.count("would keep") == 3
    aws.behaviour.rules["DescribeEndpoint"] = [status_is("Failed")]
    assert aws(*UP, "--dry-run") == 0
    assert "would replace (it is Failed) endpoint oss" in aws.err
    assert aws.verb("down", "oss", "--dry-run") == 0
    assert aws.err.count("would delete") == 3
    assert aws.left() == ALL


def test_a_head_of_this_machine_is_exported_checked_and_uploaded_once(
    aws: Account, model: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path))
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="b-us-east-1")
    words = (model, "--spec-model", head, "--name", "tiny", "--role", ROLE)
    assert aws.verb("up", *words) == 2
    assert "give --bucket" in aws.err
    up = ("up", *words, "--bucket", "b-{region}")
    assert aws.verb(*up, "--dry-run") == 0, aws.err
    assert aws.err.count("would upload") == 2
    assert "Contents" not in s3.list_objects_v2(Bucket="b-us-east-1")
    assert aws.verb(*up) == 0, aws.err
    made = aws.client("sagemaker").describe_model(ModelName="tiny")["PrimaryContainer"]
    uri = made["ModelDataSource"]["S3DataSource"]["S3Uri"]
    prefix = uri.removeprefix("s3://b-us-east-1/")
    keys = {
        o["Key"].removeprefix(prefix) for o in s3.list_objects_v2(Bucket="b-us-east-1")["Contents"]
    }
    assert {"target/config.json", "target/model.safetensors", "target/tokenizer.json"} <= keys
    assert {"head/config.json", "head/model.safetensors"} <= keys
    exported = json.loads(
        s3.get_object(Bucket="b-us-east-1", Key=f"{prefix}head/config.json")["Body"].read()
    )
    assert exported["architectures"] == ["LlamaForCausalLMEagle3"], "vLLM's layout"
    config = json.loads(made["Environment"]["SM_VLLM_SPECULATIVE_CONFIG"])
    assert config["model"] == "/opt/ml/model/head"
    assert made["Environment"]["SM_VLLM_MODEL"] == "/opt/ml/model/target"
    assert aws.verb(*up) == 0
    assert "uploading" not in aws.err
    assert aws.verb("down", "tiny", "--delete-files") == 0
    assert "Contents" not in s3.list_objects_v2(Bucket="b-us-east-1")


def test_files_of_a_failed_up_are_removed_too(
    aws: Account, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="heads")
    aws.behaviour.rules["CreateEndpoint"] = [Refusal("ResourceLimitExceeded")]
    words = (model, "--name", "tiny", "--role", ROLE)
    assert aws.verb("up", *words, "--bucket", "heads") == 2
    assert "uploading" in aws.err
    assert "Contents" not in s3.list_objects_v2(Bucket="heads")
    aws.behaviour.rules["CreateModel"] = [Refusal("AccessDeniedException")]
    assert aws.verb("up", *words, "--bucket", "heads") == 2
    assert "Contents" not in s3.list_objects_v2(Bucket="heads")
    assert aws.verb("up", *words, "--bucket", "missing") == 2
    assert "NoSuchBucket" in aws.err
    assert "create the bucket" in aws.err


def test_killed_in_an_upload_up_goes_on_and_down_leaves_no_part(aws: Account, model: str) -> None:
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="heads")
    words = ("up", model, "--name", "tiny", "--role", ROLE, "--bucket", "heads")
    assert aws.verb("plan", *words[1:], "--json") == 0
    prefix = aws.json["s3_uri"].removeprefix("s3://heads/")
    gate = Gate()
    aws.behaviour.rules[f"/heads/{prefix}target/model.safetensors"] = [gate]
    process = aws.start("deploy", "sagemaker", *words)
    assert gate.reached.wait(60)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert s3.list_objects_v2(Bucket="heads")["Contents"]
    # A large file is sent in parts.
    s3.create_multipart_upload(Bucket="heads", Key=f"{prefix}target/large.safetensors")
    assert aws.verb(*words) == 0
    assert "model.safetensors" not in aws.err, "what is there is not sent again"
    assert aws.verb("down", "tiny", "--delete-files") == 0
    assert "Contents" not in s3.list_objects_v2(Bucket="heads")
    assert "Uploads" not in s3.list_multipart_uploads(Bucket="heads")


def test_the_policy_allows_every_request_that_is_made(
    aws: Account, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.client("s3").create_bucket(Bucket="heads")
    make_endpoints(aws, "others", ours=False)
    make_endpoints(aws, "colleagues")
    backend().endpoints["colleagues"].last_modified_time = datetime.now(UTC)
    aws.behaviour.calls.clear()
    aws.behaviour.bodies.clear()
    words = (model, "--name", "tiny", "--role", ROLE, "--bucket", "heads", "--autoscale", "1:2")
    for verb in (
        ("up", *words, "--max-hours", "1"),
        ("up", *words, "--max-hours", "2"),
        ("status",),
        ("logs", "tiny"),
        ("invoke", "tiny", "hello", "--json"),
        ("reap",),
        ("down", "tiny", "--delete-files"),
    ):
        assert aws.verb(*verb) == 0, aws.err
    assert aws.verb("plan", *words, "--json") == 0
    statements = aws.json["caller_policy"]["Statement"]
    services = {"monitoring": "cloudwatch"}  # as requests and as policies call them
    asked = {
        (f"{services.get(service, service)}:{operation}", resource_of(service, body))
        for (service, operation), body in zip(
            (call.split(":", 1) for call in aws.behaviour.calls), aws.behaviour.bodies, strict=True
        )
        if service != "s3"  # its requests are paths
    }
    assert len({action for action, _ in asked}) > 15
    assert ("sagemaker:ListTags", f"{ARN}:endpoint/others") in asked
    for action, resource in asked:
        assert any(
            action in statement["Action"]
            and any(fnmatchcase(resource, pattern) for pattern in statement["Resource"])
            for statement in statements
        ), (action, resource)


def resource_of(service: str, body: bytes) -> str:
    """The ARN of what a request is about; `*` where it is about none."""
    asked = json.loads(body) if service == "sagemaker" and body.startswith(b"{") else {}
    if "ResourceArn" in asked:
        return str(asked["ResourceArn"])
    kinds = {"EndpointName": "endpoint", "EndpointConfigName": "endpoint-config"}
    for key, kind in (kinds | {"ModelName": "model"}).items():
        if key in asked:
            return f"{ARN}:{kind}/{asked[key].lower()}"
    if service == "logs":
        return f"arn:aws:logs:{REGION}:123456789012:log-group:/aws/sagemaker/Endpoints/tiny:x"
    return f"{ARN}:endpoint/tiny" if "messages" in asked else "*"


def test_an_interruption_says_what_may_be_running(
    aws: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(document: dict[str, Any]) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        return status_is("Creating")(document)

    missing = Refusal("ValidationException", "Could not find endpoint")
    aws.behaviour.rules["DescribeEndpoint"] = [missing, *[interrupt] * 3]
    assert aws(*UP) == 130
    assert re.search("interrupted: oss in us-east-1 may be starting and cost money", aws.err)
    assert aws.left() == ALL
