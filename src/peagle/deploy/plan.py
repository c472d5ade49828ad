"""What will be made, decided once: API requests, templates and texts are all read from a plan.

Making a plan asks AWS nothing and needs no credentials.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from peagle.backends.vllm.arguments import VllmServer, plan_server
from peagle.backends.vllm.options import VllmOptions
from peagle.backends.vllm.released import find_released
from peagle.deploy.config import DeployConfig
from peagle.deploy.container import MOUNT, check_region, default_image, environment
from peagle.deploy.instances import Memory, choose_instance, memory_of, text_config
from peagle.deploy.policies import caller_policy, partition, role_policy
from peagle.deploy.reaper import (
    END_TAG,
    FILES_TAG,
    PLAN_TAG,
    SCALED_DIMENSION,
    SCALED_TAG,
    SERVICE_NAMESPACE,
    VARIANT,
    scaled_resource,
)
from peagle.deploy.uploads import HEAD, TARGET, Upload, bucket_name, plan_uploads
from peagle.errors import ConfigError

MODEL_TAG, DRAFTING_TAG = "peagle:model", "peagle:drafting"
DOLLARS_TAG = "peagle:dollars-per-hour"  # of one instance
HIDDEN = "***"  # stands for a secret in everything that is shown
CONCURRENCY_METRIC = "SageMakerVariantConcurrentRequestsPerModelHighResolution"
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")


@dataclass(frozen=True)
class Autoscaling:
    min_instances: int
    max_instances: int
    target: int  # requests at once per instance


@dataclass(frozen=True, kw_only=True)
class DeployPlan:
    """One endpoint in one region, with its model and its configuration, all of the same name."""

    name: str
    region: str
    model: str  # as the user wrote it
    jumpstart_id: str | None
    drafting: str  # in words: `p-eagle K=7`
    image: str
    role: str | None
    environment: Mapping[str, str]
    secrets: tuple[str, ...]  # variables whose values are read when the model is created
    instance_type: str
    instance_count: int
    inference_ami_version: str
    startup_timeout: int
    autoscaling: Autoscaling | None
    end: str | None  # ISO 8601
    uploads: tuple[Upload, ...]
    s3_uri: str | None  # where they go
    memory: Memory
    dollars_per_hour: float | None  # of one instance
    tokens_per_second: float | None = None  # of one instance, where it was measured
    notes: tuple[str, ...] = field(default=(), compare=False)

    # The requests. Everything else that shows or makes resources is derived from them.

    def model_request(self) -> dict[str, Any]:
        hidden = dict.fromkeys(self.secrets, HIDDEN)
        container: dict[str, Any] = {
            "Image": self.image,
            "Environment": {**self.environment, **hidden},
        }
        if self.s3_uri is not None:
            source = {"S3Uri": self.s3_uri, "S3DataType": "S3Prefix", "CompressionType": "None"}
            container["ModelDataSource"] = {"S3DataSource": source}
        return {
            "ModelName": self.name,
            "ExecutionRoleArn": self.role or f"arn:{partition(self.region)}:iam::ACCOUNT:role/ROLE",
            "PrimaryContainer": container,
        }

    def endpoint_config_request(self) -> dict[str, Any]:
        variant: dict[str, Any] = {
            "VariantName": VARIANT,
            "ModelName": self.name,
            "InstanceType": self.instance_type,
            "InitialInstanceCount": self.instance_count,
            "InitialVariantWeight": 1.0,
            "ContainerStartupHealthCheckTimeoutInSeconds": self.startup_timeout,
        }
        if self.s3_uri is not None:
            variant["ModelDataDownloadTimeoutInSeconds"] = self.startup_timeout
        if self.inference_ami_version:
            variant["InferenceAmiVersion"] = self.inference_ami_version
        return {"EndpointConfigName": self.name, "ProductionVariants": [variant]}

    def endpoint_request(self) -> dict[str, Any]:
        return {"EndpointName": self.name, "EndpointConfigName": self.name}

    def requests(self) -> dict[str, dict[str, Any]]:
        """By kind, in the order in which they are made, with tags."""
        tags = [{"Key": key, "Value": value} for key, value in self.tags.items()]
        return {
            "model": self.model_request() | {"Tags": tags},
            "endpoint_config": self.endpoint_config_request() | {"Tags": tags},
            "endpoint": self.endpoint_request() | {"Tags": tags},
        }

    def scaling_requests(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The scalable target and its policy."""
        if self.autoscaling is None:
            return None
        scaled = {
            "ServiceNamespace": SERVICE_NAMESPACE,
            "ResourceId": scaled_resource(self.name),
            "ScalableDimension": SCALED_DIMENSION,
        }
        capacity = {
            "MinCapacity": self.autoscaling.min_instances,
            "MaxCapacity": self.autoscaling.max_instances,
        }
        tracking = {
            "TargetValue": float(self.autoscaling.target),
            "PredefinedMetricSpecification": {"PredefinedMetricType": CONCURRENCY_METRIC},
        }
        policy = {
            "PolicyName": f"{self.name}-requests-at-once",
            "PolicyType": "TargetTrackingScaling",
            "TargetTrackingScalingPolicyConfiguration": tracking,
        }
        return scaled | capacity, scaled | policy

    @property
    def tags(self) -> dict[str, str]:
        tags = {PLAN_TAG: self.digest, MODEL_TAG: self.model, DRAFTING_TAG: self.drafting}
        if self.dollars_per_hour is not None:
            tags[DOLLARS_TAG] = f"{self.dollars_per_hour:g}"
        if self.end is not None:
            tags[END_TAG] = self.end
        if self.s3_uri is not None:
            tags[FILES_TAG] = self.s3_uri
        if self.autoscaling is not None:
            tags[SCALED_TAG] = str(self.autoscaling.max_instances)
        return {key: _tag_value(value) for key, value in tags.items()}

    @property
    def digest(self) -> str:
        """The same for two plans that would make the same resources; their end may differ."""
        made = [self.model_request(), self.endpoint_config_request(), self.scaling_requests()]
        content = json.dumps(made, sort_keys=True).encode()
        return hashlib.sha256(content).hexdigest()[:16]

    @property
    def price_per_hour(self) -> float | None:
        one = self.dollars_per_hour
        return None if one is None else one * self.instance_count

    @property
    def dollars_per_million_tokens(self) -> float | None:
        if self.dollars_per_hour is None or not self.tokens_per_second:
            return None
        return self.dollars_per_hour / (self.tokens_per_second * 3600) * 1e6

    def caller_policy(self) -> dict[str, Any]:
        scaled = self.autoscaling is not None
        return caller_policy(
            self.name, self.region, role=self.role, s3_uri=self.s3_uri, scaled=scaled
        )

    def role_policy(self) -> dict[str, Any]:
        return role_policy(self.name, self.region, image=self.image, s3_uri=self.s3_uri)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "region": self.region,
            "model": self.model,
            "jumpstart_id": self.jumpstart_id,
            "drafting": self.drafting,
            "requests": self.requests(),
            "autoscaling": self.scaling_requests(),
            "uploads": {upload.part: str(upload.folder) for upload in self.uploads},
            "s3_uri": self.s3_uri,
            "memory_gb": {
                "target": self.memory.target_gb,
                "head": self.memory.head_gb,
                "cache_of_one_request": self.memory.cache_gb,
            },
            "dollars_per_hour": self.price_per_hour,
            "dollars_per_million_tokens": self.dollars_per_million_tokens,
            "caller_policy": self.caller_policy(),
            "role_policy": self.role_policy(),
            "notes": list(self.notes),
        }


