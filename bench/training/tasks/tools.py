"""The functions the embedded model learns to call: their schemas, how people ask for them, and how a result is told."""

from dataclasses import dataclass
from random import Random
from typing import Any

from bench.training.tasks import vocabulary
from bench.training.tasks.base import Schema, words


def schema(name: str, description: str, /, **parameters: str) -> Schema:
    """An OpenAI function schema, every parameter required; `parameters` maps a parameter's name to its JSON type."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(parameters)},
        },
    }


@dataclass(frozen=True)
class Tool:
    """A function and how it is asked for. `{x}` in a question or in `answer` is an argument or a result field."""

    schema: Schema
    questions: tuple[str, ...]
    result: dict[str, str]
    """Result field -> what it is made of: `number`, `town`, `sky`, `item`."""
    answer: str

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    @property
    def parameters(self) -> list[str]:
        return list(self.schema["function"]["parameters"]["properties"])


TOOLS = (
    Tool(
        schema("get_weather", "Get the current weather of a city.", city="string"),
        (
            "What is the weather in {city}?",
            "What's the weather like in {city}?",
            "How is the weather in {city}?",
            "How is the weather in {city} today?",
            "Tell me the weather in {city}.",
            "What is the weather like in {city} right now?",
            "Weather in {city}?",
            "Check the weather in {city}.",
        ),
        {"sky": "sky", "temperature": "number"},
        "It is {sky} in {city}, {temperature} degrees.",
    ),
    Tool(
        schema("get_time", "Get the current time in a city.", city="string"),
        (
            "What time is it in {city}?",
            "What is the time in {city}?",
            "Tell me the time in {city}.",
            "What is the current time in {city}?",
            "Time in {city}?",
            "How late is it in {city}?",
        ),
        {"hour": "number"},
        "It is {hour} o'clock in {city}.",
    ),
    Tool(
        schema("get_price", "Get the price of an item in dollars.", item="string"),
        (
            "How much does a {item} cost?",
            "What is the price of a {item}?",
            "What does a {item} cost?",
            "Look up the price of a {item}.",
            "Tell me the price of a {item}.",
        ),
        {"price": "number"},
        "A {item} costs {price} dollars.",
    ),
    Tool(
        schema("book_table", "Book a table in a restaurant.", city="string", people="integer"),
        (
            "Book a table for {people} people in {city}.",
            "Reserve a table in {city} for {people} people.",
            "I need a table for {people} people in {city}.",
            "Please book a table in {city} for {people}.",
            "Can you reserve a table for {people} people in {city}?",
        ),
        {"number": "number"},
        "I have booked table {number} for {people} people in {city}.",
    ),
    Tool(
        schema("send_message", "Send a text message to a person.", to="string", text="string"),
        (
            "Send a message to {to}: {text}",
            'Send "{text}" to {to}.',
            'Tell {to} "{text}".',
            'Write a message to {to} that says "{text}".',
            'Text {to} "{text}".',
        ),
        {"status": "sky"},
        "I have sent the message to {to}.",
    ),
    Tool(
        schema("set_timer", "Set a timer.", minutes="integer"),
        (
            "Set a timer for {minutes} minutes.",
            "Start a timer of {minutes} minutes.",
            "Wake me in {minutes} minutes.",
            "I need a timer for {minutes} minutes.",
            "Timer for {minutes} minutes, please.",
        ),
        {"number": "number"},
        "The timer is set for {minutes} minutes.",
    ),
    Tool(
        schema("find_route", "Find a route between two cities.", start="string", end="string"),
        (
            "How do I get from {start} to {end}?",
            "Find a route from {start} to {end}.",
            "Show me the way from {start} to {end}.",
            "What is the best route from {start} to {end}?",
            "I want to travel from {start} to {end}.",
        ),
        {"hours": "number"},
        "The way from {start} to {end} takes {hours} hours.",
    ),
    Tool(
        schema("turn_on_light", "Turn on the light in a room.", room="string"),
        (
            "Turn on the light in the {room}.",
            "Switch on the light in the {room}.",
            "It is dark in the {room}.",
            "I need light in the {room}.",
            "Light on in the {room}, please.",
        ),
        {"number": "number"},
        "The light in the {room} is on.",
    ),
)
ROOMS = words("kitchen bedroom bathroom cellar garage office hall attic")
SKIES = words("sunny cloudy rainy windy snowy foggy")
MESSAGES = (
    "I am late",
    "dinner is ready",
    "call me",
    "see you soon",
    "the meeting is at noon",
    "happy birthday",
    "good luck",
    "I am at home",
    "please bring bread",
    "the train is late",
)
VERBS = words("get find search list update delete create open check read")
NOUNS = words("order user file recipe hotel flight invoice song movie report ticket address event account product")
FIELDS = words("id name query title code date key label topic tag")


def arguments(rng: Random, tool: Tool) -> dict[str, Any]:
    """Random arguments for a tool, of the kinds its questions speak of."""
    start, end = rng.sample(vocabulary.TOWNS, 2)
    values = {
        "city": start, "start": start, "end": end, "item": rng.choice(vocabulary.ITEMS), "people": rng.randint(2, 20),
        "to": rng.choice(vocabulary.NAMES), "text": rng.choice(MESSAGES), "minutes": rng.randint(1, 90),
        "room": rng.choice(ROOMS),
    }  # fmt: skip
    return {name: values[name] for name in tool.parameters}
