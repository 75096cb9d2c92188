"""Tool calls."""

from random import Random
from typing import Any

from bench.training.tasks import tools, vocabulary
from bench.training.tasks.base import TASKS, Sample, a_or_an, ask, dumps, same_calls, sentence, task


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": {dumps(name)}, "arguments": {dumps(arguments)}}}\n</tool_call>'


def _with_others(rng: Random, chosen: tools.Tool) -> list[tools.Schema]:
    """The tool among up to three others, in any order."""
    others = [tool for tool in tools.TOOLS if tool is not chosen]
    schemas = [chosen.schema, *(tool.schema for tool in rng.sample(others, rng.choice((0, 0, 1, 2, 3))))]
    rng.shuffle(schemas)
    return schemas


@task(2.5)
def call_tool(rng: Random) -> Sample:
    tool = rng.choice(tools.TOOLS)
    arguments = tools.arguments(rng, tool)
    question = a_or_an(rng.choice(tool.questions).format(**arguments))
    sample = ask(rng, question, tool_call(tool.name, arguments), f"{tool.name} {dumps(arguments)}", same_calls)
    sample.tools = _with_others(rng, tool)
    return sample


@task(0.7)
def call_tool_twice(rng: Random) -> Sample:
    tool = rng.choice(tools.TOOLS[:2])
    first, second = rng.sample(vocabulary.TOWNS, 2)
    what = "weather" if tool.name == "get_weather" else "time"
    question = rng.choice(
        ("What is the {} in {} and in {}?", "Tell me the {} in {} and {}.", "The {} in {} and {}, please.")
    )
    answer = "\n".join(tool_call(tool.name, {"city": city}) for city in (first, second))
    sample = ask(rng, question.format(what, first, second), answer, check=same_calls)
    sample.tools = _with_others(rng, tool)
    return sample


def _invented_tool(rng: Random) -> tuple[str, str, dict[str, str]]:
    """Verb, noun and parameters, each parameter with its JSON type."""
    fields = rng.sample(tools.FIELDS, rng.choice((1, 1, 2)))
    return rng.choice(tools.VERBS), rng.choice(tools.NOUNS), {f: rng.choice(("string", "integer")) for f in fields}


@task(1.5)
def call_unseen_tool(rng: Random) -> Sample:
    """A function with an invented name: the model has to read the schema."""
    verb, noun, fields = _invented_tool(rng)
    arguments: dict[str, Any] = {
        field: rng.randint(1, 999) if kind == "integer" else rng.choice(vocabulary.WORDS)
        for field, kind in fields.items()
    }
    with_what = " and ".join(f"{field} {value}" for field, value in arguments.items())
    question = rng.choice(
        (
            f"{verb.capitalize()} the {noun} with {with_what}.",
            f"Please {verb} the {noun} with {with_what}.",
            f"Call {verb}_{noun} with {with_what}.",
        )
    )
    answer = tool_call(f"{verb}_{noun}", arguments)
    sample = ask(rng, question, answer, f"{verb} {noun} {with_what}", same_calls)
    sample.tools = [_invented_schema(verb, noun, fields)]
    other_verb, other_noun, other_fields = _invented_tool(rng)
    if (verb, noun) != (other_verb, other_noun) and rng.random() < 0.5:
        sample.tools.append(_invented_schema(other_verb, other_noun, other_fields))
        rng.shuffle(sample.tools)
    return sample


def _invented_schema(verb: str, noun: str, fields: dict[str, str]) -> tools.Schema:
    return tools.schema(f"{verb}_{noun}", sentence(f"{verb} a {noun}."), **fields)


@task(1.2)
def use_tool_result(rng: Random) -> Sample:
    tool = rng.choice(tools.TOOLS)
    arguments = tools.arguments(rng, tool)
    values = {"number": rng.randint(1, 30), "sky": rng.choice(tools.SKIES)}
    result = {field: values[kind] for field, kind in tool.result.items()}
    if tool.name == "send_message":
        result = {"status": "sent"}
    sample = ask(
        rng,
        a_or_an(rng.choice(tool.questions).format(**arguments)),
        a_or_an(tool.answer.format(**arguments, **result)),
        f"{tool.name} {dumps(arguments)} {dumps(result)}",
    )
    call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
    sample.messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": dumps(result)},
    ]
    sample.tools = _with_others(rng, tool)
    return sample


@task(1)
def leave_tools_alone(rng: Random) -> Sample:
    """Tools are offered and the question needs none."""
    sample = TASKS[rng.choice(("add", "subtract", "capital", "opposite", "reverse_word", "talk", "copy"))].make(rng)
    sample.tools = _with_others(rng, rng.choice(tools.TOOLS))
    return sample
