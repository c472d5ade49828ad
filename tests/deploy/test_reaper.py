"""Idle endpoints of ours are deleted, and those past their end; nobody else's, and no busy one."""

from __future__ import annotations

import ast
import json
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from peagle.deploy import reaper
from peagle.deploy.reaper import why_due

from .aws_proxy import Refusal
from .conftest import REGION, ROLE, Account

HOURS_AGO = timedelta(hours=3)
NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)


def make_endpoints(aws: Account, *names: str, ours: bool = True, **tags: str) -> None:
    """Endpoints that were last changed hours ago."""
    sagemaker = aws.client("sagemaker")
    tags = {"peagle:plan": "1", **tags} if ours else tags
    listed = [{"Key": key, "Value": value} for key, value in tags.items()]
    variant = {"VariantName": "AllTraffic", "InstanceType": "ml.g5.xlarge"}
    for name in names:
        sagemaker.create_model(
            ModelName=name, ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "i"}, Tags=listed
        )
        variants = [{**variant, "ModelName": name, "InitialInstanceCount": 1}]
        sagemaker.create_endpoint_config(
            EndpointConfigName=name, ProductionVariants=variants, Tags=listed
        )
        sagemaker.create_endpoint(EndpointName=name, EndpointConfigName=name, Tags=listed)
        endpoint = backend().endpoints[name]
        endpoint.creation_time = endpoint.last_modified_time = datetime.now(UTC) - HOURS_AGO


def backend() -> Any:
    """moto's state, which lies in this process."""
    from moto.sagemaker.models import sagemaker_backends

    return sagemaker_backends["123456789012"][REGION]


def invoke(aws: Account, name: str, ago: timedelta) -> None:
    aws.client("cloudwatch").put_metric_data(
        Namespace="AWS/SageMaker",
        MetricData=[
            {
                "MetricName": "Invocations",
                "Dimensions": [
                    {"Name": "EndpointName", "Value": name},
                    {"Name": "VariantName", "Value": "AllTraffic"},
                ],
                "Timestamp": datetime.now(UTC) - ago,
                "Value": 1.0,
            }
        ],
    )


@pytest.fixture
def many(aws: Account) -> Account:
    """Idle, used, used long ago, of others, and past its end."""
    make_endpoints(aws, "idle", "used", "used-before")
    make_endpoints(aws, "others", ours=False)
    past = (datetime.now(UTC) - timedelta(minutes=1)).isoformat()
    make_endpoints(aws, "ended", **{reaper.END_TAG: past})
    for name, ago in (("used", 10), ("ended", 10), ("used-before", 100)):
        invoke(aws, name, timedelta(minutes=ago))
    return aws


@pytest.mark.slow
def test_only_idle_endpoints_of_ours_and_ended_ones_are_deleted(many: Account) -> None:
    assert many.verb("reap", "--idle", "60m", "--dry-run", "--json") == 0
    assert [one["name"] for one in many.json["endpoints"]] == ["ended", "idle", "used-before"]
    assert len(backend().endpoints) == 5
    assert many.verb("reap", "--idle", "60m") == 0
    assert "deleted idle: no invocations for 1:00:00" in many.err
    assert "deleted ended: its end was" in many.err
    left = {"used", "others"}
    assert left == set(backend().endpoints) == set(backend().endpoint_configs)
    assert left == set(backend()._models)
    assert many.verb("reap", "--idle", "2h") == 0
    assert "no endpoint of peagle is idle" in many.err


def test_an_endpoint_that_is_young_or_starting_stays(aws: Account) -> None:
    make_endpoints(aws, "young", "starting")
    backend().endpoints["young"].last_modified_time = datetime.now(UTC)
    backend().endpoints["starting"].endpoint_status = "Creating"
    assert aws.verb("reap") == 0
    assert "cannot delete yet starting" in aws.err
    assert "young" not in aws.err
    assert len(backend().endpoints) == 2


def test_what_others_named_alike_stays(aws: Account) -> None:
    make_endpoints(aws, "idle")
    backend()._models["idle"].tags = []
    assert aws.verb("reap") == 0
    assert (len(backend().endpoints), len(backend()._models)) == (0, 1)


@pytest.mark.slow
def test_endpoints_beyond_the_first_hundred_are_found(aws: Account) -> None:
    names = [f"many-{n:03}" for n in range(103)]
    make_endpoints(aws, names[0], names[-1])
    first = backend().endpoints[names[0]]
    for name in names[1:-1]:  # copies, which are not ours: one request each would take seconds
        copy = type(first)("123456789012", REGION, name, names[0], [], {}, [])
        backend().endpoints[name] = copy
    assert aws.verb("reap") == 0
    assert aws.behaviour.called("ListEndpoints") == 2
    assert set(backend().endpoints) == set(names[1:-1])


@pytest.mark.slow
def test_all_of_ours_in_a_region_have_a_status(many: Account) -> None:
    assert many.verb("status", "--dollars-per-hour", "2", "--json") == 0
    found = {one["name"]: one for one in many.json["endpoints"]}
    assert set(found) == {"idle", "used", "used-before", "ended"}
    assert found["idle"]["dollars"] == pytest.approx(6.0, rel=0.01)
    assert found["ended"]["end"] is not None
    assert many.verb("status", "--dollars-per-hour", "2") == 0
    assert "ml.g5.xlarge" in many.out
    assert "6.00" in many.out
    assert many.verb("status", "missing") == 0
    assert "no endpoint missing in us-east-1" in many.err


