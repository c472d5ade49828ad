"""up, down, status and logs.

Nothing is kept on this machine: the three resources of a deployment have its name, and their tags
say whose they are. So a command that was interrupted anywhere can be run again, or undone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from peagle.deploy import reaper
from peagle.deploy.aws import Aws, aws_errors, hint_of, without_secrets
from peagle.deploy.plan import DOLLARS_TAG, DRAFTING_TAG, HIDDEN, MODEL_TAG, DeployPlan
from peagle.deploy.reaper import (
    BUSY,
    END_TAG,
    FILES_TAG,
    PLAN_TAG,
    describe,
    log_group,
    tagged_endpoints,
)
from peagle.deploy.uploads import bucket_name, delete_objects, objects, upload
from peagle.errors import ConfigError, DeployError, PeagleError

POLL_SECONDS = 10.0
TELL_SECONDS = 60.0  # between two notes of the same status
LOG_LINES = 20  # of a container that failed
LOG_STREAMS = 10  # the newest that are read: one per instance and start
NEVER_ANSWERED = ("Creating", "Deleting", "Failed")
Note = Callable[[str], None]


def up(aws: Aws, plan: DeployPlan, note: Note) -> None:
    """Makes what is missing of a plan and waits until it is in service, or removes it again."""
    secrets = check_ready(plan)
    there = check_same_plan(aws, plan)
    has_files = _has_files(aws, plan)
    try:
        _upload(aws, plan, note)
        if there.get("endpoint") in ("Deleting", "Failed"):
            _clear_endpoint(aws, plan.name, note)
            del there["endpoint"]
        with aws_errors():
            for kind, request in plan.requests().items():
                if kind not in there:
                    note(f"{plan.region}: creating {kind.replace('_', ' ')} {plan.name}")
                    _create(aws, plan, kind, _with(request, secrets))
            if "endpoint" in there:
                _renew_end(aws, plan)
        _wait_until_in_service(aws, plan.name, note)
        _scale(aws, plan)
    except PeagleError:
        # One that answered before goes on.
        if there.get("endpoint", "Creating") in NEVER_ANSWERED:
            _roll_back(aws, plan, note, files=not has_files)
        raise


def check_ready(plan: DeployPlan) -> dict[str, str]:
    """What a plan may lack and `up` needs -> the values of its secrets."""
    if plan.role is None:
        raise ConfigError("the endpoint needs an execution role", hint="give --role ARN")
    missing = next((name for name in plan.secrets if not os.environ.get(name)), None)
    if missing is not None:
        raise ConfigError(f"${missing} is not set", hint="export it, or drop --pass-hf-token")
    return {name: os.environ[name] for name in plan.secrets}


def _with(request: dict[str, Any], secrets: dict[str, str]) -> dict[str, Any]:
    """The request as it is sent."""
    if "PrimaryContainer" not in request:
        return request
    container = request["PrimaryContainer"]
    variables = container["Environment"]
    assert all(variables[name] == HIDDEN for name in secrets)
    return {**request, "PrimaryContainer": {**container, "Environment": variables | secrets}}


def _create(aws: Aws, plan: DeployPlan, kind: str, request: dict[str, Any]) -> None:
    """boto3 sends a request again whose answer was lost; then it may be there, and be ours."""
    try:
        getattr(aws.sagemaker, f"create_{kind}")(**request)
    except aws.sagemaker.exceptions.ClientError as error:
        already = "already exist" in str(error.response.get("Error", {}).get("Message", ""))
        if not already or kind not in check_same_plan(aws, plan):
            raise


def check_same_plan(aws: Aws, plan: DeployPlan) -> dict[str, str]:
    """What there is of a deployment already, each with its status; it must be of the same plan."""
    there = {}
    for kind, resource in find(aws, plan.name).items():
        if resource["Tags"][PLAN_TAG] != plan.digest:
            raise DeployError(
                f"{plan.region} has a {kind.replace('_', ' ')} {plan.name} with other settings",
                hint=f"peagle deploy sagemaker down {plan.name}, or another --name",
            )
        there[kind] = resource.get("EndpointStatus", "")
    return there


def find(aws: Aws, name: str) -> dict[str, dict[str, Any]]:
    """The resources of that name, with tags; one that is not ours is an error."""
    with aws_errors():
        found = reaper.find(aws.sagemaker, name)
    for kind, resource in found.items():
        if PLAN_TAG not in resource["Tags"]:
            raise DeployError(
                f"the {kind.replace('_', ' ')} {name} in {aws.region} was not made by peagle",
                hint="use another name; this one stays as it is",
            )
    return found


def _has_files(aws: Aws, plan: DeployPlan) -> bool:
    """Whether files of the plan lie in S3 already, if only those of an interrupted upload."""
    with aws_errors():
        return plan.s3_uri is not None and bool(objects(aws.s3, plan.s3_uri))


def _upload(aws: Aws, plan: DeployPlan, note: Note) -> None:
    if plan.s3_uri is None:
        return
    for one in plan.uploads:
        if one.export is not None and not one.export.done:
            note(f"exporting the head to {one.folder}")
        one.prepare()
    with aws_errors():
        upload(aws.s3, plan.uploads, plan.s3_uri, note)


def _clear_endpoint(aws: Aws, name: str, note: Note) -> None:
    """An endpoint that failed, or is being deleted, stands in the way of a new one."""
    with aws_errors():
        found = describe(aws.sagemaker, "endpoint", name)
        if found is not None and found["EndpointStatus"] == "Failed":
            aws.sagemaker.delete_endpoint(EndpointName=name)
        _wait_until_gone(aws, name, note)


def _wait_until_in_service(aws: Aws, name: str, note: Note) -> None:
    with aws_errors():
        for endpoint in _watch(aws, name, note):
            status = endpoint["EndpointStatus"]
            if status == "InService":
                return
            if status not in BUSY:
                reason = without_secrets(endpoint.get("FailureReason", "no reason is given"))
                raise DeployError(
                    f"the endpoint {name} is {status}: {reason}",
                    hint=_hint_of_failure(reason),
                )
    raise DeployError(f"the endpoint {name} is gone", hint="somebody deleted it; run up again")


def _hint_of_failure(reason: str) -> str:
    """A lack of instances has its code in the text; anything else the container says itself."""
    lack = re.search(r"\bInsufficient\w+|\w+Exceeded\b", reason)
    hint = hint_of(lack[0]) if lack else None
    return hint or "the container's last log lines, if any, stand above"


def _wait_until_gone(aws: Aws, name: str, note: Note) -> None:
    for _ in _watch(aws, name, note):
        pass


def _watch(aws: Aws, name: str, note: Note) -> Iterator[dict[str, Any]]:
    """The endpoint again and again, as long as there is one; tells how it is."""
    begun, told, last = time.monotonic(), 0.0, ""
    while (endpoint := describe(aws.sagemaker, "endpoint", name)) is not None:
        now, status = time.monotonic(), endpoint["EndpointStatus"]
        if status != last or now - told >= TELL_SECONDS:
            note(f"{aws.region}: {name} is {status} ({(now - begun) / 60:.0f} min)")
            told, last = now, status
        yield endpoint
        time.sleep(POLL_SECONDS)


def _renew_end(aws: Aws, plan: DeployPlan) -> None:
    if plan.end is not None:
        endpoint = aws.sagemaker.describe_endpoint(EndpointName=plan.name)
        tags = [{"Key": END_TAG, "Value": plan.end}]
        aws.sagemaker.add_tags(ResourceArn=endpoint["EndpointArn"], Tags=tags)


def _scale(aws: Aws, plan: DeployPlan) -> None:
    if requests := plan.scaling_requests():
        target, policy = requests
        with aws_errors():
            aws.autoscaling.register_scalable_target(**target)
            aws.autoscaling.put_scaling_policy(**policy)


def _roll_back(aws: Aws, plan: DeployPlan, note: Note, *, files: bool) -> None:
    """Best effort: the first error is the one to tell, and `down` does it again."""
    _show_log(aws, plan.name, note)
    try:
        down(aws, plan.name, note, only_plan=plan.digest)
        if files and plan.s3_uri is not None:
            _delete_files(aws, plan.s3_uri, note)
    except PeagleError as error:
        note(f"could not remove what was made: {error.message}")
        note(f"run `peagle deploy sagemaker down {plan.name} --region {plan.region}`")


def _show_log(aws: Aws, name: str, note: Note) -> None:
    """Whoever may not read logs is told the failure itself all the same."""
    try:
        for line in log_lines(aws, name, LOG_LINES):
            note(f"  {line}")
    except PeagleError as error:
        note(f"the container's log cannot be shown: {error.message}")


def down(
    aws: Aws,
    name: str,
    note: Note,
    *,
    delete_files: bool = False,
    bucket: str | None = None,
    dry_run: bool = False,
    only_plan: str | None = None,
) -> list[str]:
    """Deletes what there is of a deployment, or of one plan of it; names the kinds."""
    found = find(aws, name)
    if only_plan is not None:
        found = {kind: one for kind, one in found.items() if one["Tags"][PLAN_TAG] == only_plan}
    tags = {key: value for one in found.values() for key, value in one["Tags"].items()}
    if found and not dry_run:
        _delete(aws, name, found, note)
    for kind in found:
        done = "would delete" if dry_run else "deleted"
        note(f"{aws.region}: {done} {kind.replace('_', ' ')} {name}")
    deleted = list(found)
    uri = tags.get(FILES_TAG)
    if bucket is not None:
        uri = f"s3://{bucket_name(bucket, aws.region)}/peagle/{name}/"
    if delete_files and uri is not None:
        deleted += _delete_files(aws, uri, note, dry_run)
    return deleted


def _delete(aws: Aws, name: str, found: dict[str, dict[str, Any]], note: Note) -> None:
    with aws_errors():
        if found.get("endpoint", {}).get("EndpointStatus") in BUSY:
            for endpoint in _watch(aws, name, note):  # SageMaker refuses to delete it until then
                if endpoint["EndpointStatus"] not in BUSY:
                    break
        reaper.delete(aws.sagemaker, aws.autoscaling, name, found)
        _wait_until_gone(aws, name, note)


def _delete_files(aws: Aws, uri: str, note: Note, dry_run: bool = False) -> list[str]:
    if dry_run:
        note(f"{aws.region}: would delete files under {uri}")
        return ["files"]
    with aws_errors():
        count = delete_objects(aws.s3, uri)
    note(f"{aws.region}: deleted {count} files under {uri}")
    return ["files"] if count else []


@dataclass(frozen=True, kw_only=True)
class EndpointStatus:
    name: str
    region: str
    status: str
    model: str
    drafting: str
    instance_type: str
    instance_count: int
    created: datetime
    hours: float
    dollars_per_hour: float | None  # of all its instances
    end: str | None
    failure: str | None

    @property
    def dollars(self) -> float | None:
        """Since its creation, with as many instances as there are."""
        return None if self.dollars_per_hour is None else self.dollars_per_hour * self.hours


def status(
    aws: Aws, name: str | None, *, now: datetime, dollars_per_hour: float | None = None
) -> list[EndpointStatus]:
    """Of one endpoint, or of all that are ours. The price of an instance stands in its tags."""
    with aws_errors():
        if name is None:
            listed = tagged_endpoints(aws.sagemaker)
            ours = {one["EndpointName"]: one["Tags"] for one in listed}
        else:
            endpoint = find(aws, name).get("endpoint")
            ours = {} if endpoint is None else {name: endpoint["Tags"]}
        found = [_status(aws, one, tags, now, dollars_per_hour) for one, tags in ours.items()]
    return [one for one in found if one is not None]


def _status(
    aws: Aws, name: str, tags: dict[str, str], now: datetime, dollars_per_hour: float | None
) -> EndpointStatus | None:
    endpoint = describe(aws.sagemaker, "endpoint", name)
    if endpoint is None:
        return None  # deleted meanwhile
    config = describe(aws.sagemaker, "endpoint_config", endpoint["EndpointConfigName"])
    variants = config["ProductionVariants"] if config else [{}]
    running = (endpoint.get("ProductionVariants") or [{}])[0].get("CurrentInstanceCount")
    count = variants[0].get("InitialInstanceCount", 0) if running is None else running
    price = dollars_per_hour or (float(tags[DOLLARS_TAG]) if DOLLARS_TAG in tags else None)
    return EndpointStatus(
        name=name,
        region=aws.region,
        status=endpoint["EndpointStatus"],
        model=tags.get(MODEL_TAG, "-"),
        drafting=tags.get(DRAFTING_TAG, "-"),
        instance_type=variants[0].get("InstanceType", "-"),
        instance_count=count,
        created=endpoint["CreationTime"],
        hours=max((now - endpoint["CreationTime"]).total_seconds(), 0.0) / 3600,
        dollars_per_hour=None if price is None else price * count,
        end=tags.get(END_TAG),
        failure=without_secrets(endpoint.get("FailureReason") or "") or None,
    )


def log_lines(aws: Aws, name: str, num_lines: int) -> list[str]:
    """The container's last lines, over all its instances."""
    return _ContainerLog(aws, name, num_lines).new_lines()


