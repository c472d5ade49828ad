"""Endpoints on Amazon SageMaker: planned without credentials, made, watched and removed.

config       what a user may ask for
plan         what will be made, decided once: all requests, templates and texts come from it
container    vLLM's container: its image, and vLLM's arguments as its environment
instances    instance types, and whether a model and its head fit
policies     what the caller and the endpoint's role must be allowed
templates    the plan for Terraform and CloudFormation; the reaper as a scheduled Lambda function
aws          clients of a region, and AWS' errors as one line with a hint
uploads      folders of this machine -> S3
endpoints    up, down, status and logs
reaper       which endpoints are due, and what is deleted of them
invoke       requests to an endpoint, signed; answers at once or as a stream
"""