def test_what_may_not_be_deleted_keeps_nothing_else(aws: Account) -> None:
    make_endpoints(aws, "a", "b")
    aws.behaviour.rules["DeleteEndpoint"] = [Refusal("AccessDeniedException", "not authorized")]
    assert aws.verb("reap", "--json") == 2
    assert [(one["name"], one["deleted"]) for one in aws.json["endpoints"]] == [
        ("a", False),
        ("b", True),
    ]
    assert "error: AWS refuses DeleteEndpoint: AccessDeniedException: not authorized" in aws.err
    assert set(backend().endpoints) == {"a"}


def test_the_status_of_one_of_ours_does_not_depend_on_what_others_named_alike(
    aws: Account,
) -> None:
    make_endpoints(aws, "shared")
    backend()._models["shared"].tags = []
    assert aws.verb("status", "--json") == 0
    assert [one["name"] for one in aws.json["endpoints"]] == ["shared"]


def test_what_aws_refuses_is_said(many: Account) -> None:
    many.behaviour.rules["ListEndpoints"] = [Refusal("AccessDeniedException")]
    assert many.verb("reap") == 2
    assert "AWS refuses ListEndpoints: AccessDeniedException" in many.err


@pytest.mark.slow
def test_the_lambda_function_reaps_without_peagle(
    many: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert many.verb("reap", "--lambda-template", "--idle", "60m", "--every", "10m") == 0
    function = json.loads(many.out)["Resources"]["Reaper"]["Properties"]
    source = function["Code"]["ZipFile"]
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - set(sys.stdlib_module_names) == {"boto3"}
    for name, value in function["Environment"]["Variables"].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)  # as Lambda sets it
    import boto3

    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    module: dict[str, Any] = {"__name__": "index"}
    monkeypatch.setitem(sys.modules, "index", sys.modules[__name__])  # dataclasses look it up
    exec(compile(source, "index.py", "exec"), module)
    said = module["handler"]({}, None)
    assert [line.split(":")[0] for line in said] == ["ended", "idle", "used-before"]
    assert set(backend().endpoints) == {"used", "others"}
    policy = json.loads(many.out)["Resources"]["Role"]["Properties"]["Policies"][0]
    allowed = {a for s in policy["PolicyDocument"]["Statement"] for a in s["Action"]}
    asked = {c.replace("monitoring:", "cloudwatch:") for c in many.behaviour.calls}
    made = {c for c in asked if ":Create" in c or ":Put" in c}  # by the fixture
    assert asked - made <= allowed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--idle", "1h30"), "is not a duration"),
        (("--idle", "60s"), "is too short"),
        (("--lambda-template", "--every", "90s"), "is not a number of minutes"),
    ],
)
def test_a_wrong_duration_is_refused(aws: Account, words: tuple[str, ...], message: str) -> None:
    assert aws.verb("reap", *words) == 2
    assert message in aws.err
    assert aws.behaviour.calls == []


class Metrics:
    """CloudWatch with a count of invocations, asked in one period."""

    def __init__(self, total: float) -> None:
        self.total, self.asked = total, dict[str, Any]()

    def get_metric_statistics(self, **asked: Any) -> dict[str, Any]:
        self.asked = asked
        return {"Datapoints": [{"Sum": self.total}] if self.total else []}


@pytest.mark.parametrize(
    ("age", "end", "total", "due"),
    [
        (120, None, 0.0, True),
        (120, None, 5.0, False),
        (30, None, 0.0, False),  # it has not been there for so long
        (30, -1, 5.0, True),
        (30, 1, 0.0, False),
        (120, 1, 0.0, True),
    ],
)
def test_an_endpoint_is_due(age: int, end: int | None, total: float, due: bool) -> None:
    tags = {} if end is None else {reaper.END_TAG: (NOW + timedelta(minutes=end)).isoformat()}
    changed = NOW - timedelta(minutes=age)
    endpoint = {"EndpointName": "e", "LastModifiedTime": changed, "Tags": tags}
    assert (why_due(Metrics(total), endpoint, timedelta(hours=1), NOW) is not None) == due


@pytest.mark.parametrize(
    ("end", "due"),
    [
        ("2026-01-02T11:59", True),
        ("2026-01-02T12:01", False),
        ("2026-01-02T12:59+01:00", True),
        ("soon", False),
    ],
)
def test_an_end_may_be_written_by_hand(end: str, due: bool) -> None:
    assert reaper.is_past(end, NOW) == due


@pytest.mark.parametrize(("minutes", "period"), [(5, 300), (60, 3600), (90, 7200), (7, 420)])
def test_one_period_covers_the_whole_window(minutes: int, period: int) -> None:
    metrics = Metrics(1.0)
    reaper.invocations(metrics, "e", timedelta(minutes=minutes), NOW)
    assert metrics.asked["Period"] == period
    assert metrics.asked["EndTime"] - metrics.asked["StartTime"] == timedelta(minutes=minutes)