def follow_log(aws: Aws, name: str, num_lines: int) -> Iterator[str]:
    """The last lines, then those that come, as long as there is an endpoint."""
    log = _ContainerLog(aws, name, num_lines)
    while True:
        with aws_errors():
            there = describe(aws.sagemaker, "endpoint", name) is not None
        yield from log.new_lines()
        if not there:
            return
        time.sleep(POLL_SECONDS)


class _ContainerLog:
    """The log of an endpoint, read on from where it was read before."""

    def __init__(self, aws: Aws, name: str, num_lines: int) -> None:
        self._logs, self._group, self._num_lines = aws.logs, log_group(name), num_lines
        self._tokens: dict[str, str] | None = None  # by stream, where to read on; None: never read

    def new_lines(self) -> list[str]:
        with aws_errors():
            first, tokens = self._tokens is None, self._tokens or {}
            events = []
            for stream in self._streams():
                found, tokens[stream] = self._read(stream, tokens.get(stream), from_end=first)
                events += found
        self._tokens = tokens
        events.sort(key=lambda event: event["timestamp"])
        shown = events[-self._num_lines :] if first else events
        return [without_secrets(event["message"].rstrip()) for event in shown]

    def _streams(self) -> list[str]:
        try:
            found = self._logs.describe_log_streams(
                logGroupName=self._group,
                orderBy="LastEventTime",
                descending=True,
                limit=LOG_STREAMS,
            )
        except self._logs.exceptions.ResourceNotFoundException:
            return []  # no container has started yet
        return [stream["logStreamName"] for stream in found["logStreams"]]

    def _read(
        self, stream: str, token: str | None, *, from_end: bool
    ) -> tuple[list[dict[str, Any]], str]:
        """The last events, or all since `token` -> those, and the next token."""
        where = {"logGroupName": self._group, "logStreamName": stream}
        if from_end:
            page = self._logs.get_log_events(**where, limit=self._num_lines, startFromHead=False)
            return page["events"], page["nextForwardToken"]
        events: list[dict[str, Any]] = []
        while True:
            more = {} if token is None else {"nextToken": token}
            page = self._logs.get_log_events(**where, **more, startFromHead=True)
            events += page["events"]
            before, token = token, str(page["nextForwardToken"])
            if token == before:  # the end of what there is
                return events, token
