"""What a user may ask of a deployment. Each default stands here and nowhere else."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from peagle.config import Doc
from peagle.deploy.container import AMI
from peagle.errors import ConfigError

MOST_HOURS = 10 * 365 * 24
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/\S+")


@dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """What a user may ask for; None leaves the choice to us."""

    name: Annotated[str | None, Doc("Of the endpoint; default: after the model.")] = None
    role: Annotated[str | None, Doc("ARN of the execution role; `up` needs it.")] = None
    bucket: Annotated[
        str | None, Doc("S3 bucket for a model or a head of this machine; {region} is filled in.")
    ] = None
    image: Annotated[str | None, Doc("Container image; default: AWS' vLLM container.")] = None
    instance_type: Annotated[str | None, Doc("Default: the smallest on which it fits.")] = None
    instance_count: Annotated[int, Doc("Instances to start with.")] = 1
    autoscale: Annotated[
        str | None, Doc("MIN:MAX instances, by the requests that each has at once.")
    ] = None
    autoscale_target: Annotated[int, Doc("Requests at once per instance to scale for.")] = 16
    inference_ami_version: Annotated[
        str, Doc("The instance's image with the GPU driver; '' leaves it to SageMaker.")
    ] = AMI
    startup_timeout: Annotated[
        int, Doc("Seconds for the container to become healthy, 60 to 3600.")
    ] = 1800
    pass_hf_token: Annotated[bool, Doc("Hand $HF_TOKEN to the container.")] = False
    max_hours: Annotated[float | None, Doc("`reap` deletes the endpoint so long from now.")] = None
    dollars_per_hour: Annotated[float | None, Doc("Price of one instance.")] = None
    weights_gb: Annotated[float | None, Doc("Of the target, where its size is unknown.")] = None
    skip_memory_check: Annotated[bool, Doc("Take the instance type as it is.")] = False

    def __post_init__(self) -> None:
        for name in ("max_hours", "dollars_per_hour", "weights_gb"):
            value = getattr(self, name)
            _require(value is None or 0 < value < math.inf, name, value, "a number above 0")
        hours = self.max_hours
        _require(hours is None or hours <= MOST_HOURS, "max_hours", hours, f"at most {MOST_HOURS}")
        for name in ("instance_count", "autoscale_target"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        seconds = self.startup_timeout
        _require(60 <= seconds <= 3600, "startup_timeout", seconds, "60 to 3600")
        if self.role is not None and not _ROLE.fullmatch(self.role):
            raise ConfigError(
                f"--role {self.role!r} is not the ARN of a role",
                hint="write arn:aws:iam::123456789012:role/NAME",
            )


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={value} is out of range", hint=f"use {allowed}")
