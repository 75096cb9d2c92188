"""`python -m graphllm.cli` is the graphllm command."""

from graphllm.cli import command

command()
