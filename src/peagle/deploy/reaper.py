"""Which endpoints are due, and what is deleted of them.

This file also runs as a Lambda function (templates.py), so it imports the standard library alone
and gets its clients handed in. Nothing is kept on this machine: tags say what is ours.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

PLAN_TAG = "peagle:plan"  # whatever carries it was made by us
END_TAG = "peagle:end"
FILES_TAG = "peagle:files"
SCALED_TAG = "peagle:max-instances"
VARIANT = "AllTraffic"
SERVICE_NAMESPACE = "sagemaker"
SCALED_DIMENSION = "sagemaker:variant:DesiredInstanceCount"
KINDS = ("endpoint", "endpoint_config", "model")  # in the order of their deletion
BUSY = ("Creating", "Updating", "SystemUpdating", "RollingBack")  # cannot be deleted yet
LONG_PERIOD = 3600  # seconds; CloudWatch forgets shorter ones after weeks


@dataclass(frozen=True)
class Reaped:
    name: str
    why: str
    deleted: bool
    error: Any = None  # AWS' refusal; the others are looked at all the same


def reap(
    sagemaker: Any,
    cloudwatch: Any,
    autoscaling: Any,
    *,
    idle: timedelta,
    now: datetime,
    dry_run: bool = False,
) -> Iterator[Reaped]:
    """Deletes endpoints of ours that are past their end, or idle for so long."""
    for endpoint in tagged_endpoints(sagemaker):
        name, why = endpoint["EndpointName"], None
        try:
            why = why_due(cloudwatch, endpoint, idle, now)
            if why is None:
                continue
            can = endpoint["EndpointStatus"] not in (*BUSY, "Deleting")
            if can and not dry_run:
                delete(sagemaker, autoscaling, name, find(sagemaker, name))
            yield Reaped(name, why, can)
        except sagemaker.exceptions.ClientError as error:
            yield Reaped(name, why or "it is not known whether it is idle", False, error)


def tagged_endpoints(sagemaker: Any) -> Iterator[dict[str, Any]]:
    """Summaries of the endpoints that carry our tag, with all their tags."""
    pages = sagemaker.get_paginator("list_endpoints").paginate(
        SortBy="Name", SortOrder="Ascending", PaginationConfig={"PageSize": 100}
    )
    # All pages first: deleting while listing would shift the pages that are still to come.
    for summary in [endpoint for page in pages for endpoint in page["Endpoints"]]:
        tags = tags_of(sagemaker, summary["EndpointArn"])
        if PLAN_TAG in tags:
            yield {**summary, "Tags": tags}


def tags_of(sagemaker: Any, arn: str) -> dict[str, str]:
    try:
        pages = sagemaker.get_paginator("list_tags").paginate(ResourceArn=arn)
        return {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}
    except sagemaker.exceptions.ClientError as error:
        if is_missing(error):
            return {}  # deleted meanwhile
        raise


def why_due(
    cloudwatch: Any, endpoint: dict[str, Any], idle: timedelta, now: datetime
) -> str | None:
    """None: it stays."""
    end = endpoint["Tags"].get(END_TAG)
    if end is not None and is_past(end, now):
        return f"its end was {end}"
    if endpoint["LastModifiedTime"] > now - idle:  # it has not had the time to be idle
        return None
    if invocations(cloudwatch, endpoint["EndpointName"], idle, now):
        return None
    return f"no invocations for {idle}"


def is_past(end: str, now: datetime) -> bool:
    """Of a tag that people edit, too: without a zone it is UTC, and what is no time is no end."""
    try:
        moment = datetime.fromisoformat(end)
    except ValueError:
        return False
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) <= now


def invocations(cloudwatch: Any, name: str, window: timedelta, now: datetime) -> float:
    seconds = max(int(window.total_seconds()), 60)
    step = LONG_PERIOD if seconds >= LONG_PERIOD else 60
    answer = cloudwatch.get_metric_statistics(
        Namespace="AWS/SageMaker",
        MetricName="Invocations",
        Dimensions=[
            {"Name": "EndpointName", "Value": name},
            {"Name": "VariantName", "Value": VARIANT},
        ],
        StartTime=now - window,
        EndTime=now,
        Period=-(-seconds // step) * step,  # one sum over the whole window
        Statistics=["Sum"],
    )
    return float(sum(point["Sum"] for point in answer["Datapoints"]))


def find(sagemaker: Any, name: str) -> dict[str, dict[str, Any]]:
    """What there is of that name, by kind, each with its tags; theirs may not be ours."""
    found = {}
    for kind in KINDS:
        resource = describe(sagemaker, kind, name)
        if resource is not None:
            tags = tags_of(sagemaker, resource[f"{camel(kind)}Arn"])
            found[kind] = {**resource, "Tags": tags}
    return found


def delete(sagemaker: Any, autoscaling: Any, name: str, found: dict[str, dict[str, Any]]) -> None:
    """Deletes what is ours of `found`, the part that costs most first."""
    ours = {kind: one for kind, one in found.items() if PLAN_TAG in one["Tags"]}
    if any(SCALED_TAG in one["Tags"] for one in ours.values()):
        _deregister(autoscaling, name)
    for kind, resource in ours.items():
        if resource.get("EndpointStatus") == "Deleting":
            continue
        try:
            getattr(sagemaker, f"delete_{kind}")(**{f"{camel(kind)}Name": name})
        except sagemaker.exceptions.ClientError as error:
            if not is_missing(error):  # somebody else was faster
                raise


def _deregister(autoscaling: Any, name: str) -> None:
    with contextlib.suppress(autoscaling.exceptions.ObjectNotFoundException):
        autoscaling.deregister_scalable_target(
            ServiceNamespace=SERVICE_NAMESPACE,
            ResourceId=scaled_resource(name),
            ScalableDimension=SCALED_DIMENSION,
        )


def describe(sagemaker: Any, kind: str, name: str) -> dict[str, Any] | None:
    """None: there is none of that name."""
    try:
        found: dict[str, Any] = getattr(sagemaker, f"describe_{kind}")(
            **{f"{camel(kind)}Name": name}
        )
    except sagemaker.exceptions.ClientError as error:
        if is_missing(error):
            return None
        raise
    return found


def is_missing(error: Any) -> bool:
    """SageMaker says ValidationException for a wrong request and for a missing resource alike."""
    said = error.response.get("Error", {})
    missing = "could not find" in str(said.get("Message", "")).lower()
    return missing or said.get("Code") == "ResourceNotFound"


def camel(kind: str) -> str:
    return kind.title().replace("_", "")


def scaled_resource(name: str) -> str:
    return f"endpoint/{name}/variant/{VARIANT}"


def log_group(name: str) -> str:
    return f"/aws/sagemaker/Endpoints/{name}"


def handler(event: Any, context: Any) -> list[str]:
    """The Lambda function: its region's endpoints, at the time that it is called."""
    import boto3

    idle = timedelta(seconds=int(os.environ["IDLE_SECONDS"]))
    clients = [boto3.client(n) for n in ("sagemaker", "cloudwatch", "application-autoscaling")]
    found = list(reap(*clients, idle=idle, now=datetime.now(UTC)))
    refused = next((one.error for one in found if one.error is not None), None)
    if refused is not None:
        raise refused  # after all that could be done: Lambda counts and shows it
    return [f"{one.name}: {one.why}" for one in found if one.deleted]
