"""`peagle deploy sagemaker`: an endpoint on Amazon SageMaker, and nothing left running."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from peagle.bench.analysis.tune import Advice, peagle_config, tune, vllm_config
from peagle.bench.results.document import load_results
from peagle.cli import render
from peagle.cli.flags import Json, System, expand_flags
from peagle.cli.flags.deploy import DeployFlags
from peagle.cli.flags.drafter import DrafterFlags
from peagle.cli.flags.vllm import VllmFlags
from peagle.errors import ConfigError, DeployError, PeagleError

if TYPE_CHECKING:
    from peagle.deploy.endpoints import EndpointStatus
    from peagle.deploy.invoke import EndpointRuntime
    from peagle.deploy.plan import DeployPlan

_Done = TypeVar("_Done")
STATUS_COLUMNS = (
    *("endpoint", "region", "status", "serves", "instances"),
    *("hours", "$/hour", "$ so far", "end (UTC)"),
)
CHAT = "/v1/chat/completions"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LEAST_IDLE = timedelta(minutes=5)  # CloudWatch hears of invocations some minutes later

app = typer.Typer(help="Deploy a model with its drafter, and remove it again.")
sagemaker = typer.Typer(help="Amazon SageMaker, with AWS' vLLM container.")
app.add_typer(sagemaker, name="sagemaker")

DeployedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face id, a folder, smollm2-135m, or a model of the P-EAGLE posts "
        "(gpt-oss-20b ...: see `peagle heads`) by its name or JumpStart id.",
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The endpoint's name.")]
Region = Annotated[
    str | None, typer.Option(help="AWS region; default: AWS_REGION or that of the profile.")
]
Regions = Annotated[
    str | None, typer.Option(help="AWS regions, with commas; default: AWS_REGION or the profile's.")
]
Tuned = Annotated[
    Path | None,
    typer.Option(help="An --out of peagle bench: method and K as `peagle tune` advises."),
]
TunedLoad = Annotated[
    str | None, typer.Option(metavar="C", help="The load of --tuned to advise for; default: all.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


@sagemaker.command("plan")
@expand_flags
def plan_command(
    model: DeployedModel,
    deploy: DeployFlags,
    drafter: DrafterFlags,
    vllm: VllmFlags,
    region: Region = None,
    tuned: Tuned = None,
    tuned_concurrency: TunedLoad = None,
    as_terraform: Annotated[
        bool, typer.Option("--terraform", help="Print it for Terraform, as a .tf.json file.")
    ] = False,
    as_cloudformation: Annotated[
        bool, typer.Option("--cloudformation", help="Print it as a CloudFormation template.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what `up` would make, what it needs and what it costs; asks AWS nothing."""
    if as_terraform + as_cloudformation + as_json > 1:
        raise ConfigError("several forms of a plan are asked for", hint="choose one")
    (planned,) = _plans(model, deploy, drafter, vllm, _one(region), tuned, tuned_concurrency)
    for text in planned.notes:
        render.note(f"note: {text}")
    if as_json:
        render.print_json(planned.to_json())
    elif as_terraform or as_cloudformation:
        from peagle.deploy.templates import cloudformation, terraform

        template = terraform(planned) if as_terraform else cloudformation(planned)
        render.write(json.dumps(template, indent=2) + "\n")
        _note_uploads(planned)
    else:
        render.write("".join(f"{line}\n" for line in _plan_lines(planned)))


