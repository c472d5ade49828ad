"""Terraform and CloudFormation make what `up` makes; AWS would take the reaper's template."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import pytest

from peagle.deploy.templates import cloudformation, reaper_template, terraform

from .conftest import ROLE, Account
from .test_plan import planned

SCALED = {"name": "oss", "role": ROLE, "autoscale": "1:3", "max_hours": 2.0}
REFERENCE = re.compile(r"\$\{(aws_\w+)\.peagle\.name\}")


def lint(template: dict[str, Any]) -> list[str]:
    """What cfn-lint, which has CloudFormation's own schemas, finds wrong."""
    import cfnlint.api

    return [str(match) for match in cfnlint.api.lint(json.dumps(template), regions=["us-east-1"])]


@pytest.mark.slow
def test_cloudformation_makes_what_up_makes(aws: Account) -> None:
    plan = planned(**SCALED)
    words = ("gpt-oss-20b", "--name", "oss", "--role", ROLE, "--autoscale", "1:3")
    assert aws.verb("up", *words) == 0
    by_up = described(aws)
    assert aws.verb("down", "oss") == 0
    template = cloudformation(plan)
    assert lint(template) == []
    aws.client("cloudformation").create_stack(
        StackName="oss",
        TemplateBody=json.dumps({**template, "Resources": without_scaling(template)}),
    )
    assert described(aws) == by_up


def described(aws: Account) -> list[Any]:
    """All that there is, under one name: moto's stacks give names of their own."""
    sagemaker, names = aws.client("sagemaker"), aws.left()
    (model,), (config,), (endpoint,) = names.values()
    found = (
        sagemaker.describe_model(ModelName=model),
        sagemaker.describe_endpoint_config(EndpointConfigName=config),
        sagemaker.describe_endpoint(EndpointName=endpoint),
    )
    own = ("ResponseMetadata", "CreationTime", "LastModifiedTime")
    text = json.dumps([{k: v for k, v in one.items() if k not in own and v} for one in found])
    for name in (model, config, endpoint):
        text = text.replace(name, "oss")
    described: list[Any] = json.loads(text)
    return described


def without_scaling(template: dict[str, Any]) -> dict[str, Any]:
    """moto does not make those."""
    kinds = ("ScalableTarget", "ScalingPolicy")
    return {name: one for name, one in template["Resources"].items() if name not in kinds}


def test_terraform_has_every_value_of_the_requests_under_its_snake_name() -> None:
    plan = planned(**SCALED)
    resources = terraform(plan)["resource"]
    requests = plan.requests()
    target, policy = plan.scaling_requests() or ({}, {})
    tags = {tag["Key"]: tag["Value"] for tag in requests["model"]["Tags"]}
    for kind, request, name in (
        ("aws_sagemaker_model", requests["model"], "ModelName"),
        ("aws_sagemaker_endpoint_configuration", requests["endpoint_config"], "EndpointConfigName"),
        ("aws_sagemaker_endpoint", requests["endpoint"], "EndpointName"),
        ("aws_appautoscaling_target", target, ""),
        ("aws_appautoscaling_policy", policy, "PolicyName"),
    ):
        resource = dict(resources[kind]["peagle"])
        resource.pop("depends_on", None)
        if "tags" in resource:
            assert resource.pop("tags") == tags
            request.pop("Tags")
        if name:
            assert resource.pop("name") == request.pop(name)
        assert leaves(resource) == leaves(request), kind


def leaves(value: Any) -> list[tuple[str, Any]]:
    """Every value with its path; paths without case and underscores, references resolved."""
    if isinstance(value, dict):
        pairs = [(key.replace("_", "").lower(), one) for key, one in value.items()]
        return sorted((f"{key}/{path}", leaf) for key, one in pairs for path, leaf in leaves(one))
    if isinstance(value, list):
        return [(f"{n}/{path}", leaf) for n, one in enumerate(value) for path, leaf in leaves(one)]
    return [("", "oss" if isinstance(value, str) and REFERENCE.fullmatch(value) else value)]


@pytest.mark.slow
def test_what_is_not_known_becomes_a_parameter() -> None:
    plan = planned(name="oss", pass_hf_token=True)
    template = cloudformation(plan)
    assert template["Parameters"]["HfToken"]["NoEcho"] is True
    assert set(template["Parameters"]) == {"ExecutionRoleArn", "HfToken"}
    assert lint(template) == []
    document = terraform(plan)
    assert document["variable"]["hf_token"]["sensitive"] is True
    model = document["resource"]["aws_sagemaker_model"]["peagle"]
    assert model["execution_role_arn"] == "${var.execution_role_arn}"
    assert model["primary_container"]["environment"]["HF_TOKEN"] == "${var.hf_token}"


def test_terraform_reads_nothing_into_a_value() -> None:
    drafter = {"method": "ngram", "note": "${x} %{y}"}
    plan = planned("org/m", drafter, instance_type="ml.g5.xlarge")
    environment = terraform(plan)["resource"]["aws_sagemaker_model"]["peagle"]["primary_container"]
    assert "$${x} %%{y}" in environment["environment"]["SM_VLLM_SPECULATIVE_CONFIG"]


@pytest.mark.slow
def test_files_are_to_be_uploaded_before_a_template_is_used(aws: Account, model: str) -> None:
    words = ("plan", model, "--bucket", "heads", "--cloudformation")
    assert aws.verb(*words) == 0
    uri = json.loads(aws.out)["Resources"]["Model"]["Properties"]["PrimaryContainer"]
    source = uri["ModelDataSource"]["S3DataSource"]["S3Uri"]
    assert f"# first: aws s3 sync {model} {source}target/" in aws.err
    assert lint(json.loads(aws.out)) == []


@pytest.mark.slow
def test_the_reapers_template_is_valid_and_calls_it_on_time() -> None:
    template = reaper_template(timedelta(hours=1), timedelta(minutes=15))
    assert lint(template) == []
    assert (
        template["Resources"]["Schedule"]["Properties"]["ScheduleExpression"] == "rate(15 minutes)"
    )
    assert len(json.dumps(template)) < 51_200, "CloudFormation takes no longer text"
    one = reaper_template(timedelta(hours=1), timedelta(minutes=1))
    assert one["Resources"]["Schedule"]["Properties"]["ScheduleExpression"] == "rate(1 minute)"


@pytest.mark.parametrize("kind", ["--terraform", "--cloudformation"])
def test_templates_are_printed_as_json(aws: Account, kind: str) -> None:
    assert aws.verb("plan", "gpt-oss-20b", "--role", ROLE, kind) == 0
    made = planned(role=ROLE)
    expected = terraform(made) if kind == "--terraform" else cloudformation(made)
    assert json.loads(aws.out) == expected
    assert aws.behaviour.calls == []