def make_plan(
    model: str,
    config: DeployConfig,
    *,
    region: str,
    drafter: Mapping[str, Any],
    options: VllmOptions,
    now: datetime,
    tokens_per_second: float | None = None,
) -> DeployPlan:
    """`drafter` holds the keys of a speculative_config that were asked for."""
    # 1. What vLLM is told: as for `peagle serve`.
    check_region(region)
    released = find_released(model)
    server = plan_server(model, drafter=drafter, options=options, fetch=True)
    name = _checked_name(config.name or _default_name(model))

    # 2. Where it runs.
    memory = memory_of(server, released, config.weights_gb)
    instance_type, parallel = choose_instance(
        config.instance_type, server, memory, skip_check=config.skip_memory_check
    )

    # 3. What lies on this machine goes to S3, and from there to where the container finds it.
    uploads = plan_uploads(server)
    s3_uri = _s3_uri(name, region, config.bucket, uploads)
    server = _in_container(server, uploads, parallel)

    return DeployPlan(
        name=name,
        region=region,
        model=model,
        jumpstart_id=released.jumpstart_id if released else None,
        drafting=_in_words(server),
        image=config.image or default_image(region),
        role=config.role,
        environment=environment(server.target.reference, server.arguments),
        secrets=("HF_TOKEN",) if config.pass_hf_token else (),
        instance_type=instance_type,
        instance_count=config.instance_count,
        inference_ami_version=config.inference_ami_version,
        startup_timeout=config.startup_timeout,
        autoscaling=_autoscaling(config),
        end=_end(now, config.max_hours),
        uploads=uploads,
        s3_uri=s3_uri,
        memory=memory,
        dollars_per_hour=config.dollars_per_hour,
        tokens_per_second=tokens_per_second,
        notes=tuple(_notes(config, server, memory, uploads)),
    )


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name!r} is not a name that SageMaker takes",
            hint="use up to 63 letters, digits and hyphens between them",
        )
    return name