@sagemaker.command("up")
@expand_flags
def up_command(
    model: DeployedModel,
    deploy: DeployFlags,
    drafter: DrafterFlags,
    vllm: VllmFlags,
    region: Regions = None,
    tuned: Tuned = None,
    tuned_concurrency: TunedLoad = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make the endpoint and wait until it answers; what fails is removed again."""
    from peagle.deploy import endpoints
    from peagle.deploy.aws import Aws, find_regions

    regions = find_regions(region)
    plans = _plans(model, deploy, drafter, vllm, regions, tuned, tuned_concurrency)
    for text in plans[0].notes:
        render.note(f"note: {text}")
    endpoints.check_ready(plans[0])
    for planned in plans:
        aws = Aws(planned.region)
        if dry_run:
            _show_missing(planned, endpoints.check_same_plan(aws, planned))
            continue
        try:
            endpoints.up(aws, planned, render.note)
        except KeyboardInterrupt:
            render.note(
                f"interrupted: {planned.name} in {planned.region} may be starting and cost money; "
                f"run `up` again to go on, or `{_down(planned)}`"
            )
            raise
        _note_in_service(planned)
    if as_json:
        found = [{"name": p.name, "region": p.region, "plan": p.digest} for p in plans]
        render.print_json({"endpoints": found, "dry_run": dry_run})


@sagemaker.command("status")
def status_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Default: all that peagle made.")
    ] = None,
    region: Regions = None,
    dollars_per_hour: Annotated[
        float | None, typer.Option(help="Price of one instance; default: that given to `up`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show endpoints, and what each has cost so far."""
    from peagle.deploy import endpoints
    from peagle.deploy.aws import Aws, find_regions

    now, regions = datetime.now(UTC), find_regions(region)
    found = [
        one
        for place in regions
        for one in endpoints.status(Aws(place), name, now=now, dollars_per_hour=dollars_per_hour)
    ]
    file = sys.stderr if as_json else sys.stdout
    if found:
        rows = [_status_row(one) for one in found]
        render.print_table("Endpoints", STATUS_COLUMNS, rows, file=file)
    else:
        render.note(f"no endpoint {name or 'of peagle'} in {', '.join(regions)}")
    for one in found:
        if one.failure:
            file.write(f"{one.name}: {' '.join(one.failure.split())}\n")
    if as_json:
        render.print_json({"endpoints": [_status_document(one) for one in found]})


@sagemaker.command("invoke")
def invoke_command(
    name: Name,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the user says.")],
    region: Region = None,
    system: System = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    stream: Annotated[bool, typer.Option(help="Print the answer as it comes.")] = True,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Ask an endpoint."""
    from peagle.deploy.aws import hint_of
    from peagle.deploy.invoke import EndpointRuntime
    from peagle.http import ServerError

    turns = [{"role": "user", "content": prompt}]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    body = {"messages": turns, "max_tokens": max_tokens, "temperature": temperature}
    (place,) = _one(region)
    if dry_run:
        render.print_json({"endpoint": name, "region": place, "body": body | {"stream": stream}})
        return
    runtime = EndpointRuntime(name, place)
    try:
        if stream and not as_json:
            _print_stream(runtime, body)
            return
        document = json.loads(runtime.post(CHAT, body))
    except ServerError as error:
        code = re.search(r"HTTP \d+: (\w+)", str(error))
        hint = hint_of(code[1]) if code else None
        hint = hint or f"see `peagle deploy sagemaker status {name}` and `logs {name}`"
        raise DeployError(f"{name} in {place}: {error}", hint=hint) from None
    if as_json:
        render.print_json(document)
    else:
        render.write(f"{document['choices'][0]['message']['content'] or ''}\n")


@sagemaker.command("logs")
def logs_command(
    name: Name,
    region: Region = None,
    lines: Annotated[int, typer.Option(help="How many, the newest.", min=1, max=10_000)] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with those that come, until it is deleted.")
    ] = False,
) -> None:
    """Print the container's last log lines."""
    from peagle.deploy import endpoints
    from peagle.deploy.aws import Aws

    (place,) = _one(region)
    read, num_shown = endpoints.follow_log if follow else endpoints.log_lines, 0
    for line in read(Aws(place), name, lines):
        render.write(f"{line}\n")
        num_shown += 1
    if not num_shown:
        render.note(f"no log of {name} in {place}: no container has started yet")


@sagemaker.command("down")
def down_command(
    name: Name,
    region: Regions = None,
    delete_files: Annotated[
        bool, typer.Option("--delete-files", help="Its files in S3, too.")
    ] = False,
    bucket: Annotated[
        str | None,
        typer.Option(help="With --delete-files: where they are, if no tag is left to say it."),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Delete the endpoint, its configuration and its model; harmless a second time."""
    from peagle.deploy import endpoints
    from peagle.deploy.aws import Aws, find_regions

    def down(place: str) -> list[str]:
        deleted = endpoints.down(
            Aws(place),
            name,
            render.note,
            delete_files=delete_files,
            bucket=bucket,
            dry_run=dry_run,
        )
        if not deleted:
            render.note(f"{place}: there is nothing of {name}")
        return deleted

    deleted, failures = _in_each(find_regions(region), down)
    if as_json:
        render.print_json({"name": name, "deleted": deleted, "dry_run": dry_run})
    _raise_first(failures)


@sagemaker.command("reap")
def reap_command(
    idle: Annotated[str, typer.Option(help="Without an invocation for so long: 60m, 2h.")] = "60m",
    region: Regions = None,
    lambda_template: Annotated[
        bool,
        typer.Option(
            "--lambda-template", help="Print a CloudFormation template that reaps on a schedule."
        ),
    ] = False,
    every: Annotated[str, typer.Option(help="The schedule of --lambda-template.")] = "15m",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Delete peagle's endpoints that are idle, or past the end that `up --max-hours` set."""
    from peagle.deploy.aws import find_regions

    window = parse_duration("--idle", idle)
    if window < LEAST_IDLE:
        raise ConfigError(f"--idle {idle} is too short", hint="use 5m or more")
    if lambda_template:
        from peagle.deploy.templates import reaper_template

        template = reaper_template(window, parse_duration("--every", every))
        render.write(json.dumps(template, indent=2) + "\n")
        return
    reaped: list[dict[str, Any]] = []
    _, failures = _in_each(
        find_regions(region), lambda place: _reap(place, window, dry_run, reaped)
    )
    if not reaped and not failures:
        render.note("no endpoint of peagle is idle or past its end")
    if as_json:
        render.print_json({"endpoints": reaped, "dry_run": dry_run})
    _raise_first(failures)


def _reap(region: str, idle: timedelta, dry_run: bool, reaped: list[dict[str, Any]]) -> None:
    """Adds what is due to `reaped`; raises the first refusal when all have been looked at."""
    from peagle.deploy.aws import Aws, aws_errors
    from peagle.deploy.reaper import reap

    aws, refused = Aws(region), None
    clients = (aws.sagemaker, aws.cloudwatch, aws.autoscaling)
    with aws_errors():
        for one in reap(*clients, idle=idle, now=datetime.now(UTC), dry_run=dry_run):
            done = "would delete" if dry_run else "deleted"
            done = done if one.deleted else "cannot delete" if one.error else "cannot delete yet"
            render.note(f"{region}: {done} {one.name}: {one.why}")
            found = {"name": one.name, "why": one.why, "deleted": one.deleted}
            reaped.append({"region": region, **found})
            refused = refused or one.error
        if refused is not None:
            raise refused


def _in_each(
    regions: list[str], do: Callable[[str], _Done]
) -> tuple[dict[str, _Done], list[PeagleError]]:
    """One region's failure must not leave the others' endpoints running."""
    done, failures = {}, []
    for region in regions:
        try:
            done[region] = do(region)
        except PeagleError as error:
            failures.append(error)
            if len(regions) > 1:
                render.note(f"{region}: {error.message}")
    return done, failures


def _raise_first(failures: list[PeagleError]) -> None:
    if failures:
        raise failures[0]


def parse_duration(flag: str, text: str) -> timedelta:
    found = re.fullmatch(r"(\d+)([smhd])", text)
    if found is None:
        raise ConfigError(f"{flag} {text!r} is not a duration", hint="write 90s, 60m, 2h or 1d")
    return timedelta(seconds=int(found[1]) * UNITS[found[2]])


def _one(region: str | None) -> list[str]:
    from peagle.deploy.aws import find_regions

    regions = find_regions(region)
    if len(regions) > 1:
        raise ConfigError("this takes one region", hint="give --region REGION")
    return regions


def _plans(
    model: str,
    deploy: DeployFlags,
    drafter: DrafterFlags,
    vllm: VllmFlags,
    regions: list[str],
    tuned: Path | None,
    load: str | None,
) -> list[DeployPlan]:
    """One for each region."""
    from peagle.deploy.plan import make_plan

    asked, otps = drafter.given(), None
    if load is not None and tuned is None:
        raise ConfigError("--tuned-concurrency has no effect here", hint="add --tuned DIR")
    if tuned is not None:
        advice = _advice(tuned, load, model)
        asked, otps = _advised(advice) | asked, advice.best.otps.value
    config, options, now = deploy.config(), vllm.options(), datetime.now(UTC)
    return [
        make_plan(
            model,
            config,
            region=region,
            drafter=asked,
            options=options,
            now=now,
            tokens_per_second=otps,
        )
        for region in regions
    ]


def _advice(path: Path, load: str | None, model: str) -> Advice:
    results = load_results(path)
    tuning = tune(results)
    if results.manifest.model != model:
        render.note(f"note: {path} was measured with {results.manifest.model}, not with {model}")
    if load is None:
        return tuning.overall
    found = next((advice for advice in tuning.by_load if advice.load == load), None)
    if found is None:
        loads = ", ".join(advice.load for advice in tuning.by_load)
        raise ConfigError(f"{path} has no load {load}", hint=f"it has {loads}")
    return found


def _advised(advice: Advice) -> dict[str, Any]:
    """The keys of a speculative_config; a head goes on under our names, which say its kind."""
    setting = advice.best.setting
    if advice.off:
        render.note(f"note: no speculation: {advice.why}")
        return {"method": "none"}
    config = vllm_config(setting)
    if config is None:
        raise ConfigError(
            f"{advice.best.name} is advised, and vLLM drafts chains of a fixed K alone",
            hint="measure such chains, too, or give --spec-tokens instead of --tuned",
        )
    return peagle_config(setting) or {} if setting.head else config


def _plan_lines(plan: DeployPlan) -> Iterator[str]:
    requests = plan.requests()
    container = requests["model"]["PrimaryContainer"]
    (variant,) = requests["endpoint_config"]["ProductionVariants"]
    known_as = f" (JumpStart: {plan.jumpstart_id})" if plan.jumpstart_id else ""
    yield f"{plan.model}{known_as} with {plan.drafting} in {plan.region}"
    yield f"model {plan.name}"
    yield f"  image        {container['Image']}"
    yield f"  role         {requests['model']['ExecutionRoleArn']}"
    if plan.s3_uri:
        parts = ", ".join(f"{upload.part} from {upload.folder}" for upload in plan.uploads)
        yield f"  files        {plan.s3_uri}: {parts}"
    for key, value in container["Environment"].items():
        yield f"  environment  {key}={value}"
    yield f"endpoint config {plan.name}"
    yield f"  instances    {plan.instance_count} x {plan.instance_type}"
    yield f"  memory       {_memory_line(plan)}"
    yield f"  startup      {variant['ContainerStartupHealthCheckTimeoutInSeconds']} s at most"
    if plan.autoscaling:
        scaled = plan.autoscaling
        yield (
            f"  autoscaling  {scaled.min_instances} to {scaled.max_instances} instances, "
            f"{scaled.target} requests at once each"
        )
    yield f"endpoint {plan.name}"
    for key, value in plan.tags.items():
        yield f"  tag          {key}={value}"
    yield f"price {_price_line(plan)}"
    for title, policy in (("caller", plan.caller_policy()), ("role", plan.role_policy())):
        yield f"IAM policy of the {title}"
        yield json.dumps(policy, indent=2)


def _memory_line(plan: DeployPlan) -> str:
    sizes = {
        "target": plan.memory.target_gb,
        "head": plan.memory.head_gb,
        "cache of one request": plan.memory.cache_gb,
    }
    return ", ".join(f"{k} {'?' if v is None else f'{v:.1f} GB'}" for k, v in sizes.items())


def _price_line(plan: DeployPlan) -> str:
    if plan.price_per_hour is None:
        return "not known: give --dollars-per-hour"
    line = f"${plan.price_per_hour:.2f} per hour"
    if plan.dollars_per_million_tokens is None:
        return line
    return (
        f"{line}, ${plan.dollars_per_million_tokens:.3f} per million output tokens at "
        f"{plan.tokens_per_second:.1f} tokens/s, as measured"
    )


def _note_uploads(plan: DeployPlan) -> None:
    """Templates make resources; files have to be there before."""
    for upload in plan.uploads:
        render.note(f"# first: aws s3 sync {upload.folder} {plan.s3_uri}{upload.part}/")


def _show_missing(plan: DeployPlan, there: dict[str, str]) -> None:
    for upload in plan.uploads:
        where = f"{plan.s3_uri}{upload.part}/"
        render.note(
            f"{plan.region}: would upload {upload.folder} to {where}, what is missing there"
        )
    for kind in plan.requests():
        done = "keep" if kind in there else "create"
        if there.get(kind) in ("Deleting", "Failed"):
            done = f"replace (it is {there[kind]})"
        render.note(f"{plan.region}: would {done} {kind.replace('_', ' ')} {plan.name}")


def _down(plan: DeployPlan) -> str:
    """The command that removes all that there may be."""
    command = f"peagle deploy sagemaker down {plan.name} --region {plan.region}"
    if plan.s3_uri is None:
        return command
    bucket = plan.s3_uri.removeprefix("s3://").partition("/")[0]
    return f"{command} --delete-files --bucket {bucket}"


def _note_in_service(plan: DeployPlan) -> None:
    render.note(f"in service: {plan.name} in {plan.region}")
    price = "" if plan.price_per_hour is None else f" ${plan.price_per_hour:.2f} per hour"
    until = f"{plan.end}, if `reap` is run" if plan.end else "it is deleted"
    down = f"peagle deploy sagemaker down {plan.name} --region {plan.region}"
    render.note(f"it costs money{price} until {until}: {down}")


def _status_row(one: EndpointStatus) -> list[str]:
    return [
        one.name,
        one.region,
        one.status,
        f"{one.model}, {one.drafting}",
        f"{one.instance_count} x {one.instance_type}",
        f"{one.hours:.1f}",
        "-" if one.dollars_per_hour is None else f"{one.dollars_per_hour:.2f}",
        "-" if one.dollars is None else f"{one.dollars:.2f}",
        one.end[:16].replace("T", " ") if one.end else "-",
    ]


def _status_document(one: EndpointStatus) -> dict[str, Any]:
    return asdict(one) | {"created": one.created.isoformat(), "dollars": one.dollars}


def _print_stream(runtime: EndpointRuntime, body: dict[str, Any]) -> None:
    for document in runtime.events(CHAT, body | {"stream": True}):
        for choice in document.get("choices", ()):
            render.write(choice.get("delta", {}).get("content") or "")
    render.write("\n")
