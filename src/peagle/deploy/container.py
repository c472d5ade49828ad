"""vLLM's container for SageMaker: its image, and vLLM's arguments as its environment.

The container turns `SM_VLLM_MAX_MODEL_LEN=4096` into `--max-model-len 4096`. An empty value gives
a flag alone, in every version; older ones would make `--flag true` of `true`, which vLLM refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from peagle.errors import ConfigError

PREFIX = "SM_VLLM_"
REPOSITORY = "vllm:server-sagemaker-cuda-v2.4"  # vLLM 0.27.1, CUDA 13
AMI = "al2023-ami-sagemaker-inference-gpu-4-1"  # NVIDIA driver 580: what CUDA 13 needs
MOUNT = "/opt/ml/model"  # where SageMaker puts files from S3
MAX_VALUE = 1024  # characters of a variable, by SageMaker's API
# Accounts that hold the AWS Deep Learning Containers; most regions share the first.
ACCOUNT = "763104351884"
ACCOUNTS = {
    "af-south-1": "626614931356",
    "ap-east-1": "871362719292",
    "ap-east-2": "975050140332",
    "ap-northeast-3": "364406365360",
    "ap-south-2": "772153158452",
    "ap-southeast-3": "907027046896",
    "ap-southeast-4": "457447274322",
    "ap-southeast-5": "550225433462",
    "ap-southeast-6": "633930458069",
    "ap-southeast-7": "590183813437",
    "ca-west-1": "204538143572",
    "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807",
    "eu-central-2": "380420809688",
    "eu-south-1": "692866216735",
    "eu-south-2": "503227376785",
    "il-central-1": "780543022126",
    "me-central-1": "914824155844",
    "me-south-1": "217643126080",
    "mx-central-1": "637423239942",
    "us-gov-east-1": "446045086412",
    "us-gov-west-1": "442386744353",
}
OTHER_PARTITIONS = ("us-iso", "eu-iso", "eusc-")
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")


def check_region(region: str) -> str:
    if not _REGION.fullmatch(region):
        raise ConfigError(f"{region!r} is not an AWS region", hint="write one like us-east-1")
    return region


def default_image(region: str) -> str:
    if region.startswith(OTHER_PARTITIONS):
        raise ConfigError(
            f"which registry holds the vLLM container for {region} is not known here",
            hint="give --image",
        )
    ending = ".cn" if region.startswith("cn-") else ""
    account = ACCOUNTS.get(region, ACCOUNT)
    return f"{account}.dkr.ecr.{region}.amazonaws.com{ending}/{REPOSITORY}"


def environment(model: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """What the container reads to start `vllm serve model` with these arguments."""
    variables = {f"{PREFIX}MODEL": model}
    for name, value in arguments.items():
        if isinstance(value, bool):
            variables[PREFIX + ("" if value else "NO_") + name.upper()] = ""
        else:
            variables[PREFIX + name.upper()] = str(value)
    for name, value in variables.items():
        if len(value) > MAX_VALUE:
            raise ConfigError(
                f"{name} has {len(value)} characters, and SageMaker takes {MAX_VALUE}",
                hint="leave keys out of --speculative-config",
            )
    return variables