def _default_name(model: str) -> str:
    released = find_released(model)
    last = (released.name if released else model).rstrip("/").split("/")[-1]
    return f"peagle-{re.sub('[^a-zA-Z0-9]+', '-', last).strip('-').lower()}"[:63].strip("-")


def _s3_uri(name: str, region: str, bucket: str | None, uploads: tuple[Upload, ...]) -> str | None:
    if not uploads:
        return None
    if bucket is None:
        raise ConfigError(
            f"{uploads[0].folder} lies on this machine and has to go to S3",
            hint="give --bucket BUCKET, one in the endpoint's region",
        )
    identity = hashlib.sha256("\0".join(upload.identity for upload in uploads).encode())
    return f"s3://{bucket_name(bucket, region)}/peagle/{name}/{identity.hexdigest()[:16]}/"


def _in_container(server: VllmServer, uploads: tuple[Upload, ...], parallel: int) -> VllmServer:
    """The same server with the container's paths for what was uploaded."""
    parts = {upload.part for upload in uploads}
    target, drafting = server.target, server.drafting
    if TARGET in parts:
        served = target.served_name or target.given.rstrip("/").split("/")[-1]
        target = replace(target, reference=f"{MOUNT}/{TARGET}", served_name=served)
    if drafting and HEAD in parts:
        drafting = replace(drafting, config={**drafting.config, "model": f"{MOUNT}/{HEAD}"})
    options = replace(server.options, tensor_parallel_size=parallel)
    length = text_config(server).get("max_position_embeddings")
    if options.max_model_len is None and length is not None:
        options = replace(options, max_model_len=int(length))
    return VllmServer(target=target, drafting=drafting, options=options)


def _in_words(server: VllmServer) -> str:
    if server.drafting is None:
        return "none"
    config = server.drafting.config
    method = "p-eagle" if config.get("parallel_drafting") else config["method"]
    return f"{method} K={config['num_speculative_tokens']}"


def _autoscaling(config: DeployConfig) -> Autoscaling | None:
    if config.autoscale is None:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", config.autoscale)
    low, high = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= low <= config.instance_count <= high:
        raise ConfigError(
            f"--autoscale {config.autoscale} is not MIN:MAX with --instance-count "
            f"{config.instance_count} between them",
            hint="write --autoscale 1:4",
        )
    return Autoscaling(low, high, config.autoscale_target)


def _end(now: datetime, max_hours: float | None) -> str | None:
    if max_hours is None:
        return None
    return (now + timedelta(hours=max_hours)).isoformat(timespec="seconds")


def _notes(
    config: DeployConfig, server: VllmServer, memory: Memory, uploads: tuple[Upload, ...]
) -> Iterator[str]:
    yield from server.drafting.notes if server.drafting else ()
    if config.role is None:
        yield "the execution role is not known: `up` needs --role ARN"
    parts = {"target": memory.target_gb, "head": memory.head_gb, "cache": memory.cache_gb}
    unknown = [part for part, size in parts.items() if size is None]
    if unknown and not config.skip_memory_check:
        yield f"not checked against the instance's memory, size unknown: {', '.join(unknown)}"
    for upload in uploads:
        if upload.export is not None and not upload.export.done:
            yield f"`up` exports the head first: {upload.export.command}"


def _tag_value(value: str) -> str:
    return re.sub(r"[^\w .:/=+@-]", "_", value)[:256]
