"""vLLM's names in one room.

names: keywords of LLM and EngineArgs, fields of SamplingParams.
server_names: flags of its server.
unserved: its routes that are not served here.
flags: command lines with these names.
parser: the same names in a script's own command line.
view: the settings of an engine under these names.
kv_transfer: its object of this name, for engines that exchange blocks.
table: rows of docs/compatibility.md.

Two parts of docs/compatibility.md are made elsewhere, of live objects: by `graphllm.cli.compatibility`, of the methods
of `LLM`, and by `graphllm.server.compatibility`, of bodies of requests.
"""
