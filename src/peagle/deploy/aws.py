"""Clients of a region, and AWS' errors as one line with the error's code and a hint."""

from __future__ import annotations

import functools
import os
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peagle.backends.vllm.released import nearest_name
from peagle.deploy.container import check_region
from peagle.errors import BackendError, ConfigError, DeployError

RETRIES = {"mode": "standard", "total_max_attempts": 8}  # throttled requests are among them
SECRETS = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
LOGIN = "run `aws configure` or `aws sso login`, or set AWS_PROFILE"
ALLOW = "`peagle deploy sagemaker plan` prints the IAM policy that it takes"
QUOTA = "ask for more in Service Quotas, or use another --instance-type or region"
NETWORK = "check --region and the network, then run it again"
HINTS = {  # by a part of the error's code
    "Credentials": LOGIN,
    "ProfileNotFound": "see `aws configure list-profiles`, and AWS_PROFILE",
    "Token": LOGIN,
    "SSO": LOGIN,
    "UnrecognizedClient": f"{LOGIN}; the region may not be enabled for the account",
    "Signature": LOGIN,
    "AccessKey": LOGIN,
    "AccessDenied": ALLOW,
    "UnauthorizedOperation": ALLOW,
    "LimitExceeded": QUOTA,
    "QuotaExceeded": QUOTA,
    "Insufficient": "try another --instance-type or region, or the same later",
    "Throttling": "AWS asks for fewer requests: wait a minute, then run it again",
    "NoSuchBucket": "create the bucket in the endpoint's region, or name another by --bucket",
    "Connection": NETWORK,
    "Timeout": NETWORK,
    "SSL": NETWORK,
}
LONGEST = 300  # characters of a message: some list everything that would have been right
INSTANCE_HINT = "the region may not have that --instance-type: try another of either"
ROLE_HINT = "--role must be a role that trusts sagemaker.amazonaws.com"
OTHER_HINT = "`peagle deploy sagemaker plan --json` shows what is sent"


class Aws:
    """Clients of one region, each made with its first use."""

    def __init__(self, region: str) -> None:
        self.region = region
        self._session = find_session(region)

    @functools.cached_property
    def sagemaker(self) -> Any:
        return self._client("sagemaker")

    @functools.cached_property
    def autoscaling(self) -> Any:
        return self._client("application-autoscaling")

    @functools.cached_property
    def cloudwatch(self) -> Any:
        return self._client("cloudwatch")

    @functools.cached_property
    def logs(self) -> Any:
        return self._client("logs")

    @functools.cached_property
    def s3(self) -> Any:
        return self._client("s3")

    def _client(self, service: str) -> Any:
        from botocore.config import Config

        return self._session.client(service, config=Config(retries=RETRIES))


def find_session(region: str) -> Any:
    """A boto3 session with credentials for a region that has SageMaker."""
    boto3 = import_boto3()
    with aws_errors():
        session = boto3.Session(region_name=region)
        regions = [
            name
            for partition in session.get_available_partitions()
            for name in session.get_available_regions("sagemaker", partition)
        ]
        if region not in regions:
            nearest = nearest_name(region, regions)
            raise DeployError(
                f"boto3 knows no SageMaker in region {region!r} (UnknownRegion)",
                hint=f"did you mean {nearest}?" if nearest else "update boto3, or try another",
            )
        if session.get_credentials() is None:
            raise DeployError("there are no AWS credentials (NoCredentialsError)", hint=LOGIN)
    return session


def import_boto3() -> Any:
    try:
        import boto3
    except ImportError:
        raise BackendError("boto3 is not installed", hint="pip install 'peagle[deploy]'") from None
    return boto3


def find_regions(asked: str | None) -> list[str]:
    """Those asked for, with commas between them, or the one that AWS' own tools would use."""
    given = asked or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if given is None:
        given = _region_of_profile()
    if given is None:
        raise ConfigError("no AWS region is named", hint="give --region, or set AWS_REGION")
    return [check_region(region.strip()) for region in given.split(",")]


def _region_of_profile() -> str | None:
    try:
        import boto3
    except ImportError:
        return None
    with aws_errors():
        region: str | None = boto3.Session().region_name
    return region


@contextmanager
def aws_errors() -> Iterator[None]:
    """Whatever AWS refuses, or boto3 cannot send, as a DeployError."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        said = error.response.get("Error", {})
        raise _as_ours(
            str(said.get("Code", "Unknown")), str(said.get("Message", "")), error.operation_name
        ) from None
    except (Boto3Error, BotoCoreError) as error:
        # boto3 wraps what S3 said into the text of an error of its own.
        inside = re.search(r"\((\w+)\) when calling the (\w+)", str(error))
        code, operation = (inside[1], inside[2]) if inside else (type(error).__name__, None)
        raise _as_ours(code, str(error), operation) from None


def _as_ours(code: str, message: str, operation: str | None) -> DeployError:
    asked = f"AWS refuses {operation}" if operation else "AWS"
    said = textwrap.shorten(without_secrets(message), LONGEST, placeholder=" ...")
    hint = hint_of(code) or _hint_of_message(message.lower())
    return DeployError(f"{asked}: {code}: {said}", hint=hint)


def hint_of(code: str) -> str | None:
    """What to do about an error's code, which may stand in a longer text."""
    return next((hint for part, hint in HINTS.items() if part in code), None)


def _hint_of_message(message: str) -> str:
    """SageMaker says ValidationException for much that has no code of its own."""
    if "assume role" in message:
        return ROLE_HINT
    return INSTANCE_HINT if "instance" in message and "type" in message else OTHER_HINT


def without_secrets(text: str) -> str:
    """AWS repeats what it was sent in some of its messages."""
    for name in SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    return text
