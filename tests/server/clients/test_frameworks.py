"""Frameworks that people put before a server, as they are installed: each does what its users do with it.

Their packages are not in the usual environment; a test is skipped where its own is missing. docs/clients.md has the
commands.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel, create_model

from tests.server.live import Served
from tests.server.sdk import MODEL, RESULT, SUM, TOLD, TOOLS, prompt_ids

pytestmark = pytest.mark.slow
QUESTION = SUM[0]["content"]
WEATHER = "What is the weather in Paris?"
TEXT = "Extract name and age as JSON: Anna is 31 years old and works as a baker in Paris."
PROMPT_TOKENS = len(prompt_ids(SUM))


class Person(BaseModel):
    """Of whom the text speaks."""

    name: str
    age: int


ANNA = Person(name="Anna", age=31)


def _is_of_text(found: Any, learned: bool) -> bool:
    """Whether that is the person of the text; in a call that the small model has not learned, whether it is one at all:
    it makes up whom it likes."""
    return isinstance(found.age, int) and bool(found.name) and (not learned or found.model_dump() == ANNA.model_dump())


class Place(BaseModel):
    """Where the weather is asked for."""

    city: str


def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    assert city == "Paris"
    return RESULT


# --- langchain-openai


@pytest.fixture
def langchain(served: Served) -> Any:
    package = pytest.importorskip("langchain_openai")
    url = f"{served.url}/v1"
    return package.ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=0, stream_usage=True)


def test_langchain_texts(langchain: Any) -> None:
    answer = langchain.invoke(QUESTION)
    assert "19" in answer.content
    assert answer.usage_metadata["input_tokens"] == PROMPT_TOKENS
    chunks = list(langchain.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage["total_tokens"] == answer.usage_metadata["total_tokens"]
    assert [a.content for a in langchain.batch([QUESTION, QUESTION])] == [answer.content] * 2


def test_langchain_tools(langchain: Any) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    weather = tool(get_weather)
    asked = HumanMessage(WEATHER)
    able = langchain.bind_tools([weather])
    called = able.invoke([asked])
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("get_weather", {"city": "Paris"})]
    result = weather.invoke(called.tool_calls[0])
    assert able.invoke([asked, called, result]).content == TOLD
    streamed = None
    for chunk in able.stream([asked]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == {"city": "Paris"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(method: str, langchain: Any) -> None:
    found = langchain.with_structured_output(Person, method=method).invoke(TEXT)
    assert _is_of_text(found, learned=method == "json_schema")


# --- pydantic-ai


@pytest.fixture
def pydantic_ai(served: Served) -> Any:
    """An agent's class, bound to the model."""
    agent = pytest.importorskip("pydantic_ai").Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{served.url}/v1", api_key="none"))
    return lambda **options: agent(model, model_settings={"temperature": 0}, **options)


def test_pydantic_ai_texts(pydantic_ai: Any) -> None:
    result = pydantic_ai().run_sync(QUESTION)
    assert "19" in result.output
    assert result.usage.input_tokens == PROMPT_TOKENS
    with pydantic_ai().run_stream_sync(QUESTION) as stream:
        assert "".join(stream.stream_text(delta=True)) == result.output


def test_pydantic_ai_tools(pydantic_ai: Any) -> None:
    assert pydantic_ai(tools=[get_weather]).run_sync(WEATHER).output == TOLD


def test_pydantic_ai_structured_output(pydantic_ai: Any) -> None:
    from pydantic_ai import NativeOutput, ToolOutput

    assert pydantic_ai(output_type=NativeOutput(Person)).run_sync(TEXT).output == ANNA
    # As a call that must be made: one that the model has learned to make.
    asked = ToolOutput(Place, name="get_weather", description="Get the current weather of a city.")
    assert pydantic_ai(output_type=asked).run_sync(WEATHER).output == Place(city="Paris")


# --- instructor


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(mode: str, served: Served) -> None:
    instructor: Any = pytest.importorskip("instructor")
    with OpenAI(base_url=f"{served.url}/v1", api_key="none") as openai:
        client = instructor.from_openai(openai, mode=instructor.Mode[mode])
        call = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "temperature": 0}
        found, answer = client.create_with_completion(response_model=Person, max_retries=0, **call)
        assert _is_of_text(found, learned=mode == "JSON_SCHEMA")
        assert answer.usage.completion_tokens > 1
        (*_, last) = client.create_partial(response_model=Person, max_retries=0, **call)
        assert _is_of_text(last, learned=mode == "JSON_SCHEMA")


# --- litellm


@pytest.fixture
def litellm(served: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its call, bound to the model."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it loads prices from the network
    package = pytest.importorskip("litellm")
    options = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{served.url}/v1", "temperature": 0}
    return lambda messages, **more: package.completion(messages=messages, **options, **more)


def test_litellm_texts(litellm: Any) -> None:
    answer = litellm(SUM)
    assert "19" in answer.choices[0].message.content
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    chunks = list(litellm(SUM, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens == PROMPT_TOKENS


def test_litellm_tools(litellm: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    message = litellm(messages, tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    assert litellm(messages, tools=TOOLS).choices[0].message.content == TOLD


def test_litellm_structured_output(litellm: Any) -> None:
    answer = litellm([{"role": "user", "content": TEXT}], response_format=Person)
    assert Person.model_validate_json(answer.choices[0].message.content) == ANNA


# --- llama-index


@pytest.fixture
def llama_index(served: Served) -> Any:
    package = pytest.importorskip("llama_index.llms.openai_like")
    return package.OpenAILike(
        model=MODEL,
        api_base=f"{served.url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
    )


def test_llama_index_texts(llama_index: Any) -> None:
    answer = llama_index.complete(QUESTION)
    assert "19" in answer.text
    assert answer.additional_kwargs["prompt_tokens"] == PROMPT_TOKENS
    assert "".join(part.delta or "" for part in llama_index.stream_complete(QUESTION)) == answer.text


def test_llama_index_tools(llama_index: Any) -> None:
    from llama_index.core.tools import FunctionTool

    answer = llama_index.predict_and_call([FunctionTool.from_defaults(get_weather)], WEATHER)
    assert [(s.tool_name, s.raw_input["kwargs"]) for s in answer.sources] == [("get_weather", {"city": "Paris"})]


def test_llama_index_structured_output(llama_index: Any) -> None:
    """By a call that must be made, which is its default; and as JSON that has a schema."""
    from llama_index.core.prompts import PromptTemplate

    asked = create_model("get_weather", __doc__="Get the current weather of a city.", __base__=Place)
    prompt = PromptTemplate(WEATHER)
    assert llama_index.structured_predict(asked, prompt) == asked(city="Paris")
    assert llama_index.as_structured_llm(asked).complete(WEATHER).raw == asked(city="Paris")
    assert [*llama_index.stream_structured_predict(asked, prompt)][-1].model_dump() == {"city": "Paris"}
    assert llama_index.structured_predict(Person, PromptTemplate(TEXT)).age == ANNA.age  # a call it has not learned
    llama_index.should_use_structured_outputs = True
    assert llama_index.structured_predict(Person, PromptTemplate(TEXT)) == ANNA
