"""The plan for Terraform and CloudFormation, and the reaper as a scheduled Lambda function.

CloudFormation's properties have the names of the API's parameters, and Terraform's arguments are
the same names in snake case, so both are read off the plan's requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from importlib import resources
from typing import Any

from peagle.deploy.plan import DeployPlan
from peagle.deploy.policies import reaper_policy
from peagle.errors import ConfigError

RUNTIME = "python3.13"
LOGICAL = {"model": "Model", "endpoint_config": "EndpointConfig", "endpoint": "Endpoint"}
TERRAFORM = {
    "model": "aws_sagemaker_model",
    "endpoint_config": "aws_sagemaker_endpoint_configuration",
    "endpoint": "aws_sagemaker_endpoint",
}
OURS = "peagle"  # the name of each resource in Terraform
ROLE_VARIABLE = "execution_role_arn"


def cloudformation(plan: DeployPlan) -> dict[str, Any]:
    requests, parameters = plan.requests(), dict[str, Any]()
    if plan.role is None:
        parameters["ExecutionRoleArn"] = {"Type": "String"}
        requests["model"]["ExecutionRoleArn"] = {"Ref": "ExecutionRoleArn"}
    variables = requests["model"]["PrimaryContainer"]["Environment"]
    for secret in plan.secrets:
        parameters[_camel(secret)] = {"Type": "String", "NoEcho": True}
        variables[secret] = {"Ref": _camel(secret)}
    variant = requests["endpoint_config"]["ProductionVariants"][0]
    variant["ModelName"] = {"Fn::GetAtt": ["Model", "ModelName"]}
    configuration = {"Fn::GetAtt": ["EndpointConfig", "EndpointConfigName"]}
    requests["endpoint"]["EndpointConfigName"] = configuration
    made = {
        LOGICAL[kind]: {"Type": f"AWS::SageMaker::{LOGICAL[kind]}", "Properties": request}
        for kind, request in requests.items()
    }
    if scaling := plan.scaling_requests():
        kinds = ("ScalableTarget", "ScalingPolicy")
        for kind, request, after in zip(kinds, scaling, ("Endpoint", kinds[0]), strict=True):
            made[kind] = {
                "Type": f"AWS::ApplicationAutoScaling::{kind}",
                "DependsOn": after,
                "Properties": request,
            }
    template = {"AWSTemplateFormatVersion": "2010-09-09", "Description": _title(plan)}
    return template | ({"Parameters": parameters} if parameters else {}) | {"Resources": made}


def terraform(plan: DeployPlan) -> dict[str, Any]:
    """Terraform's JSON syntax, for a file that ends in .tf.json."""
    requests, variables = plan.requests(), dict[str, Any]()
    made = {kind: _escaped(_snake(request)) for kind, request in requests.items()}
    for kind, resource in made.items():
        resource["name"] = resource.pop(f"{kind}_name")
        resource["tags"] = _escaped(plan.tags)
    if plan.role is None:
        variables[ROLE_VARIABLE] = {"type": "string"}
        made["model"]["execution_role_arn"] = f"${{var.{ROLE_VARIABLE}}}"
    for secret in plan.secrets:
        variables[secret.lower()] = {"type": "string", "sensitive": True}
        container = made["model"]["primary_container"]
        container["environment"][secret] = f"${{var.{secret.lower()}}}"
    made["endpoint_config"]["production_variants"][0]["model_name"] = _name_of("model")
    made["endpoint"]["endpoint_config_name"] = _name_of("endpoint_config")
    resources = {TERRAFORM[kind]: {OURS: resource} for kind, resource in made.items()}
    if scaling := plan.scaling_requests():
        target, policy = (_escaped(_snake(request)) for request in scaling)
        policy["name"] = policy.pop("policy_name")
        endpoint, first = f"{TERRAFORM['endpoint']}.{OURS}", f"aws_appautoscaling_target.{OURS}"
        resources["aws_appautoscaling_target"] = {OURS: target | {"depends_on": [endpoint]}}
        resources["aws_appautoscaling_policy"] = {OURS: policy | {"depends_on": [first]}}
    return {
        "//": _title(plan),
        "terraform": {"required_providers": {"aws": {"source": "hashicorp/aws"}}},
        "provider": {"aws": {"region": plan.region}},
        **({"variable": variables} if variables else {}),
        "resource": resources,
    }


def reaper_template(idle: timedelta, every: timedelta) -> dict[str, Any]:
    """CloudFormation: the file reaper.py as a Lambda function that is called again and again."""
    minutes = int(every.total_seconds() // 60)
    if minutes < 1 or every.total_seconds() % 60:
        raise ConfigError(f"--every {every} is not a number of minutes", hint="write --every 15m")
    schedule = f"rate({minutes} minute{'s' if minutes > 1 else ''})"
    called = {"Fn::GetAtt": ["Reaper", "Arn"]}
    trust = {
        "Effect": "Allow",
        "Principal": {"Service": "lambda.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    role = {
        "AssumeRolePolicyDocument": {"Version": "2012-10-17", "Statement": [trust]},
        "ManagedPolicyArns": [
            {"Fn::Sub": "arn:${AWS::Partition}:iam::aws:policy/service-role/"
             "AWSLambdaBasicExecutionRole"}
        ],
        "Policies": [{"PolicyName": "reap", "PolicyDocument": reaper_policy()}],
    }  # fmt: skip
    function = {
        "Handler": "index.handler",
        "Runtime": RUNTIME,
        "Timeout": 300,
        "Role": {"Fn::GetAtt": ["Role", "Arn"]},
        "Environment": {"Variables": {"IDLE_SECONDS": str(int(idle.total_seconds()))}},
        "Code": {"ZipFile": (resources.files("peagle.deploy") / "reaper.py").read_text("utf-8")},
    }
    permission = {
        "Action": "lambda:InvokeFunction",
        "FunctionName": called,
        "Principal": "events.amazonaws.com",
        "SourceArn": {"Fn::GetAtt": ["Schedule", "Arn"]},
    }
    rule = {"ScheduleExpression": schedule, "Targets": [{"Id": "reaper", "Arn": called}]}
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "Deletes endpoints of peagle that are past their end or idle",
        "Resources": {
            "Role": {"Type": "AWS::IAM::Role", "Properties": role},
            "Reaper": {"Type": "AWS::Lambda::Function", "Properties": function},
            "Schedule": {"Type": "AWS::Events::Rule", "Properties": rule},
            "Permission": {"Type": "AWS::Lambda::Permission", "Properties": permission},
        },
    }


def _title(plan: DeployPlan) -> str:
    return f"{plan.model} with {plan.drafting}, by peagle"


def _camel(variable: str) -> str:
    return variable.title().replace("_", "")


def _name_of(kind: str) -> str:
    return f"${{{TERRAFORM[kind]}.{OURS}.name}}"


def _snake(value: Any) -> Any:
    """Keys in snake case; a container's variables keep theirs."""
    if isinstance(value, list):
        return [_snake(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {_snake_key(k): one if k == "Environment" else _snake(one) for k, one in value.items()}


def _snake_key(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()


def _escaped(value: Any) -> Any:
    """Terraform would read ${...} and %{...} inside a text."""
    if isinstance(value, str):
        return value.replace("${", "$${").replace("%{", "%%{")
    if isinstance(value, list):
        return [_escaped(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _escaped(one) for key, one in value.items()}
    return value
