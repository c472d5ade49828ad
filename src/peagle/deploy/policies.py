"""What the caller and the endpoint's execution role must be allowed, as IAM policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from peagle.deploy.reaper import PLAN_TAG, SERVICE_NAMESPACE, log_group

Statement = dict[str, Any]


def partition(region: str) -> str:
    if region.startswith("cn-"):
        return "aws-cn"
    return "aws-us-gov" if region.startswith("us-gov-") else "aws"


def caller_policy(
    name: str, region: str, *, role: str | None, s3_uri: str | None, scaled: bool
) -> dict[str, Any]:
    """For whoever runs `peagle deploy sagemaker`: all of the endpoint `name`, and of others what
    `status` and `reap` read: which there are, whose they are, how they are."""
    arn = f"arn:{partition(region)}"
    here = f"{region}:*"
    own = [f"{arn}:sagemaker:{here}:{kind}/{name.lower()}" for kind in ("model", "endpoint-config")]
    endpoint = f"{arn}:sagemaker:{here}:endpoint/{name.lower()}"
    verbs = [f"{verb}{kind}" for kind in ("Model", "EndpointConfig", "Endpoint")
             for verb in ("Create", "Delete")]  # fmt: skip
    invoked = ["InvokeEndpoint", "InvokeEndpointWithResponseStream"]
    seen = ["DescribeModel", "DescribeEndpointConfig", "DescribeEndpoint", "ListTags"]
    others = [
        f"{arn}:sagemaker:{here}:{kind}/*" for kind in ("model", "endpoint-config", "endpoint")
    ]
    group = f"{arn}:logs:{here}:log-group:{log_group(name)}"
    statements = [
        _allow("sagemaker", [*verbs, "AddTags"], [*own, endpoint]),
        _allow("sagemaker", seen, others),
        _allow("sagemaker", invoked, [endpoint]),
        _allow("sagemaker", ["ListEndpoints"], ["*"]),
        _allow("cloudwatch", ["GetMetricStatistics"], ["*"]),
        _allow("logs", ["DescribeLogStreams", "GetLogEvents"], [group, f"{group}:*"]),
        _allow("iam", ["PassRole"], [role or f"{arn}:iam::*:role/ROLE"])
        | {"Condition": {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}},
    ]
    if s3_uri is not None:
        verbs = ["PutObject", "DeleteObject", "AbortMultipartUpload"]
        statements += [
            _allow("s3", verbs, [f"{_s3_arn(s3_uri, region)}*"]),
            _allow(
                "s3", ["ListBucket", "ListBucketMultipartUploads"], [_bucket_arn(s3_uri, region)]
            ),
        ]
    if scaled:
        verbs = ["RegisterScalableTarget", "DeregisterScalableTarget", "PutScalingPolicy"]
        linked = f"{arn}:iam::*:role/aws-service-role/{SERVICE_NAMESPACE}.application-autoscaling.*"
        alarms = ["PutMetricAlarm", "DeleteAlarms", "DescribeAlarms"]
        statements += [
            _allow("application-autoscaling", verbs, ["*"]),
            _allow("sagemaker", ["UpdateEndpointWeightsAndCapacities"], [endpoint]),
            _allow("cloudwatch", alarms, ["*"]),
            _allow("iam", ["CreateServiceLinkedRole"], [linked]),
        ]
    return _policy(statements)


def role_policy(name: str, region: str, *, image: str, s3_uri: str | None) -> dict[str, Any]:
    """For the execution role, which SageMaker assumes to start the container."""
    arn = f"arn:{partition(region)}"
    account, repository = image.split(".")[0], image.split("/", 1)[-1].split(":")[0].split("@")[0]
    pulled = ["BatchCheckLayerAvailability", "BatchGetImage", "GetDownloadUrlForLayer"]
    logged = ["CreateLogGroup", "CreateLogStream", "DescribeLogStreams", "PutLogEvents"]
    group = f"{arn}:logs:{region}:*:log-group:{log_group(name)}"
    statements = [
        _allow("ecr", ["GetAuthorizationToken"], ["*"]),
        _allow("ecr", pulled, [f"{arn}:ecr:{region}:{account}:repository/{repository}"]),
        _allow("logs", logged, [group, f"{group}:*"]),
        _allow("cloudwatch", ["PutMetricData"], ["*"]),
    ]
    if s3_uri is not None:
        statements += [
            _allow("s3", ["GetObject"], [f"{_s3_arn(s3_uri, region)}*"]),
            _allow("s3", ["ListBucket"], [_bucket_arn(s3_uri, region)]),
        ]
    return _policy(statements)


def reaper_policy() -> dict[str, Any]:
    """For the Lambda function that reaps, in a template: IAM, too, lets it delete ours alone."""
    here = "arn:${AWS::Partition}:sagemaker:${AWS::Region}:${AWS::AccountId}:*"
    every = [{"Fn::Sub": here}]
    kinds = ("Model", "EndpointConfig", "Endpoint")
    seen, deleted = ([f"{verb}{kind}" for kind in kinds] for verb in ("Describe", "Delete"))
    ours = {"Null": {f"aws:ResourceTag/{PLAN_TAG}": "false"}}
    return _policy(
        [
            _allow("sagemaker", [*seen, "ListTags"], every),
            _allow("sagemaker", deleted, every) | {"Condition": ours},
            _allow("sagemaker", ["ListEndpoints"], ["*"]),
            _allow("cloudwatch", ["GetMetricStatistics"], ["*"]),
            _allow("application-autoscaling", ["DeregisterScalableTarget"], ["*"]),
            _allow("cloudwatch", ["DeleteAlarms"], ["*"]),
        ]
    )


def _allow(service: str, actions: Iterable[str], on: Sequence[Any]) -> Statement:
    named = [f"{service}:{action}" for action in actions]
    return {"Effect": "Allow", "Action": named, "Resource": list(on)}


def _policy(statements: list[Statement]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": statements}


def _s3_arn(uri: str, region: str) -> str:
    return f"arn:{partition(region)}:s3:::{uri.removeprefix('s3://')}"


def _bucket_arn(uri: str, region: str) -> str:
    return _s3_arn(uri.removeprefix("s3://").split("/")[0], region)
